"""The page: the same numbers as summary.json, nothing interpreted as HTML, nothing fetched."""

import json
import re
from html.parser import HTMLParser

import msgspec
import pytest
from made_results import stages, verdict, write_dataset, write_training_set

from eyas.config import StatsSettings
from eyas.digest import code_digests
from eyas.records import Outcome
from eyas.report.page import LEFT, RIGHT, WIDTH, Axis, chart, nice
from eyas.stats import stats
from eyas.summary import summarise

EVIL = "<script>alert(1)</script>"
VOID = {"meta", "link", "br", "img", "input", "hr", "line", "rect"}


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


def report(root, datasets):
    """The page and the summary of datasets given as verdicts and other outcomes."""
    for name, (verdicts, others) in datasets.items():
        dataset_stats(write_dataset(root / "results" / name, verdicts, others=tuple(others)))
    exports = write_training_set(root / "results")
    made = stages({name: {} for name in datasets}, model={"id": EVIL})
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
    marks = {row[0]: row[1] for row in page.table("Marked, and kept")}
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


def test_tables_and_charts_speak(page):
    assert all("scope" in attrs for tag, attrs in page.elements if tag == "th")
    charts = [attrs for tag, attrs in page.elements if tag == "svg"]
    assert len(charts) == 2
    for number, attrs in enumerate(charts, 1):
        assert attrs["role"] == "img"
        assert attrs["aria-labelledby"] == f"chart-{number}-title chart-{number}-text"
    assert "2 accepted and 1 rejected" in page.by_id["chart-1-text"]
    assert "median 900" in page.by_id["chart-1-text"]


def test_bars_are_as_high_as_their_counts(tmp_path):
    """Accepted and rejected are drawn on one scale, one on the other, and nothing leaves the frame."""
    lengths = {"a": 0, "b": 5, "c": 5, "d": 70, "e": 70, "f": 70}
    verdicts = [verdict(key, n, reasons=("no",) if key in "cf" else ()) for key, n in lengths.items()]
    one = dataset_stats(write_dataset(tmp_path / "A", verdicts))
    drawn = chart("A", one, Axis.over(one.histogram))
    bars = {bar.label.split(" ")[0]: bar for bar in drawn.bars if bar.accepted_height or bar.rejected_height}
    assert set(bars) == {"0", "5", "64"}
    assert bars["64"].accepted_height == pytest.approx(2 * bars["5"].accepted_height)
    assert bars["5"].rejected_height == pytest.approx(bars["0"].accepted_height)
    assert bars["64"].rejected_y + bars["64"].rejected_height == pytest.approx(bars["64"].accepted_y)
    assert all(bar.x >= LEFT and bar.x + bar.width <= WIDTH - RIGHT for bar in drawn.bars)


def test_labels_of_marks_are_not_cut_at_the_right(tmp_path):
    """In Chromium on a phone a letter of `mean 1,007` is 8.4 units wide."""
    one = dataset_stats(write_dataset(tmp_path / "A", [verdict("a", 1007)]))
    output = one.tokens["output"]
    for mean in range(40, 2048):
        spread = msgspec.structs.replace(output.all, mean=mean)
        tokens = one.tokens | {"output": msgspec.structs.replace(output, all=spread)}
        for mark in chart("A", msgspec.structs.replace(one, tokens=tokens), Axis(5, 11)).marks:
            assert mark.anchor == "end" or mark.x + 4 + 8.4 * len(mark.label) <= WIDTH, mark


@pytest.mark.parametrize(
    ("count", "top"), [(1, 2), (2, 2), (17, 20), (76, 80), (135, 140), (1001, 1200), (99_999, 100_000)]
)
def test_axis_tops_are_round_and_even(count, top):
    assert nice(count) == top
