"""What the log of an SGLang server that ended says, as one sentence with the remedy.

When one of its processes fails, SGLang prints that process's traceback and then kills them all, itself included: the
way it ended tells nothing, the log does.
"""

from __future__ import annotations

import re

from eyas.engines.sglang_options import OWNED

_GPU_MEMORY = "CUDA out of memory|OutOfMemoryError|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED"

# Pattern -> sentence, the more particular first: a traceback may hold a line of several.
KNOWN_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"(?m)^ModuleNotFoundError: No module named 'sglang'",
        "server.env: SGLang is not installed in the engine's environment; install it there (envs/sglang.yaml) or name another interpreter",
    ),
    (
        r"(?m)^ModuleNotFoundError: No module named '([\w.]+)'",
        r"server.env: the engine's environment lacks the Python module \1; install it there, or install SGLang anew (envs/sglang.yaml)",
    ),
    (
        r"error: ambiguous option: (\S+) could match (.*)",
        r"server.engine.extra_args: \1 is short for several flags of SGLang (\2); write the one you mean",
    ),
    (
        r"[Pp]lease pass the argument `trust_remote_code=True`|setting `trust_remote_code=True`",
        "model.trust_remote_code: the model comes with Python code of its own, which the server must run; set true if you trust its publisher",
    ),
    (
        r"context_length \((\d+)\) is greater than the derived context_length \((\d+)\)",
        r"model.context: \1 tokens are more than the model's own \2; lower it",
    ),
    (
        r"[Qq]uantization method specified in the model config \((\S+)\) does not match",
        r"model.quantisation: the weights say they are \1; set that, or nothing",
    ),
    (
        r"--kv-cache-dtype \S+ is not supported|KV cache requires",
        "model.kv_dtype: this machine cannot keep its KV cache in that format; set bf16",
    ),
    (
        r"(\w+)LinearMethod on CPU requires",
        r"model.quantisation: this machine cannot compute with \1 weights; serve others, or run where there is a GPU",
    ),
    (
        r"GatedRepoError|Cannot access gated repo|401 Client Error",
        "model.id: the Hugging Face hub gives this model only to those who are logged in and have accepted its terms; export HF_TOKEN before the run, or set server.engine.model_path to a local folder",
    ),
    (
        r"RevisionNotFoundError|is not a valid git identifier",
        "model.revision: the Hugging Face hub has no such revision of this model; correct it",
    ),
    (
        r"couldn't connect to '|LocalEntryNotFoundError|OfflineModeIsEnabled|RepositoryNotFoundError|Repository Not Found|is not a valid model identifier",
        "model.id: the weights are not in the Hugging Face cache of this machine, and the hub does not give them; fetch them first, or set server.engine.model_path to a local folder",
    ),
    (
        r"Repo id must be in the form [^:]*: '([^']*)'",
        r"server.engine: there is no folder \1 on this machine; correct the path (model_path or speculative_draft_model_path)",
    ),
    (
        r"Unrecognized model in|does not appear to have a file named config\.json",
        "server.engine.model_path: the folder holds no model, for its config.json is missing or names no model_type; correct the path",
    ),
    (
        r"[Cc]annot find any model weights|No such file or directory: '[^']*\.safetensors",
        "server.engine.model_path: the folder lacks weights; fetch them again or correct the path",
    ),
    (
        r"SafetensorError|MetadataIncompleteBuffer|InvalidHeader",
        "server.engine.model_path: a weight file is cut short or damaged; fetch it again",
    ),
    (
        r"Can't load tokenizer|Couldn't instantiate the backend tokenizer|cannot be instantiated because it is missing",
        "server.engine.model_path: the folder lacks the model's tokenizer; fetch its tokenizer files too",
    ),
    (
        r"Model architectures (\[.*?\]) are not supported",
        r"server.env: this version of SGLang does not know the architecture \1; use a newer one, or another model",
    ),
    (
        r"Not enough memory\. Please try to increase --mem-fraction-static|leave no GPU memory for the KV cache",
        "server.engine.mem_fraction_static: the weights leave no room for a KV cache; raise it, or spread the model over more GPUs (tp)",
    ),
    (
        r"memory capacity is unbalanced",
        "server.engine: other programs occupy some of the GPUs (nvidia-smi shows them); end them, or choose others by CUDA_VISIBLE_DEVICES in server.engine.env",
    ),
    (
        r"Not enough host memory available",
        "server.engine.hicache_size: the host has not that much memory free; lower it or hicache_ratio",
    ),
    (
        rf"[Cc]apture cuda graph failed.*?(?:{_GPU_MEMORY})|(?:{_GPU_MEMORY}).*?[Cc]apture cuda graph failed",
        "server.engine.cuda_graph_max_bs: no GPU memory is left for the CUDA graphs; lower it, or mem_fraction_static",
    ),
    (
        _GPU_MEMORY,
        "server.engine.mem_fraction_static: a GPU ran out of memory beside the KV cache; lower it or chunked_prefill_size, and see that nothing else uses the GPU (nvidia-smi)",
    ),
    (
        r"invalid device ordinal",
        "server.engine.tp: there are fewer GPUs than that here (nvidia-smi, CUDA_VISIBLE_DEVICES); lower it",
    ),
    (
        r"equal to number of numa node on the machine (\d+)",
        r"server.engine.tp: on CPUs each part of the model needs a NUMA node of its own, and there are \1 here; lower it",
    ),
    (
        r"No accelerator \(|Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device",
        "server.engine: SGLang finds no GPU on this machine (nvidia-smi, CUDA_VISIBLE_DEVICES); run where there is one, or set server.url",
    ),
    (
        r"not compiled with CUDA|has no attribute '_cuda_",
        "server.env: the engine's torch is built without CUDA; install SGLang's own (envs/sglang.yaml), or leave what needs a GPU (hierarchical cache, --device cuda) out of server.engine",
    ),
    (
        r"AssertionError: \d+ is not divisible by \d+|should be divisible by tensor parallel|must be divisible by .*(?:tp|tensor)",
        "server.engine.tp: the model cannot be split into that many parts; use a divisor of its number of attention heads",
    ),
    (
        r"(?:NCCL|nccl)[ \w]*[Ee]rror[^\n]*|ncclSystemError|ncclUnhandledCudaError",
        "server.engine.tp: the GPUs cannot talk to each other (NCCL); set NCCL_DEBUG: INFO in server.engine.env to see why (often a small /dev/shm, or peer-to-peer: NCCL_P2P_DISABLE: 1)",
    ),
    (
        r"[Aa]ddress already in use|Port is already in use",
        "server.engine.port: the port is taken; choose another, or 0 for any that is free",
    ),
    (
        r"No space left on device",
        "server.state: a disk is full, or /dev/shm; free some space",
    ),
    (
        r"[Ww]atchdog timeout|watchdog caught",
        "server.engine: the server hung and ended itself; start again, and without the hierarchical cache and speculative decoding if it happens again",
    ),
)


