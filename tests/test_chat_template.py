"""A chat template renders here what it renders in Hugging Face's transformers, except for what would change from day to day."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from eyas.chat_template import ChatTemplate
from eyas.errors import EyasError

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why <b>&</b> é?\n"},
    {"role": "assistant", "content": "Because."},
    {"role": "user", "content": "Oh"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"é": ["<", 1.5, None], "a": {}}}}]


def apply(text: str, special_tokens: dict[str, str | None] | None = None, **options: Any) -> str:
    return ChatTemplate(text, special_tokens or {}).apply(TALK, TOOLS, options)


TEMPLATES = {
    "loops": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "blocks": "  {% if true %}\n   a\n  {% endif %}\n{# gone #}\n  b\n",
    "json": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ tools | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=true) }}",
    "json by position": "{{ tools | tojson(True, 4, ('; ', '= '), True) }}",
    "generation": "{% for m in messages %}\n{% generation %}\n{% set x = m.content %}\n{{ x }}{{ loop.index }}\n{% endgeneration %}\n{{ x is defined }}{% endfor %}",
    "generation sees": "{% set x = 'out' %}{%- generation -%} {{ x }} {%- endgeneration %}",
    "what is given": "{{ documents is none }}{{ add_generation_prompt }}{{ tools is none }}{{ nothing is defined }}{{ thinking }}",
    "namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "reverse": "{% for m in messages[::-1] %}{{ m['content'] | trim }}|{% endfor %}",
    "macros": "{% macro say(x) %}<{{ x }}>{% endmacro %}{{ say(messages[0].content) }}",
    "special tokens": "{{ bos_token }}{{ eos_token is defined }}{{ pad_token }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [TOOLS, []])
def test_a_template_renders_as_in_transformers(name: str, tools: list[dict[str, Any]]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.utils.chat_template_utils import render_jinja_template

    options = {"thinking": True, "bos_token": "<s>"}
    (theirs,), _ = render_jinja_template(
        [TALK], tools or None, chat_template=TEMPLATES[name], add_generation_prompt=True, **options
    )
    special = {"bos_token": "<s>", "eos_token": None, "pad_token": None}
    assert ChatTemplate(TEMPLATES[name], special).apply(TALK, tools, {"thinking": True}) == theirs


def test_options_go_before_special_tokens_and_defaults() -> None:
    text = "{{ bos_token }}{{ add_generation_prompt }}"
    assert apply(text, {"bos_token": "<s>"}) == "<s>True"
    assert apply(text, {"bos_token": "<s>"}, bos_token="<t>", add_generation_prompt=False) == "<t>False"


def test_a_special_token_that_nobody_knows_is_asked_for() -> None:
    with pytest.raises(
        EyasError, match=r"^model\.template_options\.bos_token: the model's chat template uses"
    ):
        apply("{{ bos_token }}")
    assert apply("{{ bos_token }}", bos_token="<s>") == "<s>"


def test_a_special_token_that_the_model_is_known_not_to_have_is_nothing() -> None:
    assert apply("{{ bos_token is defined }}{{ bos_token }}", {"bos_token": None}) == "False"


def test_a_template_that_writes_the_date_of_the_day_needs_the_text() -> None:
    text = "Today: {{ strftime_now('%Y-%m-%d') }}"
    with pytest.raises(
        EyasError, match=r"^model\.template_options\.strftime_now: .*; give the text to write"
    ):
        apply(text)
    assert apply(text, strftime_now="2025-06-01") == "Today: 2025-06-01"


def test_a_template_that_could_write_the_date_but_need_not_is_fine() -> None:
    text = "{% if not date is defined %}{% if strftime_now is defined %}{% set date = strftime_now('%d') %}{% endif %}{% endif %}{{ date }}"
    assert apply(text, date="1 June") == "1 June"
    with pytest.raises(EyasError, match="strftime_now"):
        apply(text)


def test_a_template_that_raises_says_why() -> None:
    with pytest.raises(jinja2.TemplateError, match=r"^One at a time!$"):
        apply("{{ raise_exception('One at a time!') }}")


@pytest.mark.parametrize("text", ["{% for %}", "{% generation %}", "{% endgeneration %}", "{{"])
def test_a_template_that_is_not_jinja_stops_the_run(text: str) -> None:
    with pytest.raises(EyasError, match=r"^the model's chat template is not valid Jinja: "):
        ChatTemplate(text, {})


@pytest.mark.parametrize("text", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_cannot_reach_python(text: str) -> None:
    with pytest.raises(jinja2.TemplateError):
        apply(text)
