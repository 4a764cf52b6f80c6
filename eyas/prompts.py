"""The prompts stage: dataset rows become conversation openings in the one order that every later file keeps.

    row ─source→ conversation ─opening→ prompt ─filters→ the fixed order ─duplicates, evaluation sets→ the first n

The order is that of sha256("seed:key"), so a row count takes the first n, growing it appends, and rows
inserted into a source file change the place of no other prompt. Sorting is left to a temporary SQLite file:
memory stays flat however many rows there are.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sqlite3
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import msgspec

from eyas import recordfile
from eyas.config import PromptsSettings
from eyas.errors import EyasError
from eyas.plugins import Conversation, Skip, Source
from eyas.records import Message, Origin, Prompt, Record, Turn
from eyas.selection import EvaluationSets, Selection, leaves_out, said, unfit

HASH_DIGITS = 16
CACHE_KIBIBYTES = 64 * 1024  # page cache of the sorter; holds the counters of about a million rows


class FileReport(Record, frozen=True):
    """A file that was read: its name in the config, its rows, the SHA-256 of its bytes."""

    name: str
    rows: int
    sha256: str


class EvaluationReport(Record, frozen=True):
    """An evaluation set that prompts were held against. items: its questions."""

    name: str
    items: int
    files: list[FileReport]


class PromptsReport(Record, frozen=True):
    """What became of the rows: rows_read = used + not_taken + the sum of skipped.

    asked: the row count of the config, or null for all. not_taken: rows beyond it, which nobody looked at for duplicates
    and evaluation sets. skipped: rows by reason. evaluation: the sets that prompts were held against.
    turns: of the used conversations, all together; as many as are used where only the first is asked for.
    keys: KeysDigest of the used prompts, in the fixed order.
    """

    dataset: str
    asked: int | None
    rows_read: int
    used: int
    turns: int
    keys: str
    not_taken: int
    skipped: dict[str, int]
    files: list[FileReport]
    evaluation: list[EvaluationReport]


@dataclass(frozen=True)
class Evaluation:
    """How an evaluation set is read: its source, and where its files lie."""

    source: Source
    files: list[Path]


def prompts(
    settings: PromptsSettings,
    files: list[Path],
    names: list[str],
    source: Source,
    out: Path,
    report: Path,
    evaluations: Mapping[str, Evaluation] = MappingProxyType({}),
) -> PromptsReport:
    """Writes the prompts of `files` to `out` and what became of their rows to `report`.

    `names` are what prompts and report call the files, whatever folder they lie in. evaluations: those of the settings, by
    name. Raises EyasError for a row that does not fit the source, and if there is no usable row at all.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    index, held_against = _evaluation_sets(settings, evaluations)
    skipped: Counter[str] = Counter()
    read: list[FileReport] = []
    usable = 0
    with _Sorter(out, None if leaves_out(settings) else settings.rows) as sorter:
        for path, name in zip(files, names, strict=True):
            rows = 0
            for number, row in source.rows(path):
                rows += 1
                parsed = _parse(source, row, f"{path}: row {number}")
                opened = parsed if isinstance(parsed, Skip) else opening(parsed)
                if isinstance(opened, Skip):
                    skipped[opened.reason] += 1
                    continue
                assert isinstance(parsed, Conversation)
                key = _key(opened.id, row, sorter)
                origin = Origin(source=source.name, revision=settings.revision, file=name, row=number)
                prompt = Prompt(
                    key=key,
                    messages=opened.messages,
                    turns=later_turns(parsed, len(opened.messages)) if settings.turns == "all" else [],
                    tools=opened.tools,
                    origin=origin,
                    occurrence=0,
                    group=group(opened.messages),
                )
                if reason := unfit(prompt, settings.filter):
                    skipped[reason] += 1
                    continue
                usable += 1
                sorter.add(hashlib.sha256(f"{settings.seed}:{key}".encode()).digest(), prompt)
            read.append(_report(path, name, rows))
        selection = Selection(settings, index, sorter.database, sorter.count)
        left_out: Counter[str] = Counter()
        turns = 0
        keys = KeysDigest()
        with recordfile.Writer[Prompt](out) as writer:
            for prompt in sorter.sorted():
                if writer.rows == settings.rows:
                    break
                taken = selection.take(prompt)
                if isinstance(taken, str):
                    left_out[taken] += 1
                else:
                    turns += 1 + len(taken.turns)
                    keys.add(taken.key)
                    writer.write(taken)
            skipped += left_out
            if not writer.rows:
                raise EyasError(_nothing_usable(f"dataset {settings.dataset}", names, skipped))
    result = PromptsReport(
        dataset=settings.dataset,
        asked=settings.rows,
        rows_read=sum(file.rows for file in read),
        used=writer.rows,
        turns=turns,
        keys=keys.hex(),
        not_taken=usable - writer.rows - left_out.total(),
        skipped=dict(sorted(skipped.items())),
        files=read,
        evaluation=held_against,
    )
    assert result.rows_read == result.used + result.not_taken + sum(result.skipped.values())
    with recordfile.atomic(report) as temporary:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return result


