"""The embedded engine: native llama.cpp servers on this machine's processors, token ids in and token ids out.

Ids are right only without streaming: a streamed event leaves out the ids of a token that ends inside a UTF-8
character, so an emoji arrives as its last id alone. The price is that an abandoned request keeps its slot until it
is done.

Every Snakefile and every job that needs a plugin loads this module, so the HTTP clients (0.2 s), numpy and
jinja2 are imported where they are used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from eyas.config import ModelConfig, SamplingConfig
from eyas.engines.http import PROXY_STATUS, Client
from eyas.errors import EyasError
from eyas.plugins import (
    Completion,
    Engine,
    GenerateRequest,
    Launch,
    Pool,
    Register,
    Reject,
    Retry,
    Tokenizer,
    hookimpl,
)
from eyas.records import Finish
from eyas.wire import Answer

if TYPE_CHECKING:
    from eyas.lengths import Array
    from eyas.wire import Session

LAUNCHER = Path(__file__).with_name("llamacpp_launcher.py")
RANDOM_SEED = 0xFFFFFFFF  # llama.cpp reads this seed as "any"

# llama.cpp samples in another order than everyone else (temperature last) and has samplers that others lack. Sent with
# every request, so that `sampling:` means what it means to SGLang and vLLM, whatever the server's own defaults are.
NEUTRAL: dict[str, Any] = {
    "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
    "dynatemp_range": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "adaptive_target": -1.0,
    "ignore_eos": False,
    "logit_bias": [],
    "stop": [],
    "n_probs": 0,
    "n_keep": 0,
    "min_keep": 0,
}
REPLY_FIELDS = ["tokens", "stop_type", "tokens_predicted", "tokens_evaluated", "truncated", "model"]


class ServerOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """How the servers are started. A server at `server.url` needs only the model file, for its vocabulary."""

    model_file: Annotated[str, Meta(description="GGUF file of the model, relative to the working directory.")]
    processes: Annotated[int, Meta(gt=0, description="Server processes; one per core is best.")] = 1
    slots: Annotated[
        int,
        Meta(
            gt=0, description="Requests that one process answers at the same time, each with its own context."
        ),
    ] = 4
    threads: Annotated[
        int,
        Meta(
            gt=0,
            description="Threads per process. Two give 80 tokens/s on an idle machine and 0.5 to 4 when anything else wants the cores.",
        ),
    ] = 1
    host: Annotated[str, Meta(description="Address to listen on; 0.0.0.0 lets other hosts in.")] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(
            ge=0, le=65535, description="Port of the first process, the others follow; 0 is any that is free."
        ),
    ] = 0


# --- what the server says ----------------------------------------------------------------------------------------


class _Reply(Struct):
    tokens: list[int]
    stop_type: str
    tokens_predicted: int
    tokens_evaluated: int
    truncated: bool


class _ErrorBody(Struct):
    message: str
    type: str = ""


class _Error(Struct):
    error: _ErrorBody


class _Defaults(Struct):
    n_ctx: int


class _Props(Struct):
    default_generation_settings: _Defaults
    total_slots: int
    model_ftype: str
    model_path: str
    build_info: str


class _ModelMeta(Struct):
    n_vocab: int
    n_params: int
    size: int


class _Model(Struct):
    meta: _ModelMeta
    tags: list[str] = []


class _Models(Struct):
    data: Annotated[list[_Model], Meta(min_length=1)]


class _Bias(Struct):
    token: int


class _Settings(Struct):
    logit_bias: list[_Bias]


class _Named(Struct):
    model: str


class _Applied(_Named):
    generation_settings: dict[str, Any]
    tokens: Annotated[list[int], Meta(min_length=1)]


class _Tokens(Struct):
    tokens: list[int]


T = TypeVar("T")


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise EyasError(
            f"server.url: the reply is not llama.cpp's ({error}); point server.url at a llama.cpp server"
        ) from None
    except msgspec.DecodeError:
        raise Retry("reply cut short") from None


def _check_status(status: int, raw: bytes) -> None:
    """Raises what a failed request means."""
    if status == 200:
        return
    if status == 429 or status >= 500 or status in PROXY_STATUS:
        raise Retry(f"HTTP {status}")
    try:
        error = msgspec.json.decode(raw, type=_Error).error
    except msgspec.MsgspecError:
        error = _ErrorBody(message=raw[:200].decode(errors="replace"))
    if status in (401, 403):
        raise EyasError(
            f"server.api_key_env: the server refuses the API key (HTTP {status}); put the right one in that variable"
        )
    if error.type == "exceed_context_size_error":
        raise Reject("prompt too long for the context")
    if "must not be empty" in error.message:
        raise Reject("empty prompt")
    if "invalid tokens" in error.message:
        raise Reject("prompt has ids outside the vocabulary")
    if "grammar" in error.message:
        raise EyasError(
            f"sampling.grammar: {error.message}; correct it (GBNF; the server's log says where it fails)"
        )
    raise EyasError(
        f"server.url: the server refuses the request (HTTP {status}: {error.message}); point server.url at a llama.cpp server of this version"
    )


def read_completion(status: int, raw: bytes, limit: int) -> Completion:
    """The completion in a reply to /completion that asked for at most `limit` tokens."""
    _check_status(status, raw)
    reply = _decode(raw, _Reply)
    if len(reply.tokens) != reply.tokens_predicted or not reply.tokens:
        raise Retry("token ids lost")
    if len(reply.tokens) > limit:
        raise Retry("more token ids than asked for")
    if reply.stop_type == "eos":
        finish, effective = Finish(type="stop", matched=reply.tokens[-1]), limit
    elif reply.stop_type == "limit":
        # Fewer than asked for: the server's context or its own limit is the smaller one.
        finish, effective = Finish(type="length"), len(reply.tokens)
    else:
        raise Retry(f"ended by {reply.stop_type!r}")
    usage = {"prompt_tokens": reply.tokens_evaluated, "completion_tokens": reply.tokens_predicted}
    return Completion(output_ids=reply.tokens, finish=finish, effective_max_new=effective, usage=usage)


def request_fields(
    prompt: Sequence[int], sampling: SamplingConfig, seed: int, limit: int, context: int
) -> dict[str, Any]:
    """Body of a /completion request, every field that decides the distribution included.

    Penalties look at the whole context, as their definitions do; llama.cpp's own default is the last 64 tokens.
    """
    fields = NEUTRAL | {
        "prompt": list(prompt),
        "n_predict": limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repeat_last_n": context,
        "seed": seed % RANDOM_SEED,
        "stream": False,
        "return_tokens": True,
        "cache_prompt": False,
    }
    return fields if sampling.grammar is None else fields | {"grammar": sampling.grammar}


class _Api:
    """Typed calls to one server. Raises Retry, Reject or EyasError as `generate` does."""

    def __init__(self, url: str, key: str | None, patience: int = 0) -> None:
        """patience: as in Client."""
        self._client = Client(url, key, patience)

    def get(self, path: str, kind: type[T]) -> T:
        return self._read(self._client.get(path), kind)

    def post(self, path: str, fields: dict[str, Any], kind: type[T]) -> T:
        return self._read(self._client.post(path, fields), kind)

    def _read(self, answer: Answer, kind: type[T]) -> T:
        _check_status(*answer)
        return _decode(answer.body, kind)


# --- vocabulary --------------------------------------------------------------------------------------------------

VOCABULARY_FORMAT = 4
_CONTROL_TYPES = (2, 3)  # llama.cpp's LLAMA_TOKEN_TYPE_UNKNOWN and _CONTROL
_ADDED_TYPES = (2, 3, 4)  # … and _USER_DEFINED
_SPECIAL_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_SPELT_TYPES = (2, 3, 4, 5)  # … and _USER_DEFINED, _UNUSED: their text is itself, not byte-level characters


class Vocabulary(Struct, frozen=True):
    """What a GGUF file says of its tokenizer. size and mtime_ns are the file's, to tell when this is out of date.

    served: what a server of the file must say of its model, by the names of the manifest.
    """

    format: int
    size: int
    mtime_ns: int
    template: str
    pieces: list[bytes]
    control_ids: list[int]
    added_ids: list[int]
    special_tokens: dict[str, str]
    served: dict[str, int]


@lru_cache(maxsize=2)
def read_vocabulary(model_file: Path) -> Vocabulary:
    """The vocabulary of a GGUF file, from the copy beside it if that is up to date: the file itself takes seconds."""
    stat = model_file.stat()
    cache = model_file.with_name(f"{model_file.name}.vocabulary")
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        kept = msgspec.msgpack.decode(cache.read_bytes(), type=Vocabulary)
        if (kept.format, kept.size, kept.mtime_ns) == (VOCABULARY_FORMAT, stat.st_size, stat.st_mtime_ns):
            return kept
    vocabulary = _extract_vocabulary(model_file, stat)
    temporary = cache.with_name(f".{cache.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        temporary.write_bytes(msgspec.msgpack.encode(vocabulary))
        temporary.replace(cache)
    return vocabulary


def _extract_vocabulary(model_file: Path, stat: os.stat_result) -> Vocabulary:
    from gguf import GGUFReader

    from eyas.pieces import byte_level

    try:
        reader = GGUFReader(model_file)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise EyasError(
            f"server.engine.model_file: {model_file} is not a whole GGUF file ({error}); fetch it again (make model)"
        ) from error
    fields = reader.fields
    kind = fields["tokenizer.ggml.model"].contents() if "tokenizer.ggml.model" in fields else None
    if kind != "gpt2":
        raise EyasError(
            f"server.engine.model_file: {model_file} has a tokenizer of kind {kind!r}; llamacpp decodes byte-level BPE (gpt2) only"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    types: list[int] = fields["tokenizer.ggml.token_type"].contents()
    template = fields["tokenizer.chat_template"].contents() if "tokenizer.chat_template" in fields else ""
    served = {"vocabulary_size": len(tokens)}
    parts = fields["split.count"].contents() if "split.count" in fields else 1
    if parts <= 1:  # else the other files hold the rest of the weights; a merged file says 0
        served["parameters"] = sum(tensor.n_elements for tensor in reader.tensors)
        served["weight_bytes"] = sum(tensor.n_bytes for tensor in reader.tensors)
    return Vocabulary(
        format=VOCABULARY_FORMAT,
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        template=template,
        pieces=[
            token.encode() if type_ in _SPELT_TYPES else byte_level(token)
            for token, type_ in zip(tokens, types, strict=True)
        ],
        control_ids=[i for i, type_ in enumerate(types) if type_ in _CONTROL_TYPES],
        added_ids=[i for i, type_ in enumerate(types) if type_ in _ADDED_TYPES and tokens[i].strip()],
        special_tokens={
            name: tokens[fields[key].contents()] for name, key in _SPECIAL_KEYS.items() if key in fields
        },
        served=served,
    )


AWKWARD_TEXT = "Ünïcödé 漢字 😀👩‍👩‍👧 \t\x00 <b>\r\n\n\n  x = 1;\u2028 the end "


class LlamaCppTokenizer:
    """The served model's tokenizer: encodes on the server, decodes from the vocabulary of the GGUF file."""

    asks_server = True

    def __init__(self, api: _Api, vocabulary: Vocabulary, stop_ids: list[int]) -> None:
        from eyas.chat_template import ChatTemplate
        from eyas.pieces import Pieces

        self._api = api
        self._pieces = Pieces(vocabulary.pieces, stop_ids)
        self.template = vocabulary.template
        self._chat_template = ChatTemplate(vocabulary.template, vocabulary.special_tokens)
        self.special_tokens = vocabulary.special_tokens
        self.stop_ids = stop_ids
        self.control_ids = sorted({*vocabulary.control_ids, *stop_ids})
        self.added_tokens = {
            vocabulary.pieces[i].decode(): i for i in sorted({*vocabulary.added_ids, *stop_ids})
        }
        self.vocabulary_size = len(vocabulary.pieces)

    def encode(self, text: str, *, control: bool) -> list[int]:
        """Ids of `text`. Raises Reject for text with lone surrogates, Retry if the server stays away for 15 s."""
        if not text:
            return []
        fields = {"content": text, "add_special": False, "parse_special": control}
        try:
            return self._api.post("/tokenize", fields, _Tokens).tokens
        except UnicodeEncodeError:
            raise Reject("text is not valid Unicode") from None

    def decode(self, ids: Sequence[int] | Array) -> tuple[str, str]:
        """As in Pieces.decode. Raises EyasError for an id that the model file does not have."""
        try:
            return self._pieces.decode(ids)
        except IndexError:
            raise EyasError(
                f"server.engine.model_file: it has ids below {self.vocabulary_size:,}, the server gave {max(ids):,} or a "
                f"negative one; use the file that the server serves"
            ) from None

    def apply_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str:
        """As in ChatTemplate.apply."""
        if not self.template:
            raise EyasError("server.engine.model_file: the file holds no chat template; use one that does")
        return self._chat_template.apply(messages, tools, options)

    def self_test(self) -> None:
        """Raises EyasError unless server and vocabulary agree on known texts."""
        ids = self.encode(AWKWARD_TEXT, control=False)
        if self.decode(ids)[0] != AWKWARD_TEXT:
            raise EyasError(
                f"server.engine.model_file: its vocabulary turns {ids} into {self.decode(ids)[0]!r}, not {AWKWARD_TEXT!r}; use the file that the server serves"
            )
        for text, i in self.added_tokens.items():
            if i not in self.stop_ids and text not in self.template:
                continue
            as_control, as_text = self.encode(text, control=True), self.encode(text, control=False)
            if as_control != [i] or len(as_text) < 2:
                raise EyasError(
                    f"server.engine.model_file: control token {text!r} is id {i} in the file, but the server reads it as {as_control}, and as {as_text} where it is ordinary text; use the file that the server serves"
                )


