"""summary.md: the run as tables whose columns line up in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eyas.mix import MixReport
from eyas.report.figures import Part, Summary
from eyas.report.trainers import tables
from eyas.report.words import commonest, duration, hours, megabytes, number, percent
from eyas.stats import Bin, Tally


def markdown(summary: Summary) -> str:
    """summary.md: tables whose columns line up in a terminal."""
    named = [*summary.datasets.items(), ("total", summary.total)]
    heads = ["dataset", "prompts", "responses", "accepted", "tokens", "tok/s", "hours"]
    blocks = [
        "# Summary",
        *(f"> Warning: {warning}." for warning in summary.warnings),
        table(
            heads,
            [
                [
                    name,
                    number(one.prompts),
                    number(one.responses),
                    number(one.accepted),
                    number(one.output_tokens),
                    number(one.tokens_per_second, 1),
                    hours(one.hours, summary.total.hours),
                ]
                for name, one in named
            ],
        ),
        totals(summary.total),
        *(f"Server {server[:8]}: {told}." for server, told in summary.capacity.items()),
        *(
            f"Adopted from {one.file} ({one.sha256[:8]}): {number(one.rows)} answers, {number(one.tokens)} output tokens."
            for one in summary.adopted
        ),
    ]
    total = summary.total
    if total.skipped:
        blocks += ["## Source rows skipped", table(["reason", "rows"], counted(total.skipped_for))]
    if total.refused:
        blocks += [
            "## Refused: the prompt cannot be asked",
            table(["reason", "planned answers"], counted(total.refused_for)),
        ]
    if total.failed:
        blocks += [
            "## Failed: no answer after the last retry",
            table(["cause", "planned answers"], counted(total.failed_for)),
        ]
    if total.not_reached:
        blocks += [
            "## Not reached: the conversation ended at an earlier turn",
            table(["reason", "planned answers"], counted(total.not_reached_for)),
        ]
    if total.rejected:
        blocks += [
            "## Rejected: answered, and a check found fault",
            table(
                ["reason", "responses", "tokens"],
                tallied(total.rejected_for),
            ),
        ]
    if total.marked_for:
        blocks += [
            "## Marked: kept, and what rejecting would cost",
            table(["mark", "responses", "tokens"], tallied(total.marked_for)),
        ]
    if total.by_length:
        blocks += ["## Acceptance by length", acceptance(total.by_length)]
    if summary.mix is not None:
        blocks += ["## Training set", mixture(summary.mix)]
    blocks += ["## Trainer fit"]
    for sentence, (columns, rows) in tables(summary).items():
        blocks += [sentence, table(columns, rows)]
    if summary.stages:
        blocks += [
            "## Stages",
            table(
                ["stage", "jobs", "wall time", "peak memory"],
                [
                    [rule, number(use.jobs), duration(use.seconds), megabytes(use.peak_memory_mb)]
                    for rule, use in summary.stages.items()
                ],
            ),
        ]
    return "\n\n".join(blocks) + "\n"


def totals(total: Part) -> str:
    """The run in a few sentences, one a line."""
    rates = total.throughput
    in_turns = f", to {number(total.turns)} turns of these prompts" if total.turns > total.prompts else ""
    lines = [
        f"- of {number(total.source_rows)} source rows: {number(total.prompts)} used as prompts, "
        f"{number(total.not_taken)} not taken, {number(total.skipped)} skipped",
        f"- of {number(total.planned)} planned answers{in_turns}: {number(total.responses)} answered, {number(total.refused)} refused, "
        f"{number(total.failed)} failed, {number(total.not_needed)} not needed, {number(total.not_reached)} not reached",
        f"- of {number(total.responses)} answers: {number(total.accepted)} accepted, {number(total.rejected)} rejected",
        f"- {number(total.output_tokens)} output tokens: {number(total.reasoning_tokens)} reasoning, "
        f"{number(total.answer_tokens)} answer; {number(total.accepted_tokens)} in accepted responses",
        f"- {number(total.truncated.rows)} responses ({percent(total.truncated_share)}) end at the token limit",
        f"- {number(rates.run.tokens_per_second, 1)} tok/s over the run, {number(rates.full.tokens_per_second, 1)} "
        f"while the server was full, {number(rates.drain.tokens_per_second, 1)} in the drain; "
        f"at most {number(rates.peak_in_flight)} requests in flight",
    ]
    if total.constrained:
        lines.append(
            f"- {number(total.constrained)} responses were shaped by a grammar, so they are off-policy"
        )
    if total.budget_tokens is not None:
        lines.append(
            f"- {percent(total.budget_use)} of the budget of {number(total.budget_tokens)} accepted tokens"
        )
    return "\n".join(lines)


def counted(reasons: Mapping[str, int]) -> list[list[str]]:
    """Rows of a table of reasons, the most frequent first."""
    return [[reason, number(count)] for reason, count in commonest(reasons)]


def tallied(reasons: Mapping[str, Tally]) -> list[list[str]]:
    """The same with output tokens."""
    return [[reason, number(tally.rows), number(tally.tokens)] for reason, tally in commonest(reasons)]


def acceptance(bins: Sequence[Bin]) -> str:
    """How many responses of each length are accepted."""
    rows = [
        [
            f"{number(one.low)} to {number(one.high - 1)}",
            number(one.accepted + one.rejected),
            percent(one.accepted / (one.accepted + one.rejected)),
        ]
        for one in bins
        if one.accepted + one.rejected
    ]
    return table(["output tokens", "responses", "accepted"], rows)


def mixture(mix: MixReport) -> str:
    """What each dataset gives to the training set and to the held-out set."""
    heads = ["dataset", "train rows", "train tokens", "eval rows", "eval tokens", "left out by weights"]
    rows = []
    for name in sorted(mix.train):
        train, held_out = mix.train[name], mix.eval[name]
        counts = (train.rows, train.supervised_tokens, held_out.rows, held_out.supervised_tokens)
        rows.append([name, *map(number, (*counts, mix.dropped_by_weights[name].rows))])
    return table(heads, rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: first column to the left, the others to the right, padded to equal width."""
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in (heads, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        for row in cells
    ]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
