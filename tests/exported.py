"""Training rows of a real tokenizer and chat template, with what generation leaves in them, to be exported and read again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from eyas.config import ExportSettings, ModelConfig
from eyas.export import export
from eyas.exporters.reports import ExportReport
from eyas.exporters.target import Target
from eyas.plugins import Reasoning, Told, registry
from eyas.recordfile import write_records
from eyas.records import Finish, Message, Origin, Prompt, Response, TrainMetadata, TrainRow, Turn
from eyas.render import Renderer
from eyas.tables import write_table
from eyas.train import SCHEMA

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says how the weather is.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def user(content: str) -> Message:
    return Message(role="user", content=content)


def system(content: str) -> Message:
    return Message(role="system", content=content)


@dataclass
class Made:
    """Rows of one model in `folder`, and their exports."""

    folder: Path
    model: ModelConfig
    prompts: list[Prompt] = field(default_factory=list)
    rows: list[TrainRow] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)

    def __post_init__(self) -> None:
        section = dict(self.model.reasoning)
        reasoning = registry().create("reasoning", section.pop("name"), section, "model.reasoning")
        assert isinstance(reasoning, Reasoning)
        self.target = Target(self.model, reasoning)
        told = replace(self.model, template_options=self.target.template_options)
        self._renderer = Renderer(told, self.target.tokenizer, reasoning.prefill)

    def add(
        self,
        key: str,
        messages: list[Message],
        output: str | list[int],
        *,
        tools: tuple[dict[str, Any], ...] = (),
        cut: bool = False,
        turns: tuple[Turn, ...] = (),
    ) -> TrainRow:
        """The row of an answer to a key's first turn; its ids are those of `output`, whose delimiters are tokens."""
        origin = Origin(source="made", revision=None, file="f", row=1)
        prompt = Prompt(
            key=key,
            messages=messages,
            turns=list(turns),
            tools=list(tools),
            origin=origin,
            occurrence=0,
            group=key,
        )
        self.prompts.append(prompt)
        return self.answer(key, 0, self._renderer.render(prompt), output, cut=cut)

    def answer(
        self,
        key: str,
        turn: int,
        asked: str | list[int],
        output: str | list[int],
        *,
        sample: int = 0,
        cut: bool = False,
        accepted: bool = True,
    ) -> TrainRow:
        """The row of an answer to the prompt of which `asked` is text or ids; its response, and the row itself if it is accepted."""
        start, ids = (self.target.encode(part) if isinstance(part, str) else part for part in (asked, output))
        tokenizer = self.target.tokenizer
        text, lengths = tokenizer.decode(ids)
        finish = "length" if cut else "stop"
        response = Response(
            key=key,
            turn=turn,
            sample=sample,
            request=key,
            prompt_ids=start,
            output_ids=ids,
            finish=Finish(type=finish),
            text=text,
            text_lengths=lengths,
            stop_ids=tokenizer.stop_ids,
            added_tokens=tokenizer.added_tokens,
            control_ids=tokenizer.control_ids,
            effective_max_new=len(ids),
            constrained=False,
        )
        reasoning = self.target.reasoning.split(response).reasoning_tokens
        row = TrainRow(
            id=f"d/{key}:{turn}:{sample}",
            primary_id=f"d/{key}",
            input_ids=start + ids,
            loss_mask=[0] * len(start) + [1] * len(ids),
            metadata=TrainMetadata(
                dataset="d",
                group=key,
                request=key,
                finish=finish,
                truncated=cut,
                constrained=False,
                reasoning_tokens=reasoning,
                answer_tokens=len(ids) - reasoning,
            ),
        )
        self.responses.append(response)
        if accepted:
            self.rows.append(row)
        return row

    def asked(self, row: TrainRow) -> str:
        """The text of a row's prompt."""
        return self.target.text(row.input_ids[: row.loss_mask.index(1)])

    def export(self, exporter: str, **options: Any) -> tuple[Path, ExportReport]:
        """Where the export lies, and its report."""
        found = registry()
        cls = found.find("exporter", exporter, "exports").cls
        number = len(list(self.folder.glob("*.parquet")))
        table, prompts = self.folder / f"{number}.parquet", self.folder / "d" / "prompts.jsonl.zst"
        # The training set has an order of its own.
        write_table(table, SCHEMA, self.rows[::-1])
        write_records(prompts, self.prompts)
        responses = prompts.with_name("responses.jsonl.zst")
        write_records(responses, self.responses)
        model = self.model if cls.takes is Told else None  # type: ignore[attr-defined]
        name = f"train.{cls.suffix}" if cls.suffix else "train"  # type: ignore[attr-defined]
        out = self.folder / f"{exporter}-{number}" / name
        settings = ExportSettings(exporter=exporter, options=options, model=model)
        return out, export(settings, table, out, found, [prompts], [responses])


