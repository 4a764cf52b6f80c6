"""SGLang servers through their native API: token ids in, token ids out, not streamed.

Versions differ in what they know and tell, so each server is probed, not looked up by its version: `inspect` keeps what it
learns of each address, and `generate` and `load` go by that.

Every Snakefile and every job that needs a plugin loads this module, so the HTTP clients are imported where they are used.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from eyas.config import ModelConfig, SamplingConfig
from eyas.engines import sglang_manifest
from eyas.engines.http import REPLY_TIMEOUT, Client
from eyas.engines.sglang_causes import explain
from eyas.engines.sglang_options import SglangOptions, check_model, launches, warnings
from eyas.engines.sglang_replies import LOADS, TooLong, has_ids, read_completion
from eyas.errors import EyasError
from eyas.plugins import (
    Completion,
    Engine,
    GenerateRequest,
    Launch,
    Load,
    Pool,
    Register,
    Reject,
    Retry,
    hookimpl,
)
from eyas.wire import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eyas.tokenizer import HubTokenizer
    from eyas.wire import Session

LOAD_TIMEOUT = 10.0  # s
LOOK_TIMEOUT = 60.0  # s for each reply to a look at a server that is known; nobody waits longer for one
SAFE_PROMPT = [0]  # in any vocabulary; an id outside it, or no id at all, ends a server on CPUs
TEST_TOKENS = 32
# A request id is of this process and its number there; one made of chance alone costs a call of the system.
_PROCESS, _numbers = os.urandom(10).hex(), itertools.count()


class _Sampling(Struct):
    """sampling_params of a request: what decides the distribution, each field explicit."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop_token_ids: Sequence[int]
    # Text is read only to test the tokenizer, and then all of it is wanted.
    skip_special_tokens: bool = False
    regex: str | UnsetType = UNSET
    ebnf: str | UnsetType = UNSET
    sampling_seed: int | UnsetType = UNSET


class RequestFields(Struct):
    """Body of a request to /generate."""

    rid: str
    input_ids: Sequence[int]
    sampling_params: _Sampling
    stream: bool = False
    return_logprob: bool | UnsetType = UNSET


class _Text(Struct):
    text: str | None = None


class _Tokens(Struct):
    tokens: list[int]


class _Accelerator(Struct):
    accelerator: str | None = None


class Dialect(Struct, frozen=True):
    """What one server knows and tells.

    prompt_end: prompts must be shorter than this. vocabulary_size: of the checkpoint, where it is to be seen. seeded: it
    takes a seed. ids_in_logprobs: it tells ids only beside log-probabilities. loads: where it tells its load.
    """

    prompt_end: int
    vocabulary_size: int | None
    seeded: bool
    ids_in_logprobs: bool
    loads: str | None

    def room(self, prompt: int) -> int:
        """Most new tokens after a prompt of that length: what the server would silently cut the request down to."""
        return self.prompt_end + sglang_manifest.LEFT_FREE - 2 - prompt


def request_fields(
    request: GenerateRequest, limit: int, stop_ids: Sequence[int], dialect: Dialect
) -> RequestFields:
    """Body of a /generate request for at most `limit` tokens.

    The rid is new each time: a request that was given up keeps its own for seconds. All have one length, since
    aborting one rid also aborts those that begin with it.
    """
    sampling = request.sampling
    return RequestFields(
        rid=f"{_PROCESS}{next(_numbers):012x}",
        input_ids=request.prompt_ids,
        sampling_params=_Sampling(
            max_new_tokens=limit,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            stop_token_ids=stop_ids,
            regex=UNSET if sampling.regex is None else sampling.regex,
            ebnf=UNSET if sampling.grammar is None else sampling.grammar,
            sampling_seed=request.seed if dialect.seeded else UNSET,
        ),
        return_logprob=True if dialect.ids_in_logprobs else UNSET,
    )


