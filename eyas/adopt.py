"""The adopt stage: finished answers from elsewhere become journal entries, so that only the rest is asked.

An answer is adopted if it is what the config would have asked for: its ids, its prompt, and every setting that decides
its distribution. All others are refused and counted by reason. docs/reproducibility.md tells the record.
What is known of the file's records and their prompts lies on disk, so memory does not grow with them.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eyas.asking import prepare
from eyas.config import AccessSettings, GenerateSettings, fingerprint
from eyas.errors import EyasError
from eyas.journal import Answered, Journal, JournalWriter, Rendered, ServerSeen
from eyas.plugins import Engine, Registry, Reject, Retry, Tokenizer
from eyas.recordfile import read_records, read_seal, scratch
from eyas.records import Delivery, Finish, Message, Prompt, Reply, Response
from eyas.render import Refused, Renderer, render_hash
from eyas.request import IDENTITY
from eyas.selection import sameness
from eyas.server.lease import hold
from eyas.sources.files import read_rows
from eyas.tokenizer import load_tokenizer
from eyas.units import Plan

ALREADY = "already in the journal"
COPY = "a copy: its prompt has an answer of the same output_ids, and no `sample` tells them apart"
UNKNOWN = "no such prompt in the dataset"
UNASKED = "its prompt is refused by this config"
OTHER_IDS = "its prompt_ids are not those of this config's rendering"
TEXT_ONLY = "text only, no output_ids: tokenizing text again gives other ids than the model sampled"
NOT_READ = "restore it from a backup; what another version of Eyas wrote, this one may be unable to read"
NAMELESS = "neither key nor messages tell its prompt"
UNTOLD = ("grammar", "regex")  # may be left out of `sampling`, which means that there was none
FREE = ("seed",)  # may stand in `sampling`, and decides no distribution

log = logging.getLogger(__name__)


class Foreign(Struct, frozen=True, kw_only=True):
    """An answer of another program. Fields that are not here are ignored."""

    key: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    sample: int | None = None
    prompt_ids: list[int] | None = None
    output_ids: list[int] | None = None
    finish: Finish | str | None = None
    sampling: dict[str, Any] | None = None
    model: dict[str, Any] | None = None

    @property
    def name(self) -> str | None:
        """What finds its prompt; None if nothing does, or it is no valid Unicode."""
        try:
            if self.key is None and self.messages is not None:
                return sameness(self.messages, self.tools)
            return self.key and self.key.encode().decode()
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell
            return None


class _Unfit(Exception):
    """The argument is the reason, a short constant phrase."""


@dataclass
class Adopted:
    """What became of a file's records: `answers` adopted with `tokens` output tokens, the rest by reason."""

    answers: int = 0
    tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def records(self) -> int:
        return self.answers + sum(self.refused.values())


@dataclass(frozen=True)
class _Place:
    """A prompt of the dataset that some record answers. ids: digest of its prompt ids, None if they are not known."""

    occurrence: int
    ids: bytes | None
    asked: bool


def adopt(
    settings: GenerateSettings,
    access: AccessSettings,
    prompts: Path,
    journal_folder: Path,
    file: Path,
    registry: Registry,
) -> Adopted:
    """Adopts what fits of `file` into the journal of one dataset.

    Needs the model's tokenizer for records of other programs: `model.tokenizer`, or else the server, which is started
    if need be. Raises EyasError, one line that names file, line and remedy, for a file that cannot be read.
    """
    manifest = {"adopted": {"file": file.name, "sha256": _sha256(file)}}
    with JournalWriter(journal_folder) as writer, Journal(journal_folder) as journal, ExitStack() as stack:
        plan = Plan(settings, prompts, registry)
        own = _is_sealed(file)
        tokenizer, renderer = _tools(plan, access, registry, stack, own)
        places = stack.enter_context(closing(_Places(stack.enter_context(scratch(prompts)) / "places")))
        for record in _records(file, own):
            if (name := record.key if isinstance(record, Response) else record.name) is not None:
                places.want(name)
        _find(places, plan, prompts, journal, writer, renderer)
        adopting = _Adopting(plan, places, tokenizer, journal, differing(settings, file) if own else None)
        result = Adopted()
        for record in _records(file, own):
            try:
                reply = adopting.fit(record)
            except _Unfit as reason:
                result.refused[str(reason)] += 1
                continue
            if not result.answers and journal.server(fingerprint(manifest)) is None:
                writer.append(ServerSeen(id=fingerprint(manifest), manifest=manifest))
            writer.append(Answered(reply=reply, delivery=_delivery(fingerprint(manifest))))
            result.answers += 1
            result.tokens += len(reply.output_ids)
        return result


def _delivery(server: str) -> Delivery:
    """When it was asked is not known, so it counts in no rate."""
    return Delivery(attempt=1, server=server, started=0.0, finished=0.0, usage={})


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise EyasError(f"{file}: cannot be read ({error.strerror}); correct the path") from None


