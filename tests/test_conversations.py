"""Every turn of a conversation at the socket: the model's own answers as history, and what kill, resume, budget and refusals leave."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_llamacpp import answer, encode, make_model
from helpers import journal_entries, prompt
from stage import Served, Stage, fake_server

from eyas.config import StatsSettings, TrainSettings
from eyas.errors import EyasError
from eyas.journal import Answered
from eyas.progress import read_progress
from eyas.prompts import FileReport, KeysDigest, PromptsReport
from eyas.recordfile import write_records
from eyas.records import Message, Prompt, TrainRow, Turn
from eyas.stats import DatasetStats, stats
from eyas.tables import read_table
from eyas.train import train
from eyas.validate import validate

pytestmark = pytest.mark.fault
CLOSED = "http://127.0.0.1:9"
MOST_NEW, CONTEXT = 400, 2048  # as in stage.py

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.reasoning_content and loop.index0 > loop.length - 3 %}{{ '[' + m.reasoning_content + ']' }}{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.id + ' ' + c.function.name + ' ' + (c.function.arguments | tojson) }}{% endfor %}"
    "{% if m.tool_call_id %}{{ ' for ' + m.tool_call_id }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' }}"
)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def talk(key: str, *asked: str) -> Prompt:
    """A recorded conversation in which the user says these."""
    first, *later = asked
    return prompt(key, first, turns=[Turn(calls=[], messages=[user(text)]) for text in later])


def talks(count: int) -> list[Prompt]:
    return [talk(f"k{n}", *(f"Question {n}.{turn}: why?" for turn in range(1 + n % 4))) for n in range(count)]


def stage(folder: Path, conversations: list[Prompt], **options: Any) -> Stage:
    turns = {"turns": "all"} | options.pop("dataset", {})
    made = Stage(folder, [], dataset=turns, **options)
    write_records(made.paths.prompts, conversations)
    return made


def first_only(conversations: list[Prompt]) -> list[Prompt]:
    return [msgspec.structs.replace(one, turns=[]) for one in conversations]


# --- what is right, worked out without Eyas ----------------------------------------------------------------------


def turn_of(role: str, text: str) -> list[int]:
    return [*encode(f"<|im_start|>{role}\n"), *encode(text, special=False), *encode("<|im_end|>\n")]


def text_of(ids: list[int]) -> str:
    return bytes(token - 3 for token in ids if token > 2).decode()


def by_hand(conversation: Prompt) -> Iterator[tuple[list[int], list[int]]]:
    """Ids sent and ids answered of each turn that is reached, with the fake server's template and its answers."""
    history: list[int] = []
    spoken = [conversation.messages, *(turn.messages for turn in conversation.turns)]
    for messages in spoken:
        for message in messages:
            history += turn_of(message.role, message.content)
        sent = [*history, *encode("<|im_start|>assistant\n<think>\n")]
        if len(sent) + MOST_NEW > CONTEXT:
            return
        said = answer(sent, MOST_NEW)
        yield sent, said
        _, close, content = text_of(said).partition("</think>")
        if said[-1] != 2 or not close:
            return
        history += turn_of("assistant", content.strip())


def crossed(server: Served) -> list[tuple[list[int], list[int]]]:
    return [(line["prompt"], line["tokens"]) for line in map(json.loads, server.lines())]


def books(made: Stage, samples: int = 1) -> tuple[DatasetStats, list[TrainRow]]:
    """Statistics, whose books must balance, and training rows of a stage that has run."""
    _, _, stages = made.settings(CLOSED)
    base = made.paths.prompts.parent
    asked = len(made.outcomes())
    report = PromptsReport(
        dataset=made.name,
        asked=None,
        rows_read=len({o.key for o in made.outcomes()}),
        used=len({o.key for o in made.outcomes()}),
        turns=asked // samples,
        keys=KeysDigest(dict.fromkeys(o.key for o in made.outcomes())).hex(),
        not_taken=0,
        skipped={},
        files=[FileReport(name="f", rows=1, sha256="0" * 64)],
        evaluation=[],
    )
    (base / "prompts.json").write_bytes(msgspec.json.encode(report))
    verdicts = base / "verdicts.parquet"
    validate(stages.validate(made.name), made.paths.responses, verdicts, stages.registry)
    rows = base / "train.parquet"
    train(TrainSettings(dataset=made.name), made.paths.prompts, made.paths.responses, verdicts, rows)
    told = stats(
        StatsSettings(dataset=made.name, samples=samples),
        base / "prompts.json",
        made.paths.outcomes,
        verdicts,
        rows,
        base / "stats.json",
    )
    return told, list(read_table(rows, TrainRow))


