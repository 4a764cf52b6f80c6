"""tiktoken stands for the `tokenizers` library only where both give the same ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st
from real_tokenizers import folder
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from eyas.config import ModelConfig
from eyas.pieces import byte_level
from eyas.ranked import PATTERNS, Ranked
from eyas.tokenizer import AWKWARD_TEXT, load_tokenizer

ROOT = Path(__file__).parent.parent
DOCUMENTS = [path.read_text() for path in sorted(ROOT.glob("docs/*.md"))]
# What patterns treat in different ways: letters of several cases and scripts, marks, digits, white space, line ends, the rest.
CHARACTERS = "aSſéß漢ば́ि1½٣ \t\u00a0\u3000\u2028\r\n\x0b\x1c\x85'’.<_😀\u200d\ud7fb"
TEXTS = st.text(alphabet=st.one_of(st.sampled_from(CHARACTERS), st.characters(exclude_categories=["Cs"])))
SPELT = st.lists(st.one_of(TEXTS, st.sampled_from(["<think>", "<|im_end|>", "<|im_", "'s", "'LL", "  "])))


@cache
def library(name: str) -> Any:
    return Tokenizer.from_file(str(folder(name) / "tokenizer.json"))


@cache
def quick(name: str) -> Ranked | None:
    return of(folder(name))


def of(path: Path) -> Ranked | None:
    tokenizer = load_tokenizer(ModelConfig(id="m", tokenizer=str(path)))
    tokenizer.speed_up()
    return tokenizer._backend._ranked  # type: ignore[attr-defined, no-any-return]


# --- a real tokenizer ---------------------------------------------------------------------------------------------


@pytest.mark.service
@settings(deadline=None)
@given(SPELT)
@example([AWKWARD_TEXT])
@example(DOCUMENTS)
def test_qwen3_has_the_ids_of_the_library(parts: list[str]) -> None:
    text, tokenizer = "".join(parts), quick("qwen3")
    assert tokenizer is not None
    assert tokenizer.encode(text) == library("qwen3").encode(text, add_special_tokens=False).ids


@pytest.mark.service
def test_every_token_of_qwen3_encoded_alone_is_itself() -> None:
    """What the equality of both follows from; of this, the start only looks at a sample."""
    alone = Tokenizer(library("qwen3").model)
    alone.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    vocabulary = library("qwen3").get_vocab(with_added_tokens=False)
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    assert alone.encode(" ".join(words)).ids == [vocabulary[word] for word in words]


@pytest.mark.service
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v4", "gptoss"])
def test_what_is_not_sure_is_left_to_the_library(name: str) -> None:
    assert quick(name) is None


# --- where text is split ------------------------------------------------------------------------------------------


def characters() -> Iterator[list[str]]:
    """All of planes 0 and 1, and every 64th of the others, which are ideographs, unassigned or private; in lots."""
    points = [*range(0xD800), *range(0xE000, 0x20000), *range(0x20000, 0x110000, 64)]
    for start in range(0, len(points), 512):
        yield [chr(point) for point in points[start : start + 512]]


@pytest.mark.service
@pytest.mark.parametrize("name", PATTERNS)
def test_both_split_at_every_character_alike(name: str) -> None:
    model = library("qwen3").model
    theirs = Tokenizer(model)
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[name]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if name == "gpt2":
        theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary = library("qwen3").get_vocab(with_added_tokens=False)
    ranks = {byte_level(text): token for text, token in vocabulary.items()}
    ours = tiktoken.Encoding("", pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens={})
    for lot in characters():
        text = "".join(f"a{c}1 {c}{c}\n'{c}e" for c in lot)
        assert theirs.encode(text).ids == ours.encode_ordinary(text), hex(ord(lot[0]))


# --- small tokenizers ---------------------------------------------------------------------------------------------


def trained(path: Path, **changes: Any) -> Path:
    """The folder of a tokenizer trained on the documents; `changes` to its model or to the whole."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        DOCUMENTS,
        # <in> is in the model's vocabulary too, as in many files.
        trainers.BpeTrainer(
            vocab_size=1000, special_tokens=["<in>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in ("<in>", "<end>")])
    file = json.loads(tokenizer.to_str())
    for name, change in changes.items():
        (file if name in file else file["model"])[name] = change(file.get(name, file["model"].get(name)))
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(file))
    return path


def test_a_trained_tokenizer_has_the_ids_of_the_library(tmp_path: Path) -> None:
    path = trained(tmp_path)
    tokenizer = of(path)
    assert tokenizer is not None
    text = AWKWARD_TEXT + "<end><in> <in" + DOCUMENTS[0][: tokenizer.longest]
    assert tokenizer.encode(text) == Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids


@pytest.mark.parametrize(
    "changes",
    [
        {"merges": lambda merges: [merges[1], merges[0], *merges[2:]]},
        {"merges": lambda merges: merges[:-1]},
        {"dropout": lambda _: 0.5},
        {"normalizer": lambda _: {"type": "Lowercase"}},
        {"pre_tokenizer": lambda split: split | {"add_prefix_space": True}},
        {"added_tokens": lambda tokens: [token | {"rstrip": True} for token in tokens]},
    ],
    ids=["order", "a token without a merge", "dropout", "normalizer", "prefix", "strips"],
)
def test_one_that_may_differ_is_left_to_the_library(tmp_path: Path, changes: dict[str, Any]) -> None:
    from eyas.ranked import ranked

    path = trained(tmp_path, **changes)
    library = Tokenizer.from_file(str(path / "tokenizer.json"))
    size = library.get_vocab_size(with_added_tokens=False)
    pieces = [byte_level(library.id_to_token(token)) for token in range(size)]
    assert ranked((path / "tokenizer.json").read_bytes(), library, pieces, []) is None


def test_one_that_encodes_a_sample_otherwise_is_left_to_the_library(tmp_path: Path) -> None:
    """As when a file of two tokenizers is mixed up: here the library has one merge fewer."""
    from eyas.ranked import ranked

    path, other = trained(tmp_path / "a"), trained(tmp_path / "b", merges=lambda merges: merges[:-1])
    library = Tokenizer.from_file(str(other / "tokenizer.json"))
    pieces = [byte_level(library.id_to_token(token)) for token in range(1000)]
    last = json.loads((path / "tokenizer.json").read_text())["model"]["merges"][-1]
    text = b"".join(map(byte_level, last)).decode()
    raw = (path / "tokenizer.json").read_bytes()
    assert ranked(raw, library, pieces, ["nothing else"]) is not None
    assert ranked(raw, library, pieces, [text]) is None
