"""Text ↔ ids exactly as the model's own library has it; what only spells a control token stays text."""

from __future__ import annotations

import base64
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kimi
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import file_from, folder
from tokenizers import Tokenizer

from eyas.config import ModelConfig
from eyas.errors import EyasError
from eyas.plugins import Reject
from eyas.tokenizer import AWKWARD_TEXT, HubTokenizer, _load, load_tokenizer

pytestmark = pytest.mark.service

NAMES = ["qwen3", "deepseek_v3", "deepseek_v4", "gptoss"]


@cache
def real(name: str) -> HubTokenizer:
    return load_tokenizer(ModelConfig(id=name, tokenizer=str(folder(name))))


@cache
def library(name: str) -> Any:
    return Tokenizer.from_file(str(folder(name) / "tokenizer.json"))


@pytest.fixture(scope="module")
def kimi_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kimi.make_folder(tmp_path_factory.mktemp("hub") / "Kimi-K2.5")


@pytest.fixture(scope="module")
def standin(kimi_folder: Path) -> HubTokenizer:
    return load_tokenizer(ModelConfig(id="kimi", tokenizer=str(kimi_folder), trust_remote_code=True))


TEXTS = [
    AWKWARD_TEXT,
    "Hello world",
    "def f(x):\n\treturn  x ** 2  # don't\r\n",
    "Ελληνικά עברית العربية हिन्दी 日本語テキスト 한국어",
    "1234567890 3.14e-10 ½ ٣",
    "\u200b\ufeff\u00a0\u3000 a\u0301 ﬁ",
    " " * 40 + "\n" * 5 + "\t\t",
]

# --- the same as the libraries ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_id_is_the_bytes_that_the_library_has(name: str) -> None:
    ours, theirs = real(name), library(name)
    assert ours.vocabulary_size == theirs.get_vocab_size(with_added_tokens=True)
    texts = theirs.decode_batch([[token] for token in range(ours.vocabulary_size)], skip_special_tokens=False)
    assert [piece.decode(errors="replace") for piece in ours._backend.pieces] == texts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_has_the_library_s_ids_and_comes_back(name: str, text: str) -> None:
    ids = library(name).encode(text, add_special_tokens=False).ids
    assert real(name).encode(text, control=False) == real(name).encode(text, control=True) == ids
    assert real(name).decode(ids)[0] == library(name).decode(ids, skip_special_tokens=False)


def test_ids_are_those_that_sglang_gave_for_the_same_tokenizer() -> None:
    """captures/sglang: a_ep_tokenize, a_generate_text_bos_check, a_ep_detokenize, and the end of a_generate_text_bos_check."""
    ours = real("deepseek_v4")
    assert ours.encode("Hello world", control=True) == [19923, 2058], "and no begin token before it"
    assert ours.decode([0, 19923, 2058, 14, 223, 549, 260, 1255])[0].endswith("Hello world,  u a从")
    assert ours.decode([112048, 128822])[0] == "填料</think>"


def test_gpt_oss_ids_are_those_of_tiktoken() -> None:
    """Another implementation, from another table of the same vocabulary."""
    table = file_from("tml-renderers==0.2.1", "tml_renderers/data/o200k_base.tiktoken", kimi.TABLE)
    ranks = {
        base64.b64decode(token): int(rank)
        for token, rank in map(bytes.split, table.read_bytes().splitlines())
    }
    pattern = json.loads((folder("gptoss") / "tokenizer.json").read_bytes())["pre_tokenizer"]
    pattern = pattern["pretokenizers"][0]["pattern"]["Regex"]
    theirs = tiktoken.Encoding("o200k", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in TEXTS:
        assert real("gptoss").encode(text, control=False) == theirs.encode_ordinary(text)


@pytest.mark.parametrize("text", TEXTS)
def test_kimi_ids_are_those_of_tiktoken(standin: HubTokenizer, text: str) -> None:
    table = file_from("tml-renderers==0.2.1", "tml_renderers/data/o200k_base.tiktoken", kimi.TABLE)
    ranks = {
        base64.b64decode(token): int(rank)
        for token, rank in map(bytes.split, table.read_bytes().splitlines())
        if int(rank) < 163_584
    }
    from kimi_standin.tokenization_standin import PATTERN

    theirs = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    assert standin.encode(text, control=False) == theirs.encode_ordinary(text)
    assert standin.decode(theirs.encode_ordinary(text))[0] == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 163_839)))