# --- the promises ------------------------------------------------------------------------------------------------


def test_every_turn_is_asked_with_the_models_own_answers_before_it(tmp_path: Path) -> None:
    conversations = talks(60)
    made = stage(tmp_path, conversations)
    with fake_server(tmp_path, "--delay", "0.03") as server:
        made.run(server.url)
    expected = {one.key: list(by_hand(one)) for one in conversations}
    assert sorted(crossed(server)) == sorted(turn for turns in expected.values() for turn in turns)
    assert [(r.key, r.turn, r.sample, r.prompt_ids, r.output_ids) for r in made.responses()] == [
        (key, at, 0, sent, said) for key, turns in expected.items() for at, (sent, said) in enumerate(turns)
    ]
    assert [(o.key, o.turn, o.status) for o in made.outcomes()] == [
        (one.key, at, "answered" if at < len(expected[one.key]) else "not_reached")
        for one in conversations
        for at in range(1 + len(one.turns))
    ]
    told, rows = books(made)
    assert told.planned == sum(1 + len(one.turns) for one in conversations)
    reasons = told.outcome_reasons["not_reached"]
    assert reasons == {
        "the answer before it has malformed reasoning (unclosed)": told.outcomes["not_reached"]
    }
    by_id = {f"alpha/{key}:{at}:0": turn for key, turns in expected.items() for at, turn in enumerate(turns)}
    for row in rows:
        sent, said = by_id[row.id]
        assert row.input_ids == sent + said and row.loss_mask == [0] * len(sent) + [1] * len(said)
        assert row.primary_id == f"alpha/{row.id.split('/')[1].split(':')[0]}"
    assert len({row.primary_id for row in rows}) < len(rows) == told.accepted.rows


def test_a_change_from_the_first_turn_to_all_asks_for_later_turns_only_and_back_for_nothing(
    tmp_path: Path,
) -> None:
    conversations = talks(16)
    with fake_server(tmp_path) as server:
        first = stage(tmp_path, first_only(conversations), dataset={"turns": "first"})
        first.run(server.url)
        before, asked = first.responses(), len(server.lines())
        assert asked == 16
        every = stage(tmp_path, conversations)
        every.run(server.url)
    later = [r.prompt_ids for r in every.responses() if r.turn]
    assert sorted(sent for sent, _ in crossed(server)[asked:]) == sorted(later)
    assert [r for r in every.responses() if not r.turn] == before
    again = stage(tmp_path, first_only(conversations), dataset={"turns": "first"})
    again.run(CLOSED)
    assert again.responses() == before


def test_samples_are_conversations_of_their_own(tmp_path: Path) -> None:
    made = stage(tmp_path, talks(8), dataset={"samples": 2})
    with fake_server(tmp_path) as server:
        made.run(server.url)
    order = [(o.key, o.sample, o.turn) for o in made.outcomes()]
    assert order == [
        (f"k{n}", sample, turn) for n in range(8) for sample in (0, 1) for turn in range(1 + n % 4)
    ]
    assert len({r.request for r in made.responses()}) == len(made.responses()) == len(server.lines())
    assert books(made, samples=2)[0].planned == len(order)


def test_bytes_do_not_depend_on_concurrency_and_a_rebuild_asks_nothing(tmp_path: Path) -> None:
    files = []
    with fake_server(tmp_path, "--delay", "0.03") as server:
        for concurrency in (1, 16):
            made = stage(tmp_path / str(concurrency), talks(12), server={"concurrency": concurrency})
            made.run(server.url)
            files.append((made.paths.responses.read_bytes(), made.paths.outcomes.read_bytes()))
    made.paths.responses.unlink()
    made.run(CLOSED)
    files.append((made.paths.responses.read_bytes(), made.paths.outcomes.read_bytes()))
    assert files[0] == files[1] == files[2]


