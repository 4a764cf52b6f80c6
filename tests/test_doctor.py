"""`eyas doctor` against a fake server: what it finds, what it keeps, and that generate heeds it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from fake_sglang import TEMPLATE, make_model
from pipeline import Run
from pipeline import fake_server as server_of
from stage import ENGINE, Stage, fake_server

from eyas import doctor
from eyas.cli import main
from eyas.config import ModelConfig, Stages, load
from eyas.doctor import Finding, examine, exports, lengths, open_files, room_on_disk
from eyas.engines.llamacpp import LlamaCpp
from eyas.errors import EyasError
from eyas.plugins import Busy, Engine
from eyas.prompts import PromptsReport
from eyas.server.verdict import heed, keep

pytestmark = pytest.mark.service

CLOSED = "http://127.0.0.1:9"


def findings(stage: Stage, url: str | list[str], results: Path | None = None) -> list[Finding]:
    _, _, stages = stage.settings(url)
    section = {key: value for key, value in stages.config.server.engine.items() if key != "name"}
    engine = stages.registry.create("engine", "fake", section, "server.engine", stages.model)
    assert isinstance(engine, Engine)
    return list(examine(stages, results or stage.folder, engine))


def reasons(found: list[Finding]) -> list[str]:
    return [f"{one.name}: {one.text}" for one in found if one.state == "no-go"]


def by_name(found: list[Finding]) -> dict[str, Finding]:
    return {one.name: one for one in found}


def test_all_is_well(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ["Why is the sky blue?"])
    with fake_server(tmp_path) as server:
        found = findings(stage, server.url)
        asked = server.lines()
    assert reasons(found) == []
    told = by_name(found)
    assert ", tiny.gguf, Q4_1 weights" in told["server"].text
    # The dataset's own first prompt was asked, and the split of its answer is shown.
    assert any(b"Why is the sky blue?".hex() in bytes(ids(line)).hex() for line in asked)
    assert "of reasoning (closed)" in told["alpha"].text and told["alpha"].state == "ok"
    assert told["exports"].text == "tokens: nothing stands against the model"
    assert told["stop id"].state == "ok" and " 2 <|im_end|>" in told["stop id"].text
    assert not (tmp_path / "journal").exists(), "nothing that it asks enters the journal"


def ids(line: str) -> list[int]:
    return [max(0, token - 3) % 256 for token in json.loads(line)["prompt"]]


def test_an_address_where_nothing_generates_is_a_warning_beside_one_that_does(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ["Why?"])
    with fake_server(tmp_path) as server:
        found = findings(stage, [CLOSED, server.url])
    assert [(one.state, one.text.partition(" ")[0]) for one in found if one.name == "server"] == [
        ("ok", f"{server.url}:"),
        ("warning", CLOSED),
    ]
    assert reasons(found) == []


def test_every_server_gives_a_trial_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def generate(_self: object, _session: object, url: str, _ask: object) -> None:
        asked.append(url)
        raise Busy("full")

    run = Run(tmp_path / "run", {"alpha": 1, "beta": 1})
    with server_of(run) as one, server_of(run) as other:
        run.config["server"]["url"] = [one, other]
        monkeypatch.chdir(run.folder)
        monkeypatch.setattr(LlamaCpp, "generate", generate)
        stages = Stages(load(run.config))
        engine = stages.registry.create("engine", "fake", {"model_file": "tiny.gguf"}, "", stages.model)
        assert isinstance(engine, Engine)
        assert reasons(list(examine(stages, Path("results"), engine))) == []
    assert {one, other} == set(asked)


def test_a_server_of_somebody_else_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "WAIT", 0.5)
    (reason,) = reasons(findings(Stage(tmp_path, ["Why?"], server={"start_timeout": 600}), CLOSED))
    assert f"nothing generated within 0.5 s at {CLOSED} (connection: " in reason


def test_the_stop_id_is_looked_for_in_a_longer_answer_where_all_are_cut(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ["Why?"], dataset={"sampling": {"max_new_tokens": 3}})
    with fake_server(tmp_path) as server:
        found = by_name(findings(stage, server.url))
        longest = max(len(json.loads(line)["tokens"]) for line in server.lines())
    assert "length" in found["alpha"].text and longest > 3
    assert found["stop id"] == Finding(
        "stop id", "ok", "answers end with 2 <|im_end|>; the model stops at 2 <|im_end|>"
    )


def test_the_longest_prompts_are_told(tmp_path: Path) -> None:
    (told,) = lengths(Stage(tmp_path, ["Why?"]).settings(CLOSED)[2].config)
    assert (
        told.state == "ok"
        and "alpha: answers of up to 400 tokens" in told.text
        and "leave 1,648 of" in told.text
    )


def test_without_prompts_a_plain_question_is_asked(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ["Why?"])
    with fake_server(tmp_path) as server:
        found = by_name(findings(stage, server.url, tmp_path / "nowhere"))
    assert found["prompts"].state == "warning" and "alpha" in found["prompts"].text
    assert found["alpha"].state == "ok"


def test_a_thinking_model_that_does_not_think_is_a_no_go(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ["Why?"], model={"reasoning": {"name": "tags"}})
    with fake_server(tmp_path) as server:
        found = findings(stage, server.url)
    assert [reason.partition(":")[0] for reason in reasons(found)] == ["reasoning"]
    allowed = Stage(
        tmp_path, ["Why?"], model={"reasoning": {"name": "tags"}}, dataset={"reasoning_required": False}
    )
    with fake_server(tmp_path) as server:
        assert reasons(findings(allowed, server.url)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"quantisation": "Q8_0"}}, "model.quantisation"),
        ({"model": {"context": 100_000}}, "model.context"),
        ({"server": {"start_timeout": 0.5}}, "server.url"),
    ],
)
def test_a_server_that_is_not_the_right_one_is_a_no_go(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    stage = Stage(tmp_path, ["Why?"], **change)
    with fake_server(tmp_path) as server:
        url = CLOSED if "server" in change else server.url
        found = findings(stage, url)
    assert any(said in reason for reason in reasons(found)), found


def test_an_answer_that_does_not_come_is_told_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "PATIENCE", 0.5)
    stage = Stage(tmp_path, ["Why?"])
    with fake_server(tmp_path, "--delay", "30") as server:
        found = by_name(findings(stage, server.url))
    assert found["alpha"].state == "warning" and "still runs" in found["alpha"].text


def test_settings_that_hurt_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "warnings", lambda _, in_flight: [f"model.kv_dtype: rounds {in_flight}"])
    stage = Stage(tmp_path, ["Why?"], server={"concurrency": 5, "lanes": {"long": {"concurrency": 2}}})
    with fake_server(tmp_path) as server:
        found = findings(stage, server.url)
    assert by_name(found)["settings"] == Finding("settings", "warning", "model.kv_dtype: rounds 7")
    assert reasons(found) == []


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path, ["Why?"], dataset={"budget_tokens": 10_000_000, "rows": 3})
    _, _, stages = stage.settings(CLOSED)
    monkeypatch.chdir(tmp_path)
    # Three prompts of at most 400 tokens bind before the budget does.
    usage = shutil.disk_usage(tmp_path)._replace(free=3 * 400 * doctor.BYTES_PER_TOKEN + 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    empty = tmp_path / "nowhere"
    assert {one.state for one in room_on_disk(stages.config, empty)} == {"ok"}
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=usage.free - 1))
    assert {one.state for one in room_on_disk(stages.config, empty)} == {"no-go"}
    # What an earlier part of the run has written is not needed again.
    Path("journal/alpha").mkdir(parents=True)
    Path("journal/alpha/000001.jsonl.zst").write_bytes(bytes(1000))
    assert {one.state for one in room_on_disk(stages.config, empty)} == {"ok"}
    unknown = list(room_on_disk(Stage(tmp_path, ["Why?"]).settings(CLOSED)[2].config, tmp_path / "nowhere"))
    assert unknown[0].state == "warning" and "alpha" in unknown[0].text


def test_disk_counts_every_turn_that_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    needs = 7 * 2 * 400 * doctor.BYTES_PER_TOKEN  # seven turns, two samples of at most 400 tokens
    usage = shutil.disk_usage(tmp_path)._replace(free=needs + 10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    stage = Stage(tmp_path, ["Why?"], dataset={"turns": "all", "rows": 3, "samples": 2})
    config = stage.settings(CLOSED)[2].config
    (unknown, *_) = room_on_disk(config, tmp_path / "results")
    assert unknown.state == "warning", "rows do not tell turns"
    made = PromptsReport(
        dataset="alpha",
        asked=3,
        rows_read=3,
        used=3,
        turns=7,
        keys="",
        not_taken=0,
        skipped={},
        files=[],
        evaluation=[],
    )
    folder = tmp_path / "results" / "alpha"
    folder.mkdir(parents=True)
    (folder / "prompts.json").write_bytes(msgspec.json.encode(made))
    assert {one.state for one in room_on_disk(config, tmp_path / "results")} == {"ok"}
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=needs - 10_000))
    assert {one.state for one in room_on_disk(config, tmp_path / "results")} == {"no-go"}
    (folder / "prompts.json").write_text("{")
    with pytest.raises(EyasError, match=r"prompts\.json: .* delete it and run `snakemake prompts --cores 1`"):
        list(room_on_disk(config, tmp_path / "results"))


def test_open_files(tmp_path: Path) -> None:
    fits = Stage(tmp_path, ["Why?"]).settings(CLOSED)[1]
    too_many = Stage(tmp_path, ["Why?"], server={"concurrency": 10**9}).settings(CLOSED)[1]
    lane = {"lanes": {"long": {"concurrency": 10**9}}}
    hidden = Stage(tmp_path, ["Why?"], server=lane).settings(CLOSED)[1]
    assert [one.state for access in (fits, too_many, hidden) for one in open_files(access)] == [
        "ok",
        "no-go",
        "no-go",
    ]


KEEPING = TEMPLATE.replace(
    "message['content']",
    "('<think>\\n' + message.reasoning_content + '</think>' if message.reasoning_content else '') + message['content']",
)
REFUSING = (
    "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no answers') }}{% endif %}" + TEMPLATE
)


def exported(
    folder: Path, template: str, chosen: dict[str, dict[str, Any]], damaged: str = ""
) -> list[Finding]:
    """What the doctor says of the exports of a model with that chat template. damaged: a file that holds nothing."""
    tokenizer = make_model(folder / "tokenizer")
    (tokenizer / "chat_template.jinja").write_text(template)
    if damaged:
        (tokenizer / damaged).write_text("")
    (folder / "data.jsonl").touch()
    reasoning = {"name": "tags", "opened_by_prompt": True, "prefill": "<think>\n"}
    config = load(
        {
            "model": {
                "id": "m",
                "tokenizer": str(tokenizer),
                "kv_dtype": "bf16",
                "context": 2048,
                "reasoning": reasoning,
            },
            "server": {"engine": {"name": "sglang"}, "url": CLOSED},
            "datasets": {"alpha": {"source": {"name": "text"}, "files": [str(folder / "data.jsonl")]}},
            "defaults": {"sampling": {"max_new_tokens": 400}},
            "exports": chosen,
        }
    )
    return list(exports(Stages(config)))


def test_an_export_that_would_be_refused_after_all_generation_is_a_no_go(tmp_path: Path) -> None:
    every = {"tokens": {}, "specforge": {}, "torchspec": {}}
    refused, fine = exported(tmp_path, TEMPLATE, every)
    assert (refused.name, refused.state) == ("exports", "no-go")
    assert refused.text.startswith(
        "exports.specforge: the chat template of m drops the reasoning of finished answers"
    )
    assert refused.text.endswith("export `tokens` instead, or set allow_lossy if that is what you want")
    assert (fine.state, fine.text) == ("ok", "tokens, torchspec: nothing stands against the model")


def test_exports_that_the_model_suits_are_told_as_such(tmp_path: Path) -> None:
    suited = [
        ({"specforge": {}}, KEEPING),
        ({"specforge": {"allow_lossy": True}}, TEMPLATE),
        ({"sharegpt": {}}, TEMPLATE),
    ]
    for at, (chosen, template) in enumerate(suited):
        (found,) = exported(tmp_path / str(at), template, chosen)
        assert (found.name, found.state) == ("exports", "ok"), found


@pytest.mark.parametrize("exporter", ["specforge", "sharegpt", "torchspec", "modelopt"])
def test_a_template_that_refuses_finished_conversations_suits_no_exporter_of_them(
    tmp_path: Path, exporter: str
) -> None:
    found, fine = exported(tmp_path, REFUSING, {exporter: {}, "specforge_text": {}})
    assert found.state == "no-go" and "refuses a finished conversation (no answers)" in found.text
    assert (fine.state, fine.text) == ("ok", "specforge_text: nothing stands against the model")


def test_a_damaged_tokenizer_is_one_reason_for_all_exports(tmp_path: Path) -> None:
    (found,) = exported(tmp_path, TEMPLATE, {"specforge": {}, "torchspec": {}}, damaged="tokenizer.json")
    assert found.state == "no-go" and "tokenizer.json" in found.text


def test_generate_heeds_a_no_go_until_it_is_mended_or_told_to_go_on(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ["Why?"])
    with fake_server(tmp_path) as server:
        _, access, _ = stage.settings(server.url)
        keep(access, ["server: it smokes"])
        with pytest.raises(EyasError, match=r"NO-GO \(server: it smokes\).*server\.ignore_doctor"):
            stage.run(server.url)
        assert not server.lines()
        ignoring = Stage(tmp_path, ["Why?"], server={"ignore_doctor": True})
        keep(ignoring.settings(server.url)[1], ["server: it smokes"])
        ignoring.run(server.url)
        keep(access, [])
        heed(access)


@pytest.mark.parametrize(
    "change",
    [{"model": {"context": 1024}}, {"server": {"concurrency": 3}}, {"dataset": {"budget_tokens": 1000}}],
)
def test_a_verdict_is_about_one_config(tmp_path: Path, change: dict[str, Any]) -> None:
    """Each of these may be what mends it: another server, fewer open files, less disk."""
    stage, other = Stage(tmp_path, ["Why?"]), Stage(tmp_path, ["Why?"], **change)
    keep(stage.settings(CLOSED)[1], ["disk: full"])
    heed(other.settings(CLOSED)[1])
    keep(other.settings(CLOSED)[1], [])
    with pytest.raises(EyasError, match="disk: full"):
        heed(stage.settings(CLOSED)[1])


def eyas_doctor(run: Run, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("eyas"), "doctor", *arguments]
    return subprocess.run(command, cwd=run.cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.workflow
@pytest.mark.parametrize("elsewhere", [False, True])
def test_snakemake_heeds_the_doctor_of_its_working_directory(tmp_path: Path, elsewhere: bool) -> None:
    run = Run(tmp_path / "run", {"alpha": 2})
    run.config["server"] |= {"url": CLOSED, "start_timeout": 1}
    run.save()
    there: list[str] = []
    if elsewhere:
        run.cwd = tmp_path
        there = ["--directory", "run", "--configfile", "run/config.yaml"]
    told = eyas_doctor(run, *there)
    assert told.returncode == 1 and "NO-GO: 1 reason" in told.stderr, told
    assert str(run.folder) in told.stdout
    done = run.snakemake("responses", *there, check=False)
    log = (run.folder / "logs/generate/alpha.log").read_text()
    assert done.returncode and "`eyas doctor` said NO-GO (server: server.url: nothing generated" in log
    if not elsewhere:
        with server_of(run) as url:
            run.config["server"]["url"] = url
            run.save()
            run.snakemake("responses")
        assert run.requests(), "another config, another verdict"


def test_prompts_are_rendered_as_generate_renders_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reasoning format's own options of the chat template."""
    seen = []

    def prepare(engine: Engine, lease: object, model: ModelConfig, reasoning: object) -> None:
        seen.append(model.template_options)
        raise EyasError("far enough")

    monkeypatch.setattr(doctor, "prepare", prepare)
    with fake_server(tmp_path) as server:
        findings(Stage(tmp_path, ["Why?"], model={"reasoning": {"name": "qwen3"}}), server.url)
    assert seen == [{"enable_thinking": True}]


