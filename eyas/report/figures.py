"""The figures of a run, as summary.json has them; tables and page are drawn from these alone."""

from __future__ import annotations

from msgspec import Struct

from eyas.exporters.reports import ExportReport
from eyas.fit import Fit
from eyas.hours import Throughput
from eyas.mix import MixReport
from eyas.stats import Bin, Tally
from eyas.timeline import Timeline


class Part(Struct, frozen=True, kw_only=True):
    """One dataset, or all of them together.

    source_rows = prompts in use + not_taken (beyond the row count) + skipped (left out). planned, responses,
    accepted, rejected, refused, failed, not_needed, not_reached count units (key, turn, sample). turns: of the prompts'
    conversations, all together; as many as prompts where only the first is asked. refused: never
    answered, since the prompt itself cannot be asked; rejected: answered, and a check found fault. …_for: how many for
    which reason; marked_for: of the accepted ones, so what marks would cost as reasons to reject. by_length: in powers of
    two of output tokens. prompt_tokens … accepted_tokens are of the responses; unused_tokens were generated beyond the budget.
    max_new_tokens: the limit of an answer, the highest of several. budget_use: accepted tokens by budget. hours: busy with requests in flight. completions_per_minute,
    tokens_per_second: over the whole run, unused answers included.
    """

    source_rows: int
    prompts: int
    turns: int
    not_taken: int
    skipped: int
    skipped_for: dict[str, int]
    planned: int
    responses: int
    accepted: int
    rejected: int
    rejected_for: dict[str, Tally]
    marked_for: dict[str, Tally]
    by_length: list[Bin]
    refused: int
    refused_for: dict[str, int]
    failed: int
    failed_for: dict[str, int]
    not_needed: int
    not_reached: int
    not_reached_for: dict[str, int]
    prompt_tokens: int
    reasoning_tokens: int
    answer_tokens: int
    output_tokens: int
    accepted_tokens: int
    unused_tokens: int
    truncated: Tally
    truncated_share: float | None
    constrained: int
    max_new_tokens: int
    budget_tokens: int | None
    budget_use: float | None
    hours: float
    tokens_per_second: float | None
    completions_per_minute: float | None
    throughput: Throughput


class Adopted(Struct, frozen=True, kw_only=True):
    """Answers that were taken from a file (`eyas adopt`), with their output tokens. They are in no rate and in no hours.

    server: the id under which the manifest has the file.
    """

    server: str
    file: str
    sha256: str
    rows: int
    tokens: int


class StageUse(Struct, frozen=True, kw_only=True):
    """What the jobs of one stage took: wall time added up, in s, and the largest resident memory, in MB (10^6)."""

    jobs: int
    seconds: float
    peak_memory_mb: float | None


class Summary(Struct, frozen=True, kw_only=True):
    """summary.json. warnings: sentences, for what nobody may overlook. unfinished: datasets that a partial report has no
    numbers of, and how far they are. servers: rates by server-manifest id. capacity: by the same, how many requests really ran
    and what bounds them, in a sentence. stages: those that Snakemake has a benchmark of. fit: how the training rows of each
    dataset fit a trainer; that of the whole is in `mix`, which is null in a partial report. exports: by their path below results/.
    """

    warnings: list[str]
    unfinished: dict[str, str]
    datasets: dict[str, Part]
    total: Part
    servers: dict[str, Throughput]
    capacity: dict[str, str]
    timeline: Timeline | None
    adopted: list[Adopted]
    stages: dict[str, StageUse]
    fit: dict[str, Fit]
    mix: MixReport | None
    exports: dict[str, ExportReport]
