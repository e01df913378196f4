from __future__ import annotations

from typing import Any

import msgspec
import pytest

from server.api.errors import ApiError, from_decode_error
from server.api.protocol import ChatCompletionRequest, CompletionRequest
from server.api.validation import (
    Limits,
    are_integers,
    check_token_ids,
    resolve_max_tokens,
    sampling_params,
    stop_conditions,
)

LIMITS = Limits(max_model_len=100, vocab_size=512, eos_token_ids=(257,))


def completion(**fields: Any) -> CompletionRequest:
    return msgspec.convert({"prompt": "x", **fields}, CompletionRequest)


def chat(**fields: Any) -> ChatCompletionRequest:
    return msgspec.convert({"messages": [], **fields}, ChatCompletionRequest)


def test_defaults() -> None:
    params = sampling_params(completion(), LIMITS)
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (1.0, 1.0, 0, None)
    assert params.eos_token_ids == (257,)
    assert params.logprobs is None


def test_null_is_the_default_for_every_optional_field() -> None:
    optional = [f.name for f in msgspec.structs.fields(CompletionRequest) if not f.required]
    nulls = msgspec.convert({"prompt": "x", **dict.fromkeys(optional)}, CompletionRequest)
    assert sampling_params(nulls, LIMITS) == sampling_params(completion(), LIMITS)


def test_values_arrive() -> None:
    params = sampling_params(
        completion(
            temperature=0,
            top_p=0.5,
            top_k=-1,
            min_p=0.1,
            seed=-5,
            presence_penalty=1,
            frequency_penalty=-2,
            repetition_penalty=1.5,
            logit_bias={"7": 100, "8": -1.5},
            stop_token_ids=[3, 4, 3],
            min_tokens=2,
            ignore_eos=True,
            logprobs=0,
            echo=True,
            max_tokens=9,
        ),
        LIMITS,
    )
    assert params.is_greedy
    assert params.logit_bias == {7: 100.0, 8: -1.5}
    assert params.stop_token_ids == (3, 4)
    assert params.eos_token_ids == ()
    assert (params.logprobs, params.prompt_logprobs, params.top_k, params.min_tokens) == (0, 0, 0, 2)


def test_top_k_of_the_whole_vocabulary_is_no_bound() -> None:
    assert sampling_params(completion(top_k=512), LIMITS).top_k == 0
    assert sampling_params(completion(top_k=511), LIMITS).top_k == 511


def test_tiny_temperature_is_raised_to_what_float32_can_divide_by() -> None:
    assert sampling_params(completion(temperature=1e-9), LIMITS).temperature == 0.01


def test_chat_logprobs() -> None:
    assert sampling_params(chat(logprobs=True), LIMITS).logprobs == 0
    assert sampling_params(chat(logprobs=True, top_logprobs=5), LIMITS).logprobs == 5
    assert sampling_params(chat(logprobs=False, top_logprobs=0), LIMITS).logprobs is None


@pytest.mark.parametrize(
    ("request_", "prompt", "expected"),
    [
        (completion(), 10, 16),
        (completion(), 95, 5),
        (completion(max_tokens=90), 10, 90),
        (completion(max_tokens=0, echo=True), 10, 0),
        (chat(), 10, 90),
        (chat(max_tokens=3), 10, 3),
        (chat(max_tokens=3, max_completion_tokens=4), 10, 4),
    ],
)
def test_max_tokens(request_: CompletionRequest | ChatCompletionRequest, prompt: int, expected: int) -> None:
    assert resolve_max_tokens(request_, prompt, 100) == expected


@pytest.mark.parametrize(
    ("request_", "prompt", "message"),
    [
        (completion(max_tokens=91), 10, "you requested 101 tokens (10 in the prompt, 91 in the completion)"),
        (chat(max_completion_tokens=91), 10, "(10 in the messages, 91 in the completion)"),
        (completion(), 100, "your prompt resulted in 100 tokens"),
        (chat(), 200, "your messages resulted in 200 tokens"),
    ],
)
def test_context_length(request_: CompletionRequest | ChatCompletionRequest, prompt: int, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        resolve_max_tokens(request_, prompt, 100)
    assert message in caught.value.info.message
    assert "This model's maximum context length is 100 tokens" in caught.value.info.message
    assert caught.value.info.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
    ],
)
def test_bad_stop_strings(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        stop_conditions(completion(**fields))
    assert caught.value.info.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "x", "stop": [1]}', "stop"),
        (b'{"prompt": "x", "stream_options": {"include_usage": 1}}', "stream_options"),
        (b'{"model": "x"}', "prompt"),
        (b"[]", None),
        (b"{", None),
    ],
)
def test_decode_errors_name_the_field(body: bytes, param: str | None) -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(body, type=CompletionRequest)
    error = from_decode_error(caught.value)
    assert (error.status, error.info.param) == (400, param)


@pytest.mark.parametrize(
    ("values", "all_integers"),
    [([], True), ([1, -1, 1 << 70], True), ([1, "1"], False), ([1, [2]], False), ([1 << 70, "1"], False)],
)
def test_integers_of_any_size_are_told_from_other_things(values: list[object], all_integers: bool) -> None:
    assert are_integers(values) is all_integers


@pytest.mark.parametrize("ids", [[-1], [0, 100], [1 << 32], [1 << 70], [-(1 << 70)]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(ApiError, match="token ids from 0 to 99"):
        check_token_ids(ids, "prompt", 100)


def test_ids_of_the_vocabulary_pass() -> None:
    check_token_ids([], "prompt", 100)
    check_token_ids([0, 99], "prompt", 100)