# --- the engine --------------------------------------------------------------------------------------------------

_KNOWN_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"invalid magic characters|is not a GGUF",
        "server.engine.model_file: the file is not a GGUF model; fetch it again (make model) or correct the path",
    ),
    (
        r"is not within the file bounds|corrupted or incomplete",
        "server.engine.model_file: the model file is cut short; fetch it again (make model)",
    ),
    (
        r"failed to open GGUF file",
        "server.engine.model_file: the model file cannot be opened; correct the path or its permissions, or run make model",
    ),
    (
        r"insufficient memory|failed to allocate|std::bad_alloc|ended by signal 9\b",
        "server.engine: there is not enough memory; lower slots, processes or model.context",
    ),
    (
        r"couldn't bind HTTP server socket",
        "server.engine.port: the port is taken; choose another, or 0 for any that is free",
    ),
    (
        r"No module named 'xllamacpp'",
        "server.env: xllamacpp is not installed in the engine's environment; install it there (pip install 'eyas[llamacpp]') or name another interpreter",
    ),
    (
        r"libgomp\.so",
        "server.env: the system library libgomp is missing; install it (apt-get install libgomp1, or conda install libgomp)",
    ),
    (
        r"unknown model architecture",
        "server.engine.model_file: this llama.cpp does not know the model's architecture; use another file or a newer xllamacpp",
    ),
    (
        r"error loading model: (.*)",
        r"server.engine.model_file: llama.cpp cannot load the file (\1); fetch it again (make model) or correct the path",
    ),
)


