"""The sampler: exact sets, right frequencies, reproducible draws."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.kernelbench.reference import kept_tokens
from server.kernels.sampling import argmax, sample


def rows(count: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draw(
    logits: torch.Tensor, temperature: float, *, top_k: int = 0, top_p: float = 1.0, first_position: int = 0
) -> torch.Tensor:
    count = logits.shape[0]
    return sample(
        logits,
        torch.full((count,), temperature),
        torch.full((count,), 1234),
        torch.arange(count) + first_position,
        torch.full((count,), top_k, dtype=torch.int32),
        torch.full((count,), top_p),
    )


def test_argmax_takes_the_first_of_equal_logits_across_chunks() -> None:
    logits = rows(3, 20_000)
    logits[0, [5, 9000, 19_999]] = 50.0
    logits[1, [19_999]] = 50.0
    assert torch.equal(argmax(logits), logits.argmax(-1))


def test_argmax_of_minus_infinity_and_nan_is_a_token() -> None:
    logits = torch.full((2, 300), float("-inf"))
    logits[1] = float("nan")
    assert all(0 <= token < 300 for token in argmax(logits).tolist())


def test_temperature_zero_is_greedy() -> None:
    logits = rows(4, 500)
    assert torch.equal(draw(logits, 0.0, top_k=3, top_p=0.5), logits.argmax(-1))


def test_frequencies_are_the_softmax() -> None:
    logits = rows(1, 12).expand(300, 12).contiguous()
    probabilities = (logits[0] / 0.7).softmax(-1)
    counts = torch.bincount(draw(logits, 0.7), minlength=12).float()
    expected = probabilities * 300
    # Chi-square with 11 degrees of freedom; 31.3 is its 99.9th percentile, and the seed is fixed.
    assert ((counts - expected) ** 2 / expected).sum() < 31.3


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = rows(1, 800).expand(6, 800).contiguous()
    together = draw(logits, 1.0)
    for row in range(6):
        assert draw(logits[row : row + 1], 1.0, first_position=row).item() == together[row].item()
    assert len(set(together.tolist())) > 1


@settings(max_examples=8, deadline=None)
@given(
    top_k=st.integers(0, 40),
    top_p=st.floats(0.05, 1.0),
    temperature=st.floats(0.2, 3.0),
    coarse=st.booleans(),
    seed=st.integers(0, 100),
)
def test_draws_come_from_the_kept_set(top_k: int, top_p: float, temperature: float, coarse: bool, seed: int) -> None:
    logits = rows(1, 60, seed)
    if coarse:  # many ties
        logits = logits.round()
    kept = kept_tokens(logits[0], temperature, top_k, top_p + 1e-5)
    drawn = draw(logits.expand(3, 60).contiguous(), temperature, top_k=top_k, top_p=top_p)
    assert kept[drawn].all()


def test_draws_what_the_sampler_in_plain_torch_draws() -> None:
    """Noise, temperature and limits, at seeds and positions that use all bits."""
    from server.worker import sampler

    count, vocab = 6, 300
    logits = rows(count, vocab, 3)
    seeds = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**61) - 7, 99])
    positions = torch.tensor([0, 1, 4095, 131071, 7, 2**31 + 5])
    temperature = torch.tensor([0.3, 0.7, 1.0, 1.3, 2.0, 1.0])
    top_k, top_p = torch.tensor([vocab, 5, vocab, 40, 2, vocab]), torch.tensor([2.0, 2.0, 0.7, 0.9, 2.0, 0.3])
    for k, p in ((None, None), (top_k, None), (None, top_p), (top_k, top_p)):
        random = sampler.RandomRows(
            rows=None, temperature=temperature, seeds=seeds, top_k=k, top_p=p, min_p=None, max_top_k=vocab
        )
        wanted = sampler.sample(logits.clone(), sampler.SamplingMetadata(random=random), positions)
        assert torch.equal(sample(logits, temperature, seeds, positions, k, p), wanted)


def test_one_token_left_is_the_largest() -> None:
    logits = rows(3, 700)
    assert torch.equal(draw(logits, 2.0, top_k=1), logits.argmax(-1))
    assert torch.equal(draw(logits, 2.0, top_p=1e-6), logits.argmax(-1))
