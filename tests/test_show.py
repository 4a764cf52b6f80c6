"""One conversation in the terminal, and a report of what is finished."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helpers import prompt, response
from made_results import verdict, write_dataset

from eyas.cli import main
from eyas.cli.show import find, lines
from eyas.config import StatsSettings
from eyas.errors import EyasError
from eyas.recordfile import write_records
from eyas.records import Finish, Message, Outcome, Turn, Verdict
from eyas.stats import stats
from eyas.verdicts import write_verdicts

CLEAR = "\x1b[2Jrm -rf\x07\r\u202e"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """results/A of a conversation of two turns, the first with two samples, and of one that is refused."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results" / "A"
    turns = [Turn(calls=[], messages=[Message(role="user", content="And then?")])]
    first = Message(role="system", content="Be brief")
    tools = [{"type": "function", "function": {"name": "get_tide"}}]
    asked = prompt(
        "abc-0", messages=[first, Message(role="user", content=f"Why? {CLEAR}")], turns=turns, tools=tools
    )
    write_records(folder / "prompts.jsonl.zst", [asked, prompt("abd-0"), prompt("xyz-0")])
    units = [(0, 0), (0, 1), (1, 0)]
    unreached = Outcome(key="abc-0", turn=1, sample=1, status="not_reached", reason="cut at the limit")
    refused = Outcome(key="xyz-0", turn=0, sample=0, status="refused", reason="prompt too long")
    answered = [Outcome(key="abc-0", turn=t, sample=s, status="answered") for t, s in units]
    write_records(folder / "outcomes.jsonl.zst", [*answered, unreached, refused])
    ended = {"added_tokens": {"<think>": 5, "<|im_end|>": 2}}
    cut = {"finish": Finish(type="length"), "effective_max_new": 64}
    said = [response("abc-0", **(ended if (t, s) == (0, 0) else {} if s == 0 else cut)) for t, s in units]
    placed = [
        type(one)(**{**{f: getattr(one, f) for f in one.__struct_fields__}, "turn": t, "sample": s})
        for one, (t, s) in zip(said, units, strict=True)
    ]
    write_records(folder / "responses.jsonl.zst", placed)
    write_verdicts(folder / "verdicts.parquet", [_verdict(t, s) for t, s in units])
    return folder


def _verdict(turn: int, sample: int) -> Verdict:
    values = verdict(
        "abc-0",
        5,
        turn=turn,
        sample=sample,
        reasons=("repeats",) if sample else (),
        marks=["cut"] if turn else [],
    )
    fields = {name: getattr(values, name) for name in values.__struct_fields__}
    return Verdict(**{**fields, "reasoning_tokens": 3, "answer_tokens": 2})


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["show", *arguments]) == 1
    return capsys.readouterr().err


def test_a_conversation_reads_from_top_to_bottom(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "A", "abc-0")
    order = [
        "A abc-0",
        "── tools ──",
        "get_tide",
        "── system ──",
        "Be brief",
        "── user ──",
        "Why?",
        "── turn 0, sample 0: accepted ──",
    ]
    order += [
        "5 tokens, 3 reasoning (closed), 2 answer, ended by <|im_end|> (token 2)",
        "── reasoning ──",
        "Why? </think>",
        "── answer ──",
        " Yes",
    ]
    order += [
        "── turn 0, sample 1: rejected: repeats ──",
        "cut at the limit of 64",
        "── user ──",
        "And then?",
    ]
    order += [
        "── turn 1, sample 0: accepted ──",
        "ended by 2, marks: cut",
        "── turn 1, sample 1: not reached: cut at the limit ──",
    ]
    at = 0
    for part in order:
        assert part in text[at:], part
        at = text.index(part, at) + len(part)
    assert "\x1b" not in text, "colours only on a terminal"


def test_control_characters_in_data_do_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "A", "abc-0")
    assert not any(bad in text for bad in "\x1b\x07\r\u202e")
    assert "␛[2Jrm -rf␇␍⟨U+202E⟩" in text


def test_one_turn_or_sample_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "sample 0" not in shown(capsys, "A", "abc-0", "--sample", "1", "--turn", "0")
    text = shown(capsys, "A", "abc-0", "--turn", "1")
    assert "turn 1, sample 0" in text and "turn 0" not in text
    assert "no such turn or sample" in refusal(capsys, "A", "abc-0", "--turn", "7")


