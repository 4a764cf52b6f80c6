"""The page: the same numbers as summary.json, nothing interpreted as HTML, nothing fetched."""

import html
import json
import random
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise

import msgspec
import pytest
from made_results import stages, verdict, write_dataset, write_training_set
from test_audit import noisy, round_of

from eyas.audit import LEAST_ROUNDS
from eyas.config import StatsSettings
from eyas.digest import code_digests
from eyas.records import Outcome
from eyas.report import plots
from eyas.stats import stats
from eyas.summary import summarise

EVIL = "<script>alert(1)</script>"
HOSTILE = "</pre></script><img src=x onerror=alert(1)><svg/onload=alert(1)>&lt;b&gt; \u2028\u2029\x00\x1b[2J]]>\"'`{{7*7}}"
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Elements with their attributes, tables as rows of cell texts, and texts by id."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.tables, self.by_id, self.open = [], [], {}, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.elements.append((tag, attrs))
        if tag not in VOID:
            self.open.append((tag, attrs.get("id")))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if any(tag in ("td", "th") for tag, _ in self.open):
            self.tables[-1][-1][-1] += data
        for _, name in self.open:
            if name:
                self.by_id[name] = self.by_id.get(name, "") + data

    def table(self, head):
        """The first table whose second column is called `head`."""
        return next(rows for rows in self.tables if rows[0][1] == head)


