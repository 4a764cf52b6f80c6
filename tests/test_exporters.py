"""Each export by the rules of the trainer that reads it, and what of the reasoning is left there."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from exported import CALL, TOOL, Made, add_talks, kimi, kimi_model, qwen3, qwen3_model, system, user
from kimi import make_folder
from real_tokenizers import folder as real

from eyas.config import ModelConfig
from eyas.errors import EyasError
from eyas.exporters.reports import read_report
from eyas.plugins import registry
from eyas.recordfile import read_records
from eyas.records import Message, TrainRow, Turn

CUT = "cut at the limit: a template would end it"
FORMATS = [found.cls.name for found in registry().all() if found.kind == "exporter"]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return qwen3(tmp_path_factory.mktemp("qwen3"), real("qwen3"))


@pytest.fixture(scope="module")
def k25(tmp_path_factory: pytest.TempPathFactory) -> Made:
    top = tmp_path_factory.mktemp("kimi")
    return kimi(top, make_folder(top / "tokenizer"))


def lines(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a JSONL file by the last part of their id."""
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    return {(row.get("id") or row["conversation_id"])[2:].partition(":")[0]: row for row in rows}


# --- ids ---------------------------------------------------------------------------------------------------------


def is_token_row(ids: list[int], mask: list[int]) -> bool:
    """SpecForge's and speculators' rule: whole numbers, no booleans, equal lengths, a mask of 0 and 1 that is not all 0."""
    numbers = all(type(value) is int for value in (*ids, *mask))
    return numbers and len(ids) == len(mask) > 0 and set(mask) <= {0, 1} and sum(mask) > 0


@pytest.mark.parametrize("end", [True, False])
def test_token_rows_follow_the_rules_of_specforge_and_speculators(qwen: Made, end: bool) -> None:
    path, report = qwen.export("tokens", supervise_end=end)
    read = list(read_records(path, TrainRow))
    assert [row.id for row in read] == [row.id for row in qwen.rows[::-1]]
    for row, own in zip(read, qwen.rows[::-1], strict=True):
        assert is_token_row(row.input_ids, row.loss_mask) and row.input_ids == own.input_ids
        closed = own.metadata.finish == "stop"
        assert sum(own.loss_mask) - sum(row.loss_mask) == (closed and not end)
        assert row.loss_mask[-1] == (end or not closed)
    assert report.supervised_tokens == sum(sum(row.loss_mask) for row in read)
    assert (report.supervises_end, report.same_ids_share, report.same_mask) == (end, 1, 6)


@pytest.mark.parametrize("end", [True, False])
def test_speculators_gets_an_arrow_folder_and_the_frequencies_of_what_is_supervised(
    qwen: Made, end: bool
) -> None:
    path, report = qwen.export("speculators", supervise_end=end)
    assert {file.name for file in path.iterdir()} == {
        "data-00000-of-00001.arrow",
        "dataset_info.json",
        "state.json",
        "token_freq.pt",
    }
    state = json.loads((path / "state.json").read_text())
    assert state["_format_type"] == "torch" and state["_data_files"] == [
        {"filename": "data-00000-of-00001.arrow"}
    ]
    with pa.ipc.open_stream(path / "data-00000-of-00001.arrow") as reader:
        table = reader.read_all()
    numbers = pa.list_(pa.int64())
    assert table.schema.equals(
        pa.schema([("input_ids", numbers), ("loss_mask", numbers), ("seq_len", pa.int64())])
    )
    counted: Counter[int] = Counter()
    for row, own in zip(table.to_pylist(), qwen.rows[::-1], strict=True):
        assert is_token_row(row["input_ids"], row["loss_mask"])
        assert row["input_ids"] == own.input_ids and row["seq_len"] == len(own.input_ids)
        counted.update(token for token, one in zip(row["input_ids"], row["loss_mask"], strict=True) if one)
    with zipfile.ZipFile(path / "token_freq.pt") as file:
        frequencies = pickle.loads(file.read("archive/data.pkl"))
    assert frequencies == counted and all(type(n) is int for pair in frequencies.items() for n in pair)
    assert report.supervised_tokens == counted.total() and report.same_mask == 6


# --- conversations -----------------------------------------------------------------------------------------------