def _is_sealed(file: Path) -> bool:
    """Whether it is a record file of Eyas, so a responses.jsonl.zst."""
    try:
        read_seal(file)
    except EyasError:
        return False
    return True


def _records(file: Path, own: bool) -> Iterator[Response | Foreign]:
    if own:
        yield from read_records(file, Response, NOT_READ)
        return
    for number, row in read_rows(file):
        try:
            yield msgspec.convert(row, Foreign)
        except msgspec.ValidationError as error:
            raise EyasError(
                f"{file}: line {number}: {error}; correct the record (docs/reproducibility.md describes it)"
            ) from None


def _tools(
    plan: Plan, access: AccessSettings, registry: Registry, stack: ExitStack, own: bool
) -> tuple[Tokenizer | None, Renderer | None]:
    """The model's tokenizer and renderer. Eyas' own records hold what they tell, so for these no server is asked."""
    model = plan.settings.model
    if model.tokenizer is not None:
        tokenizer = load_tokenizer(model)
        return tokenizer, Renderer(model, tokenizer, plan.reasoning.prefill)
    if own:
        return None, None
    section = dict(access.server.engine)
    engine = registry.create("engine", section.pop("name"), section, "server.engine", model)
    assert isinstance(engine, Engine)
    lease = stack.enter_context(hold(access, engine, log))
    return prepare(engine, lease, model, plan.reasoning)


class _Places:
    """On disk: the names by which a file's records call their prompts, the prompts of each, the requests answered so far."""

    def __init__(self, file: Path) -> None:
        # One transaction that never commits: the file is thrown away whatever happens.
        self._database = sqlite3.connect(file, isolation_level=None)
        self._database.executescript("""
            PRAGMA journal_mode = OFF;
            PRAGMA synchronous = OFF;
            PRAGMA locking_mode = EXCLUSIVE;
            BEGIN;
            CREATE TABLE names (name TEXT PRIMARY KEY, places INTEGER, records INTEGER) WITHOUT ROWID;
            CREATE TABLE places (
                name TEXT, number INTEGER, occurrence INTEGER, ids BLOB, asked INTEGER, PRIMARY KEY (name, number)
            ) WITHOUT ROWID;
            CREATE TABLE requests (request BLOB PRIMARY KEY) WITHOUT ROWID;
            CREATE TABLE outputs (
                name TEXT, digest BLOB, journalled INTEGER, PRIMARY KEY (name, digest)
            ) WITHOUT ROWID;
            CREATE TABLE looked_up (name TEXT PRIMARY KEY) WITHOUT ROWID;
        """)

    def close(self) -> None:
        self._database.close()

    def want(self, name: str) -> None:
        self._database.execute("INSERT OR IGNORE INTO names VALUES (?, 0, 0)", (name,))

    def wanted(self, name: str) -> bool:
        return self._database.execute("SELECT 1 FROM names WHERE name = ?", (name,)).fetchone() is not None

    def add(self, name: str, place: _Place) -> None:
        """The next prompt of a wanted name, in the fixed order."""
        (count,) = self._database.execute(
            "UPDATE names SET places = places + 1 WHERE name = ? RETURNING places", (name,)
        ).fetchone()
        row = (name, count - 1, place.occurrence, place.ids, place.asked)
        self._database.execute("INSERT INTO places VALUES (?, ?, ?, ?, ?)", row)

    def get(self, name: str, number: int = 0) -> _Place:
        """Its `number`-th prompt. Raises _Unfit if there is none."""
        row = self._database.execute(
            "SELECT occurrence, ids, asked FROM places WHERE name = ? AND number = ?", (name, number)
        ).fetchone()
        if row is None:
            raise _Unfit(UNKNOWN)
        occurrence, ids, asked = row
        return _Place(occurrence, ids, bool(asked))

    def is_looked_up(self, name: str) -> bool:
        """Whether the journal's answers to its prompts were looked up before; they are by whoever asks."""
        return self._database.execute("INSERT OR IGNORE INTO looked_up VALUES (?)", (name,)).rowcount == 0

    def add_output(self, name: str, digest: bytes, *, journalled: bool) -> None:
        """One of its prompts has an answer of these output ids."""
        row = (name, digest, journalled)
        self._database.execute("INSERT OR IGNORE INTO outputs VALUES (?, ?, ?)", row)

    def known_output(self, name: str, digest: bytes) -> str | None:
        """Why such an answer is none to take again; None for one of ids that it has not."""
        row = self._database.execute(
            "SELECT journalled FROM outputs WHERE name = ? AND digest = ?", (name, digest)
        ).fetchone()
        return None if row is None else ALREADY if row[0] else COPY

    def prompts(self, name: str) -> Iterator[_Place]:
        """All of its prompts, in the fixed order."""
        for row in self._database.execute(
            "SELECT occurrence, ids, asked FROM places WHERE name = ? ORDER BY number", (name,)
        ):
            yield _Place(row[0], row[1], bool(row[2]))

    def count(self, name: str) -> tuple[int, int]:
        """Counts a record of a wanted name: how many prompts it has, how many records came before."""
        places, records = self._database.execute(
            "UPDATE names SET records = records + 1 WHERE name = ? RETURNING places, records", (name,)
        ).fetchone()
        return places, records - 1

    def is_new(self, request: str) -> bool:
        """Whether it comes for the first time."""
        row = (bytes.fromhex(request),)
        return self._database.execute("INSERT OR IGNORE INTO requests VALUES (?)", row).rowcount == 1