def _run(folder: Path, url: str) -> None:
    stage(folder, talks(24), server={"concurrency": 4}).run(url)


def test_a_kill_in_mid_conversation_loses_no_answer_and_a_resume_asks_only_what_is_missing(
    tmp_path: Path,
) -> None:
    with fake_server(tmp_path, "--delay", "0.3") as server:
        job = get_context("spawn").Process(target=_run, args=(tmp_path, server.url))
        job.start()
        while len(server.lines()) < 20:
            assert job.is_alive()
            time.sleep(0.02)
        job.kill()
        job.join()
    with fake_server(tmp_path / "again") as server:
        held = [
            entry.reply.prompt_ids
            for segment in sorted((tmp_path / "journal" / "alpha").glob("*.zst"))
            for entry in journal_entries(segment.read_bytes())
            if isinstance(entry, Answered)
        ]
        made = stage(tmp_path, talks(24), server={"concurrency": 4})
        made.run(server.url)
    expected = {one.key: list(by_hand(one)) for one in talks(24)}
    turns = [sent for turns in expected.values() for sent, _ in turns]
    begun = [
        key for key, turns in expected.items() if 0 < sum(sent in held for sent, _ in turns) < len(turns)
    ]
    assert begun, "some conversation was interrupted between two turns"
    missing = [sent for sent in turns if sent not in held]
    assert sorted(sent for sent, _ in crossed(server)) == sorted(missing)
    assert [r.prompt_ids for r in made.responses()] == turns


@pytest.mark.parametrize("share", [0.001, 0.3, 0.7])
def test_a_budget_takes_whole_conversations_whatever_the_journal_holds(tmp_path: Path, share: float) -> None:
    conversations = talks(24)
    with fake_server(tmp_path, "--delay", "0.03") as server:
        everything = stage(tmp_path / "all", conversations)
        everything.run(server.url)
        told, rows = books(everything)
        limit = int(told.accepted.tokens * share) + 1
        for folder, url in (("some", server.url), ("all", CLOSED)):
            made = stage(tmp_path / folder, conversations, dataset={"budget_tokens": limit})
            made.run(url)
            tokens, keys = 0, 0
            for one in conversations:
                if tokens >= limit:
                    break
                keys += 1
                own = [row for row in rows if row.primary_id == f"alpha/{one.key}"]
                tokens += sum(sum(row.loss_mask) for row in own)
            taken = {one.key for one in conversations[:keys]}
            assert 0 < keys < 24
            assert {r.key for r in made.responses()} == {r.key for r in everything.responses()} & taken
            assert {o.key for o in made.outcomes() if o.status == "not_needed"} == {
                o.key for o in made.outcomes()
            } - taken
            assert books(made)[0].planned == told.planned


def test_a_turn_that_outgrows_the_context_is_refused_and_the_rest_is_not_reached(tmp_path: Path) -> None:
    (found,) = [
        one
        for one in (talk(f"t{n}", "Why?", f"Long {n} " * 300, "Then?", "So?") for n in range(9))
        if _closes(one)
    ][:1]
    made = stage(tmp_path, [found])
    with fake_server(tmp_path) as server:
        made.run(server.url)
        assert len(server.lines()) == 1
    assert [(o.turn, o.status, o.reason) for o in made.outcomes()] == [
        (0, "answered", None),
        (1, "refused", "prompt and max_new_tokens exceed the context"),
        (2, "not_reached", "an earlier turn was refused"),
        (3, "not_reached", "an earlier turn was refused"),
    ]
    shown = read_progress(made.paths.progress)
    assert shown is not None
    assert (shown.planned, shown.done, shown.refused, shown.not_reached) == (4, 4, 1, 2)
    books(made)
    made.run(CLOSED)
    again = read_progress(made.paths.progress)
    assert again is not None
    assert (again.done, again.journalled, again.refused, again.not_reached) == (4, 4, 1, 2)


def _closes(conversation: Prompt) -> bool:
    (_, said), *_ = by_hand(conversation)
    return "</think>" in text_of(said)


