"""The prompts stage: which rows become prompts, under which keys, in which order."""

from __future__ import annotations

import hashlib
import json
import random
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.config import (
    DecontaminateConfig,
    EvaluationSet,
    FilterConfig,
    NearDuplicatesConfig,
    PromptsSettings,
)
from eyas.errors import EyasError
from eyas.plugins import Conversation, NoOptions, Skip, Source
from eyas.prompts import (
    Evaluation,
    EvaluationReport,
    FileReport,
    PromptsReport,
    _parse,
    _Sorter,
    group,
    opening,
    prompts,
)
from eyas.recordfile import read_records
from eyas.records import Message, Origin, Prompt
from eyas.sources.chat import Chat
from eyas.sources.glaive import Glaive
from eyas.sources.magicoder import Magicoder
from eyas.sources.mixture_of_thoughts import MixtureOfThoughts
from eyas.sources.opencodeinstruct import OpenCodeInstruct
from eyas.sources.openthoughts import OpenThoughts
from eyas.sources.sharegpt import ShareGPT
from eyas.sources.swe_trajectories import SweTrajectories
from eyas.sources.text import Text
from eyas.sources.ultrachat import UltraChat

DEMO = Path(__file__).parent.parent / "data/demo"
Row = dict[str, Any]


class Plain(Source):
    """Rows of {"q": text} with an optional id."""

    name = "plain"

    def parse(self, row: Row) -> Conversation | Skip:
        return Conversation([Message(role="user", content=row["q"])], row.get("tools", []), row.get("id"))


def run(
    folder: Path,
    *files: list[Row],
    rows: int | None = None,
    seed: int = 0,
    source: type[Source] = Plain,
    evaluation: dict[str, list[str]] | None = None,
    **wanted: Any,
) -> tuple[list[Prompt], PromptsReport]:
    """The prompts of `files`. evaluation: questions by set. wanted: settings besides the usual ones."""
    paths = [folder / f"part{n}.jsonl" for n, _ in enumerate(files)]
    for path, content in zip(paths, files, strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    evaluations = {}
    for name, texts in (evaluation or {}).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"q": text}) + "\n" for text in texts))
        evaluations[name] = Evaluation(Plain(NoOptions()), [folder / f"{name}.jsonl"])
    return run_files(folder, paths, rows, seed, source, evaluations, **wanted)


def run_files(
    folder: Path,
    paths: list[Path],
    rows: int | None,
    seed: int,
    source: type[Source],
    evaluations: dict[str, Evaluation] | None = None,
    **laid_over: Any,
) -> tuple[list[Prompt], PromptsReport]:
    evaluations = evaluations or {}
    usual: dict[str, Any] = {
        "filter": FilterConfig(),
        "duplicates": "keep",
        "near_duplicates": None,
        "decontaminate": DecontaminateConfig(against=sorted(evaluations)) if evaluations else None,
        "evaluation_sets": {
            name: EvaluationSet(source={"name": "plain"}, files=[file.name for file in found.files])
            for name, found in evaluations.items()
        },
    }
    wanted = PromptsSettings(
        dataset="demo",
        source={"name": source.name},
        revision="r1",
        rows=rows,
        turns="first",
        seed=seed,
        **(usual | laid_over),
    )
    out, report = folder / "results/prompts.jsonl.zst", folder / "results/prompts.json"
    names = [path.name for path in paths]
    returned = prompts(wanted, paths, names, source(source.Options()), out, report, evaluations)
    assert msgspec.json.decode(report.read_bytes(), type=PromptsReport) == returned
    assert sorted(path.name for path in out.parent.iterdir()) == ["prompts.json", "prompts.jsonl.zst"]
    return list(read_records(out, Prompt)), returned


def questions(*texts: str) -> list[Row]:
    return [{"q": text} for text in texts]


def fresh() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


# --- keys --------------------------------------------------------------------------------------------------------


def test_key_is_the_hash_of_the_row_and_its_count_or_the_sources_own_id(tmp_path):
    found, _ = run(tmp_path, [{"q": "ä", "b": 1}, {"b": 1, "q": "ä"}, {"q": "x", "id": "own"}])
    base = hashlib.sha256(b'{"b":1,"q":"\\u00e4"}').hexdigest()[:16]
    assert sorted(prompt.key for prompt in found) == sorted([f"{base}-0", f"{base}-1", "own"])


