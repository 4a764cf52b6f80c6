"""The request hash tells apart what can change an answer, and only that."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.config import ModelConfig, SamplingConfig
from eyas.request import Hasher, seed_of

MODEL = ModelConfig(id="m")
IDENTITY: dict[str, Any] = {
    "id": "n",
    "revision": "abc",
    "sha256": "0" * 64,
    "quantisation": "Q4_1",
    "weight_dtype": "bf16",
    "kv_dtype": "f8",
}
NO_IDENTITY: dict[str, Any] = {
    "context": 8192,
    "tokenizer": "elsewhere",
    "trust_remote_code": True,
    "tools": "system",
    "template_options": {"thinking": True},
    "reasoning": {"name": "tags"},
}
SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "max_new_tokens": 5,
    "grammar": "root ::= x",
    "regex": "x+",
}


def hashed(
    prompt_ids: tuple[int, ...] = (1, 2, 3),
    sample: int = 0,
    occurrence: int = 0,
    model: ModelConfig = MODEL,
    **sampling: Any,
) -> str:
    return Hasher(model, SamplingConfig(**sampling)).hash(prompt_ids, sample, occurrence)


def test_every_field_of_model_and_sampling_has_its_place_here() -> None:
    assert set(SAMPLING) == set(SamplingConfig.__struct_fields__)
    assert {*IDENTITY, *NO_IDENTITY} == set(ModelConfig.__struct_fields__)


@pytest.mark.parametrize("name", SAMPLING)
def test_each_sampling_field_changes_the_hash(name: str) -> None:
    assert hashed(**{name: SAMPLING[name]}) != hashed()


@pytest.mark.parametrize("name", IDENTITY)
def test_each_identity_field_of_the_model_changes_the_hash(name: str) -> None:
    assert hashed(model=msgspec.structs.replace(MODEL, **{name: IDENTITY[name]})) != hashed()


@pytest.mark.parametrize("name", NO_IDENTITY)
def test_what_decides_only_the_prompt_or_its_reading_does_not(name: str) -> None:
    assert hashed(model=msgspec.structs.replace(MODEL, **{name: NO_IDENTITY[name]})) == hashed()


def test_where_answers_end_changes_the_hash_whatever_the_order() -> None:
    hashes = {
        Hasher(MODEL, SamplingConfig(), stop_ids).hash([1], 0, 0) for stop_ids in ([], [2], [2, 7], [7, 2])
    }
    assert len(hashes) == 3


def test_fields_that_hold_the_same_value_are_not_confused() -> None:
    fields = [hashed(**{name: 0.5}) for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty")]
    models = [hashed(model=ModelConfig(id="m", **{name: "x"})) for name in ("revision", "quantisation")]
    assert len({*fields, *models}) == 6


REQUESTS = st.tuples(
    st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple), st.integers(0, 99), st.integers(0, 99)
)


@given(REQUESTS, REQUESTS)
def test_different_ids_sample_or_occurrence_give_different_hashes(one: Any, other: Any) -> None:
    assert (hashed(*one) == hashed(*other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((1, 2), 0, 1), ((1, 2), 1, 0)),
        (((1, 2), 1, 11), ((1, 2), 11, 1)),
        (((), 0, 0), ((0,), 0, 0)),
        (((258,), 0, 0), ((2, 1), 0, 0)),
        (((1,), 0, 0), ((1, 0), 0, 0)),
        (((1, 2), 0, 0), ((2, 1), 0, 0)),
    ],
)
def test_neighbours_are_kept_apart(one: Any, other: Any) -> None:
    assert hashed(*one) != hashed(*other)


def test_a_hash_stays_the_same_from_run_to_run_and_release_to_release() -> None:
    # A change of these values makes every journal in the world stale: raise request.FORMAT knowingly.
    assert hashed() == "ad2bb02edf71b89a7281d997a0cefefe"
    assert (
        hashed((163606, 0), 3, 2, temperature=0.6, max_new_tokens=320) == "2e490ad071938728869ce053b48e0d83"
    )


def test_one_hasher_gives_each_request_its_own_hash_in_any_order() -> None:
    hasher = Hasher(MODEL, SamplingConfig())
    first = [hasher.hash([n], 0, 0) for n in range(5)]
    assert first == [hashed((n,)) for n in range(5)] == [hasher.hash([n], 0, 0) for n in range(5)]


def test_ids_may_be_any_sequence() -> None:
    hasher = Hasher(MODEL, SamplingConfig())
    assert hasher.hash([1, 2], 0, 0) == hasher.hash((1, 2), 0, 0) == hasher.hash(range(1, 3), 0, 0)


def test_a_seed_is_32_bits_of_the_request() -> None:
    seeds = [seed_of(hashed((n,))) for n in range(2000)]
    assert all(0 <= seed < 2**32 for seed in seeds) and len(set(seeds)) == 2000
    assert min(seeds) < 2**24 and max(seeds) > 2**32 - 2**24
    assert (seed_of("0" * 32), seed_of("f" * 32)) == (0, 2**32 - 1)
    assert seed_of(hashed()) == seed_of(hashed())