def test_kimi_text_is_tiktoken_s(standin: HubTokenizer, ids: list[int]) -> None:
    assert standin.decode([*ids, 163586])[0] == standin._backend._tokenizer.model.decode(ids)  # type: ignore[attr-defined]


# --- control tokens and what spells them --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_added_token_is_one_id_as_control_and_text_otherwise(name: str) -> None:
    _check_added(real(name))


def test_every_added_token_of_kimi_is_one_id_as_control_and_text_otherwise(standin: HubTokenizer) -> None:
    assert len(standin.added_tokens) == 256, "reserved ones too"
    assert standin.added_tokens.items() >= {**kimi.CONTROL, **kimi.MARKERS, **kimi.MEDIA}.items()
    _check_added(standin)


def _check_added(tokenizer: HubTokenizer) -> None:
    assert tokenizer.structural_ids == set(tokenizer.added_tokens.values())
    for text, token in tokenizer.added_tokens.items():
        assert tokenizer.encode(text, control=True) == [token]
        ids = tokenizer.encode(text, control=False)
        assert tokenizer.structural_ids.isdisjoint(ids) and tokenizer.decode(ids)[0] == text


SPELT = st.lists(
    st.sampled_from(
        [
            "<|im_end|>",
            "<think>",
            "</think>",
            "<tool_call>",
            "<|im",
            "_start|>",
            "<",
            "|>",
            " ",
            "\n",
            "a",
            "é",
            "😀",
            "\x00",
        ]
    )
)


@settings(deadline=None)
@given(SPELT.map("".join))
def test_no_text_becomes_an_added_token(text: str) -> None:
    ids = real("qwen3").encode(text, control=False)
    assert real("qwen3").structural_ids.isdisjoint(ids)
    assert real("qwen3").decode(ids)[0] == text


def test_control_ids_are_turns_and_ends_and_not_the_answer_s_own_markers(standin: HubTokenizer) -> None:
    for tokenizer, inside, control in [
        (
            real("qwen3"),
            ["<think>", "</think>", "<tool_call>", "</tool_call>"],
            ["<|im_start|>", "<|im_end|>"],
        ),
        (
            real("deepseek_v3"),
            ["<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"],
            ["<｜User｜>", "<｜Assistant｜>"],
        ),
        (real("deepseek_v4"), ["<think>", "</think>", "｜DSML｜"], ["<｜User｜>", "<｜end▁of▁sentence｜>"]),
        (
            real("gptoss"),
            ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"],
            ["<|return|>", "<|startoftext|>", "<|endoftext|>"],
        ),
        (standin, list(kimi.MARKERS), list(kimi.CONTROL)),
    ]:
        ids = tokenizer.added_tokens
        assert {ids[text] for text in inside}.isdisjoint(tokenizer.control_ids)
        assert {ids[text] for text in control} <= set(tokenizer.control_ids)
        assert set(tokenizer.stop_ids) <= set(tokenizer.control_ids)


@pytest.mark.parametrize("name", NAMES)
def test_text_with_half_a_surrogate_pair_has_no_ids(name: str) -> None:
    with pytest.raises(Reject, match="not valid Unicode"):
        real(name).encode("\ud800", control=False)


def test_kimi_gives_half_a_surrogate_pair_no_ids(standin: HubTokenizer) -> None:
    with pytest.raises(Reject, match="not valid Unicode"):
        standin.encode("\ud800", control=False)


# --- what the folder says -----------------------------------------------------------------------------------------


def test_kimi_ends_at_both_of_its_end_tokens(standin: HubTokenizer) -> None:
    assert standin.stop_ids == [163585, 163586]
    assert standin.vocabulary_size == 163_840
    assert standin.special_tokens == {
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
    }


TALK = [{"role": "user", "content": "Hi"}]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"at": "<"}}}


def test_kimi_writes_its_own_tools_and_knows_its_own_options(standin: HubTokenizer) -> None:
    assert standin.apply_template(TALK, [LOOK], {"thinking": False}) == (
        '<|im_system|>tool_declare<|im_middle|># Tools\ntype look = (_: {"at": "<"}) => any;<|im_end|>'
        "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>"
    )
    assert standin.apply_template(TALK, [], {}).endswith("<|im_assistant|>assistant<|im_middle|><think>")


