"""Log-probabilities in the two forms of the OpenAI API."""

from __future__ import annotations

from server.api.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from server.api.tokenizer import Tokenizer
from server.ipc.engine_to_api import TokenLogprobs

# JSON has no -Infinity; vLLM sends this for tokens that were masked out.
_LOWEST = -9999.0


def _token(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    data = tokenizer.token_bytes(token_id)
    return data.decode("utf-8", "replace"), data


def _finite(logprob: float) -> float:
    # NaN fails the comparison as well.
    return logprob if logprob > _LOWEST else _LOWEST


def completion_logprobs(
    tokenizer: Tokenizer,
    positions: list[TokenLogprobs | None],
    first_token_id: int | None,
    offset: int,
) -> tuple[CompletionLogprobs, int]:
    """Form of `/v1/completions`, and the text offset behind the last token.

    `positions[0]` may be None, the first prompt token, which nothing predicts; it is then `first_token_id`.
    """
    result = CompletionLogprobs([], [], [], [])
    for position in positions:
        if position is None:
            text = "" if first_token_id is None else _token(tokenizer, first_token_id)[0]
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
        else:
            text = _token(tokenizer, position.token_ids[0])[0]
            result.token_logprobs.append(_finite(position.logprobs[0]))
            top: dict[str, float] = {}
            for token_id, logprob in zip(position.token_ids, position.logprobs, strict=True):
                # Two tokens may read the same; the likelier, which comes first, is kept.
                top.setdefault(_token(tokenizer, token_id)[0], _finite(logprob))
            result.top_logprobs.append(top)
        result.tokens.append(text)
        result.text_offset.append(offset)
        offset += len(text)
    return result, offset


def chat_logprobs(tokenizer: Tokenizer, positions: list[TokenLogprobs]) -> ChatLogprobs:
    """Form of `/v1/chat/completions`."""
    content: list[TokenLogprob] = []
    for position in positions:
        entries = [
            TopLogprob(*_entry(tokenizer, token_id, logprob))
            for token_id, logprob in zip(position.token_ids, position.logprobs, strict=True)
        ]
        chosen = entries[0]
        content.append(TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, entries[1:]))
    return ChatLogprobs(content)


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    text, data = _token(tokenizer, token_id)
    return text, _finite(logprob), list(data)
