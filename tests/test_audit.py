"""The drift audit: a step of the server is told with what happened before it, noise is not, and nothing of it is kept as data."""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers import reply
from stage import Stage, fake_server

import eyas.fleet
from eyas.audit import LEAST_ROUNDS, Audit, AuditAnswer, Drift, Round
from eyas.config import AuditConfig, Stages, load
from eyas.journal import Journal
from eyas.plugins import Split
from eyas.progress import read_progress
from eyas.units import Plan

BASE = [(120, 0.5), (300, 0.7), (450, 0.4), (800, 0.8), (60, 0.6), (240, 0.5), (700, 0.6), (900, 0.7)]


def answer(tokens: float, reasoning: float = 0.5, distinct: float = 0.95) -> AuditAnswer:
    """As a server would give it with a limit of 1,024."""
    whole = min(1024, max(1, round(tokens)))
    share = min(1.0, max(0.0, reasoning))
    return AuditAnswer(
        key="k",
        output_tokens=whole,
        reasoning_tokens=round(share * whole),
        distinct=min(1.0, max(0.0, distinct)),
        ids="",
    )


def round_of(answers: Sequence[AuditAnswer], number: int = 0, **fields: Any) -> Round:
    began = 1_800.0 * number
    given: dict[str, Any] = {"asked": "set", "servers": ["s1" * 16], "events": [], "answers": [*answers]}
    return Round(**{"began": began, "ended": began + 60, **given, **fields})


def noisy(draw: random.Random, sd: float, times: float = 1.0, reasoning: float = 1.0) -> list[AuditAnswer]:
    """BASE, whose lengths vary by `sd` of their logarithm, and the shares with them."""
    return [
        answer(
            times * tokens * math.exp(draw.gauss(0, sd)),
            reasoning * share + draw.gauss(0, 0.3 * sd) * (reasoning > 0),
            0.95 + draw.gauss(0, 0.1 * sd),
        )
        for tokens, share in BASE
    ]


def looping(draw: random.Random) -> list[AuditAnswer]:
    """BASE, where one answer in twenty runs on to the limit in a loop."""
    return [answer(1024, 1, 0.1) if draw.random() < 0.05 else answer(*one) for one in BASE]


@pytest.mark.parametrize(
    "answers",
    [lambda draw: noisy(draw, 0.0), lambda draw: noisy(draw, 0.3), lambda draw: noisy(draw, 0.8), looping],
    ids=["calm", "busy", "wild", "loops now and then"],
)
def test_noise_is_no_alarm(answers: Callable[[random.Random], list[AuditAnswer]]) -> None:
    for seed in range(15):
        draw, drift = random.Random(seed), Drift()
        assert [told for number in range(100) for told in drift.add(round_of(answers(draw), number))] == []


@pytest.mark.parametrize(
    ("name", "changed", "told"),
    [
        ("length", lambda draw: noisy(draw, 0.0, times=0.4), "are 0.4 times as long"),
        ("reasoning", lambda draw: noisy(draw, 0.0, reasoning=0.0), "reason in 0% of the tokens, 60% before"),
        ("repetition", lambda _: [answer(*one, 0.2) for one in BASE], "repeat 4-grams in 80% of the tokens"),
    ],
)
def test_a_step_is_told_once_at_its_second_round(
    name: str, changed: Callable[[random.Random], list[AuditAnswer]], told: str
) -> None:
    draw, drift = random.Random(1), Drift()
    for number in range(20):
        assert list(drift.add(round_of(noisy(draw, 0.05), number))) == [] and not drift.suspects
    assert list(drift.add(round_of(changed(draw), 20))) == [] and drift.suspects
    (alarm,) = drift.add(round_of(changed(draw), 21))
    assert told in alarm and "the same 8 greedy prompts" in alarm and not drift.suspects
    assert "no server event was seen since 01 Jan" in alarm
    for number in range(22, 60):
        assert list(drift.add(round_of(changed(draw), number))) == [], "the new level is the standard now"
    assert drift.alarms == {name: alarm}
    back = [one for number in range(60, 63) for one in drift.add(round_of(noisy(draw, 0.05), number))]
    assert len(back) == 1 and drift.alarms == {name: back[0]}


def test_one_odd_round_and_one_odd_prompt_are_no_step() -> None:
    drift = Drift()
    calm, odd = [answer(*one) for one in BASE], [answer(1024, 1, 0.1) for _ in BASE]
    rounds = [*[calm] * 6, odd, *[calm] * 6, odd, *[calm] * 3]
    rounds += [[odd[0], *calm[1:]]] * 30
    assert [told for number, one in enumerate(rounds) for told in drift.add(round_of(one, number))] == []


