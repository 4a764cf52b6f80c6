"""Which usable prompts are taken: filters, exact and near duplicates, what stands in evaluation sets; a reason for each that is not.

Prompts are compared by what the user says in them. All but the filters is decided in the fixed order, each prompt by those
before it alone: so growing the row count keeps what was chosen, and neither the order of rows nor the number of cores matters.
"""

from __future__ import annotations

import hashlib
import sqlite3
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import msgspec

from eyas.config import DecontaminateConfig, FilterConfig, NearDuplicatesConfig, PromptsSettings
from eyas.records import Message, Prompt

EXACT_DUPLICATE = "exact duplicate of an earlier prompt"
NEAR_DUPLICATE = "near-duplicate of an earlier prompt"
# Scripts that put no space between words; each of their characters is a word.
SPACELESS = "".join(
    rf"\p{{Script={name}}}" for name in ("Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar")
)
PERMUTATIONS = 128  # of a MinHash signature; datasketch's own number
# Candidates are compared exactly, so a needless one costs time and a missed one a duplicate: few shall be missed.
WEIGHTS = (0.1, 0.9)
STRICTEST = 0.99  # for candidates: above, datasketch would have a single band, which it refuses


def said(messages: Iterable[Message]) -> str:
    """What the user says: all user turns, a blank line between."""
    return "\n\n".join(message.content for message in messages if message.role == "user")


def said_in(prompt: Prompt) -> str:
    """What the user says in all turns that are asked."""
    return said([*prompt.messages, *(message for turn in prompt.turns for message in turn.messages)])


