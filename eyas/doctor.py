"""The last look before a long run: asks the server that will be used, one answer per dataset, in under a minute.

Nothing it asks enters the journal. Its verdict is kept (eyas.server.verdict), and `generate` heeds a NO-GO.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec.structs import replace

from eyas.asking import NO_REASONING, PLAIN_PROMPT, prepare
from eyas.capacity import Lengths, kv_bytes_per_token, running, sentence
from eyas.config import AccessSettings, Config, Stages
from eyas.errors import EyasError
from eyas.plugins import Busy, Completion, Engine, GenerateRequest, Pool, Reasoning, Reject, Retry, Tokenizer
from eyas.recordfile import read_records
from eyas.records import Finish, Prompt, Reply
from eyas.render import Refused
from eyas.units import with_options

if TYPE_CHECKING:
    from eyas.server.lease import Lease
    from eyas.wire import Session

ANSWER_TOKENS = 512  # of a dataset's trial answer: enough to see how it begins; a long one is cut
PATIENCE = 40.0  # s for all trial answers together
WAIT = 10.0  # s for a server at `server.url` to generate; one that Eyas starts itself may take as long as it may in a run
STOP_TOKENS = 2048  # of the answer to a plain question, where no trial answer has shown the stop id
SHOWN = 60  # characters of reasoning and of the answer
# Bytes on disk per output token: journal 15, which stores plainly; responses 7, training row, mix and export 4 each, and
# nearly as much again for prompts and text (measured on 1,400-token answers, tests/bench).
BYTES_PER_TOKEN = 60

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. A `no-go` stops the run, a `warning` does not."""

    name: str
    state: Literal["ok", "warning", "no-go"]
    text: str


def examine(stages: Stages, results: Path, engine: Engine) -> Iterator[Finding]:
    """Everything in turn; ends early where nothing more can be seen."""
    from eyas.server.lease import hold
    from eyas.server.shares import all_lanes

    access = stages.access()
    if access.server.url is not None:
        wait = min(access.server.start_timeout, WAIT)
        access = replace(access, server=replace(access.server, start_timeout=wait))
    yield from room_on_disk(stages.config, results)
    yield from open_files(access)
    yield from lengths(stages.config)
    yield from exports(stages)
    for warning in engine.warnings(all_lanes(access.server)):
        yield Finding("settings", "warning", warning)
    try:
        with hold(access, engine, log) as lease:
            yield from _servers(lease)
            yield from _ask(stages, results, engine, lease)
    except EyasError as error:
        yield Finding("server", "no-go", str(error))


def _servers(lease: Lease) -> Iterator[Finding]:
    """What each server is, or why there is none."""
    for url in lease.urls:
        if url in lease.manifests:
            yield Finding("server", "ok", f"{url}: {_told(lease.manifests[url])}")
        else:
            cause = lease.absent.get(url, "no reply")
            yield Finding(
                "server",
                "warning",
                f"{url} does not generate ({cause}); a run begins without it, and asks it once it does",
            )


TOLD = {
    **{"engine_version": "{}", "model": "{}", "model_file": "{}", "revision": "revision {}"},
    **{"quantisation": "{} weights", "weight_dtype": "weights in {}", "kv_dtype": "KV cache in {}"},
    **{"tp_size": "tp {}", "accelerator": "{}"},
}


def _told(manifest: dict[str, Any]) -> str:
    return ", ".join(text.format(manifest[name]) for name, text in TOLD.items() if manifest.get(name))


# --- what needs no server ----------------------------------------------------------------------------------------