def test_an_id_that_repeats_keeps_every_row_apart(tmp_path):
    same = {"id": "twin", "q": "one"}
    found, report = run(tmp_path, [same, same, {"id": "twin", "q": "two"}, same, {"id": "", "q": "no id"}])
    keys = {prompt.key for prompt in found}
    assert report.used == len(keys) == 5
    assert {"twin"} < keys and sum(key.startswith("twin-") for key in keys) == 3 and "" not in keys


SOME_ROWS = st.lists(
    st.fixed_dictionaries({"q": st.sampled_from("abcdefgh")}, optional={"id": st.sampled_from("xyz")}),
    max_size=12,
)


def by_key(rows: list[Row]) -> dict[str, tuple[list[Message], str]]:
    with fresh() as folder:
        found, _ = run(Path(folder), rows) if rows else ([], None)
    return {prompt.key: (prompt.messages, prompt.group) for prompt in found}


@settings(max_examples=60, deadline=None)
@given(SOME_ROWS, SOME_ROWS, st.data())
def test_inserted_rows_renumber_nothing(rows, inserted, data):
    at = data.draw(st.integers(0, len(rows)))
    # The plain id belongs to the first row that has it, so an inserted row must not come before that one.
    taken = {row["id"] for row in rows[at:] if "id" in row} - {row.get("id") for row in rows[:at]}
    inserted = [row for row in inserted if row.get("id") not in taken]
    before, after = by_key(rows), by_key(rows[:at] + inserted + rows[at:])
    assert len(before) == len(rows) and len(after) == len(rows) + len(inserted)
    assert before.items() <= after.items()


# --- order -------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(SOME_ROWS.filter(bool), st.integers(1, 14), st.integers(0, 3))
def test_a_larger_row_count_keeps_what_a_smaller_one_took(rows, count, seed):
    with fresh() as folder:
        everything, _ = run(Path(folder), rows, seed=seed)
        first, report = run(Path(folder), rows, rows=count, seed=seed)
    assert first == everything[:count]
    assert (report.asked, report.used, report.not_taken) == (count, len(first), len(rows) - len(first))
    ranks = [hashlib.sha256(f"{seed}:{prompt.key}".encode()).hexdigest() for prompt in everything]
    assert ranks == sorted(ranks)


def test_order_depends_on_the_seed_and_not_on_the_order_of_rows(tmp_path):
    rows = questions(*(f"question {n}" for n in range(300)))
    texts = {
        seed: [prompt.messages for prompt in run(tmp_path, rows, rows=20, seed=seed)[0]] for seed in (1, 2)
    }
    assert texts[1] != texts[2]
    random.Random(7).shuffle(rows)
    assert [prompt.messages for prompt in run(tmp_path, rows, rows=20, seed=1)[0]] == texts[1]


def test_a_small_row_count_of_many_keeps_few_on_disk(tmp_path, monkeypatch):
    held = []
    add = _Sorter.add

    def watched(self, rank, prompt):
        add(self, rank, prompt)
        held.append(self.database.execute("SELECT count(*) FROM prompts").fetchone()[0])

    monkeypatch.setattr(_Sorter, "add", watched)
    found, _ = run(tmp_path, questions(*map(str, range(500))), rows=10)
    assert len(found) == 10 and len(held) == 500
    assert max(held) <= 20


def test_the_same_rows_give_the_same_bytes(tmp_path):
    rows = questions(*(f"question {n % 40}" for n in range(100)))
    run(tmp_path, rows)
    out = tmp_path / "results/prompts.jsonl.zst"
    first = out.read_bytes()
    run(tmp_path, rows)
    assert out.read_bytes() == first


# --- records -----------------------------------------------------------------------------------------------------


def test_identical_prompts_are_counted_in_the_final_order(tmp_path):
    tool = {"type": "function", "function": {"name": "f"}}
    rows = [{"q": "same", "n": n} for n in range(5)] + [{"q": "other"}, {"q": "same", "tools": [tool]}]
    found, _ = run(tmp_path, rows)
    same = [prompt for prompt in found if prompt.messages[0].content == "same" and not prompt.tools]
    assert [prompt.occurrence for prompt in same] == [0, 1, 2, 3, 4]
    assert [prompt.occurrence for prompt in found if prompt not in same] == [0, 0]


