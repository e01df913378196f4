from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.errors import UserError
from workloads import build_workload
from workloads.base import Workload
from workloads.tokenizer import HFTokenizer


def build(tokenizer: HFTokenizer | None = None, seed: int = 0, **spec: Any) -> Workload:
    return build_workload({"name": "synthetic", **spec}, seed=seed, tokenizer=tokenizer)


@settings(max_examples=40, deadline=None)
@given(
    low=st.integers(1, 200),
    width=st.integers(0, 200),
    vocab_size=st.integers(16, 200_000),
    seed=st.integers(0, 2**64 - 1),
)
def test_ids_have_exact_lengths_and_stay_in_the_vocabulary(low: int, width: int, vocab_size: int, seed: int) -> None:
    lengths = {"distribution": "uniform", "low": low, "high": low + width}
    workload = build(input_len=lengths, output_len=lengths, num_requests=5, vocab_size=vocab_size, seed=seed)
    for index, request in enumerate(workload.requests):
        assert request.index == index
        assert request.prompt_token_ids is not None
        assert len(request.prompt_token_ids) == request.prompt_tokens
        assert low <= len(request.prompt_token_ids) <= low + width
        assert low <= request.max_tokens <= low + width
        assert min(request.prompt_token_ids) >= 0
        assert max(request.prompt_token_ids) < vocab_size


def test_a_tokenizers_special_ids_are_never_drawn(any_tokenizer: HFTokenizer) -> None:
    workload = build(any_tokenizer, input_len=2000, num_requests=5)
    seen = set(itertools.chain.from_iterable(r.prompt_token_ids or [] for r in workload.requests))
    assert not seen & any_tokenizer.special_ids
    assert max(seen) < any_tokenizer.vocab_size
    assert len(seen) > 0.9 * (any_tokenizer.vocab_size - len(any_tokenizer.special_ids))


def test_groups_share_their_prefix_and_nothing_else() -> None:
    workload = build(num_requests=60, input_len=40, num_prefixes=4, prefix_len=25)
    prompts = [request.prompt_token_ids or [] for request in workload.requests]
    assert len({tuple(prompt[:25]) for prompt in prompts}) == 4
    assert len({tuple(prompt[25:]) for prompt in prompts}) == 60
    for one, other in itertools.combinations(prompts, 2):
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True)))
        assert shared >= 25 or shared < 3


def test_without_groups_prompts_share_nothing() -> None:
    workload = build(num_requests=100, input_len=16)
    assert len({tuple((request.prompt_token_ids or [])[:3]) for request in workload.requests}) == 100


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(low=st.integers(3, 40), width=st.integers(0, 120), seed=st.integers(0, 1000))
def test_text_encodes_to_exactly_the_length(any_tokenizer: HFTokenizer, low: int, width: int, seed: int) -> None:
    lengths = {"distribution": "uniform", "low": low, "high": low + width}
    workload = build(any_tokenizer, prompt_format="text", input_len=lengths, num_requests=4, seed=seed)
    for request in workload.requests:
        assert request.prompt is not None
        assert any_tokenizer.count(request.prompt) == request.prompt_tokens
        assert low <= (request.prompt_tokens or 0) <= low + width


def test_text_of_few_tokens_is_exact(any_tokenizer: HFTokenizer) -> None:
    for length in range(2, 8):
        workload = build(any_tokenizer, prompt_format="text", input_len=length, num_requests=2)
        assert {any_tokenizer.count(request.prompt or "") for request in workload.requests} == {length}


def test_text_groups_share_their_text(any_tokenizer: HFTokenizer) -> None:
    workload = build(any_tokenizer, prompt_format="text", input_len=90, num_requests=12, num_prefixes=2, prefix_len=60)
    prompts = [request.prompt or "" for request in workload.requests]
    assert {any_tokenizer.count(prompt) for prompt in prompts} == {90}
    assert len({prompt.split("\n")[0] for prompt in prompts}) == 2
    assert len(set(prompts)) == 12


def test_streams_are_independent() -> None:
    short, long = build(num_requests=5), build(num_requests=9)
    assert list(long.requests)[:5] == list(short.requests)
    other_output = build(num_requests=5, output_len={"distribution": "uniform", "low": 1, "high": 9})
    assert [r.prompt_token_ids for r in other_output.requests] == [r.prompt_token_ids for r in short.requests]
    assert build(seed=1, num_requests=5).digest != short.digest


def test_requests_can_be_sliced_repeated_and_pickled() -> None:
    requests = build(num_requests=10).requests
    assert [request.index for request in requests[2:8:3]] == [2, 5]
    assert requests[-1] == requests[9] == list(requests)[9]
    assert list(pickle.loads(pickle.dumps(requests))) == list(requests)
    with pytest.raises(IndexError):
        requests[10]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"num_requests": 0}, "num_requests 0"),
        ({"input_length": 5}, "unknown key `input_length`; did you mean `input_len`"),
        (
            {"input_len": {"distribution": "lognormal", "mean": 3}},
            "unknown key `input_len.mean`; did you mean `median`",
        ),
        ({"input_len": {"distribution": "normall"}}, "`input_len.distribution`|Invalid value"),
        ({"input_len": -1}, "input_len: length -1"),
        ({"output_len": 0}, "output_len: length 0"),
        ({"num_prefixes": 2}, "go together"),
        ({"num_prefixes": -2, "prefix_len": 3}, "must not be negative"),
        ({"num_prefixes": 2, "prefix_len": 10, "input_len": 10}, "leaves nothing"),
        ({"prompt_format": "text"}, "give --tokenizer"),
        ({"prompt_format": "words"}, "prompt_format"),
        ({"vocab_size": 3}, "vocab_size 3"),
        ({"vocab_size": 10**12}, "vocab_size 1000000000000"),
        ({"num_requests": 10**12}, "num_requests 1000000000000"),
    ],
)
def test_bad_parameters_are_one_clear_line(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build(**spec)
    assert "\n" not in str(caught.value)


def test_text_shorter_than_what_the_tokenizer_adds_is_refused() -> None:
    from tests.unit.workloads.conftest import byte_level_bpe

    with_bos = HFTokenizer(byte_level_bpe(bos=True), "bos")
    with pytest.raises(UserError, match="text of 1 tokens is impossible"):
        build(with_bos, prompt_format="text", input_len=1)


def test_seed_out_of_range_is_refused() -> None:
    for seed in (-1, 2**64):
        with pytest.raises(UserError, match="seed"):
            build(seed=seed)
