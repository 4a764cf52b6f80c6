"""Where the real SGLang of the tests lies (`make sglang-cpu`), and how a config makes it serve on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.config import ModelConfig

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
TINY = ROOT / "data" / "hub" / "tiny-reasoner"
SMOLLM2 = ROOT / "data" / "hub" / "SmolLM2-135M-Instruct"

# 4 requests at a time, in a KV cache that is smaller than four of the context.
ON_CPUS: dict[str, Any] = {
    "mem_fraction_static": 0.3,
    "max_running_requests": 4,
    "max_total_tokens": 2048,
    "env": {
        "SGLANG_USE_CPU_ENGINE": 1,
        "HF_HUB_OFFLINE": 1,
        "TRANSFORMERS_OFFLINE": 1,
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": 1,
    },
    "extra_args": ["--device", "cpu", "--attention-backend", "torch_native"],
}


def python() -> str:
    """The interpreter of `server.env`, or a skip that says how to get it."""
    if not (PYTHON.parent.parent / "installed").is_file() or not (TINY / "config.json").is_file():
        pytest.skip(f"no SGLang for CPUs in {PYTHON.parent.parent}: run `make sglang-cpu`")
    return str(PYTHON)


def model(folder: Path = TINY, **changes: Any) -> ModelConfig:
    fields = {"id": folder.name, "tokenizer": str(folder), "kv_dtype": "bf16", "context": 1024, **changes}
    return ModelConfig(**fields)


def engine_section(folder: Path = TINY, **changes: Any) -> dict[str, Any]:
    """`server.engine` of a config."""
    return {"name": "sglang", "model_path": str(folder), **ON_CPUS, **changes}
