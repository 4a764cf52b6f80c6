"""KV bytes per token and admission, against published figures."""

import pytest

from eyas.capacity import Lengths, Moments, kv_bytes_per_token, running, sentence, together
from eyas.errors import EyasError
from eyas.plugins import Pool

KIMI = {"text_config": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61}}


def gqa(layers: int, heads: int, width: int, **more: object) -> dict[str, object]:
    return {
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "head_dim": width,
        "num_attention_heads": 64,
    } | more


# Sums over all ranks in bytes, as published for these models (Hugging Face config.json of each).
@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        (KIMI, "bf16", 70_272),
        (KIMI, "fp8_e4m3", 35_136),
        (gqa(94, 4, 128), "bf16", 192_512),
        (gqa(80, 8, 128), "bf16", 327_680),
        (gqa(36, 8, 64), "bf16", 73_728),
        (gqa(92, 8, 128), "bf16", 376_832),
        (gqa(36, 8, 128), "bf16", 147_456),
        # SmolLM2-135M: head_dim is told by hidden_size alone.
        (
            {"num_hidden_layers": 30, "num_key_value_heads": 3, "num_attention_heads": 9, "hidden_size": 576},
            "f16",
            23_040,
        ),
        # Qwen3-Next: one layer of four has a KV cache.
        (gqa(8, 2, 256, layer_types=["linear_attention"] * 3 + ["full_attention"]), "bf16", 2048),
    ],
)
def test_kv_bytes_per_token(config: dict[str, object], dtype: str, expected: int) -> None:
    assert kv_bytes_per_token(config, dtype) == expected


def test_latent_attention_is_replicated_and_grouped_heads_are_shared() -> None:
    assert kv_bytes_per_token(KIMI, "bf16", tp=8) == 70_272
    assert kv_bytes_per_token(gqa(94, 4, 128), "bf16", tp=2) == 192_512 // 2
    # More ranks than heads: each holds one head, some the same.
    assert kv_bytes_per_token(gqa(94, 4, 128), "bf16", tp=8) == 192_512 // 4


@pytest.mark.parametrize(
    ("config", "dtype", "key"),
    [
        ({}, "bf16", "num_hidden_layers"),
        ({"num_hidden_layers": 4}, "bf16", "attention"),
        (KIMI, "int3", "model.kv_dtype"),
    ],
)
def test_a_config_that_does_not_tell_is_refused(config: dict[str, object], dtype: str, key: str) -> None:
    with pytest.raises(EyasError, match=key):
        kv_bytes_per_token(config, dtype)


def lengths(prompt: float, max_new_tokens: int = 10_240) -> Lengths:
    """The origin's: n = 488, mean 1,416, sd 1,640."""
    return Lengths(prompt=prompt, output=1416, output_sd=1640, max_new_tokens=max_new_tokens)


def test_a_running_request_holds_more_than_half_of_a_mean_answer() -> None:
    assert lengths(0).resident == pytest.approx(1658, abs=1)


@pytest.mark.parametrize(("prompt", "low", "high"), [(300, 41, 84), (600, 39, 75)])
def test_admission_of_the_reference_run(prompt: float, low: int, high: int) -> None:
    """Pool of 200,000 tokens, 150 in flight: 39 to 41 run at ratio 0.7, 75 to 85 at 0.098, and about 50 were seen."""
    found = running(Pool(tokens=200_000), lengths(prompt), 150)
    assert (found.low, found.high, found.binding) == (low, high, "KV cache")
    assert 50 <= found.about <= 60


def test_what_binds() -> None:
    assert running(Pool(tokens=200_000), lengths(300), 32).binding == "in flight"
    assert running(Pool(tokens=200_000, max_running=16), lengths(300), 150).binding == "max running requests"
    roomy = running(Pool(tokens=10_000_000), lengths(300), 150)
    assert (roomy.about, roomy.binding) == (150, "in flight")


def test_levers_move_the_right_way() -> None:
    base = running(Pool(tokens=200_000), lengths(300), 150)
    assert running(Pool(tokens=400_000), lengths(300), 400).about > 1.9 * base.about
    assert running(Pool(tokens=200_000, conservativeness=0.3), lengths(300), 150).about > base.about
    assert running(Pool(tokens=200_000), lengths(300, max_new_tokens=3000), 150).about > base.about


def test_the_sentence_names_the_numbers_and_the_setting() -> None:
    pool = Pool(tokens=200_000)
    told = sentence(pool, lengths(300), running(pool, lengths(300), 150))
    assert (
        "150 in flight, about 59 run (41 to 84)" in told
        and "200,000 tokens" in told
        and "mem_fraction_static" in told
    )
    few = Pool(tokens=10_000_000, max_running=8)
    told = sentence(few, lengths(300), running(few, lengths(300), 32))
    assert told.endswith("the server decodes at most 8 at once (max_running_requests)")
    slots = Pool(tokens=10_000_000, max_running=8, conservativeness=0.0)
    assert sentence(slots, lengths(300), running(slots, lengths(300), 32)).endswith(
        "at most 8 at once (slots)"
    )


def test_servers_add_up_and_the_most_careful_reserve_counts() -> None:
    pools = [Pool(tokens=100, max_running=4), Pool(tokens=50, max_running=2, conservativeness=2.0)]
    assert together(pools) == Pool(tokens=150, max_running=6, conservativeness=2.0)
    assert together([*pools, Pool(tokens=1)]).max_running is None


def test_moments_are_those_of_the_lengths() -> None:
    moments = Moments()
    for prompt, output in ((10, 100), (20, 300), (30, 200)):
        moments.add(prompt, output)
    found = moments.lengths(500)
    assert (found.prompt, found.output) == (20, 200)
    assert found.output_sd == pytest.approx(81.65, abs=0.01)
