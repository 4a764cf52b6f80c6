"""Messages → prompt ids, so that text in the data never becomes a control token.

The chat template is rendered twice: with the contents themselves, and with marks in their place. The text around the marks is the
template's own and is encoded with control tokens; what stands at the marks comes from data and is encoded without.
If the two renderings tell different texts, the template rewrites contents and the prompt is refused.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import msgspec

from eyas.config import ModelConfig, fingerprint
from eyas.errors import EyasError
from eyas.plugins import Tokenizer
from eyas.records import Message, Prompt

FORMAT = 2  # of the rendering; a change here makes every cached rendering stale

# What a template may raise on a prompt that it was not written for.
_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
# What Hugging Face gives every template besides the conversation. Without them a template renders them as nothing.
_SPECIAL = {"bos_token", "eos_token", "pad_token", "unk_token"}

_MARK = "\ue000{}\ue001"
_MARKS = re.compile("\ue000([0-9]+)\ue001")


class Refused(Exception):
    """This prompt cannot be rendered; the argument is a short constant phrase."""


def render_identity(model: ModelConfig, prefill: str) -> str:
    """Hash of what, besides the prompt, decides its ids: model, template options, tools mode, prefill."""
    return fingerprint(
        {
            "format": FORMAT,
            "model": [model.id, model.revision, model.sha256],
            "tools": model.tools,
            "options": model.template_options,
            "prefill": prefill,
        }
    )


def render_hash(prompt: Prompt, identity: str) -> str:
    """The name of a rendering in the journal, 32 hex digits."""
    body = msgspec.json.encode([prompt.messages, prompt.tools])
    return hashlib.sha256(identity.encode() + body).hexdigest()[:32]


class Renderer:
    """Renders prompts for one served model.

    prefill: text that opens the answer, such as "<think>\\n"; part of the prompt and, like the
        template, encoded with control tokens.
    Raises EyasError for a template that is not valid Jinja, or that needs a special token which the config does not give.
    """

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer, prefill: str) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._prefill = tokenizer.encode(prefill, control=True) if prefill else []
        # The environment in which Hugging Face publishes chat templates
        # (transformers, utils/chat_template_utils.py).
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(tokenizer.template)
            names = jinja2.meta.find_undeclared_variables(environment.parse(tokenizer.template))
        except jinja2.TemplateError as error:
            raise EyasError(
                f"the model's chat template is not valid Jinja: {error}; use a model that ships one"
            ) from error
        for name in sorted(names & _SPECIAL - model.template_options.keys()):
            raise EyasError(
                f"model.template_options.{name}: the model's chat template uses `{name}`; give its text, as in the "
                f"model's tokenizer_config.json"
            )
        self._control = functools.lru_cache(maxsize=1024)(functools.partial(tokenizer.encode, control=True))

    def render(self, prompt: Prompt) -> list[int]:
        """Prompt ids, shape [length]. Raises Refused."""
        if _MARKS.search(
            json.dumps([msgspec.to_builtins(prompt.messages), prompt.tools], ensure_ascii=False)
        ):
            raise Refused("private-use marks in the text")
        if not all(map(_is_function, prompt.tools)):
            raise Refused("a tool is no function with a name")
        messages = [msgspec.to_builtins(message) for message in prompt.messages]
        tools = prompt.tools if self._model.tools == "template" else []
        if prompt.tools and self._model.tools == "system":
            _tell_tools(messages, prompt.tools)
        text = self._apply(messages, tools)
        marked = self._apply(
            [{**message, "content": _MARK.format(n)} for n, message in enumerate(messages)], tools
        )
        pieces = _MARKS.split(marked)
        self._check_beside(prompt.messages)
        if tools:
            self._check_tools(marked, tools)
        roles = list(dict.fromkeys(message["role"] for message in messages))
        # Many templates trim contents, some those of the user alone.
        for reads in itertools.product((str, str.strip), repeat=len(roles)):
            read = dict(zip(roles, reads, strict=True))
            told = [read[message["role"]](message["content"]) for message in messages]
            parts = [told[int(piece)] if at % 2 else piece for at, piece in enumerate(pieces)]
            if "".join(parts) == text:
                break
        else:
            raise Refused("the chat template rewrites the text")
        if set(map(int, pieces[1::2])) != set(range(len(messages))):
            raise Refused("the chat template drops a message")
        ids: list[int] = []
        for at, part in enumerate(parts):
            if part:
                ids += self._tokenizer.encode(part, control=False) if at % 2 else self._control(part)
        return ids + self._prefill

    def _apply(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=True,
                **self._model.template_options,
            )
        except _FAILURES as error:
            raise Refused(f"the chat template refuses it: {error}") from None

    def _check_beside(self, messages: list[Message]) -> None:
        """Templates spell tool calls and names in a notation of their own, so these cannot be marked."""
        beside = [[message.name, message.tool_calls, message.tool_call_id] for message in messages]
        if any(any(fields) for fields in beside) and self._spells_control(beside):
            raise Refused("a control token is spelt in a tool call or a name")

    def _check_tools(self, marked: str, tools: list[dict[str, Any]]) -> None:
        if any(tool["function"]["name"] not in marked for tool in tools):
            raise Refused("the chat template drops tools (set model.tools to system)")
        if self._spells_control(tools):
            raise Refused("a control token is spelt in the tools")

    def _spells_control(self, value: Any) -> bool:
        text = json.dumps(value, ensure_ascii=False)
        return self._tokenizer.encode(text, control=True) != self._tokenizer.encode(text, control=False)


def _is_function(tool: dict[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tell_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    """Writes tool definitions into the system message, for models whose template knows no tools."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    told = "\n".join(['To use a function, answer with {"name": …, "arguments": {…}}. The functions:', *lines])
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] = f"{messages[0]['content'].rstrip()}\n\n{told}"
    else:
        messages.insert(0, {"role": "system", "content": told})
