"""An OpenAI-compatible endpoint that somebody else runs."""

from __future__ import annotations

from pathlib import Path

import httpx

from benchctl.targets.base import RunningServer, Target, TargetFailed, control_client, get_json, server_info
from reports.schema import CellConfig
from server.errors import UserError


class UrlTarget(Target):
    name = "url"

    def launch(
        self, config: CellConfig, *, log_path: Path, cold_caches: Path | None, timeout_s: float
    ) -> RunningServer:
        """Check that the endpoint answers; nothing is started, so there is no start-up report and no log.

        `config.model` may be empty: then the endpoint's only model is used. UserError without a URL, or with several
        models to choose from.
        """
        if not config.url:
            raise UserError('engine "url" needs a url, e.g. url = "http://127.0.0.1:8000"')
        url = config.url.rstrip("/").removesuffix("/v1")
        with control_client(url) as client:
            try:
                response = client.get("/v1/models")
                served = [str(entry["id"]) for entry in response.json()["data"]] if response.is_success else []
            except httpx.HTTPError as error:
                reason = str(error) or type(error).__name__
                raise TargetFailed(f"{url} does not answer: {reason}; is the server up, is the port right?") from error
            except httpx.InvalidURL as error:
                raise UserError(f"--url {config.url}: {error}") from error
            except (ValueError, KeyError, TypeError):
                served = []
            info = server_info(get_json(client, "/version"), get_json(client, "/v1/startup"))
        model = config.model
        if not model:
            if len(served) != 1 or not served[0].isprintable():
                listed = f"serves {', '.join(served)}" if served else "lists no models"
                raise UserError(f"{url} {listed}: say which with --model")
            model = served[0]
        return RunningServer(url=url, model=model, process=None, startup=None, info=info)