class KeysDigest:
    """SHA-256 of keys in their order, each with a line break: who has equal ones has the same prompts in the same order."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digest = hashlib.sha256()
        for key in keys:
            self.add(key)

    def add(self, key: str) -> None:
        self._digest.update(f"{key}\n".encode())

    def hex(self) -> str:
        return self._digest.hexdigest()


def _report(path: Path, name: str, rows: int) -> FileReport:
    with path.open("rb") as file:
        return FileReport(name=name, rows=rows, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _evaluation_sets(
    settings: PromptsSettings, evaluations: Mapping[str, Evaluation]
) -> tuple[EvaluationSets | None, list[EvaluationReport]]:
    """The items of the evaluation sets: the openings of their rows."""
    if settings.decontaminate is None:
        return None, []
    index = EvaluationSets(settings.decontaminate)
    reports = []
    for name, section in settings.evaluation_sets.items():
        items, skipped = 0, Counter[str]()
        files = []
        for path, called in zip(evaluations[name].files, section.files, strict=True):
            rows = 0
            for number, row in evaluations[name].source.rows(path):
                rows += 1
                parsed = _parse(evaluations[name].source, row, f"{path}: row {number}")
                opened = parsed if isinstance(parsed, Skip) else opening(parsed)
                if isinstance(opened, Skip):
                    skipped[opened.reason] += 1
                    continue
                index.add(name, said(opened.messages))
                items += 1
            files.append(_report(path, called, rows))
        if not items:
            raise EyasError(_nothing_usable(f"evaluation set {name}", section.files, skipped))
        reports.append(EvaluationReport(name=name, items=items, files=files))
    return index, reports


def opening(conversation: Conversation) -> Conversation | Skip:
    """The conversation up to before its first answer: what `turns: first` asks. No earlier answer is left in it."""
    if not conversation.messages:
        return Skip("conversation is empty")
    asked = list(
        itertools.takewhile(lambda message: message.role in ("system", "user"), conversation.messages)
    )
    said = [message.content for message in asked if message.role == "user"]
    if not said:
        answered = len(asked) < len(conversation.messages)
        return Skip(
            "conversation starts with an assistant or tool turn"
            if answered
            else "conversation has no user turn"
        )
    if not any(content.strip() for content in said):
        return Skip("first user turn is empty")
    opened = Conversation(asked, conversation.tools, conversation.id)
    try:
        msgspec.json.encode([opened.messages, opened.tools, opened.id])
    except UnicodeEncodeError:
        # JSON can spell half a surrogate pair ("\ud800"), which is no character and fits no UTF-8 file.
        return Skip("text is not valid Unicode")
    return opened


def later_turns(conversation: Conversation, opening: int) -> list[Turn]:
    """What leads from each recorded answer to the next, in a conversation whose first `opening` messages are asked first.

    Assistant messages in a row are one answer. What follows the last answer leads to none, and neither does what follows
    a message that nobody could ask: a user's without text, or one that is no valid Unicode.
    """
    turns: list[Turn] = []
    calls: list[dict[str, Any]] = []
    between: list[Message] = []
    rest = conversation.messages[opening:]
    if not rest or rest[0].role != "assistant":
        return []  # a tool result that nobody asked for
    for message in rest:
        if message.role != "assistant":
            if message.role == "user" and not message.content.strip():
                break
            between.append(message)
            continue
        if between:
            turn = Turn(calls=calls, messages=between)
            try:
                msgspec.json.encode(turn)
            except UnicodeEncodeError:
                break
            turns.append(turn)
            calls, between = [], []
        calls = calls + (message.tool_calls or [])
    return turns


def group(messages: Sequence[Message]) -> str:
    """Hash of the prompt's text; equal for texts that differ only in case, white space or Unicode form."""
    text = " ".join(message.content for message in messages)
    folded = unicodedata.normalize("NFKC", text).casefold()
    return hashlib.sha256(" ".join(folded.split()).encode()).hexdigest()[:HASH_DIGITS]


