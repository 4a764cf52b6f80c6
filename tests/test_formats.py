"""Reasoning formats with the tokenizers and chat templates of real models: what is typed, what is generated, where it is split."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kimi
import pytest
import real_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from replies import response

from eyas.asking import PLAIN_PROMPT
from eyas.checks.control_tokens import ControlTokens, ControlTokensOptions
from eyas.config import ModelConfig
from eyas.errors import EyasError
from eyas.plugins import Split, registry
from eyas.reasoning.delimited import Delimited
from eyas.records import Finish, Response
from eyas.render import Renderer
from eyas.tokenizer import load_tokenizer

pytestmark = pytest.mark.service

# What the packages lack of the models' own files: how a prompt ends, and the end tokens.
DEEPSEEK_TEMPLATE = (
    "<｜begin▁of▁sentence｜>{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}"
    "<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}"
)
HARMONY_TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort }}<|end|>"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
)
PACKAGES: dict[str, tuple[str, str | None, list[int] | None]] = {
    "qwen3": ("qwen3", None, None),
    "deepseek_v3.1": ("deepseek_v4", DEEPSEEK_TEMPLATE, None),
    "gpt_oss": ("gptoss", HARMONY_TEMPLATE, [200002, 199999, 200012]),
}
NAMES = ["kimi_k2.5", *PACKAGES]


class Model:
    """A format with the tokenizer of its model and a renderer, as `generate` has them."""

    def __init__(self, name: str, folder: Path, **options: Any) -> None:
        made = registry().create("reasoning", name, options, "model.reasoning")
        assert isinstance(made, Delimited)
        self.format = made
        config = ModelConfig(
            id=name, tokenizer=str(folder), trust_remote_code=True, template_options=made.template_options
        )
        self.tokenizer = load_tokenizer(config)
        self.prompt_ids = Renderer(config, self.tokenizer, made.prefill).render(PLAIN_PROMPT)

    def self_test(self) -> None:
        text = self.tokenizer.decode(self.prompt_ids)[0]
        self.format.self_test(self.tokenizer, text.rpartition(PLAIN_PROMPT.messages[0].content)[2])

    def own(self, text: str) -> list[int]:
        """The ids of what the model writes with its own tokens."""
        return self.tokenizer.encode(text, control=True)

    def typed(self, text: str) -> list[int]:
        """The ids of text that may spell anything."""
        return self.tokenizer.encode(text, control=False)

    def split(self, *parts: Sequence[int], cut: bool = False) -> Split:
        return self.format.split(self.answer(*parts, cut=cut))

    def answer(self, *parts: Sequence[int], cut: bool = False) -> Response:
        ids = [token for part in parts for token in part]
        if not cut:
            ids += self.own(self.format.stops[0])
        text, lengths = self.tokenizer.decode(ids)
        occurring = {*self.prompt_ids, *ids}
        added = {name: token for name, token in self.tokenizer.added_tokens.items() if token in occurring}
        return response(
            [],
            prompt_ids=self.prompt_ids,
            output_ids=ids,
            finish=Finish(type="length") if cut else Finish(type="stop", matched=ids[-1]),
            text=text,
            text_lengths=lengths,
            stop_ids=self.tokenizer.stop_ids,
            added_tokens=added,
            control_ids=[token for token in added.values() if token in self.tokenizer.control_ids],
        )

    def opening(self) -> list[int]:
        """What an answer begins with where the model opens reasoning itself."""
        opened = self.tokenizer.decode(self.prompt_ids)[0].rstrip().endswith(self.format.open)
        return [] if opened else self.own(self.format.open)


def is_refused(model: Model, *parts: Sequence[int]) -> bool:
    made = model.answer(*parts)
    return bool(list(ControlTokens(ControlTokensOptions()).faults(made, model.format.split(made))))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a format's model, made once."""

    @cache
    def folder(name: str) -> Path:
        place = tmp_path_factory.mktemp("tokenizer") / "model"
        if name == "kimi_k2.5":
            return kimi.make_folder(place)
        package, template, ends = PACKAGES[name]
        shutil.copytree(real_tokenizers.folder(package), place)
        if template is not None:
            (place / "chat_template.jinja").write_text(template)
        if ends is not None:
            (place / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        return place

    return folder


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, folders: Callable[[str], Path]) -> Model:
    return Model(request.param, folders(request.param))


def test_a_format_accepts_the_real_tokenizer_and_template_of_its_model(model: Model) -> None:
    model.self_test()


@pytest.mark.parametrize("name", ["kimi_k2.5", "qwen3", "deepseek_v3.1"])
def test_with_thinking_off_the_template_ends_reasoning_in_the_prompt(
    folders: Callable[[str], Path], name: str
) -> None:
    model = Model(name, folders(name), thinking=False)
    model.self_test()
    found = model.split(model.typed("Paris."))
    assert (found.state, found.reasoning_tokens, found.asked) == ("none", 0, False)


