"""The validate stage and its table: every response one verdict, in order, in flat memory, equal bytes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from replies import END, response

from eyas import verdicts
from eyas.config import ValidateSettings, check_settings, plugin
from eyas.errors import EyasError
from eyas.judge import Judge
from eyas.plugins import registry
from eyas.recordfile import write_records
from eyas.records import Record, Response, TrainMetadata, TrainRow, Verdict
from eyas.tables import READ_ROWS, new_parquet, read_table, write_table
from eyas.validate import read_verdicts, validate

Checks = dict[str, dict[str, Any]]

TAGS = {"name": "tags", "implicit_closers": ["<call>"]}
GOOD = ("<think>", "a", "</think>", "b")


def settings(checks: Checks, reasoning: dict[str, Any] = TAGS) -> ValidateSettings:
    """As Stages makes them: every built-in check, defaults filled in."""
    found = registry()
    names = [plug.cls.name for plug in found.all() if plug.kind == "check" and plug.origin == "built-in"]
    return ValidateSettings(
        dataset="d",
        reasoning=plugin(found, "reasoning", reasoning, "model.reasoning"),
        checks={name: check_settings(found, name, checks.get(name, {}), name) for name in names},
    )


def judge(made: Response, checks: Checks | None = None, reasoning: dict[str, Any] = TAGS) -> Verdict:
    filled = settings(checks or {}, reasoning)
    return Judge(filled.reasoning, filled.checks, registry()).judge(made)


# --- judging ------------------------------------------------------------------------------------------------------


def test_good_response_is_accepted_with_its_tokens_counted() -> None:
    assert judge(response(GOOD, key="x", turn=1, sample=2, constrained=True)) == Verdict(
        key="x",
        turn=1,
        sample=2,
        accepted=True,
        reasons=[],
        marks=[],
        truncated=False,
        constrained=True,
        reasoning_state="closed",
        prompt_tokens=3,
        reasoning_tokens=3,
        answer_tokens=2,
        output_tokens=5,
    )


@pytest.mark.parametrize("tokens", [("<think>", "a", "b"), GOOD])
def test_answer_cut_at_the_limit_is_kept_and_marked(tokens: tuple[str, ...]) -> None:
    verdict = judge(response(tokens, cut=True))
    assert (verdict.accepted, verdict.truncated, verdict.marks) == (True, True, ["cut at the limit"])


@pytest.mark.parametrize(
    ("policy", "accepted", "reasons", "marks"),
    [
        ("reject", False, ["no reasoning"], []),
        ("mark", True, [], ["no reasoning"]),
        ("off", True, [], []),
    ],
)
def test_policy_decides_what_a_fault_means(
    policy: str, accepted: bool, reasons: list[str], marks: list[str]
) -> None:
    verdict = judge(response(["a"]), {"reasoning": {"policy": policy}})
    assert (verdict.accepted, verdict.reasons, verdict.marks) == (accepted, reasons, marks)


OPENED = {**TAGS, "opened_by_prompt": True}
LOOP = ["Wait, ", "let me ", "check ", "that ", "again.", "\n"]
# Number in shared/facts/pains.md: tokens, whether cut, reasoning, state, reasons, marks.
PAINS: dict[str, tuple[list[str | bytes], bool, dict[str, Any], str, list[str], list[str]]] = {
    "A1 the prompt opened it, the answer only closes": (
        ["a", "</think>", "b"],
        False,
        OPENED,
        "closed",
        [],
        [],
    ),
    "A2, A3, A15 nobody saw reasoning": (["b"], False, TAGS, "none", ["no reasoning"], []),
    "A5 a call closes it": (["a", "<call>", "{}"], False, OPENED, "closed_by_tool", [], []),
    "A6 cut inside it is no empty answer": (
        ["a", "b"],
        True,
        OPENED,
        "truncated_in_reasoning",
        [],
        ["cut at the limit"],
    ),
    "A8 closed, and nothing said": (["a", "</think>", "\n\n"], False, OPENED, "closed", ["empty answer"], []),
    "A11 emptied": (["<think>", "\n", "</think>", "b"], False, TAGS, "empty", ["empty reasoning"], []),
    "A14 a second opening": (
        ["<think>", "a", "<think>", "c", "</think>", "b"],
        False,
        TAGS,
        "stray_open",
        ["reasoning opened twice"],
        [],
    ),
    "A closed twice": (
        ["a", "</think>", "b", "</think>", "c"],
        False,
        OPENED,
        "double_close",
        ["reasoning closed twice"],
        [],
    ),
    "A reopened": (
        ["a", "</think>", "b", "<think>", "c", "</think>", "d"],
        False,
        OPENED,
        "reopened",
        ["reasoning reopened"],
        [],
    ),
    "A stopped inside it": (["a", "b"], False, OPENED, "unclosed", ["reasoning never closed"], []),
    "B25 control token as text stays text": (
        ["a", "</think>", "<|im_end|>"],
        False,
        OPENED,
        "closed",
        [],
        [],
    ),
    "C30 a loop to the limit, inside reasoning": (
        ["a ", *LOOP * 60],
        True,
        OPENED,
        "truncated_in_reasoning",
        ["repeats with a short period"],
        ["cut at the limit"],
    ),
    "C30 a loop in the answer": (
        ["a", "</think>", *LOOP * 60],
        False,
        OPENED,
        "closed",
        ["repeats with a short period"],
        [],
    ),
    "C31 garbled": (
        ["a", "</think>", b"\xff\xfe", "b"],
        False,
        OPENED,
        "closed",
        ["undecodable bytes in the answer"],
        [],
    ),
}


@pytest.mark.parametrize("pain", PAINS)
def test_what_breaks_other_tools_is_judged_rightly(pain: str) -> None:
    """With every check and its own default, so that none finds a fault that is another's."""
    tokens, cut, reasoning, state, reasons, marks = PAINS[pain]
    verdict = judge(response(tokens, cut=cut), reasoning=reasoning)
    assert (verdict.reasoning_state, verdict.reasons, verdict.marks) == (state, reasons, marks)
    assert verdict.accepted == (not reasons)


