"""Byte-level BPE by ranks: tiktoken in place of the `tokenizers` library, where both are sure to give the same ids.

A prompt costs it a fifth of the library's time and less. tiktoken always merges the adjacent pair whose bytes are the token of
the least rank; the library merges the pair that stands first in `merges`. These are the same if merges are in the order
of ids, one for each token of several bytes, and every token, encoded alone, is itself. For then, whenever two
neighbours together are the bytes of a token, its span has gone through the same merges as that token alone, so they
are the pair of its merge. What is left is where text is split before: PATTERNS are those for which the regular
expressions of both were compared over all of Unicode (tests/test_ranked.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

PATTERNS = {
    # GPT-2, which `ByteLevel` of the library has built in
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # Qwen2 to Qwen3
    "qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # cl100k in the library's spelling: Llama 3, GLM-4
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SAMPLE = 64  # every so manieth token is encoded alone by the library when it starts


class _AddedToken(Struct):
    id: int
    content: str
    lstrip: bool
    rstrip: bool
    single_word: bool
    normalized: bool


class _Model(Struct):
    """Of a BPE model, all that changes its ids."""

    type: str
    vocab: dict[str, int]
    merges: list[str | tuple[str, str]]
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    byte_fallback: bool = False


class _File(Struct):
    model: _Model
    added_tokens: list[_AddedToken]
    pre_tokenizer: dict[str, Any] | None
    normalizer: dict[str, Any] | None


class Ranked:
    """Ids of text, spelt added tokens included, as the library's whole tokenizer gives them.

    longest: characters that it is good for; tiktoken's expressions have a limit of steps, and panic at it.
    """

    longest = 20_000

    def __init__(self, encoding: Any, added: dict[str, int], normalize: Any) -> None:
        self._encoding, self._added, self._normalize = encoding, added, normalize
        # The library takes the longest of those that begin at a place.
        texts = sorted(added, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, texts)) + ")").split if texts else _whole

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for at, part in enumerate(self._split(text)):
            if at % 2:
                ids.append(self._added[part])
            elif part:
                ids += self._encoding.encode_ordinary(part if part.isascii() else self._normalize(part))
        return ids


def _whole(text: str) -> list[str]:
    return [text]


def ranked(raw: bytes, library: Any, pieces: Sequence[bytes], samples: Sequence[str]) -> Ranked | None:
    """What stands for `library`, the tokenizer of the tokenizer.json `raw`, or None where that is not sure.

    pieces: the bytes of each id. samples: texts that both must encode alike.
    """
    import tiktoken

    try:
        file = msgspec.json.decode(raw, type=_File)
    except msgspec.ValidationError:  # no BPE
        return None
    pattern = _pattern(file.pre_tokenizer)
    # Added tokens are cut out before, so the model's merges never make one that its vocabulary holds too.
    added = {token.content: token.id for token in file.added_tokens}
    words = {text: token for text, token in file.model.vocab.items() if text not in added}
    if pattern is None or not (_is_plain(file) and _follows_ranks(words, file.model.merges, pieces)):
        return None
    spelt = sorted(words, key=words.__getitem__)[::SAMPLE]
    if any([token.value for token in library.model.tokenize(text)] != [text] for text in spelt):
        return None
    encoding = tiktoken.Encoding(
        "model",
        pat_str=pattern,
        mergeable_ranks={pieces[token]: token for token in words.values()},
        special_tokens={},
    )
    normalizer = library.normalizer
    found = Ranked(encoding, added, str if normalizer is None else normalizer.normalize_str)
    same = all(found.encode(text) == library.encode(text, add_special_tokens=False).ids for text in samples)
    return found if same else None


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return PATTERNS["gpt2"]
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if pattern in PATTERNS.values():
            return str(pattern)
    return None


def _is_plain(file: _File) -> bool:
    """Whether nothing but the split, NFC and the merges decides."""
    model = file.model
    changed = (model.dropout, model.unk_token, model.continuing_subword_prefix, model.end_of_word_suffix)
    return (
        model.type == "BPE"
        and not any(changed)
        and not model.byte_fallback
        and file.normalizer in (None, {"type": "NFC"})
        and not any(
            token.lstrip or token.rstrip or token.single_word or token.normalized
            for token in file.added_tokens
        )
    )


def _follows_ranks(
    words: dict[str, int], merges: list[str | tuple[str, str]], pieces: Sequence[bytes]
) -> bool:
    """Whether each token of several bytes has one merge, and merges are in the order of ids."""
    texts = ["".join(merge) if isinstance(merge, tuple) else merge.replace(" ", "") for merge in merges]
    longer = sorted(token for token in words.values() if len(pieces[token]) > 1)
    return [words.get(text, -1) for text in texts] == longer and len(words) == len(longer) + 256
