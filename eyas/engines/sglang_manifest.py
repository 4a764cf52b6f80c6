"""What an SGLang server is: its manifest, and whether that is what `model:` says.

/server_info repeats the API keys and the whole command line, so nothing of it is kept but what is named here.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from eyas.config import ModelConfig
from eyas.engines.http import Client
from eyas.engines.sglang_options import kv_dtype, weight_dtype
from eyas.engines.sglang_replies import refuse
from eyas.errors import EyasError
from eyas.hub import tokenizer_folder
from eyas.plugins import Pool, Retry

# Settings that say how the model is served; equal launches have them equal.
SETTINGS = (
    "tp_size",
    "dp_size",
    "enable_dp_attention",
    "pp_size",
    "ep_size",
    "context_length",
    "page_size",
    "max_total_num_tokens",
    "max_req_input_len",
    "mem_fraction_static",
    "schedule_policy",
    "schedule_conservativeness",
    "chunked_prefill_size",
    "enable_hierarchical_cache",
    "hicache_ratio",
    "hicache_size",
    "hicache_write_policy",
    "hicache_storage_backend",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "disable_radix_cache",
    "enable_deterministic_inference",
    "attention_backend",
    "sampling_backend",
    "reasoning_parser",
    "device",
)
LEFT_FREE = 6  # tokens of the context that SGLang keeps: max_req_input_len is so much below it

Info = dict[str, Any]


def read_info(client: Client) -> Info:
    """What the server says of itself and of its model, under the names of any version."""
    server = _first(client, "/server_info", "/get_server_info")
    model = _first(client, "/model_info", "/get_model_info")
    info = server | {name: value for name, value in model.items() if value is not None}
    for name in ("model_path", "max_total_num_tokens", "max_req_input_len", "version"):
        if info.get(name) is None:
            raise EyasError(
                f"server.url: the server does not tell its {name}; point server.url at an SGLang server of version 0.4.10 or later, not at a router"
            )
    return info


def _first(client: Client, *paths: str) -> Info:
    """The reply to the first of `paths` that the server knows."""
    for path in paths:
        status, body = client.get(path)
        if status == 404 and path != paths[-1]:
            continue
        if status != 200:
            refuse(status, body)
        try:
            return msgspec.json.decode(body, type=Info)
        except msgspec.ValidationError:
            raise EyasError(
                f"server.url: {path} is not SGLang's; point server.url at an SGLang server"
            ) from None
        except msgspec.DecodeError:
            raise Retry("reply cut short") from None
    raise AssertionError("no paths")


def manifest(info: Info, accelerator: str | None) -> dict[str, Any]:
    """What is recorded of the server with every answer: no secrets, nothing that two equal launches differ in."""
    graphs = info.get("cuda_graph_config")
    draft = info.get("speculative_draft_model_path")
    return {
        "engine": "sglang",
        "engine_version": f"sglang {info['version']}",
        **identity(info),
        "served_model_name": model_name(info.get("served_model_name") or info["model_path"]),
        **{name: info.get(name) for name in SETTINGS},
        "max_running_requests": effective * (info.get("dp_size") or 1)
        if (effective := _state(info).get("effective_max_running_requests_per_dp"))
        else info.get("max_running_requests"),
        "cuda_graph_max_bs": info.get("cuda_graph_max_bs")
        or (graphs["decode"]["max_bs"] if isinstance(graphs, dict) else None),
        "speculative_draft_model": draft and model_name(draft),
        "accelerator": accelerator,
    }


def identity(info: Info) -> dict[str, Any]:
    """The part of the manifest that tells one model from another."""
    return {
        "model": model_name(info["model_path"]),
        "revision": revision(info),
        "quantisation": info.get("quantization"),
        "weight_dtype": info.get("dtype"),
        "kv_dtype": info.get("kv_cache_dtype"),
        "weight_version": info.get("weight_version"),
    }


def pool(manifest: Mapping[str, Any]) -> Pool:
    """What a server of this manifest holds, all data-parallel ranks together."""
    return Pool(
        tokens=manifest["max_total_num_tokens"] * (manifest["dp_size"] or 1),
        max_running=manifest["max_running_requests"],
        conservativeness=manifest["schedule_conservativeness"] or 1.0,
    )


def _state(info: Info) -> Mapping[str, Any]:
    """The internal state of the first data-parallel rank: a list of them, or merged into the whole before 0.4.6."""
    states = info.get("internal_states")
    return states[0] if states else info


_CACHED = re.compile(r"(?:^|/)models--[^/]+?--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})")


def model_name(path: str) -> str:
    """The model's own name, of a hub id, a folder, or a snapshot in the Hugging Face cache."""
    cached = _CACHED.search(path)
    return cached["name"] if cached else path.rstrip("/").rpartition("/")[2]