def test_ids_on_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "10 11 12 13 2" not in shown(capsys, "A", "abc-0")
    assert "── output_ids, 5 ──\n10 11 12 13 2\n" in shown(capsys, "A", "abc-0", "--ids")


def test_the_start_of_a_key_is_enough_where_it_is_the_only_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find(folder / "prompts.jsonl.zst", "x").key == "xyz-0"
    assert "2 keys begin with 'ab': abc-0, abd-0" in refusal(capsys, "A", "ab")


def test_unknown_names_get_near_ones(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no prompt has the key 'abx-0'; did you mean abd-0 or abc-0" in refusal(capsys, "A", "abx-0")
    assert "results/B: no prompts there" in refusal(capsys, "B", "k")
    assert "it has 3 prompts: " in refusal(capsys, "A", "~~~~\x1b~")


def test_an_unknown_key_like_no_other_is_told_the_first_three(tmp_path: Path) -> None:
    path = tmp_path / "A/prompts.jsonl.zst"
    for count, listed in (
        (0, "it has 0 prompts"),
        (3, "it has 3 prompts: k0, k1, k2"),
        (4, "it has 4 prompts: k0, k1, k2, …"),
    ):
        write_records(path, [prompt(f"k{n}") for n in range(count)])
        with pytest.raises(EyasError) as error:
            find(path, "~~~~")
        assert str(error.value) == f"A: no prompt has the key '~~~~'; {listed}"


def test_what_was_not_answered_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "turn 0, sample 0: refused: prompt too long" in shown(capsys, "A", "xyz-0")


def test_a_run_elsewhere_is_read_by_its_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert "Be brief" in shown(capsys, "A", "abc-0", "--directory", "../..")


def test_before_there_are_answers_the_prompt_can_be_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("outcomes.jsonl.zst", "responses.jsonl.zst", "verdicts.parquet"):
        (folder / name).unlink()
    text = shown(capsys, "A", "abc-0")
    assert "Be brief" in text and "not answered yet" in text and "And then?" not in text


def test_before_answers_are_judged_they_are_shown(folder: Path) -> None:
    (folder / "verdicts.parquet").unlink()
    told = [text for _, text in lines(folder, find(folder / "prompts.jsonl.zst", "abc-0"), 0, 0, ids=False)]
    assert "── turn 0, sample 0: not judged yet ──" in told and "Why? </think> Yes" in told


# --- a partial report --------------------------------------------------------------------------------------------


def test_what_is_finished_makes_a_partial_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_dataset(
        tmp_path / "results" / "A", [verdict("a", 70), verdict("b", 900, reasons=("too odd",))]
    )
    names = ("prompts.json", "outcomes.jsonl.zst", "verdicts.parquet", "train.parquet", "stats.json")
    stats(StatsSettings(dataset="A", samples=1), *(folder / name for name in names))
    (folder / "servers.json").write_text('{"server-1": {"engine": "llamacpp"}}')
    (tmp_path / "results" / "B").mkdir()
    (tmp_path / "logs" / "generate").mkdir(parents=True)
    sections = {name: {"source": {"name": "glaive"}, "files": ["x"]} for name in "AB"}
    config = {
        "model": {"id": "org/tiny", "reasoning": {"name": "tags"}},
        "server": {"engine": {"name": "llamacpp", "model_file": "tiny.gguf"}},
        "datasets": sections,
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    assert main(["report"]) == 0
    assert (
        capsys.readouterr().out
        == "results/summary/partial.html: 1 of 2 datasets\n    not in it: B (not started)\n"
    )
    text = Path("results/summary/partial.html").read_text()
    assert "This report is partial." in text and "1 of 2 datasets is not in it: B (not started)" in text
    assert "too odd" in text and 'id="training-set"' not in text
    assert not Path("results/summary/summary.json").exists()
    (folder / "stats.json").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["report", "--directory", "..", "--out", "mine.html"]) == 0
    assert (tmp_path / "elsewhere" / "mine.html").is_file(), "the page is where the caller wants it"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["report", "--directory", ".."]) == 0
    assert "2 of 2 datasets are not in it" in Path("results/summary/partial.html").read_text()