def test_the_alarm_names_what_happened_before_the_step_and_nothing_else() -> None:
    drift = Drift()
    event = 1_800.0 * LEAST_ROUNDS - 5
    calm, half = [answer(*one) for one in BASE], [answer(tokens / 2, share) for tokens, share in BASE]
    for number in range(LEAST_ROUNDS):
        list(drift.add(round_of(calm, number, events=[(1.0, "an old story")])))
    happened = [(event - n, f"event {n}") for n in (4, 3, 2, 1)]
    new = {"servers": ["s2" * 16]}
    list(drift.add(round_of(half, LEAST_ROUNDS, events=happened, **new)))
    (alarm,) = drift.add(round_of(half, LEAST_ROUNDS + 1, events=[(event + 99, "too late")], **new))
    clock = time.strftime("%d %b %H:%M:%S", time.localtime(event - 1))
    assert alarm.endswith(f"event 1 ({clock}); server manifest s1s1s1s1 → s2s2s2s2")
    assert "event 2" in alarm and "event 3" not in alarm and "old" not in alarm and "late" not in alarm


def test_what_happened_amid_the_round_before_the_step_is_named_too() -> None:
    drift = Drift()
    calm, half = [answer(*one) for one in BASE], [answer(tokens / 2, share) for tokens, share in BASE]
    for number in range(LEAST_ROUNDS):
        list(drift.add(round_of(calm, number)))
    began, new = 1_800.0 * LEAST_ROUNDS, {"servers": ["s2" * 16]}
    partly = [half[0], *calm[1:]]
    events = [(began - 1, "before it"), (began + 1, "amid")]
    list(drift.add(round_of(partly, LEAST_ROUNDS, events=events, **new)))
    list(drift.add(round_of(half, LEAST_ROUNDS + 1, **new)))
    (alarm,) = drift.add(round_of(half, LEAST_ROUNDS + 2, **new))
    assert "; before that: amid (" in alarm and alarm.endswith("server manifest s1s1s1s1 → s2s2s2s2")


def test_rounds_of_another_set_are_not_compared() -> None:
    drift = Drift()
    for number in range(10):
        list(drift.add(round_of([answer(*one) for one in BASE], number)))
    for number in range(10, 20):
        assert list(drift.add(round_of([answer(9, 0)], number, asked="other"))) == []


def test_what_is_kept_of_an_answer() -> None:
    ids = [1, 2, 3, 4, 1, 2, 3, 4, 1]
    kept = AuditAnswer.of("k", reply(output_ids=ids), Split("closed", 5))
    assert (kept.output_tokens, kept.reasoning_tokens, kept.distinct) == (9, 5, round(4 / 6, 4))
    assert AuditAnswer.of("k", reply(output_ids=[1, 2]), Split("closed", 0)).distinct == 1.0
    assert kept.ids != AuditAnswer.of("k", reply(output_ids=ids[1:]), Split("closed", 5)).ids


# --- one job -----------------------------------------------------------------------------------------------------

SOON = {"minutes": 0.0005, "prompts": 3, "max_new_tokens": 300}


def stages(tmp_path: Path, **audit: Any) -> Stages:
    return Stage(tmp_path, ["Why?"], audit=audit or None).settings(None)[2]


def test_the_log_carries_the_comparison_from_job_to_job(tmp_path: Path) -> None:
    settings, path = stages(tmp_path).generate("alpha"), tmp_path / "audit.jsonl"

    def ask(audit: Audit, tokens: int, events: Sequence[tuple[float, str]] = ()) -> list[str]:
        """One round; its alarms."""
        audit._due = 0.0
        told = []
        while asked := audit.next(begin=True):
            told += audit.came(asked.key, answer(tokens), ["s"], events)
        return told

    def begun() -> Audit:
        audit = Audit(AuditConfig(prompts=2), settings, path)
        for key, ids in (("a", [5]), ("refused", None), ("b", [6]), ("c", [7])):
            assert audit.next(begin=True) is None, "the set is not whole"
            audit.offer(key, ids)
            if key == "b":
                break
        return audit

    first = begun()
    for _ in range(LEAST_ROUNDS):
        assert ask(first, 200) == []
    rounds = [msgspec.json.decode(line, type=Round) for line in path.read_bytes().splitlines()]
    assert len(rounds) == LEAST_ROUNDS and all(one.events == [] for one in rounds)
    with path.open("ab") as file:
        file.write(b'{"began": 17')
    second = begun()
    assert ask(second, 50, [(time.time(), "http://a came back")]) == []
    (alarm,) = ask(second, 50, [(time.time(), "http://a came back")])
    assert "0.25 times as long; before that: this job began" in alarm and "http://a came back (" in alarm
    assert len([*filter(None, path.read_bytes().split(b"\n"))]) == LEAST_ROUNDS + 3
    assert begun().drift.alarms == {}, "told by the job that saw it"


