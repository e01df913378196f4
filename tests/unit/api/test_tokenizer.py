from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from server.config import ModelOptions
from server.errors import UserError
from server.models.registry import PRESETS

TINY = load_tokenizer("tiny")


@given(st.text(max_size=60))
def test_any_text_round_trips_through_the_byte_tokenizer(text: str) -> None:
    token_ids = TINY.encode(text, add_special_tokens=True)
    assert token_ids == list(text.encode())
    assert TINY.decode(token_ids, skip_special_tokens=False) == text
    assert TINY.min_tokens(text) <= len(token_ids)


def test_every_id_of_the_byte_tokenizer_decodes_to_something() -> None:
    vocab_size = PRESETS["tiny"].vocab_size
    texts = [TINY.decode([token_id], skip_special_tokens=False) for token_id in range(vocab_size)]
    assert all(texts)
    assert len(set(texts[256:])) == vocab_size - 256
    assert all(TINY.token_bytes(token_id) for token_id in range(vocab_size))


def test_end_token_of_a_preset_is_special() -> None:
    [eos] = PRESETS["tiny"].eos_token_ids
    assert TINY.decode([104, eos, 105], skip_special_tokens=True) == "hi"


def test_vocabulary_without_room_for_bytes_is_refused() -> None:
    with pytest.raises(UserError, match="no room for the 256 bytes"):
        byte_tokenizer(100)


def checkpoint(folder: Path, tokenizer: str | None) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 300,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer)
    return folder


def test_checkpoint_brings_its_own_tokenizer(tmp_path: Path) -> None:
    own = byte_tokenizer(300)
    own.enable_truncation(2)
    own.enable_padding(length=9)
    folder = checkpoint(tmp_path, own.to_str())
    tokenizer = load_tokenizer(_options(folder))
    assert tokenizer.encode("hello", add_special_tokens=True) == list(b"hello"), "neither cut nor padded"


def test_checkpoint_without_a_tokenizer_gets_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_options(checkpoint(tmp_path, None)))
    assert tokenizer.encode("é", add_special_tokens=False) == list("é".encode())


def test_damaged_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, '{"model": 7}')
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer that can be read") as caught:
        load_tokenizer(_options(folder))
    assert "\n" not in str(caught.value)


def _options(folder: Path) -> ModelOptions:
    return ModelOptions(model=str(folder), load_format="dummy")


async def test_long_texts_are_tokenized_like_short_ones() -> None:
    short, long = "héllo", "wörld " * 500
    both = await TINY.encode_all([short, long], add_special_tokens=True)
    assert both == [list(short.encode()), list(long.encode())]
    assert await TINY.decode_async(both[1], skip_special_tokens=True) == long


def test_token_bytes_of_sentencepiece_like_vocabularies() -> None:
    from tests.unit.api.test_detokenizer import SENTENCEPIECE

    tokenizer = Tokenizer(SENTENCEPIECE, 300)
    assert tokenizer.token_bytes(3 + 0xE4) == b"\xe4"
    assert tokenizer.token_bytes(SENTENCEPIECE.token_to_id("▁world")) == b" world"
    assert tokenizer.token_bytes(9999) == b""


async def test_texts_that_no_context_bounds_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """`/tokenize` and `/detokenize` take megabytes: prompts do not queue behind them."""
    tokenizer = load_tokenizer("tiny")
    busy, free = threading.Event(), threading.Event()

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        if text[0] == "x":
            busy.set()
            assert free.wait(10)
        return [0]

    monkeypatch.setattr(tokenizer, "encode", encode)
    slow = [tokenizer.encode_all(["x" * 1000], add_special_tokens=True, aside=True) for _ in range(4)]
    waiting = [asyncio.create_task(call) for call in slow]
    await asyncio.to_thread(busy.wait, 10)
    assert await tokenizer.encode_all(["y" * 1000], add_special_tokens=True) == [[0]]
    assert await tokenizer.decode_async([65] * 1000, skip_special_tokens=False) == "A" * 1000
    assert not any(task.done() for task in waiting)
    free.set()
    await asyncio.gather(*waiting)
