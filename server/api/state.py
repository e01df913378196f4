"""What the routes of one API process share."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import Request

from server.api.body import DECODED_BYTES, RECEIVED_BYTES, Lease, Memory
from server.api.chat_template import ChatTemplate
from server.api.engine_client import EngineClient
from server.api.errors import draining, engine_dead, model_not_found
from server.api.intake import Intake
from server.api.metrics import Metrics
from server.api.sibling_metrics import SiblingMetrics
from server.api.sse import EventStreams
from server.api.tokenizer import Tokenizer
from server.api.validation import Limits
from server.config import ServerConfig
from server.ipc.engine_to_api import EngineReady


@dataclass
class ApiState:
    config: ServerConfig
    model_name: str
    """The name that requests give, and its root."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    limits: Limits
    engine: EngineReady
    client: EngineClient
    metrics: Metrics
    siblings: SiblingMetrics
    phase: Literal["serving", "draining", "dead"] = "serving"
    death: str = ""
    """Why the phase is `dead`."""
    created: int = field(default_factory=lambda: int(time.time()))
    intake: Intake = field(default_factory=Intake)
    streams: EventStreams = field(default_factory=EventStreams)
    receiving: Memory = field(default_factory=lambda: Memory(RECEIVED_BYTES))
    preparing: Memory = field(default_factory=lambda: Memory(DECODED_BYTES))
    preparing_aside: Memory = field(default_factory=lambda: Memory(DECODED_BYTES // 2))
    """For what generates nothing (`/tokenize`, `/detokenize`): what does must not wait for it."""
    writer_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "write-answer"))
    """Writes answers that take long."""

    def lease(self, *, aside: bool = False) -> Lease:
        """Memory for a request that comes in; see `preparing_aside`."""
        return Lease(self.receiving, self.preparing_aside if aside else self.preparing)

    def check_model(self, model: str | None) -> None:
        """Raises ApiError 404 for a model that is not the served one."""
        if model is not None and model != self.model_name:
            raise model_not_found(model)

    def check_serving(self) -> None:
        """Raises ApiError 503 when no new request is taken."""
        if self.phase == "draining":
            raise draining()
        if self.phase == "dead":
            error = engine_dead(self.death)
            error.status = 503
            raise error


def state_of(request: Request) -> ApiState:
    state: ApiState = request.app.state.api
    return state
