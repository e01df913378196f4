"""What becomes of one HTTP request: its sequences in the engine, their text as it grows, and who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from server.api.detokenizer import Detokenizer
from server.api.errors import ApiError, aborted
from server.api.stop_strings import StopStrings
from server.api.validation import StopConditions
from server.ipc.engine_to_api import RequestOutput, TokenLogprobs
from server.sampling_params import SamplingParams

INLINE_POSITIONS = 256
"""Positions with log-probabilities that are written in the event loop: a few milliseconds with 20 at each."""


@dataclass(slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None = None
    """Shown by `echo`; None when not asked for."""
    num_cached_tokens: int | None = None
    """Found in the prefix cache by the first of the prompt's sequences; None until it has its first token."""


class Delta:
    """What one sequence produced since it was last asked."""

    __slots__ = ("finish_reason", "index", "logprobs", "prompt_logprobs", "stop_reason", "text", "token_ids")

    def __init__(
        self,
        index: int,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        prompt_logprobs: list[TokenLogprobs | None] | None,
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> None:
        self.index = index
        self.text = text
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason

    @property
    def num_positions(self) -> int:
        """Positions with log-probabilities."""
        return len(self.logprobs) + len(self.prompt_logprobs or ())


class Sequence:
    """One completion: one request of the engine."""

    __slots__ = (
        "_changed",
        "_conditions",
        "_detokenizer",
        "_generation",
        "_logprobs",
        "_pieces",
        "_prompt_logprobs",
        "_prompt_only",
        "_stops",
        "_token_ids",
        "emit",
        "finish_reason",
        "first_token_ns",
        "index",
        "is_plain",
        "last_token_ns",
        "num_tokens",
        "params",
        "prompt",
        "request_id",
        "scheduled_ns",
        "stop_reason",
    )

    def __init__(
        self,
        generation: Generation,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        conditions: StopConditions,
        detokenizer: Detokenizer,
        *,
        prompt_only: bool = False,
    ) -> None:
        """`prompt_only`: drop the one token that the engine must generate (`echo` with `max_tokens` 0)."""
        self._generation = generation
        self.index = len(generation.sequences)
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.num_tokens = 0
        self.first_token_ns = 0
        self.last_token_ns = 0
        self.scheduled_ns = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._conditions = conditions
        self._detokenizer = detokenizer
        self._prompt_only = prompt_only
        strings = conditions.stop_strings
        self._stops = StopStrings(strings, conditions.include_stop) if strings else None
        self.is_plain = not (strings or prompt_only or params.logprobs is not None)
        """Whether every step but the last adds nothing but the text of its tokens."""
        self.emit: Callable[[bytes], bool] | None = None
        """Takes the text of a step as a JSON string, while the handler waits; False: it cannot. Only of plain ones."""
        self._changed = False
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        generation.sequences.append(self)
        generation.unfinished += 1

    def push(self, output: RequestOutput) -> None:
        """Take the tokens of one engine step: text, stop strings, finish. Wakes the waiting handler."""
        token_ids = output.new_token_ids
        finish: str | None = output.finish_reason
        # What nearly every token of a stream comes to.
        if (
            finish is None
            and self.emit is not None
            and len(token_ids) == 1
            and self._generation.is_awaited
            and (text := self._detokenizer.json(token_ids[0])) is not None
            and self.emit(text)
        ):
            self.num_tokens += 1
            return
        if finish is not None and finish in ("abort", "error"):
            self._generation.fail(aborted("the engine gave it up" if finish == "error" else "by the engine"))
            self._finish(finish)
            return
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        if self._prompt_only:
            token_ids = []
            finish = "length"
        elif output.logprobs is not None:
            self._logprobs += output.logprobs
        self.num_tokens += len(token_ids)
        self._token_ids += token_ids
        if finish is None and self._stops is None:
            self._pieces.append(self._detokenizer.push(token_ids))
        else:
            finish = self._push_carefully(token_ids, finish, output.stop_token_id)
        if not self._changed:
            self._changed = True
            self._generation.changed.append(self)
        if finish is not None:
            self._finish(finish)
        self._generation.wake()

    def _push_carefully(self, token_ids: list[int], finish: str | None, stop_token_id: int | None) -> str | None:
        """Text of a step that may be the last one; returns the finish reason."""
        if finish == "stop":
            self.stop_reason = stop_token_id
            if not self._conditions.include_stop:
                token_ids = token_ids[:-1]
        text = self._detokenizer.push(token_ids)
        if finish is not None:
            text += self._detokenizer.finish()
        if self._stops is not None:
            text = self._stops.push(text, check=self.num_tokens > self._conditions.min_tokens)
            if self._stops.matched is not None:
                self.stop_reason = self._stops.matched
                finish = "stop"
            elif finish is not None:
                text += self._stops.flush()
        self._pieces.append(text)
        return finish

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        self._generation.unfinished -= 1

    def take(self) -> Delta:
        """Everything since the last call."""
        pieces = self._pieces
        delta = Delta(
            self.index,
            pieces[0] if len(pieces) == 1 else "".join(pieces),
            self._token_ids,
            self._logprobs,
            self._prompt_logprobs,
            self.finish_reason,
            self.stop_reason,
        )
        self._pieces = []
        self._token_ids = []
        self._logprobs = []
        self._prompt_logprobs = None
        self._changed = False
        return delta

    @property
    def arrival_ns(self) -> int:
        return self._generation.arrival_ns

    def fail(self, error: ApiError) -> None:
        self._generation.fail(error)

    @property
    def num_untaken_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def num_untaken_positions(self) -> int:
        return len(self._logprobs) + len(self._prompt_logprobs or ())


class Generation:
    """The sequences of one HTTP request and the handler that waits for them."""

    __slots__ = ("_waiter", "_whole", "arrival_ns", "changed", "error", "id", "sequences", "sink", "unfinished")

    def __init__(self, id: str, arrival_ns: int, *, whole: bool) -> None:
        """`whole`: the handler waits for the end, not for every token."""
        self.id = id
        self.arrival_ns = arrival_ns
        self.sequences: list[Sequence] = []
        self.changed: list[Sequence] = []
        self.unfinished = 0
        self.error: ApiError | None = None
        self.sink: Callable[[], bool] | None = None
        """Takes what is new at once, while the handler waits; False: it cannot, wake the handler."""
        self._whole = whole
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Tell the handler that something is new, if it waits; a busy one asks by itself when it is done."""
        waiter = self._waiter
        if waiter is None or (self._whole and self.unfinished and self.error is None):
            return
        if self.sink is not None and self.unfinished and self.error is None and self.sink():
            return
        self._waiter = None
        if not waiter.done():
            waiter.set_result(None)

    @property
    def is_awaited(self) -> bool:
        """Whether the handler waits, having been told all that there was."""
        return self._waiter is not None

    def fail(self, error: ApiError) -> None:
        """Make the handler end with `error`."""
        if self.error is None:
            self.error = error
        self.wake()

    async def next(self) -> list[Delta]:
        """What is new, one delta per sequence that changed; of all sequences when `whole`. Empty: all is told.

        Tokens that came while the handler was busy (a slow client) are one delta. Raises ApiError when the
        generation failed.
        """
        while not self.changed or (self._whole and self.unfinished):
            if self.error is not None:
                raise self.error
            if not self.changed and not self.unfinished:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.error is not None:
            raise self.error
        return self.take()

    def take(self) -> list[Delta]:
        """What is new now, one delta per sequence that changed."""
        changed = self.changed
        self.changed = []
        return [sequence.take() for sequence in changed]

    @property
    def num_untaken_positions(self) -> int:
        """Positions with log-probabilities of what is new now."""
        return sum(sequence.num_untaken_positions for sequence in self.changed)

    @property
    def num_completion_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def num_untaken_tokens(self) -> int:
        """Tokens that the client has not been sent yet."""
        return sum(sequence.num_untaken_tokens for sequence in self.sequences)
