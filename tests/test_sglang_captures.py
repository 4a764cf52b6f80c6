"""What every reply ever captured from a real SGLang server means. A capture without an entry here fails.

Prefixes: a to i are servers of 0.5.23, mid055 is 0.5.5.post3, old0410 is 0.4.10.post2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.config import ModelConfig
from eyas.engines import sglang_manifest, sglang_replies
from eyas.engines.sglang_replies import (
    Busy,
    TooLong,
    message_of,
    read_completion,
    read_loads,
    read_metrics,
    read_old_load,
    refuse,
)
from eyas.errors import EyasError
from eyas.plugins import Load, Reject, Retry
from eyas.records import Finish
from eyas.wire import Answer

KEPT = Path(__file__).parent / "data" / "sglang"
SHARED = Path(__file__).parents[2] / "shared" / "captures" / "sglang"
PATHS = SHARED if SHARED.is_dir() else KEPT

# --- replies to /generate ----------------------------------------------------------------------------------------

# One letter for each reply of a capture.
MEANINGS = {
    "C": "a completion, with exactly the captured ids",
    "R": "retry",
    "B": "retry, and fewer at a time",
    "J": "this prompt never",
    "S": "the run stops",
    "N": "no reply: the connection was closed, refused or timed out",
}

OUTCOMES = {
    "C": """
        a_boundary_total_eq_context a_cached_prefix_second_call a_eos_and_length_same_step a_eos_at_first_token
        a_eos_no_stop_trim_keep_special a_eos_no_stop_trim_skip_special a_eos_trim_keep_special a_eos_trimmed_skip_special
        a_err_rid_empty a_err_seed_2_32 a_err_text_and_ids_both a_err_unknown_top_key a_flush_during
        a_generate_after_weight_version a_generate_all_sampling_fields a_generate_input_ids_length a_generate_text_bos_check
        a_generate_text_greedy a_greedy_ref a_ignore_eos a_max_new_tokens_null a_no_sampling_params_default a_return_logprob
        a_return_logprob_text_top a_routed_dp_rank_0 a_seed_a a_seed_b a_stop_token_ids
        a_stop_token_ids_ignored_with_ignore_eos b_auth_ok c_kv_pool_smaller_than_context_prompt_ok c_return_logprob_retract
        d_eos_in_ids d_generate_ids d_return_logprob e_noseed_a e_noseed_b e_reasoning_tokens_raw e_require_reasoning
        e_require_reasoning_length_unfinished e_seed7_a e_seed7_b e_seed8 f_crash_stop_id_oov f_crash_stop_id_oov_after
        mid055_cached_prefix_second_call mid055_eos_and_length_same_step mid055_eos_at_first_token
        mid055_eos_no_stop_trim_keep_special mid055_eos_no_stop_trim_skip_special mid055_eos_trim_keep_special
        mid055_eos_trimmed_skip_special mid055_err_rid_empty mid055_err_seed_2_32 mid055_err_seed_float
        mid055_err_seed_too_big mid055_err_text_and_ids_both mid055_err_token_bool mid055_err_unknown_top_key
        mid055_generate_all_sampling_fields mid055_generate_input_ids_length mid055_generate_text_bos_check
        mid055_generate_text_greedy mid055_greedy_ref mid055_ignore_eos mid055_max_new_tokens_null
        mid055_no_sampling_params_default mid055_return_logprob mid055_return_logprob_text_top mid055_routed_dp_rank_0
        mid055_seed_a mid055_seed_b mid055_stop_token_ids mid055_stop_token_ids_ignored_with_ignore_eos
        old0410_return_logprob old0410_return_logprob_text_top""",
    "CCC": "i_sigterm_inflight",
    "CCCCCC": "c_retraction_6_reqs c_retraction_logprob",
    "CCCCCCCCCC": "e_seed7_while_busy",
    "CCCCCCCCCCCC": "a_concurrent_12_over_max_running_4 mid055_concurrent_12_over_max_running_4",
    # Aborted: some while they ran, with a part of the answer, the last ones while they waited.
    "RRRRRR": "a_abort_all mid055_abort_all old0410_abort_all",
    "RCCCCCCR": "a_abort_one_running_one_queued d_abort mid055_abort_one_running_one_queued",
    "RRC": "a_abort_rid_is_prefix_match",
    "CR": "a_duplicate_rid_concurrent",
    "CCCCBBBB": "b_queue_full_8_on_running2_queued2",
    "B": "b_queue_full_batch",
    "RRBB": "h_server_timeouts_wait1s_run2s",
    # No ids: nothing was asked for, or it was streamed, or it was not asked for beside log-probabilities.
    "RRRRRRRR": "old0410_abort_one_running_one_queued",
    "RRRRRRRRRRRR": "old0410_concurrent_12_over_max_running_4",
    "R": """
        a_max_new_tokens_0 mid055_max_new_tokens_0
        a_stream_batch a_stream_eos a_stream_err_bad_param a_stream_err_too_long a_stream_length a_stream_stream_interval_4
        b_queue_full_stream d_stream e_incremental_stream h_server_running_timeout_stream mid055_stream_eos
        mid055_stream_err_bad_param mid055_stream_err_too_long mid055_stream_length old0410_stream_eos
        old0410_stream_err_bad_param old0410_stream_err_too_long old0410_stream_length
        old0410_cached_prefix_second_call old0410_eos_and_length_same_step old0410_eos_at_first_token
        old0410_eos_no_stop_trim_keep_special old0410_eos_no_stop_trim_skip_special old0410_eos_trim_keep_special
        old0410_eos_trimmed_skip_special old0410_err_rid_empty old0410_err_text_and_ids_both old0410_err_token_bool
        old0410_err_unknown_top_key old0410_generate_input_ids_length old0410_generate_text_bos_check
        old0410_generate_text_greedy old0410_greedy_ref old0410_ignore_eos old0410_max_new_tokens_0
        old0410_max_new_tokens_null old0410_no_sampling_params_default old0410_routed_dp_rank_0
        old0410_stop_string_no_trim old0410_stop_string_trimmed old0410_stop_token_ids
        old0410_stop_token_ids_ignored_with_ignore_eos
        mid055_err_unknown_sampling_key mid055_err_wrong_type_max_new_tokens mid055_err_wrong_type_temperature
        old0410_err_seed_2_32 old0410_err_seed_float old0410_err_seed_too_big old0410_err_unknown_sampling_key
        old0410_err_wrong_type_max_new_tokens old0410_err_wrong_type_temperature old0410_generate_all_sampling_fields
        old0410_seed_a old0410_seed_b""",
    "J": """
        a_batch_one_bad_fails_all a_err_empty_input_ids a_err_input_just_below_context a_err_input_too_long
        a_err_total_over_context c_kv_pool_smaller_than_context_prompt i_batch_sibling mid055_batch_one_bad_fails_all
        mid055_boundary_total_eq_context mid055_err_empty_input_ids mid055_err_input_just_below_context
        mid055_err_input_too_long mid055_err_total_over_context old0410_batch_one_bad_fails_all
        old0410_boundary_total_eq_context old0410_err_empty_input_ids old0410_err_input_just_below_context
        old0410_err_input_too_long old0410_err_total_over_context""",
    "S": """
        a_batch_of_2 a_n_2_returns_list e_seed7_n2 mid055_batch_of_2 mid055_n_2_returns_list old0410_batch_of_2
        old0410_n_2_returns_list
        a_stop_string_no_trim a_stop_string_trimmed mid055_stop_string_no_trim mid055_stop_string_trimmed
        b_auth_admin_key_on_generate b_auth_no_bearer_word b_auth_none b_auth_wrong b_auth_xapikey
        a_err_bad_top_p a_err_body_array a_err_content_type_text a_err_duplicate_rid_in_batch a_err_get_generate
        a_err_min_gt_max a_err_neg_max_new_tokens a_err_neg_temperature a_err_no_input a_err_not_json a_err_rid_int
        a_err_seed_float a_err_seed_too_big a_err_token_bool a_err_token_float a_err_token_string a_err_top_p_zero
        a_err_unknown_sampling_key a_err_wrong_type_max_new_tokens a_err_wrong_type_temperature d_min_new_tokens_rejected
        d_stop_string_rejected d_text_rejected
        mid055_err_bad_top_p mid055_err_body_array mid055_err_content_type_text mid055_err_get_generate
        mid055_err_min_gt_max mid055_err_neg_max_new_tokens mid055_err_neg_temperature mid055_err_no_input
        mid055_err_not_json mid055_err_rid_int mid055_err_token_float mid055_err_token_string mid055_err_top_p_zero
        old0410_err_bad_top_p old0410_err_body_array old0410_err_content_type_text old0410_err_get_generate
        old0410_err_min_gt_max old0410_err_neg_max_new_tokens old0410_err_neg_temperature old0410_err_no_input
        old0410_err_not_json old0410_err_rid_int old0410_err_token_float old0410_err_token_string old0410_err_top_p_zero""",
    # tests/test_sglang.py has closed and refused connections.
    "N": """
        a_err_empty_text a_err_token_negative a_err_token_out_of_vocab crash_mid055_duplicate_rid_in_batch
        crash_torch_native_empty_text f_crash_neg f_crash_neg_after f_crash_oov f_crash_oov_after
        mid055_err_duplicate_rid_in_batch old0410_err_duplicate_rid_in_batch""",
}
GENERATE = {name: outcome for outcome, names in OUTCOMES.items() for name in names.split()}

# The sentence that ends up in a log or an outcome, where it is more than HTTP status and message.
SAID = {
    "a_abort_all": "aborted: Aborted",
    "old0410_abort_all": "aborted: Aborted",
    "a_duplicate_rid_concurrent": "Duplicate request ID detected: dup",
    "b_queue_full_batch": "HTTP 503: The request queue is full.",
    "mid055_err_unknown_sampling_key": "HTTP 500: Internal Server Error",
    "a_stream_length": "reply cut short",
    "a_max_new_tokens_0": "token ids lost",
    "old0410_greedy_ref": "token ids lost",
    "a_err_input_too_long": "prompt too long for the server",
    "a_err_empty_input_ids": "empty prompt",
    "a_n_2_returns_list": "server.url: the reply is not SGLang's (",
    "a_stop_string_trimmed": "server.url: the server ended an answer at '</think>', which was never asked for; ",
    "b_auth_none": "server.api_key_env: the server refuses the API key (HTTP 401); ",
    "a_err_get_generate": "server.url: there is no SGLang server (HTTP 405: Method Not Allowed); ",
    "a_err_bad_top_p": "server.url: the server refuses the request (HTTP 400: top_p must be in (0, 1], got 1.5.); ",
    "a_err_seed_float": "server.url: the server refuses the request (HTTP 400: invalid type: floating point `1.5`",
    "a_err_not_json": "server.url: the server refuses the request (HTTP 400: 1 validation error: {'type': 'json_invalid'",
}


def exchanges(name: str) -> list[tuple[dict[str, Any], Any]]:
    """(request, response) pairs of a capture; some hold one request and what became of it in many looks."""
    capture = json.loads((PATHS / f"{name}.json").read_text())
    asked, got = capture["request"], capture["response"]
    replies = got if isinstance(got, list) else [got]
    requests = asked if isinstance(asked, list) else [asked] * len(replies)
    return list(zip(requests, replies, strict=True))


def body_of(reply: dict[str, Any]) -> bytes:
    if "json" in reply:
        return json.dumps(reply["json"]).encode()
    return ("\n".join(reply["raw_lines"]) if "raw_lines" in reply else reply["text"]).encode()


LIMIT = 10**6


def meaning(name: str, reply: dict[str, Any]) -> tuple[str, str]:
    """The letter of a reply, and what is said of it."""
    if reply["status"] is None:
        return "N", reply["error"]
    old = name.startswith("old0410")
    try:
        found = read_completion(reply["status"], body_of(reply), LIMIT, ids_in_logprobs=old)
    except Busy as cause:
        return "B", str(cause)
    except Retry as cause:
        return "R", str(cause)
    except Reject as reason:
        return "J", str(reason)
    except EyasError as error:
        return "S", str(error)
    meta = reply["json"]["meta_info"]
    ids = [entry[1] for entry in meta["output_token_logprobs"]] if old else reply["json"]["output_ids"]
    reason = meta["finish_reason"]
    assert found.output_ids == ids and ids
    assert (found.finish.type, found.finish.matched) == (reason["type"], reason.get("matched"))
    assert found.effective_max_new == (len(ids) if reason["type"] == "length" else LIMIT)
    retractions = meta.get("num_retractions", meta.get("total_retractions"))
    assert found.usage == {
        "prompt_tokens": meta["prompt_tokens"],
        "completion_tokens": len(ids),
        "cached_tokens": meta["cached_tokens"],
        **({} if retractions is None else {"num_retractions": retractions}),
    }
    return "C", ""


def check_generate(name: str) -> None:
    found = [meaning(name, reply) for _, reply in exchanges(name)]
    assert "".join(letter for letter, _ in found) == GENERATE[name], found
    if name in SAID:
        assert found[-1][1].startswith(SAID[name]) or found[0][1].startswith(SAID[name]), found
    assert all("\n" not in said for _, said in found)


# --- other paths -------------------------------------------------------------------------------------------------


class Replay:
    """A client that hears kept captures: capture by path."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def get(self, path: str) -> Answer:
        if path not in self._names:
            return Answer(404, b'{"detail":"Not Found"}')
        (_, reply), *_ = exchanges(self._names[path])
        return Answer(reply["status"], body_of(reply))


