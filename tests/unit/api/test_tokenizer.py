from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models

from server.api.errors import ApiError
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


def test_tokens_that_the_model_lacks_are_refused_in_a_prompt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tokens added to the tokenizer alone, and ones that only its post-processor knows."""
    own = byte_tokenizer(300)
    own.add_tokens(["<tool>", "<call>"])
    tokenizer = load_tokenizer(_options(checkpoint(tmp_path, own.to_str())))
    [warning] = caplog.messages
    assert "tokenizer.json: 2 of its tokens have ids beyond the model's vocabulary of 300" in warning
    assert tokenizer.encode("tool", add_special_tokens=True) == list(b"tool")
    with pytest.raises(ApiError, match=r"the token '<tool>' \(id 300\).*its token ids end at 299") as caught:
        tokenizer.encode("a <tool>", add_special_tokens=True)
    assert caught.value.status == 400

    start = {"id": "<s>", "ids": [100000], "tokens": ["<s>"]}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    processor = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {"<s>": start}}
    content = {**json.loads(byte_tokenizer(300).to_str()), "post_processor": processor}
    tokenizer = load_tokenizer(_options(checkpoint(tmp_path, json.dumps(content))))
    with pytest.raises(ApiError, match=r"the token '' \(id 100000\)"):
        tokenizer.encode("x", add_special_tokens=True)


@pytest.mark.parametrize(
    "broken",
    [
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},  # panics
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<none>"}},
        {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]}},
    ],
    ids=["panic", "word-level", "unigram"],
)
def test_text_that_a_broken_tokenizer_cannot_encode_is_refused(tmp_path: Path, broken: dict[str, object]) -> None:
    content = {**json.loads(byte_tokenizer(300).to_str()), **broken}
    tokenizer = load_tokenizer(_options(checkpoint(tmp_path, json.dumps(content))))
    with pytest.raises(ApiError, match="The model's tokenizer cannot encode the text: ") as caught:
        tokenizer.encode("xyz", add_special_tokens=True)
    assert caught.value.status == 400


def test_tokens_that_a_broken_tokenizer_cannot_decode_are_refused(tmp_path: Path) -> None:
    strip = {"type": "Strip", "content": "a", "start": 0, "stop": 9}
    content = {**json.loads(byte_tokenizer(300).to_str()), "decoder": strip}
    tokenizer = load_tokenizer(_options(checkpoint(tmp_path, json.dumps(content))))
    with pytest.raises(ApiError, match="The model's tokenizer cannot decode the tokens: "):
        tokenizer.decode([97], skip_special_tokens=True)


def test_a_tokenizer_that_panics_when_read_is_one_clear_line(tmp_path: Path) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "////"}
    content = {**json.loads(byte_tokenizer(300).to_str()), "normalizer": normalizer}
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer that can be read"):
        load_tokenizer(_options(checkpoint(tmp_path, json.dumps(content))))


def test_a_tokenizer_file_without_an_end_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "{")
    with open(folder / "tokenizer.json", "ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match=r"tokenizer\.json: longer than 256 MiB"):
        load_tokenizer(_options(folder))


def test_a_vocabulary_of_the_empty_token_bounds_nothing() -> None:
    tokenizer = Tokenizer(HfTokenizer(models.WordLevel(vocab={"": 0}, unk_token="")), 300)
    assert tokenizer.min_tokens("x" * 8) == 2


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
