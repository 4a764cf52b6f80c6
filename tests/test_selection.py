"""Filters, near duplicates, overlap with evaluation sets: what is alike and what is not, against brute force."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from typing import Any

import pytest
from helpers import prompt as prompt_of
from msgspec.structs import replace

from eyas.config import DecontaminateConfig, FilterConfig, NearDuplicatesConfig
from eyas.records import Message, Prompt
from eyas.selection import EvaluationSets, NearDuplicates, ngrams, said, sameness, script_share, unfit, words


def asking(text: str, system: str = "", tools: list[dict[str, Any]] | None = None) -> Prompt:
    before = [Message(role="system", content=system)] if system else []
    messages = [*before, Message(role="user", content=text)]
    return replace(prompt_of("k", text), messages=messages, tools=tools or [])


# --- filters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "scripts", "share"),
    [
        ("Plain English", ["Latin"], 1.0),
        ("Größe, naïve", ["Latin"], 1.0),
        ("мир and", ["Latin"], 0.5),
        ("мир and", ["Cyrillic", "Latin"], 1.0),
        ("水は水", ["Han"], 2 / 3),
        ("αβγ", ["Latin"], 0.0),
        ("2 + 2 = 4?", ["Latin"], 1.0),
        ("", ["Latin"], 1.0),
    ],
)
def test_script_share_counts_letters(text, scripts, share):
    assert script_share(text, scripts) == pytest.approx(share)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (FilterConfig(), None),
        (FilterConfig(min_characters=5, max_characters=5), None),
        (FilterConfig(min_characters=6), "shorter than min_characters"),
        (FilterConfig(max_characters=4), "longer than max_characters"),
        (FilterConfig(scripts=["Latin"], min_script_share=0.75), None),
        (FilterConfig(scripts=["Latin"], min_script_share=0.76), "too few letters in the scripts asked for"),
    ],
)
def test_filters_look_at_what_the_user_says_alone(wanted, reason):
    assert unfit(asking("abcд!", system="Очень длинная инструкция"), wanted) == reason


# --- words and n-grams -------------------------------------------------------------------------------------------


def test_words_know_no_case_form_or_punctuation_and_spaceless_scripts_give_one_each():
    assert words("Don't STOP, ｃａｆé x_1!") == ["don", "t", "stop", "café", "x_1"]
    assert words("水はH2O") == ["水", "は", "h2o"]
    assert words("if a<=b && !c") == ["if", "a", "<=", "b", "&&", "!", "c"]
    assert (words("?! …"), words(" ")) == (["?!", "..."], [])


@pytest.mark.parametrize(
    "texts",
    [
        ("What is 3 + 4?", "What is 3 - 4?", "What is 3 * 4?", "What is 3 / 4?", "What is 34?", "What is 3, 4?"),
        ("What is the square of 3?", "What is the square of -3?", "What is the square of 3 %?"),
        ("x < y", "x <= y", "x > y", "x == y", "x != y", "x = y"),
        ("x = 1", "x += 1", "x -= 1", "x *= 1"),
        ("if ready and a", "if !ready and a"),
        ("a && b", "a || b", "a & b", "a ^ b"),
        ("(a + b) * c", "a + (b * c)", "a + b * c"),
        ("x[0]", "x(0)", "x{0}"),
        ("f() -> a", "f(), a", "f() => a"),
        ("It costs 5", "It costs €5", "It costs 5 °"),
        ("Mood: 😀", "Mood: 👍"),
    ],
)  # fmt: skip
def test_texts_that_differ_in_an_operator_or_symbol_differ(texts):
    assert len({tuple(words(text)) for text in texts}) == len(texts)


@pytest.mark.parametrize(
    "texts",
    [
        ("What is 3 - 4?", "What is 3 – 4?", "what is 3 − 4", "What is 3-4"),
        ("He said: “it's well-known” – and left…", "He said, «it’s well known». And left!", 'He said - "it‘s" well–known - and left'),
        ("- first\n- **second**, *third*", "* first\n* second\n* third", "First. Second; `third`."),
        (r"Solve \(x^2 = 4\).", "Solve $x^2 = 4$.", "Solve x^2 = 4"),
        ("Is COVID-19 over? Stop!", "Is COVID 19 over. Stop"),
    ],
)  # fmt: skip
def test_quotes_dashes_full_stops_and_marks_around_words_make_no_difference(texts):
    assert len({tuple(words(text)) for text in texts}) == 1


def test_words_of_a_million_signs_are_found_in_linear_time():
    # Half a second each; a pattern that looks ahead from every sign of a run would take hours.
    code = "from eyas.selection import words\nfor sign in '-', '*', '!', '(', '- 3', 'a*', ' * ':\n    words(sign * 300_000)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_sums_are_near_duplicates_and_contaminated_only_if_they_are_the_same_sum():
    index = near()
    asked = ["What is 3 + 4?", "What is 3 - 4?", "what is 3 – 4", "What is 3 × 4?"]
    assert [index.has_alike(asking(text)) for text in asked] == [False, False, True, False]
    held = EvaluationSets(DecontaminateConfig(against=["sums"]))
    held.add("sums", "What is 3 + 4?")
    assert [held.overlapping(text) for text in ("What is 3 - 4?", "What is 3+4")] == [None, "sums"]


def test_ngrams_are_all_runs_of_words_or_the_whole():
    assert len(ngrams(list("abcdef"), 3)) == 4
    assert ngrams(list("ab"), 3) == ngrams(list("ab"), 5) != ngrams(list("ba"), 3)


# --- near duplicates ---------------------------------------------------------------------------------------------


def near(**wanted: Any) -> NearDuplicates:
    return NearDuplicates(NearDuplicatesConfig(**wanted), sqlite3.connect(":memory:"))


def sentence(chance: random.Random, length: int) -> list[str]:
    return [
        chance.choice(
            ["tide", "reef", "lamp", "ship", "gull", "rope", "mast", "sail", "wave", "fog", "keel", "port"]
        )
        for _ in range(length)
    ]


@pytest.mark.parametrize("threshold", [0.994, 1.0])
def test_a_threshold_of_one_takes_what_has_the_same_words(threshold: float):
    index = near(threshold=threshold)
    assert [index.has_alike(asking(text)) for text in ("a b c d e f", "A b c, d e f!", "a b c d e g")] == [
        False,
        True,
        False,
    ]


def test_near_duplicates_are_those_of_brute_force():
    """Of pairs well above the threshold all are found, of those below none."""
    chance = random.Random(3)
    kept: list[set[bytes]] = []
    index = near(threshold=0.7)
    found = 0
    texts: list[list[str]] = []
    for _ in range(150):
        text = sentence(chance, 60) if not texts or chance.random() < 0.5 else list(chance.choice(texts))
        for _ in range(chance.randrange(6)):
            text[chance.randrange(len(text))] = "changed"
        texts.append(text)
        grams = ngrams(text, 5)
        likest = max((len(grams & other) / len(grams | other) for other in kept), default=0.0)
        alike = index.has_alike(asking(" ".join(text)))
        assert alike <= (likest >= 0.7)
        if likest >= 0.85:
            assert alike
            found += 1
        if not alike:
            kept.append(grams)
    assert 10 < found < 140


def test_a_prompt_that_was_left_out_hides_no_other():
    """Each is held against those taken: a chain of small changes does not swallow its far end."""
    base = [f"w{n}" for n in range(100)]
    changed = [base[:50] + [f"x{n}" for n in range(at)] + base[50 + at :] for at in (0, 6, 30)]
    index = near(threshold=0.7)
    assert [index.has_alike(asking(" ".join(text))) for text in changed] == [False, True, False]


def test_other_tools_or_another_system_prompt_make_another_prompt():
    index = near()
    text = "What is the weather like in the harbour of Port Ellen today?"
    tool = {"type": "function", "function": {"name": "weather"}}
    prompts = [asking(text), asking(text, system="Be brief"), asking(text, tools=[tool])]
    assert [index.has_alike(one) for one in prompts] == [False] * 3
    assert [index.has_alike(one) for one in prompts] == [True] * 3


def test_questions_of_one_template_are_no_near_duplicates():
    index = near()
    assert not any(
        index.has_alike(asking(f"Write a Python function that returns the {what} of a list of numbers."))
        for what in ("mean", "median", "largest element", "sum of squares")
    )


def test_texts_without_a_word_are_alike_only_if_they_are_equal():
    index = near()
    assert [index.has_alike(asking(text)) for text in ("😀", "👍", "¿?", "😀 ", "👍 👍")] == [
        False,
        False,
        False,
        True,
        False,
    ]
    held = EvaluationSets(DecontaminateConfig(against=["signs"]))
    held.add("signs", "∀ ∃")
    assert [held.overlapping(text) for text in ("😀", "∀  ∃")] == [None, "signs"]


def test_prompts_that_a_template_may_tell_alike_are_the_same():
    plain = sameness(asking("Why?").messages, [])
    assert sameness(asking(" Why?\n", system=" ").messages, []) == plain
    assert plain not in (
        sameness(asking("Why?", system="Be brief").messages, []),
        sameness(asking("Why").messages, []),
    )


# --- evaluation sets ---------------------------------------------------------------------------------------------

ITEM = "A farmer has seventeen sheep and all but nine run away so how many sheep does he have left"


@pytest.fixture
def sets() -> EvaluationSets:
    made = EvaluationSets(DecontaminateConfig(against=["sheep", "short"]))
    made.add("sheep", ITEM)
    made.add("short", "What is 2 + 2?")
    return made


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (ITEM, "sheep"),
        (f"Think step by step.\n\n{ITEM.upper()}?! Answer with a number.", "sheep"),
        (ITEM.replace("left", "now"), "sheep"),
        (" ".join(ITEM.split()[:13]), "sheep"),
        (" ".join(ITEM.split()[:12]), None),
        ("A farmer has seventeen sheep and all but two are white. What colour is the farmer's dog?", None),
        ("what is 2+2", "short"),
        ("What is 2 + 2? And why is it not five, as some would have it?", None),
    ],
    ids=[
        "equal",
        "within",
        "a word changed",
        "half of it",
        "less than half",
        "one phrase",
        "short",
        "short within",
    ],
)
def test_a_prompt_that_holds_half_of_an_item_overlaps(sets, text, name):
    assert sets.overlapping(text) == name


def test_what_the_system_prompt_says_is_not_compared():
    assert said(asking("Hello", system=ITEM).messages) == "Hello"