def sameness(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
    """Equal for prompts that a model may see as equal: a chat template may trim contents, and leave out a system message that
    says nothing.
    """
    told = ([message.role, message.content.strip()] for message in messages)
    asked = [[role, content] for role, content in told if content or role != "system"]
    return hashlib.sha256(msgspec.json.encode([asked, tools])).hexdigest()


# --- filters -----------------------------------------------------------------------------------------------------


def unfit(prompt: Prompt, wanted: FilterConfig) -> str | None:
    """Why the filters leave the prompt out; None if they do not."""
    text = said_in(prompt)
    if wanted.min_characters is not None and len(text) < wanted.min_characters:
        return "shorter than min_characters"
    if wanted.max_characters is not None and len(text) > wanted.max_characters:
        return "longer than max_characters"
    if wanted.scripts and script_share(text, wanted.scripts) < wanted.min_script_share:
        return "too few letters in the scripts asked for"
    return None


def script_share(text: str, scripts: Sequence[str]) -> float:
    """Share of letters that belong to the Unicode scripts; 1 for a text without letters (a formula fits everywhere)."""
    every, wanted = _letters(tuple(scripts))
    letters = sum(map(len, every(text)))
    return sum(map(len, wanted(text))) / letters if letters else 1.0


@cache
def _letters(scripts: tuple[str, ...]) -> tuple[Callable[[str], list[str]], Callable[[str], list[str]]]:
    """What finds runs of letters, and of letters of these scripts."""
    import regex

    either = "".join(rf"\p{{Script={name}}}" for name in scripts)
    return regex.compile(r"\p{L}+").findall, regex.compile(rf"[\p{{L}}&&[{either}]]+", regex.V1).findall


# --- comparing ---------------------------------------------------------------------------------------------------


# What the compared texts are made of. Punctuation is none of it: quotes, full stops and dashes are set one way here, another there.
WORD = rf"""
    [{SPACELESS}]
    | [[\p{{L}}\p{{M}}\p{{N}}_]--[{SPACELESS}]]+
    # Operators and other symbols. "$" is none: TeX sets formulas between two of it.
    | [[\p{{Sm}}\p{{Sc}}\p{{So}}%\&^/]--[$]]+
    # Brackets, but for TeX's \( and \[ around formulas.
    | (?<!\\)[()\[\]{{}}]
    # Stars between operands; others are bullets or emphasis.
    | (?<=[\w)\]])\*+(?=[\w(\[]) | (?<=[\w)\]]\ )\*+(?=\ [\w(\[])
    # A minus before a number or between two, "-=", "->"; others are hyphens and dashes.
    | (?<![\w-])-(?=\d) | (?<=[\d)]\ ?)-(?=\ ?[\d(])
    | [-*](?=[=>])
    # "not": "!=", "!ready".
    | !(?==) | (?<!\w)!(?=\w)
"""
MINUS = dict.fromkeys(map(ord, "\u2010\u2012\u2013\u2212"), "-")


@cache
def _words() -> Callable[[str], list[str]]:
    import regex

    find: Callable[[str], list[str]] = regex.compile(WORD, regex.V1 | regex.VERBOSE).findall
    return find


def words(text: str) -> list[str]:
    """The words and operators of a text, whatever their case, Unicode form and punctuation; what stands between spaces if
    it has none.
    """
    folded = unicodedata.normalize("NFKC", text).casefold().translate(MINUS)
    return _words()(folded) or folded.split()


def ngrams(found: Sequence[str], size: int) -> set[bytes]:
    """Hashes, 8 bytes each, of all runs of `size` words; of all words together if there are fewer."""
    runs = (found[at : at + size] for at in range(max(1, len(found) - size + 1)))
    return {hashlib.blake2b(" ".join(run).encode(), digest_size=8).digest() for run in runs}


class NearDuplicates:
    """The prompts taken so far, on disk, by what is alike. Only prompts with equal system message and tools are compared.

    MinHash signatures find the candidates (datasketch), exact Jaccard similarity of their n-grams decides.
    """

    def __init__(self, wanted: NearDuplicatesConfig, database: sqlite3.Connection) -> None:
        from datasketch import MinHash, MinHashLSH

        self._wanted = wanted
        self._database = database
        # The n-grams are hashes already.
        self._empty = MinHash(PERMUTATIONS, seed=1, hashfunc=lambda gram: int.from_bytes(gram[:4], "little"))
        bands = MinHashLSH(min(wanted.threshold, STRICTEST), PERMUTATIONS, WEIGHTS)
        self._bands = [slice(at * bands.r, (at + 1) * bands.r) for at in range(bands.b)]
        database.execute("CREATE TABLE taken (number INTEGER PRIMARY KEY, grams BLOB)")
        database.execute(
            "CREATE TABLE bands (band BLOB, number INTEGER, PRIMARY KEY (band, number)) WITHOUT ROWID"
        )

    def has_alike(self, prompt: Prompt) -> bool:
        """Whether an earlier prompt is alike; if not, this one is remembered."""
        frame = [[message.content for message in prompt.messages if message.role == "system"], prompt.tools]
        grams = ngrams(words(said_in(prompt)), self._wanted.words)
        signature = self._empty.copy()
        signature.update_batch(sorted(grams))
        places = [
            hashlib.blake2b(
                msgspec.json.encode([number, frame]) + signature.hashvalues[band].tobytes(), digest_size=8
            ).digest()
            for number, band in enumerate(self._bands)
        ]
        candidates = self._database.execute(
            f"SELECT grams FROM taken WHERE number IN (SELECT number FROM bands WHERE band IN ({','.join('?' * len(places))}))",
            places,
        )
        if any(_jaccard(grams, other) >= self._wanted.threshold for (other,) in candidates):
            return True
        number = self._database.execute("INSERT INTO taken (grams) VALUES (?)", (b"".join(grams),)).lastrowid
        self._database.executemany(
            "INSERT OR IGNORE INTO bands VALUES (?, ?)", [(place, number) for place in places]
        )
        return False


def _jaccard(grams: set[bytes], packed: bytes) -> float:
    other = {packed[at : at + 8] for at in range(0, len(packed), 8)}
    return len(grams & other) / len(grams | other)


class EvaluationSets:
    """The items of evaluation sets by their n-grams, in memory."""

    def __init__(self, wanted: DecontaminateConfig) -> None:
        self._wanted = wanted
        self._sets: list[str] = []  # by item
        self._sizes: list[int] = []  # n-grams by item
        self._holders: dict[bytes, list[int]] = {}  # items by n-gram
        self._short: dict[bytes, str] = {}  # sets by the whole of an item too short for one n-gram

    def add(self, name: str, text: str) -> None:
        found = words(text)
        grams = ngrams(found, self._wanted.words)
        if len(found) < self._wanted.words:
            self._short.setdefault(grams.pop(), name)
            return
        for gram in grams:
            self._holders.setdefault(gram, []).append(len(self._sets))
        self._sets.append(name)
        self._sizes.append(len(grams))

    def overlapping(self, text: str) -> str | None:
        """The set of the first item that the text holds; None if there is none."""
        found = words(text)
        grams = ngrams(found, self._wanted.words)
        if len(found) < self._wanted.words:
            return self._short.get(grams.pop())
        shared = Counter(item for gram in grams for item in self._holders.get(gram, ()))
        return next(
            (
                self._sets[item]
                for item, count in sorted(shared.items())
                if count >= self._wanted.share * self._sizes[item]
            ),
            None,
        )


# --- all of it ---------------------------------------------------------------------------------------------------


class Selection:
    """What decides, prompt by prompt in the fixed order, whether it is taken. `count` tells how often a name came before."""

    def __init__(
        self,
        settings: PromptsSettings,
        evaluation: EvaluationSets | None,
        database: sqlite3.Connection,
        count: Callable[[str], int],
    ) -> None:
        self._drop = settings.duplicates == "drop"
        self._evaluation = evaluation
        self._near = NearDuplicates(settings.near_duplicates, database) if settings.near_duplicates else None
        self._count = count

    def take(self, prompt: Prompt) -> Prompt | str:
        """The prompt with its occurrence, or why it is left out."""
        same = sameness(prompt.messages, prompt.tools)
        if self._drop:
            whole = hashlib.sha256(msgspec.json.encode([same, prompt.turns])).hexdigest()
            if self._count(whole):
                return EXACT_DUPLICATE
        if self._evaluation and (name := self._evaluation.overlapping(said_in(prompt))):
            return f"overlaps evaluation set {name}"
        if self._near and self._near.has_alike(prompt):
            return NEAR_DUPLICATE
        return msgspec.structs.replace(prompt, occurrence=self._count(same))


def leaves_out(settings: PromptsSettings) -> bool:
    """Whether prompts may be left out in the fixed order, so that more are needed than are asked for."""
    return (
        settings.duplicates == "drop"
        or settings.near_duplicates is not None
        or settings.decontaminate is not None
    )
