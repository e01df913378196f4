"""Sampler: distributions, filters, penalties and seeds against plain references."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from scipy import stats

from server.ipc.engine_to_worker import NewRequest
from server.sampling_params import SamplingParams
from server.worker.noise import gumbel_noise, random_words
from server.worker.sampler import sample
from server.worker.sampling_state import SamplingState

CPU = torch.device("cpu")


def state_for(
    params: list[SamplingParams],
    vocab: int,
    prompts: list[list[int]] | None = None,
    outputs: list[list[int]] | None = None,
) -> SamplingState:
    state = SamplingState(len(params), vocab, CPU, seed=0)
    for row, own in enumerate(params):
        prompt = prompts[row] if prompts else [0]
        output = outputs[row] if outputs else []
        state.add(row, NewRequest(str(row), prompt + output, len(prompt), own, [], 0))
    return state


def draw(logits: torch.Tensor, state: SamplingState, rows: list[int], position: int, generated: int = 0) -> list[int]:
    index = np.array(rows)
    metadata = state.metadata(index, np.full(len(rows), generated))
    return sample(logits.clone(), metadata, torch.full((len(rows),), position)).tolist()


def reference_probabilities(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """One row, step by step in float64."""
    x = (logits.double() / params.temperature).numpy()
    p = np.exp(x - x.max())
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0
    return p / p.sum()


@pytest.mark.parametrize("vocab", [40, 3000])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_k": 2000, "top_p": 0.9},
        {"top_k": 6, "top_p": 0.8},
        {"min_p": 0.1},
        {"min_p": 0.02, "top_k": 9, "top_p": 0.85, "temperature": 1.7},
    ],
    ids=str,
)
def test_distribution(vocab: int, options: dict[str, float]) -> None:
    """Chi-squared against the exact probabilities, over many positions of many seeded rows."""
    torch.manual_seed(vocab)
    logits = torch.randn(vocab) * 3
    params = SamplingParams(max_tokens=1, **options)  # type: ignore[arg-type]
    expected = reference_probabilities(logits, params)
    rows = 64
    state = state_for([SamplingParams(max_tokens=1, seed=s, **options) for s in range(rows)], vocab)  # type: ignore[arg-type]
    counts = np.zeros(vocab)
    for position in range(100 if vocab < 100 else 30):
        tokens = draw(logits.expand(rows, -1), state, list(range(rows)), position)
        np.add.at(counts, tokens, 1)
    assert counts[expected == 0].sum() == 0
    likely = expected * counts.sum() >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum()) * counts.sum()
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted).pvalue > 1e-4


def test_seeded_row_ignores_its_batch() -> None:
    vocab = 1500
    torch.manual_seed(0)
    own = torch.randn(vocab) * 2
    for options in ({}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.999, "top_k": 1200}, {"min_p": 0.05}):
        mine = SamplingParams(max_tokens=9, seed=1234, **options)  # type: ignore[arg-type]
        alone = [draw(own[None], state_for([mine], vocab), [0], position) for position in range(20)]
        others = [
            SamplingParams(max_tokens=9, temperature=0.0),
            SamplingParams(max_tokens=9, seed=1234, top_p=0.3),
            SamplingParams(max_tokens=9, top_k=3),
            mine,
            SamplingParams(max_tokens=9, frequency_penalty=1.0),
            SamplingParams(max_tokens=9, logit_bias={3: 5.0}, min_p=0.2),
        ]
        state = state_for(others, vocab)
        for position in range(20):
            logits = torch.randn(len(others), vocab)
            logits[3] = own
            assert draw(logits, state, list(range(len(others))), position)[3] == alone[position][0]
            picked = torch.stack((logits[5], own))
            assert draw(picked, state, [5, 3], position)[1] == alone[position][0]


def test_unseeded_rows_differ() -> None:
    state = state_for([SamplingParams(max_tokens=1)] * 8, 1000)
    tokens = draw(torch.zeros(8, 1000), state, list(range(8)), 3)
    assert len(set(tokens)) > 4


def test_greedy_is_argmax_and_mixes_with_random() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 200)
    greedy, hot = SamplingParams(max_tokens=1, temperature=0.0), SamplingParams(max_tokens=1, seed=5, temperature=9.0)
    state = state_for([greedy, hot, greedy], 200)
    tokens = draw(logits, state, [0, 1, 2], 7)
    assert [tokens[0], tokens[2]] == [int(logits[0].argmax()), int(logits[2].argmax())]
    assert draw(logits[[2, 0]], state, [2, 0], 7) == [tokens[2], tokens[0]]


def test_penalties_follow_their_formulas() -> None:
    vocab = 12
    greedy = {"max_tokens": 9, "temperature": 0.0}
    params = [
        SamplingParams(**greedy, presence_penalty=0.5),  # type: ignore[arg-type]
        SamplingParams(**greedy, frequency_penalty=0.5),  # type: ignore[arg-type]
        SamplingParams(**greedy, repetition_penalty=2.0),  # type: ignore[arg-type]
        SamplingParams(**greedy),  # type: ignore[arg-type]
    ]
    state = state_for(params, vocab, prompts=[[1], [1], [1], [1]], outputs=[[], [], [], []])
    logits = torch.zeros(4, vocab)
    logits[:, 1], logits[:, 2], logits[:, 3], logits[:, 4] = 2.0, 1.9, 1.5, 1.3
    seen = [draw(logits, state, [0, 1, 2, 3], i, i) for i in range(6)]
    # Presence: each token loses 0.5 once, prompt tokens lose nothing before they are generated.
    assert [s[0] for s in seen] == [1, 2, 1, 1, 1, 1]
    # Frequency: 2.0, 1.9, then 1.5 (tie of 1 and 3: the lower id), and so on.
    assert [s[1] for s in seen] == [1, 2, 1, 3, 2, 4]
    # Repetition: the prompt's token 1 counts at once, 2.0 / 2 = 1.0.
    assert [s[2] for s in seen] == [2, 3, 4, 1, 1, 1]
    assert [s[3] for s in seen] == [1] * 6


def test_repetition_penalty_lowers_negative_logits() -> None:
    state = state_for([SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=3.0)], 4, prompts=[[0, 1]])
    assert draw(torch.tensor([[-1.0, -1.1, -2.0, -9.0]]), state, [0], 0) == [2]


def test_penalties_survive_preemption() -> None:
    params = [SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=1.0)]
    state = state_for(params, 5, prompts=[[4]], outputs=[[0, 0]])
    assert draw(torch.tensor([[2.0, 0.5, 0.0, 0.0, 0.4]]), state, [0], 3) == [1]


def test_bias_and_min_tokens() -> None:
    params = [
        SamplingParams(max_tokens=9, temperature=0.0, logit_bias={3: 100.0, 0: -100.0}),
        SamplingParams(max_tokens=9, temperature=0.0, min_tokens=2, eos_token_ids=(1,), stop_token_ids=(2, 1)),
    ]
    state = state_for(params, 5)
    logits = torch.tensor([[9.0, 8.0, 7.0, 1.0, 0.0], [0.0, 9.0, 8.0, 1.0, 0.5]])
    assert draw(logits, state, [0, 1], 1, generated=1) == [3, 3]
    assert draw(logits, state, [0, 1], 2, generated=2) == [3, 1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("temperature", [1e30, 1e38, 1e308, sys.float_info.max])
def test_any_temperature_is_taken_and_masks_nothing_less(temperature: float, top_p: float) -> None:
    """Beyond float32 as well: all tokens are as good as equally likely, but masked ones are never drawn."""
    params = SamplingParams(
        max_tokens=99, temperature=temperature, top_p=top_p, seed=3, min_tokens=99, eos_token_ids=(1,)
    )
    state = state_for([params], 5)
    drawn = {draw(torch.tensor([[0.0, 9.0, 1.0, 2.0, -3.0]]), state, [0], i, i)[0] for i in range(90)}
    assert 1 not in drawn
    assert len(drawn) >= (4 if top_p == 1.0 else 2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize(("penalty", "best"), [(1e300, 3), (sys.float_info.max, 3), (1e-300, 1), (5e-324, 1)])
def test_any_repetition_penalty_is_taken(penalty: float, best: int, top_p: float, temperature: float) -> None:
    """A logit of 0 stays one, and a token that was not seen wins over those that were, or the other way about."""
    params = SamplingParams(max_tokens=9, temperature=temperature, top_p=top_p, repetition_penalty=penalty, seed=1)
    state = state_for([params], 5, prompts=[[0, 1, 4]])
    assert draw(torch.tensor([[0.0, 9.0, -50.0, 50.0, -3.0]]), state, [0], 0) == [best]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("options", [{"min_p": 5e-324}, {"top_p": 5e-324}, {"min_p": 1.0}], ids=str)
def test_the_smallest_shares_are_taken(options: dict[str, float]) -> None:
    state = state_for([SamplingParams(max_tokens=9, seed=1, **options)], 3)  # type: ignore[arg-type]
    assert draw(torch.tensor([[0.0, 99.0, 1.0]]), state, [0], 0) == [1]


def test_dropped_row_leaves_nothing_behind() -> None:
    params = SamplingParams(
        max_tokens=9, temperature=1.0, top_k=1, frequency_penalty=5.0, logit_bias={0: 9.0}, logprobs=3
    )
    state = state_for([params], 4)
    state.drop(0)
    state.add(0, NewRequest("next", [0], 1, SamplingParams(max_tokens=9, temperature=0.0), [], 0))
    metadata = state.metadata(np.array([0]), np.array([0]))
    assert (metadata.random, metadata.penalties, metadata.bias, metadata.masked) == (None, None, None, None)
    assert state.num_logprobs(np.array([0])).tolist() == [-1]


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    seeds = torch.tensor([0, 1, 1, 2**62 + 1])
    positions = torch.tensor([5, 5, 6, 5])
    words = random_words(seeds, positions, torch.arange(4096))
    assert len({tuple(row[:8].tolist()) for row in words}) == 4
    again = random_words(seeds[2:3], positions[2:3], torch.tensor([[7, 4000]]))
    assert again.tolist() == [[words[2, 7], words[2, 4000]]]
    assert int(words.min()) >= 0
    assert int(words.max()) < 2**32


def test_noise_is_gumbel_and_uncorrelated() -> None:
    seeds = torch.arange(64)
    noise = gumbel_noise(seeds, torch.zeros(64, dtype=torch.int64), torch.arange(2000)).double().numpy()
    assert np.isfinite(noise).all()
    assert stats.kstest(noise.ravel(), "gumbel_r").pvalue > 1e-3
    for other in (
        gumbel_noise(seeds, torch.ones(64, dtype=torch.int64), torch.arange(2000)),
        gumbel_noise(seeds + 1000, torch.zeros(64, dtype=torch.int64), torch.arange(2000)),
        gumbel_noise(seeds, torch.zeros(64, dtype=torch.int64), torch.arange(1, 2001)),
    ):
        correlation = np.corrcoef(noise.ravel(), other.double().numpy().ravel())[0, 1]
        assert abs(correlation) < 0.012