def _find(
    places: _Places,
    plan: Plan,
    prompts: Path,
    journal: Journal,
    writer: JournalWriter,
    renderer: Renderer | None,
) -> None:
    """The prompts of each name, by key and by what the messages say, in the fixed order."""
    for index, prompt in enumerate(read_records(prompts, Prompt)):
        asked_by = [
            name for name in {prompt.key, sameness(prompt.messages, prompt.tools)} if places.wanted(name)
        ]
        if not asked_by:
            continue
        name = render_hash(prompt, plan.identity)
        rendered = journal.rendered(name)
        if rendered is None and renderer is not None:
            rendered = _rendered(renderer, prompt, name)
            writer.append(rendered)
        unit = plan.unit(index, prompt, 0, rendered)
        place = _Place(
            occurrence=prompt.occurrence,
            ids=None if unit.ids is None else _digest(unit.ids),
            asked=unit.settled is None,
        )
        for by in asked_by:
            places.add(by, place)


def _rendered(renderer: Renderer, prompt: Prompt, name: str) -> Rendered:
    try:
        return Rendered(render=name, ids=renderer.render(prompt), refusal=None)
    except (Refused, Reject) as reason:
        return Rendered(render=name, ids=None, refusal=str(reason))
    except Retry as cause:
        raise EyasError(
            f"{prompt.key}: the server went away ({cause}); run the same command again"
        ) from cause


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(msgspec.json.encode(ids[:])).digest()


