"""What an SGLang server's replies mean: a completion, or Retry, Reject or EyasError; and how busy it says it is.

Written against captures of 0.4.10, 0.5.5 and 0.5.23, which have six shapes of errors between them; see
tests/test_sglang_captures.py.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from msgspec import Struct

from eyas.engines.http import PROXY_STATUS
from eyas.errors import EyasError
from eyas.plugins import Busy, Completion, Load, Reject, Retry
from eyas.records import Finish

if TYPE_CHECKING:
    from collections.abc import Sequence

# SGLang reports a token outside the vocabulary as if this stop string had come.
NAN = "NaN happened"
MESSAGE_LENGTH = 300  # characters of a server's message that are shown


class TooLong(Reject):
    """The prompt, or prompt and answer together, exceed what the server holds."""


# --- completions -------------------------------------------------------------------------------------------------


class _FinishReason(Struct):
    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


class _Meta(Struct):
    """Of meta_info, what is looked at. total_retractions is the older name of num_retractions."""

    finish_reason: _FinishReason | None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    num_retractions: int | None = None
    total_retractions: int | None = None


class _MetaWithLogprobs(_Meta):
    # [logprob, id, text] for each token
    output_token_logprobs: list[tuple[Any, int, Any]] | None = None


class _Generated(Struct):
    meta_info: _Meta
    output_ids: msgspec.Raw = msgspec.Raw(b"null")


class _GeneratedWithLogprobs(Struct):
    meta_info: _MetaWithLogprobs


_decoder = msgspec.json.Decoder(_Generated)
# In JSON nothing but a key, whatever the answer's text spells; and what is put in place of its ids, a number that no
# server writes.
_IDS, _CUT = b',"output_ids":[', b"-0.0e-77"
_logprobs_decoder = msgspec.json.Decoder(_GeneratedWithLogprobs)


def read_completion(
    status: int, body: bytes, limit: int, *, ids_in_logprobs: bool = False, stop_ids: Sequence[int] = ()
) -> Completion:
    """The completion in a reply to /generate that asked for at most `limit` tokens, ended by one of `stop_ids`.

    ids_in_logprobs: the server tells ids only beside log-probabilities, as 0.4.10 does.
    Raises Retry or Busy for what may pass, Reject for a prompt that never will, EyasError for what stops the run.
    """
    if status != 200:
        refuse(status, body)
    meta, told = _decode(body, ids_in_logprobs)
    reason = meta.finish_reason
    if reason is None:
        raise Retry("reply without an end")
    if reason.type == "abort":
        raise Retry(f"aborted: {reason.message}")
    if reason.matched == NAN:
        raise Retry(f"numerical failure: {NAN}")
    ids = _ids(told, body)  # not before: what failed may have any
    if not ids:
        raise Retry("token ids lost")
    if reason.type == "length" and reason.length is not None:
        if len(ids) < reason.length:
            raise Retry("token ids lost")
        if len(ids) > min(limit, reason.length):
            raise Retry("more token ids than told or asked for")
        if ids[-1] in stop_ids:
            # 0.4.10 and 0.5.5 look at the length first, but the answer is whole.
            finish, effective = Finish(type="stop", matched=ids[-1]), limit
        else:
            # Fewer than asked for: the server's context, KV cache or own limit is the smaller one.
            finish, effective = Finish(type="length"), reason.length
    elif reason.type == "stop" and isinstance(reason.matched, int):
        if ids[-1] != reason.matched:
            raise Retry("token ids lost")
        finish, effective = Finish(type="stop", matched=reason.matched), limit
    elif reason.type == "stop":
        raise EyasError(
            f"server.url: the server ended an answer at {reason.matched!r}, which was never asked for; start it without stop strings of its own"
        )
    else:
        raise Retry(f"ended by {reason.type!r}")
    return Completion(output_ids=ids, finish=finish, effective_max_new=effective, usage=_usage(meta))


def has_ids(body: bytes) -> bool:
    """Whether a reply to /generate tells token ids without being asked for log-probabilities."""
    return _decode(body, False)[1] is not None


def _decode(body: bytes, ids_in_logprobs: bool) -> tuple[_Meta, bytes | list[int] | None]:
    """What a reply tells of itself, and its ids, in JSON where they are by themselves."""
    try:
        if ids_in_logprobs:
            meta = _logprobs_decoder.decode(body).meta_info
            logprobs = meta.output_token_logprobs
            return meta, None if logprobs is None else [token for _, token, _ in logprobs]
        begin = body.find(_IDS)
        end = body.find(b"]", begin) + 1
        if begin >= 0 and end:
            # Each id would be read here to find where they end, and once more to know it.
            with suppress(msgspec.DecodeError):
                reply = _decoder.decode(body[: begin + len(_IDS) - 1] + _CUT + body[end:])
                if bytes(reply.output_ids) == _CUT:  # else those were another object's
                    return reply.meta_info, body[begin + len(_IDS) - 1 : end]
        reply = _decoder.decode(body)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _strange(error) from None
    except msgspec.DecodeError:
        raise Retry("reply cut short") from None
    told = bytes(reply.output_ids)
    return reply.meta_info, None if told == b"null" else told


def _ids(told: bytes | list[int] | None, body: bytes) -> Sequence[int] | None:
    if not isinstance(told, bytes):
        return told
    from eyas.lengths import Ids

    try:
        return Ids(told)
    except ValueError as error:
        try:
            msgspec.json.decode(body, type=msgspec.Raw)
        except msgspec.DecodeError:
            raise Retry("reply cut short") from None
        raise _strange(error) from None


def _strange(why: Exception) -> EyasError:
    return EyasError(f"server.url: the reply is not SGLang's ({why}); point server.url at an SGLang server")


def _usage(meta: _Meta) -> dict[str, int]:
    retractions = meta.total_retractions if meta.num_retractions is None else meta.num_retractions
    told = {
        "prompt_tokens": meta.prompt_tokens,
        "completion_tokens": meta.completion_tokens,
        "cached_tokens": meta.cached_tokens,
        "num_retractions": retractions,
    }
    return {name: count for name, count in told.items() if count is not None}


# --- errors ------------------------------------------------------------------------------------------------------


class _Error(Struct):
    """Where the message is: {"error": {"message"}}, {"error": text}, {"message"} or {"detail"}."""

    error: Any = None
    message: Any = None
    detail: Any = None


def message_of(body: bytes) -> str:
    """The message in the body of a failed request, whatever its shape, on one line."""
    try:
        found = msgspec.json.decode(body, type=_Error)
    except msgspec.MsgspecError:
        text = body.decode(errors="replace")
    else:
        error = found.error.get("message") if isinstance(found.error, dict) else found.error
        text = str(error or found.message or found.detail or "")
    return " ".join(text.split())[:MESSAGE_LENGTH] or "no reason given"


_TOO_LONG = re.compile(
    r"longer than the model's context length"
    r"|exceeds the maximum allowed length"
    r"|exceeds the model's maximum context length"
)
# A load balancer may give up on the server's behalf.
_MAY_PASS = re.compile(r"Duplicate request ID detected: |disconnected from the client side")
_GRAMMAR = re.compile(r"\b(regex|ebnf)( grammar\b|')")
# What xgrammar puts before what it says: the time, which would make one mistake a different one for each job.
_LOGGED = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
_GRAMMAR_KEYS = {"regex": "sampling.regex", "ebnf": "sampling.grammar"}


def refuse(status: int, body: bytes) -> NoReturn:
    """Raises what a failed request means."""
    message = message_of(body)
    if status == 429 or (status == 503 and ("queue is full" in message or "waiting timeout" in message)):
        raise Busy(f"HTTP {status}: {message}")
    if status >= 500 or status in PROXY_STATUS:
        raise Retry(f"HTTP {status}: {message}")
    if status in (401, 403):
        raise EyasError(
            f"server.api_key_env: the server refuses the API key (HTTP {status}); put the right one in that variable"
        )
    if status in (404, 405):
        raise EyasError(
            f"server.url: there is no SGLang server (HTTP {status}: {message}); point server.url at one"
        )
    if _TOO_LONG.search(message):
        raise TooLong("prompt too long for the server")
    if "input_ids cannot be empty" in message:
        raise Reject("empty prompt")
    if "greater than the vocab size" in message:
        raise Reject("prompt has ids outside the vocabulary")
    if _MAY_PASS.search(message):
        raise Retry(message)
    if "grammar" in message.lower():
        kind = _GRAMMAR.search(message)
        keys = _GRAMMAR_KEYS[kind[1]] if kind else "sampling.regex or sampling.grammar"
        raise EyasError(f"{keys}: {_LOGGED.sub('', message)}; correct it")
    raise EyasError(
        f"server.url: the server refuses the request (HTTP {status}: {message}); correct what it names in `sampling:`, or use SGLang 0.4.10 or later"
    )


# --- load --------------------------------------------------------------------------------------------------------


class _Queues(Struct):
    retracted: int | None = None


class _Rank(Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float | None = None
    queues: _Queues | None = None


class _Loads(Struct):
    loads: list[_Rank]


class _OldRank(Struct):
    num_reqs: int
    num_waiting_reqs: int


def read_loads(body: bytes) -> Load | None:
    """The load in a reply to /v1/loads, of all data-parallel ranks together; the fullest rank's KV cache.

    retractions are those that wait to be run again: the only count that is told without /metrics, and enough to see
    that there was one.
    """
    ranks = _decode_load(body, _Loads)
    if ranks is None or not ranks.loads:
        return None
    usage = [rank.token_usage for rank in ranks.loads if rank.token_usage is not None]
    retracted = [rank.queues.retracted for rank in ranks.loads if rank.queues is not None]
    return Load(
        running=sum(rank.num_running_reqs for rank in ranks.loads),
        waiting=sum(rank.num_waiting_reqs for rank in ranks.loads),
        kv_use=max(usage, default=None),
        retractions=_sum(retracted),
    )


def read_old_load(body: bytes) -> Load | None:
    """The load in a reply to /get_load; 0.4.10 tells tokens there, not requests."""
    ranks = _decode_load(body, list[_OldRank])
    if not ranks:
        return None
    waiting = sum(rank.num_waiting_reqs for rank in ranks)
    return Load(running=sum(rank.num_reqs for rank in ranks) - waiting, waiting=waiting)


_METRIC = re.compile(
    rb"^sglang:(num_running_reqs|num_queue_reqs|token_usage|num_retracted_requests_total|num_retractions_sum|total_retracted_reqs)(?:\{[^}\n]*\})? (\S+)$",
    re.MULTILINE,
)
_RETRACTIONS = ("num_retracted_requests_total", "num_retractions_sum", "total_retracted_reqs")


def read_metrics(body: bytes) -> Load | None:
    """The load in /metrics. Counters of retractions have had three names, and are absent before the first."""
    found: dict[str, list[float]] = {}
    for name, value in _METRIC.findall(body):
        if math.isfinite(number := float(value)):
            found.setdefault(name.decode(), []).append(number)
    if "num_running_reqs" not in found or "num_queue_reqs" not in found:
        return None
    retractions = next((found[name] for name in _RETRACTIONS if name in found), [0.0])
    return Load(
        running=int(sum(found["num_running_reqs"])),
        waiting=int(sum(found["num_queue_reqs"])),
        kv_use=max(found.get("token_usage", []), default=None),
        retractions=int(sum(retractions)),
    )


LOADS = {
    "/v1/loads?include=core,queues": read_loads,
    "/get_load": read_old_load,
    "/metrics": read_metrics,
}


def _decode_load(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError:
        return None


def _sum(counts: list[int | None]) -> int | None:
    told = [count for count in counts if count is not None]
    return sum(told) if told else None