def test_a_busy_server_is_no_no_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(*_: object) -> None:
        raise Busy("full")

    stage = Stage(tmp_path, ["Why?"])
    with fake_server(tmp_path) as server:
        monkeypatch.setattr(LlamaCpp, "generate", generate)
        found = findings(stage, server.url)
    assert reasons(found) == [] and "too busy" in by_name(found)["alpha"].text


def test_capacity_is_told_per_lane(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path, ["Why?"], server={"lanes": {"long": {"concurrency": 300}}}, dataset={"lane": "long"}
    )
    with fake_server(tmp_path) as server:
        found = by_name(findings(stage, server.url))
    assert "300 in flight" in found["capacity of lane long"].text
    assert "decodes at most 64 at once" in found["capacity of lane long"].text
    assert found["KV cache"].text == f"holds {64 * 4096:,} tokens of at most 64 requests at once"


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stage = Stage(tmp_path, ["Why?"])
    with fake_server(tmp_path) as server:
        config = {
            "model": {
                "id": "fake",
                "quantisation": "Q4_1",
                "context": 2048,
                "reasoning": {"name": "tags", "opened_by_prompt": True, "prefill": "<think>\n"},
            },
            "server": {"engine": {"name": "fake", "model_file": "tiny.gguf"}, "url": server.url},
            "datasets": {"alpha": {"source": {"name": "magicoder"}, "files": ["data.jsonl"], "rows": 5}},
            "defaults": {"sampling": {"max_new_tokens": 400}},
            "plugins": [str(ENGINE)],
        }
        Path("run.yaml").write_text(yaml.safe_dump(config))
        assert stage.paths.prompts.exists()
        assert main(["doctor", "--configfile", "run.yaml"]) == 0
        told = capsys.readouterr().out
        assert "\nwarning  prompts: none yet for alpha" in told and told.endswith(
            "\nGO, with 1 warning above\n"
        )
        config["model"]["quantisation"] = "Q8_0"
        Path("run.yaml").write_text(yaml.safe_dump(config))
        assert main(["doctor", "--configfile", "run.yaml"]) == 1
        told = capsys.readouterr()
        assert "NO-GO  server: model.quantisation" in told.out and "NO-GO: 1 reason" in told.err
    assert main(["doctor", "--configfile", "nosuch.yaml"]) == 1
    assert "nosuch.yaml cannot be read" in capsys.readouterr().err