def test_qwen3_renders_as_its_own_transformers_does() -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder("qwen3")))
    talk = [
        {"role": "system", "content": "Be brief."},
        *TALK,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nLook."},
        {"role": "tool", "content": "42"},
    ]
    for tools in ([], [LOOK]):
        for options in ({}, {"enable_thinking": False}):
            text = theirs.apply_chat_template(
                talk, tools=tools or None, tokenize=False, add_generation_prompt=True, **options
            )
            assert real("qwen3").apply_template(talk, tools, options) == text
            assert real("qwen3").encode(text, control=True) == theirs.encode(text, add_special_tokens=False)


Make = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """A folder with a byte vocabulary of 256 tokens and added ones; `files` by name are objects for JSON, or text."""

    def make(added: Sequence[str] = ("<eos>", "<|user|>"), **files: Any) -> Path:
        place = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        place.mkdir()
        for name, content in {"tokenizer.json": byte_tokenizer(added), **files}.items():
            path = place / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return place

    return make


def byte_tokenizer(added: Sequence[str], **changes: Any) -> dict[str, Any]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [
        {
            "id": 256 + n,
            "content": text,
            "special": text.startswith("<|") or text == "<eos>",
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for n, text in enumerate(added)
    ]
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        **changes,
    }


def load(place: Path, **model: Any) -> HubTokenizer:
    return load_tokenizer(ModelConfig(id="m", tokenizer=str(place), **model))


def test_an_answer_ends_where_any_of_the_configs_says(made: Make) -> None:
    added = [f"<|{n}|>" for n in range(6)]
    files = {
        "generation_config.json": {"eos_token_id": [257, 258]},
        "config.json": {"eos_token_id": 259, "text_config": {"eos_token_id": 260}},
        "tokenizer_config.json": {"eos_token": {"content": "<|0|>"}},
    }
    assert load(made(added, **files)).stop_ids == [256, 257, 258, 259, 260]
    assert load(made(added)).stop_ids == []


@pytest.mark.parametrize(
    ("end", "stops"),
    [
        ("<|0|>", [256]),
        ("<|0|>\n", [256]),
        ("\n<|0|>", []),
        ("", []),
        ("<|0|>more", []),
        ("{% if add_generation_prompt %}<|0|>{% endif %}", []),
        ("{{ raise_exception('no') }}", []),
        ("{{ strftime_now('%Y') }}", []),
    ],
)
def test_an_answer_ends_where_the_template_ends_a_turn(made: Make, end: str, stops: list[int]) -> None:
    template = (
        "{% for m in messages %}<|1|>{{ m.content }}" + end.replace("\n", "{{ '\\n' }}") + "{% endfor %}"
    )
    assert load(made(["<|0|>", "<|1|>"], **{"chat_template.jinja": template})).stop_ids == stops


def test_ids_that_pad_the_vocabulary_are_no_text_and_others_are_an_error(made: Make) -> None:
    tokenizer = load(made(**{"config.json": {"vocab_size": 300}}))
    assert tokenizer.vocabulary_size == 258
    assert tokenizer.decode([0x61, 299, 0x62]) == ("ab", "101")
    for wrong in (300, -1):
        with pytest.raises(EyasError, match=r"has ids below 300, the server gave .*; serve the model that"):
            tokenizer.decode([0x61, wrong])


def test_white_space_that_is_an_added_token_is_text(made: Make) -> None:
    raw = byte_tokenizer(["\n\n", "<eos>"])
    raw["model"]["vocab"]["\n\n"] = 256
    tokenizer = load(made(**{"tokenizer.json": raw}))
    assert tokenizer.added_tokens == {"<eos>": 257}
    assert tokenizer.encode("a\n\n<eos>", control=False) == [0x61, 256, *b"<eos>"]
    assert tokenizer.decode([0x61, 256, 0x62]) == ("a\n\nb", "121")