def test_prompts_that_a_trimming_template_makes_equal_are_counted_as_one_question(tmp_path):
    """Else both would be one request: one answer trained twice, the other paid for and lost."""
    found, _ = run(tmp_path, [{"q": "same"}, {"q": "same\n"}, {"q": " same "}, {"q": "sa me"}])
    assert sorted(prompt.occurrence for prompt in found) == [0, 0, 1, 2]


def test_origin_names_file_and_row(tmp_path):
    found, _ = run(tmp_path, questions("a"), questions("b", "c"))
    origins = {prompt.messages[0].content: prompt.origin for prompt in found}
    assert origins["a"] == Origin(source="plain", revision="r1", file="part0.jsonl", row=1)
    assert origins["c"] == Origin(source="plain", revision="r1", file="part1.jsonl", row=2)


def test_group_is_one_for_texts_that_read_alike():
    alike = ["Café au lait", "  CAFE\u0301\tAU\u2028lait\n", "ｃａｆé au lait"]
    assert len({group([Message(role="user", content=text)]) for text in alike}) == 1
    assert group([Message(role="user", content="Café")]) != group([Message(role="user", content="Cafe")])


def test_text_is_never_changed(tmp_path):
    text = "  \ufeffＡ\r\n\u2028e\u0301 \x00 <|endoftext|>\t"
    ((prompt,), _) = run(tmp_path, questions(text))
    assert prompt.messages == [Message(role="user", content=text)]


