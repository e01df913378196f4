"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.body import MAX_VALUES, json_response, read_json
from server.api.errors import invalid
from server.api.protocol import DetokenizeRequest, TokenizeRequest
from server.api.responses import DetokenizeResponse, TokenizeResponse
from server.api.routes_chat import render_and_tokenize
from server.api.state import ApiState, state_of
from server.api.validation import check_text, check_token_ids

MAX_TOKEN_STRINGS = 1 << 16
"""Tokens whose strings are told (more only for a longer context)."""
# Less than a millisecond of work.
_STRINGS_PER_TURN = 2048
_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(http: Request) -> Response:
    """Token ids of a text, or of a conversation after the chat template."""
    state = state_of(http)
    with state.lease(aside=True) as lease:
        request = await read_json(http, _TOKENIZE, state.config.api.max_body_bytes, lease)
        return await _tokenize(request, state)


async def _tokenize(request: TokenizeRequest, state: ApiState) -> Response:
    state.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("Exactly one of `prompt` and `messages` must be given.", "prompt")
    if request.messages is not None:
        tokens = await render_and_tokenize(
            state,
            request.messages,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            chat_template_kwargs=request.chat_template_kwargs,
            add_special_tokens=bool(request.add_special_tokens),
        )
    else:
        check_text(request.prompt or "", state.limits, "prompt")
        [tokens] = await state.tokenizer.encode_all(
            [request.prompt or ""], add_special_tokens=request.add_special_tokens is not False, aside=True
        )
    strings = await token_strings(tokens, state) if request.return_token_strs else None
    return json_response(TokenizeResponse(len(tokens), state.limits.max_model_len, tokens, strings))


async def token_strings(tokens: list[int], state: ApiState) -> list[str]:
    """The tokens as the vocabulary spells them. Raises ApiError 400."""
    limit = max(MAX_TOKEN_STRINGS, state.limits.max_model_len)
    if len(tokens) > limit:
        raise invalid(
            f"`return_token_strs` is possible for at most {limit} tokens, got {len(tokens)}.", "return_token_strs"
        )
    strings: list[str] = []
    for start in range(0, len(tokens), _STRINGS_PER_TURN):
        if start:
            await asyncio.sleep(0)  # to others
        strings += [state.tokenizer.token_string(token) or "" for token in tokens[start : start + _STRINGS_PER_TURN]]
    return strings


async def detokenize(http: Request) -> Response:
    """The text of token ids, special tokens included."""
    state = state_of(http)
    most = max(MAX_VALUES, 2 * state.limits.max_model_len)
    with state.lease(aside=True) as lease:
        request = await read_json(http, _DETOKENIZE, state.config.api.max_body_bytes, lease, most)
        state.check_model(request.model)
        check_token_ids(request.tokens, "tokens", state.limits.vocab_size)
        text = await state.tokenizer.decode_async(request.tokens, skip_special_tokens=False, aside=True)
        return json_response(DetokenizeResponse(text))
