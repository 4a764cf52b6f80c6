"""The plugin kinds, and how plugins are found.

A plugin is a class. It subclasses one of the bases below, has a `name`, a one-line docstring and an `Options` struct, and is handed to
Eyas by a hook of its kind:

    from eyas import hookimpl

    @hookimpl
    def register_checks(register):
        register(MyCheck)

Built-ins are registered the same way, from BUILTINS. Strangers come through the entry-point group `eyas`, or as
files listed under `plugins:` in the config.
"""

from __future__ import annotations

import abc
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec
import pluggy
from msgspec import Struct

from eyas.errors import EyasError
from eyas.records import Finish, Message, ReasoningState, Response, TrainRow
from eyas.tool_calls import NOTATIONS, Call, Notation, Tools

if TYPE_CHECKING:
    from eyas.config import ModelConfig, SamplingConfig
    from eyas.lengths import Array
    from eyas.wire import Session

GROUP = "eyas"
BUILT_IN = "built-in"
BUILTINS = (
    "eyas.sources.glaive",
    "eyas.sources.opencodeinstruct",
    "eyas.sources.magicoder",
    "eyas.sources.mixture_of_thoughts",
    "eyas.sources.openthoughts",
    "eyas.sources.ultrachat",
    "eyas.sources.sharegpt",
    "eyas.sources.swe_trajectories",
    "eyas.sources.chat",
    "eyas.sources.text",
    "eyas.engines.llamacpp",
    "eyas.engines.sglang",
    "eyas.reasoning.none",
    "eyas.reasoning.tags",
    "eyas.reasoning.formats",
    "eyas.checks.length",
    "eyas.checks.stop_token",
    "eyas.checks.reasoning",
    "eyas.checks.empty_answer",
    "eyas.checks.degenerate",
    "eyas.checks.control_tokens",
    "eyas.checks.unicode",
    "eyas.exporters.tokens",
    "eyas.exporters.speculators",
    "eyas.exporters.specforge",
    "eyas.exporters.modelopt",
    "eyas.exporters.torchspec",
    "eyas.exporters.sharegpt",
)

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


class NoOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """For plugins without options."""


class Plugin(abc.ABC):
    """What all plugins have in common. Class docstring: one line that says what the plugin is for."""

    name: ClassVar[str]
    Options: ClassVar[type[Struct]] = NoOptions

    def __init__(self, options: Any) -> None:
        self.options = options


# --- sources -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conversation:
    """One source row, whole: every recorded turn, with the tool calls of answers and the results of tools.

    The prompts stage decides what of it is asked, so that recorded answers never leak into a prompt. tools: in the
    OpenAI shape. id: the row's own unique id, or None where the dataset has none.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    id: str | None = None


@dataclass(frozen=True)
class Skip:
    """A row that is legitimately not used; `reason` is counted in prompts.json."""

    reason: str


class Source(Plugin):
    """Where prompts come from: turns one row of a dataset file into a conversation."""

    @abc.abstractmethod
    def parse(self, row: dict[str, Any]) -> Conversation | Skip:
        """The whole conversation in `row`, recorded answers included (the prompts stage cuts them off).

        Raises KeyError, TypeError or ValueError for a row that is not of this dataset's schema; the caller adds
        file and row.
        """

    def rows(self, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        """The rows of one file with their numbers, counted from 1. Override for formats that eyas.sources.files lacks."""
        from eyas.sources.files import read_rows

        return read_rows(path)


# --- engines -----------------------------------------------------------------------------------------------------


class Retry(Exception):
    """The request failed in a way that may pass: connection, 5xx, 429, time-out, aborted. The argument is the cause."""


class Busy(Retry):
    """The server asks for fewer requests at a time: 429, or a full queue."""


class Reject(Exception):
    """The server refuses this very prompt, now and always. The argument is the reason."""


class GenerateRequest(Struct, frozen=True):
    """One generation: ids in, with every sampling field explicit. `seed` is a 32-bit integer."""

    prompt_ids: Sequence[int]
    sampling: SamplingConfig
    seed: int


class Completion(Struct, frozen=True):
    """What an engine returns; fields as in records.Reply; output_ids is a list or eyas.lengths.Ids. `usage` is what the server said, for the record only."""

    output_ids: Sequence[int]
    finish: Finish
    effective_max_new: int
    usage: dict[str, int]


class Tokenizer(Protocol):
    """Text ↔ ids, exactly as the served model has it.

    special_tokens: text by name (bos_token, …) as chat templates want them. added_tokens: id by text of each token that is
    more than ordinary text: control tokens, reasoning and tool-call markers. `decode` shows them as that text.
    asks_server: `encode` is a request to the server, and not quick.
    control_ids: those of them that no answer holds inside.
    """

    template: str
    stop_ids: list[int]
    control_ids: list[int]
    special_tokens: dict[str, str]
    added_tokens: dict[str, int]
    vocabulary_size: int
    asks_server: bool

    def encode(self, text: str, *, control: bool) -> list[int]:
        """Ids of `text`. With `control`, spelt control tokens become control tokens; without, ordinary text.

        Raises Retry while a server that is needed for it is away, Reject for text that has no ids.
        """

    def decode(self, ids: Sequence[int] | Array) -> tuple[str, str]:
        """Text without end tokens, and for each id how many characters of it that id completes, as eyas.lengths.spell has it.

        Answers come as the arrays of eyas.lengths.places; `tolist` makes plain ids of them.
        """

    def apply_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str:
        """The prompt's text, as ChatTemplate.apply gives it, with its errors."""


