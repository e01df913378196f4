"""Bounds on what bodies hold and on the memory of all of them together."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api import body as bodies
from server.api.body import UNCOUNTED_BYTES, Lease, Memory, decode_json
from server.api.errors import ApiError

ANY = msgspec.json.Decoder(Any)
TEXT = st.text(alphabet='a\\",[]{}:é\n', max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda children: st.lists(children, max_size=5) | st.dictionaries(TEXT, children, max_size=5),
    max_leaves=20,
)


def lease(total: int = 1 << 30) -> Lease:
    return Lease(Memory(total), Memory(total))


def count(value: Any) -> tuple[int, int]:
    """Lists and objects; all values but empty lists' missing first one (which is counted with its list)."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [count(child) for child in (value.values() if isinstance(value, dict) else value)]
    containers = 1 + sum(c for c, _ in inner)
    return containers, 1 + max(0, len(value) - 1) + sum(v for _, v in inner)


@given(VALUES, st.booleans(), st.booleans())
def test_values_are_counted_outside_of_texts_only(value: Any, ascii_only: bool, spaces: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, separators=None if spaces else (",", ":")).encode()
    containers, values = count(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "MAX_CONTAINERS", containers)
        assert decode_json(text, ANY, lease(), values) == value
        for most, fewer in ((containers - 1, values), (containers, values - 1)):
            patch.setattr(bodies, "MAX_CONTAINERS", most)
            if containers and len(text) > most:
                with pytest.raises(ApiError) as caught:
                    decode_json(text, ANY, lease(), fewer)
                assert (caught.value.status, caught.value.info.code) == (400, "too_many_values")


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":[' + b",".join([b"[]"] * 70_000) + b"]}",
        b'{"a":[' + b",".join([b"1"] * 140_000) + b"]}",
        b'{"a":[' + b",".join([b'""'] * 2_000_000) + b"]}",
        b"[" * 70_000,
    ],
)
def test_too_many_values_are_not_decoded(text: bytes) -> None:
    class Decoder:
        def decode(self, data: bytes) -> None:
            raise AssertionError("decoded")

    memory = Memory(1 << 30)
    with Lease(memory, memory) as held:
        held.receive(len(text))
        with pytest.raises(ApiError, match="too many values"):
            decode_json(text, Decoder(), held)  # type: ignore[arg-type]
    assert memory.free == 1 << 30


def test_long_texts_hold_no_values() -> None:
    text = ',[{"\\' * 500_000
    assert decode_json(json.dumps({"a": text}).encode(), ANY, lease()) == {"a": text}


def test_bodies_that_arrive_share_memory_and_small_ones_need_none() -> None:
    memory = Memory(1 << 20)
    with Lease(memory, memory) as first, Lease(memory, memory) as second:
        for size in range(0, 1 << 20, 1 << 16):
            first.receive(size)
        second.receive(UNCOUNTED_BYTES + 1)
        with pytest.raises(ApiError) as caught:
            second.receive(1 << 18)
        assert caught.value.status == 503
        assert caught.value.headers["Retry-After"]
        second.receive(UNCOUNTED_BYTES + 1)
        first.end_receiving()
        second.receive(1 << 20)
    assert memory.free == 1 << 20


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_wait_in_order_for_memory_to_be_decoded_in() -> None:
    memory = Memory(64 << 20)
    order: list[str] = []

    async def request(name: str, size: int, done: asyncio.Event) -> None:
        with Lease(memory, memory) as held:
            await held.decode(size)
            order.append(name)
            await done.wait()

    done = asyncio.Event()
    sizes = {"large": 8 << 20, "larger than all": 1 << 30, "after it": 64 << 10, "tiny": 100}
    tasks = {name: asyncio.create_task(request(name, size, done)) for name, size in sizes.items()}
    await settle()
    assert order == ["large", "tiny"]
    tasks["larger than all"].cancel()
    await settle()
    assert order == ["large", "tiny"], "it takes what is left"
    done.set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert order == ["large", "tiny", "after it"]
    assert memory.free == 64 << 20


async def test_who_is_cancelled_as_its_turn_comes_gives_it_back() -> None:
    memory = Memory(10)
    assert memory.take(10)
    waiting = asyncio.create_task(memory.wait(10))
    await settle()
    memory.give(10)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert memory.free == 10
