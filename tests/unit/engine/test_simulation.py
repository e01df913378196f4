"""Thousands of random steps: no block leaks or is shared by mistake, every request ends as it would alone."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.sampling_params import SamplingParams
from tests.unit.engine.simulation import Setup, Simulation


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_long_random_traffic(depth: int, policy: str, prefix_caching: bool) -> None:
    setup = Setup(depth=depth, policy=policy, prefix_caching=prefix_caching)  # type: ignore[arg-type]
    simulation = Simulation(setup, seed=depth)
    for turn in range(2500):
        # Load comes and goes, so that the queue grows and empties.
        if turn % 500 < 350:
            simulation.turn()
        elif simulation.scheduler.requests:
            simulation.supply()
            simulation.result()
    simulation.drain()
    assert simulation.scheduler.num_preemptions > 20
    assert simulation.num_aborted > 20
    assert bool(simulation.kv.num_hits) == prefix_caching


@pytest.mark.parametrize("token_budget", [8, 16, 64])
def test_preemption_does_not_thrash(token_budget: int) -> None:
    """Chunks that were computed are rarely computed again, though the pool holds three requests of forty."""
    setup = Setup(num_blocks=40, max_num_seqs=16, token_budget=token_budget, max_model_len=80, prefix_caching=False)
    simulation = Simulation(setup, seed=1)
    needed = 0
    for i in range(40):
        prompt = [i] * (30 + i % 20)
        simulation.add(prompt, SamplingParams(max_tokens=20))
        needed += len(prompt) + 20
    simulation.drain()
    assert simulation.scheduler.num_preemptions > 0
    assert simulation.worker.num_computed < 1.5 * needed


setups = st.builds(
    Setup,
    num_blocks=st.integers(1, 40),
    block_size=st.sampled_from([1, 2, 4, 16]),
    max_num_seqs=st.integers(1, 10),
    token_budget=st.integers(1, 40),
    max_model_len=st.integers(2, 80),
    policy=st.sampled_from(["fcfs", "priority"]),
    prefix_caching=st.booleans(),
    threshold=st.sampled_from([0, 0, 1, 5]),
    depth=st.integers(1, 3),
    arrivals=st.sampled_from([0.05, 0.3, 0.6]),
    aborts=st.sampled_from([0.0, 0.05, 0.3]),
).filter(lambda setup: setup.num_blocks * setup.block_size >= 2)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setup=setups, seed=st.integers(0, 2**32), turns=st.integers(1, 120))
def test_any_sizes(setup: Setup, seed: int, turns: int) -> None:
    simulation = Simulation(setup, seed)
    for _ in range(turns):
        simulation.turn()
    simulation.drain()