class Pool(Struct, frozen=True, kw_only=True):
    """What a server can hold. tokens: of KV cache. max_running: most requests it decodes at once, None if untold.

    conservativeness: factor of the reserve, SGLang's --schedule-conservativeness; 0 for servers that reserve nothing.
    """

    tokens: int
    max_running: int | None = None
    conservativeness: float = 1.0


@dataclass(frozen=True)
class Load:
    """What a server says of itself, possibly seconds old.

    running, waiting: requests. kv_use: share of the KV cache in use, 0 to 1. retractions: a number that rises when
    requests are pushed out of the KV cache. None: it does not tell.
    """

    running: int
    waiting: int
    kv_use: float | None = None
    retractions: int | None = None


@dataclass(frozen=True)
class Launch:
    """One process of an engine. The API key reaches it in the environment variable EYAS_API_KEY, never in argv."""

    argv: list[str]
    env: dict[str, str]
    url: str


class Engine(Plugin):
    """Who answers: launches servers, says what they are, asks them.

    model_fields: fields of the manifest that tell one model from another. A server that comes back with others
    stops the run.
    """

    model_fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: Any, model: ModelConfig) -> None:
        super().__init__(options)
        self.model = model

    def check_config(self, samplings: Mapping[str, SamplingConfig]) -> None:
        """Raises EyasError, `key: what is wrong and what to do`, if the engine cannot do what the config asks.

        samplings: by config key. Called wherever the config is read, so it must touch neither files nor servers.
        """

    @abc.abstractmethod
    def launch(self, python: str) -> list[Launch]:
        """The processes to start with the interpreter `python` of `server.env`; called under the lease's lock."""

    def warnings(self, in_flight: int) -> list[str]:
        """Settings that are known to hurt data or speed, each as `key: the reason`; they are obeyed all the same.

        in_flight: most requests that will be asked at once.
        """
        return []

    @abc.abstractmethod
    def explain(self, log: str) -> str | None:
        """One clear sentence with the remedy if `log` (a server's output) shows a known cause of failure."""

    @abc.abstractmethod
    def inspect(self, url: str, key: str | None) -> dict[str, Any]:
        """The server's manifest, after a real generation; no secrets, and nothing that two equal launches differ in.

        Raises Retry while the server is away or loads, EyasError if it contradicts `model:`.
        """

    def identify(self, url: str, key: str | None) -> dict[str, Any] | None:
        """The part of the manifest that is told without a generation, `model_fields` at least; None if only `inspect` tells.

        Asked often, also while the server's queue is full. Raises as `inspect` does.
        """
        return None

    @abc.abstractmethod
    def tokenizer(self, url: str, key: str | None) -> Tokenizer:
        """The tokenizer of the served model, self-tested."""

    @abc.abstractmethod
    async def generate(self, session: Session, url: str, request: GenerateRequest) -> Completion:
        """Asks once. `session` carries the key; its OSError, where no reply comes, is to become a Retry.

        Raises Retry, Reject, or EyasError to stop the run.
        """

    def capacity(self, manifest: Mapping[str, Any]) -> Pool | None:
        """What one server of this manifest can hold; None if it does not tell."""
        return None

    async def load(self, session: Session, url: str) -> Load | None:
        """How busy the server is; None if it does not tell, or not now."""
        return None


