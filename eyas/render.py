"""Messages → prompt ids, so that text in the data never becomes a control token.

The chat template is rendered twice: with the contents themselves, and with marks in their place (an empty content stays empty;
earlier reasoning counts as a content that the template may drop). The text around the marks is the template's own, and the control tokens in it are all that a prompt may hold. If the whole text, encoded at once, holds exactly
these, that is the prompt. If not, data spells a control token: then contents are encoded apart, as ordinary text.
If the two renderings tell different texts, the template rewrites contents and the prompt is refused.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from eyas.chat_template import FAILURES
from eyas.config import ModelConfig, fingerprint
from eyas.hub import files_digest, tokenizer_folder
from eyas.plugins import Tokenizer
from eyas.records import Prompt

# Of the rendering; a change here makes every cached rendering stale. 4: prompts with an empty content are no longer
# refused for it, and journals keep refusals.
FORMAT = 4

_MARK = "\ue000{}\ue001"
_MARKS = re.compile("\ue000([0-9]+)\ue001")
_TEXTS = ("content", "reasoning_content", "thinking")  # fields whose text stands in the prompt as it is
_BESIDE = {"name", "tool_calls", "tool_call_id"}  # what a message has besides its role and texts


class Refused(Exception):
    """This prompt cannot be rendered; the argument is a short constant phrase."""


def for_template(prompt: Prompt, model: ModelConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages and the tools of a prompt as the chat template gets them."""
    messages = msgspec.to_builtins(prompt.messages)
    if model.tools == "template":
        return messages, prompt.tools
    if prompt.tools:
        _tell_tools(messages, prompt.tools)
    return messages, []


def render_identity(model: ModelConfig, prefill: str) -> str:
    """Hash of what, besides the prompt, decides its ids: model, tokenizer's files, template options, tools mode, prefill.

    Reads the files of `model.tokenizer`, wherever they lie.
    """
    tokenizer = None
    if model.tokenizer is not None:
        tokenizer = files_digest(tokenizer_folder(model.tokenizer), code=model.trust_remote_code)
    return fingerprint(
        {
            "format": FORMAT,
            "model": [model.id, model.revision, model.sha256],
            "tokenizer": tokenizer,
            "tools": model.tools,
            "options": model.template_options,
            "prefill": prefill,
        }
    )


def render_hash(prompt: Prompt, identity: str) -> str:
    """The name of a rendering in the journal, 32 hex digits."""
    body = msgspec.json.encode([prompt.messages, prompt.tools])
    return hashlib.sha256(identity.encode() + body).hexdigest()[:32]


@dataclass(frozen=True)
class _Shape:
    """What the template makes of messages without regard to what their contents say.

    pieces: its own text, and at every second place the number of the text (see _texts) that stands there.
    drops: some content stands nowhere; an empty one may, and earlier reasoning.
    structural: the control tokens and markers in its own text. spelt: their texts, each once.
    """

    pieces: list[str]
    drops: bool
    structural: list[int]
    spelt: list[str]