class Fixed:
    """A client that hears one server info."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told

    def get(self, path: str) -> Answer:
        return Answer(200, json.dumps(self._told if "server" in path else {}).encode())


def check_server_info(name: str) -> None:
    (_, reply), *_ = exchanges(name)
    told = json.loads(body_of(reply))
    info = sglang_manifest.read_info(Fixed(told))  # type: ignore[arg-type]
    found = sglang_manifest.manifest(info, None)
    assert found["engine_version"] == f"sglang {told['version']}"
    assert (found["model"], found["served_model_name"]) == (told["model_path"].split("/")[1], "tiny")
    assert (found["context_length"], found["max_running_requests"]) == (
        1024,
        told["max_running_requests"],
    )
    assert found["max_req_input_len"] == min(1024, found["max_total_num_tokens"]) - 6
    shown = json.dumps(found)
    for secret in (told.get("api_key"), told.get("admin_api_key"), told.get("launch_command")):
        assert secret is None or f'"{secret}"' not in shown
    for private in ("random_seed", "api_key", "admin_api_key", "port", "host", "startup_time"):
        assert private not in found
    sglang_manifest.check(info, ModelConfig(id="o/tiny", kv_dtype="bf16", context=1024), {})


def check_model_info(name: str) -> None:
    (_, reply), *_ = exchanges(name)
    told = json.loads(body_of(reply))
    assert sglang_manifest.model_name(told["model_path"]).startswith("tiny")
    assert told["preferred_sampling_params"] is None


IDLE = Load(running=0, waiting=0, kv_use=0.0, retractions=0)


def check_loads(name: str) -> None:
    for _, reply in exchanges(name):
        told = reply.get("json", reply)
        (rank,) = told["loads"]
        load = read_loads(json.dumps(told).encode())
        assert load is not None
        assert (load.running, load.waiting) == (rank["num_running_reqs"], rank["num_waiting_reqs"])
        assert load.kv_use == rank["token_usage"]
        assert load.retractions == (rank["queues"]["retracted"] if "queues" in rank else None)


def check_get_load(name: str) -> None:
    (_, reply), *_ = exchanges(name)
    # 0.4.10 tells tokens, so nothing about requests.
    expected = None if name.startswith("old") else Load(running=0, waiting=0)
    assert read_old_load(body_of(reply)) == expected


def check_metrics(name: str) -> None:
    (_, reply), *_ = exchanges(name)
    expected = {
        "mid055_metrics_end": Load(running=4, waiting=2, kv_use=0.095947265625, retractions=0),
        "old0410_metrics_end": Load(running=4, waiting=2, kv_use=0.08, retractions=0),
        "c_metrics_after_retraction": Load(running=0, waiting=0, kv_use=0.0, retractions=6),
    }
    assert read_metrics(body_of(reply)) == expected.get(name, IDLE)


def check_missing(name: str) -> None:
    (_, reply), *_ = exchanges(name)
    assert reply["status"] == 404
    with pytest.raises(EyasError, match=re.escape("there is no SGLang server (HTTP 404: Not Found)")):
        refuse(404, body_of(reply))


def check_unauthorized(name: str) -> None:
    (_, reply), *_ = exchanges(name)
    with pytest.raises(EyasError, match=r"server\.api_key_env"):
        refuse(reply["status"], body_of(reply))


def check_tokenize(name: str) -> None:
    (_, reply), *_ = exchanges(name)
    assert (reply["status"], reply.get("json", {}).get("tokens")) == (200, [19923, 2058])


OTHERS: dict[Callable[[str], None], str] = {
    check_server_info: """
        a_ep_server_info a_ep_server_info_end a_ep_get_server_info b_server_info_api_key mid055_ep_get_server_info
        mid055_server_info_end old0410_ep_get_server_info old0410_server_info_end""",
    check_model_info: """
        a_ep_model_info a_ep_get_model_info d_model_info e_model_info mid055_ep_get_model_info
        old0410_ep_get_model_info""",
    check_loads: """
        a_ep_v1_loads a_ep_v1_loads_all a_ep_v1_loads_core a_loads_during_overload c_loads_after_retraction
        c_loads_during_retraction""",
    check_get_load: "mid055_ep_get_load old0410_ep_get_load",
    check_metrics: """
        a_ep_metrics a_ep_metrics_end a_ep_metrics_slash b_auth_none_metrics c_metrics_after_retraction mid055_ep_metrics
        mid055_ep_metrics_slash mid055_metrics_end old0410_ep_metrics old0410_ep_metrics_slash old0410_metrics_end""",
    check_missing: """
        a_ep_get_load a_ep_get_loads a_err_404 d_metrics_disabled mid055_ep_get_loads mid055_ep_model_info mid055_ep_ready
        mid055_ep_root mid055_ep_server_info mid055_ep_v1_loads mid055_ep_v1_loads_all mid055_ep_v1_loads_core
        mid055_err_404 old0410_ep_detokenize old0410_ep_get_loads old0410_ep_model_info old0410_ep_ready old0410_ep_root
        old0410_ep_server_info old0410_ep_tokenize old0410_ep_v1_loads old0410_ep_v1_loads_all old0410_ep_v1_loads_core
        old0410_err_404""",
    check_unauthorized: """
        b_auth_none_server_info b_auth_none_v1_loads b_auth_abort_with_api_key b_auth_flush_with_api_key""",
    check_tokenize: "a_ep_tokenize",
}
OTHER = {name: check for check, names in OTHERS.items() for name in names.split()}

NO_INTEREST = {
    "Eyas aborts nothing: other people may use the server": """
        a_abort_all_call a_abort_call_empty a_abort_call_queued a_abort_call_running a_abort_call_unknown
        a_abort_prefix_call b_auth_abort_with_admin_key d_abort_queued_call d_abort_running_call mid055_abort_all_call
        mid055_abort_call_queued mid055_abort_call_running mid055_abort_call_unknown old0410_abort_all_call
        old0410_abort_call_queued old0410_abort_call_running old0410_abort_call_unknown""",
    "Eyas changes nothing of a server": """
        a_continue_generation a_pause_generation a_set_internal_state a_update_weight_version a_ep_flush_cache
        a_flush_cache_while_busy b_auth_flush_with_admin_key i_flush_get mid055_ep_flush_cache old0410_ep_flush_cache""",
    "a server is well if it generates, whatever it says of its health": """
        a_ep_health a_ep_health_generate a_ep_ready a_ep_root b_auth_none_health b_auth_none_health_generate
        b_auth_none_ready mid055_ep_health mid055_ep_health_generate old0410_ep_health old0410_ep_health_generate""",
    "the OpenAI endpoints hide ids and split reasoning": """
        a_ep_v1_models b_chat_err_too_long b_chat_ok b_completions_ids e_chat_reasoning e_separate_reasoning
        mid055_ep_v1_models old0410_ep_v1_models""",
    "the tokenizer is tested by encoding, and by an answer's text": "a_ep_detokenize mid055_ep_detokenize",
    "fails for a model without max length; then an answer's text is the test": "mid055_ep_tokenize",
    "how a connection ends, no reply": """
        a_disconnect_nonstream a_disconnect_stream i_keepalive_idle i_same_rid_after_client_timeout i_sigterm_probe""",
}
UNUSED = {name for names in NO_INTEREST.values() for name in names.split()}


# --- the tests ---------------------------------------------------------------------------------------------------


def check(name: str) -> None:
    if name in GENERATE:
        check_generate(name)
    elif name in OTHER:
        OTHER[name](name)


def names_in(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.json")}


@pytest.mark.parametrize("name", sorted(names_in(KEPT)))
def test_captured_reply_has_its_meaning(name: str) -> None:
    assert name in GENERATE or name in OTHER or name in UNUSED
    check(name)


def test_every_reply_ever_captured_has_its_meaning() -> None:
    if not SHARED.is_dir():
        pytest.skip(f"the full set of captures is not at {SHARED}")
    assert names_in(SHARED) == {*GENERATE, *OTHER, *UNUSED}
    assert len(GENERATE) + len(OTHER) + len(UNUSED) == len(names_in(SHARED)), "a capture has two entries"
    assert set(SAID) <= set(GENERATE)
    wrong = []
    for name in sorted(names_in(SHARED)):
        try:
            check(name)
        except (AssertionError, pytest.fail.Exception) as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", sorted(names_in(KEPT)))
def test_kept_captures_are_those_that_were_shared(name: str) -> None:
    if not SHARED.is_dir():
        pytest.skip(f"the full set of captures is not at {SHARED}")
    kept, shared = (json.loads((folder / f"{name}.json").read_text()) for folder in (KEPT, SHARED))
    assert kept == shared


def test_a_request_for_lengths_that_the_server_does_not_hold_is_told_apart() -> None:
    (_, reply), *_ = exchanges("a_err_total_over_context")
    with pytest.raises(TooLong):
        read_completion(reply["status"], body_of(reply), LIMIT)


# --- shapes that no capture has ----------------------------------------------------------------------------------


def generated(ids: list[int], reason: Any, **meta: Any) -> bytes:
    return json.dumps(
        {"text": "", "output_ids": ids, "meta_info": {"finish_reason": reason, **meta}}
    ).encode()


STOP = {"type": "stop", "matched": 2}


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (200, generated([5, 2], None), Retry, "reply without an end"),
        (200, generated([5, 2], {"type": "stop", "matched": "NaN happened"}), Retry, "NaN happened"),
        (200, generated([5, -1], {"type": "stop", "matched": "NaN happened"}), Retry, "NaN happened"),
        (200, generated([5, 1 << 32], {"type": "abort", "message": "gone"}), Retry, "aborted: gone"),
        (200, generated([10**23, 1], STOP), EyasError, "not SGLang's"),
        (200, generated([], STOP), Retry, "token ids lost"),
        (200, generated([5, 6], STOP), Retry, "token ids lost"),
        (200, generated([5], {"type": "length", "length": 2}), Retry, "token ids lost"),
        (200, generated([5] * 5, {"type": "length", "length": 3}), Retry, "more token ids than told"),
        (200, generated([5, 6, 2], {"type": "length", "length": 2}), Retry, "more token ids than told"),
        (200, generated([5] * 9, {"type": "length", "length": 9}), Retry, "more token ids than told"),
        (200, generated([5], {"type": "tool_calls"}), Retry, "ended by 'tool_calls'"),
        (200, generated([5, 2], STOP)[:-9], Retry, "cut short"),
        (200, b"", Retry, "cut short"),
        (200, b"<html>", Retry, "cut short"),
        (200, b'{"choices":[]}', EyasError, "not SGLang's"),
        (200, generated(["5"], STOP), EyasError, "not SGLang's"),  # type: ignore[list-item]
        (403, b'{"error":"Forbidden"}', EyasError, "server.api_key_env"),
        (408, b"", Retry, "HTTP 408: no reason given"),
        (429, b"", Busy, "HTTP 429"),
        (502, b"<html>\nBad Gateway", Retry, "HTTP 502: <html> Bad Gateway"),
        (503, b'{"error":"starting"}', Retry, "HTTP 503: starting"),
        (
            400,
            b'{"error":{"message":"The input_ids [1, 9] contains values greater than the vocab size (8)."}}',
            Reject,
            "prompt has ids outside the vocabulary",
        ),
        (
            400,
            b'{"error":{"message":"Request is disconnected from the client side (type 3). Abort request"}}',
            Retry,
            "disconnected",
        ),
        (
            400,
            b'{"error":{"message":"Failed to compile regex grammar: Unclosed \'[\'\\n"}}',
            EyasError,
            "sampling.regex: Failed to compile regex grammar: Unclosed '['; correct it",
        ),
        (
            400,
            b'{"error":{"message":"Failed to compile ebnf grammar: Rule bad is not defined"}}',
            EyasError,
            "sampling.grammar: ",
        ),
        (
            400,
            b'{"error":{"message":"Failed to compile regex grammar: [09:21:47] /project/cpp/grammar_parser.cc:106: EBNF lexer error"}}',
            EyasError,
            "sampling.regex: Failed to compile regex grammar: EBNF lexer error; correct it",
        ),
        (
            400,
            b'{"error":{"message":"Invalid grammar request: req.grammar_key=(\'regex\', \'x\')"}}',
            EyasError,
            "sampling.regex: ",
        ),
    ],
)
def test_failures_are_told_apart(status: int, body: bytes, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)) as caught:
        read_completion(status, body, 8, stop_ids=[2])
    assert type(caught.value) is kind


def test_a_server_that_holds_less_than_asked_lowers_the_effective_limit() -> None:
    body = generated([5] * 298, {"type": "length", "length": 298})
    assert read_completion(200, body, 600).effective_max_new == 298
    assert read_completion(200, body, 298).effective_max_new == 298


def test_an_answer_that_ends_with_the_last_allowed_token_is_a_whole_one() -> None:
    """0.5.5 and 0.4.10 look at the length first."""
    (_, middle), *_ = exchanges("mid055_eos_and_length_same_step")
    (_, old), *_ = exchanges("old0410_eos_and_length_same_step")
    assert middle["json"]["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    ids = middle["json"]["output_ids"]
    # The capture of 0.4.10 did not ask for ids.
    old["json"]["meta_info"]["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
    for reply, in_logprobs in ((middle, False), (old, True)):
        whole = read_completion(200, body_of(reply), 600, ids_in_logprobs=in_logprobs, stop_ids=[7, 1])
        assert (whole.finish, whole.output_ids, whole.effective_max_new) == (
            Finish(type="stop", matched=1),
            ids,
            600,
        )
        cut = read_completion(200, body_of(reply), 600, ids_in_logprobs=in_logprobs, stop_ids=[7])
        assert (cut.finish, cut.effective_max_new) == (Finish(type="length"), 5)


def test_counts_come_from_ids_whatever_the_server_counts() -> None:
    body = generated([5, 2], STOP, completion_tokens=900, prompt_tokens=7)
    completion = read_completion(200, body, 8)
    assert len(completion.output_ids) == 2
    assert completion.usage == {"completion_tokens": 900, "prompt_tokens": 7}


def test_a_long_message_is_cut() -> None:
    assert message_of(b'{"error":{"message":"' + b"x" * 9000 + b'"}}') == "x" * 300


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"loads":[]}', b'{"load":7}', b"{}"])
def test_a_load_that_cannot_be_read_is_none(body: bytes) -> None:
    assert read_loads(body) is read_old_load(body) is read_metrics(body) is None


def test_the_load_of_several_ranks_is_told_as_one() -> None:
    ranks = [
        {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5, "queues": {"retracted": 1}},
        {"num_running_reqs": 4, "num_waiting_reqs": 0, "token_usage": 0.75, "queues": {"retracted": 2}},
    ]
    assert read_loads(json.dumps({"loads": ranks}).encode()) == Load(7, 1, 0.75, 3)
    old = [{"num_reqs": 5, "num_waiting_reqs": 2}, {"num_reqs": 1, "num_waiting_reqs": 0}]
    assert read_old_load(json.dumps(old).encode()) == Load(running=4, waiting=2)


OLD_NAMES = ("/get_server_info", "/get_model_info")


@pytest.mark.parametrize(
    ("version", "paths", "names"),
    [
        ("0.5.23", ("/server_info", "/model_info"), ("b_server_info_api_key", "a_ep_model_info")),
        ("0.5.5.post3", OLD_NAMES, ("mid055_ep_get_server_info", "mid055_ep_get_model_info")),
        ("0.4.10.post2", OLD_NAMES, ("old0410_ep_get_server_info", "old0410_ep_get_model_info")),
    ],
)
def test_the_paths_of_every_version_lead_to_its_manifest(
    version: str, paths: tuple[str, ...], names: tuple[str, ...]
) -> None:
    replay = Replay(dict(zip(paths, names, strict=True)))
    info = sglang_manifest.read_info(replay)  # type: ignore[arg-type]
    assert sglang_manifest.manifest(info, None)["engine_version"] == f"sglang {version}"


META = b'"meta_info":{"finish_reason":{"type":"stop","matched":2},"x":[1]}'
BODIES = {
    "usual": b'{"text":"a","output_ids":[1,2],' + META + b"}",
    "first": b'{"output_ids":[1,2],' + META + b"}",
    "last": b"{" + META + b',"output_ids":[1,2]}',
    "spelt in the text": b'{"text":",\\"output_ids\\":[7]","output_ids":[1,2],' + META + b"}",
    "spaced": b'{"text": "a", "output_ids": [1, 2], ' + META + b"}",
    "broken lines": b'{"text":"a","output_ids":[1,\n2],' + META + b"}",
    "twice": b'{"text":"a","output_ids":[5],"output_ids":[1,2],' + META + b"}",
    "twice, then null": b'{"text":"a","output_ids":[1,2],"output_ids":null,' + META + b"}",
    "nested only": b'{"text":"a","y":{"x":1,"output_ids":[1,2]},' + META + b"}",
    "nested before": b'{"text":"a","y":{"x":1,"output_ids":[9,2]},"output_ids":[1,2],' + META + b"}",
    "in a list": b'{"text":"a","y":[{"x":1,"output_ids":[1,2]}],' + META + b"}",
    "a number beside them": b'{"text":"a","y":{"x":1,"output_ids":[1,2]},"output_ids":0,' + META + b"}",
    "a number behind them": b'{"text":"a","output_ids":[1,2],"output_ids":0,' + META + b"}",
    "none": b'{"text":"a",' + META + b"}",
    "empty": b'{"text":"a","output_ids":[],' + META + b"}",
    "of arrays": b'{"text":"a","output_ids":[[1],[2]],' + META + b"}",
    "of texts": b'{"text":"a","output_ids":["]",2],' + META + b"}",
    "of fractions": b'{"text":"a","output_ids":[1.5,2],' + META + b"}",
    "negative": b'{"text":"a","output_ids":[-1,2],' + META + b"}",
    "corrupt": b'{"text":"a","output_ids":[1,,2],' + META + b"}",
    "corrupt number": b'{"text":"a","output_ids":[01,2],' + META + b"}",
    "cut short in the ids": b'{"text":"a","output_ids":[1,2',
    "cut short behind them": b'{"text":"a","output_ids":[1,2],"meta_info":{"fin',
    "no JSON before": b'{"text":"x,"output_ids":[1,2]",' + META + b"}",
    "no JSON between": b'{,"output_ids":[1,2]' + META + b"}",
}


@pytest.mark.parametrize("name", BODIES)
def test_ids_that_are_cut_out_of_a_reply_are_those_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> Any:
        try:
            found = sglang_replies.read_completion(200, BODIES[name], 10)
            return [*found.output_ids], found.finish, sglang_replies.has_ids(BODIES[name])
        except Exception as error:  # noqa: BLE001 (compared)
            return type(error), str(error)

    cut = read()
    monkeypatch.setattr(sglang_replies, "_IDS", b"\0")  # which no JSON has
    assert cut == read()
    assert cut[0] == [1, 2] or name not in ("usual", "first", "last", "spelt in the text", "twice")