def test_limits_that_a_tokenizer_file_was_saved_with_cut_nothing(made: Make) -> None:
    raw = byte_tokenizer(["<eos>"])
    raw["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    raw["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 256,
        "pad_type_id": 0,
        "pad_token": "<eos>",
    }
    tokenizer = load(made(**{"tokenizer.json": raw}))
    assert tokenizer.encode("ab", control=True) == [*b"ab"]
    assert tokenizer.encode("abcdef", control=False) == [*b"abcdef"]


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": "A"},
        {"tokenizer_config.json": {"chat_template": "A"}},
        {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "A"}]}},
        {"tokenizer_config.json": {"chat_template": "B"}, "chat_template.jinja": "A"},
    ],
)
def test_the_chat_template_is_found_wherever_it_may_stand(made: Make, files: dict[str, Any]) -> None:
    tokenizer = load(made(**files))
    assert tokenizer.template == "A" == tokenizer.apply_template(TALK, [LOOK], {})


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": "A", "additional_chat_templates/tool_use.jinja": "T"},
        {
            "tokenizer_config.json": {
                "chat_template": [
                    {"name": "default", "template": "A"},
                    {"name": "tool_use", "template": "T"},
                    {"name": "rag", "template": "R"},
                ]
            }
        },
    ],
)
def test_tools_are_told_by_the_template_for_tools(made: Make, files: dict[str, Any]) -> None:
    tokenizer = load(made(**files))
    assert tokenizer.apply_template(TALK, [], {}) == "A"
    assert tokenizer.apply_template(TALK, [LOOK], {}) == "T"


def test_special_tokens_reach_the_template_as_in_transformers(made: Make) -> None:
    text = "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ image }}"
    config = {
        "bos_token": "<|user|>",
        "eos_token": {"content": "<eos>"},
        "pad_token": None,
        "extra_special_tokens": {"image": "<i>"},
    }
    files = {"chat_template.jinja": text, "tokenizer_config.json": config}
    assert load(made(**files)).apply_template(TALK, [], {}) == "<|user|><eos>False<i>"


# --- errors -------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_chat_template_says_where_to_put_it() -> None:
    with pytest.raises(
        EyasError,
        match=r"^model\.tokenizer: .*gptoss has no chat template; put the model's into .*gptoss/chat_template\.jinja$",
    ):
        real("gptoss").apply_template(TALK, [], {})


def test_a_tokenizer_that_adds_a_space_to_every_text_is_refused() -> None:
    with pytest.raises(
        EyasError,
        match=r"^model\.tokenizer: .*/llama2 turns 'Ün.* into ' Ün.*; Eyas needs a tokenizer that keeps",
    ):
        load(folder("llama2"))


