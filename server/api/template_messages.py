"""What the API process and the processes that render its chat template say to each other.

Both sides send frames: four bytes of length, then a message. A process says `Done` once it has started, answers a
`TemplateSource` and then every `RenderRequest`. Those two are JSON, whose integers have any size, as the values of a
request do; answers are MessagePack.
"""

from __future__ import annotations

from typing import Any

import msgspec

MEMORY_LIMIT_MIB = 1024
"""What a template may take beyond the process' own needs; a request of 16 MiB takes some 200."""
MAX_ANSWER_BYTES = 32 << 20
"""Size of a prompt, in UTF-8: twice what the largest request holds."""
LENGTH_BYTES = 4


class TemplateFault(Exception):
    """What a template did wrong, as the rest of a sentence that begins with `The chat template`."""


class TemplateSource(msgspec.Struct):
    source: str
    special_tokens: dict[str, str]


class RenderRequest(msgspec.Struct):
    variables: dict[str, Any]
    final: str | None = None
    """Cut the text after the last occurrence of this."""


class Done(msgspec.Struct, tag=True):
    text: str = ""


class Refused(msgspec.Struct, tag=True):
    """A TemplateFault; the process goes on."""

    fault: str


class OutOfMemory(msgspec.Struct, tag=True):
    """The process may hold on to what it got: it is not used any more."""


Answer = Done | Refused | OutOfMemory


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload
