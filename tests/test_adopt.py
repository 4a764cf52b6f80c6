"""Answers from elsewhere: what fits is never asked again, everything else is refused and says why."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_sglang import make_model
from helpers import prompt
from stage import Served, Stage, fake_server

from eyas.adopt import ALREADY, COPY, NAMELESS, OTHER_IDS, TEXT_ONLY, UNKNOWN, Adopted, adopt
from eyas.config import Stages, fingerprint, load
from eyas.errors import EyasError
from eyas.generate import generate
from eyas.journal import Journal
from eyas.recordfile import read_records, write_records
from eyas.records import Finish, Prompt, Response
from eyas.render import Renderer
from eyas.tokenizer import load_tokenizer

TEXTS = [f"Question {n}: why?" for n in range(6)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with fake_server(tmp_path_factory.mktemp("server"), "--by-seed") as server:
        yield server


@pytest.fixture(scope="module")
def made(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """A run that has asked for everything, twice."""
    stage = Stage(tmp_path_factory.mktemp("made"), TEXTS, dataset={"samples": 2})
    stage.run(served.url)
    return stage


def fresh(folder: Path, **sections: Any) -> Stage:
    return Stage(folder, TEXTS, **{"dataset": {"samples": 2}, **sections})


def taken(stage: Stage, file: Path, url: str | None) -> Adopted:
    settings, access, stages = stage.settings(url)
    return adopt(settings, access, stage.paths.prompts, stage.paths.journal, file, stages.registry)


def foreign(stage: Stage, response: Response, **changes: Any) -> dict[str, Any]:
    """The answer as another program would hand it over."""
    settings, _, _ = stage.settings(None)
    record = {
        "key": response.key,
        "sample": response.sample,
        "prompt_ids": response.prompt_ids,
        "output_ids": response.output_ids,
        "finish": response.finish.type,
        "sampling": {**msgspec.to_builtins(settings.sampling), "seed": 7},
        "model": {"id": "fake", "quantisation": "Q4_1", "kv_dtype": "f16", "engine": "mine 1.0"},
        **changes,
    }
    return {name: value for name, value in record.items() if value is not None}


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


pytestmark = pytest.mark.service


def test_responses_of_another_run_are_adopted_and_only_the_rest_is_asked(
    made: Stage, served: Served, tmp_path: Path
) -> None:
    stage = fresh(tmp_path)
    write_records(tmp_path / "other.jsonl.zst", made.responses()[:8])
    before = len(served.lines())
    assert taken(stage, tmp_path / "other.jsonl.zst", None) == Adopted(
        answers=8, tokens=sum(len(one.output_ids) for one in made.responses()[:8])
    )
    assert len(served.lines()) == before, "no server was needed"
    stage.run(served.url)
    asked = [json.loads(line)["prompt"] for line in served.lines()[before:]]
    assert sorted(asked) == sorted(one.prompt_ids for one in made.responses()[8:])
    assert stage.paths.responses.read_bytes() == made.paths.responses.read_bytes()
    servers = json.loads(stage.paths.servers.read_bytes())
    (adopted,) = [server["adopted"] for server in servers.values() if "adopted" in server]
    assert adopted["file"] == "other.jsonl.zst" and len(adopted["sha256"]) == 64
    with Journal(stage.paths.journal) as journal:
        of_file = journal.answered(made.responses()[0].request)
        of_server = journal.answered(made.responses()[8].request)
    assert of_file is not None and of_file.delivery.server == fingerprint({"adopted": adopted})
    assert of_server is not None and of_server.delivery.server != of_file.delivery.server


@pytest.mark.parametrize("by", ["key and sample", "key", "messages"])
def test_answers_of_another_program_are_adopted_and_nothing_is_asked(
    made: Stage, served: Served, tmp_path: Path, by: str
) -> None:
    stage = fresh(tmp_path)
    prompts = {one.key: one for one in read_records(stage.paths.prompts, Prompt)}
    records = []
    for one in made.responses():
        changes: dict[str, Any] = {} if by == "key and sample" else {"sample": None}
        if by == "messages":
            text = prompts[one.key].messages[0].content
            changes |= {"key": None, "messages": [{"role": "user", "content": text}]}
        records.append(foreign(made, one, **changes))
    file = write(tmp_path / "other.jsonl", records)
    before = len(served.lines())
    assert taken(stage, file, served.url).answers == 12
    stage.run(served.url)
    assert len(served.lines()) == before
    assert stage.paths.responses.read_bytes() == made.paths.responses.read_bytes()


def test_adopting_twice_adds_nothing(made: Stage, served: Served, tmp_path: Path) -> None:
    stage = fresh(tmp_path)
    file = write(tmp_path / "other.jsonl", [foreign(made, one) for one in made.responses()])
    assert taken(stage, file, served.url).answers == 12
    before = {path.name: path.read_bytes() for path in stage.paths.journal.glob("*.zst")}
    assert taken(stage, file, served.url) == Adopted(refused=Counter({ALREADY: 12}))
    assert taken(stage, made.paths.responses, None).refused == {ALREADY: 12}
    assert {path.name: path.read_bytes() for path in stage.paths.journal.glob("*.zst")} == before


def test_copies_of_one_answer_fill_one_sample(made: Stage, served: Served, tmp_path: Path) -> None:
    """Nothing but `sample` tells a copy from an answer that the model gave twice."""
    first, second = made.responses()[:2]
    assert first.key == second.key and first.output_ids != second.output_ids
    x, y = (foreign(made, one, sample=None) for one in (first, second))
    stage = fresh(tmp_path / "a")
    result = taken(stage, write(tmp_path / "a.jsonl", [x, x, x, y]), served.url)
    assert (result.answers, result.refused) == (2, {COPY: 2}), "a copy takes no place"
    with Journal(stage.paths.journal) as journal:
        kept = [journal.answered(one.request) for one in (first, second)]
    assert [one and one.reply.output_ids for one in kept] == [first.output_ids, second.output_ids]
    assert taken(stage, tmp_path / "a.jsonl", served.url).refused == {ALREADY: 4}

    stage = fresh(tmp_path / "b")
    assert taken(stage, write(tmp_path / "x.jsonl", [x]), served.url).answers == 1
    again = taken(stage, write(tmp_path / "yx.jsonl", [y, x]), served.url)
    assert again == Adopted(refused=Counter({ALREADY: 2})), "nor one of another file"

    told = [foreign(made, first), foreign(made, first, sample=1)]
    stage = fresh(tmp_path / "c")
    result = taken(stage, write(tmp_path / "c.jsonl", [*told, x]), served.url)
    assert (result.answers, result.refused) == (2, {COPY: 1})


def sampling(made: Stage, **changes: Any) -> dict[str, Any]:
    fields = foreign(made, made.responses()[0])["sampling"] | changes
    return {name: value for name, value in fields.items() if value != "gone"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"output_ids": None, "text": "Because."}, TEXT_ONLY),
    "no prompt": ({"prompt_ids": None}, "no prompt_ids, so what the model was shown is not known"),
    "no settings": ({"sampling": None}, "no sampling settings, so its distribution is not known"),
    "no model": ({"model": None}, "no model, so whose answer it is is not known"),
    "temperature": ({"sampling": {"temperature": 0.3}}, "sampling.temperature differs"),
    "untold": ({"sampling": {"top_k": "gone"}}, "sampling.top_k is not told"),
    "strange": (
        {"sampling": {"typical_p": 0.9}},
        "sampling.typical_p is no setting of Eyas, so it cannot be compared",
    ),
    "grammar": ({"sampling": {"grammar": "root ::= x"}}, "sampling.grammar differs"),
    "model": ({"model": {"id": "another", "quantisation": "Q4_1", "kv_dtype": "f16"}}, "model.id differs"),
    "quantisation": ({"model": {"id": "fake", "kv_dtype": "f16"}}, "model.quantisation is not told"),
    "abort": ({"finish": "abort"}, "not finished: finish is neither stop nor length"),
    "no finish": ({"finish": None}, "not finished: finish is neither stop nor length"),
    "cut": ({"finish": "length"}, "finish is length, but it is shorter than sampling.max_new_tokens"),
    "no end": ({"output_ids": [70, 71]}, "finish is stop, but its last id is no end token of the model"),
    "long": ({"output_ids": [70] * 401}, "longer than sampling.max_new_tokens"),
    "ids": ({"output_ids": [70, 999_999, 2]}, "ids outside the vocabulary, or none at all"),
    "prompt": ({"prompt_ids": [1, 70, 71]}, OTHER_IDS),
    "key": ({"key": "nobody"}, UNKNOWN),
    "key and a sample without end": ({"key": "nobody", "sample": 10**30}, UNKNOWN),
    "nameless": ({"key": None}, NAMELESS),
    "half a character": ({"key": "\ud83d"}, NAMELESS),
    "half a character said": ({"key": None, "messages": [{"role": "user", "content": "\ud83d"}]}, NAMELESS),
    "sample": ({"sample": 2}, "more answers than the config's samples"),
}


def test_what_does_not_fit_is_refused_by_its_reason_and_the_rest_is_adopted(
    made: Stage, served: Served, tmp_path: Path
) -> None:
    first, *others = made.responses()
    records = []
    for changes, _ in REFUSED.values():
        if isinstance(changes.get("sampling"), dict):
            changes = {"sampling": sampling(made, **changes["sampling"])}
        records.append(foreign(made, first, **changes))
    file = write(tmp_path / "other.jsonl", [*records, *(foreign(made, one) for one in others)])
    stage = fresh(tmp_path / "run")
    result = taken(stage, file, served.url)
    assert result.answers == len(others)
    expected = [reason for _, reason in REFUSED.values()]
    assert sorted(result.refused.elements()) == sorted(expected)
    assert result.records == len(records) + len(others)


def test_responses_of_a_run_with_other_settings_are_refused_by_the_name_of_the_field(
    made: Stage, tmp_path: Path
) -> None:
    stage = fresh(tmp_path / "run", dataset={"samples": 2, "sampling": {"max_new_tokens": 400, "top_p": 0.9}})
    there = tmp_path / "results" / "alpha"
    write_records(there / "responses.jsonl.zst", made.responses())
    reasons = taken(stage, there / "responses.jsonl.zst", None).refused
    assert reasons == {"its settings differ, or its number of samples": 12}, "no manifest tells which"
    settings = msgspec.to_builtins(made.settings(None)[0])
    manifest = {"jobs": {"generate": {"alpha": {"settings": settings}}}}
    (tmp_path / "results" / "summary").mkdir()
    (tmp_path / "results" / "summary" / "manifest.json").write_text(json.dumps(manifest))
    assert taken(stage, there / "responses.jsonl.zst", None).refused == {"sampling.top_p differs": 12}


def test_an_end_token_at_the_limit_is_an_end_as_the_engines_count_it(
    made: Stage, served: Served, tmp_path: Path
) -> None:
    one = made.responses()[0]
    whole = [70] * 399 + one.output_ids[-1:]
    records = [
        foreign(made, one, output_ids=whole, finish="length"),
        foreign(made, made.responses()[1], output_ids=[70] * 400, finish="length"),
    ]
    stage = fresh(tmp_path / "run")
    assert taken(stage, write(tmp_path / "other.jsonl", records), served.url).answers == 2
    with Journal(stage.paths.journal) as journal:
        entries = [journal.answered(made.responses()[at].request) for at in (0, 1)]
    assert [entry and entry.reply.finish for entry in entries] == [
        Finish(type="stop", matched=whole[-1]),
        Finish(type="length"),
    ]


def test_memory_does_not_grow_with_the_records(made: Stage, tmp_path: Path) -> None:
    one = made.responses()[0]
    peaks = []
    for count in (2_000, 20_000):
        stage = fresh(tmp_path / str(count))
        file = tmp_path / f"{count}.jsonl.zst"
        strangers = (msgspec.structs.replace(one, key=f"stranger {n}") for n in range(count))
        write_records(file, strangers)
        tracemalloc.start()
        try:
            assert taken(stage, file, None).refused == {UNKNOWN: count}
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_a_file_that_cannot_be_read_is_named(made: Stage, served: Served, tmp_path: Path) -> None:
    stage = fresh(tmp_path / "run")
    with pytest.raises(EyasError, match=r"nowhere\.jsonl: cannot be read .*correct the path"):
        taken(stage, tmp_path / "nowhere.jsonl", served.url)
    file = write(tmp_path / "bad.jsonl", [foreign(made, made.responses()[0], output_ids="text")])
    with pytest.raises(EyasError, match=r"bad\.jsonl: line 1: .*output_ids.*correct the record"):
        taken(stage, file, served.url)
    cut = tmp_path / "cut.jsonl.zst"
    cut.write_bytes(made.paths.responses.read_bytes()[:-20])
    with pytest.raises(EyasError, match=r"cut\.jsonl\.zst: .*(cut short|damaged|ends)"):
        taken(stage, cut, served.url)


def test_with_the_models_tokenizer_at_hand_no_server_is_needed_at_all(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    config = load(
        {
            "model": {
                "id": "org/tiny",
                "tokenizer": str(folder),
                "kv_dtype": "bf16",
                "reasoning": {"name": "none"},
            },
            "server": {"engine": {"name": "sglang"}, "state": str(tmp_path / "state")},
            "datasets": {
                "alpha": {
                    "source": {"name": "magicoder"},
                    "files": ["data.jsonl"],
                    "sampling": {"max_new_tokens": 64},
                }
            },
        }
    )
    stages = Stages(config)
    settings, access = stages.generate("alpha"), stages.access("alpha")
    paths = Stage(tmp_path, []).paths
    asked = [prompt("k0", "Why?"), prompt("k1", "How?")]
    write_records(paths.prompts, asked)
    tokenizer = load_tokenizer(config.model)
    renderer = Renderer(config.model, tokenizer, "")
    end = tokenizer.stop_ids[0]
    records = [
        {
            "messages": msgspec.to_builtins(one.messages),
            "prompt_ids": renderer.render(one),
            "output_ids": [*tokenizer.encode("Because.", control=False), end],
            "finish": "stop",
            "sampling": msgspec.to_builtins(settings.sampling),
            "model": {"id": "org/tiny", "kv_dtype": "bf16"},
        }
        for one in asked
    ]
    wrong = {**records[0], "prompt_ids": records[1]["prompt_ids"]}
    file = write(tmp_path / "other.jsonl", [*records, {**wrong, "sample": 0}])
    result = adopt(settings, access, paths.prompts, paths.journal, file, stages.registry)
    assert (result.answers, result.refused) == (2, {OTHER_IDS: 1})
    generate(settings, access, paths, stages.registry)
    responses = list(read_records(paths.responses, Response))
    assert [(one.key, one.text, one.finish.matched) for one in responses] == [
        ("k0", "Because.", end),
        ("k1", "Because.", end),
    ]
    assert not (tmp_path / "state").exists(), "nobody held a server"


def test_a_strange_name_of_a_setting_is_told_in_one_line_that_every_terminal_can_show(
    made: Stage, served: Served, tmp_path: Path
) -> None:
    record = foreign(made, made.responses()[0])
    record["sampling"]["\ud800\n\x1b"] = 1
    (reason,) = taken(fresh(tmp_path), write(tmp_path / "other.jsonl", [record]), served.url).refused
    assert reason == "sampling.\\ud800\\n\\x1b is no setting of Eyas, so it cannot be compared"


def test_nobody_is_told_to_delete_answers_that_another_version_wrote(made: Stage, tmp_path: Path) -> None:
    former = [{**msgspec.to_builtins(one), "text_ends": []} for one in made.responses()]
    write_records(tmp_path / "former.jsonl.zst", former)
    with pytest.raises(EyasError, match=r"line 1: .*`text_ends`.*another version of Eyas") as error:
        taken(fresh(tmp_path), tmp_path / "former.jsonl.zst", None)
    assert "delete it" not in str(error.value)