def test_specforge_gets_id_conversations_and_tools_and_nothing_else(qwen: Made) -> None:
    """What is beyond these three is handed to the chat template as an option."""
    path, report = qwen.export("specforge")
    rows = lines(path)
    assert list(rows) == ["bare", "tool", "emoji", "brief"]
    for row in rows.values():
        assert list(row) in (["id", "conversations"], ["id", "conversations", "tools"])
        assert isinstance(row["id"], str)
        for message in row["conversations"]:
            assert message.keys() <= {
                "role",
                "content",
                "reasoning_content",
                "tool_calls",
                "tool_call_id",
                "name",
            }
            assert all(isinstance(value, str) for value in message.values())
            assert ("reasoning_content" in message) == (message["role"] == "assistant")
    assert rows["brief"]["conversations"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi, 2+2?"},
        {"role": "assistant", "content": "\n\n4", "reasoning_content": "\nI add.\n"},
    ]
    # Text, since Arrow would mix the parameters of all tools.
    assert json.loads(rows["tool"]["tools"])[0]["function"]["name"] == "weather"
    assert "<tool_call>" in rows["tool"]["conversations"][-1]["content"]
    assert {reason: left.rows for reason, left in report.left_out.items()} == {CUT: 2}
    assert (report.reasoning_rows, report.reasoning_kept, report.supervises_end) == (3, 3, True)


def test_specforge_puts_a_system_message_before_rows_without_one_and_the_report_says_so(qwen: Made) -> None:
    _, report = qwen.export("specforge")
    assert report.differ_for == {"the trainer puts a system message before it": 2} and report.same_ids == 2
    _, quiet = qwen.export("specforge", system_prompt="")
    # Qwen3 writes an empty block of reasoning for an answer that has none.
    assert quiet.differ_for == {"the trainer's text is another": 1} and quiet.same_ids == 3


