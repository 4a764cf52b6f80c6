"""What one dataset asks: its prompts in the fixed order, the requests behind them, and what an answer counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from eyas.budget import Budget
from eyas.config import GenerateSettings, ModelConfig
from eyas.journal import Journal, Rendered, Unanswered
from eyas.judge import Judge
from eyas.plugins import Reasoning, Registry
from eyas.recordfile import read_records, read_seal
from eyas.records import Prompt, Reply, Response
from eyas.render import render_hash, render_identity
from eyas.request import Hasher
from eyas.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Unit:
    """One key of the fixed order. `ids` is None while its rendering is unknown.

    settled: why it is not asked: its prompt is refused, or the server could not encode it.
    """

    index: int
    prompt: Prompt
    ids: list[int] | None
    settled: Unanswered | None

    @property
    def known(self) -> bool:
        return self.ids is not None or self.settled is not None


class Plan:
    """What is to be answered: units in the fixed order, and the request behind each of their samples."""

    def __init__(self, settings: GenerateSettings, prompts: Path, registry: Registry) -> None:
        self.reasoning = _reasoning(settings, registry)
        self.settings = replace(settings, model=with_options(settings.model, self.reasoning))
        self._prompts = prompts
        self.prompts = read_seal(prompts).rows
        self.planned = self.prompts * settings.samples
        # An end that was missing from the tokenizer's files, or is new there, makes other answers.
        stop_ids = load_tokenizer(settings.model).stop_ids if settings.model.tokenizer is not None else []
        self._hasher = Hasher(settings.model, settings.sampling, stop_ids)
        self.identity = render_identity(self.settings.model, self.reasoning.prefill)

    def units(self, journal: Journal) -> Iterator[Unit]:
        """All units, rendered as far as the journal knows them."""
        for index, prompt in enumerate(read_records(self._prompts, Prompt)):
            name = render_hash(prompt, self.identity)
            yield self.unit(index, prompt, journal.rendered(name) or journal.unanswered(name))

    def unit(self, index: int, prompt: Prompt, rendered: Rendered | Unanswered | None) -> Unit:
        """A unit; a prompt that leaves no room for the whole answer is refused before anyone is asked."""
        if rendered is None or isinstance(rendered, Unanswered):
            return Unit(index, prompt, None, rendered)
        ids, refusal = rendered.ids, rendered.refusal
        room = self.settings.model.context - self.settings.sampling.max_new_tokens
        if ids is not None and len(ids) > room:
            refusal = "prompt and max_new_tokens exceed the context"
        if refusal is None:
            return Unit(index, prompt, ids, None)
        return Unit(
            index, prompt, None, Unanswered(request=rendered.render, status="refused", reason=refusal)
        )

    def requests(self, unit: Unit) -> list[str]:
        """The request hash of each sample; empty for a unit that is not asked."""
        if unit.ids is None:
            return []
        samples = range(self.settings.samples)
        return [self.request(unit.ids, sample, unit.prompt.occurrence) for sample in samples]

    def request(self, prompt_ids: list[int], sample: int, occurrence: int) -> str:
        """The hash of one request."""
        return self._hasher.hash(prompt_ids, sample, occurrence)

    def new_budget(self) -> Budget:
        return Budget(
            self.settings.budget_tokens, self.settings.samples * self.settings.sampling.max_new_tokens
        )


def _reasoning(settings: GenerateSettings, registry: Registry) -> Reasoning:
    section = dict(settings.model.reasoning)
    reasoning = registry.create("reasoning", section.pop("name"), section, "model.reasoning")
    assert isinstance(reasoning, Reasoning)
    return reasoning


def with_options(model: ModelConfig, reasoning: Reasoning) -> ModelConfig:
    """The model with the reasoning format's options of the chat template under the config's own."""
    return replace(model, template_options={**reasoning.template_options, **model.template_options})


class Accepts:
    """Accepted output tokens of a reply; counts all of them where no budget asks for a verdict."""

    def __init__(self, settings: GenerateSettings, registry: Registry) -> None:
        self._judge = (
            Judge(settings.model.reasoning, settings.checks, registry)
            if settings.checks is not None
            else None
        )

    def tokens(self, response: Response) -> int:
        if self._judge is not None and not self._judge.judge(response).accepted:
            return 0
        return len(response.output_ids)


def place(reply: Reply, key: str, sample: int) -> Response:
    """A reply at its place in the dataset."""
    fields = {name: getattr(reply, name) for name in reply.__struct_fields__}
    return Response(key=key, turn=0, sample=sample, **fields)


def journalled_tokens(
    unit: Unit, sample: int, request: str, journal: Journal, accepts: Accepts, budget: Budget
) -> int:
    """Accepted tokens of an answer that is already there; read only where a budget counts them."""
    if budget.limit is None:
        return 0
    entry = journal.answered(request)
    assert entry is not None
    return accepts.tokens(place(entry.reply, unit.prompt.key, sample))