def qwen3_model(tokenizer: Path) -> ModelConfig:
    return ModelConfig(id="Qwen/Qwen3-8B", tokenizer=str(tokenizer), reasoning={"name": "qwen3"})


def qwen3(folder: Path, tokenizer: Path) -> Made:
    """Six rows of Qwen3: with and without a system message, with a tool, cut in reasoning and behind it, without reasoning."""
    made = Made(folder, qwen3_model(tokenizer))
    made.add("brief", [system("Be brief."), user("Hi, 2+2?")], "<think>\nI add.\n</think>\n\n4<|im_end|>")
    made.add("emoji", [user("Hi, again!")], "<think>\nHm, héllo 😀\n</think>\n\nHello.<|im_end|>")
    made.add("tool", [system("Help."), user("Rain?")], CALL, tools=(TOOL,))
    made.add("cut", [user("Cut")], "<think>\nSo much to", cut=True)
    made.add("late", [user("Late")], "<think>\nDone.\n</think>\n\nAn answ", cut=True)
    made.add("bare", [user("Bare")], "Just so.<|im_end|>")
    return made


CALL = '<think>\nI ask.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'


def kimi_model(tokenizer: Path) -> ModelConfig:
    return ModelConfig(
        id="moonshotai/Kimi-K2.5",
        tokenizer=str(tokenizer),
        trust_remote_code=True,
        reasoning={"name": "kimi_k2.5"},
    )


def kimi(folder: Path, tokenizer: Path) -> Made:
    """Four rows of Kimi-K2.5, whose template drops the reasoning of finished answers."""
    made = Made(folder, kimi_model(tokenizer))
    made.add("brief", [system("Be brief."), user("Hi, 2+2?")], "I add: 4</think>4<|im_end|>")
    made.add("emoji", [user("Hi, again!")], "Hm, héllo 😀</think>Hello.<|im_end|>")
    made.add("cut", [user("Cut")], "So much to", cut=True)
    made.add("late", [user("Late")], "Done.</think>An answ", cut=True)
    return made


def add_talks(made: Made) -> Made:
    """Conversations of Qwen3 that go on; what later turns were asked is spelt out, not rendered.

    `talk` has three turns and two samples, whose first answers differ; one of its answers is not accepted, and a later
    one follows it. `call` has a tool and its result, behind it a question; before that, reasoning is dropped. `once` ends at once.
    """
    then = tuple(Turn(calls=[], messages=[user(text)]) for text in ("Two?", "Three?"))
    first = made.add("talk", [user("One?")], "<think>\nA\n</think>\n\nOne.<|im_end|>", turns=then)
    opening = made.asked(first)
    second = f"{opening}One.{_next('Two?')}"
    made.answer("talk", 1, second, "<think>\nB\n</think>\n\nTwo.<|im_end|>", accepted=False)
    made.answer("talk", 2, f"{second}Two.{_next('Three?')}", "<think>\nC\n</think>\n\nThree.<|im_end|>")
    made.answer("talk", 0, opening, "<think>\nA\n</think>\n\nEins.<|im_end|>", sample=1)
    second = f"{opening}Eins.{_next('Two?')}"
    made.answer("talk", 1, second, "<think>\nZ", sample=1, cut=True)
    made.add("once", [user("Alone?")], "<think>\nD\n</think>\n\nYes.<|im_end|>", turns=then)
    rain = {"name": "weather", "arguments": '{"city": "Rome"}'}
    results = [
        Turn(
            calls=[{"id": "c", "type": "function", "function": rain}],
            messages=[Message(role="tool", content="It rains.", tool_call_id="c")],
        ),
        Turn(calls=[], messages=[user("Thanks.")]),
    ]
    called = made.add("call", [system("Help."), user("Rain now?")], CALL, tools=(TOOL,), turns=tuple(results))
    told = "<|im_end|>\n<|im_start|>user\n<tool_response>\nIt rains.\n</tool_response>"
    opening = made.asked(called)
    said = CALL.removesuffix("<|im_end|>")
    made.answer("call", 1, f"{opening}{said}{told}{ANSWER}", "<think>\nWet.\n</think>\n\nIt does.<|im_end|>")
    said = said.partition("</think>\n\n")[2]
    made.answer(
        "call",
        2,
        f"{opening}{said}{told}{ANSWER}It does.{_next('Thanks.')}",
        "<think>\nPolite.\n</think>\n\nWelcome.<|im_end|>",
    )
    return made


ANSWER = "<|im_end|>\n<|im_start|>assistant\n"


def _next(question: str) -> str:
    return f"<|im_end|>\n<|im_start|>user\n{question}{ANSWER}"
