"""The target model as exporters of text need it: its tokenizer, its chat template, its reasoning format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from eyas.chat_template import FAILURES
from eyas.config import ModelConfig
from eyas.errors import EyasError
from eyas.hub import tokenizer_folder
from eyas.lengths import ends_of
from eyas.plugins import Reasoning, Reject, Told
from eyas.records import Finish, Prompt, Reply, TrainRow, unit_place
from eyas.render import Refused, Renderer, for_template
from eyas.tokenizer import load_tokenizer

# Stand for a text in probes: no template and no tokenizer knows these characters.
ASKED, ANSWERED, THOUGHT, SYSTEM = "\ue000", "\ue001", "\ue002", "\ue003"
CLOSED = (
    "closed",
    "empty",
    "double_close",
    "reopened",
    "stray_open",
)  # states in which the delimiter may end reasoning


class Target:
    """One model. Raises EyasError if its tokenizer cannot be loaded."""

    def __init__(self, model: ModelConfig, reasoning: Reasoning) -> None:
        self.model, self.reasoning = model, reasoning
        self.tokenizer = load_tokenizer(model)
        self.tokenizer.speed_up()  # the proof encodes every row
        self.template_options = {**reasoning.template_options, **model.template_options}
        options = replace(model, template_options=self.template_options)
        self._renderer = Renderer(options, self.tokenizer, reasoning.prefill)
        self._names = {token: text for text, token in self.tokenizer.added_tokens.items()}
        self._stops = frozenset(self.tokenizer.stop_ids)
        # How the format spells delimiters; a plugin may have none, and then its reasoning is a part of the answer.
        self.open: str = getattr(reasoning, "open", "")
        self.close: str = getattr(reasoning, "close", "")

    @property
    def is_fast(self) -> bool:
        """Whether transformers can tell which characters a token stands for."""
        assert self.model.tokenizer is not None
        return (tokenizer_folder(self.model.tokenizer) / "tokenizer.json").is_file()

    # --- ids → text -----------------------------------------------------------------------------------------------

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, an end token at the very end included."""
        return self.tokenizer.decode(ids)[0] + self._end(ids)

    def _end(self, ids: Sequence[int]) -> str:
        """The end token at the very end of ids, if there is one."""
        return self._names.get(ids[-1], "") if ids and ids[-1] in self._stops else ""

    def ends(self, ids: Sequence[int]) -> Sequence[int]:
        """For each id, how many characters of the text are complete after it, the end token's own included."""
        ends = ends_of(self.tokenizer.decode(ids)[1])
        return [*ends[:-1].tolist(), len(self.text(ids))] if ids else []

    def encode(self, text: str) -> list[int]:
        """Ids as a trainer's tokenizer has them: spelt control tokens become control tokens."""
        return self.tokenizer.encode(text, control=True)

    def tell(self, row: TrainRow, prompt: Prompt) -> Told:
        """`row` in words; `prompt` holds all that came before it. The output is split on its ids by the reasoning format."""
        start = len(row.input_ids) - sum(row.loss_mask)
        prompt_ids, output_ids = row.input_ids[:start], row.input_ids[start:]
        text, lengths = self.tokenizer.decode(row.input_ids)
        asked = text[: ends_of(lengths)[start - 1]] if start else ""
        output, lengths = self.tokenizer.decode(output_ids)
        split = self.reasoning.split(
            reply := Reply(
                request=row.metadata.request,
                prompt_ids=prompt_ids,
                output_ids=output_ids,
                finish=Finish(type=row.metadata.finish),
                text=output,
                text_lengths=lengths,
                stop_ids=self.tokenizer.stop_ids,
                added_tokens=self.tokenizer.added_tokens,
                control_ids=self.tokenizer.control_ids,
                effective_max_new=len(output_ids),
                constrained=row.metadata.constrained,
            )
        )
        reasoning, answer = None, output
        if split.reasoning_tokens and split.state in CLOSED and self.close:
            end = reply.text_ends[split.reasoning_tokens - 1]
            # The last token of reasoning may hold the first characters of the answer.
            inside, close, first = output[:end].rpartition(self.close)
            if close:
                reasoning, answer = self._opened(inside), first + output[end:]
        is_open = split.state == "truncated_in_reasoning"
        if is_open:
            reasoning, answer = self._opened(output), ""
        messages, tools = for_template(prompt, self.model)
        return Told(
            row=row,
            text=text + self._end(row.input_ids),
            asked=asked,
            messages=messages,
            tools=tools,
            proved=unit_place(row.id)[0] == 0 or self._gives(prompt, prompt_ids),
            output=output,
            reasoning=reasoning,
            answer=answer,
            open=is_open,
        )

    def _gives(self, prompt: Prompt, ids: list[int]) -> bool:
        """Whether `prompt` is rendered as `ids`."""
        try:
            return self._renderer.render(prompt) == ids
        except (Refused, Reject):
            return False

    def _opened(self, inside: str) -> str:
        """Reasoning without the delimiter that opens it, where the model wrote one."""
        return inside.lstrip()[len(self.open) :] if inside.lstrip().startswith(self.open) else inside

    # --- messages → text ------------------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        to_answer: bool = False,
    ) -> str:
        """A conversation by the model's own chat template. to_answer: with what opens the next answer.

        Raises EyasError, naming the template's own error, for a conversation that the template refuses.
        """
        options = {**self.template_options, "add_generation_prompt": to_answer}
        try:
            return self.tokenizer.apply_template(messages, tools, options)
        except FAILURES as error:
            raise EyasError(
                f"model.tokenizer: the chat template refuses a finished conversation ({error}); export `tokens`, which needs none"
            ) from None

    def opened_by_prompt(self, told: Told) -> str:
        """What the prompt already holds of the answer: the delimiter that opens reasoning and what follows it, or nothing."""
        at = told.asked.rfind(self.open) if self.open else -1
        return told.asked[at:] if at >= 0 and not told.asked[at + len(self.open) :].strip() else ""

    @cached_property
    def before_earlier(self) -> str:
        """What the chat template writes before an earlier answer without reasoning: an empty block of it, or nothing."""
        header = self.render([_user()], to_answer=True).partition(ASKED)[2]
        if self.open and header.rstrip().endswith(self.open):
            header = header[: header.rindex(self.open)]
        told = self.render([_user(), {"role": "assistant", "content": ANSWERED}, _user()])
        between = told.partition(ASKED)[2].partition(ANSWERED)[0]
        return between.removeprefix(header) if between.startswith(header) else ""

    def answer_end(self) -> str:
        """The token with which the chat template ends an answer; empty if it writes none."""
        tail = self.render([_user(), {"role": "assistant", "content": ANSWERED}]).rpartition(ANSWERED)[2]
        first = self.encode(tail)[:1]
        return self._names.get(first[0], "") if first else ""

    def default_system(self) -> str | None:
        """The system message that the chat template puts before a conversation without one; None if it puts none."""
        own = self.render([{"role": "system", "content": SYSTEM}, _user()])
        before, mark, behind = own.partition(SYSTEM)
        without = self.render([_user()])
        if not mark or not before.strip() or not (without.startswith(before) and without.endswith(behind)):
            return None
        return without[len(before) : len(without) - len(behind)] or None

    def keeps(self, answer: Mapping[str, Any]) -> bool:
        """Whether the template still tells the reasoning of a finished `answer`, which holds THOUGHT in some place."""
        return THOUGHT in self.render([_user(), answer])


def _user() -> dict[str, Any]:
    return {"role": "user", "content": ASKED}
