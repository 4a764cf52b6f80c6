"""Tool calls in the text of an answer, in the notations of well-known models.

A notation is a function: of the answer's text without its reasoning, and the tools, to its content and its calls. It
raises ValueError for a call that is begun and cannot be read. Sources: the models' chat templates, and the parsers of SGLang
0.5.23 (srt/function_call/), whose calls these are.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Tools = Sequence[Mapping[str, Any]]
Notation = Literal["plain", "tagged", "kimi", "deepseek", "harmony"]


# How deep arguments may be nested. Python gives up at a depth that depends on who asks, and the same answer must read the
# same everywhere.
DEEPEST = 64


@dataclass(frozen=True)
class Call:
    """One call. id: as the model wrote it, None where its notation has none. Raises ValueError for arguments nested too deep."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None

    def __post_init__(self) -> None:
        layer: list[Any] = [self.arguments]
        for _ in range(DEEPEST):
            layer = [inner for item in layer for inner in _inside(item)]
        if layer:
            raise ValueError(f"arguments are nested more than {DEEPEST} deep")


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def canonical(arguments: Mapping[str, Any]) -> str:
    """Arguments as JSON that is equal for equal values: keys sorted, whole numbers without a fraction (as in RFC 8785)."""
    return json.dumps(_whole(arguments), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return value


def parsed(arguments: Any) -> dict[str, Any]:
    """Arguments as an object; in the OpenAI shape they are JSON text. Raises ValueError for anything else."""
    value = (json.loads(arguments) if arguments.strip() else {}) if isinstance(arguments, str) else arguments
    if not isinstance(value, dict):
        raise ValueError("arguments are no object")
    return value


def recorded(calls: Sequence[Mapping[str, Any]]) -> list[Call]:
    """Calls in the OpenAI shape. Raises ValueError for one that has no name or no readable arguments."""
    found = []
    for call in calls:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a call without a name")
        identity = call.get("id")
        found.append(
            Call(
                function["name"],
                parsed(function.get("arguments", {})),
                identity if isinstance(identity, str) else None,
            )
        )
    return found


# --- notations ---------------------------------------------------------------------------------------------------

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class _Blocks:
    """A notation's blocks: `begin`, where `head` matches, the inside, `end`. Names in a head hold no "<"."""

    begin: str
    head: re.Pattern[str]
    end: str

    def read(self, text: str) -> list[tuple[re.Match[str], str]]:
        """Heads and insides, in linear time: an answer that loops over a head may be a megabyte.

        Raises ValueError for a block that begins and has no head, no end, or another one inside.
        """
        found = []
        at = text.find(self.begin)
        while at >= 0:
            head = self.head.match(text, at)
            if head is None:
                raise ValueError("a call or argument without a head")
            end = text.find(self.end, head.end())
            if end < 0 or text.find(self.begin, head.end(), end) >= 0:
                raise ValueError("a call or argument without an end")
            found.append((head, text[head.end() : end]))
            at = text.find(self.begin, end)
        return found


_PARAMETER = _Blocks("<parameter=", re.compile(r"<parameter=([^<>]+)>"), "</parameter>")
_ARGUMENT = _Blocks("<arg_key>", re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>"), "</arg_value>")


def tagged(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """`<tool_call>…</tool_call>`: JSON inside (Hermes, Qwen), `<function=…>` (Qwen3-Coder and later) or `<arg_key>` (GLM)."""
    return text.partition("<tool_call>")[0], [
        _in_tag(match[1].strip(), tools) for match in _TAGGED.finditer(text)
    ]


def _in_tag(body: str, tools: Tools) -> Call:
    if body.startswith("{"):
        return _from_json(json.loads(body))
    if function := _FUNCTION.fullmatch(body):
        # One line break on either side belongs to the notation.
        pairs = [
            (head[1], value.removeprefix("\n").removesuffix("\n"))
            for head, value in _PARAMETER.read(function[2])
        ]
        return Call(function[1], _typed(function[1], pairs, tools))
    name = body.partition("<arg_key>")[0].strip()
    if not name or "\n" in name or "<" in name:
        raise ValueError("no call in its tags")
    return Call(name, _typed(name, [(head[1], value) for head, value in _ARGUMENT.read(body)], tools))


def _from_json(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call without a name")
    return Call(value["name"], parsed(value.get("arguments", value.get("parameters", {}))))


def _typed(name: str, pairs: Sequence[tuple[str, str]], tools: Tools) -> dict[str, Any]:
    """Arguments that are written bare: text where the tool wants text, else JSON if it is some."""
    properties = _properties(name, tools)
    typed: dict[str, Any] = {}
    for key, written in pairs:
        typed[key] = written
        told = properties.get(key)
        if not isinstance(told, Mapping) or told.get("type") != "string":
            with contextlib.suppress(ValueError):
                typed[key] = json.loads(written)
    return typed


def _properties(name: str, tools: Tools) -> Mapping[str, Any]:
    """What a tool says of its arguments, by name; data sets hold schemas that are none."""
    found: Any = next((tool["function"] for tool in tools if tool["function"]["name"] == name), {})
    for field in ("parameters", "properties"):
        found = found.get(field) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


_KIMI = _Blocks(
    "<|tool_call_begin|>",
    re.compile(r"<\|tool_call_begin\|>([^<]+)<\|tool_call_argument_begin\|>"),
    "<|tool_call_end|>",
)
_KIMI_NUMBER = re.compile(r":\d+\Z")


def kimi(text: str, _tools: Tools) -> tuple[str, list[Call]]:
    """`<|tool_calls_section_begin|>` and calls by the id `functions.NAME:NUMBER`, arguments in JSON."""
    content, section, written = text.partition("<|tool_calls_section_begin|>")
    calls = []
    for head, arguments in _KIMI.read(written + _KIMI.end):  # the last call needs no end
        identity = head[1].strip()
        name = _KIMI_NUMBER.sub("", identity.removeprefix("functions."))
        if not name:
            raise ValueError("a call without a name")
        calls.append(Call(name, parsed(arguments), identity))
    if section and not calls:
        raise ValueError("a section without a call")
    return content, calls


_DEEPSEEK = _Blocks("<｜tool▁call▁begin｜>", re.compile("<｜tool▁call▁begin｜>"), "<｜tool▁call▁end｜>")
_FENCED = re.compile(r"function<｜tool▁sep｜>([^\n]+)\n```json\n(.*)\n```", re.DOTALL)
_BARE = re.compile(r"([^<]+)<｜tool▁sep｜>(.*)", re.DOTALL)
_INVOKE = _Blocks("<｜DSML｜invoke", re.compile(r'<｜DSML｜invoke name="([^"<]+)">'), "</｜DSML｜invoke>")
_VALUE = _Blocks(
    "<｜DSML｜parameter",
    re.compile(r'<｜DSML｜parameter name="([^"<]+)" string="(true|false)">'),
    "</｜DSML｜parameter>",
)


def deepseek(text: str, _tools: Tools) -> tuple[str, list[Call]]:
    """`<｜tool▁calls▁begin｜>` with arguments in JSON, fenced (V3, R1) or bare (V3.1); `<｜DSML｜…>` (V3.2 and later)."""
    content, section, written = text.partition("<｜tool▁calls▁begin｜>")
    calls = []
    if section:
        for _, inside in _DEEPSEEK.read(written):
            match = _FENCED.fullmatch(inside) or _BARE.fullmatch(inside)
            if match is None:
                raise ValueError("a call without a name")
            calls.append(Call(match[1], parsed(match[2])))
    else:
        content, section, written = text.partition("<｜DSML｜")
        for head, inside in _INVOKE.read(section + written):
            arguments = {
                value[1]: said if value[2] == "true" else json.loads(said)
                for value, said in _VALUE.read(inside)
            }
            calls.append(Call(head[1], arguments))
    if section and not calls:
        raise ValueError("a section without a call")
    return content, calls


_HARMONY = re.compile(r"(?P<header>.*?)<\|message\|>(?P<body>.*)", re.DOTALL)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def harmony(text: str, _tools: Tools) -> tuple[str, list[Call]]:
    """Messages of gpt-oss with a recipient; the text may begin inside the final message, whose header closed reasoning."""
    contents, calls = [], []
    for at, part in enumerate(re.split(r"(?:<\|end\|>)?<\|start\|>", text)):
        message = _HARMONY.fullmatch(part)
        if message is None:
            if part and (at or "<|" in part):
                raise ValueError("a message without a header")
            contents.append(part)
        elif recipient := _RECIPIENT.search(message["header"]):
            calls.append(Call(recipient[1], parsed(message["body"].removesuffix("<|end|>"))))
        elif "<|channel|>analysis" not in message["header"]:
            contents.append(message["body"].removesuffix("<|end|>"))
    return "\n\n".join(filter(str.strip, contents)), calls


def plain(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """`<tool_call>` tags, or nothing but `{"name": …, "arguments": {…}}` of a known tool, one or several, one a line or in a list."""
    if "<tool_call>" in text:
        return tagged(text, tools)
    known = {tool["function"]["name"] for tool in tools}
    try:
        calls = [_from_json(value) for value in _values(text.strip())]
    except (ValueError, RecursionError):
        return text, []
    return ("", calls) if calls and all(call.name in known for call in calls) else (text, [])


_SPACE = re.compile(r"\s*")


def _values(text: str) -> Iterator[Any]:
    """The JSON values in a text that holds nothing else."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        value, end = decoder.raw_decode(text, at)
        yield from value if isinstance(value, list) else [value]
        space = _SPACE.match(text, end)
        assert space is not None
        at = space.end()


NOTATIONS: dict[Notation, Callable[[str, Tools], tuple[str, list[Call]]]] = {
    "plain": plain,
    "tagged": tagged,
    "kimi": kimi,
    "deepseek": deepseek,
    "harmony": harmony,
}