def test_the_system_message_that_a_template_adds_by_itself_is_written_out(tmp_path: Path) -> None:
    place = tmp_path / "tokenizer"
    shutil.copytree(real("qwen3"), place)
    own = (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Hawk.<|im_end|>\n{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
        "{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (place / "chat_template.jinja").write_text(own)
    made = Made(tmp_path, ModelConfig(id="m", tokenizer=str(place), reasoning={"name": "qwen3"}))
    made.add("a", [user("Who?")], "<think>Hm</think>Hawk.<|im_end|>")
    path, report = made.export("specforge")
    assert lines(path)["a"]["conversations"][0] == {"role": "system", "content": "You are Hawk."}
    assert report.same_ids_share == 1


def test_specforge_text_is_the_exact_tokens_spelt_out(qwen: Made, k25: Made) -> None:
    for made in (qwen, k25):
        path, report = made.export("specforge_text")
        rows = lines(path)
        assert all(list(row) == ["id", "text"] for row in rows.values())
        assert [made.target.encode(row["text"]) for row in rows.values()] == [
            row.input_ids for row in made.rows[::-1]
        ]
        assert not report.left_out and report.reasoning_share == report.same_ids_share == 1
    assert lines(k25.export("specforge_text")[0])["brief"]["text"].endswith(
        "<think>I add: 4</think>4<|im_end|>"
    )


@pytest.mark.parametrize("end", [True, False])
def test_modelopt_gets_messages_and_a_template_that_keeps_reasoning_and_marks_the_answer(
    qwen: Made, end: bool
) -> None:
    path, report = qwen.export("modelopt", supervise_end=end)
    rows = lines(path / "conversations.jsonl")
    for row in rows.values():
        assert list(row) == ["conversation_id", "messages"] and isinstance(row["conversation_id"], str)
        assert row["messages"][-1]["role"] == "assistant"
    template = (path / "chat_template.jinja").read_text()
    assert template.count("{% generation %}") == template.count("{% endgeneration %}") == 1
    left = {reason: one.rows for reason, one in report.left_out.items()}
    assert left == {CUT: 2 if end else 1}
    # Every id and every bit of the mask, also of the answer without reasoning, and of the one that had a tool.
    assert report.same_ids == report.same_mask == report.rows == len(rows) == (4 if end else 5)
    assert report.reasoning_share == 1 and report.supervises_end == end
    asked = rows["tool"]["messages"][:-1]
    assert [message["role"] for message in asked] == ["prompt"]
    assert '{"type": "function", "function": {"name": "weather", ' in asked[0]["content"]
    assert "<tool_call>" in rows["tool"]["messages"][-1]["content"]


def test_modelopt_and_torchspec_keep_the_reasoning_of_kimi(k25: Made) -> None:
    for name in ("modelopt", "torchspec"):
        _, report = k25.export(name)
        assert (report.rows, report.reasoning_share, report.same_ids_share) == (3, 1, 1)
    # Its tokenizer is code, so Model-Optimizer finds the answer by ids and learns the <think> of the prompt too.
    _, report = k25.export("modelopt")
    assert report.same_mask == 0


def test_torchspec_has_the_reasoning_inline_in_the_last_answer(qwen: Made, k25: Made) -> None:
    rows = lines(k25.export("torchspec")[0])
    assert rows["brief"] == {
        "id": "d/brief:0:0",
        "conversations": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi, 2+2?"},
            {"role": "assistant", "content": "<think>I add: 4</think>4"},
        ],
    }
    assert "cut" not in rows and rows["late"]["conversations"][-1]["content"] == "<think>Done.</think>An answ"
    path, report = qwen.export("torchspec")
    assert lines(path)["emoji"]["conversations"][-1]["content"] == "<think>\nHm, héllo 😀\n</think>\n\nHello."
    assert not report.supervises_end and report.left_out["the format has no tool definitions"].rows == 1


def test_sharegpt_alternates_between_human_and_gpt(qwen: Made) -> None:
    path, report = qwen.export("sharegpt")
    rows = lines(path)
    assert list(rows) == ["bare", "emoji"]
    for row in rows.values():
        assert [turn["from"] for turn in row["conversations"]] == ["human", "gpt"]
        assert all(list(turn) == ["from", "value"] for turn in row["conversations"])
    left = {reason: one.rows for reason, one in report.left_out.items()}
    assert left == {"the format has no tools": 1, "the format has no system message": 1, CUT: 2}
    assert report.reasoning_share == 1


def test_two_questions_in_a_row_do_not_alternate(tmp_path: Path) -> None:
    made = Made(tmp_path, qwen3_model(real("qwen3")))
    made.add("a", [user("One"), user("Two")], "<think>\nHm\n</think>\n\nYes.<|im_end|>")
    assert set(made.export("sharegpt")[1].left_out) == {"user and assistant do not alternate"}


# --- what is lost ------------------------------------------------------------------------------------------------


def test_a_template_that_drops_reasoning_is_refused_unless_loss_is_allowed(k25: Made) -> None:
    with pytest.raises(EyasError) as error:
        k25.export("specforge")
    said = str(error.value)
    assert said.startswith("exports.specforge: the chat template of moonshotai/Kimi-K2.5 drops the reasoning")
    assert "export `tokens` instead, or set allow_lossy" in said
    path, report = k25.export("specforge", allow_lossy=True)
    assert (report.reasoning_rows, report.reasoning_kept, report.reasoning_share) == (2, 0, 0)
    # "4" stands in question, reasoning and answer: that the answer is there proves nothing.
    assert report.same_ids == 0 and read_report(path) == report


def test_nothing_is_left_of_an_export_that_is_refused(k25: Made) -> None:
    before = sorted(k25.folder.rglob("*"))
    with pytest.raises(EyasError):
        k25.export("specforge")
    assert {path.suffix for path in set(k25.folder.rglob("*")) - set(before)} <= {".parquet", ""}


def test_text_that_does_not_come_back_as_the_same_ids_is_counted_and_not_mended(tmp_path: Path) -> None:
    made = Made(tmp_path, qwen3_model(real("qwen3")))
    encode = made.target.tokenizer.encode
    start, end = encode("<think>\nHm\n</think>\n\n", control=True), encode("<|im_end|>", control=True)
    halves = [*encode("he", control=False), *encode("llo", control=False)]
    assert halves != encode("hello", control=False)
    made.add("halves", [system("s"), user("u")], [*start, *halves, *end])
    # Spelt in ordinary tokens, which a trainer's tokenizer takes for the delimiter itself.
    made.add("spelt", [system("s"), user("u")], [*start, *encode("Use </think> so.", control=False), *end])
    for name, options in (("specforge_text", {}), ("specforge", {}), ("modelopt", {}), ("torchspec", {})):
        path, report = made.export(name, **options)
        assert report.differ_for == {"the same text has other ids": 2}, name
        assert (report.rows, report.reasoning_share) == (2, 1)
    assert lines(path)["halves"]["conversations"][-1]["content"].endswith("hello")
    assert made.export("tokens")[1].same_ids == 2


def test_a_prefill_and_a_date_are_in_the_template_for_modelopt(tmp_path: Path) -> None:
    place = tmp_path / "tokenizer"
    shutil.copytree(real("qwen3"), place)
    own = (
        "{% macro turn(m) %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endmacro %}"
        "Today is {{ strftime_now('%d') }}, {{ mood }}.\n"
        "{% for message in messages %}{{ turn(message) }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% generation %}{% endgeneration %}{% endif %}\n"
    )
    (place / "chat_template.jinja").write_text(own)
    tags = {"name": "tags", "opened_by_prompt": True, "prefill": "<think>\n", "single_token": True}
    options = {"strftime_now": "Monday", "mood": 'it\'s "fine"'}
    model = ModelConfig(id="m", tokenizer=str(place), reasoning=tags, template_options=options)
    made = Made(tmp_path, model)
    made.add("a", [user("u")], "Hm</think>Yes.<|im_end|>")
    path, report = made.export("modelopt")
    assert report.same_ids == report.same_mask == 1
    assert (path / "chat_template.jinja").read_text().count("{% generation %}") == 1


# --- conversations that go on ------------------------------------------------------------------------------------

LATER = {"talk:2:0", "talk:1:1", "call:1:0", "call:2:0"}


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return add_talks(Made(tmp_path_factory.mktemp("talks"), qwen3_model(real("qwen3"))))


def by_id(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The conversations of a file, by key, turn and sample."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        (row.get("id") or row["conversation_id"])[2:]: row.get("messages") or row["conversations"]
        for row in rows
    }


# An answer that is cut in its reasoning, and a conversation with tools, do not go into every format.
LEFT_OUT: dict[str, set[str]] = {
    "specforge": {"talk:1:1"},
    "modelopt": {"talk:1:1"},
    "torchspec": {"talk:1:1", "call:0:0", "call:1:0", "call:2:0"},
    "sharegpt": {"talk:1:1", "call:0:0", "call:1:0", "call:2:0"},
    "specforge_text": set(),
    "tokens": set(),
    "speculators": set(),
}


@pytest.mark.parametrize("name", FORMATS)
def test_later_turns_are_told_with_the_targets_own_answers_and_come_back_as_their_own_ids(
    talks: Made, name: str
) -> None:
    options = {"system_prompt": ""} if name == "specforge" else {}
    path, report = talks.export(name, **options)
    expected = {row.id[2:] for row in talks.rows} - LEFT_OUT[name]
    assert report.rows == report.same_ids == len(expected) and not report.differ_for
    assert report.later_turns == len(LATER & expected)
    assert report.reasoning_kept == report.reasoning_rows > 0
    assert report.same_mask in (None, report.rows)
    if name not in ("tokens", "speculators", "specforge_text"):
        assert set(by_id(path / "conversations.jsonl" if path.is_dir() else path)) == expected


def test_history_is_as_each_trainer_reads_it(talks: Made) -> None:
    rows = by_id(talks.export("specforge", system_prompt="")[0])
    answer = {"role": "assistant", "content": "\n\nThree.", "reasoning_content": "\nC\n"}
    history = [
        {"role": "user", "content": "One?"},
        # Of an answer that the checks rejected, too: the model had it before it.
        {"role": "assistant", "content": "One.", "reasoning_content": "A"},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Two.", "reasoning_content": "B"},
        {"role": "user", "content": "Three?"},
    ]
    assert rows["talk:2:0"] == [*history, answer]
    assert [message.get("tool_calls") for message in rows["call:1:0"]][2:3] == [
        '[{"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]'
    ]
    assert [m["role"] for m in rows["call:2:0"]] == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]  # fmt: skip
    rows = by_id(talks.export("modelopt")[0] / "conversations.jsonl")
    assert [m.get("reasoning_content") for m in rows["talk:2:0"]] == [None, "A", None, "B", None, "\nC\n"]
    assert [message["role"] for message in rows["call:2:0"]] == ["prompt", "assistant"]
    assert by_id(talks.export("torchspec")[0])["talk:2:0"] == [
        *({key: m[key] for key in ("role", "content")} for m in history),
        {"role": "assistant", "content": "<think>\nC\n</think>\n\nThree."},
    ]
    assert by_id(talks.export("sharegpt")[0])["talk:2:0"][1:3] == [
        {"from": "gpt", "value": "One."},
        {"from": "human", "value": "Two?"},
    ]