def room_on_disk(config: Config, results: Path) -> Iterator[Finding]:
    """Disk that is still needed at most, against what is free where journal and results lie."""
    needed, unbounded = 0, []
    for name, section in config.datasets.items():
        needed -= _written(Path(config.journal) / name) + _written(results / name)
        planned = _turns(results / name / "prompts.json")
        if planned is None and section.turns == "first":
            planned = section.rows
        most = planned and planned * section.samples * section.sampling.max_new_tokens
        known = [bound for bound in (section.budget_tokens, most) if bound]
        if known:
            needed += min(known) * BYTES_PER_TOKEN
        else:
            unbounded.append(name)
    if unbounded:
        yield Finding(
            "disk",
            "warning",
            f"how much {', '.join(unbounded)} will write is unknown: nothing tells before their prompts are there (snakemake prompts), or budget_tokens is set",
        )
    needed = max(needed, 0)
    folders = [_existing(Path(config.journal)), _existing(results)]
    for folder in {folder.stat().st_dev: folder for folder in folders}.values():
        free = shutil.disk_usage(folder).free
        state: Literal["ok", "no-go"] = "ok" if free > needed else "no-go"
        remedy = "" if free > needed else "; free space, or lower budget_tokens"
        yield Finding(
            "disk",
            state,
            f"up to {_size(needed)} needed, {_size(free)} free in {folder}{remedy}",
        )


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def _written(folder: Path) -> int:
    """Bytes of the files in a folder that an earlier run has filled."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class _Prompts(msgspec.Struct):
    """Of prompts.json, what is read here."""

    turns: int


def _turns(report: Path) -> int | None:
    """How many turns the prompts have that are answered; None while there are no prompts."""
    if not report.is_file():
        return None
    try:
        return msgspec.json.decode(report.read_bytes(), type=_Prompts).turns
    except msgspec.DecodeError as error:
        raise EyasError(f"{report}: {error}; delete it and run `snakemake prompts --cores 1`") from None


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def open_files(access: AccessSettings) -> Iterator[Finding]:
    """Whether the ceiling of requests in flight fits the limit of open files."""
    ceiling = max([access.server.concurrency, *(lane.concurrency for lane in access.server.lanes.values())])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fits = hard == resource.RLIM_INFINITY or hard >= ceiling + 256
    limit = "no limit" if hard == resource.RLIM_INFINITY else f"the limit is {hard:,}"
    remedy = "" if fits else "; raise `ulimit -n` or lower server.concurrency"
    yield Finding("open files", "ok" if fits else "no-go", f"{ceiling:,} in flight at most, {limit}{remedy}")


def lengths(config: Config) -> Iterator[Finding]:
    """How long an answer may get, and which prompts are too long for that. A server that holds less is refused."""
    limits: dict[int, list[str]] = {}
    for name, section in config.datasets.items():
        limits.setdefault(section.sampling.max_new_tokens, []).append(name)
    for limit, names in sorted(limits.items()):
        yield Finding(
            "lengths",
            "ok",
            f"{', '.join(names)}: answers of up to {limit:,} tokens (max_new_tokens) leave {config.model.context - limit:,} "
            f"of model.context for the prompt; longer prompts are refused",
        )


def exports(stages: Stages) -> Iterator[Finding]:
    """Which exporters do not suit the model, as far as that is known before there is a row."""
    from eyas.export import exporter_of, reasoning_of
    from eyas.exporters.target import Target

    chosen = [stages.export(name) for name in stages.config.exports]
    target, fine = None, []
    try:
        if any(settings.model for settings in chosen):
            target = Target(stages.model, reasoning_of(stages.model, stages.registry))
    except EyasError as error:
        yield Finding("exports", "no-go", str(error))
        return
    for settings in chosen:
        try:
            exporter_of(settings, stages.registry, target if settings.model else None).check()
        except EyasError as error:
            yield Finding("exports", "no-go", str(error))
        else:
            fine.append(settings.exporter)
    if fine:
        yield Finding("exports", "ok", f"{', '.join(fine)}: nothing stands against the model")


# --- what the server says and does -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trial:
    dataset: str
    prompt: Prompt
    ids: list[int]
    limit: int


def _ask(stages: Stages, results: Path, engine: Engine, lease: Lease) -> Iterator[Finding]:

    section = dict(stages.model.reasoning)
    reasoning = stages.registry.create("reasoning", section.pop("name"), section, "model.reasoning")
    assert isinstance(reasoning, Reasoning)
    tokenizer, renderer = prepare(engine, lease, with_options(stages.model, reasoning), reasoning)
    yield Finding("tokenizer", "ok", "known texts and ids agree; reasoning format and chat template fit")
    trials, without = [], []
    for name, dataset in stages.config.datasets.items():
        path = results / name / "prompts.jsonl.zst"
        prompt = next(read_records(path, Prompt), None) if path.exists() else PLAIN_PROMPT
        if not path.exists():
            without.append(name)
        try:
            ids = renderer.render(prompt or PLAIN_PROMPT)
        except (Refused, Reject) as reason:
            yield Finding(name, "warning", f"its first prompt is refused: {reason}")
            continue
        except Retry as cause:
            yield Finding(name, "no-go", f"the server cannot encode its first prompt: {cause}")
            continue
        limit = min(dataset.sampling.max_new_tokens, ANSWER_TOKENS)
        trials.append(_Trial(name, prompt or PLAIN_PROMPT, ids, limit))
    if without:
        yield Finding(
            "prompts",
            "warning",
            f"none yet for {', '.join(without)}, so a plain question is asked instead; run `snakemake prompts --cores 1` first",
        )
    began = time.monotonic()
    answers = asyncio.run(_answers(stages.config, engine, lease, trials, PATIENCE))
    prompts = []
    reasoned: list[bool] = []
    for trial, answer in zip(trials, answers, strict=True):
        if isinstance(answer, Completion):
            prompts.append(len(trial.ids))
        yield _judged(stages, trial, answer, tokenizer, reasoning, reasoned)
    if reasoned and not any(reasoned):
        # Models do without now and then, so one answer of several that were asked for proves nothing.
        yield Finding(
            "reasoning",
            "no-go" if len(reasoned) > 1 or len(trials) == 1 else "warning",
            "no trial answer has any; check model.reasoning and model.template_options, or set reasoning_required: false",
        )
    left = PATIENCE - (time.monotonic() - began)
    if left > 0 and not _stops(answers):
        with contextlib.suppress(Refused, Reject, Retry):
            limit = min(STOP_TOKENS, stages.model.context // 2)
            name = next(iter(stages.config.datasets))
            plain = _Trial(name, PLAIN_PROMPT, renderer.render(PLAIN_PROMPT), limit)
            answers += asyncio.run(_answers(stages.config, engine, lease, [plain], left))
    yield _stop_ids(tokenizer, _stops(answers))
    yield from _capacity(stages, lease, prompts)


def _stops(answers: Iterable[Completion | BaseException | None]) -> set[int]:
    """The ids with which answers ended by themselves."""
    matched = [answer.finish.matched for answer in answers if isinstance(answer, Completion)]
    return {token for token in matched if isinstance(token, int)}


def _stop_ids(tokenizer: Tokenizer, seen: set[int]) -> Finding:
    names = {token: text for text, token in tokenizer.added_tokens.items()}

    def told(tokens: Iterable[int]) -> str:
        return ", ".join(f"{token} {names.get(token, '')}".strip() for token in sorted(tokens))

    if seen:
        return Finding(
            "stop id", "ok", f"answers end with {told(seen)}; the model stops at {told(tokenizer.stop_ids)}"
        )
    return Finding(
        "stop id",
        "warning",
        f"no trial answer ended by itself; the model should stop at {told(tokenizer.stop_ids)}",
    )


async def _answers(
    config: Config, engine: Engine, lease: Lease, trials: list[_Trial], patience: float
) -> list[Completion | BaseException | None]:
    """The completion of each trial, the error it met, or None for one that still runs after `patience` s."""
    from eyas.wire import Session

    async with Session(lease.key) as session:
        tasks = []
        urls = cycle(lease.manifests)
        for seed, trial in enumerate(trials):
            sampling = replace(config.datasets[trial.dataset].sampling, max_new_tokens=trial.limit)
            ask = GenerateRequest(prompt_ids=trial.ids, sampling=sampling, seed=seed)
            tasks.append(asyncio.create_task(_twice(engine, session, next(urls), ask)))
        if tasks:
            await asyncio.wait(tasks, timeout=patience)
        found = [_outcome(task) for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def _twice(engine: Engine, session: Session, url: str, ask: GenerateRequest) -> Completion:
    """The completion; what may pass is tried once more."""
    try:
        return await engine.generate(session, url, ask)
    except Retry:
        await asyncio.sleep(1.0)
        return await engine.generate(session, url, ask)


def _outcome(task: asyncio.Task[Completion]) -> Completion | BaseException | None:
    if not task.done():
        return None
    return task.exception() or task.result()


def _judged(
    stages: Stages,
    trial: _Trial,
    answer: Completion | BaseException | None,
    tokenizer: Tokenizer,
    reasoning: Reasoning,
    reasoned: list[bool],
) -> Finding:
    """What is told of one trial answer; where it should have reasoned, `reasoned` gets whether it did."""
    name = trial.dataset
    if answer is None:
        return Finding(
            name, "warning", f"its trial answer still runs after {PATIENCE:.0f} s: the server is slow or busy"
        )
    if isinstance(answer, Reject):
        return Finding(name, "warning", f"the server refuses its first prompt: {answer}")
    if isinstance(answer, Busy):
        return Finding(name, "warning", f"the server is too busy for a trial answer: {answer}")
    if isinstance(answer, Retry | EyasError):
        return Finding(name, "no-go", f"its trial request failed: {answer}")
    if isinstance(answer, BaseException):
        raise answer
    reply = _reply(trial, answer, tokenizer)
    split = reasoning.split(reply)
    cut = reply.text_ends[split.reasoning_tokens - 1] if split.reasoning_tokens else 0
    told = (
        f"{len(trial.ids):,} prompt tokens, {split.reasoning_tokens} of reasoning ({split.state}), "
        f"{len(answer.output_ids) - split.reasoning_tokens} of answer, {answer.finish.type}: "
        f"{_short(reply.text[:cut])!r} | {_short(reply.text[cut:])!r}"
    )
    has = split.state not in NO_REASONING
    if not (stages.config.datasets[name].reasoning_required and split.asked):
        return Finding(name, "ok", told)
    reasoned.append(has)
    return Finding(name, "ok" if has else "warning", told)


def _reply(trial: _Trial, answer: Completion, tokenizer: Tokenizer) -> Reply:
    text, lengths = tokenizer.decode(answer.output_ids)
    present = set(trial.ids) | set(answer.output_ids)
    return Reply(
        request="",
        prompt_ids=trial.ids,
        output_ids=answer.output_ids,
        finish=Finish(type=answer.finish.type, matched=answer.finish.matched),
        text=text,
        text_lengths=lengths,
        stop_ids=tokenizer.stop_ids,
        control_ids=tokenizer.control_ids,
        added_tokens={text: token for text, token in tokenizer.added_tokens.items() if token in present},
        effective_max_new=answer.effective_max_new,
        constrained=False,
    )


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= SHOWN else flat[: SHOWN - 1] + "…"


def _capacity(stages: Stages, lease: Lease, prompts: list[int]) -> Iterator[Finding]:
    """How many requests will run, for the trials' prompts and answers of a quarter of the limit."""
    pool = lease.capacity()
    if pool is None:
        yield Finding("capacity", "warning", "the server does not tell what its KV cache holds")
        return
    for lane, name in {section.lane: name for name, section in stages.config.datasets.items()}.items():
        section = stages.config.datasets[name]
        access = stages.access(name)
        guess = section.sampling.max_new_tokens / 4
        lengths = Lengths(
            prompt=sum(prompts) / len(prompts) if prompts else 0.0,
            output=guess,
            output_sd=guess,
            max_new_tokens=section.sampling.max_new_tokens,
        )
        found = running(pool, lengths, access.ceiling)
        told = f"{sentence(pool, lengths, found)}. Guessed, for answers of a quarter of max_new_tokens"
        yield Finding(f"capacity{f' of lane {lane}' if lane else ''}", "ok", told)
    yield Finding("KV cache", "ok", _kv_cache(stages, lease.manifests[lease.urls[0]], pool))


def _kv_cache(stages: Stages, manifest: dict[str, Any], pool: Pool) -> str:
    """What it holds, and in bytes where the model's config.json is at hand."""
    from eyas.hub import tokenizer_folder

    told = f"holds {pool.tokens:,} tokens"
    if pool.max_running is not None:
        told += f" of at most {pool.max_running:,} requests at once"
    if stages.model.tokenizer is None:
        return told
    with contextlib.suppress(EyasError, OSError):
        config = msgspec.json.decode((tokenizer_folder(stages.model.tokenizer) / "config.json").read_bytes())
        size = kv_bytes_per_token(config, stages.model.kv_dtype, manifest.get("tp_size") or 1)
        told += f": {_size(pool.tokens * size)} on each rank, {size:,} bytes a token"
    return told
