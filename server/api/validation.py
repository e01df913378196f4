"""Checks a request's values and turns them into `SamplingParams` and stop conditions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from server.api.errors import context_length_exceeded, invalid, prompt_too_long, text_too_long
from server.api.protocol import ChatCompletionRequest, CompletionRequest, SamplingFields
from server.sampling_params import SamplingParams

MAX_N = 128
"""OpenAI's bound on `n`."""
MAX_LOGPROBS = 20
"""OpenAI's bound on `top_logprobs`, vLLM's default `max_logprobs`."""
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
"""All stop strings together: every generated piece of text is searched for them."""
_DEFAULT_COMPLETION_TOKENS = 16
_MAX_TEXT = 1 << 19
_INT64 = (-(1 << 63), (1 << 63) - 1)
_MAX_ID_DIGITS = 20
_INT32 = (-(1 << 31), (1 << 31) - 1)
# vLLM's floor: dividing float32 logits by less overflows them.
_MIN_TEMPERATURE = 1e-2


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the requests of one server."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopConditions:
    """How the text of a request ends and what of it is shown."""

    stop_strings: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    min_tokens: int


def _within(value: float | None, name: str, low: float, high: float | None, *, default: float) -> float:
    if value is None:
        return default
    if value < low or (high is not None and value > high):
        bounds = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise invalid(f"`{name}` must be {bounds}, got {value:g}.", name)
    return value


def _integer(value: int | None, name: str, low: int, high: int, *, default: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise invalid(f"`{name}` must be between {low} and {high}, got {value}.", name)
    return value


def stop_conditions(request: SamplingFields) -> StopConditions:
    """Raises ApiError 400 naming the field."""
    stop = request.stop
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(strings):
        raise invalid("`stop` cannot contain an empty string.", "stop")
    if len(strings) > MAX_STOP_STRINGS or sum(map(len, strings)) > MAX_STOP_CHARACTERS:
        raise invalid(
            f"`stop` can have at most {MAX_STOP_STRINGS} strings of together {MAX_STOP_CHARACTERS} characters.", "stop"
        )
    return StopConditions(
        stop_strings=strings,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        min_tokens=request.min_tokens or 0,
    )


def number_of_choices(request: SamplingFields) -> int:
    return _integer(request.n, "n", 1, MAX_N, default=1)


def priority(request: SamplingFields) -> int:
    return _integer(request.priority, "priority", *_INT32, default=0)


def _logit_bias(request: SamplingFields, vocab_size: int) -> dict[int, float] | None:
    if not request.logit_bias:
        return None
    if len(request.logit_bias) > vocab_size:  # padded with zeros an id has many names
        raise invalid(f"`logit_bias` can hold at most {vocab_size} token ids.", "logit_bias")
    biases: dict[int, float] = {}
    for key, bias in request.logit_bias.items():
        # Leading zeros are allowed, but no more digits than any id needs: Python refuses to convert thousands.
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS) or int(key) >= vocab_size:
            raise invalid(
                f"`logit_bias` keys must be token ids from 0 to {vocab_size - 1}, got {key[:40]!r}.", "logit_bias"
            )
        if not -100 <= bias <= 100:
            raise invalid(f"`logit_bias` values must be between -100 and 100, got {bias:g}.", "logit_bias")
        biases[int(key)] = bias
    return biases


def are_integers(values: Sequence[object]) -> bool:
    """Whether all are integers, of any size. Filling an array finds out three times as fast as asking each."""
    try:
        array("q", values)  # type: ignore[type-var]
    except TypeError:
        return False
    except OverflowError:
        return all(isinstance(value, int) for value in values)
    return True


def check_token_ids(token_ids: list[int], name: str, vocab_size: int) -> None:
    try:
        array("I", token_ids)  # faster than `min`: it refuses what is negative
        fits = not token_ids or max(token_ids) < vocab_size
    except OverflowError:
        fits = False
    if not fits:
        raise invalid(f"`{name}` must hold token ids from 0 to {vocab_size - 1}.", name)


def max_text(limits: Limits) -> int:
    """Characters of one text that is tokenized. Sixteen to a token: what is longer does not fit the context, unless it
    is made to. Short contexts have more, for who counts tokens of what will not fit."""
    return max(_MAX_TEXT, 16 * limits.max_model_len)