def test_a_later_turn_that_fails_for_good_is_counted_with_the_turns_behind_it(tmp_path: Path) -> None:
    conversations = [talk(f"k{n}", f"A{n}?", f"B{n}?", f"C{n}?") for n in range(12)]
    hit = next(one.turns[0].messages[0].content for one in conversations if len(list(by_hand(one))) == 3)
    strict = stage(tmp_path, conversations, server={"retries": 0})
    with fake_server(tmp_path, "--fail-always", hit) as server:
        with pytest.raises(EyasError, match="1 of 36 requests failed for good"):
            strict.run(server.url)
        lax = stage(tmp_path, conversations, server={"retries": 0, "failure_share": 0.1})
        lax.run(server.url)
    key = next(one.key for one in conversations if one.turns[0].messages[0].content == hit)
    assert [(o.status, o.reason) for o in lax.outcomes() if o.key == key] == [
        ("answered", None),
        ("failed", "HTTP 500"),
        ("not_reached", "an earlier turn was failed"),
    ]
    books(lax)
    lax.run(CLOSED)


# --- tools -------------------------------------------------------------------------------------------------------


def call(identity: str, **arguments: Any) -> dict[str, Any]:
    named = {"name": "look", "arguments": json.dumps(arguments)}
    return {"id": identity, "type": "function", "function": named}


def result(identity: str) -> Message:
    return Message(role="tool", content="It is dark.", tool_call_id=identity)


def calls(at: str) -> str:
    written = json.dumps({"name": "look", "arguments": {"at": at}})
    return f"I must look.\n</think>\n\nI look.\n<tool_call>\n{written}\n</tool_call>"


def test_recorded_results_follow_the_recorded_calls_and_other_calls_end_the_conversation(
    tmp_path: Path,
) -> None:
    make_model(tmp_path / "tiny.gguf", template=TOOL_TEMPLATE)
    (tmp_path / "replies.json").write_text(
        json.dumps(
            {
                "Look at home.": calls("home"),
                "It is dark.": "Dark.\n</think>\n\nIt is dark there.",
                "Look elsewhere.": calls("nowhere"),
                "Thanks.": "Polite.\n</think>\n\nWelcome.",
            }
        )
    )
    turns = [
        Turn(calls=[call("call_1", at="home")], messages=[result("call_1")]),
        Turn(calls=[], messages=[user("Thanks.")]),
    ]
    conversations = [
        prompt("right", "Look at home.", tools=[TOOL], turns=turns),
        prompt("wrong", "Look elsewhere.", tools=[TOOL], turns=turns),
    ]
    made = stage(tmp_path, conversations)
    with fake_server(tmp_path, "--replies", str(tmp_path / "replies.json")) as server:
        made.run(server.url)
    assert [(o.key, o.turn, o.status, o.reason) for o in made.outcomes()] == [
        ("right", 0, "answered", None),
        ("right", 1, "answered", None),
        ("right", 2, "answered", None),
        ("wrong", 0, "answered", None),
        ("wrong", 1, "not_reached", "the model called a tool with other arguments than the recorded ones"),
        ("wrong", 2, "not_reached", "the model called a tool with other arguments than the recorded ones"),
    ]
    opening = (
        f"<|im_start|>system\n{json.dumps([TOOL])}<|im_end|>\n<|im_start|>user\nLook at home.<|im_end|>\n"
    )
    called = '<tool_call>call_1 look {"at": "home"}<|im_end|>\n<|im_start|>tool\nIt is dark. for call_1<|im_end|>\n'
    # The template keeps the reasoning of what is still going on, and drops what lies behind.
    second = f"{opening}<|im_start|>assistant\n[I must look.]I look.{called}"
    third = f"{opening}<|im_start|>assistant\nI look.{called}<|im_start|>assistant\n[Dark.]It is dark there.<|im_end|>\n<|im_start|>user\nThanks.<|im_end|>\n"
    head = "<|im_start|>assistant\n<think>\n"
    assert [r.prompt_ids for r in made.responses()][:3] == [
        encode(text + head) for text in (opening, second, third)
    ]
    books(made)
    made.run(CLOSED)