def test_parquet_rows_with_dates_and_bytes_have_keys(tmp_path):
    path = tmp_path / "rows.parquet"
    when = pyarrow.array([1, 2], pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(
        pyarrow.table({"q": ["a", "a"], "when": when, "raw": [b"\xff", b"\xff"]}), path
    )
    found, _ = run_files(tmp_path, [path], None, 0, Plain)
    assert len({prompt.key.removesuffix("-0") for prompt in found}) == 2


# --- openings ----------------------------------------------------------------------------------------------------


def turns(*roles: str) -> Conversation:
    return Conversation([Message(role=role, content=f"{role} {n}") for n, role in enumerate(roles)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "asked", [["system", "system", "user"], ["user", "user"], ["user", "system", "user"]]
)
def test_everything_from_the_first_answer_on_is_cut_off(asked):
    opened = opening(turns(*asked, "assistant", "tool", "user"))
    assert isinstance(opened, Conversation)
    assert [message.role for message in opened.messages] == asked


@pytest.mark.parametrize(
    ("conversation", "reason"),
    [
        (turns(), "conversation is empty"),
        (turns("system"), "conversation has no user turn"),
        (turns("assistant", "user"), "conversation starts with an assistant or tool turn"),
        (turns("system", "tool", "user"), "conversation starts with an assistant or tool turn"),
        (Conversation([Message(role="user", content=" \n\u3000")]), "first user turn is empty"),
        (Conversation([Message(role="user", content="\ud800")]), "text is not valid Unicode"),
        (
            Conversation([Message(role="user", content="x")], [{"name": "\udfff"}]),
            "text is not valid Unicode",
        ),
        (Conversation([Message(role="user", content="x")], id="\ud800"), "text is not valid Unicode"),
    ],
)
def test_a_row_without_a_usable_opening_is_skipped_for_a_reason(conversation, reason):
    assert opening(conversation) == Skip(reason)


def test_half_a_surrogate_pair_after_the_opening_does_no_harm():
    answered = Conversation([Message(role="user", content="x"), Message(role="assistant", content="\ud800")])
    assert opening(answered) == Conversation([Message(role="user", content="x")])


# --- report and errors -------------------------------------------------------------------------------------------


def test_every_row_is_accounted_for(tmp_path):
    files = [questions("a", "", "b"), questions("\ud800", "c", " ", "d")]
    found, report = run(tmp_path, *files, rows=3)
    assert (report.rows_read, report.used, report.not_taken, report.asked) == (7, len(found), 1, 3)
    assert report.skipped == {"first user turn is empty": 2, "text is not valid Unicode": 1}
    assert [(file.name, file.rows) for file in report.files] == [("part0.jsonl", 3), ("part1.jsonl", 4)]
    assert report.files[1].sha256 == hashlib.sha256((tmp_path / "part1.jsonl").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("source", "row", "missing", "option"),
    [
        (Text(Text.Options(column="frage")), {"question": "Why?"}, "frage", "column"),
        (Text(Text.Options()), {"question": "Why?"}, "text", "column"),
        (Text(Text.Options(system="how")), {"text": "Why?"}, "how", "system"),
        (Chat(Chat.Options()), {"talk": []}, "messages", "column"),
        (Chat(Chat.Options(column="talks")), {"talk": []}, "talks", "column"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_column_is_told_with_the_option_that_names_it(
    source: Source, row: Row, missing: str, option: str
) -> None:
    with pytest.raises(EyasError) as error:
        _parse(source, row, "q.jsonl: row 1")
    assert str(error.value) == (
        f"q.jsonl: row 1: no column '{missing}' among '{next(iter(row))}'; set `source.{option}`, correct the row, "
        f"or pick the right source (this one is '{source.name}')"
    )


def test_fewer_rows_than_asked_are_fine_and_reported(tmp_path):
    _, report = run(tmp_path, questions("a", "b"), rows=10)
    assert (report.asked, report.used, report.not_taken) == (10, 2, 0)


@pytest.mark.parametrize(
    ("bad", "said"),
    [({"p": "x"}, "no column 'q' among 'p'"), ({"q": 1, "id": 2}, "holds int")],
    ids=["missing column", "wrong type"],
)
def test_a_row_that_does_not_fit_the_source_is_named_with_the_remedy(tmp_path, bad, said):
    class Strict(Plain):
        def parse(self, row: Row) -> Conversation | Skip:
            if not isinstance(row["q"], str):
                raise TypeError("column 'q' holds int, not text")
            return super().parse(row)

    rows = [*questions(*(["fine"] * 36)), bad]
    with pytest.raises(EyasError, match=rf"part0\.jsonl: row 37: .*{said}.*pick the right source .*'plain'"):
        run(tmp_path, rows, source=Strict)
    assert list((tmp_path / "results").iterdir()) == []


def test_a_row_whose_tools_stand_too_deep_in_one_another_is_named(tmp_path):
    deep: Row = {}
    for _ in range(800):
        deep = {"a": deep}
    row = {"messages": [{"role": "user", "content": "x"}], "tools": [deep]}
    with pytest.raises(EyasError, match=r"part0\.jsonl: row 1: objects or lists stand too deep"):
        run(tmp_path, [row], source=Chat)


@pytest.mark.parametrize("rows", [[], questions("", " ")], ids=["no rows", "all skipped"])
def test_a_dataset_without_a_usable_row_is_an_error_with_the_reasons(tmp_path, rows):
    reasons = "2 × first user turn is empty" if rows else "there are no rows"
    with pytest.raises(EyasError, match=rf"dataset demo: no usable row in part0\.jsonl \({reasons}\)"):
        run(tmp_path, rows)


def test_a_full_disk_is_one_clear_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    def full(self, rank, prompt):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(_Sorter, "add", full)
    with pytest.raises(EyasError, match=r"results: cannot sort .*disk is full\); free disk space"):
        run(tmp_path, questions("a"))
    assert list((tmp_path / "results").iterdir()) == []


# --- selection ---------------------------------------------------------------------------------------------------

TALE = "Write a tale of a lighthouse keeper who counts ships at night and one night counts one ship too many please"


NEARLY = TALE.replace("please", "now, please")
EGGS = "How many eggs are left when seven ducks lay two each and a fox takes three?"
EVERYTHING: dict[str, Any] = {
    "filter": FilterConfig(min_characters=3, max_characters=200, scripts=["Latin"]),
    "duplicates": "drop",
    "near_duplicates": NearDuplicatesConfig(),
}


def test_what_is_left_out_is_counted_by_reason(tmp_path):
    rows = questions(
        "hi", "x" * 201, "Почему море солёное?", TALE, TALE, NEARLY, *[f"Solve. {EGGS}"] * 2, "Why is it?"
    )
    found, report = run(tmp_path, rows, evaluation={"ducks": ["What else?", EGGS]}, **EVERYTHING)
    assert report.skipped == {
        "shorter than min_characters": 1,
        "longer than max_characters": 1,
        "too few letters in the scripts asked for": 1,
        "exact duplicate of an earlier prompt": 2,
        "near-duplicate of an earlier prompt": 1,
        "overlaps evaluation set ducks": 1,
    }
    assert {prompt.messages[0].content for prompt in found} in ({TALE, "Why is it?"}, {NEARLY, "Why is it?"})
    (file,) = report.evaluation[0].files
    digest = hashlib.sha256((tmp_path / "ducks.jsonl").read_bytes()).hexdigest()
    assert file == FileReport(name="ducks.jsonl", rows=2, sha256=digest)
    assert report.evaluation == [EvaluationReport(name="ducks", items=2, files=[file])]


def test_nothing_is_left_out_unless_it_is_asked_for(tmp_path):
    rows = questions("hi", "x" * 201, "Почему?", TALE, TALE, NEARLY)
    assert run(tmp_path, rows)[1].used == 6


POOL = [
    "hi",
    TALE,
    NEARLY,
    f"Solve. {EGGS}",
    *(f"Question {n} of {n * n} on tides, reefs and lights?" for n in range(6)),
]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(POOL), min_size=1, max_size=14),
    st.integers(1, 9),
    st.integers(0, 3),
    st.randoms(),
)
def test_a_larger_row_count_keeps_what_a_smaller_one_took_whatever_is_left_out(texts, count, seed, chance):
    rows = questions("Which one is always fit to be taken?", *texts)
    with fresh() as folder:
        everything, whole = run(Path(folder), rows, seed=seed, evaluation={"ducks": [EGGS]}, **EVERYTHING)
        chance.shuffle(rows)
        first, report = run(
            Path(folder), rows, rows=count, seed=seed, evaluation={"ducks": [EGGS]}, **EVERYTHING
        )
    assert [prompt.messages for prompt in first] == [prompt.messages for prompt in everything[:count]]
    assert [prompt.key for prompt in first] == [prompt.key for prompt in everything[:count]]
    assert len(first) == min(count, len(everything))
    assert report.skipped.items() <= whole.skipped.items() or report.not_taken


def test_an_evaluation_set_without_a_question_is_an_error(tmp_path):
    with pytest.raises(
        EyasError, match=r"evaluation set ducks: no usable row in ducks\.jsonl \(1 × first user turn is"
    ):
        run(tmp_path, questions("a"), evaluation={"ducks": [" "]})


def test_a_row_of_an_evaluation_set_that_does_not_fit_is_named(tmp_path):
    (tmp_path / "bench.jsonl").write_text('{"q": "a"}\n{"p": "b"}\n')
    bench = {"bench": Evaluation(Plain(NoOptions()), [tmp_path / "bench.jsonl"])}
    (tmp_path / "rows.jsonl").write_text('{"q": "a"}\n')
    with pytest.raises(EyasError, match=r"bench\.jsonl: row 2: no column 'q'"):
        run_files(tmp_path, [tmp_path / "rows.jsonl"], None, 0, Plain, bench)


# --- demo data ---------------------------------------------------------------------------------------------------

START = "conversation starts with an assistant or tool turn"
EMPTY = "first user turn is empty"


@pytest.mark.parametrize(
    ("file", "source", "skipped"),
    [
        ("glaive.json", Glaive, {START: 1, EMPTY: 1}),
        ("opencodeinstruct.jsonl", OpenCodeInstruct, {EMPTY: 1}),
        ("magicoder_oss.jsonl", Magicoder, {EMPTY: 1}),
        ("mixture_of_thoughts.jsonl", MixtureOfThoughts, {START: 1, "conversation is empty": 1}),
        ("openthoughts.jsonl", OpenThoughts, {"a turn has an unknown role": 1}),
        ("ultrachat.jsonl", UltraChat, {"prompt differs from the first message": 1}),
        ("sharegpt.json", ShareGPT, {START: 1, EMPTY: 1, "conversation is empty": 1}),
        ("swe_trajectories.jsonl", SweTrajectories, {"conversation has no user turn": 1}),
    ],
)
def test_each_demo_dataset_gives_eight_short_prompts_without_old_answers(tmp_path, file, source, skipped):
    found, report = run_files(tmp_path, [DEMO / file], None, 0, source)
    assert (report.used, report.skipped) == (8, skipped)
    for prompt in found:
        assert [message.role for message in prompt.messages][-1] == "user"
        assert "assistant" not in {message.role for message in prompt.messages}
        written = "".join(message.content for message in prompt.messages) + json.dumps(prompt.tools)
        assert len(written.split()) <= 120
        assert not any(
            mark in written for mark in ("<think>", "<|begin_of_thought|>", "<|endoftext|>", "<functioncall>")
        )
    assert any(prompt.tools for prompt in found) == (source is Glaive)
