"""Chat templates exactly as Hugging Face renders them (transformers, utils/chat_template_utils.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from eyas.errors import EyasError

# Texts that Hugging Face gives every template by name, besides the conversation.
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")

# What a template may raise on a conversation that it was not written for.
FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for trainers; here it only has the scope of a block."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance variable)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def date_text(options: Mapping[str, Any]) -> Callable[[str], str]:
    """The function `strftime_now` of a template: the text that `options` give under that name, whatever the day."""
    if "strftime_now" in options:
        return lambda _format: str(options["strftime_now"])
    return _refuse_date


def _refuse_date(_format: str) -> str:
    raise EyasError(
        "model.template_options.strftime_now: the model's chat template writes the date of the day, so the same prompt would "
        'have other ids tomorrow; give the text to write instead, such as "2025-06-01"'
    )


_ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
)
_ENVIRONMENT.filters["tojson"] = _to_json
_ENVIRONMENT.globals["raise_exception"] = _raise_exception


class ChatTemplate:
    """One template, compiled.

    special_tokens: text of each special token by its name in Hugging Face's configs, None for one that the model is known
    not to have. Raises EyasError for a template that is not valid Jinja.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str | None]) -> None:
        try:
            self._template = _ENVIRONMENT.from_string(text)
            names = jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(text))
        except jinja2.TemplateError as error:
            raise EyasError(
                f"the model's chat template is not valid Jinja: {error}; use a model that ships one"
            ) from error
        self._globals = dict(self._template.globals)
        self._special = {name: token for name, token in special_tokens.items() if token is not None}
        self._unknown = [name for name in SPECIAL if name in names and name not in special_tokens]

    def apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str:
        """The prompt's text, the opening of the answer included. `options` are the template's keyword arguments.

        Raises EyasError if `options` lack a text that only the config can give, else one of FAILURES.
        """
        for name in self._unknown:
            if name not in options:
                raise EyasError(
                    f"model.template_options.{name}: the model's chat template uses `{name}`; give its text, as in the "
                    f"model's tokenizer_config.json"
                )
        given: dict[str, Any] = {
            **self._globals,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": True,
            **self._special,
            **options,
            "strftime_now": date_text(options),
        }
        # As Template.render does it, which copies the environment's globals by a loop over a ChainMap.
        context = self._template.new_context(given, shared=True)
        return "".join(self._template.root_render_func(context))