def dataset_stats(folder):
    names = ("prompts.json", "outcomes.jsonl.zst", "verdicts.parquet", "train.parquet", "stats.json")
    return stats(StatsSettings(dataset=folder.name, samples=1), *(folder / name for name in names))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The page of a run of two datasets, and its summary."""
    root = tmp_path_factory.mktemp("run")
    few = [
        verdict("a", 7),
        verdict("b", 900, reasons=(EVIL,), marks=["rejected anyway"]),
        verdict("c", 1300, marks=[EVIL], truncated=True),
    ]
    unanswered = [
        Outcome(key="u", turn=0, sample=0, status="refused", reason=f"template says {EVIL}"),
        Outcome(key="v", turn=0, sample=0, status="failed", reason="timeout"),
    ]
    return report(root, {"A": (few, ()), "B": ([verdict("x", 4000)], unanswered)})


def report(root, datasets, budget=None):
    """The page and the summary of datasets given as verdicts and other outcomes."""
    for name, (verdicts, others) in datasets.items():
        folder = write_dataset(root / "results" / name, verdicts, others=tuple(others), said=(HOSTILE,) * 3)
        dataset_stats(folder)
    exports = write_training_set(root / "results")
    made = stages({name: {"budget_tokens": budget} for name in datasets}, model={"id": EVIL})
    code = json.loads(code_digests(made))
    summary = summarise(made.summary(), root / "results", exports, root / "none", {}, code, root / "out")
    return (root / "out" / "report.html").read_text(), summary


@pytest.fixture(scope="module")
def page(made):
    return Page(made[0])


def test_headline_numbers_are_those_of_the_summary(made, page):
    total = made[1].total
    assert page.by_id["total-responses"] == f"{total.responses:,}" == "4"
    assert page.by_id["total-accepted"] == f"{total.accepted:,}" == "3"
    assert page.by_id["total-output-tokens"] == f"{total.output_tokens:,}" == "6,207"
    assert page.by_id["total-accepted-tokens"] == f"{total.accepted_tokens:,}" == "5,307"
    assert page.by_id["total-tokens-per-second"] == f"{total.tokens_per_second:,.1f}"


def test_the_table_has_every_dataset_and_the_total(made, page):
    head, *rows = page.table("Prompts")
    assert [row[0] for row in rows] == ["A", "B", "total"]
    parts = [*made[1].datasets.values(), made[1].total]
    for row, part in zip(rows, parts, strict=True):
        cells = dict(zip(head, row, strict=True))
        assert cells["Responses"] == f"{part.responses:,}"
        assert cells["Accepted"] == f"{part.accepted:,}"
        assert cells["Tokens"] == f"{part.output_tokens:,}"
        assert cells["tok/s"] == f"{part.tokens_per_second:,.1f}"


def test_text_from_data_is_never_markup(made, page):
    text, _ = made
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 4
    assert page.by_id["rejected"] == "Rejected"
    assert page.table("Responses")[1][0] == EVIL
    assert page.table("Responses")[1][1] == "1"


def test_what_was_not_answered_is_told_by_reason(page):
    """Refused prompts and rejected answers are different things in different tables."""
    assert page.table("Outcome")[1:] == [
        [f"template says {EVIL}", "refused", "1", "16.7%", "B 1"],
        ["timeout", "failed", "1", "16.7%", "B 1"],
    ]
    head, *_, total = page.table("Planned")
    cells = dict(zip(head, total, strict=True))
    assert [cells[name] for name in ("Planned", "Answered", "Refused", "Failed")] == ["6", "4", "1", "1"]


def test_source_rows_that_were_skipped_are_told_by_reason(page):
    assert page.table("Rows") == [
        ["Dataset", "Rows", "Used", "Not taken", "Skipped", "Skipped for"],
        ["A", "6", "3", "1", "2", "2 × no user turn"],
        ["B", "6", "3", "1", "2", "2 × no user turn"],
        ["total", "12", "6", "2", "4", "4 × no user turn"],
    ]


def test_marks_are_of_what_was_kept(page):
    marks = {row[0]: row[2] for row in page.table("State of the reasoning")}
    assert marks["A"] == f"1 × {EVIL}"
    assert marks["B"] == "–"


def test_a_run_that_gives_nothing_says_so_at_the_top(made, tmp_path):
    assert "Warning" not in made[0]
    refused = Outcome(key="u", turn=0, sample=0, status="refused", reason=f"template says {EVIL}")
    text, summary = report(tmp_path, {"A": ([], [refused])})
    assert summary.warnings
    top = text[: text.index("<nav")]
    assert "no prompt was answered" in top and "1 × template says &lt;script&gt;" in top
    assert "<script" not in text


def test_code_in_a_warning_is_shown_as_code(tmp_path):
    reason = f"`{EVIL}` and `half"
    refused = Outcome(key="u", turn=0, sample=0, status="refused", reason=reason)
    text, _ = report(tmp_path, {"A": ([], [refused])})
    assert f"1 × <code>{html.escape(EVIL)}</code> and `half" in text[: text.index("<nav")]


def test_nothing_is_fetched_and_nothing_runs(made, page):
    text, _ = made
    assert not re.search(r"https?://|//[a-z]|url\(|@import", text)
    for tag, attrs in page.elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "base")
        assert not any(name.startswith("on") or name in ("src", "srcset", "data") for name in attrs)
        assert attrs.get("href", "#").startswith("#")


def test_links_and_descriptions_lead_somewhere(page):
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in page.elements:
        assert attrs.get("href", f"#{ids[0]}").removeprefix("#") in ids
        assert set(attrs.get("aria-labelledby", "").split()) <= set(ids)


def test_tables_speak(page):
    """Each is named by its caption, its heads say what they head, and a keyboard can scroll it."""
    assert all("scope" in attrs for tag, attrs in page.elements if tag == "th")
    tables = [tag for tag, _ in page.elements if tag == "table"]
    captions = [attrs["id"] for tag, attrs in page.elements if tag == "caption"]
    regions = [attrs for _, attrs in page.elements if attrs.get("role") == "region"]
    assert len(tables) == len(captions) == len(regions) > 8
    assert [region["aria-labelledby"] for region in regions] == captions
    assert all(region["tabindex"] == "0" for region in regions)


def test_headings_are_in_order(page):
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_charts_speak(page):
    charts = [attrs for tag, attrs in page.elements if tag == "svg"]
    assert all(attrs["role"] == "img" for attrs in charts)
    labels = {attrs["aria-label"] for attrs in charts}
    (said,) = [label for label in labels if label.startswith("A: ")]
    assert "2 accepted and 1 rejected" in said and "median 900" in said and "limit 4,096" in said


def test_a_chart_is_drawn_for_each_width(page):
    """CSS shows the one that fits; the others are not in the way of a screen reader."""
    by_label = Counter()
    for tag, attrs in page.elements:
        if tag == "svg":
            size, group = attrs["class"].split()
            by_label[attrs["aria-label"]] += 1
            assert size in ("narrow", "middle", "wide") and group in ("only-2", "only-3")
    assert set(by_label.values()) == {2, 3}


def test_every_bar_has_its_numbers(tmp_path):
    lengths = {"a": 0, "b": 5, "c": 5, "d": 70, "e": 70, "f": 70}
    verdicts = [verdict(key, n, reasons=("no",) if key in "cf" else ()) for key, n in lengths.items()]
    one = dataset_stats(write_dataset(tmp_path / "A", verdicts))
    (drawing,) = plots.lengths({"A": one}, {"A": 4096})
    titles = re.findall("<title>(.*?)</title>", drawing.svg)
    assert Counter(titles) == {
        "0 to 0 tokens: 1 accepted, 0 rejected": 2,
        "5 to 5 tokens: 1 accepted, 1 rejected": 4,  # one bar on the other, in two sizes
        "64 to 79 tokens: 2 accepted, 1 rejected": 4,
    }


@pytest.mark.parametrize("mean", [40, 150, 400, 900, 1400, 1900, 2047])
def test_labels_of_marks_are_not_cut(tmp_path, mean):
    """In Chromium a letter of `mean 1,007` is 7 px wide at 12 px."""
    one = dataset_stats(write_dataset(tmp_path / "A", [verdict("a", 40), verdict("b", 2 * mean - 40)]))
    (drawing,) = plots.lengths({"A": one}, {"A": 4096})
    for svg in re.findall("<svg.*?</svg>", drawing.svg, re.DOTALL):
        width = float(re.search('viewBox="0 0 ([0-9.]+)', svg)[1])
        left = float(re.search(r'transform="translate\(([0-9.]+),', svg)[1])
        found = re.findall(
            r'text-anchor="(start|end)" transform="translate\(([0-9.]+),[^>]*>([a-z]\w+ [0-9,]+)<', svg
        )
        assert len(found) == 4
        for anchor, x, label in found:
            size = 7 * len(label)
            assert (left + float(x) + size <= width) if anchor == "start" else float(x) >= size, label


def test_labels_of_marks_at_one_place_have_an_order(tmp_path):
    """A set's order of texts is another in each process, and with it would be the bytes of the page."""
    one = dataset_stats(write_dataset(tmp_path / "A", [verdict("a", 8191), verdict("b", 8191)]))
    (drawing,) = plots.lengths({"A": one}, {"A": 8191})
    for svg in re.findall("<svg.*?</svg>", drawing.svg, re.DOTALL):
        assert re.findall(">([a-z]\\w+) 8,191<", svg) == ["p95", "median", "mean", "limit"]


