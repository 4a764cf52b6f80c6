"""SGLang's command line: what the config says is what the server is started with, and no secret is in it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eyas import config
from eyas.config import ModelConfig
from eyas.engines.sglang_options import LAUNCHER, SglangOptions, command, launches, warnings
from eyas.errors import EyasError

KIMI = ModelConfig(id="moonshotai/Kimi-K2.5", revision="abc123", kv_dtype="bf16", context=131072)


def options(**section: Any) -> SglangOptions:
    return msgspec.convert(section, SglangOptions, strict=False)


def flags(made: SglangOptions, model: ModelConfig = KIMI) -> list[str]:
    """The flags of the command, without interpreter and launcher, and without where it listens."""
    made_command = command(made, model, "/env/bin/python", 30000)
    assert made_command[:3] == ["/env/bin/python", "-I", str(LAUNCHER)]
    at = made_command.index("--host")
    assert made_command[at : at + 4] == ["--host", "127.0.0.1", "--port", "30000"]
    return made_command[3:at] + made_command[at + 4 :]


def test_what_is_not_set_is_left_to_sglang() -> None:
    model = ModelConfig(id="org/model", kv_dtype="auto", context=4096)
    assert flags(options(), model) == ["--model-path", "org/model", "--context-length", "4096"]


def test_a_kimi_server() -> None:
    made = options(
        tp=8,
        mem_fraction_static=0.94,
        max_running_requests=64,
        schedule_conservativeness=0.3,
        chunked_prefill_size=8192,
        cuda_graph_max_bs=64,
        extra_args=["--attention-backend", "flashinfer", "--decode-log-interval", 40],
    )
    model = msgspec.structs.replace(
        KIMI, quantisation="compressed-tensors", weight_dtype="bf16", trust_remote_code=True
    )
    assert flags(made, model) == [
        *("--model-path", "moonshotai/Kimi-K2.5", "--revision", "abc123"),
        *("--quantization", "compressed-tensors", "--dtype", "bfloat16"),
        *("--kv-cache-dtype", "bfloat16", "--context-length", "131072"),
        *("--tp-size", "8", "--mem-fraction-static", "0.94", "--max-running-requests", "64"),
        *("--schedule-conservativeness", "0.3", "--chunked-prefill-size", "8192"),
        *("--cuda-graph-max-bs", "64", "--trust-remote-code"),
        *("--attention-backend", "flashinfer", "--decode-log-interval", "40"),
    ]


def test_hierarchical_cache_and_speculative_decoding() -> None:
    made = options(
        max_total_tokens=200000,
        enable_hierarchical_cache=True,
        hicache_ratio=2.5,
        hicache_size=100,
        hicache_write_policy="write_through",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path="org/draft",
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
    )
    assert flags(made)[8:] == [
        *("--max-total-tokens", "200000", "--hicache-ratio", "2.5", "--hicache-size", "100"),
        *("--hicache-write-policy", "write_through", "--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", "org/draft", "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
        "--enable-hierarchical-cache",
    ]


def test_a_local_folder_is_served_under_the_models_name(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    # A revision is the hub's; a folder has none.
    assert flags(options(model_path="weights"))[:4] == [
        *("--model-path", str(tmp_path / "weights")),
        *("--served-model-name", "moonshotai/Kimi-K2.5"),
    ]
    with pytest.raises(EyasError, match=r"^server\.engine\.model_path: .*nowhere is no folder; correct"):
        flags(options(model_path="nowhere"))


@pytest.mark.parametrize(
    ("weights", "cache", "expected"),
    [
        (None, "auto", []),
        (None, "bf16", ["--kv-cache-dtype", "bfloat16"]),
        ("bfloat16", "bfloat16", ["--dtype", "bfloat16", "--kv-cache-dtype", "bfloat16"]),
        ("f16", "f16", ["--dtype", "float16"]),
        ("half", "f16", ["--dtype", "float16"]),
        ("f32", "f32", ["--dtype", "float32"]),
        ("bf16", "fp8_e4m3", ["--dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3"]),
        ("auto", "auto", ["--dtype", "auto"]),
    ],
)
def test_number_formats(weights: str | None, cache: str, expected: list[str]) -> None:
    model = ModelConfig(id="m", weight_dtype=weights, kv_dtype=cache, context=64)
    assert flags(options(), model) == ["--model-path", "m", *expected, "--context-length", "64"]


@pytest.mark.parametrize(
    ("weights", "cache", "key"),
    [
        (None, "f16", "model.kv_dtype"),
        ("bf16", "f16", "model.kv_dtype"),
        ("int4", "bf16", "model.weight_dtype"),
    ],
)
def test_number_formats_that_sglang_lacks(weights: str | None, cache: str, key: str) -> None:
    model = ModelConfig(id="m", weight_dtype=weights, kv_dtype=cache)
    with pytest.raises(EyasError, match=f"^{key}: SGLang has "):
        flags(options(), model)


# --- what may not be said ----------------------------------------------------------------------------------------


def complaint(section: dict[str, Any]) -> str:
    """What the user is told, with the place in the config file."""
    with pytest.raises(msgspec.ValidationError) as error:
        options(**section)
    source = config.ConfigSource(())
    return config._explain(error.value, SglangOptions, ("server", "engine"), source)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp-size", 8], "--tp-size is what the key server.engine.tp sets"),
        (["--tp", 8], "--tp is what the key server.engine.tp sets"),
        (
            ["--mem-fraction-static=0.9"],
            "--mem-fraction-static is what the key server.engine.mem_fraction_static",
        ),
        (["--mem-frac", "0.9"], "--mem-frac is what the key server.engine.mem_fraction_static sets"),
        (["--enable-hicache"], "the key server.engine.enable_hierarchical_cache sets"),
        (["--cuda-graph-max-bs-decode", 4], "the key server.engine.cuda_graph_max_bs sets"),
        (["--kv-cache-dtype", "fp8_e4m3"], "--kv-cache-dtype is what the key model.kv_dtype sets"),
        (["--trust-remote-code"], "the key model.trust_remote_code sets"),
        (["--context-length", 1], "the key model.context sets"),
        (["--model", "x"], "the key server.engine.model_path sets"),
        (["--port", 1], "the key server.engine.port sets"),
        (["--api-key", "x"], "--api-key is made anew for each start and never shown; remove it"),
        (["--api-key=x"], "--api-key is made anew"),
        (["--api-k", "x"], "--api-k is made anew"),
        (["--admin-api-key", "x"], "would show a secret"),
        (["--ssl-keyfile-password", "x"], "would show a secret"),
        (["--crash-dump-folder", "x"], "writes the API key to files"),
        (["--config", "x"], "hides flags from Eyas"),
        (["--preferred-sampling-params", "{}"], "set it there"),
    ],
)
def test_flags_that_belong_to_a_key_or_hold_a_secret_are_config_errors(
    arguments: list[Any], message: str
) -> None:
    told = complaint({"extra_args": ["--attention-backend", "triton", *arguments]})
    assert "server.engine.extra_args: " in told
    assert message in told


def test_flags_of_their_own_are_passed_on() -> None:
    extra = [
        "--attention-backend",
        "triton",
        "--ssl-keyfile",
        "k.pem",
        "--ep-size=8",
        "--watchdog-timeout",
        600,
    ]
    assert flags(options(extra_args=extra))[8:] == [str(argument) for argument in extra]


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"hicache_ratio": 2}, "hicache_ratio"),
        ({"hicache_size": 2}, "hicache_size"),
        ({"speculative_num_steps": 3}, "speculative_num_steps"),
        ({"speculative_draft_model_path": "x"}, "speculative_draft_model_path"),
        ({"env": {"HF_TOKEN": "hf_x"}}, "env"),
        ({"env": {"aws_secret": "x"}}, "env"),
        ({"env": {"EYAS_API_KEY": "x"}}, "env"),
        ({"env": {"NO-NAME": "x"}}, "env"),
        ({"tp": 0}, "tp"),
        ({"mem_fraction_static": 1.2}, "mem_fraction_static"),
        ({"hicache_write_policy": "never"}, "hicache_write_policy"),
        ({"tensor_parallel": 8}, "tensor_parallel"),
    ],
)
def test_settings_that_cannot_work_are_config_errors_naming_the_key(
    section: dict[str, Any], key: str
) -> None:
    assert f"server.engine.{key}: " in complaint(section)


# --- starting ----------------------------------------------------------------------------------------------------


def test_the_launch_has_the_environment_as_text_and_an_address() -> None:
    made = options(env={"NCCL_P2P_LEVEL": 4, "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": 1500, "A": "0.50"})
    (launch,) = launches(made, KIMI, sys.executable)
    assert launch.env == {"NCCL_P2P_LEVEL": "4", "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1500", "A": "0.50"}
    port = launch.argv[launch.argv.index("--port") + 1]
    assert int(port) > 0 and launch.url == f"http://127.0.0.1:{port}"


def test_a_server_for_all_hosts_is_reached_by_this_hosts_name() -> None:
    (launch,) = launches(options(host="0.0.0.0"), KIMI, sys.executable)
    assert launch.argv[launch.argv.index("--host") + 1] == "0.0.0.0"
    assert launch.url.startswith(f"http://{socket.gethostname()}:")


def test_a_port_that_is_taken_is_told_before_the_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EyasError, match=rf"^server\.engine\.port: 127\.0\.0\.1:{port} is taken"):
            launches(options(port=port), KIMI, sys.executable)


# --- warnings ----------------------------------------------------------------------------------------------------

FP8 = msgspec.structs.replace(KIMI, kv_dtype="fp8_e4m3")


@pytest.mark.parametrize(
    ("section", "model", "key", "reason"),
    [
        ({}, FP8, "model.kv_dtype", "another distribution"),
        (
            {"enable_hierarchical_cache": True},
            KIMI,
            "server.engine.enable_hierarchical_cache",
            "wrong output",
        ),
        ({"speculative_algorithm": "EAGLE3"}, KIMI, "server.engine.speculative_algorithm", "takes KV cache"),
        ({"schedule_conservativeness": 0.1}, KIMI, "server.engine.schedule_conservativeness", "pushed out"),
        ({"schedule_conservativeness": 2}, KIMI, "server.engine.schedule_conservativeness", "in reserve"),
        ({"cuda_graph_max_bs": 16}, KIMI, "server.engine.cuda_graph_max_bs", "16, but 50 requests may run"),
        ({"mem_fraction_static": 0.97}, KIMI, "server.engine.mem_fraction_static", "less than 5 %"),
        ({"extra_args": ["--lora-paths", "x"]}, KIMI, "server.engine.extra_args", "changes the model"),
        ({"extra_args": ["--allow-auto-truncate"]}, KIMI, "server.engine.extra_args", "cuts long prompts"),
    ],
)
def test_settings_that_hurt_are_warned_of_with_the_reason(
    section: dict[str, Any], model: ModelConfig, key: str, reason: str
) -> None:
    (warning,) = warnings(options(**section), model, 50)
    assert warning.startswith(f"{key}: ") and reason in warning


def test_settings_that_are_usual_are_not_warned_of() -> None:
    usual = options(
        tp=8,
        mem_fraction_static=0.94,
        schedule_conservativeness=0.3,
        cuda_graph_max_bs=64,
        extra_args=["--ep-size", 8],
    )
    assert warnings(usual, KIMI, 50) == []
    # What is asked at once beyond the graphs waits, where no more may run.
    assert warnings(options(cuda_graph_max_bs=64, max_running_requests=64), KIMI, 150) == []