def test_the_report_says_which_answers_a_trainer_learns(talks: Made, k25: Made) -> None:
    learns = {name: talks.export(name)[1].learns for name in FORMATS}
    assert learns == {
        "tokens": "the last",
        "speculators": "the last",
        "modelopt": "the last",
        "specforge": "the last if train_only_last_turn is set, else every one",
        "specforge_text": "the last if train_only_last_turn is set, else every one",
        "torchspec": "the last if last_turn_loss_only is set, else every one",
        "sharegpt": "every one",
    }
    # It finds answers by ids there.
    assert k25.export("modelopt")[1].learns == "every one"


def test_kimi_has_an_empty_block_before_an_earlier_answer(tmp_path: Path) -> None:
    made = Made(tmp_path, kimi_model(make_folder(tmp_path / "tokenizer")))
    goes_on = Turn(calls=[], messages=[user("And 3+3?")])
    first = made.add("talk", [user("2+2?")], "I add.</think>4<|im_end|>", turns=(goes_on,))
    history = made.asked(first).removesuffix("<think>")
    asked = f"{history}<think></think>4<|im_end|><|im_user|>user<|im_middle|>And 3+3?<|im_end|>{ANSWERS}"
    made.answer("talk", 1, asked, "Again.</think>6<|im_end|>")
    path, report = made.export("torchspec")
    assert report.same_ids == report.rows and report.later_turns == 1 and report.reasoning_share == 1
    assert by_id(path)["talk:1:0"][1:] == [
        {"role": "assistant", "content": "<think></think>4"},
        {"role": "user", "content": "And 3+3?"},
        {"role": "assistant", "content": "<think>Again.</think>6"},
    ]
    _, report = made.export("modelopt")
    assert (report.same_ids_share, report.reasoning_share, report.same_mask) == (1, 1, 0)