def explain(log: str) -> str | None:
    """One sentence for `log`, the output of a server that ended: a known cause, else the last error in it, else None."""
    # What ended it now, not what ended it before the supervisor started it again.
    log = log.rpartition("[eyas] restarting it")[2]
    if found := _refused_flag(log):
        return found
    for pattern, cause in KNOWN_CAUSES:
        if match := re.search(pattern, log, re.DOTALL if ".*?" in pattern else 0):
            return match.expand(cause)
    if re.search(r"ended by signal 9\b", log) and "kill_process_tree called" not in log:
        return "server.engine: something killed the server, most likely the kernel for want of memory (dmesg tells); use a machine with more, or lower hicache_size"
    if errors := re.findall(r"(?m)^(?:\w+\.)*\w*(?:Error|Exception)\b: .*", log):
        return f"server.engine: SGLang failed: {errors[-1]}"
    return None


def _refused_flag(log: str) -> str | None:
    """A flag that SGLang's parser does not take, under the key that passed it."""
    if match := re.search(r"error: unrecognized arguments: (.*)", log):
        flag = match[1].split()[0].partition("=")[0]
        key = OWNED.get(flag, "server.engine.extra_args")
        return f"{key}: this version of SGLang does not know {match[1]}; remove it, or name another version in server.env"
    if match := re.search(r"error: argument (\S+?)(?:/\S+)*: (.*)", log):
        key = OWNED.get(match[1], "server.engine.extra_args")
        return f"{key}: SGLang does not take it ({match[1]}: {match[2]}); correct it"
    return None
