"""The public datasets as they really are: a file of each, in its own format, with every quirk that facts/datasets.md lists.

Contents are invented. Each row stands with the prompt that it gives, as `role: text` lines, or with the reason why it gives none.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pyarrow.parquet
import pytest

from eyas.config import FilterConfig, PromptsSettings
from eyas.plugins import Source
from eyas.prompts import prompts
from eyas.recordfile import read_records
from eyas.records import Prompt
from eyas.sources.glaive import Glaive
from eyas.sources.magicoder import Magicoder
from eyas.sources.mixture_of_thoughts import MixtureOfThoughts
from eyas.sources.opencodeinstruct import OpenCodeInstruct
from eyas.sources.openthoughts import OpenThoughts
from eyas.sources.sharegpt import ShareGPT
from eyas.sources.swe_trajectories import SweTrajectories
from eyas.sources.ultrachat import UltraChat

Row = dict[str, Any]
Case = tuple[Row, str | list[str]]
OLD = "OLD ANSWER"  # stands in every recorded answer, and must stand in no prompt
START = "conversation starts with an assistant or tool turn"
NO_USER = "conversation has no user turn"
EMPTY = "first user turn is empty"
NOTHING = "conversation is empty"
UNKNOWN = "a turn has an unknown role"
NO_TEXT = "a turn has no text"
NOT_TEXT = "a turn has content that is not text"
NO_UNICODE = "text is not valid Unicode"


# --- glaive ------------------------------------------------------------------------------------------------------

HELPFUL = "You are a helpful assistant with access to the following functions. Use them if required"
ALONE = "You are a helpful assistant, with no access to external functions."
TIDE = '{\n    "name": "get_tide",\n    "description": "Get tide level, \'now\'",\n    "parameters": {}\n}'
MOON = '{"name": "moon_phase", "description": "Phase {of} the moon", "parameters": {"type": "object"}}'
END = "<|endoftext|>"
CALL = "<functioncall> "


def glaive() -> list[Case]:
    def row(chat: str, functions: str | None = None) -> Row:
        system = f"SYSTEM: {HELPFUL} -\n{functions}\n" if functions else f"SYSTEM: {ALONE}\n"
        return {"system": system, "chat": chat}

    def with_call(written: str) -> Row:
        chat = f"USER: Tide?\n\n\nASSISTANT: {written} {END}\n\n\nFUNCTION RESPONSE: 3.2\n\n\nASSISTANT: {OLD} {END}\n\n\n"
        return row(chat, TIDE)

    no_json = f"USER: Tide?\n\n\nASSISTANT: {CALL}{{}} {END}\n\n\nFUNCTION RESPONSE: Tide is {OLD}, rising\n\n\nASSISTANT: {OLD} {END}\n\n\n"
    call = '{"name": "get_tide", "arguments": \'{"port": "St. Ives"}\'}'
    apostrophes = r"""{"name": "get_tide", "arguments": '{"port": "King\'s Lynn, O'Neill's \"quay\""}'}"""
    tide = [f"system: {HELPFUL}", "user: Tide?"]
    plain = [f"system: {ALONE}", "user: Why?"]
    dialogue = "Write lines.\nUSER: hello\nASSISTANT: hi\n\nIn that form, USER: and all."
    return [
        (row(f"USER: Why?\n\nASSISTANT: {OLD} {END}\n\n"), plain),
        (
            row(f"USER: Why?\n\n\nASSISTANT: {OLD} {END}\n\n\nUSER: And?\n\n\nASSISTANT: {OLD} {END}\n\n\n"),
            plain,
        ),
        (with_call(CALL + call), tide),
        (with_call(CALL + apostrophes), tide),
        (with_call(CALL + call + "}"), tide),  # stray brace
        (with_call(f"{OLD}, wait. {CALL}{call}"), tide),  # text before the call
        (with_call(f"{OLD} ASSISTANT: {CALL}{call}"), tide),  # two turns merged
        (with_call(f"{CALL}get_tide(St. Ives)"), tide),  # no JSON at all
        (
            row(f"USER: Tide?\n\n\nASSISTANT: {OLD} {END}\n\n\n", TIDE + "\n\n" + MOON),
            tide,
        ),  # two functions in a row
        (row(f"USER: Tide?\n\n\nASSISTANT: {OLD} {END}\n\n\n", f"{TIDE},\n{MOON}"), tide),
        (row(f"USER: {dialogue}\n\nASSISTANT: {OLD} {END}\n\n"), [f"system: {ALONE}", f"user: {dialogue}"]),
        (row(f"USER: Why?\n\nASSISTANT: {OLD}\n\nUSER: {OLD}\n\nASSISTANT: {OLD} {END}\n\n"), plain),
        (row(f"USER: Why?{END}\n\nASSISTANT: {OLD} {END}\n\n"), plain),
        (row(f"USER: \n\n\nASSISTANT: {OLD} {END}\n\n"), EMPTY),
        (row(f"ASSISTANT: {OLD} {END}\n\nUSER: Why?\n\nASSISTANT: {OLD} {END}"), START),
        (row("\n\n"), NO_USER),
        (row(f"Why?\n\nASSISTANT: {OLD}"), "chat does not start with a turn mark"),
        (
            row(f"USER: Tide?\n\n\nASSISTANT: {OLD}", "{'name': get_tide}"),
            "function definitions are not JSON",
        ),
        (row(no_json, TIDE), tide),  # what the function gives is no JSON
    ]


# --- flat columns ------------------------------------------------------------------------------------------------


def opencodeinstruct() -> list[Case]:
    def row(asked: str, **other: str) -> Row:
        return {
            "id": f"id of {asked}",
            "input": asked,
            "output": f"```python\n# {OLD}\n```",
            "domain": "generic",
            "generation_algorithm": "self-instruct",
            "llm_judgement": '{"requirement_conformance": {"score": 5}}',
            "unit_tests": '["assert f(1) == 2"]',
            "tests_execution_status": '["pass"]',
            "average_test_score": "1",
        } | other

    below, unknown = "average_test_score is below min_score", "average_test_score is no number"
    scores = {
        "0.9": None,
        "0.10": below,
        "1.0": None,
        "9e-1": None,
        "0": below,
        "": unknown,
        "nan": below,
        "n/a": unknown,
    }
    return [
        (row("Write f."), ["user: Write f."]),
        (row("Write f.", id="id of Write f."), ["user: Write f."]),  # the same id twice
        *(
            (row(f"Write f{n}.", average_test_score=score), reason or [f"user: Write f{n}."])
            for n, (score, reason) in enumerate(scores.items())
        ),
        (row("  \n"), EMPTY),
        (
            row("Fix:\n```python\nprint('a\u2028b')\n```\n"),
            ["user: Fix:\n```python\nprint('a\u2028b')\n```\n"],
        ),
        (row(" Write g.\n"), ["user:  Write g.\n"]),
        (row("Напиши f."), ["user: Напиши f."]),
        (row("Write h.", domain="algorithmic", generation_algorithm="evol-instruct"), ["user: Write h."]),
    ]


def magicoder_oss() -> list[Case]:
    def row(n: int, problem: str, lang: str = "python") -> Row:
        return {
            "lang": lang,
            "raw_index": 41231 * n,  # neither contiguous nor unique
            "index": 7,
            "seed": f"def foo(a):  # {OLD}\n",
            "openai_fingerprint": "fp_eeff13170a",
            "problem": problem,
            "solution": f"```{lang}\n{OLD}\n```",
        }

    languages = ["python", "cpp", "csharp", "java", "php", "rust", "shell", "swift", "typescript"]
    return [
        *(
            (row(n, f"Implement a queue in {lang}.", lang), [f"user: Implement a queue in {lang}."])
            for n, lang in enumerate(languages)
        ),
        (row(1, "Implement."), ["user: Implement."]),
        (row(1, "Implement."), ["user: Implement."]),  # an identical row is a question of its own
        (
            row(2, "Complete:\n```python\ndef f(): ...\n```"),
            ["user: Complete:\n```python\ndef f(): ...\n```"],
        ),
        (row(3, "\n"), EMPTY),
        (row(4, "Übersetze ‘x’."), ["user: Übersetze ‘x’."]),
        (row(5, "Print \\u2028 and \u2028."), ["user: Print \\u2028 and \u2028."]),
    ]


def magicoder_evol() -> list[Case]:
    def row(asked: str) -> Row:
        return {"instruction": asked, "response": f"```java\n{OLD}\n```"}

    kept = [
        "Rewrite the following so that it streams:\n```java\nint x = 1;\n```",
        "用 Python 写一个队列。",
        "Écris une boucle.\r\nMerci.",
        "Напиши цикл.",
        "Assistant: is this a role? USER: no.",
        'A "quoted" \\ backslashed task',
        "Return <think> as text.",
        *(f"Write the function f{n} with {n} arguments." for n in range(6)),
    ]
    same = [(row("Twice?"), ["user: Twice?"])] * 2
    return [*((row(text), [f"user: {text}"]) for text in kept), *same, (row(""), EMPTY)]


# --- lists of turns ----------------------------------------------------------------------------------------------


def mixture_of_thoughts() -> list[Case]:
    def row(*contents: str, first: str = "user") -> Row:
        roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
        turns = [{"content": text, "role": roles[n % 2]} for n, text in enumerate(contents)]
        return {"messages": turns, "num_tokens": 3121, "source": "open-r1/OpenR1-Math-220k"}

    answer = f"<think>\n{OLD}\n</think>\n\nThe answer is \\boxed{{7}}. {OLD}"
    system = {"content": "Think hard.", "role": "system"}
    nested = row("Why?", answer)
    nested["messages"].insert(0, system)
    kept = [
        "Solve $x^2 = 49$.",
        "¿Por qué?",
        "What does <think> mean?",
        "a\u2028b",
        *(f"What is {n} + {n}?" for n in range(6)),
    ]
    return [
        *((row(text, answer), [f"user: {text}"]) for text in kept),
        (row("Why?", answer, "And?", answer), ["user: Why?"]),
        (row("Why?"), ["user: Why?"]),
        (nested, ["system: Think hard.", "user: Why?"]),
        (row(answer, "Why?", first="assistant"), START),
        (row(" ", answer), EMPTY),
        (row(), NOTHING),
    ]


FOREIGN = "Your role as an assistant involves … <|begin_of_thought|> {thought} <|end_of_thought|> <|begin_of_solution|> …"
THOUGHT = f"<|begin_of_thought|>\n\n{OLD}\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\n{OLD}\n\n<|end_of_solution|>"


def turns_of(*turns: tuple[str, str | None]) -> list[Row]:
    return [{"from": name, "value": value} for name, value in turns]


def openthoughts_114k() -> list[Case]:
    def row(*turns: tuple[str, str | None]) -> Row:
        return {"system": FOREIGN, "conversations": turns_of(*turns)}

    kept = [
        "Return your final response within \\boxed{}. What is 2 + 3?",
        "Generate an executable Python function:\n```python\ndef f(): ...\n```",
        "Which gas is it?\u2028A) N₂",
        "Repeat <|begin_of_thought|>",
        *(f"Return your final response within \\boxed{{}}. What is {n}²?" for n in range(7)),
    ]
    return [
        *((row(("user", text), ("assistant", THOUGHT)), [f"user: {text}"]) for text in kept),
        (row(("user", "\n"), ("assistant", THOUGHT)), EMPTY),
        (row(("assistant", THOUGHT)), START),
        (row(("narrator", "Once"), ("assistant", THOUGHT)), UNKNOWN),
        (row(), NOTHING),
    ]


def openthoughts_metadata() -> list[Case]:
    def row(problem: str | None, code: str | None = None, domain: str = "math") -> Row:
        return {
            "problem": problem,
            "deepseek_reasoning": OLD,
            "deepseek_solution": OLD,
            "ground_truth_solution": OLD,
            "domain": domain,
            "source": "numina_math",
            "test_cases": None if code is None else OLD,
            "starter_code": code,
        }

    kept = [
        "What is 2 + 3?",
        "Which gas is it?\u2028A) N₂",
        "Repeat <|begin_of_thought|>",
        "¿Por qué?",
        *(f"What is {n}²?" for n in range(6)),
    ]
    starter = "class Solution:\n    def f(self, x):\n        "
    unsolved = row("Unsolved?") | {"deepseek_solution": None}
    return [
        *((row(text), [f"user: {text}"]) for text in kept),
        (row("Sum them.", starter, "code"), [f"user: Sum them.\n\n{starter}"]),
        (row("Read stdin.", "", "code"), ["user: Read stdin."]),
        (unsolved, ["user: Unsolved?"]),
        (row("What is 2 + 3?"), ["user: What is 2 + 3?"]),  # again
        (row("\n"), EMPTY),
        (row(None), NO_TEXT),
    ]


def openthoughts3() -> list[Case]:
    def row(*turns: tuple[str, str | None], difficulty: int | None = 7) -> Row:
        return {"difficulty": difficulty, "source": "x", "domain": "math", "conversations": turns_of(*turns)}

    def sixteen(n: int) -> Row:
        """Each question stands sixteen times, with other answers."""
        return row(("human", "What is 6 × 7?"), ("gpt", f"<think>{OLD} {n}</think>{OLD}"))

    return [
        *((sixteen(n), ["user: What is 6 × 7?"]) for n in range(16)),
        (row(("human", "Why?"), ("assistant", OLD), difficulty=None), ["user: Why?"]),
        (row(("user", "How?"), ("assistant", OLD)), ["user: How?"]),
        (row(("human", None), ("gpt", OLD)), NO_TEXT),
        (row(("human", ""), ("gpt", OLD)), EMPTY),
    ]


def ultrachat() -> list[Case]:
    def row(*contents: str, prompt: str | None = None) -> Row:
        turns = [{"content": text, "role": ["user", "assistant"][n % 2]} for n, text in enumerate(contents)]
        asked = contents[0] if prompt is None and contents else prompt
        return {"prompt": asked, "prompt_id": f"sha of {asked}", "messages": turns}

    article = "Read this:\n\n" + "The lighthouse stood. " * 200 + "\n\nWhat stood?"
    return [
        (row("How do I prune roses?", OLD, "And in winter?", OLD), ["user: How do I prune roses?"]),
        (row("Why?", OLD, "Why so?"), ["user: Why?"]),  # *_gen ends with the user
        (row("How?"), ["user: How?"]),
        (row(article, OLD), [f"user: {article}"]),
        (row("Two\u2028lines", OLD), ["user: Two\u2028lines"]),
        (row("Why?", OLD, prompt="Why not?"), "prompt differs from the first message"),
        (row(" ", OLD), EMPTY),
        (row(prompt="Why?"), NOTHING),
        *((row(f"Name {n} trees.", OLD), [f"user: Name {n} trees."]) for n in range(7)),
    ]


def sharegpt() -> list[Case]:
    def row(piece: str, *turns: tuple[str, str | None], **side: Any) -> Row:
        return {"id": piece, "conversations": [turn | side for turn in turns_of(*turns)]}

    page = '<div class="markdown prose w-full break-words dark:prose-invert"><p>Hello</p></div>'
    return [
        (row("QWJhYvA_0", ("human", "Write a poem"), ("gpt", OLD)), ["user: Write a poem"]),
        (row("QWJhYvA_0", ("human", "Write a poem"), ("gpt", OLD)), ["user: Write a poem"]),  # pieces repeat
        (row("QWJhYvA_2", ("gpt", OLD), ("human", "thanks, now in French"), ("gpt", "")), START),
        (row("a_0", ("human", "Why?"), ("gpt", OLD), ("human", "And?")), ["user: Why?"]),
        (row("b_0", ("human", " \n\u3000"), ("gpt", OLD)), EMPTY),
        (row("c_0"), NOTHING),
        (
            row("d_0", ("system", "Be kind"), ("human", "Hi"), ("chatgpt", OLD)),
            ["system: Be kind", "user: Hi"],
        ),
        (row("e_0", ("user", "Hi"), ("bing", OLD)), ["user: Hi"]),
        (row("f_0", ("human", "Hi"), ("bard", OLD)), ["user: Hi"]),
        (row("g_0", ("human", "Hi"), ("narrator", OLD)), UNKNOWN),
        (
            row(
                "h_0",
                ("human", "Tide?"),
                ("function_call", '{"name": "tide"}'),
                ("observation", "3"),
                ("gpt", OLD),
            ),
            ["user: Tide?"],
        ),
        (row("i_0", ("human", "a\u2028b"), ("gpt", OLD), markdown=None), ["user: a\u2028b"]),
        (row("i_1", ("human", "a\u2028b"), ("gpt", OLD), markdown=OLD, text=OLD), ["user: a\u2028b"]),
        (row("i_2", ("user", "Hi"), ("assistant", OLD)), ["user: Hi"]),
        (row("j_0", ("human", page), ("gpt", OLD)), "a user turn is a saved page (HTML)"),
        (row("k_0", ("human", "Hi"), ("gpt", page + OLD)), ["user: Hi"]),
        (
            row("l_0", ("human", "pythonCopy code\nprint(1)"), ("gpt", OLD)),
            ["user: pythonCopy code\nprint(1)"],
        ),
        (row("m_0", ("human", "<div>Why?</div>"), ("gpt", OLD)), ["user: <div>Why?</div>"]),
        (row("n_0", ("human", "\ud83d"), ("gpt", OLD)), NO_UNICODE),
        (row("o_0", ("human", None), ("gpt", OLD)), NO_TEXT),
        (row("p_0", ("human", "One"), ("human", "Two"), ("gpt", OLD)), ["user: One", "user: Two"]),
        (row("q_0", ("tool", "x"), ("human", "Hi"), ("gpt", OLD)), START),
    ]


# --- trajectories ------------------------------------------------------------------------------------------------


def swe_nebius() -> list[Case]:
    def turn(role: str, text: str | None, system: str | None = None) -> Row:
        date = "01.01.2023" if system else None
        return {"cutoff_date": date, "mask": False, "role": role, "system_prompt": system, "text": text}

    def row(*trajectory: Row) -> Row:
        return {
            "instance_id": "acme__lib-12",  # the issue, not the row
            "model_name": "swe-agent-llama-70b",
            "target": False,
            "trajectory": list(trajectory),
            "exit_status": "submitted",
            "generated_patch": f"diff --git {OLD}",
            "eval_logs": OLD,
        }

    setting, ai = turn("system", None, "SETTING: You are …"), turn("ai", f"{OLD}\n```\nls\n```")
    kept = [f"We're currently solving the following issue: number {n}" for n in range(9)]
    return [
        *(
            (
                row(setting, turn("user", text), ai, turn("user", OLD), ai),
                ["system: SETTING: You are …", f"user: {text}"],
            )
            for text in kept
        ),
        (
            row(setting, turn("user", "A demonstration"), turn("user", "The issue"), ai),
            ["system: SETTING: You are …", "user: A demonstration", "user: The issue"],
        ),
        (row(turn("user", "Why?"), ai), ["user: Why?"]),
        (row(setting, ai, turn("user", "Why?")), START),
        (row(setting), NO_USER),
        (row(setting, turn("user", None), ai), NO_TEXT),
        (row(setting, turn("user", ""), ai), EMPTY),
        (row(setting, turn("critic", "no"), ai), UNKNOWN),
    ]


def swe_smith() -> list[Case]:
    def row(*turns: Row) -> Row:
        return {
            "messages": json.dumps(turns),
            "instance_id": "acme__lib.1234",
            "resolved": True,
            "model": "claude",
            "traj_id": "acme__lib.1234.x",  # not unique
            "patch": OLD,
        }

    def turn(role: str, content: Any, **more: Any) -> Row:
        return {"role": role, "content": content} | more

    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    system, ai = turn("system", "You are an agent"), turn("assistant", OLD, tool_calls=[call], agent="main")
    result = turn("tool", [{"type": "text", "text": OLD}], tool_call_ids=["c1"])
    asked = ["system: You are an agent", "user: Fix it"]
    parts = [{"type": "text", "text": "Fix "}, {"type": "text", "text": "it"}]
    image = [{"type": "text", "text": "Fix"}, {"type": "image_url", "image_url": {"url": "x"}}]
    return [
        (row(system, turn("user", "Fix it"), ai, result, ai), asked),
        (row(system, turn("user", parts), ai), asked),
        (row(system, turn("user", ["Fix ", "it"]), ai), asked),
        (
            row(turn("system", [{"type": "text", "text": "You are an agent"}]), turn("user", "Fix it"), ai),
            asked,
        ),
        (row(system, turn("user", "Fix it"), turn("assistant", None, tool_calls=[call]), result), asked),
        (row(system, turn("user", "Fix it"), turn("assistant", [{"type": "text", "text": OLD}])), asked),
        (row(system, turn("user", image), ai), NOT_TEXT),
        (row(system, turn("user", {"text": "Fix it"}), ai), NOT_TEXT),
        (row(system, turn("user", None), ai), NO_TEXT),
        (row(system, turn("user", []), ai), EMPTY),
        # `xml` and `ticks`: calls are text, what they print comes as the user's turn.
        (
            row(
                system,
                turn("user", "Fix it"),
                turn("assistant", f"{OLD}\n<function=bash>ls</function>"),
                turn("user", OLD),
            ),
            asked,
        ),
        (
            row(
                system,
                turn("user", "Fix it"),
                turn("assistant", f"DISCUSSION\n{OLD}\n```\nls\n```"),
                turn("user", OLD),
            ),
            asked,
        ),
        (row(system, ai), START),
        (row(), NOTHING),
        *(
            (
                row(system, turn("user", f"Fix\u2028{n}"), ai),
                ["system: You are an agent", f"user: Fix\u2028{n}"],
            )
            for n in range(4)
        ),
    ]


def swe_gym() -> list[Case]:
    tool = {
        "type": "function",
        "function": {"name": "bash", "parameters": {"properties": {"command": {"type": "string"}}}},
    }

    def row(*turns: Row, tools: list[Row] | None = None) -> Row:
        found = [tool] if tools is None else tools
        return {
            "instance_id": "acme__lib-1",
            "run_id": "r",
            "resolved": None,
            "messages": list(turns),
            "tools": found,
            "test_result": OLD,
        }

    # Parquet gives each turn the fields of all: here every one is spelt out, null where a turn has it not.
    def turn(role: str, content: str | None, **more: Any) -> Row:
        every = dict.fromkeys(("name", "function_call", "tool_call_id", "tool_calls"))
        return {"role": role, "content": content} | every | more

    call = {
        "id": "c1",
        "type": "function",
        "index": None,
        "function": {"name": "bash", "arguments": '{"command": "ls"}'},
    }
    legacy = {"name": "bash", "arguments": '{"command": "ls"}'}
    system, user = turn("system", "You are an agent"), turn("user", "Fix it")
    ai, result = turn("assistant", OLD, tool_calls=[call]), turn("tool", OLD, name="bash", tool_call_id="c1")
    asked = ["system: You are an agent", "user: Fix it"]
    return [
        (row(system, user, ai, result, ai), asked),
        (row(system, user, turn("assistant", None, tool_calls=[call]), result), asked),
        (
            row(
                system,
                user,
                turn("assistant", None, function_call=legacy),
                turn("function", OLD, name="bash"),
            ),
            asked,
        ),
        (row(system, user, ai, tools=[]), asked),
        (row(user, ai), ["user: Fix it"]),
        (row(system, turn("user", None), ai), NO_TEXT),
        (row(system, turn("user", " "), ai), EMPTY),
        (row(system, result, user), START),
        (row(system), NO_USER),
        (row(), NOTHING),
        *(
            (row(system, turn("user", f"Fix {n}"), ai), ["system: You are an agent", f"user: Fix {n}"])
            for n in range(5)
        ),
    ]


# --- the files ---------------------------------------------------------------------------------------------------


def lines(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def array(path: Path, rows: list[Row]) -> None:
    # One of ShareGPT's rows has half a surrogate pair, which only an escape can spell.
    path.write_text(json.dumps(rows, indent=2), encoding="utf-8")


def parquet(path: Path, rows: list[Row]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@dataclass(frozen=True)
class Dataset:
    """A dataset: its file, its source with options, its rows."""

    file: str
    write: Callable[[Path, list[Row]], None]
    source: type[Source]
    cases: Callable[[], list[Case]]
    options: Row = field(default_factory=dict)


DATASETS = [
    Dataset("glaive-function-calling-v2.json", array, Glaive, glaive),
    Dataset("train-00000-of-00050.parquet", parquet, OpenCodeInstruct, opencodeinstruct, {"min_score": 0.9}),
    Dataset("data-oss_instruct-decontaminated.jsonl", lines, Magicoder, magicoder_oss),
    Dataset("data-evol_instruct-decontaminated.jsonl", lines, Magicoder, magicoder_evol),
    Dataset("all.parquet", parquet, MixtureOfThoughts, mixture_of_thoughts),
    Dataset("openthoughts-114k.parquet", parquet, OpenThoughts, openthoughts_114k),
    Dataset("openthoughts-114k-metadata.parquet", parquet, OpenThoughts, openthoughts_metadata),
    Dataset("openthoughts3.parquet", parquet, OpenThoughts, openthoughts3),
    Dataset("train_sft.parquet", parquet, UltraChat, ultrachat),
    Dataset("ShareGPT_V3_unfiltered_cleaned_split.json", array, ShareGPT, sharegpt),
    Dataset("swe-agent.parquet", parquet, SweTrajectories, swe_nebius),
    Dataset("tool.parquet", parquet, SweTrajectories, swe_smith),
    Dataset("train.raw.parquet", parquet, SweTrajectories, swe_gym),
]


def told(prompt: Prompt) -> list[str]:
    return [f"{message.role}: {message.content}" for message in prompt.messages]


def run(
    dataset: Dataset, folder: Path, turns: Literal["first", "all"] = "first", **wanted: Any
) -> tuple[dict[int, Prompt], dict[str, int]]:
    """The prompts by row number, and how many rows were skipped by reason."""
    file = folder / dataset.file
    dataset.write(file, [row for row, _ in dataset.cases()])
    usual: dict[str, Any] = {"filter": FilterConfig(), "duplicates": "keep", "near_duplicates": None}
    settings = PromptsSettings(
        dataset="demo",
        source={"name": dataset.source.name},
        revision=None,
        rows=None,
        turns=turns,
        decontaminate=None,
        evaluation_sets={},
        seed=0,
        **(usual | wanted),
    )
    source = dataset.source(dataset.source.Options(**dataset.options))
    out = folder / "out" / "prompts.jsonl.zst"
    report = prompts(settings, [file], [dataset.file], source, out, folder / "out" / "prompts.json")
    return {prompt.origin.row: prompt for prompt in read_records(out, Prompt)}, report.skipped


@pytest.mark.parametrize("dataset", DATASETS, ids=lambda dataset: dataset.cases.__name__)
def test_every_quirk_gives_its_prompt_or_its_reason(tmp_path: Path, dataset: Dataset) -> None:
    cases = dataset.cases()
    assert len(cases) >= 15
    found, skipped = run(dataset, tmp_path)
    for number, (row, expected) in enumerate(cases, start=1):
        if isinstance(expected, list):
            assert number in found, row
            assert told(found[number]) == expected, row
        else:
            assert number not in found, row
    assert skipped == Counter(expected for _, expected in cases if isinstance(expected, str))
    assert len({prompt.key for prompt in found.values()}) == len(found), "keys are unique"


@pytest.mark.parametrize("turns", ["first", "all"])
@pytest.mark.parametrize("dataset", DATASETS, ids=lambda dataset: dataset.cases.__name__)
def test_no_recorded_answer_is_asked(
    tmp_path: Path, dataset: Dataset, turns: Literal["first", "all"]
) -> None:
    found, _ = run(dataset, tmp_path, turns)
    for prompt in found.values():
        later = [message for turn in prompt.turns for message in turn.messages]
        assert not any(message.role == "assistant" for message in [*prompt.messages, *later])
        # What an answer's commands printed is asked of nobody but who gives the same commands.
        assert not any(OLD in message.content for message in later if message.role != "tool")
        opening = " ".join(message.content for message in prompt.messages)
        assert not any(mark in opening for mark in (OLD, "<|endoftext|>", "<functioncall>", "{thought}"))


def test_glaive_functions_of_every_spelling_become_tools(tmp_path: Path) -> None:
    found, _ = run(DATASETS[0], tmp_path)
    assert [len(found[number].tools) for number in (1, 3, 9, 10)] == [0, 1, 2, 2]
    assert found[9].tools[0]["function"]["description"] == "Get tide level, 'now'"


def test_swe_gym_tools_have_no_nulls_and_calls_keep_their_ids(tmp_path: Path) -> None:
    found, _ = run(DATASETS[-1], tmp_path, "all")
    assert found[1].tools[0]["function"]["parameters"] == {"properties": {"command": {"type": "string"}}}
    ((turn),) = found[1].turns
    assert [(call["id"], call["function"]["arguments"]) for call in turn.calls] == [
        ("c1", '{"command": "ls"}')
    ]
    assert [message.tool_call_id for message in turn.messages] == ["c1"]


def test_swe_smith_results_know_their_calls_by_a_list_of_one_id(tmp_path: Path) -> None:
    found, _ = run(DATASETS[-2], tmp_path, "all")
    ((turn),) = found[1].turns
    assert [call["id"] for call in turn.calls] == ["c1"]
    assert [(message.role, message.tool_call_id) for message in turn.messages] == [("tool", "c1")]


def test_a_function_result_that_is_no_json_is_told_as_it_is(tmp_path: Path) -> None:
    found, _ = run(DATASETS[0], tmp_path, "all")
    (number,) = [at for at, (row, _) in enumerate(glaive(), start=1) if "rising" in row["chat"]]
    assert [message.content for message in found[number].turns[0].messages] == [f"Tide is {OLD}, rising"]


def test_openthoughts3_asks_a_question_once_if_duplicates_are_dropped(tmp_path: Path) -> None:
    found, skipped = run(DATASETS[7], tmp_path, duplicates="drop")
    assert sorted(map(told, found.values())) == [["user: How?"], ["user: What is 6 × 7?"], ["user: Why?"]]
    assert skipped["exact duplicate of an earlier prompt"] == 15
