"""What the log of an SGLang server that ended says: the key at fault and the remedy, in one sentence.

The logs in data/sglang_ends are the last lines of real starts of SGLang 0.5.23 that failed, on a machine without GPU.
What only a GPU shows is quoted from SGLang's and PyTorch's sources.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.engines.sglang_causes import explain

LOGS = Path(__file__).parent / "data" / "sglang_ends"

REAL = {
    "ambiguous_flag": "server.engine.extra_args: --cuda-graph-max is short for several flags",
    "bad_choice": "model.kv_dtype: SGLang does not take it (--kv-cache-dtype: invalid choice: 'f16' (choose from 'auto'",
    "context_too_long": "model.context: 100000 tokens are more than the model's own 65536; lower it",
    "draft_folder_missing": "server.engine: there is no folder /models/nowhere on this machine",
    "folder_without_config": "server.engine.model_path: the folder holds no model",
    "fp8_cache_on_cpu": "model.kv_dtype: this machine cannot keep its KV cache in that format; set bf16",
    "fp8_weights_on_cpu": "model.quantisation: this machine cannot compute with Fp8 weights",
    "hierarchical_cache_without_cuda": "server.env: the engine's torch is built without CUDA",
    "hub_out_of_reach": "model.id: the weights are not in the Hugging Face cache of this machine",
    "no_gpu": "server.engine: SGLang finds no GPU on this machine",
    "no_room_for_cache": "server.engine.mem_fraction_static: the weights leave no room for a KV cache; raise it",
    "no_weights": "server.engine.model_path: the folder lacks weights",
    "port_taken": "server.engine.port: the port is taken",
    "remote_code": "model.trust_remote_code: the model comes with Python code of its own",
    "torch_without_cuda": "server.env: the engine's torch is built without CUDA",
    "tp_beyond_numa": "server.engine.tp: on CPUs each part of the model needs a NUMA node of its own, and there are 1 here",
    "unknown_flag": "server.engine.extra_args: this version of SGLang does not know --no-such-flag",
    "weights_cut_short": "server.engine.model_path: a weight file is cut short or damaged",
}

QUOTED = [
    (
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.7",
        "server.engine.mem_fraction_static: the weights leave no room for a KV cache; raise it",
    ),
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 94.97 GiB",
        "server.engine.mem_fraction_static: a GPU ran out of memory beside the KV cache; lower it",
    ),
    (
        "torch.OutOfMemoryError: CUDA out of memory.\n\nException: Capture cuda graph failed: CUDA out of memory\nPossible solutions:",
        "server.engine.cuda_graph_max_bs: no GPU memory is left for the CUDA graphs; lower it",
    ),
    (
        "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. pre_model_load_memory=40.1",
        "server.engine: other programs occupy some of the GPUs",
    ),
    (
        "RuntimeError: CUDA error: invalid device ordinal\nGPU device may be out of range",
        "server.engine.tp: there are fewer GPUs than that here",
    ),
    (
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        "server.engine: SGLang finds no GPU on this machine",
    ),
    (
        "AssertionError: 6 is not divisible by 4",
        "server.engine.tp: the model cannot be split into that many parts",
    ),
    (
        "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "server.engine.tp: the GPUs cannot talk to each other (NCCL)",
    ),
    (
        "ValueError: Not enough host memory available. Requesting 900.00 GB but only have 400.00 GB free.",
        "server.engine.hicache_size: the host has not that much memory free",
    ),
    (
        "ValueError: Quantization method specified in the model config (compressed-tensors) does not match the quantization method",
        "model.quantisation: the weights say they are compressed-tensors",
    ),
    (
        "ValueError: Model architectures ['KimiK9ForCausalLM'] are not supported for now. Supported architectures:",
        "server.env: this version of SGLang does not know the architecture ['KimiK9ForCausalLM']",
    ),
    ("ModuleNotFoundError: No module named 'sglang'", "server.env: SGLang is not installed in the engine's"),
    (
        "ModuleNotFoundError: No module named 'cutlass.x'",
        "server.env: the engine's environment lacks the Python module cutlass.x",
    ),
    (
        "sglang serve: error: unrecognized arguments: --hicache-write-policy write_back",
        "server.engine.hicache_write_policy: this version of SGLang does not know --hicache-write-policy write_back",
    ),
    (
        "huggingface_hub.errors.GatedRepoError: 401 Client Error.",
        "model.id: the Hugging Face hub gives this model only to those who are logged in",
    ),
    ("OSError: [Errno 28] No space left on device", "server.state: a disk is full"),
]


def test_every_real_log_has_its_sentence() -> None:
    assert {path.stem for path in LOGS.glob("*.txt")} == set(REAL)


@pytest.mark.parametrize("name", sorted(REAL))
def test_a_start_that_failed_is_explained_by_the_key_at_fault(name: str) -> None:
    sentence = explain((LOGS / f"{name}.txt").read_text())
    assert sentence is not None
    assert sentence.startswith(REAL[name])
    assert "\n" not in sentence


@pytest.mark.parametrize(("log", "start"), QUOTED, ids=[start.partition(":")[0] for _, start in QUOTED])
def test_what_only_a_gpu_shows_is_explained_too(log: str, start: str) -> None:
    # SGLang always ends by killing itself, whatever the cause was.
    end = "\n[2026-11-30 08:31:44] kill_process_tree called: parent_pid=7\n[eyas] http://x ended by signal 9 while loading\n"
    sentence = explain(f"Traceback (most recent call last):\n{log}{end}")
    assert sentence is not None and sentence.startswith(start)


def test_a_kill_from_outside_is_told_from_sglangs_own() -> None:
    end = "[eyas] http://127.0.0.1:30000 ended by signal 9"
    told = explain(f"Decode batch, #running-req: 50\n{end}\n")
    assert told is not None and "most likely the kernel for want of memory" in told
    assert explain(f"kill_process_tree called: parent_pid=7\n{end}\n") is None


def test_what_ended_an_earlier_start_is_not_told() -> None:
    first = "torch.OutOfMemoryError: CUDA out of memory.\nkill_process_tree called: parent_pid=7\n"
    restart = "[eyas] http://x ended by signal 9\n[eyas] restarting it; 0 restarts are left\n"
    last = "Decode batch\n[eyas] http://x ended by signal 9\n"
    assert "most likely the kernel" in str(explain(first + restart + last))


def test_an_unknown_error_is_quoted() -> None:
    log = "Traceback (most recent call last):\n  File …\nzmq.error.ZMQError: Too many open files\nkill_process_tree called\n"
    assert explain(log) == "server.engine: SGLang failed: zmq.error.ZMQError: Too many open files"


def test_what_every_healthy_start_prints_is_no_cause() -> None:
    healthy = (
        "[x] Ignore import error when loading sglang.srt.models.inkling: No module named 'cutlass'\n"
        "[x] server_args={'trust_remote_code': False, 'watchdog_timeout': 300, 'nccl_port': None}\n"
        "The server is fired up and ready to roll!\n"
    )
    assert explain(healthy) is None