def test_modelopt_gets_tools_that_only_a_tokenizers_code_can_spell(tmp_path: Path) -> None:
    """Kimi's template has them from its Python code, which Model-Optimizer gives no tools."""
    made = Made(tmp_path, kimi_model(make_folder(tmp_path / "tokenizer")))
    section = "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    section += '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>'
    row = made.add("tool", [user("Rain?")], f"I ask.</think>{section}<|im_end|>", tools=(TOOL,))
    assert "tool_declare" in made.asked(row) and "weather" in made.asked(row)
    report = made.export("modelopt")[1]
    assert (report.rows, report.same_ids, report.reasoning_kept) == (1, 1, 1)
    left = made.export("torchspec")[1].left_out
    assert set(left) == {"the format has no tool definitions"}


def test_words_of_a_question_do_not_stand_in_for_reasoning_that_is_lost(tmp_path: Path) -> None:
    made = Made(tmp_path, kimi_model(make_folder(tmp_path / "tokenizer")))
    goes_on = Turn(calls=[], messages=[user("I add.")])
    first = made.add("talk", [user("I add.")], "So.</think>4<|im_end|>", turns=(goes_on,))
    history = made.asked(first).removesuffix("<think>")
    asked = f"{history}<think></think>4<|im_end|><|im_user|>user<|im_middle|>I add.<|im_end|>{ANSWERS}"
    made.answer("talk", 1, asked, "I add.</think>6<|im_end|>")
    report = made.export("specforge", allow_lossy=True)[1]
    assert (report.rows, report.reasoning_rows, report.reasoning_kept) == (2, 2, 0)


ANSWERS = "<|im_assistant|>assistant<|im_middle|><think>"


def test_a_later_turn_whose_messages_do_not_give_its_prompt_is_counted(tmp_path: Path) -> None:
    made = add_talks(Made(tmp_path, qwen3_model(real("qwen3"))))
    whole = made.export("specforge")[1]
    # The first answer of one sample is another than what the later turn was asked with.
    first = next(one for one in made.responses if (one.key, one.turn, one.sample) == ("talk", 0, 0))
    at = made.responses.index(first)
    made.responses[at] = msgspec.structs.replace(first, text=first.text.replace("One.", "Uno."))
    for name in ("specforge", "modelopt", "torchspec", "sharegpt"):
        report = made.export(name)[1]
        assert report.left_out["its messages do not give its prompt again"].rows == 1, name
    assert made.export("specforge")[1].rows == whole.rows - 1
    assert made.export("specforge_text")[1].rows == made.export("tokens")[1].rows == len(made.rows)


def test_responses_of_other_prompts_are_an_error_that_names_both_files(tmp_path: Path) -> None:
    made = add_talks(Made(tmp_path, qwen3_model(real("qwen3"))))
    made.responses.append(msgspec.structs.replace(made.responses[0], key="nobody"))
    with pytest.raises(
        EyasError,
        match=r"responses\.jsonl\.zst: 'nobody' is not in .*prompts\.jsonl\.zst.*delete both and run",
    ):
        made.export("sharegpt")