# --- reasoning ---------------------------------------------------------------------------------------------------


class Split(Struct, frozen=True):
    """Where reasoning ends.

    reasoning_tokens: output ids up to and including the closing delimiter.
    asked: whether this answer was to reason; false if the prompt itself ended reasoning, or the model has none.
    markers: control ids that belong to the format and may stand in an answer.
    foreign: the answer holds a marker that only a prompt may hold.
    """

    state: ReasoningState
    reasoning_tokens: int
    asked: bool = True
    markers: frozenset[int] = frozenset()
    foreign: bool = False


@dataclass(frozen=True)
class Said:
    """An answer as a serving stack holds it in a conversation: reasoning and tool calls apart from the content.

    unparsed: the content with the calls still in it, for templates that know no tools.
    """

    content: str
    unparsed: str
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


class Reasoning(Plugin):
    """How a model marks its reasoning, and its tool calls.

    notation: how it writes calls. history_field: the message field in which its chat template reads reasoning.
    """

    notation: ClassVar[Notation] = "plain"
    history_field: ClassVar[Literal["reasoning_content", "thinking"]] = "reasoning_content"

    @property
    def template_options(self) -> dict[str, Any]:
        """Keyword arguments that the chat template needs for this format; `model.template_options` has the last word."""
        return {}

    @property
    def prefill(self) -> str:
        """Text that opens the answer and is sent as part of the prompt, encoded with control tokens as the template is."""
        return ""

    @abc.abstractmethod
    def split(self, response: Any) -> Split:
        """Splits a Reply."""

    def said(self, response: Any, tools: Tools) -> Said:
        """What a finished Reply says, if its split is one of a whole answer. Raises ValueError if a call cannot be read."""
        content, calls = NOTATIONS[self.notation](response.text, tools)
        return Said(content, response.text, calls=calls)

    def self_test(self, tokenizer: Tokenizer, prompt_tail: str | None) -> None:
        """Raises EyasError, naming the config key, unless format, tokenizer and chat template fit each other.

        prompt_tail: the text of a prompt behind its last message, prefill included; None if it is not known. Called
        once, before anything is asked.
        """


# --- checks ------------------------------------------------------------------------------------------------------


class Check(Plugin):
    """What makes a response acceptable. Policies (`reject`, `mark`, `off`) are applied by the caller."""

    default_policy: ClassVar[str] = "reject"

    @abc.abstractmethod
    def faults(self, response: Response, split: Split) -> Iterable[str]:
        """Reasons against the response, each a short constant phrase so that they can be counted; none if fine."""


