"""A burst of requests does not hold up what the engine has to say."""

from __future__ import annotations

import asyncio
import itertools
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from server.api.engine_client import EngineClient
from server.api.intake import REQUESTS_PER_TURN, Intake
from server.api.metrics import Metrics
from server.config import ServerConfig
from server.ipc import api_to_engine, engine_to_api
from server.ipc.engine_to_api import EngineReady, EngineStats, StepOutputs


class Engine:
    """The other end of a client's sockets."""

    def __init__(self, runtime_dir: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.receiver = api_to_engine.receiver(self._context, runtime_dir)
        self.sender = engine_to_api.sender(self._context, runtime_dir, 0)

    def get_ready(self) -> None:
        self.sender.send(EngineReady(4096, 100, 16, "TORCH_SDPA", "cpu", "float32", "eager", 512))

    def step(self, number: int) -> None:
        self.sender.send(StepOutputs([], EngineStats(num_steps=number), 0))

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self._context.term()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(str(tmp_path))
    yield engine
    engine.close()


async def connect(engine: Engine, runtime_dir: Path, events: list[str]) -> EngineClient:
    """A client that notes the steps it hears of."""

    class Noting(Metrics):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "stats" and value.num_steps:
                events.append(f"step {value.num_steps}")

    client = EngineClient(ServerConfig(runtime_dir=str(runtime_dir)), 0, Noting("m"))
    connecting = asyncio.create_task(client.connect())
    await asyncio.sleep(0)
    engine.get_ready()
    await connecting
    return client


async def test_steps_are_relayed_between_the_requests_of_a_burst(engine: Engine, tmp_path: Path) -> None:
    events: list[str] = []
    client = await connect(engine, tmp_path, events)
    intake = Intake()
    arrived = select.poll()
    arrived.register(client.fileno(), select.POLLIN)

    async def take_in(number: int) -> None:
        await intake.turn()
        events.append("request")
        if number == 0:  # while it is taken in, the engine finishes a step
            engine.step(1)
            assert arrived.poll(20_000)

    await asyncio.gather(*(take_in(number) for number in range(200)))
    client.close()
    assert events.count("request") == 200
    # The turn that began, and at most one more before the loop comes to its sockets.
    assert events.index("step 1") <= 2 * REQUESTS_PER_TURN


async def test_steps_that_are_here_together_leave_turns_in_between(engine: Engine, tmp_path: Path) -> None:
    """What waits for a slow client writes between two steps."""
    events: list[str] = []
    client = await connect(engine, tmp_path, events)
    for number in range(1, 4):
        engine.step(number)
    while "step 3" not in events:
        events.append("turn")
        await asyncio.sleep(0)
    client.close()
    steps = [events.index(f"step {number}") for number in (1, 2, 3)]
    assert all("turn" in events[first:second] for first, second in itertools.pairwise(steps))


async def test_bytes_that_are_no_message_end_the_wait(engine: Engine, tmp_path: Path) -> None:
    client = await connect(engine, tmp_path, [])
    engine.sender.socket.send(b"\x93\xa7outputs\x01\x02")
    with pytest.raises(msgspec.DecodeError):
        await asyncio.wait_for(client.run(), 20)
    client.close()


async def test_turns_are_given_in_order_and_none_is_lost_to_who_gave_up() -> None:
    intake = Intake(per_turn=2)
    taken: list[int] = []

    async def take_in(number: int) -> None:
        await intake.turn()
        taken.append(number)

    tasks = [asyncio.create_task(take_in(number)) for number in range(9)]
    await asyncio.sleep(0)
    assert taken == [0, 1]
    for number in (2, 5):
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert taken == [0, 1, 3, 4, 6, 7, 8]
    await take_in(9)
    assert taken[-1] == 9


async def test_few_requests_wait_for_no_turn() -> None:
    intake = Intake(per_turn=2)
    for _ in range(5):
        for _ in range(2):
            with pytest.raises(StopIteration):
                intake.turn().send(None)
        await asyncio.sleep(0)