@pytest.mark.parametrize(
    ("ids", "reasons"),
    [
        ([1000, 1001, END, END], ["control token in the answer", "stop id before the end"]),
        ([1000, 1001, 1002, 1003], ["stop id missing at the end"]),
        ([1000, 1001, 1, END], ["control token in the answer"]),
    ],
)
def test_ids_at_the_wrong_place_are_found_whatever_the_text_says(ids: list[int], reasons: list[str]) -> None:
    """B20 the end twice, or lost; B25 a control token that the text need not show."""
    verdict = judge(response(["a", "</think>", "b"], output_ids=ids), reasoning=OPENED)
    assert sorted(verdict.reasons) == reasons


def test_model_without_reasoning_is_not_asked_for_any() -> None:
    verdict = judge(response(["a"]), reasoning={"name": "none"})
    assert verdict.accepted
    assert verdict.reasoning_state == "none"
    assert (verdict.reasoning_tokens, verdict.answer_tokens) == (0, 2)


def test_options_reach_the_checks() -> None:
    made = response([*GOOD, *["so "] * 40], cut=True)
    assert judge(made).accepted
    assert not judge(made, {"degenerate": {"min_tokens": 20}}).accepted


def test_engine_that_gives_too_few_text_offsets_is_named() -> None:
    with pytest.raises(
        EyasError, match=r"^response k:0:0: 1 text_lengths for 5 output_ids; the engine plugin"
    ):
        judge(response(GOOD, text_lengths="1"))


PLUGINS = """
from eyas import hookimpl
from eyas.plugins import Check, Reasoning, Split

class Broken(Check):
    \"\"\"Fails.\"\"\"
    name = "broken"
    def faults(self, response, split):
        yield {}["missing"]

class Wild(Reasoning):
    \"\"\"Counts wrongly.\"\"\"
    name = "wild"
    def split(self, response):
        return Split("closed", 99)

@hookimpl
def register_checks(register):
    register(Broken)

@hookimpl
def register_reasoning(register):
    register(Wild)
"""