def test_specforge_cuts_a_conversation_in_which_roles_do_not_follow_each_other(tmp_path: Path) -> None:
    made = Made(tmp_path, qwen3_model(real("qwen3")))
    messages = [system("Be brief."), user("Hi"), system("Briefer.")]
    made.add("a", messages, "<think>\nHm\n</think>\n\nYes.<|im_end|>")
    report = made.export("specforge")[1]
    assert report.differ_for == {"the trainer cuts the conversation where roles do not follow each other": 1}
    assert (report.reasoning_rows, report.reasoning_kept) == (1, 0)


# --- all ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_equal_rows_give_equal_bytes_and_a_report_beside_them(qwen: Made, name: str) -> None:
    (one, report), (two, again) = qwen.export(name), qwen.export(name)
    files = [[one], [two]] if one.is_file() else [sorted(path.iterdir()) for path in (one, two)]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    assert report == again == read_report(one) and report.read
    told = sum(left.rows for left in report.left_out.values())
    assert report.rows + told == len(qwen.rows)
    assert report.same_ids + sum(report.differ_for.values()) == report.rows


@pytest.mark.parametrize("name", FORMATS)
def test_an_empty_table_is_an_empty_export(tmp_path: Path, name: str) -> None:
    made = Made(tmp_path, qwen3_model(real("qwen3")))
    _, report = made.export(name)
    assert (report.rows, report.same_ids_share, report.reasoning_share) == (0, None, None)


def test_every_option_is_described_and_every_exporter_has_a_page() -> None:
    page = (Path(__file__).parent.parent / "docs" / "exporters.md").read_text()
    for found in registry().all():
        if found.kind == "exporter":
            assert f"`{found.cls.name}`" in page
            for option in msgspec.structs.fields(found.cls.Options):
                assert f"`{option.name}" in page


def test_a_prompt_that_is_missing_is_named(tmp_path: Path) -> None:
    made = Made(tmp_path, qwen3_model(real("qwen3")))
    made.add("a", [user("u")], "<think>\nHm\n</think>\n\nYes.<|im_end|>")
    made.prompts.clear()
    made.responses.clear()
    with pytest.raises(
        EyasError, match=r"results/d/prompts\.jsonl\.zst: has no prompt 'd/a'.*delete it and run"
    ):
        made.export("specforge")


def test_modelopt_hands_its_template_messages_without_nulls(tmp_path: Path) -> None:
    """Many a template asks whether a field is there, and writes "None" for one that is null."""
    place = tmp_path / "tokenizer"
    shutil.copytree(real("qwen3"), place)
    own = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.reasoning_content is defined %}[{{ message.reasoning_content }}]{% endif %}"
        "{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (place / "chat_template.jinja").write_text(own)
    made = Made(tmp_path, ModelConfig(id="m", tokenizer=str(place), reasoning={"name": "qwen3"}))
    goes_on = Turn(calls=[], messages=[user("Two?")])
    first = made.add("talk", [user("One?")], "<think>\nA\n</think>\n\nOne.<|im_end|>", turns=(goes_on,))
    asked = f"{made.asked(first)}[A]One.<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    made.answer("talk", 1, asked, "<think>\nB\n</think>\n\nTwo.<|im_end|>")
    report = made.export("modelopt")[1]
    assert report.same_ids == report.same_mask == report.later_turns + 1 == 2


def test_torchspec_has_the_arguments_of_earlier_calls_as_text(tmp_path: Path) -> None:
    """A record may call tools that it does not define."""
    made = Made(tmp_path, qwen3_model(real("qwen3")))
    calls = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]
    result = Message(role="tool", content="It rains.", tool_call_id="c")
    on = Turn(calls=calls, messages=[result, user("So?")])
    first = made.add("talk", [user("Rain?")], CALL, turns=(on,))
    said = CALL.removesuffix("<|im_end|>").partition("</think>\n\n")[2]
    told = "<|im_end|>\n<|im_start|>user\n<tool_response>\nIt rains.\n</tool_response><|im_end|>\n<|im_start|>user\nSo?"
    asked = f"{made.asked(first)}{said}{told}<|im_end|>\n<|im_start|>assistant\n"
    made.answer("talk", 1, asked, "<think>\nWet.\n</think>\n\nYes.<|im_end|>")
    path, report = made.export("torchspec")
    assert report.same_ids == report.rows == 2
    (call,) = by_id(path)["talk:1:0"][1]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert made.export("modelopt")[1].same_ids == 2
