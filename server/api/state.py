"""What the routes of one API process share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import Request

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