@pytest.mark.parametrize(
    ("most", "ticks"),
    [(1, [0, 1]), (2, [0, 1, 2]), (5, [0, 2, 4, 6]), (17, [0, 5, 10, 15, 20]), (4001, [0, 2000, 4000, 6000])],
)
def test_an_axis_of_counts_has_whole_round_ticks(most, ticks):
    assert plots.whole_ticks(most) == ticks


def test_rejected_answers_can_be_read_and_stay_text(made, page):
    """Three parts of each: what was asked, the reasoning and the answer, with whatever stands in them."""
    text, _ = made
    assert page.by_id["examples"].count("onerror=alert(1)") == 3
    assert "<img" not in text and "<svg/" not in text and "49" not in page.by_id["examples"]
    assert text.isprintable() is False and "\x00" not in text and "\x1b" not in text
    assert "\u2028" not in text, "a browser breaks no line there, an editor does"


def test_the_drift_audit_is_told_where_it_was_on(tmp_path):
    rounds = [round_of(noisy(random.Random(n), 0.0), n) for n in range(LEAST_ROUNDS + 2)]
    rounds += [round_of(noisy(random.Random(9), 0.0, times=0.4), n, events=[(1.0, EVIL)]) for n in (20, 21)]
    log = tmp_path / "generate" / "A.audit.jsonl"
    log.parent.mkdir()
    log.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in rounds))
    text, _ = report(tmp_path, {"A": ([verdict("a", 7)], ()), "B": ([verdict("b", 7)], ())})
    (row,) = Page(text).table("Rounds")[1:]
    assert row[:3] == ["A", str(len(rounds)), str(len(rounds[0].answers))] and row[-1] == "1"
    assert row[3] == "1 January 1970, 00:00 UTC"
    assert float(row[6]) == pytest.approx(0.4 * float(row[5]), rel=0.01)
    assert "are 0.4 times as long; before that:" in text and EVIL not in text


def test_without_an_audit_there_is_no_word_of_it(made):
    assert "audit" not in made[0]
