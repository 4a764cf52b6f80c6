"""How an SGLang server is started: its options, the command line they make, what speaks against them, and what a
failed start means.

A key of `server.engine` that is not set is a flag that is not passed: SGLang's own default holds. What decides tokens
stands under `model:` and is translated here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from eyas.config import ModelConfig
from eyas.engines.address import free_ports, url_of
from eyas.errors import EyasError
from eyas.plugins import Launch

LAUNCHER = Path(__file__).with_name("sglang_launcher.py")

Scalar = str | int | float
Variable = Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
Count = Annotated[int, Meta(gt=0)]


class SglangOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """How the server is started. A server at `server.url` needs none of it."""

    model_path: Annotated[
        str | None,
        Meta(
            description="Folder of the weights, relative to the working directory; null takes `model.id` at `model.revision` from the Hugging Face hub or its cache."
        ),
    ] = None
    tp: Annotated[
        Count | None,
        Meta(
            description="GPUs that share the model (tensor parallelism). An MLA model such as Kimi-K2.5 keeps its whole KV cache on each of them: more GPUs hold more requests only by what each saves on weights."
        ),
    ] = None
    mem_fraction_static: Annotated[
        Annotated[float, Meta(gt=0, lt=1)] | None,
        Meta(
            description="Share of GPU memory for weights and KV cache, 0 to 1; decides how many requests run. The rest is for activations and CUDA graphs."
        ),
    ] = None
    max_total_tokens: Annotated[
        Count | None, Meta(description="Most tokens that the KV cache holds; null is what fits.")
    ] = None
    max_running_requests: Annotated[
        Count | None,
        Meta(description="Most requests that run at once; null leaves it to the KV cache."),
    ] = None
    schedule_conservativeness: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Scales the KV cache that is kept in reserve for running answers. A request is admitted as if it went on for up to 4,096 tokens times 0.7 times this. Lower it if the cache stays half empty with requests waiting (0.3 is usual), raise it if requests are retracted more than once a minute."
        ),
    ] = None
    chunked_prefill_size: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(
            description="Prompt tokens computed in one step, -1 for whole prompts. Running answers wait for each step, so smaller is smoother and larger is faster."
        ),
    ] = None
    cuda_graph_max_bs: Annotated[
        Count | None,
        Meta(
            description="Largest batch that runs from a CUDA graph; a larger one is slower. Should be what really runs; each graph takes memory."
        ),
    ] = None
    enable_hierarchical_cache: Annotated[
        bool,
        Meta(
            description="Keep evicted prompt prefixes in the host's memory. Does not let more requests run."
        ),
    ] = False
    hicache_ratio: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Size of the host's part of the hierarchical cache, relative to that of the GPU."),
    ] = None
    hicache_size: Annotated[
        Count | None, Meta(description="The same in GB for each GPU; takes precedence over the ratio.")
    ] = None
    hicache_write_policy: Annotated[
        Literal["write_back", "write_through", "write_through_selective"] | None,
        Meta(description="When the hierarchical cache copies to the host."),
    ] = None
    speculative_algorithm: Annotated[
        str | None, Meta(description="Speculative decoding: EAGLE, EAGLE3, NEXTN, …; null is off.")
    ] = None
    speculative_draft_model_path: Annotated[
        str | None, Meta(description="Folder or hub id of the draft model.")
    ] = None
    speculative_num_steps: Annotated[
        Count | None, Meta(description="Tokens that the draft looks ahead, one after the other.")
    ] = None
    speculative_eagle_topk: Annotated[
        Count | None, Meta(description="Branches of the draft's tree at each step.")
    ] = None
    speculative_num_draft_tokens: Annotated[
        Count | None, Meta(description="Drafted tokens that the target checks in one step.")
    ] = None
    env: Annotated[
        dict[Variable, Scalar],
        Meta(
            description="Environment variables of the server, on top of those of the run. No secrets: these are seen on command lines."
        ),
    ] = field(default_factory=dict)
    extra_args: Annotated[
        list[Scalar],
        Meta(
            description="More flags of SGLang, as on its command line, such as `[--attention-backend, flashinfer]`. Not those that a key here or under `model:` sets, and no secrets."
        ),
    ] = field(default_factory=list)
    host: Annotated[str, Meta(description="Address to listen on; 0.0.0.0 lets other hosts in.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 is any that is free.")] = 0

    def __post_init__(self) -> None:
        for key in ("hicache_ratio", "hicache_size", "hicache_write_policy"):
            if getattr(self, key) is not None and not self.enable_hierarchical_cache:
                raise _fault(
                    key, "it does nothing without enable_hierarchical_cache: true; set both or neither"
                )
        for key in (key for key in _FLAGS if key.startswith("speculative_")):
            if getattr(self, key) is not None and self.speculative_algorithm is None:
                raise _fault(key, "it does nothing without speculative_algorithm; set both or neither")
        for name in self.env:
            if _SECRET_NAME.search(name):
                raise _fault(
                    "env",
                    f"{name} looks like a secret; export it before the run starts, the server inherits it",
                )
        for flag, _ in _flags(self.extra_args):
            if reason := _refusal(flag):
                raise _fault("extra_args", f"{flag} {reason}")


def _fault(key: str, message: str) -> ValueError:
    # As msgspec ends its own messages: whoever tells the user finds the key's line in the config by it.
    return ValueError(f"{message} - at `$.{key}`")


# --- flags -------------------------------------------------------------------------------------------------------

# Key of SglangOptions -> flag, for those that are passed as they are.
_FLAGS = {
    "tp": "--tp-size",
    "mem_fraction_static": "--mem-fraction-static",
    "max_total_tokens": "--max-total-tokens",
    "max_running_requests": "--max-running-requests",
    "schedule_conservativeness": "--schedule-conservativeness",
    "chunked_prefill_size": "--chunked-prefill-size",
    "cuda_graph_max_bs": "--cuda-graph-max-bs",
    "hicache_ratio": "--hicache-ratio",
    "hicache_size": "--hicache-size",
    "hicache_write_policy": "--hicache-write-policy",
    "speculative_algorithm": "--speculative-algorithm",
    "speculative_draft_model_path": "--speculative-draft-model-path",
    "speculative_num_steps": "--speculative-num-steps",
    "speculative_eagle_topk": "--speculative-eagle-topk",
    "speculative_num_draft_tokens": "--speculative-num-draft-tokens",
}

# Flags that extra_args may not hold, other spellings included -> the key that sets them.
OWNED = {
    **{flag: f"server.engine.{key}" for key, flag in _FLAGS.items()},
    "--tensor-parallel-size": "server.engine.tp",
    "--cuda-graph-max-bs-decode": "server.engine.cuda_graph_max_bs",
    "--enable-hierarchical-cache": "server.engine.enable_hierarchical_cache",
    "--enable-hicache": "server.engine.enable_hierarchical_cache",
    "--speculative-draft-model": "server.engine.speculative_draft_model_path",
    "--model-path": "server.engine.model_path",
    "--host": "server.engine.host",
    "--port": "server.engine.port",
    "--served-model-name": "model.id",
    "--revision": "model.revision",
    "--quantization": "model.quantisation",
    "--dtype": "model.weight_dtype",
    "--kv-cache-dtype": "model.kv_dtype",
    "--context-length": "model.context",
    "--trust-remote-code": "model.trust_remote_code",
}
_REFUSED = {
    "--api-key": "is made anew for each start and never shown; remove it",
    "--admin-api-key": "would show a secret to every user of the machine; remove it",
    "--ssl-keyfile-password": "would show a secret to every user of the machine; remove it",
    "--crash-dump-folder": "writes the API key to files; remove it",
    "--config": "hides flags from Eyas; write them here",
    "--preferred-sampling-params": "would change what `sampling:` asks for; set it there",
}
_WHOLE = {"--ssl-keyfile"}  # a flag of its own that begins like a refused one
_SECRET_NAME = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS)$", re.IGNORECASE)

# Flags that change answers although nothing under `server:` makes a finished result stale.
_CHANGE_ANSWERS = {
    "--json-model-override-args": "changes the model",
    "--lora-paths": "changes the model",
    "--quantization-param-path": "rounds the KV cache",
    "--enable-watermark": "skews the choice of tokens",
    "--allow-auto-truncate": "cuts long prompts silently",
    "--speculative-accept-threshold-single": "below 1, keeps drafted tokens that the target would not have chosen",
    "--speculative-accept-threshold-acc": "below 1, keeps drafted tokens that the target would not have chosen",
}


def _flags(arguments: Sequence[Scalar]) -> Iterator[tuple[str, str | None]]:
    """Each flag of a command line, with the value that `=` ties to it."""
    for argument in arguments:
        if isinstance(argument, str) and argument.startswith("--"):
            flag, tied, value = argument.partition("=")
            yield flag, value if tied else None


def _refusal(flag: str) -> str | None:
    """Why `flag` may not stand in extra_args. SGLang takes any beginning of a flag for it, if no other begins so."""
    for owned, key in OWNED.items():
        if owned.startswith(flag):
            return f"is what the key {key} sets; use that"
    for refused, reason in _REFUSED.items():
        if refused.startswith(flag) and flag not in _WHOLE:
            return reason
    return None


# --- what decides tokens ------------------------------------------------------------------------------------------

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "fp16": "float16", "half": "float16", "f32": "float32"}
_DTYPES |= {"fp32": "float32", "float": "float32"} | {
    name: name for name in ("auto", "bfloat16", "float16", "float32")
}


def check_model(model: ModelConfig) -> None:
    """Raises EyasError where SGLang cannot serve what `model:` says."""
    weight_dtype(model)
    kv_dtype(model)


def weight_dtype(model: ModelConfig) -> str | None:
    """Value of --dtype; None leaves it to SGLang, which then takes that of the checkpoint."""
    if model.weight_dtype is None:
        return None
    if model.weight_dtype not in _DTYPES:
        raise EyasError(
            f"model.weight_dtype: SGLang has no {model.weight_dtype!r}; use bf16, f16 or f32 (quantised weights are model.quantisation)"
        )
    return _DTYPES[model.weight_dtype]


def kv_dtype(model: ModelConfig) -> str | None:
    """Value of --kv-cache-dtype; None leaves it to SGLang, which then takes that of the weights or of the checkpoint."""
    wanted = _DTYPES.get(model.kv_dtype, model.kv_dtype)
    if wanted == "auto":
        return None
    if wanted in ("float16", "float32"):
        # SGLang has no name for these.
        if wanted == weight_dtype(model):
            return None
        raise EyasError(
            f"model.kv_dtype: SGLang has a KV cache of {model.kv_dtype} only for weights of {model.kv_dtype}; set model.weight_dtype too, or set bf16"
        )
    return wanted


# --- the command --------------------------------------------------------------------------------------------------


def command(options: SglangOptions, model: ModelConfig, python: str, port: int) -> list[str]:
    """The command line that starts the server; the API key is not in it. Raises EyasError naming the key at fault."""
    flags: list[str] = []
    if options.model_path is None:
        flags += ["--model-path", model.id]
        flags += ["--revision", model.revision] if model.revision else []
    else:
        folder = Path(options.model_path).absolute()
        if not folder.is_dir():
            raise EyasError(
                f"server.engine.model_path: {folder} is no folder; correct the path, or remove it to take {model.id} from the Hugging Face hub"
            )
        flags += ["--model-path", str(folder), "--served-model-name", model.id]
    for flag, value in (
        ("--quantization", model.quantisation),
        ("--dtype", weight_dtype(model)),
        ("--kv-cache-dtype", kv_dtype(model)),
        ("--context-length", model.context),
        *((flag, getattr(options, key)) for key, flag in _FLAGS.items()),
    ):
        flags += [] if value is None else [flag, str(value)]
    flags += ["--trust-remote-code"] if model.trust_remote_code else []
    flags += ["--enable-hierarchical-cache"] if options.enable_hierarchical_cache else []
    flags += ["--host", options.host, "--port", str(port)]
    # Isolated: this folder's modules are named like engines, and PYTHONPATH is for another environment.
    return [python, "-I", str(LAUNCHER), *flags, *map(str, options.extra_args)]


def launches(options: SglangOptions, model: ModelConfig, python: str) -> list[Launch]:
    """The one process to start."""
    (port,) = free_ports(options.host, options.port, 1)
    argv = command(options, model, python, port)
    env = {name: str(value) for name, value in options.env.items()}
    return [Launch(argv=argv, env=env, url=url_of(options.host, port))]


def warnings(options: SglangOptions, model: ModelConfig, in_flight: int) -> list[str]:
    """As Engine.warnings."""
    found: list[str] = []
    if model.kv_dtype.startswith(("fp8", "mxfp8", "fp4", "nvfp4")):
        found.append(
            f"model.kv_dtype: {model.kv_dtype} rounds the KV cache, so the answers are those of another distribution than with bf16; and Kimi-K2.5 in SGLang was reported to drop to 16 tokens/s with it. Use it only if the target will be served so"
        )
    if options.enable_hierarchical_cache:
        found.append(
            "server.engine.enable_hierarchical_cache: wrong output in a few of 10,000 answers was reported (sglang#27504, #22811), and deadlocks after hours under tensor parallelism (sglang#26921); it gains nothing where prompts share no long beginning. Compare a sample of answers with and without"
        )
    if options.speculative_algorithm:
        found.append(
            "server.engine.speculative_algorithm: the answers remain the target's own distribution, but the draft takes KV cache from it and gains little once many requests run. Compare tokens/s with and without before a long run"
        )
    conservativeness = options.schedule_conservativeness
    if conservativeness is not None and conservativeness < 0.3:
        found.append(
            f"server.engine.schedule_conservativeness: at {conservativeness:g} more requests are admitted than the KV cache can hold to their end; those that are pushed out are computed again, and throughput was seen to stay down after it (sglang#26248). 0.3 to 1.3 is usual"
        )
    if conservativeness is not None and conservativeness > 1.3:
        found.append(
            f"server.engine.schedule_conservativeness: at {conservativeness:g} so much of the KV cache is kept in reserve that few requests run. 0.3 to 1.3 is usual"
        )
    graph = options.cuda_graph_max_bs
    running = min(in_flight, options.max_running_requests or in_flight)
    if graph is not None and graph < running:
        found.append(
            f"server.engine.cuda_graph_max_bs: {graph}, but {running} requests may run; larger batches than {graph} run without CUDA graphs, which is slower. Raise it, or lower max_running_requests to it"
        )
    if options.mem_fraction_static is not None and options.mem_fraction_static > 0.95:
        found.append(
            f"server.engine.mem_fraction_static: {options.mem_fraction_static:g} leaves less than 5 % of GPU memory for activations and CUDA graphs, so the server may run out of memory hours into the run. 0.94 was the most that worked for Kimi-K2.5 on eight GPUs of 96 GB"
        )
    for flag, _ in _flags(options.extra_args):
        if flag in _CHANGE_ANSWERS:
            found.append(
                f"server.engine.extra_args: {flag} {_CHANGE_ANSWERS[flag]}, and nothing under `server:` makes finished answers stale. Give the run a model.id and a journal of its own"
            )
    return found