def revision(info: Info) -> str | None:
    """What was asked for, or what the path of a snapshot in the Hugging Face cache says."""
    cached = _CACHED.search(info["model_path"])
    found: str | None = info.get("revision") or (cached["revision"] if cached else None)
    return found


# --- contradictions ----------------------------------------------------------------------------------------------


def check(info: Info, model: ModelConfig, checkpoint: Mapping[str, Any]) -> None:
    """Raises EyasError if the server serves something else than `model:` says, or changes what requests ask for."""
    if info.get("is_generation") is False:
        raise EyasError("server.url: the server makes embeddings, no text; serve a model that generates")
    if preferred := info.get("preferred_sampling_params"):
        raise EyasError(
            f"server.url: the server merges sampling settings of its own into every request (--preferred-sampling-params {preferred}); start it without them"
        )
    _check_name(info, model)
    _check_numbers(info, model, checkpoint)
    holds = info["max_req_input_len"] + LEFT_FREE
    if holds < model.context:
        raise EyasError(
            f"model.context: the server holds {holds:,} tokens of one request (context length {info.get('context_length')}, KV cache {info['max_total_num_tokens']:,}), fewer than {model.context:,}; lower it, or start the server with a larger context or KV cache"
        )


def _check_name(info: Info, model: ModelConfig) -> None:
    wanted = model_name(model.id)
    named = [info["model_path"], info.get("served_model_name") or info["model_path"]]
    if wanted not in map(model_name, named):
        raise EyasError(
            f"model.id: the server serves {' as '.join(dict.fromkeys(named))}, not {model.id}; correct the config, serve the right model, or name it so (--served-model-name)"
        )
    served = revision(info)
    if None not in (served, model.revision) and served != model.revision:
        raise EyasError(
            f"model.revision: the server serves {served}, not {model.revision}; correct the config or serve that revision"
        )


def _check_numbers(info: Info, model: ModelConfig, checkpoint: Mapping[str, Any]) -> None:
    """Number formats. `auto` is what the checkpoint says; where that is not to be seen, it is believed."""
    asked = info.get("quantization")
    held = asked or checkpoint.get("quantization_config", {}).get("quant_method")
    if (asked or model.quantisation) and held and _plain(held) != _plain(model.quantisation):
        raise EyasError(
            f"model.quantisation: the server holds {held} weights, not {model.quantisation or 'those of the checkpoint'}; correct the config or serve the right weights"
        )
    weights = _resolve(info.get("dtype"), checkpoint.get("dtype") or checkpoint.get("torch_dtype"))
    wanted = weight_dtype(model)
    if wanted not in (None, "auto") and weights and weights != wanted:
        raise EyasError(
            f"model.weight_dtype: the server holds {weights}, not {wanted}; correct the config or start it with --dtype {wanted}"
        )
    if model.kv_dtype == "auto":
        return
    cache = _resolve(info.get("kv_cache_dtype"), weights)
    kept = kv_dtype(model) or wanted
    if cache and cache != kept:
        raise EyasError(
            f"model.kv_dtype: the server keeps its KV cache in {cache}, not {kept}; correct the config or start it with --kv-cache-dtype {kept}"
        )


def _plain(name: str | None) -> str | None:
    return name and name.lower().replace("-", "_")


def _resolve(set_: str | None, auto: str | None) -> str | None:
    names = {"bf16": "bfloat16", "half": "float16", "float": "float32"}
    name = auto if set_ in (None, "auto") else set_
    return names.get(name, name) if name else None


def checkpoint_of(info: Info, model: ModelConfig) -> dict[str, Any]:
    """config.json of the served model, its language part; of the tokenizer's folder if the server's is not seen from here."""
    served = Path(info["model_path"])
    folders = [served] if served.is_absolute() else []
    if model.tokenizer is not None:
        folders.append(tokenizer_folder(model.tokenizer))
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):
            config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
            return config | (config.get("text_config") or {})
    return {}