class LlamaCpp(Engine):
    """llama.cpp servers on this machine's processors, from the xllamacpp package: small models, no GPU."""

    name = "llamacpp"
    Options = ServerOptions
    model_fields = ("quantisation", "parameters", "weight_bytes", "vocabulary_size")

    def __init__(self, options: ServerOptions, model: ModelConfig) -> None:
        super().__init__(options, model)
        self.options: ServerOptions = options
        self._api = lru_cache(maxsize=None)(_Api)
        self._names: dict[str, str] = {}  # by address: the name under which its model answers

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return read_vocabulary(self._check_model_file())

    def check_config(self, samplings: Mapping[str, SamplingConfig]) -> None:
        for where, sampling in samplings.items():
            if sampling.regex is not None:
                raise EyasError(
                    f"{where}.regex: llama.cpp takes no regular expressions; write it as a grammar (GBNF)"
                )

    def launch(self, python: str) -> list[Launch]:
        self._check_model_file()
        options = self.options
        reachable = socket.gethostname() if options.host in ("0.0.0.0", "::") else options.host
        return [
            Launch(
                # Isolated: this folder's modules are named like engines, and PYTHONPATH is for another environment.
                argv=[
                    python,
                    "-I",
                    str(LAUNCHER),
                    *("--model", str(Path(options.model_file).absolute())),
                    *("--host", options.host),
                    *("--port", str(port)),
                    *("--slots", str(options.slots)),
                    *("--context", str(self.model.context)),
                    *("--threads", str(options.threads)),
                ],
                env={},
                url=f"http://{reachable}:{port}",
            )
            for port in self._ports()
        ]

    def _check_model_file(self) -> Path:
        path = Path(self.options.model_file)
        if not path.is_file():
            raise EyasError(
                f"server.engine.model_file: {path} does not exist; fetch it (make model) or correct the path, relative to {Path.cwd()}"
            )
        if self.model.kv_dtype != "f16":
            raise EyasError(
                f"model.kv_dtype: llamacpp keeps its KV cache in f16, not {self.model.kv_dtype}; set f16"
            )
        if self.model.sha256:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != self.model.sha256:
                raise EyasError(
                    f"server.engine.model_file: {path} has SHA-256 {digest}, but model.sha256 is {self.model.sha256}; fetch it again (make model) or correct the config"
                )
        return path

    def _ports(self) -> list[int]:
        """A free port per process. All are held until the last is chosen, so that none is chosen twice."""
        options = self.options
        with contextlib.ExitStack() as held:
            ports = []
            for i in range(options.processes):
                wanted = options.port + i if options.port else 0
                family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
                probe = held.enter_context(socket.socket(family))
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((options.host, wanted))
                except (OSError, OverflowError) as error:
                    raise EyasError(
                        f"server.engine.port: {options.host}:{wanted} is taken or not ours to use ({error}); choose another port, or 0 for any that is free"
                    ) from None
                ports.append(int(probe.getsockname()[1]))
        return ports

    def explain(self, log: str) -> str | None:
        for pattern, cause in _KNOWN_CAUSES:
            if match := re.search(pattern, log):
                return match.expand(cause)
        return None

    def inspect(self, url: str, key: str | None) -> dict[str, Any]:
        """As in Engine; raises Retry while the server is not there or still loads."""
        api = self._api(url, key)
        api.get("/health", dict)
        manifest = self.identify(url, key)
        if (context := manifest["slot_context"]) < self.model.context:
            raise EyasError(
                f"model.context: each slot of the server holds {context:,} tokens, fewer than {self.model.context:,}; lower it, or start the server with a larger context"
            )
        self._check_sampling(url, api)
        return manifest

    def identify(self, url: str, key: str | None) -> dict[str, Any]:
        """The whole manifest: the server tells it at once, however many requests wait for a slot."""
        api = self._api(url, key)
        props, served = api.get("/props", _Props), api.get("/v1/models", _Models).data[0]
        tags = dict(tag.partition("=")[::2] for tag in served.tags)
        return {
            "engine": self.name,
            "engine_version": f"xllamacpp {tags['xllamacpp']}" if "xllamacpp" in tags else props.build_info,
            "model_file": Path(props.model_path).name,
            **self._identity(url, props, served),
            "slots": props.total_slots,
            "slot_context": props.default_generation_settings.n_ctx,
            "threads": int(tags["threads"]) if "threads" in tags else None,
            "cpu": tags.get("cpu"),
        }

    def _identity(self, url: str, props: _Props, served: _Model) -> dict[str, Any]:
        """The fields that tell one model from another. Raises EyasError if they contradict config or model file."""
        found = {
            "quantisation": props.model_ftype,
            "parameters": served.meta.n_params,
            "weight_bytes": served.meta.size,
            "vocabulary_size": served.meta.n_vocab,
        }
        quantisation = self.model.quantisation
        if quantisation is not None and props.model_ftype.lower() != quantisation.lower():
            raise EyasError(
                f"model.quantisation: the server holds {props.model_ftype} weights, not {quantisation}; correct the config or serve the right file"
            )
        for name, own in self._vocabulary.served.items():
            if found[name] != own:
                raise EyasError(
                    f"server.url: {url} serves another model than server.engine.model_file ({name} {found[name]}, {self.options.model_file} has {own}); serve that file, or correct the address or the file"
                )
        return found

    def _check_name(self, url: str, name: str) -> None:
        """Raises EyasError if `url` answers under another name than before."""
        known = self._names.setdefault(url, name)
        if name != known:
            raise EyasError(
                f"server.url: {url} now answers as {name}, it was {known}; serve the same model again, or run the same command again if it is the same"
            )

    def _check_sampling(self, url: str, api: _Api) -> None:
        """Generates one token and compares what the server applied with what was asked."""
        # No default of any server, and exact in 32 bits, as llama.cpp keeps them.
        sampling = SamplingConfig(
            temperature=0.625,
            top_p=0.875,
            top_k=33,
            min_p=0.03125,
            repetition_penalty=1.0625,
            presence_penalty=0.125,
            frequency_penalty=0.25,
        )
        asked = request_fields([0], sampling, seed=11, limit=1, context=self.model.context)
        reply = api.post("/completion", asked, _Applied)
        self._check_name(url, reply.model)
        applied = reply.generation_settings
        for name, value in asked.items():
            if name in applied and applied[name] != value:
                raise EyasError(
                    f"server.url: asked for {name} {value}, the server applies {applied[name]}; start it without sampling settings of its own"
                )

    def capacity(self, manifest: Mapping[str, Any]) -> Pool:
        # Each slot has a context of its own, so nothing is held back for what is still to come.
        slots = manifest["slots"]
        return Pool(tokens=slots * manifest["slot_context"], max_running=slots, conservativeness=0.0)

    def tokenizer(self, url: str, key: str | None) -> Tokenizer:
        """As in Engine. Needs the model file here, also with `server.url`."""
        vocabulary = self._vocabulary
        api = _Api(url, key, patience=5)
        # With ignore_eos the server bars every token at which it would stop, and says which.
        fields = NEUTRAL | {"prompt": [0], "n_predict": 1, "ignore_eos": True, "return_tokens": True}
        applied = api.post("/completion", fields, _Applied).generation_settings
        stop_ids = sorted(bias.token for bias in msgspec.convert(applied, _Settings).logit_bias)
        if not stop_ids or stop_ids[-1] >= len(vocabulary.pieces):
            raise EyasError(
                f"server.url: the server stops at ids {stop_ids}, which does not fit {self.options.model_file}; serve the file of server.engine.model_file"
            )
        tokenizer = LlamaCppTokenizer(api, vocabulary, stop_ids)
        tokenizer.self_test()
        return tokenizer

    async def generate(self, session: Session, url: str, request: GenerateRequest) -> Completion:
        prompt, context = request.prompt_ids, self.model.context
        if not prompt:
            raise Reject("empty prompt")
        if min(prompt) < 0 or max(prompt) >= len(self._vocabulary.pieces):
            raise Reject("prompt has ids outside the vocabulary")
        if len(prompt) >= context:
            raise Reject("prompt too long for the context")
        limit = min(request.sampling.max_new_tokens, context - len(prompt))
        fields = request_fields(prompt, request.sampling, request.seed, limit, context)
        body = msgspec.json.encode(fields | {"response_fields": REPLY_FIELDS})
        try:
            status, raw = await session.post(f"{url.rstrip('/')}/completion", body)
        except TimeoutError:
            raise
        except OSError as error:
            raise Retry(f"connection: {error}") from error
        completion = read_completion(status, raw, limit)
        self._check_name(url, _decode(raw, _Named).model)
        return completion


@hookimpl
def register_engines(register: Register) -> None:
    register(LlamaCpp)