@pytest.mark.parametrize(
    ("name", "of", "error"),
    [
        ("kimi_k2_thinking", "kimi_k2.5", r"'kimi_k2_thinking' expects prompts that end in .*middle.* in .*<think>'"),
        ("deepseek_r1", "qwen3", r"'deepseek_r1' needs '<｜end▁of▁sentence｜>' as one token"),
        ("qwen3", "gpt_oss", r"'qwen3' needs '<think>' as one token"),
        ("glm", "qwen3", r"'glm' needs '<\|user\|>' as one token"),
    ],
    ids=["another template", "another end", "no reasoning", "another vocabulary"],
)  # fmt: skip
def test_a_format_of_another_model_is_refused(
    folders: Callable[[str], Path], name: str, of: str, error: str
) -> None:
    with pytest.raises(EyasError, match=r"^model\.reasoning: the format " + error):
        Model(name, folders(of)).self_test()


def test_the_real_template_keeps_reasoning_only_while_tools_are_called(
    folders: Callable[[str], Path],
) -> None:
    model = Model("qwen3", folders("qwen3"))
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "reasoning_content": "because", "tool_calls": [call]},
        {"role": "tool", "content": "{}"},
    ]
    assert "because" in model.tokenizer.apply_template(talk, [], {})
    talk += [{"role": "assistant", "content": "A"}, {"role": "user", "content": "Q"}]
    assert "because" not in model.tokenizer.apply_template(talk, [], {})
    assert model.format.history == "kept_for_tools"


def test_reasoning_that_spells_its_delimiters_is_split_where_the_real_one_stands(model: Model) -> None:
    """The reasoning and the answer both talk about the delimiters, in ordinary tokens."""
    reasoning = model.typed(f"The user means {model.format.open}x{model.format.close}, I think.\n")
    answer = model.typed(f"\n\nWrite {model.format.close} at the end, not {model.format.open}.")
    found = model.split(model.opening(), reasoning, model.own(model.format.close), answer)
    expected = len(model.opening()) + len(reasoning) + len(model.own(model.format.close))
    assert (found.state, found.reasoning_tokens, found.foreign) == ("closed", expected, False)


def test_each_state_on_real_ids(model: Model) -> None:
    start, close, again = model.opening(), model.own(model.format.close), model.own(model.format.open)
    why, so = model.typed("why"), model.typed("so")
    call = model.own(model.format.implicit_closers[0])
    assert model.split(start, why, close, so).state == "closed"
    assert model.split(start, why, cut=True).state == "truncated_in_reasoning"
    assert model.split(start, why).state == "unclosed"
    assert model.split(start, model.typed(" "), close, so).state == "empty"
    assert model.split(start, why, close, so, close, so).state == "double_close"
    assert model.split(start, why, close, so, again, why).state == "reopened"
    assert model.split(start, why, again, why, close, so).state == "stray_open"
    by_tool = model.split(start, why, call, so)
    assert (by_tool.state, by_tool.reasoning_tokens) == ("closed_by_tool", len(start) + len(why))


TEXT = st.text(st.sampled_from("ab <>/|thinkcoe漢😀\n"), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(TEXT, TEXT, st.booleans(), st.booleans())
def test_the_split_is_where_the_ids_say_whatever_the_texts_spell(
    model: Model, reasoning: str, answer: str, spelt: bool, cut: bool
) -> None:
    why = model.typed("." + reasoning + (model.format.close if spelt else ""))
    close = model.own(model.format.close)
    found = model.split(
        model.opening(), why, close, model.typed(model.format.close * spelt + answer), cut=cut
    )
    assert (found.state, found.reasoning_tokens) == (
        "closed",
        len(model.opening()) + len(why) + len(close),
    )


def test_a_call_is_within_the_control_tokens_that_a_format_allows(model: Model) -> None:
    calls = {
        "kimi_k2.5": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "qwen3": '<tool_call>\n{"name": "f"}\n</tool_call>',
        "deepseek_v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "gpt_oss": "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}",
    }
    ids = model.own(calls[model.format.name])
    assert model.split(model.opening(), model.typed("why"), ids).state == "closed_by_tool"
    assert not is_refused(model, model.opening(), model.typed("why"), ids)


def test_the_begin_of_another_turn_in_an_answer_is_found(model: Model) -> None:
    turns = {
        "kimi_k2.5": "<|im_user|>user<|im_middle|>And",
        "qwen3": "<tool_response>\n{}",
        "deepseek_v3.1": "<｜User｜>And",
        "gpt_oss": "<|end|><|start|>user<|message|>And",
    }
    text = turns[model.format.name]
    start, close = model.opening(), model.own(model.format.close)
    assert is_refused(model, start, model.typed("why"), close, model.own(text))
    assert not is_refused(model, start, model.typed("why"), close, model.typed(text))
