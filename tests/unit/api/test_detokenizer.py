"""Incremental detokenization equals decoding the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from server.api.detokenizer import BYTE_ALPHABET, Detokenizer, StreamDetokenizer, byte_level_bytes
from server.api.tokenizer import Tokenizer as ApiTokenizer
from server.api.tokenizer import byte_tokenizer

VOCAB = 400
EOS = 300
BYTES = byte_tokenizer(VOCAB, (EOS,))
TOKENIZER = ApiTokenizer(BYTES, VOCAB)


def sentencepiece_like() -> Tokenizer:
    """What Llama 2 and the first Mistral use: `▁` for spaces, byte fallback, the first space stripped."""
    words = ["▁hello", "▁world", "▁", "h", "e", "l", "o", "!", "é", "▁the", "ing"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    vocabulary.update({word: 259 + place for place, word in enumerate(words)})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


SENTENCEPIECE = sentencepiece_like()


def run(detokenizer: Detokenizer, token_ids: list[int], sizes: list[int]) -> str:
    """All deltas joined, `sizes` tokens at a time."""
    text, place = "", 0
    for size in sizes:
        text += detokenizer.push(token_ids[place : place + size])
        place += size
    return text + detokenizer.push(token_ids[place:]) + detokenizer.finish()


def test_a_decoder_that_fails_costs_its_tokens_only() -> None:
    """A `tokenizer.json` may hold anything; what Rust panics on is no Exception."""
    tokenizer = Tokenizer(models.WordLevel(vocab={"aa": 0, "bb": 1, "cc": 2}, unk_token="aa"))
    tokenizer.decoder = decoders.Sequence([decoders.Strip("a", 0, 3), decoders.Fuse()])
    detokenizer = StreamDetokenizer(tokenizer, [0], True)
    assert run(detokenizer, [1, 0, 2, 0, 0, 1], [1, 2]) == "bb\ufffdcc\ufffd\ufffdbb"


def test_alphabet_is_that_of_the_library() -> None:
    assert sorted(BYTE_ALPHABET) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_ALPHABET.values()) == list(range(256))
    assert byte_level_bytes("Ġhé") == b" h\xe9"


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, VOCAB - 1), max_size=40), st.lists(st.integers(1, 5), max_size=12), st.booleans())
def test_byte_level_deltas_join_to_the_full_decode(token_ids: list[int], sizes: list[int], skip: bool) -> None:
    """Any ids, so also invalid UTF-8 anywhere."""
    detokenizer = TOKENIZER.detokenizer([], skip_special_tokens=skip)
    assert run(detokenizer, token_ids, sizes) == BYTES.decode(token_ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(st.text(max_size=30), st.lists(st.integers(1, 3), max_size=20))
def test_no_delta_shows_part_of_a_character(text: str, sizes: list[int]) -> None:
    token_ids = list(text.encode())
    detokenizer = TOKENIZER.detokenizer([], skip_special_tokens=True)
    shown, place = "", 0
    for size in [*sizes, len(token_ids)]:
        shown += detokenizer.push(token_ids[place : place + size])
        place += size
        assert text.startswith(shown)
    assert shown + detokenizer.finish() == text


def test_incomplete_tail_is_flushed_as_replacement() -> None:
    detokenizer = TOKENIZER.detokenizer([], skip_special_tokens=True)
    assert detokenizer.push(list("né".encode()[:-1])) == "n"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


@settings(deadline=None, max_examples=150)
@given(st.text(st.sampled_from("helo wrdting!é你🙂"), max_size=25), st.lists(st.integers(1, 4), max_size=10))
def test_sentencepiece_deltas_join_to_the_full_decode(text: str, sizes: list[int]) -> None:
    token_ids = SENTENCEPIECE.encode(text, add_special_tokens=False).ids
    detokenizer = StreamDetokenizer(SENTENCEPIECE, [], True)
    assert run(detokenizer, token_ids, sizes) == SENTENCEPIECE.decode(token_ids)


def test_sentencepiece_keeps_the_space_behind_the_prompt() -> None:
    prompt = SENTENCEPIECE.encode("hello").ids
    world = SENTENCEPIECE.token_to_id("▁world")
    assert run(StreamDetokenizer(SENTENCEPIECE, prompt, True), [world], [1]) == " world"
    assert run(StreamDetokenizer(SENTENCEPIECE, [], True), [world], [1]) == "world"


def test_sentencepiece_survives_bytes_that_turn_invalid() -> None:
    """A byte behind a complete character invalidates the run: the decoder refuses, the text goes on."""
    token_ids = [3 + byte for byte in "你".encode()] + [3 + 0xFF] + SENTENCEPIECE.encode("hello").ids
    text = run(StreamDetokenizer(SENTENCEPIECE, [], True), token_ids, [1] * len(token_ids))
    assert text.startswith("你")
    assert text.endswith("hello")


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_skipped_on_request(skip: bool) -> None:
    text = run(TOKENIZER.detokenizer([], skip_special_tokens=skip), [*b"ab", EOS, *b"c"], [1, 1, 1])
    assert text == ("abc" if skip else f"ab<|special_{EOS}|>c")


def test_id_outside_the_tokenizer_is_no_text() -> None:
    """Models pad their vocabulary beyond the tokenizer's."""
    assert TOKENIZER.detokenizer([], skip_special_tokens=True).push([VOCAB + 7]) == ""
