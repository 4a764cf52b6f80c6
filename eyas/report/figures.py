"""The figures of a run, as summary.json has them; tables and page are drawn from these alone."""

from __future__ import annotations

from msgspec import Struct

from eyas.hours import Throughput
from eyas.mix import MixReport
from eyas.stats import Tally


class Part(Struct, frozen=True, kw_only=True):
    """One dataset, or all of them together.

    prompts: in use. planned, responses, accepted, rejected, failed, refused, not_needed, not_reached count units
    (key, turn, sample); refused were rejected before asking. prompt_tokens … accepted_tokens are of the responses;
    unused_tokens were generated beyond the budget. budget_use: accepted tokens by budget. hours: busy with requests
    in flight. completions_per_minute, tokens_per_second: over the whole run, unused answers included.
    """

    prompts: int
    planned: int
    responses: int
    accepted: int
    rejected: int
    rejected_for: dict[str, Tally]
    failed: int
    refused: int
    not_needed: int
    not_reached: int
    prompt_tokens: int
    reasoning_tokens: int
    answer_tokens: int
    output_tokens: int
    accepted_tokens: int
    unused_tokens: int
    truncated: Tally
    truncated_share: float | None
    constrained: int
    budget_tokens: int | None
    budget_use: float | None
    hours: float
    tokens_per_second: float | None
    completions_per_minute: float | None
    throughput: Throughput


class StageUse(Struct, frozen=True, kw_only=True):
    """What the jobs of one stage took: wall time added up, in s, and the largest resident memory, in MB (10^6)."""

    jobs: int
    seconds: float
    peak_memory_mb: float | None


class Summary(Struct, frozen=True, kw_only=True):
    """summary.json. servers: rates by server-manifest id. stages: null where Snakemake has no benchmark of it."""

    datasets: dict[str, Part]
    total: Part
    servers: dict[str, Throughput]
    stages: dict[str, StageUse]
    mix: MixReport | None
