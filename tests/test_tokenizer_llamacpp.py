"""One vocabulary, two implementations: the tokenizer of a Hugging Face folder against llama.cpp's own, and its captured answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import prompt
from real_model import KEY, MODEL, engine, model_file, running

from eyas.config import ModelConfig
from eyas.plugins import Tokenizer
from eyas.records import Message
from eyas.render import Renderer
from eyas.tokenizer import AWKWARD_TEXT, HubTokenizer, load_tokenizer

pytestmark = pytest.mark.service

FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
TEXTS = [
    AWKWARD_TEXT,
    *(Path(__file__).parent.parent / "docs" / "decisions.md").read_text(encoding="utf-8").split("\n\n")[:40],
    "12345 3.14 x=10**9; ½ ٣٤",
    "a<|im_end|>b<|im_start|>c<repo_name>",
    "日本語テキスト 한국어 العربية हिन्दी",
    "\n\n\n  \t \r\n x \n",
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> HubTokenizer:
    """The demo model's vocabulary as the tokenizer.json that SmolLM2's publisher has."""
    from gguf import GGUFReader

    fields = GGUFReader(model_file()).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = fields["tokenizer.ggml.merges"].contents()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": tokens[token], "special": True, **dict.fromkeys(FLAGS, False)}
            for token, kind in enumerate(kinds)
            if kind == 3
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, level],
        },
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {text: token for token, text in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    folder = tmp_path_factory.mktemp("smollm2")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"].contents())
    return load_tokenizer(ModelConfig(id="smollm2", tokenizer=str(folder)))


def test_the_prompt_is_the_one_that_llama_cpp_gave(hub: HubTokenizer) -> None:
    """captures/llamacpp: apply_template.txt; tokenize.txt has the ids of all but the system message."""
    asked = prompt("k", "What is 2+2?")
    ids = Renderer(MODEL, hub, "").render(asked)
    assert hub.decode(ids)[0] == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    captured = [1, 4093, 198, 1780, 314, 216, 34, 27, 34, 47, 2, 198, 1, 520, 9531, 198]
    assert ids[-len(captured) :] == captured
    # tokenize_think.txt
    assert hub.encode("<think>\nhello\n</think>\n\n", control=True) == [
        *(44, 17400, 46, 198, 28120, 198),
        *(9617, 17400, 46, 1116),
    ]


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[Tokenizer]:
    with running(engine()) as url:
        yield engine().tokenizer(url, KEY)


@pytest.mark.engine
def test_both_turn_texts_into_the_same_ids(hub: HubTokenizer, llama_cpp: Tokenizer) -> None:
    for text in TEXTS:
        for control in (True, False):
            ids = llama_cpp.encode(text, control=control)
            assert hub.encode(text, control=control) == ids, text
            assert hub.decode(ids) == llama_cpp.decode(ids)
    assert hub.added_tokens == llama_cpp.added_tokens
    assert hub.special_tokens.items() <= llama_cpp.special_tokens.items()


@pytest.mark.engine
def test_both_render_the_same_prompts(hub: HubTokenizer, llama_cpp: Tokenizer) -> None:
    system = Message(role="system", content="\nBe brief. ")
    for text in TEXTS:
        for before in (
            [],
            [system],
            [system, Message(role="user", content="Hi\n"), Message(role="assistant", content="Yes")],
        ):
            asked = prompt("k", messages=[*before, Message(role="user", content=text)])
            ids = [Renderer(MODEL, tokenizer, "<think>\n").render(asked) for tokenizer in (hub, llama_cpp)]
            assert ids[0] == ids[1]