def test_plugin_that_fails_is_named_with_the_response(tmp_path: Path) -> None:
    file = tmp_path / "broken_plugins.py"
    file.write_text(PLUGINS, encoding="utf-8")
    found = registry((str(file),))
    with pytest.raises(
        EyasError, match=r"^response k:0:0: check 'broken' failed: KeyError: 'missing'; correct"
    ):
        Judge(TAGS, {"broken": {"policy": "mark"}}, found).judge(response(GOOD))
    with pytest.raises(EyasError, match=r"^response k:0:0: reasoning format 'wild' counts 99 of 5 tokens"):
        Judge({"name": "wild"}, {}, found).judge(response(GOOD))


tokens = st.lists(
    st.sampled_from(["<think>", "</think>", "<call>", "a", " ", "\n", b"\xc3", b"\xa9"]), max_size=12
)


@given(tokens, st.booleans())
def test_reasoning_and_answer_tokens_always_sum_to_the_output(made: list[str | bytes], cut: bool) -> None:
    verdict = judge(response(made, cut=cut))
    assert verdict.reasoning_tokens + verdict.answer_tokens == verdict.output_tokens == len(made) + (not cut)
    assert verdict.accepted == (not verdict.reasons)
    assert verdict.truncated == cut


# --- the stage ----------------------------------------------------------------------------------------------------


def many(count: int) -> Iterator[Response]:
    for number in range(count):
        yield response(GOOD if number % 3 else ["a"], key=f"k{number}", cut=number % 2 == 0)


def test_every_response_gets_one_verdict_in_order(tmp_path: Path) -> None:
    write_records(tmp_path / "r", many(500))
    filled = settings({})
    assert validate(filled, tmp_path / "r", tmp_path / "v", registry()) == 500
    one = Judge(filled.reasoning, filled.checks, registry())
    assert list(read_verdicts(tmp_path / "v")) == [one.judge(made) for made in many(500)]


def test_same_responses_give_the_same_bytes(tmp_path: Path) -> None:
    write_records(tmp_path / "r", many(300))
    for name in ("a", "b"):
        validate(settings({}), tmp_path / "r", tmp_path / name, registry())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_no_responses_give_an_empty_table(tmp_path: Path) -> None:
    write_records(tmp_path / "r", [])
    assert validate(settings({}), tmp_path / "r", tmp_path / "v", registry()) == 0
    assert list(read_verdicts(tmp_path / "v")) == []
    assert pq.read_schema(tmp_path / "v").equals(verdicts.SCHEMA)


def test_cut_responses_file_leaves_no_verdicts(tmp_path: Path) -> None:
    write_records(tmp_path / "r", many(300))
    (tmp_path / "r").write_bytes((tmp_path / "r").read_bytes()[:-40])
    with pytest.raises(EyasError, match="cut short"):
        validate(settings({}), tmp_path / "r", tmp_path / "v", registry())
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_verdict_columns_are_the_fields_of_verdict() -> None:
    assert tuple(verdicts.SCHEMA.names) == Verdict.__struct_fields__


# --- tables -------------------------------------------------------------------------------------------------------


class Row(Record):
    name: str
    numbers: list[int]
    mask: list[int]
    words: list[str]
    inner: TrainMetadata
    maybe: float | None


ROW = pa.schema(
    [
        ("name", pa.string()),
        ("numbers", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.int8())),
        ("words", pa.list_(pa.string())),
        (
            "inner",
            pa.struct(
                [(name, pa.string()) for name in ("dataset", "group", "request", "finish")]
                + [(name, pa.bool_()) for name in ("truncated", "constrained")]
                + [(name, pa.int32()) for name in ("reasoning_tokens", "answer_tokens")]
            ),
        ),
        ("maybe", pa.float64()),
    ]
)
METADATA = TrainMetadata(
    dataset="d",
    group="g",
    request="r",
    finish="stop",
    truncated=False,
    constrained=False,
    reasoning_tokens=1,
    answer_tokens=2,
)
rows = st.lists(
    st.builds(
        Row,
        name=st.text(),
        numbers=st.lists(st.integers(-(2**31), 2**31 - 1)),
        mask=st.lists(st.integers(-128, 127)),
        words=st.lists(st.text(), max_size=3),
        inner=st.just(METADATA),
        maybe=st.none() | st.floats(allow_nan=False),
    ),
    max_size=12,
)