class Sglang(Engine):
    """SGLang servers, 0.4.10 or later: large models on GPUs."""

    name = "sglang"
    Options = SglangOptions
    model_fields: ClassVar[tuple[str, ...]] = (
        *("model", "revision", "quantisation", "weight_dtype", "kv_dtype", "weight_version"),
    )

    def __init__(self, options: SglangOptions, model: ModelConfig) -> None:
        super().__init__(options, model)
        self.options: SglangOptions = options
        self._dialects: dict[str, Dialect] = {}

    def check_config(self, samplings: Mapping[str, SamplingConfig]) -> None:
        if self.model.tokenizer is None:
            raise EyasError(
                "model.tokenizer: sglang is asked in token ids, so it needs the model's tokenizer; name its folder, or hub://ORG/NAME@REVISION"
            )
        check_model(self.model)

    def launch(self, python: str) -> list[Launch]:
        return launches(self.options, self.model, python)

    def warnings(self, in_flight: int) -> list[str]:
        return warnings(self.options, self.model, in_flight)

    def explain(self, log: str) -> str | None:
        return explain(log)

    # --- what the server is --------------------------------------------------------------------------------------

    def inspect(self, url: str, key: str | None) -> dict[str, Any]:
        client = self._client(url, key)
        info, checkpoint = self._look(client)
        loads, accelerator = _find_loads(client)
        self._dialects[url.rstrip("/")] = _probe(
            client,
            Dialect(
                prompt_end=info["max_req_input_len"],
                vocabulary_size=checkpoint.get("vocab_size"),
                seeded=True,
                ids_in_logprobs=False,
                loads=loads,
            ),
        )
        return sglang_manifest.manifest(info, accelerator)

    def identify(self, url: str, key: str | None) -> dict[str, Any]:
        """The manifest but for the GPUs, which the server tells elsewhere."""
        told = sglang_manifest.manifest(self._look(self._client(url, key))[0], None)
        del told["accelerator"]
        return told

    def _client(self, url: str, key: str | None) -> Client:
        """For a look. The first may wait long for a server that warms up, or has a long queue."""
        known = url.rstrip("/") in self._dialects
        return Client(url, key, reply_timeout=LOOK_TIMEOUT if known else REPLY_TIMEOUT)

    def _look(self, client: Client) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the server says of itself, and its checkpoint; checked against `model:`."""
        info = sglang_manifest.read_info(client)
        checkpoint = sglang_manifest.checkpoint_of(info, self.model)
        sglang_manifest.check(info, self.model, checkpoint)
        return info, checkpoint

    @cached_property
    def _tokenizer(self) -> HubTokenizer:
        from eyas.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self.model)
        tokenizer.speed_up()
        return tokenizer

    def tokenizer(self, url: str, key: str | None) -> HubTokenizer:
        _self_test(Client(url, key, patience=5), self._tokenizer, self._dialects[url.rstrip("/")])
        return self._tokenizer

    # --- asking --------------------------------------------------------------------------------------------------

    async def generate(self, session: Session, url: str, request: GenerateRequest) -> Completion:
        url = url.rstrip("/")
        dialect, tokenizer, prompt = self._dialects.get(url), self._tokenizer, request.prompt_ids
        if dialect is None:
            raise Retry("the server has not been looked at yet")
        if not prompt:
            raise Reject("empty prompt")
        known = min(tokenizer.vocabulary_size, dialect.vocabulary_size or tokenizer.vocabulary_size)
        if min(prompt) < 0 or max(prompt) >= known:
            raise Reject("prompt has ids outside the vocabulary")
        limit = min(request.sampling.max_new_tokens, dialect.room(len(prompt)))
        if len(prompt) >= dialect.prompt_end or limit < 1:
            raise Reject("prompt too long for the server")
        body = msgspec.json.encode(request_fields(request, limit, tokenizer.stop_ids, dialect))
        try:
            status, raw = await session.post(f"{url}/generate", body)
        except TimeoutError:
            raise
        except OSError as error:
            raise Retry(f"connection: {error}") from error
        try:
            return read_completion(
                status,
                raw,
                limit,
                ids_in_logprobs=dialect.ids_in_logprobs,
                stop_ids=tokenizer.stop_ids,
            )
        except TooLong as refusal:
            # It fits what this server said it holds, so the server is not what it was: it must be looked at again.
            raise Retry(f"{refusal}, which has changed") from refusal

    def capacity(self, manifest: Mapping[str, Any]) -> Pool:
        return sglang_manifest.pool(manifest)

    async def load(self, session: Session, url: str) -> Load | None:
        url = url.rstrip("/")
        dialect = self._dialects.get(url)
        if dialect is None or dialect.loads is None:
            return None
        path = dialect.loads
        try:
            async with asyncio.timeout(LOAD_TIMEOUT):
                status, body = await session.get(url + path)
                return LOADS[path](body) if status == 200 else None
        except OSError:  # time-outs are OSErrors
            return None


# --- probes ------------------------------------------------------------------------------------------------------


def _find_loads(client: Client) -> tuple[str | None, str | None]:
    """Where the server tells its load, and what it says of its GPUs there."""
    for path, read in LOADS.items():
        status, body = client.get(path)
        if status == 200 and read(body) is not None:
            told = path.startswith("/v1/loads")
            return path, msgspec.json.decode(body, type=_Accelerator).accelerator if told else None
    return None, None


def _probe(client: Client, dialect: Dialect) -> Dialect:
    """Generates a token or two to see what the server takes and tells.

    A sampling key that it does not know is a 400 in new versions and a bare 500 in old ones, which may also pass, so it
    is asked twice. All versions since 0.4.10 know all keys but the seed.
    """
    for seeded in (True, True, False):
        dialect = msgspec.structs.replace(dialect, seeded=seeded)
        answer = _generate_safely(client, dialect, 1)
        if answer.status not in (400, 500):
            break
    if answer.status == 200 and not has_ids(answer.body):
        dialect = msgspec.structs.replace(dialect, ids_in_logprobs=True)
        answer = _generate_safely(client, dialect, 1)
    read_completion(*answer, 1, ids_in_logprobs=dialect.ids_in_logprobs)
    return dialect


def _generate_safely(client: Client, dialect: Dialect, tokens: int) -> Answer:
    request = GenerateRequest(SAFE_PROMPT, SamplingConfig(), seed=0)
    return client.post("/generate", request_fields(request, tokens, [], dialect))


def _self_test(client: Client, tokenizer: HubTokenizer, dialect: Dialect) -> None:
    """Raises EyasError unless server and tokenizer agree on a known text and on an answer."""
    from eyas.tokenizer import AWKWARD_TEXT

    ids = tokenizer.encode(AWKWARD_TEXT, control=False)
    asked = {"prompt": AWKWARD_TEXT, "add_special_tokens": False}
    status, body = client.post("/tokenize", asked)
    if status == 200:
        served = msgspec.json.decode(body, type=_Tokens).tokens
        if served != ids:
            raise EyasError(
                f"model.tokenizer: it reads {AWKWARD_TEXT!r} as {ids}, the server as {served}; use the tokenizer of the served model"
            )
    status, body = _generate_safely(client, dialect, TEST_TOKENS)
    answer = read_completion(status, body, TEST_TOKENS, ids_in_logprobs=dialect.ids_in_logprobs).output_ids
    text = msgspec.json.decode(body, type=_Text).text
    if max(answer) >= tokenizer.vocabulary_size:
        raise EyasError(
            f"model.tokenizer: the server generated id {max(answer)}, but it has {tokenizer.vocabulary_size:,} ids; use the tokenizer of the served model"
        )
    decoded = tokenizer.decode(answer)[0]
    if text is not None and _bare(text) != _bare(decoded):
        raise EyasError(
            f"model.tokenizer: it reads {answer} as {decoded!r}, the server as {text!r}; use the tokenizer of the served model"
        )


def _bare(text: str) -> str:
    """Without what servers decode in ways of their own: white space, and what is no whole character."""
    return "".join(text.split()).replace("\N{REPLACEMENT CHARACTER}", "")


@hookimpl
def register_engines(register: Register) -> None:
    register(Sglang)
