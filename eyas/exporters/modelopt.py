"""A folder for NVIDIA's Model-Optimizer: conversations, and a chat template that keeps reasoning and marks what was generated.

Source: Model-Optimizer 0.47, modelopt/torch/utils/plugins/transformers_dataset.py (online) and
modelopt/torch/speculative/plugins/hf_streaming_dataset.py. Both render `messages` by the template alone, without tools, and
learn what stands between its {% generation %} tags. `datasets` gives every message all keys of the file, null where it has none,
and every object in a list the keys of all others. So the template is given messages without nulls, and tools and tool
calls, which would not survive, stand in the text of a prompt that is told as it was asked.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from eyas.chat_template import SPECIAL, ChatTemplate
from eyas.exporters.conversation import ConversationExporter
from eyas.exporters.lines import read_lines, with_nulls, write_lines
from eyas.exporters.reports import EVERY
from eyas.exporters.target import Target
from eyas.plugins import Reading, Register, Told, hookimpl

ROWS, TEMPLATE = "conversations.jsonl", "chat_template.jinja"
KEYS = ("role", "content", "reasoning_content", "thinking", "tool_call_id", "name")
VERBATIM = "prompt"  # the role of a message that is the whole prompt, word for word

# The model's own template, as a macro, tells the conversation up to the last answer, exactly as it did for generation;
# the answer follows word for word, between tags that stand outside the macro, where transformers looks for them.
_WRAPPED = """\
{{#- Made by Eyas: the chat template of {model}, which keeps the reasoning of the last answer and marks that answer. -#}}
{options}{{% macro _prompt(messages, add_generation_prompt) %}}
{{%- if messages[0].role == '{verbatim}' -%}}{{{{ messages[0].content }}}}
{{%- else -%}}{{{{ '' }}}}{own}{{{{ '' }}}}{{% endif %}}{{% endmacro %}}
{{%- set _said = namespace(all=[]) -%}}
{{%- for _message in messages -%}}
{{%- set _said.all = _said.all + [dict(_message.items() | rejectattr(1, 'none'))] -%}}
{{%- endfor -%}}
{{%- set _answer = _said.all[-1] -%}}
{{%- if _answer.role != 'assistant' -%}}
{{{{ _prompt(_said.all, add_generation_prompt) }}}}
{{%- else -%}}
{{%- set _before = _prompt(_said.all[:-1], true) ~ {prefill} -%}}
{{{{ _before }}}}{{% generation %}}
{{%- if _answer.reasoning_content is defined -%}}
{{{{ ('' if _before.rstrip().endswith({open}) else {open}) ~ _answer.reasoning_content ~ {close} }}}}
{{%- endif -%}}
{{{{ _answer.content }}}}{inside}{{% endgeneration %}}{outside}
{{%- endif -%}}
"""
_TAG = re.compile(r"(\{%-?\s*)(end)?generation(\s*-?%\})")


class ModelOptOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What the loss covers."""

    supervise_end: Annotated[
        bool,
        Meta(
            description="Whether the token that ends an answer is supervised; Model-Optimizer's own templates and its mask for Kimi leave it out."
        ),
    ] = False


class ModelOpt(ConversationExporter):
    """A folder with conversations.jsonl and the chat_template.jinja to train with, for NVIDIA's Model-Optimizer."""

    name: ClassVar[str] = "modelopt"
    suffix: ClassVar[str] = ""
    Options: ClassVar[type[Struct]] = ModelOptOptions
    options: ModelOptOptions

    def __init__(self, options: ModelOptOptions, target: Target) -> None:
        super().__init__(options, target)
        # As for Kimi, whose tokenizer is code.
        self._by_ids = not target.is_fast and "<|im_middle|>" in target.tokenizer.added_tokens
        if self._by_ids:
            self.learns = EVERY

    @property
    def supervises_end(self) -> bool:
        return self.options.supervise_end

    def check(self) -> None:
        self.template()

    def line(self, told: Told) -> dict[str, Any]:
        messages = told.messages
        if told.tools or any("tool_calls" in message for message in messages):
            asked = told.asked.removesuffix(self.target.reasoning.prefill)
            messages = [{"role": VERBATIM, "content": asked}]
        return {"conversation_id": told.row.id, "messages": [*messages, self.answer(told)]}

    def write(self, rows: Iterable[Any], path: Path) -> int:
        from eyas.recordfile import atomic_folder

        with atomic_folder(path) as folder:
            (folder / TEMPLATE).write_text(self.template(), encoding="utf-8")
            return write_lines(folder / ROWS, map(self.line, rows))

    def template(self) -> str:
        """The chat template to train with."""
        target = self.target
        end = f"{{{{ {target.answer_end()!r} }}}}"
        options = dict(target.template_options)
        date = options.pop("strftime_now", None)
        told = [f"{{% set {name} = {value!r} %}}" for name, value in sorted(options.items())]
        if date is not None:
            told.append(f"{{% macro strftime_now(_format) %}}{{{{ {date!r} }}}}{{% endmacro %}}")
        return _WRAPPED.format(
            model=target.model.id,
            options="".join(told),
            # Tags of its own would mark every answer.
            own=_TAG.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", _own(target)),
            verbatim=VERBATIM,
            prefill=repr(target.reasoning.prefill),
            open=repr(target.open),
            close=repr(target.close),
            inside=end if self.options.supervise_end else "",
            outside="" if self.options.supervise_end else end,
        )

    def read(self, path: Path) -> Iterator[Reading]:
        target = self.target
        special = {name: target.tokenizer.special_tokens.get(name) for name in SPECIAL}
        template = ChatTemplate((path / TEMPLATE).read_text(encoding="utf-8"), special)
        behind = "" if self.options.supervise_end else target.answer_end()
        for line in read_lines(path / ROWS):
            messages = with_nulls(line["messages"], KEYS)
            prompt = template.apply(messages[:-1], [], {})
            text = template.apply(messages, [], {"add_generation_prompt": False})
            ids = target.encode(text)
            start = len(prompt) + len(target.reasoning.prefill)
            mask = self._kimi_mask(ids) if self._by_ids else self._mask(ids, start, len(text) - len(behind))
            yield Reading(ids=ids, text=text, mask=mask)

    def _kimi_mask(self, ids: list[int]) -> list[int]:
        """What modelopt/torch/utils/loss_mask.py makes for a tokenizer that cannot map text to tokens: every answer, from
        <|im_middle|> to <|im_end|>, both left out.
        """
        added = self.target.tokenizer.added_tokens
        assistant, middle, end = (added[f"<|im_{name}|>"] for name in ("assistant", "middle", "end"))
        mask, state = [], end
        for token in ids:
            mask.append(int(state == middle and token != end))
            if token in (assistant, end) or (token == middle and state == assistant):
                state = token
        return mask

    def _mask(self, ids: list[int], start: int, end: int) -> list[int]:
        """1 for the tokens from the character `start` up to `end`, as transformers maps tagged text to tokens."""
        ends = self.target.ends(ids)
        first, last = bisect_right(ends, start), bisect_left(ends, end)
        return [int(first <= at <= last) for at in range(len(ids))]


def _own(target: Target) -> str:
    return target.tokenizer.template.removesuffix("\n")


@hookimpl
def register_exporters(register: Register) -> None:
    register(ModelOpt)
