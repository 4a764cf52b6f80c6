"""The pages in a real browser: they fetch nothing, say what summary.json says, and can be read on a phone and in the dark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from browser import DESK, LAPTOP, OVERFLOW, PHONE, SCROLLED, check, chromium, opened
from made_results import verdict
from playwright.sync_api import Browser
from test_plan import lengths, observations
from test_plan import report as pilot_report
from test_plan import settings as plan_settings
from test_report import EVIL, HOSTILE, report

from eyas.plan import plan
from eyas.records import Outcome
from eyas.report.words import number, percent, visible

__all__ = ["chromium"]
pytestmark = pytest.mark.browser
LONG = "B4_mixture_of_thoughts"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a summary: three datasets of every length, with hostile text wherever text can be."""
    few = [
        verdict(f"k{n}", n * n * 9 + 5, reasons=(EVIL, "empty answer") if n % 5 == 0 else ())
        for n in range(1, 30)
    ]
    refused = Outcome(key="u", turn=0, sample=0, status="refused", reason=f"template says {HOSTILE}")
    root = tmp_path_factory.mktemp("run")
    cut = [verdict(f"k{n}", min(4096, 300 * n)) for n in range(1, 30)]
    datasets = {"A": (few, [refused]), LONG: ([verdict("x", 4000), verdict("y", 12)], ()), "C": (cut, ())}
    report(root, datasets, budget=20_000)
    return root / "out"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_the_report_can_be_read(chromium: Browser, made: Path, width: int, scheme: str) -> None:
    check(chromium, made / "report.html", width, scheme)


def test_numbers_in_the_page_are_those_of_summary_json(chromium: Browser, made: Path) -> None:
    summary: dict[str, Any] = json.loads((made / "summary.json").read_bytes())
    total = summary["total"]
    with opened(chromium, made / "report.html") as page:
        tiles = {
            "total-responses": number(total["responses"]),
            "total-accepted": number(total["accepted"]),
            "total-output-tokens": number(total["output_tokens"]),
            "total-accepted-tokens": number(total["accepted_tokens"]),
            "total-tokens-per-second": number(total["tokens_per_second"], 1),
        }
        assert {name: page.inner_text(f"#{name}") for name in tiles} == tiles
        rows = page.locator("table:has(#table-the-run-by-dataset) tbody tr")
        assert rows.count() == len(summary["datasets"]) == 3
        for row, (name, part) in zip(rows.all(), summary["datasets"].items(), strict=True):
            cells = row.locator("th, td").all_inner_texts()
            assert cells[:5] == [
                name,
                *(number(part[key]) for key in ("prompts", "responses", "accepted", "rejected")),
            ]
        used = page.locator("table:has(#table-budget-use) tbody tr").all()
        assert [row.locator("td").nth(2).inner_text() for row in used] == [
            percent(part["budget_use"]) for part in summary["datasets"].values()
        ]
        lead = page.inner_text(".lead")
        assert number(total["accepted_tokens"]) in lead and number(total["responses"]) in lead


def test_no_text_from_data_is_interpreted(chromium: Browser, made: Path) -> None:
    with opened(chromium, made / "report.html") as page:
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert page.locator("script, img, iframe, object, link, [onerror], [onload]").count() == 0
        shown = page.locator("#examples pre").first.evaluate("element => element.textContent")
        assert shown == visible(HOSTILE)
        assert page.locator("h1").inner_text() == EVIL


def test_no_table_scrolls_on_a_laptop(chromium: Browser, made: Path) -> None:
    with opened(chromium, made / "report.html", LAPTOP) as page:
        assert page.evaluate(SCROLLED) == []


def test_a_keyboard_reaches_and_scrolls_every_table(chromium: Browser, made: Path) -> None:
    with opened(chromium, made / "report.html", PHONE) as page:
        table = page.get_by_role("region", name="The run by dataset")
        for _ in range(40):
            page.keyboard.press("Tab")
            if table.evaluate("element => element === document.activeElement"):
                break
        assert table.evaluate("element => element === document.activeElement")
        assert table.evaluate("element => getComputedStyle(element).outlineStyle") == "solid", "focus is seen"
        page.keyboard.press("ArrowRight")
        page.wait_for_function(
            "element => element.scrollLeft > 0", arg=table.element_handle(), timeout=10_000
        )
        regions = page.get_by_role("region").all()
        scrollable = [one for one in regions if one.get_attribute("class") == "scroll"]
        assert scrollable and all(one.get_attribute("tabindex") == "0" for one in scrollable)
        assert len({one.get_attribute("aria-labelledby") for one in scrollable}) == len(scrollable)


def test_charts_follow_the_colour_scheme(chromium: Browser, made: Path) -> None:
    fills = set()
    for scheme in ("light", "dark"):
        with opened(chromium, made / "report.html", DESK, scheme) as page:
            bar = page.locator("figure svg:visible path[style*='--accepted']").first
            fills.add(bar.evaluate("element => getComputedStyle(element).fill"))
    assert len(fills) == 2 and not any("var" in fill for fill in fills)


def test_on_paper_it_is_light_and_whole(chromium: Browser, made: Path) -> None:
    """Also when the screen is dark; links between sections are of no use there, and no table is cut."""
    with opened(chromium, made / "report.html", 794, "dark") as page:
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not page.locator("nav").is_visible()
        assert page.locator("table:has(#table-tokens-per-response)").is_visible(), (
            "numbers are not folded away"
        )
        assert page.evaluate(OVERFLOW) == 0
        assert page.pdf(format="A4").startswith(b"%PDF")


def test_a_report_without_answers_or_of_a_part_is_whole_too(chromium: Browser, tmp_path: Path) -> None:
    refused = Outcome(key="u", turn=0, sample=0, status="refused", reason="too long")
    report(tmp_path, {"A": ([], [refused])})
    check(chromium, tmp_path / "out" / "report.html", PHONE, "light")


@pytest.mark.parametrize(
    ("width", "scheme"), [(PHONE, "light"), (PHONE, "dark"), (DESK, "light"), (DESK, "dark")]
)
def test_the_plan_can_be_read_and_says_what_plan_json_says(
    chromium: Browser, tmp_path: Path, width: int, scheme: str
) -> None:
    pilots = []
    seen = [
        msgspec.structs.replace(one, accepted=at % 5 > 0, truncated=at % 7 == 0)
        for at, one in enumerate(observations(lengths()))
    ]
    for name in ("a", LONG):
        pilots.append(tmp_path / f"{name}.pilot.json")
        pilots[-1].write_bytes(
            msgspec.json.encode(pilot_report([], 1_000_000, name, observations=seen, without_answer=9))
        )
    plan(plan_settings(1_000_000, "a", LONG, hidden_size=4096, gpus=8), pilots, tmp_path)
    path = tmp_path / "plan.html"
    check(chromium, path, width, scheme)
    if width == DESK:
        with opened(chromium, path, LAPTOP) as page:
            assert page.evaluate(SCROLLED) == []
    told = json.loads((tmp_path / "plan.json").read_bytes())["projection"]
    with opened(chromium, path, width, scheme) as page:
        hours = told["budgeted"]["total"]["hours"]["mean"]
        assert page.inner_text("#hours-with-budgets") == f"{hours:,.2f} h"
        assert page.inner_text("#output-tokens") == f"{told['full']['total']['output_tokens']['mean']:,.0f}"
        assert page.inner_text("#tokens-per-second") == f"{told['tokens_per_second']['mean']:,.1f}"
