"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.body import json_response, read_json
from server.api.errors import invalid
from server.api.protocol import DetokenizeRequest, TokenizeRequest
from server.api.responses import DetokenizeResponse, TokenizeResponse
from server.api.routes_chat import render_and_tokenize
from server.api.state import state_of
from server.api.validation import check_token_ids

_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(http: Request) -> Response:
    """Token ids of a text, or of a conversation after the chat template."""
    state = state_of(http)
    request = await read_json(http, _TOKENIZE, state.config.api.max_body_bytes)
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
        [tokens] = await state.tokenizer.encode_all(
            [request.prompt or ""], add_special_tokens=request.add_special_tokens is not False, aside=True
        )
    strings = [state.tokenizer.token_string(token) or "" for token in tokens] if request.return_token_strs else None
    return json_response(TokenizeResponse(len(tokens), state.limits.max_model_len, tokens, strings))


async def detokenize(http: Request) -> Response:
    """The text of token ids, special tokens included."""
    state = state_of(http)
    request = await read_json(http, _DETOKENIZE, state.config.api.max_body_bytes)
    state.check_model(request.model)
    check_token_ids(request.tokens, "tokens", state.limits.vocab_size)
    text = await state.tokenizer.decode_async(request.tokens, skip_special_tokens=False, aside=True)
    return json_response(DetokenizeResponse(text))