def test_a_round_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = Audit(AuditConfig(prompts=2), stages(tmp_path).generate("alpha"), path)
    audit.offer("a", [5])
    audit.offer("b", [6])
    for kept in (None, answer(9)):
        first, second = audit.next(begin=True), audit.next(begin=True)
        assert first and second and audit.next(begin=True) is None
        assert (
            list(audit.came(second.key, kept, [], [])) == list(audit.came(first.key, answer(9), [], [])) == []
        )
        assert path.exists() == (kept is not None)
        audit._due = 0.0
    assert audit.next(begin=False) is None


def test_the_audit_makes_nothing_stale(tmp_path: Path) -> None:
    without, with_audit = stages(tmp_path), stages(tmp_path, minutes=7.0)
    assert (
        with_audit.access("alpha").audit == AuditConfig(minutes=7.0) and without.access("alpha").audit is None
    )
    for stage, subject, arguments in without.jobs():
        assert getattr(without, stage)(*arguments.values()) == getattr(with_audit, stage)(
            *arguments.values()
        ), (
            stage,
            subject,
        )


def test_null_is_the_default_and_braces_take_the_defaults() -> None:
    raw: dict[str, Any] = {
        "model": {"id": "m", "context": 9_999, "reasoning": {"name": "none"}},
        "server": {"engine": {"name": "llamacpp", "model_file": "m.gguf"}},
        "datasets": {"a": {"source": {"name": "glaive"}, "files": ["x"]}},
    }
    assert load(raw).audit is None
    assert load({**raw, "audit": {}}).audit == AuditConfig(minutes=30, prompts=8, max_new_tokens=1024)


@pytest.mark.fault
def test_audit_answers_are_asked_and_logged_and_are_nowhere_else(tmp_path: Path) -> None:
    texts = [f"Question {n}: why?" for n in range(60)]
    audited = Stage(tmp_path / "audited", texts, server={"concurrency": 4}, audit=SOON)
    plain = Stage(tmp_path / "plain", texts, server={"concurrency": 4})
    asked = {}
    for stage in (audited, plain):
        with fake_server(stage.folder, "--delay", "0.05") as server:
            stage.run(server.url)
        asked[stage.folder.name] = [json.loads(line) for line in server.lines()]
    greedy = [line for line in asked["audited"] if line["temperature"] == 0]
    rounds = [msgspec.json.decode(line, type=Round) for line in audited.paths.audit.read_bytes().splitlines()]
    assert len(rounds) >= 3 and 3 * len(rounds) <= len(greedy) <= 3 * (len(rounds) + 1)
    assert len({line["seed"] for line in greedy}) == len({json.dumps(line["prompt"]) for line in greedy}) == 3
    assert {tuple(one.key for one in found.answers) for found in rounds} == {("k0", "k1", "k2")}
    assert max(line["in_flight"] for line in asked["audited"]) <= 4, "the same ceiling"
    assert all(0 < one.reasoning_tokens <= one.output_tokens for one in rounds[0].answers)
    # Nothing of it where answers are kept; without the section nothing is asked.
    assert not plain.paths.audit.exists() and len(asked["plain"]) == 60
    assert all(line["temperature"] == 1 for line in asked["plain"])
    assert audited.paths.responses.read_bytes() == plain.paths.responses.read_bytes()
    assert audited.paths.outcomes.read_bytes() == plain.paths.outcomes.read_bytes()
    settings, _, made = audited.settings(None)
    plan = Plan(settings, audited.paths.prompts, made.registry)
    with Journal(audited.paths.journal) as journal:
        units = [*plan.units(journal)]
        own = {plan.request(unit.ids, 0, 0) for unit in units if unit.ids is not None}
        assert len(own) == len(journal) == 60 and all(map(journal.has_answer, own))


@pytest.mark.fault
def test_a_server_that_comes_back_and_answers_otherwise_is_named_in_log_and_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(eyas.fleet, "BACKOFF_FIRST", 0.02)
    monkeypatch.setattr(eyas.fleet, "PROBE_PAUSE", 0.2)
    texts = [f"Question {n}: why?" for n in range(300)]
    stage = Stage(tmp_path, texts, server={"concurrency": 4}, audit=SOON)
    log = stage.paths.audit
    with fake_server(tmp_path, "--delay", "0.1") as before, caplog.at_level(logging.WARNING):
        thread, errors = stage.start(before.url)
        while not log.exists() or log.read_bytes().count(b"\n") < LEAST_ROUNDS + 1:
            assert thread.is_alive()
            time.sleep(0.02)
        before.process.kill()
        before.process.wait()
        port = before.url.rsplit(":", 1)[1]
        arguments = ("--port", port, "--slots", "63", "--never-close", "--delay", "0.1")
        with fake_server(tmp_path, *arguments):
            alarms: list[str] = []
            while not alarms and thread.is_alive():
                shown = read_progress(stage.paths.progress)
                alarms = [text for text in shown.alarms if text.startswith("audit: ")] if shown else []
                time.sleep(0.02)
            thread.join()
    assert not errors
    assert any("came back with other settings (slots 64 → 63)" in text for text in alarms), alarms
    assert set(alarms) <= {record.message for record in caplog.records}
