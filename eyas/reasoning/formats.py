"""The reasoning formats of well-known models, each as data; what the fields mean is in eyas.reasoning.delimited.

Sources: the models' own chat templates and tokenizers, and SGLang 0.5.23 (srt/parser/reasoning_parser.py,
srt/function_call/) for what ends reasoning without its delimiter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from eyas.plugins import Register, Said, hookimpl
from eyas.reasoning.delimited import Delimited
from eyas.tool_calls import Tools


class ThinkingOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model is to reason."""

    thinking: Annotated[
        bool,
        Meta(description="Whether the model is to reason; told to the chat template, with every prompt."),
    ] = True


class EffortOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """How much the model is to reason."""

    effort: Annotated[
        Literal["low", "medium", "high"],
        Meta(description="How much the model is to reason; told to the chat template, with every prompt."),
    ] = "medium"


class Switched(Delimited):
    """A format whose chat template can turn reasoning off.

    switch: the template's keyword for it. empty_block: how prompts end when it is off.
    """

    Options = ThinkingOptions
    options: ThinkingOptions
    switch: str
    empty_block: str

    def __init__(self, options: ThinkingOptions) -> None:
        super().__init__(options)
        if not options.thinking:
            self.prompt_ends = (self.empty_block,)

    @property
    def template_options(self) -> dict[str, Any]:
        return {self.switch: self.options.thinking}


class KimiK2Thinking(Delimited):
    """Kimi-K2-Thinking: the model opens reasoning itself; the tool-call section may end it."""

    name = "kimi_k2_thinking"
    open = "<think>"
    close = "</think>"
    implicit_closers = ("<|tool_calls_section_begin|>",)
    tokens = (open, close, *implicit_closers)
    prompt_ends = ("<|im_middle|>",)
    # A turn ends with both; the second is the guard for a server that misses the first.
    stops = ("<|im_end|>", "[EOS]")
    markers = (
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    )
    history = "kept_for_tools"
    notation = "kimi"


class KimiK25(Switched, KimiK2Thinking):
    """Kimi-K2.5 and K2.6: the chat template opens reasoning, so answers begin inside it."""

    name = "kimi_k2.5"
    prompt_ends = ("<think>",)
    switch = "thinking"
    empty_block = "<think></think>"


class DeepSeekR1(Delimited):
    """DeepSeek-R1 and its distilled models, with chat templates that open reasoning and such that do not."""

    name = "deepseek_r1"
    open = "<think>"
    close = "</think>"
    # The second is how V3.2 and later write calls: one token between ordinary ones.
    implicit_closers = ("<｜tool▁calls▁begin｜>", "<｜DSML｜")
    tokens = (open, close, "<｜tool▁calls▁begin｜>", "｜DSML｜")
    prompt_ends: tuple[str, ...] = ("<think>", "<｜Assistant｜>")
    stops = ("<｜end▁of▁sentence｜>",)
    markers = (
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    )
    forbidden = (
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁output▁begin｜>",
    )
    notation = "deepseek"


class DeepSeekV31(Switched, DeepSeekR1):
    """DeepSeek-V3.1 and later: the chat template opens reasoning, or ends it where thinking is off."""

    name = "deepseek_v3.1"
    prompt_ends = ("<think>",)
    switch = "thinking"
    empty_block = "</think>"
    history = "kept_for_tools"


class Qwen3(Switched):
    """Qwen3 and later, QwQ: the chat template opens reasoning or the model does, told apart by each prompt."""

    name = "qwen3"
    open = "<think>"
    close = "</think>"
    implicit_closers = ("<tool_call>",)
    tokens = (open, close, *implicit_closers)
    prompt_ends = ("<|im_start|>assistant", "<think>")
    switch = "enable_thinking"
    empty_block = "<think>\n\n</think>"
    stops = ("<|im_end|>",)
    markers = ("</tool_call>",)
    forbidden = ("<tool_response>", "</tool_response>")
    history = "kept_for_tools"
    notation = "tagged"


class Glm(Switched):
    """GLM-4.5 and later: the chat template opens reasoning or the model does, told apart by each prompt."""

    name = "glm"
    open = "<think>"
    close = "</think>"
    implicit_closers = ("<tool_call>",)
    tokens = (open, close, *implicit_closers)
    prompt_ends = ("<|assistant|>", "<think>")
    switch = "enable_thinking"
    # GLM-4.5 has an opening delimiter before it, GLM-5 has not.
    empty_block = "</think>"
    stops = ("<|user|>", "<|observation|>", "<|endoftext|>")
    markers = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    forbidden = ("<tool_response>", "</tool_response>")
    history = "kept_for_tools"
    notation = "tagged"


class GptOss(Delimited):
    """gpt-oss (harmony): reasoning is what stands in the channel `analysis`, before anything in another channel."""

    name = "gpt_oss"
    Options = EffortOptions
    options: EffortOptions
    open = "<|channel|>analysis<|message|>"
    close = "<|end|><|start|>assistant<|channel|>final<|message|>"
    tokens = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    # Calls, whose recipient stands before or behind the channel, and words to the user between calls.
    implicit_closers = (
        "<|start|>assistant<|channel|>commentary",
        "<|start|>assistant<|channel|>analysis to=",
        "<|start|>assistant to=",
    )
    drafts = False  # each of these is a message of its own
    continues = "<|end|><|start|>assistant"
    prompt_ends = ("<|start|>assistant",)
    stops = ("<|return|>", "<|call|>")
    markers = ("<|constrain|>",)
    forbidden = ("<|start|>user", "<|start|>system", "<|start|>developer", "<|start|>functions")
    history = "kept_for_tools"
    notation = "harmony"
    history_field = "thinking"

    @property
    def template_options(self) -> dict[str, Any]:
        return {"reasoning_effort": self.options.effort}

    def said(self, response: Any, tools: Tools) -> Said:
        said = super().said(response, tools)
        # Each message of the reasoning has a header, and an end where a call follows.
        reasoning = said.reasoning.replace(self.continues + self.open, "\n").removesuffix("<|end|>")
        return replace(said, reasoning=reasoning)


@hookimpl
def register_reasoning(register: Register) -> None:
    for format_ in (KimiK25, KimiK2Thinking, DeepSeekR1, DeepSeekV31, Qwen3, Glm, GptOss):
        register(format_)
