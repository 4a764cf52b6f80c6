"""Reasoning between two delimiters that the config names, for models without a format of their own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from eyas.errors import EyasError
from eyas.plugins import Register, Tokenizer, hookimpl
from eyas.reasoning.delimited import Delimited

Delimiter = Annotated[str, Meta(min_length=1)]


class TagsOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The delimiters of one model and who writes them."""

    open: Annotated[Delimiter, Meta(description="Text that opens reasoning.")] = "<think>"
    close: Annotated[Delimiter, Meta(description="Text that closes reasoning.")] = "</think>"
    opened_by_prompt: Annotated[
        bool,
        Meta(description="The prompt ends inside reasoning, so the output starts there and holds no `open`."),
    ] = False
    prefill: Annotated[
        str,
        Meta(
            description="Text appended to the prompt, such as `<think>\\n`, where the chat template does not open reasoning itself."
        ),
    ] = ""
    implicit_closers: Annotated[
        list[Delimiter],
        Meta(
            description="Texts that end reasoning without `close`, such as `<tool_call>`; they belong to the answer."
        ),
    ] = field(default_factory=list)
    single_token: Annotated[
        bool,
        Meta(
            description="The tokenizer has each delimiter as one token of its own, so a delimiter spelt out in several tokens is ordinary text that talks about delimiters. Tested before the first request."
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.open in self.close or self.close in self.open:
            raise ValueError(f"`open` {self.open!r} and `close` {self.close!r} must not contain each other")
        if is_inside(self.prefill, self) and not self.opened_by_prompt:
            raise ValueError(
                f"`prefill` {self.prefill!r} opens reasoning, so `opened_by_prompt` must be true"
            )


def is_inside(text: str, options: TagsOptions) -> bool:
    """Whether `text` ends inside reasoning."""
    return text.rfind(options.open) > text.rfind(options.close)


class Tags(Delimited):
    """Reasoning between an opening and a closing delimiter, for models without a format of their own."""

    name = "tags"
    Options = TagsOptions
    options: TagsOptions
    prompt_ends = ("",)

    def __init__(self, options: TagsOptions) -> None:
        self.open, self.close = options.open, options.close
        self.implicit_closers = tuple(options.implicit_closers)
        delimiters = (self.open, self.close, *self.implicit_closers)
        self.tokens = delimiters if options.single_token else ()
        super().__init__(options)

    @property
    def prefill(self) -> str:
        return self.options.prefill

    def _prompt(self, response: Any) -> Literal["opened", "ended", "plain"]:
        return "opened" if self.options.opened_by_prompt else "plain"

    def self_test(self, tokenizer: Tokenizer, prompt_tail: str | None) -> None:
        for text in (self.open, self.close):
            if text in tokenizer.added_tokens and not self.options.single_token:
                raise EyasError(
                    f"model.reasoning.single_token: the tokenizer has {text!r} as one token of its own; set it to true, "
                    f"or an answer that spells {text!r} counts as one that ends reasoning"
                )
        super().self_test(tokenizer, prompt_tail)

    def _check_prompt(self, tail: str) -> None:
        opened = self.options.opened_by_prompt
        if is_inside(tail, self.options) != opened:
            raise EyasError(
                f"model.reasoning.opened_by_prompt: it is {str(opened).lower()}, but prompts end in {tail[-40:]!r}; "
                f"correct it, `open`, `prefill` or model.template_options"
            )


@hookimpl
def register_reasoning(register: Register) -> None:
    register(Tags)
