"""What one dataset asks: its conversations in the fixed order, the requests behind them, and what an answer counts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

from msgspec import Struct
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
from eyas.turns import Ended, next_turn


class Unit(Struct, frozen=True):
    """One turn of one key of the fixed order; a later turn is that of one sample. `ids` is None while its rendering is unknown.

    prompt: its messages are all that come before this turn's answer.
    settled: why it is not asked: its prompt is refused, or the server could not encode it.
    """

    index: int
    prompt: Prompt
    turn: int
    ids: list[int] | None
    settled: Unanswered | None

    @property
    def known(self) -> bool:
        return self.ids is not None or self.settled is not None


class Step(Struct, frozen=True):
    """What is known of one (key, turn, sample). `open`: it is still to be rendered or asked.

    unit: its own; of a turn that is not reached, that of the turn where the conversation ended.
    request: None for what is not asked, or not rendered yet.
    """

    unit: Unit
    turn: int
    status: Literal["answered", "refused", "failed", "not_reached", "open"]
    request: str | None = None
    reason: str | None = None


class Plan:
    """What is to be answered: keys in the fixed order, and the requests behind each turn of each sample."""

    def __init__(
        self,
        settings: GenerateSettings,
        prompts: Path,
        registry: Registry,
        *,
        first: int | None = None,
        from_sample: int = 0,
    ) -> None:
        """first: how many prompts, None for all. from_sample: number of the first sample; those of a run begin at 0."""
        self.reasoning = _reasoning(settings, registry)
        self.settings = replace(settings, model=with_options(settings.model, self.reasoning))
        self._prompts, self._from_sample = prompts, from_sample
        rows = read_seal(prompts).rows
        self.prompts = rows if first is None else min(first, rows)
        self.planned = self.prompts * settings.samples
        if settings.turns == "all":
            self.planned = sum(map(self.answers, self._read()))
        # An end that was missing from the tokenizer's files, or is new there, makes other answers.
        stop_ids = load_tokenizer(settings.model).stop_ids if settings.model.tokenizer is not None else []
        self._hasher = Hasher(settings.model, settings.sampling, stop_ids)
        self.identity = render_identity(self.settings.model, self.reasoning.prefill)

    def answers(self, prompt: Prompt) -> int:
        """How many answers are planned for a key: of each turn, as many as there are samples."""
        return (1 + len(prompt.turns)) * self.settings.samples

    def units(self, journal: Journal) -> Iterator[Unit]:
        """The first turns of all keys, rendered as far as the journal knows them."""
        for index, prompt in enumerate(self._read()):
            yield self._known(index, prompt, 0, journal)

    def _read(self) -> Iterator[Prompt]:
        return islice(read_records(self._prompts, Prompt), self.prompts)

    def _known(self, index: int, prompt: Prompt, turn: int, journal: Journal) -> Unit:
        name = render_hash(prompt, self.identity)
        return self.unit(index, prompt, turn, journal.rendered(name) or journal.unanswered(name))

    def unit(self, index: int, prompt: Prompt, turn: int, rendered: Rendered | Unanswered | None) -> Unit:
        """A unit; a prompt that leaves no room for the whole answer is refused before anyone is asked."""
        if rendered is None or isinstance(rendered, Unanswered):
            return Unit(index, prompt, turn, None, rendered)
        ids, refusal = rendered.ids, rendered.refusal
        room = self.settings.model.context - self.settings.sampling.max_new_tokens
        if ids is not None and len(ids) > room:
            refusal = "prompt and max_new_tokens exceed the context"
        if refusal is None:
            return Unit(index, prompt, turn, ids, None)
        refused = Unanswered(request=rendered.render, status="refused", reason=refusal)
        return Unit(index, prompt, turn, None, refused)

    def walk(self, unit: Unit, sample: int, journal: Journal) -> Iterator[Step]:
        """The turns of one sample from `unit` on, as far as the journal tells: all of them, or up to the first open one."""
        while True:
            step = self._step(unit, sample, journal)
            yield step
            if step.status == "open" or unit.turn == len(unit.prompt.turns):
                return
            if step.status != "answered":
                yield from self.unreached(unit, f"an earlier turn was {step.status}")
                return
            assert step.request is not None
            entry = journal.answered(step.request)
            assert entry is not None
            try:
                unit = self._next(unit, entry.reply, journal)
            except Ended as reason:
                yield from self.unreached(unit, str(reason))
                return

    def after(self, unit: Unit, sample: int, reply: Reply, journal: Journal) -> Iterator[Step]:
        """The turns of one sample behind `unit`, which has just got `reply`; as in `walk`."""
        if unit.turn == len(unit.prompt.turns):
            return
        try:
            following = self._next(unit, reply, journal)
        except Ended as reason:
            yield from self.unreached(unit, str(reason))
            return
        yield from self.walk(following, sample, journal)

    def unreached(self, unit: Unit, reason: str) -> Iterator[Step]:
        """The turns behind `unit`, at which the conversation ended for `reason`."""
        for turn in range(unit.turn + 1, len(unit.prompt.turns) + 1):
            yield Step(unit, turn, "not_reached", reason=reason)

    def _next(self, unit: Unit, reply: Reply, journal: Journal) -> Unit:
        prompt = next_turn(unit.prompt, unit.turn, reply, self.settings.model, self.reasoning)
        return self._known(unit.index, prompt, unit.turn + 1, journal)

    def _step(self, unit: Unit, sample: int, journal: Journal) -> Step:
        if unit.settled is not None:
            return Step(unit, unit.turn, unit.settled.status, reason=unit.settled.reason)
        if unit.ids is None:
            return Step(unit, unit.turn, "open")
        request = self.request(unit.ids, sample, unit.prompt.occurrence)
        if journal.has_answer(request):
            return Step(unit, unit.turn, "answered", request)
        if settled := journal.unanswered(request):
            return Step(unit, unit.turn, settled.status, request, settled.reason)
        return Step(unit, unit.turn, "open", request)

    def request(self, prompt_ids: list[int], sample: int, occurrence: int) -> str:
        """The hash of one request."""
        return self._hasher.hash(prompt_ids, self._from_sample + sample, occurrence)

    def new_budget(self) -> Budget:
        return Budget(self.settings.budget_tokens, self.settings.sampling.max_new_tokens)


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


def place(reply: Reply, key: str, turn: int, sample: int) -> Response:
    """A reply at its place in the dataset."""
    fields = {name: getattr(reply, name) for name in reply.__struct_fields__}
    response = Response(key=key, turn=turn, sample=sample, **fields)
    response.__dict__.update(reply.__dict__)  # what has been derived from it
    return response


def journalled_tokens(step: Step, sample: int, journal: Journal, accepts: Accepts, budget: Budget) -> int:
    """Accepted tokens of a step whose answer may be there already; read only where a budget counts them."""
    if budget.limit is None or step.status != "answered":
        return 0
    assert step.request is not None
    entry = journal.answered(step.request)
    assert entry is not None
    return accepts.tokens(place(entry.reply, step.unit.prompt.key, step.turn, sample))