def check_text(text: str, limits: Limits, where: str) -> None:
    """`where` is the field that it comes from. Raises ApiError 400."""
    if len(text) > (limit := max_text(limits)):
        raise text_too_long(len(text), limit, where)


def check_stream_options(request: SamplingFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise invalid("`stream_options` can only be set when `stream` is true.", "stream_options")


def _seed(request: SamplingFields) -> int | None:
    if request.seed is None:
        return None
    return _integer(request.seed, "seed", *_INT64, default=0)


def _logprobs(request: CompletionRequest | ChatCompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        if request.logprobs is None:
            return None
        return _integer(request.logprobs, "logprobs", 0, MAX_LOGPROBS, default=0)
    top = _integer(request.top_logprobs, "top_logprobs", 0, MAX_LOGPROBS, default=0)
    if not request.logprobs:
        if top:
            raise invalid("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
        return None
    return top


def requested_max_tokens(request: CompletionRequest | ChatCompletionRequest) -> tuple[int | None, str]:
    """What the request says, None if nothing, and the field that says it."""
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def resolve_max_tokens(request: CompletionRequest | ChatCompletionRequest, prompt_tokens: int, limit: int) -> int:
    """Tokens to generate at most after a prompt of `prompt_tokens` in a context of `limit`.

    0 is only allowed for `echo`. Without a wish it is 16 for completions and the rest of the context for chats.
    Raises ApiError 400 when prompt and completion do not fit together.
    """
    wanted, name = requested_max_tokens(request)
    chat = isinstance(request, ChatCompletionRequest)
    where = "messages" if chat else "prompt"
    least = 0 if isinstance(request, CompletionRequest) and request.echo else 1
    if wanted is not None and wanted < least:
        raise invalid(f"`{name}` must be at least {least}, got {wanted}.", name)
    room = limit - prompt_tokens
    if room < 1:
        raise prompt_too_long(limit, str(prompt_tokens), where, where)
    if wanted is None:
        return room if chat else min(_DEFAULT_COMPLETION_TOKENS, room)
    if wanted > room:
        raise context_length_exceeded(limit, prompt_tokens, wanted, where, where)
    return wanted


def sampling_params(request: CompletionRequest | ChatCompletionRequest, limits: Limits) -> SamplingParams:
    """Everything but `max_tokens` (1 here), which depends on each prompt. Raises ApiError 400 naming the field."""
    temperature = _within(request.temperature, "temperature", 0.0, None, default=1.0)
    if 0.0 < temperature < _MIN_TEMPERATURE:
        temperature = _MIN_TEMPERATURE
    top_p = _within(request.top_p, "top_p", 0.0, 1.0, default=1.0)
    if top_p == 0.0:
        raise invalid("`top_p` must be above 0 and at most 1, got 0.", "top_p")
    repetition_penalty = _within(request.repetition_penalty, "repetition_penalty", 0.0, None, default=1.0)
    if repetition_penalty == 0.0:
        raise invalid("`repetition_penalty` must be above 0, got 0.", "repetition_penalty")
    top_k = _integer(request.top_k, "top_k", -1, _INT32[1], default=0)
    stop_token_ids = request.stop_token_ids or []
    check_token_ids(stop_token_ids, "stop_token_ids", limits.vocab_size)
    min_tokens = _integer(request.min_tokens, "min_tokens", 0, limits.max_model_len, default=0)
    wanted, name = requested_max_tokens(request)
    if wanted is not None and min_tokens > max(wanted, 1):
        raise invalid(f"`min_tokens` ({min_tokens}) must not be above `{name}` ({wanted}).", "min_tokens")
    logprobs = _logprobs(request)
    echo = isinstance(request, CompletionRequest) and request.echo
    return SamplingParams(
        max_tokens=1,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=0 if top_k == -1 or top_k >= limits.vocab_size else top_k,
        min_p=_within(request.min_p, "min_p", 0.0, 1.0, default=0.0),
        seed=_seed(request),
        presence_penalty=_within(request.presence_penalty, "presence_penalty", -2.0, 2.0, default=0.0),
        frequency_penalty=_within(request.frequency_penalty, "frequency_penalty", -2.0, 2.0, default=0.0),
        repetition_penalty=repetition_penalty,
        logit_bias=_logit_bias(request, limits.vocab_size),
        stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
        eos_token_ids=() if request.ignore_eos else limits.eos_token_ids,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