class _Adopting:
    """Decides on one record after the other."""

    def __init__(
        self,
        plan: Plan,
        places: _Places,
        tokenizer: Tokenizer | None,
        journal: Journal,
        difference: str | None,
    ) -> None:
        self.plan, self.places, self.tokenizer, self.journal = plan, places, tokenizer, journal
        self.difference = difference or "its settings differ, or its number of samples"

    def fit(self, record: Response | Foreign) -> Reply:
        """The reply to journal. Raises _Unfit."""
        reply = self._own(record) if isinstance(record, Response) else self._foreign(record)
        if self.journal.has_answer(reply.request) or not self.places.is_new(reply.request):
            raise _Unfit(ALREADY)
        return reply

    def _own(self, record: Response) -> Reply:
        place = self.places.get(record.key)
        if record.turn == 0:  # what a later turn is asked depends on the answers before it; its request tells
            self._compare_prompt(place, record.prompt_ids)
        if record.sample >= self.plan.settings.samples:
            raise _Unfit("more answers than the config's samples")
        if record.request != self.plan.request(record.prompt_ids, record.sample, place.occurrence):
            raise _Unfit(self.difference)
        return Reply(**{name: getattr(record, name) for name in Reply.__struct_fields__})

    def _foreign(self, record: Foreign) -> Reply:
        tokenizer, sampling = self.tokenizer, self.plan.settings.sampling
        assert tokenizer is not None
        prompt_ids, output_ids = record.prompt_ids, record.output_ids
        if output_ids is None:
            raise _Unfit(TEXT_ONLY)
        if prompt_ids is None:
            raise _Unfit("no prompt_ids, so what the model was shown is not known")
        self._compare_settings(record)
        if (
            not 0
            <= min([*prompt_ids, *output_ids], default=-1)
            <= max([*prompt_ids, *output_ids], default=-1)
            < tokenizer.vocabulary_size
        ):
            raise _Unfit("ids outside the vocabulary, or none at all")
        finish = _finish(record, tokenizer.stop_ids, sampling.max_new_tokens)
        name = record.name
        if name is None:
            raise _Unfit(NAMELESS)
        output = _digest(output_ids)
        if record.sample is None:
            self._refuse_copy(name, prompt_ids, output)
        place, sample = self._next(name, record.sample)
        self._compare_prompt(place, prompt_ids)
        self.places.add_output(name, output, journalled=False)
        text, lengths = tokenizer.decode(output_ids)
        present = {*prompt_ids, *output_ids}
        added = {text: token for text, token in tokenizer.added_tokens.items() if token in present}
        control = frozenset(tokenizer.control_ids)
        return Reply(
            request=self.plan.request(prompt_ids, sample, place.occurrence),
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            finish=finish,
            text=text,
            text_lengths=lengths,
            stop_ids=tokenizer.stop_ids,
            added_tokens=dict(sorted(added.items(), key=lambda item: item[1])),
            control_ids=[token for token in sorted(added.values()) if token in control],
            effective_max_new=sampling.max_new_tokens,
            constrained=sampling.constrained,
        )

    def _refuse_copy(self, name: str, prompt_ids: list[int], output: bytes) -> None:
        """Raises _Unfit where one of its prompts has such an answer, which else would fill a second sample. It takes no number."""
        if not self.places.is_looked_up(name):
            for place in self.places.prompts(name):
                for sample in range(self.plan.settings.samples):
                    entry = self.journal.answered(self.plan.request(prompt_ids, sample, place.occurrence))
                    if entry is not None:
                        self.places.add_output(name, _digest(entry.reply.output_ids), journalled=True)
        if (reason := self.places.known_output(name, output)) is not None:
            raise _Unfit(reason)

    def _next(self, name: str, sample: int | None) -> tuple[_Place, int]:
        """Its prompt and sample; records that do not tell their sample fill those of equal prompts in turn."""
        samples = self.plan.settings.samples
        prompts, before = self.places.count(name)
        number = before if sample is None else sample
        if not prompts:
            raise _Unfit(UNKNOWN)
        if not 0 <= number < samples * prompts:
            raise _Unfit("more answers than the config's samples")
        return self.places.get(name, number // samples), number % samples

    def _compare_prompt(self, place: _Place, prompt_ids: list[int]) -> None:
        if not place.asked:
            raise _Unfit(UNASKED)
        if place.ids is not None and place.ids != _digest(prompt_ids):
            raise _Unfit(OTHER_IDS)

    def _compare_settings(self, record: Foreign) -> None:
        """Raises _Unfit, naming the first field that is not as the config has it."""
        if record.sampling is None:
            raise _Unfit("no sampling settings, so its distribution is not known")
        if record.model is None:
            raise _Unfit("no model, so whose answer it is is not known")
        wanted = msgspec.to_builtins(self.plan.settings.sampling)
        for name, value in wanted.items():
            if name not in record.sampling and name not in UNTOLD:
                raise _Unfit(f"sampling.{name} is not told")
            if record.sampling.get(name) != value:
                raise _Unfit(f"sampling.{name} differs")
        for name in record.sampling:
            if name not in wanted and name not in FREE:
                # As ASCII: a name may hold line breaks, or what no terminal can show.
                spelt = ascii(name)[1:-1]
                raise _Unfit(f"sampling.{spelt} is no setting of Eyas, so it cannot be compared")
        for name in IDENTITY:
            if record.model.get(name) != (value := getattr(self.plan.settings.model, name)):
                told = name in record.model or value is None
                raise _Unfit(f"model.{name} {'differs' if told else 'is not told'}")


def _finish(record: Foreign, stop_ids: list[int], limit: int) -> Finish:
    """Why it ended. Only `stop` at an end token and `length` at the limit are finished answers."""
    finish = record.finish.type if isinstance(record.finish, Finish) else record.finish
    output_ids = record.output_ids or []
    if finish not in ("stop", "length"):
        raise _Unfit("not finished: finish is neither stop nor length")
    if len(output_ids) > limit:
        raise _Unfit("longer than sampling.max_new_tokens")
    if finish == "length":
        if len(output_ids) < limit:
            raise _Unfit("finish is length, but it is shorter than sampling.max_new_tokens")
        # A server that looks at the length first; but the answer is whole, as for the engines.
        ended = output_ids[-1] in stop_ids
        return Finish(type="stop", matched=output_ids[-1]) if ended else Finish(type="length")
    if not output_ids or output_ids[-1] not in stop_ids:
        raise _Unfit("finish is stop, but its last id is no end token of the model")
    return Finish(type="stop", matched=output_ids[-1])


def differing(settings: GenerateSettings, file: Path) -> str | None:
    """The first setting in which the run that made `file` differs, as the manifest of that run tells it."""
    manifest = file.resolve().parent.parent / "summary" / "manifest.json"
    try:
        jobs = msgspec.json.decode(manifest.read_bytes())["jobs"]["generate"]
        made = jobs[file.resolve().parent.name]["settings"]
    except (OSError, msgspec.MsgspecError, KeyError, TypeError):
        return None
    wanted = msgspec.to_builtins(settings)
    for section, names in (("model", IDENTITY), ("sampling", tuple(wanted["sampling"]))):
        for name in names:
            if made.get(section, {}).get(name) != wanted[section][name]:
                return f"{section}.{name} differs"
    return None