def test_byte_fallback_without_that_space_is_byte_exact(tmp_path: Path) -> None:
    place = shutil.copytree(folder("llama2"), tmp_path / "llama")
    raw = json.loads((place / "tokenizer.json").read_bytes())
    raw["normalizer"]["normalizers"] = raw["normalizer"]["normalizers"][1:]
    (place / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = load(place)
    for text in TEXTS:
        ids = tokenizer.encode(text, control=False)
        assert tokenizer.decode(ids)[0] == text
    emoji = tokenizer.encode("🫠", control=False)
    assert tokenizer.decode(emoji[-4:]) == ("🫠", "0001")


@pytest.mark.parametrize("damage", ["{", "[]", '{"decoder": null}', ""])
def test_a_damaged_file_is_named(made: Make, damage: str) -> None:
    with pytest.raises(
        EyasError, match=r"^model\.tokenizer: .*/tokenizer\.json is no tokenizer \(.*\); fetch it again$"
    ):
        load(made(**{"tokenizer.json": damage}))
    with pytest.raises(
        EyasError, match=r"^model\.tokenizer: .*/config\.json is damaged \(.*\); fetch it again$"
    ):
        load(made(**{"config.json": damage and "["}))


def test_a_decoder_of_another_kind_is_named(made: Make) -> None:
    raw = byte_tokenizer([], decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(
        EyasError, match=r"tokenizer\.json decodes by WordPiece; Eyas knows byte-level tokens"
    ):
        load(made(**{"tokenizer.json": raw}))


def test_a_tokenizer_that_loses_spaces_is_found_out(made: Make) -> None:
    """As a public golden file did: both sides of its parity test used the same wrong tokenizer."""
    raw = byte_tokenizer(["<eos>"], normalizer={"type": "Replace", "pattern": {"String": " "}, "content": ""})
    with pytest.raises(
        EyasError, match=r"^model\.tokenizer: .* turns 'Ün.*; Eyas needs a tokenizer that keeps every text"
    ):
        load(made(**{"tokenizer.json": raw}))


def test_a_control_token_that_is_cut_into_text_is_found_out(standin: HubTokenizer) -> None:
    class Cut:
        def __init__(self, backend: Any) -> None:
            self.backend = backend

        def __getattr__(self, name: str) -> Any:
            return getattr(self.backend, name)

        def encode(self, text: str, *, control: bool) -> list[int]:
            return self.backend.encode(text, control=control and text != "<think>")  # type: ignore[no-any-return]

    cut = HubTokenizer(standin._folder, Cut(standin._backend))  # type: ignore[arg-type]
    with pytest.raises(
        EyasError, match=r"has '<think>' as id 163606, but encodes it as \[[^\]]*,.*; fetch its files again"
    ):
        cut.self_test()


def test_a_control_token_that_data_can_spell_is_found_out(standin: HubTokenizer) -> None:
    class Open:
        def __getattr__(self, name: str) -> Any:
            return getattr(standin._backend, name)

        def encode(self, text: str, *, control: bool) -> list[int]:
            return standin._backend.encode(text, control=True)

    with pytest.raises(EyasError, match=r"and as \[163584\] where it is ordinary text"):
        HubTokenizer(standin._folder, Open()).self_test()  # type: ignore[arg-type]


def test_a_model_without_a_tokenizer_says_which_key() -> None:
    with pytest.raises(
        EyasError, match=r"^model\.tokenizer: this engine needs the model's tokenizer; name its folder"
    ):
        load_tokenizer(ModelConfig(id="m"))


def test_a_tokenizer_that_was_not_fetched_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        EyasError,
        match=r"^model\.tokenizer: data/hub/models/a/b/r has not been fetched; run: snakemake --cores 1 fetch$",
    ):
        load_tokenizer(ModelConfig(id="m", tokenizer="hub://a/b@r"))


def test_code_runs_only_if_the_config_trusts_it(kimi_folder: Path) -> None:
    with pytest.raises(
        EyasError,
        match=r"^model\.trust_remote_code: .*Kimi-K2\.5 has its tokenizer as Python code \(tokenization_standin\.py\); read it",
    ):
        load(kimi_folder)


def test_a_folder_without_any_tokenizer_is_not_run_either(made: Make) -> None:
    place = made()
    (place / "tokenizer.json").unlink()
    with pytest.raises(EyasError, match=r"^model\.trust_remote_code: .* as Python code \(none there\)"):
        load(place)


@pytest.mark.parametrize("version", [None, "4.57.0", "4.9.1", "5.0.0", "5.19.0"])
def test_code_needs_a_transformers_that_reads_kimi_right(
    kimi_folder: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, tmp_path: Path
) -> None:
    def told(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", told)
    place = shutil.copytree(kimi_folder, tmp_path / "fresh")
    with pytest.raises(
        EyasError,
        match=rf"needs transformers from 4\.57\.1 to below 5 \(here: {version or 'none'}\); run: pip install 'eyas\[remote-code\]'$",
    ):
        load(place, trust_remote_code=True)


def test_a_table_that_changes_in_its_place_is_read_anew(kimi_folder: Path, tmp_path: Path) -> None:
    """tiktoken keeps what it once read from a path."""
    place = shutil.copytree(kimi_folder, tmp_path / "changing")
    first = load(place, trust_remote_code=True).encode("a", control=False)
    lines = (place / "tiktoken.model").read_bytes().splitlines()
    letters = [base64.b64encode(letter) for letter in (b"a", b"b")]
    ranks = {line.split()[0]: int(line.split()[1]) for line in lines}
    ranks[letters[0]], ranks[letters[1]] = ranks[letters[1]], ranks[letters[0]]
    (place / "tiktoken.model").write_bytes(b"".join(b"%s %d\n" % (t, r) for t, r in ranks.items()))
    _load.cache_clear()
    assert load(place, trust_remote_code=True).encode("b", control=False) == first


def test_code_that_fails_is_told_in_one_line(kimi_folder: Path, tmp_path: Path) -> None:
    place = shutil.copytree(kimi_folder, tmp_path / "broken")
    (place / "tokenization_standin.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(
        EyasError,
        match=r"^model\.tokenizer: the code in .*broken fails \(ImportError: [^\n]*nothing_of_that_name[^\n]*$",
    ):
        load(place, trust_remote_code=True)


def test_a_model_s_code_leaves_the_environment_and_the_home_folder_alone(
    kimi_folder: Path, tmp_path: Path
) -> None:
    """A server that this process starts later would inherit the one; two jobs would meet in the other."""
    code = (
        "import os; from eyas.config import ModelConfig; from eyas.tokenizer import load_tokenizer\n"
        "before = dict(os.environ)\n"
        f"load_tokenizer(ModelConfig(id='m', tokenizer={str(kimi_folder)!r}, trust_remote_code=True))\n"
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout == "", done.stderr[-2000:]
    assert list(tmp_path.iterdir()) == [], "copies of the code are removed"