@given(rows, st.integers(1, 5))
@hypothesis_settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_is_written_is_read(tmp_path: Path, made: list[Row], batch: int) -> None:
    assert write_table(tmp_path / "t", ROW, made, batch) == len(made)
    assert list(read_table(tmp_path / "t", Row)) == made
    assert pq.ParquetFile(tmp_path / "t").num_row_groups == -(-len(made) // batch)


@pytest.mark.parametrize(("count", "groups"), [(3, [3]), (50, [6, 6, 6, 6, 6, 6, 6, 6, 2])])
def test_a_row_group_ends_at_so_many_ids_or_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, groups: list[int]
) -> None:
    from eyas.train import SCHEMA

    monkeypatch.setattr("eyas.tables.GROUP_IDS", 1_700)  # rows have 300
    write_table(tmp_path / "t", SCHEMA, train_rows(count))
    told = pq.ParquetFile(tmp_path / "t").metadata
    assert [told.row_group(at).num_rows for at in range(told.num_row_groups)] == groups
    assert sum(1 for _ in read_table(tmp_path / "t", TrainRow)) == count


@pytest.mark.parametrize(
    ("numbers", "mask", "message"),
    [
        ([1, 2**31], [], r"row 2: numbers: 2147483648 does not fit int32"),
        ([], [-128, 128], r"row 2: mask: 128 does not fit int8"),
        ([1, "2"], [], r"row 2: numbers: '2' does not fit int32"),
    ],
)
def test_number_that_does_not_fit_is_named_and_leaves_no_file(
    tmp_path: Path, numbers: list[Any], mask: list[int], message: str
) -> None:
    good = Row(name="a", numbers=[], mask=[], words=[], inner=METADATA, maybe=None)
    bad = Row(name="b", numbers=numbers, mask=mask, words=[], inner=METADATA, maybe=None)
    with pytest.raises(EyasError, match=message):
        write_table(tmp_path / "t", ROW, [good, bad])
    assert list(tmp_path.iterdir()) == []


def test_row_of_another_shape_is_named_with_file_row_and_field(tmp_path: Path) -> None:
    path = tmp_path / "t"
    table = pa.table({"key": ["a", "b"], "reasons": [["x"], None]})
    with new_parquet(path, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(EyasError, match=rf"^{path}: row 1: .*missing required field `turn`"):
        list(read_verdicts(path))


@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_cut_table_is_an_error(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "v"
    verdicts.write_verdicts(path, [judge(response(GOOD))] * 200)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(EyasError, match=rf"^{path}: damaged"):
        list(read_verdicts(path))


def test_changed_byte_in_a_table_is_never_read_as_a_row(tmp_path: Path) -> None:
    path = tmp_path / "v"
    whole = [judge(response(GOOD, key=f"k{number * 7919}")) for number in range(200)]
    verdicts.write_verdicts(path, whole)
    content = path.read_bytes()
    for at in range(4, len(content), 29):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :])
        with contextlib.suppress(EyasError):
            assert list(read_verdicts(path)) == whole


def train_rows(count: int) -> Iterable[TrainRow]:
    for number in range(count):
        ids = list(range(number, number + 300))
        yield TrainRow(
            id=str(number), primary_id="p", input_ids=ids, loss_mask=[0] * 100 + [1] * 200, metadata=METADATA
        )


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    from eyas.train import SCHEMA

    def peak(count: int) -> int:
        tracemalloc.start()
        write_table(tmp_path / "t", SCHEMA, train_rows(count), READ_ROWS)
        for _ in read_table(tmp_path / "t", TrainRow):
            pass
        return tracemalloc.get_traced_memory()[1]

    few = peak(2 * READ_ROWS)
    assert peak(8 * READ_ROWS) < 1.2 * few
    tracemalloc.stop()


def test_snakefile_pays_for_no_numpy_or_pyarrow() -> None:
    probe = (
        "import sys, eyas.judge, eyas.reasoning.none, eyas.reasoning.tags, eyas.reasoning.formats\n"
        "from eyas.checks import control_tokens, degenerate, empty_answer, length, reasoning, stop_token, unicode\n"
        "print(*{'numpy', 'pandas', 'pyarrow'} & set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True).stdout.strip() == b""
    )