# --- exporters ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """A training row in words.

    row: the ids that all of it comes from. text: of all of them, end token included. asked: of those of the prompt. messages,
    tools: what the chat template was given for the prompt; messages of a later turn hold the target's own earlier answers,
    and proved says whether they give the ids of the prompt again (of first turns, whose messages are the record's, it is true).
    output: the text of the answer without its end token; reasoning and answer are its two parts, delimiters left out, nothing
    trimmed. reasoning is None if there is none, or if something else than the delimiter ends it; then all of the output is
    answer. open: the output was cut inside reasoning.
    """

    row: TrainRow
    text: str
    asked: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    proved: bool
    output: str
    reasoning: str | None
    answer: str
    open: bool


@dataclass(frozen=True)
class Reading:
    """A row as its trainer sees it: ids, and the mask and the text that they come from where Eyas can tell.

    note: why the ids cannot be those of the row, if that is known beforehand.
    """

    ids: list[int]
    mask: list[int] | None = None
    text: str | None = None
    note: str | None = None


class Exporter(Plugin):
    """What a trainer reads.

    suffix: of the file name; empty for an exporter that writes a folder. takes: what `write` gets, TrainRow or, for
    formats of text, Told; that takes the tokenizer of `model.tokenizer`, and `target` (eyas.exporters.target) is then given.
    learns: which answers its trainer learns of a row that holds earlier ones too, as the report says it.
    """

    suffix: ClassVar[str]
    takes: ClassVar[type] = TrainRow
    learns: str = "the last"

    def __init__(self, options: Any, target: Any = None) -> None:
        super().__init__(options)
        self.target = target

    @property
    def supervises_end(self) -> bool:
        """Whether the trainer learns the token that ends an answer."""
        return True

    def unfit(self, row: Any) -> str | None:
        """Why the format cannot hold `row`, a short constant phrase; None if it can. Such rows are counted, not written."""
        return None

    def check(self) -> None:
        """Raises EyasError, with the remedy, if no row of this model can be exported well; asked before `write`, and by `eyas doctor`."""

    @abc.abstractmethod
    def write(self, rows: Iterable[Any], path: Path) -> int:
        """Writes what `takes` says to `path`, streaming, and returns how many."""

    def read(self, path: Path) -> Iterator[Reading] | None:
        """What the trainer makes of each row of `path`, in order; None if Eyas cannot tell."""
        return None


# --- rules -------------------------------------------------------------------------------------------------------


class Rules(Plugin):
    """Snakemake rules beside Eyas' own, for runs whose config names them under `rules:`.

    They are loaded as a module: rule `count` of the plugin `hello` is called `hello_count`. The module's `config` holds
    `options`, the plugin's section with defaults filled in, and `datasets`, their names. Results belong under
    results/<name>/, logs under logs/<name>/.

    snakefile: the file with the rules.
    """

    snakefile: ClassVar[Path]

    def targets(self, datasets: Sequence[str]) -> list[str]:
        """Files that a plain `snakemake` builds, too."""
        return []


# --- finding them ------------------------------------------------------------------------------------------------

KINDS: dict[str, type[Plugin]] = {
    "source": Source,
    "engine": Engine,
    "reasoning": Reasoning,
    "check": Check,
    "exporter": Exporter,
    "rules": Rules,
}
_HOOKS = {
    "source": "register_sources",
    "engine": "register_engines",
    "reasoning": "register_reasoning",
    "check": "register_checks",
    "exporter": "register_exporters",
    "rules": "register_rules",
}

Register = Callable[[type[Plugin]], None]


class HookSpecs:
    """One hook a kind; each calls `register` with its plugin classes."""

    @hookspec
    def register_sources(self, register: Register) -> None:
        """Register Source classes."""

    @hookspec
    def register_engines(self, register: Register) -> None:
        """Register Engine classes."""

    @hookspec
    def register_reasoning(self, register: Register) -> None:
        """Register Reasoning classes."""

    @hookspec
    def register_checks(self, register: Register) -> None:
        """Register Check classes."""

    @hookspec
    def register_exporters(self, register: Register) -> None:
        """Register Exporter classes."""

    @hookspec
    def register_rules(self, register: Register) -> None:
        """Register Rules classes."""


@dataclass(frozen=True)
class Found:
    """A registered plugin: its class, where it came from, and, for a stranger's, a digest that changes when its code does."""

    kind: str
    cls: type[Plugin]
    origin: str
    digest: str


class Registry:
    """All plugins of this process, by kind and name."""

    def __init__(self, files: Sequence[str | Path] = ()) -> None:
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(HookSpecs)
        self._found: dict[tuple[str, str], Found] = {}
        origins: dict[str, str] = {}
        for name in BUILTINS:
            self._manager.register(importlib.import_module(name), name=name)
            origins[name] = BUILT_IN
        for entry in importlib.metadata.entry_points(group=GROUP):
            origins[entry.name] = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
            try:
                self._manager.register(entry.load(), name=entry.name)
            except Exception as error:
                raise EyasError(
                    f"plugin {entry.name!r} of {origins[entry.name]} cannot be loaded: {error}; reinstall or uninstall it"
                ) from error
        for file in files:
            self._manager.register(_load_file(Path(file)), name=str(file))
            origins[str(file)] = str(file)
        for kind, hook in _HOOKS.items():
            for implementation in getattr(self._manager.hook, hook).get_hookimpls():
                origin = origins[implementation.plugin_name]
                try:
                    implementation.function(partial(self._register, kind, origin))
                except EyasError:
                    raise
                except Exception as error:
                    raise EyasError(
                        f"{origin}: {hook} fails: {type(error).__name__}: {error}; correct the plugin"
                    ) from error

    def _register(self, kind: str, origin: str, cls: type[Plugin]) -> None:
        base = KINDS[kind]
        if not issubclass(cls, base):
            raise EyasError(
                f"plugin {cls.__name__} of {origin} is registered as {kind} but is no {base.__name__}; derive it from that"
            )
        if not isinstance(getattr(cls, "name", None), str):
            raise EyasError(f"plugin {cls.__name__} of {origin} has no `name`; give it one")
        if kind == "rules" and not (cls.name.isascii() and cls.name.isidentifier()):
            raise EyasError(
                f"rules plugin {cls.name!r} of {origin}: rules are called after it, so its name must be letters, digits and `_`; rename it"
            )
        if (kind, cls.name) in self._found:
            raise EyasError(
                f"{kind} plugin {cls.name!r} of {origin} is already taken by {self._found[kind, cls.name].origin}; rename it"
            )
        self._found[kind, cls.name] = Found(kind, cls, origin, _digest(cls, origin))

    def all(self) -> list[Found]:
        """Every plugin, by kind and name."""
        order = list(KINDS)
        return sorted(self._found.values(), key=lambda found: (order.index(found.kind), found.cls.name))

    def find(self, kind: str, name: str, where: str) -> Found:
        """The plugin called `name`; `where` is the config key that asked for it."""
        try:
            return self._found[kind, name]
        except KeyError:
            known = [found_name for found_kind, found_name in self._found if found_kind == kind]
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
            raise EyasError(
                f"{where}: no {kind} plugin named {name!r}; {hint} (a plugin from a package must be installed in the env that runs the rule, see envs/)"
            ) from None

    def options(self, kind: str, name: str, section: Mapping[str, Any], where: str) -> Struct:
        """`section` as the plugin's Options; errors name the config key."""
        found = self.find(kind, name, where)
        known = {field.encode_name for field in msgspec.structs.fields(found.cls.Options)}
        try:
            # Also where a stranger's Options would pass over it: a mistyped key must not be lost.
            for key in (key for key in section if key not in known):
                raise msgspec.ValidationError(f"Object contains unknown field `{key}`")
            return msgspec.convert(dict(section), found.cls.Options, strict=False)
        except msgspec.ValidationError as error:
            raise OptionsError(where, found.cls.Options, error) from None

    def create(self, kind: str, name: str, section: Mapping[str, Any], where: str, *arguments: Any) -> Plugin:
        """An instance of plugin `name` with the options in `section`; `arguments` follow the options."""
        return self.find(kind, name, where).cls(self.options(kind, name, section, where), *arguments)


class OptionsError(Exception):
    """A plugin section that does not fit; config.py turns it into one line with file and line number."""

    def __init__(self, where: str, options: type[Struct], error: msgspec.ValidationError) -> None:
        super().__init__(str(error))
        self.where, self.options, self.error = where, options, error


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise EyasError(
            f"{path} does not exist; correct the path (relative to the working directory or to the workflow)"
        )
    name = "eyas_plugin_" + hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise EyasError(
            f"{path} cannot be loaded: {type(error).__name__}: {error}; correct the plugin"
        ) from error
    return module


def _digest(cls: type[Plugin], origin: str) -> str:
    """Of the bytes of the plugin's file and, for one of a package, distribution and version; of a built-in, nothing."""
    if origin == BUILT_IN:
        return origin
    digest = hashlib.sha256(Path(inspect.getfile(cls)).read_bytes()).hexdigest()[:16]
    return digest if Path(origin).is_file() else f"{origin} {digest}"


@lru_cache(maxsize=4)
def registry(files: tuple[str, ...] = ()) -> Registry:
    """The plugins of this process; built once for a set of plugin files."""
    return Registry(files)