class Renderer:
    """Renders prompts for one served model.

    prefill: text that opens the answer, such as "<think>\\n"; part of the prompt and, like the
        template's own text, encoded with control tokens.
    """

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer, prefill: str) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._prefill = tokenizer.encode(prefill, control=True) if prefill else []
        self._added = {token: text for text, token in tokenizer.added_tokens.items()}
        self._is_added = self._added.__contains__
        # Prompts of one dataset are of few shapes, and their templates' pieces come again and again.
        self._shape = functools.lru_cache(maxsize=256)(self._shape_of)
        self._control = functools.lru_cache(maxsize=1024)(functools.partial(tokenizer.encode, control=True))

    def render(self, prompt: Prompt) -> list[int]:
        """Prompt ids, shape [length]. Raises Refused; EyasError for a template that cannot be used at all."""
        if not all(map(_is_function, prompt.tools)):
            raise Refused("a tool is no function with a name")
        messages, tools = for_template(prompt, self._model)
        texts = _texts(messages)
        if any(_MARKS.search(content) for _, content in texts):
            raise Refused("private-use marks in the text")
        text = self._apply(messages, tools)
        bare = [
            {**message, **{name: bool(message[name]) for name in _TEXTS if name in message}}
            for message in messages
        ]
        shape = self._shape(msgspec.json.encode([bare, tools]))
        parts = _told(text, shape.pieces, texts)
        if shape.drops:
            raise Refused("the chat template drops a message")
        # One encoding of the whole is what the model's own server would do; it stands if no control token came from data.
        ids = self._tokenizer.encode(text, control=True)
        if list(filter(self._is_added, ids)) != shape.structural or any(
            token in content for token in shape.spelt for _, content in texts
        ):
            ids = self._encode_apart(parts)
        return ids + self._prefill

    def _encode_apart(self, parts: list[str]) -> list[int]:
        """What the template says with control tokens, every second part, which is a content, without."""
        ids: list[int] = []
        for at, part in enumerate(parts):
            if at % 2 == 0:
                ids += self._control(part)
                continue
            content = self._tokenizer.encode(part, control=False)
            if any(map(self._is_added, content)):
                raise Refused("a control token is spelt in a message")
            ids += content
        return ids

    def _shape_of(self, bare: bytes) -> _Shape:
        """bare: JSON of the messages, which only tell whether they have a content, and of the tools. Raises Refused."""
        messages, tools = msgspec.json.decode(bare)
        if _MARKS.search(bare.decode()):
            raise Refused("private-use marks in the text")
        self._check_beside(messages)
        # Templates ask whether there is a content, so an empty one stays empty.
        marks = [dict(message) for message in messages]
        said: set[int] = set()
        for n, (message, name) in enumerate(_places(marks)):
            if name == "content" and message[name]:
                said.add(n)
            message[name] = _MARK.format(n) if message[name] else ""
        marked = self._apply(marks, tools)
        if tools:
            self._check_tools(marked, tools)
        if any(name not in marked for name in _called(messages)):
            raise Refused("the chat template drops a tool call")
        pieces = _MARKS.split(marked)
        drops = not said <= set(map(int, pieces[1::2]))
        structural = [
            token for piece in pieces[::2] for token in self._control(piece) if token in self._added
        ]
        return _Shape(pieces, drops, structural, [self._added[token] for token in sorted(set(structural))])

    def _apply(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        try:
            return self._tokenizer.apply_template(messages, tools, self._model.template_options)
        except FAILURES as error:
            raise Refused(f"the chat template refuses it: {error}") from None

    def _check_beside(self, messages: list[dict[str, Any]]) -> None:
        """Templates spell tool calls and names in a notation of their own, so these cannot be marked."""
        beside = [{name: message[name] for name in message.keys() & _BESIDE} for message in messages]
        if any(beside) and self._spells_control(beside):
            raise Refused("a control token is spelt in a tool call or a name")

    def _check_tools(self, marked: str, tools: list[dict[str, Any]]) -> None:
        if any(tool["function"]["name"] not in marked for tool in tools):
            raise Refused("the chat template drops tools (set model.tools to system)")
        if self._spells_control(tools):
            raise Refused("a control token is spelt in the tools")

    def _spells_control(self, value: Any) -> bool:
        ids = self._tokenizer.encode(json.dumps(value, ensure_ascii=False), control=True)
        return any(map(self._is_added, ids))


def _places(messages: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Every text of messages by number: the message, and the field that it is in."""
    return [(message, name) for message in messages for name in _TEXTS if name in message]


def _texts(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Every text of messages by number, each with the role that says it."""
    return [(message["role"], message[name]) for message, name in _places(messages)]


def _told(text: str, pieces: list[str], texts: list[tuple[str, str]]) -> list[str]:
    """`text` as the template's pieces with texts between them, as the template tells these. Raises Refused."""
    roles = list(dict.fromkeys(role for role, _ in texts))
    # Many templates trim contents, some those of the user alone.
    ways: tuple[Callable[[str], str], ...] = (str, str.strip)
    for reads in itertools.product(ways, repeat=len(roles)):
        read = dict(zip(roles, reads, strict=True))
        told = [read[role](content) for role, content in texts]
        parts = [told[int(piece)] if at % 2 else piece for at, piece in enumerate(pieces)]
        if "".join(parts) == text:
            return parts
    raise Refused("the chat template rewrites the text")


def _called(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Names of the functions that messages call."""
    for message in messages:
        for call in message.get("tool_calls") or []:
            name = (call.get("function") or {}).get("name")
            if isinstance(name, str):
                yield name


def _is_function(tool: dict[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _tell_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    """Writes tool definitions into the system message, for models whose template knows no tools."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    told = "\n".join(['To use a function, answer with {"name": …, "arguments": {…}}. The functions:', *lines])
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] = f"{messages[0]['content'].rstrip()}\n\n{told}"
    else:
        messages.insert(0, {"role": "system", "content": told})
