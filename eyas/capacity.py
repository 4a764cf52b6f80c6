"""How many requests a server really runs: what its KV cache holds, against the lengths that were measured.

The model of admission is SGLang's (schedule_policy.py and new_token_ratio_tracker.py of sglang 0.5): a request runs
while what all running ones hold, plus a reserve for what each may still generate, fits the KV cache. The reserve is
`ratio * min(max_new_tokens - generated, 4096)`; the ratio starts at 0.7, decays to 0.098 within 600 decoding steps, and
jumps up again whenever a request had to be pushed out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from eyas.errors import EyasError
from eyas.plugins import Pool

RATIO_FIRST, RATIO_LAST = 0.7, 0.098  # SGLANG_INIT_NEW_TOKEN_RATIO, and 0.14 of it
RESERVE_MOST = 4096  # tokens; SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION

_BYTES = {"fp32": 4, "f32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "f16": 2, "fp16": 2, "float16": 2}
_BYTES |= {"fp8_e4m3": 1, "fp8_e5m2": 1}


def together(pools: Sequence[Pool]) -> Pool:
    """What several servers hold; the most careful reserve of theirs."""
    most = [pool.max_running for pool in pools if pool.max_running is not None]
    return Pool(
        tokens=sum(pool.tokens for pool in pools),
        max_running=sum(most) if len(most) == len(pools) else None,
        conservativeness=max(pool.conservativeness for pool in pools),
    )


class Lengths(Struct, frozen=True, kw_only=True):
    """Measured lengths in tokens: mean prompt, mean and standard deviation of the output, and the limit asked for."""

    prompt: float
    output: float
    output_sd: float
    max_new_tokens: int

    @property
    def resident(self) -> float:
        """Mean tokens that a running request has generated so far.

        Long answers are more often met running than short ones, so this is E[L²] / 2E[L], not E[L] / 2.
        """
        return (self.output**2 + self.output_sd**2) / (2 * self.output) if self.output else 0.0


class Moments:
    """Lengths as they come."""

    def __init__(self) -> None:
        self._count = self._prompt = self._output = self._squares = 0

    def add(self, prompt: int, output: int) -> None:
        """One finished request, in tokens."""
        self._count += 1
        self._prompt += prompt
        self._output += output
        self._squares += output * output

    def lengths(self, max_new_tokens: int) -> Lengths:
        """All so far; needs one at least."""
        mean = self._output / self._count
        return Lengths(
            prompt=self._prompt / self._count,
            output=mean,
            output_sd=max(self._squares / self._count - mean * mean, 0.0) ** 0.5,
            max_new_tokens=max_new_tokens,
        )


class Running(Struct, frozen=True, kw_only=True):
    """How many requests run of those in flight: with the reserve at its highest, in between, and at its lowest.

    binding: the setting that bounds `about`.
    """

    in_flight: int
    low: int
    about: int
    high: int
    binding: str


def kv_bytes_per_token(config: Mapping[str, Any], kv_dtype: str, tp: int = 1) -> int:
    """Bytes of KV cache that one token takes on each tensor-parallel rank.

    config: the model's config.json, multimodal ones with `text_config` included. With multi-head latent attention the
    cache is the same on every rank; with grouped-query attention ranks share the heads. Raises EyasError for a config
    that tells neither.
    """
    text = config.get("text_config") or config
    size = _BYTES.get(kv_dtype)
    if size is None:
        raise EyasError(
            f"model.kv_dtype: the size of {kv_dtype!r} is unknown; known are {', '.join(sorted(_BYTES))}"
        )
    layers = text.get("num_hidden_layers")
    kinds = text.get("layer_types")
    if kinds:  # linear-attention layers keep a state of fixed size, no KV cache
        layers = sum(kind != "linear_attention" for kind in kinds)
    if not layers:
        raise EyasError(
            "config.json: it has no num_hidden_layers; point model.tokenizer at the model's own files"
        )
    if text.get("kv_lora_rank"):
        return int((text["kv_lora_rank"] + text["qk_rope_head_dim"]) * layers * size)
    queries = text.get("num_attention_heads")
    heads = text.get("num_key_value_heads") or queries
    width = text.get("head_dim") or (queries and text.get("hidden_size", 0) // queries)
    if not heads or not width:
        raise EyasError(
            "config.json: its attention is of no known kind; KV bytes per token cannot be computed"
        )
    return int(2 * -(-heads // min(tp, heads)) * width * layers * size)


def admitted(pool: Pool, lengths: Lengths, ratio: float) -> float:
    """How many requests fit the KV cache with a reserve of `ratio`, which the pool's conservativeness scales."""
    reserve = min(max(lengths.max_new_tokens - lengths.resident, 0), RESERVE_MOST) * ratio
    return max(pool.tokens / (lengths.prompt + lengths.resident + reserve * pool.conservativeness), 1.0)


def running_key(pool: Pool) -> str:
    """The engine's own option that sets Pool.max_running: llama.cpp's slots hold nothing in reserve, SGLang's requests do."""
    return "max_running_requests" if pool.conservativeness else "slots"


def running(pool: Pool, lengths: Lengths, in_flight: int) -> Running:
    """How many of `in_flight` requests the server runs at a time, once it is busy."""
    most = min(in_flight, pool.max_running or in_flight)
    low, high = (admitted(pool, lengths, ratio) for ratio in (RATIO_FIRST, RATIO_LAST))
    middle = (low * high) ** 0.5
    if middle >= in_flight == most:
        binding = "in flight"
    elif middle >= most:
        binding = "max running requests"
    else:
        binding = "KV cache"
    return Running(
        in_flight=in_flight,
        low=min(int(low), most),
        about=min(int(middle), most),
        high=min(int(high), most),
        binding=binding,
    )


def sentence(pool: Pool, lengths: Lengths, found: Running) -> str:
    """What a person should know of it, in one line."""
    told = f"{found.in_flight} in flight, about {found.about} run ({found.low} to {found.high}): "
    if found.binding == "in flight":
        return told + "the ceiling of requests in flight binds (server.concurrency, or the lane's)"
    if found.binding == "max running requests":
        return told + f"the server decodes at most {pool.max_running} at once ({running_key(pool)})"
    each = lengths.prompt + lengths.resident
    return told + (
        f"the KV cache holds {pool.tokens:,} tokens, a running request {each:,.0f} and a reserve for what it may still "
        f"generate; more run with a larger KV cache (mem_fraction_static), a lower schedule_conservativeness or a lower max_new_tokens"
    )