def _parse(source: Source, row: dict[str, Any], where: str) -> Conversation | Skip:
    remedy = f"correct the row, or pick the right source (this one is {source.name!r})"
    try:
        return source.parse(row)
    except KeyError as error:
        columns = ", ".join(map(repr, row))
        raise EyasError(
            f"{where}: no column {error.args[0]!r} among {columns or 'none'}; {_naming(source, error.args[0])}{remedy}"
        ) from error
    except (TypeError, ValueError) as error:
        raise EyasError(f"{where}: {error}; {remedy}") from error
    except RecursionError:
        raise EyasError(f"{where}: objects or lists stand too deep in one another; {remedy}") from None


def _naming(source: Source, column: str) -> str:
    """What to do about the option that names `column`, if the source has one."""
    options = msgspec.structs.asdict(source.options)
    named = next((name for name, value in options.items() if value == column), None)
    if named is None and options.get("column", column) is None:
        named = "column"  # null: the source looks for the usual ones
    return f"set `source.{named}`, " if named else ""


def _key(identity: str | None, row: dict[str, Any], sorter: _Sorter) -> str:
    """The source's id, else the row's hash and how many identical rows came before it.

    An id that has been seen before is extended by the row's hash and counted likewise. So a repeated id keeps
    all rows apart, and an inserted row renumbers nothing, except that the plain id belongs to the first
    usable row that has it.
    """
    if identity and not sorter.count(identity):
        return identity
    # `repr` is for what Parquet has and JSON has not: dates, decimals, bytes.
    canonical = json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=repr)
    base = hashlib.sha256(canonical.encode()).hexdigest()[:HASH_DIGITS]
    if identity:
        base = f"{identity}-{base}"
    return f"{base}-{sorter.count(base)}"


def _nothing_usable(what: str, names: Sequence[str], skipped: Counter[str]) -> str:
    reasons = (
        ", ".join(f"{count:,} × {reason}" for reason, count in sorted(skipped.items())) or "there are no rows"
    )
    where = ", ".join(names)
    return f"{what}: no usable row in {where} ({reasons}); correct `files:` or pick the right source"


class _Sorter:
    """Sorts prompts by rank and counts names, on disk. With a limit, it keeps little more than the first `limit`."""

    def __init__(self, out: Path, limit: int | None) -> None:
        self._out = out
        self._limit = limit
        self._highest: bytes | None = None
        self._held = 0

    def __enter__(self) -> _Sorter:
        self._stack = contextlib.ExitStack()
        file = self._stack.enter_context(recordfile.scratch(self._out)) / "sort.sqlite"
        # One transaction that never commits: the file is thrown away whatever happens.
        self.database = self._stack.enter_context(
            contextlib.closing(sqlite3.connect(file, isolation_level=None))
        )
        self.database.executescript(f"""
            PRAGMA journal_mode = OFF;
            PRAGMA synchronous = OFF;
            PRAGMA locking_mode = EXCLUSIVE;
            PRAGMA cache_size = -{CACHE_KIBIBYTES};
            BEGIN;
            CREATE TABLE names (name TEXT PRIMARY KEY, seen INTEGER) WITHOUT ROWID;
            CREATE TABLE prompts (rank BLOB, payload BLOB);
            CREATE UNIQUE INDEX prompts_by_rank ON prompts (rank);
        """)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if isinstance(error, sqlite3.OperationalError):
            raise EyasError(
                f"{self._out.parent}: cannot sort the prompts there ({error}); free disk space and run again"
            ) from error

    def count(self, name: str) -> int:
        """How often `name` has been counted before."""
        (seen,) = self.database.execute(
            "INSERT INTO names VALUES (?, 0) ON CONFLICT DO UPDATE SET seen = seen + 1 RETURNING seen",
            (name,),
        ).fetchone()
        return int(seen)

    def add(self, rank: bytes, prompt: Prompt) -> None:
        if self._highest is not None and rank > self._highest:
            return
        self.database.execute("INSERT INTO prompts VALUES (?, ?)", (rank, msgspec.json.encode(prompt)))
        self._held += 1
        # Twice the limit, so that pruning costs a constant number of steps per row.
        if self._limit is not None and self._held > 2 * self._limit:
            self._prune(self._limit)

    def _prune(self, limit: int) -> None:
        (self._highest,) = self.database.execute(
            "SELECT rank FROM prompts ORDER BY rank LIMIT 1 OFFSET ?", (limit - 1,)
        ).fetchone()
        self.database.execute("DELETE FROM prompts WHERE rank > ?", (self._highest,))
        self._held = limit

    def sorted(self) -> Iterator[Prompt]:
        """The first `limit` prompts in the order of their ranks."""
        decode = msgspec.json.Decoder(Prompt).decode
        limit = -1 if self._limit is None else self._limit
        for (payload,) in self.database.execute(
            "SELECT payload FROM prompts ORDER BY rank LIMIT ?", (limit,)
        ):
            yield decode(payload)
