"""What a trainer will make of the training set, as tables for page and Markdown alike: heads, and rows of cells."""

from __future__ import annotations

from eyas.fit import DRAFT_VOCABULARIES, Fit
from eyas.report.figures import Summary
from eyas.report.words import listed, number, percent

Table = tuple[list[str], list[list[str]]]
WHOLE = "training set"


def tables(summary: Summary) -> dict[str, Table]:
    """All tables that have rows, each under a sentence that says what it tells."""
    found = {
        "Each export was read again as its trainer does it. Left out: rows that the format cannot hold.": exports(
            summary
        ),
        "A trainer cuts rows at its maximum length, or drops those that are longer.": cuts(summary),
        "Share of supervised tokens that a draft vocabulary covers: of its own most frequent ids, and of the set's.": coverage(
            summary
        ),
    }
    return {sentence: table for sentence, table in found.items() if table[1]}


def _fits(summary: Summary) -> dict[str, Fit]:
    whole = {WHOLE: summary.mix.fit.total} if summary.mix is not None else {}
    return {**summary.fit, **whole}


def cuts(summary: Summary) -> Table:
    """What each maximum length costs; lengths at which nothing is longer are left out."""
    heads = [
        "dataset",
        "max length",
        "rows cut",
        "their tokens",
        "rows lost",
        "reasoning lost",
        "answer lost",
    ]
    rows = [
        [
            name,
            number(cut.max_length),
            number(cut.rows_cut),
            number(cut.tokens_of_cut),
            number(cut.rows_lost),
            _part(cut.reasoning_lost, fit.reasoning_tokens),
            _part(cut.answer_lost, fit.answer_tokens),
        ]
        for name, fit in _fits(summary).items()
        for cut in fit.cuts
        if cut.rows_cut
    ]
    return heads, rows


def coverage(summary: Summary) -> Table:
    """What draft vocabularies cover of each dataset."""
    shared = summary.mix.fit.coverage_of if summary.mix is not None else {}
    heads = ["dataset", "ids", *(f"{size:,} own" for size in DRAFT_VOCABULARIES)]
    heads += [f"{size:,} of the set" for size in DRAFT_VOCABULARIES]
    sizes = [str(size) for size in DRAFT_VOCABULARIES]
    rows = [
        [
            name,
            number(fit.ids),
            *(percent(fit.coverage[size]) for size in sizes),
            *(percent(shared.get(name, fit.coverage)[size]) for size in sizes),
        ]
        for name, fit in _fits(summary).items()
    ]
    return heads, rows


def exports(summary: Summary) -> Table:
    """What trainers see of the rows that were written for them."""
    heads = [
        "export",
        "rows",
        "left out",
        "supervised tokens",
        "end token",
        "reasoning kept",
        "exactly our ids",
        "why not",
    ]
    rows = [
        [
            name.removeprefix("train/exports/"),
            number(report.rows),
            listed(report.left_out),
            number(report.supervised_tokens),
            "learnt" if report.supervises_end else "not learnt",
            percent(report.reasoning_share),
            percent(report.same_ids_share),
            listed(report.differ_for),
        ]
        for name, report in summary.exports.items()
    ]
    return heads, rows


def _part(count: int, whole: int) -> str:
    return f"{number(count)} ({percent(count / whole)})" if count else "0"
