"""What a target is: something that a load can be replayed against, launched or merely found."""

from __future__ import annotations

import contextlib
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import httpx
import msgspec

from benchctl.targets.process import ServerProcess
from reports.schema import CellConfig, PhaseTime, ServerInfo, StartupReport, Status

START_TIMEOUT_S = 900.0
_POLL_S = 0.01


class TargetError(Exception):
    """A target did not come up; `status` is what its cells get."""

    status: ClassVar[Status] = "failed"

    def __init__(self, reason: str, log_tail: list[str] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.log_tail = log_tail or []


class UnsupportedTarget(TargetError):
    """The configuration cannot run on this machine (missing device, package or feature)."""

    status: ClassVar[Status] = "unsupported"


class TargetFailed(TargetError):
    """The server exited, or answered wrongly, before it was ready."""


class TargetTimeout(TargetError):
    """The server was not ready within its time."""

    status: ClassVar[Status] = "timeout"


class RunningServer:
    """A server that answers: launched by us (`process`) or found at a URL (`process` is None).

    Use as a context manager, or call `stop()`.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        process: ServerProcess | None,
        startup: StartupReport | None,
        info: ServerInfo | None,
    ) -> None:
        self.url = url
        self.model = model
        """The name that requests carry in `model`."""
        self.process = process
        self.startup = startup
        self.info = info

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def exit_code(self) -> int | None:
        """None while the server runs, or when it is not ours."""
        return self.process.exit_code() if self.process else None

    def log_tail(self, lines: int = 40) -> list[str]:
        return self.process.log_tail(lines) if self.process else []

    def stop(self, timeout_s: float = 20.0) -> None:
        """SIGTERM, then SIGKILL to the process group; nothing for a server that we did not start."""
        if self.process:
            self.process.stop(timeout_s)

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


class Target(ABC):
    """An engine that can be brought up for a cell."""

    name: ClassVar[str]

    @abstractmethod
    def launch(
        self, config: CellConfig, *, log_path: Path, cold_caches: Path | None, timeout_s: float
    ) -> RunningServer:
        """Bring the server up and wait for its first token.

        Raises `UnsupportedTarget`, `TargetFailed` or `TargetTimeout`; nothing runs any more then.
        """


def flag_arguments(arguments: dict[str, Any]) -> list[str]:
    """`{"max_model_len": 512, "enable_prefix_caching": False}` as `--max-model-len 512 --no-enable-prefix-caching`.

    Lists are joined by commas; None leaves the flag out.
    """
    argv: list[str] = []
    for key, value in arguments.items():
        flag = key.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            argv += [f"--{flag}", ",".join(str(item) for item in value)]
        else:
            argv += [f"--{flag}", str(value)]
    return argv


def cache_environment(root: Path) -> dict[str, str]:
    """Environment that keeps every compiler cache we know of below `root`; model caches stay where they are."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"),
        "TRITON_CACHE_DIR": str(root / "triton"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(root / "flash_attn_cute"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "VLLM_CACHE_ROOT": str(root / "vllm"),
        "FLASHINFER_WORKSPACE_BASE": str(root / "flashinfer"),
        "CUDA_CACHE_PATH": str(root / "nv"),
    }


def start_kind(cold_caches: Path | None) -> str:
    """`cold` when the cache directory is missing or empty, `warm` when it has entries, `unknown` without one."""
    if cold_caches is None:
        return "unknown"
    return "warm" if cold_caches.is_dir() and any(cold_caches.iterdir()) else "cold"


def control_client(url: str) -> httpx.Client:
    """HTTP client for health, metrics and start-up questions; ignores proxy settings of the environment."""
    headers = {}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    return httpx.Client(base_url=url, timeout=httpx.Timeout(10.0, connect=2.0), trust_env=False, headers=headers)


def wait_ready(
    process: ServerProcess, find_url: Callable[[], str | None], *, timeout_s: float, explain_exit: Callable[[int], str]
) -> tuple[str, int]:
    """Poll until `GET /health` answers 200; the base URL and CLOCK_MONOTONIC ns of that answer.

    `find_url` gives the URL once it is known. A process that exits raises `TargetFailed` with `explain_exit(code)`
    (which may raise `UnsupportedTarget` itself); the caller stops the process.
    """
    deadline = time.monotonic() + timeout_s
    url: str | None = None
    with contextlib.ExitStack() as stack:
        client: httpx.Client | None = None
        while True:
            if (code := process.exit_code()) is not None:
                raise TargetFailed(explain_exit(code), process.log_tail())
            if client is None and (url := find_url()) is not None:
                client = stack.enter_context(control_client(url))  # one for all polls: making it takes milliseconds
            if client is not None and url is not None and _is_healthy(client):
                return url, time.monotonic_ns()
            if time.monotonic() > deadline:
                raise TargetTimeout(f"the server was not healthy after {timeout_s:g} s", process.log_tail())
            time.sleep(_POLL_S)


def _is_healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


def first_token_ns(client: httpx.Client, model: str, *, timeout_s: float) -> int:
    """Send a three-token prompt and return CLOCK_MONOTONIC ns of the first event; raises `TargetFailed`."""
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0.0, "stream": True}
    try:
        with client.stream("POST", "/v1/completions", json=body, timeout=timeout_s) as response:
            if response.status_code != 200:
                text = response.read().decode("utf-8", "replace").strip()
                raise TargetFailed(f"the first request was answered with HTTP {response.status_code}: {text[:300]}")
            for line in response.iter_lines():
                if line.startswith("data:"):
                    return time.monotonic_ns()
    except httpx.HTTPError as error:
        raise TargetFailed(f"the first request failed: {type(error).__name__}: {error}") from error
    raise TargetFailed("the first request was answered without a single event")


def server_info(*documents: dict[str, Any]) -> ServerInfo:
    """What the documents (`/version`, `/v1/startup`, the ready file) say of a server, first mention wins."""
    merged: dict[str, Any] = {}
    for document in documents:
        for field in msgspec.structs.fields(ServerInfo):
            if document.get(field.name) is not None:
                merged.setdefault(field.name, document[field.name])
        if document.get("version") is not None:
            merged.setdefault("engine_version", str(document["version"]))
    return msgspec.convert(merged, ServerInfo, strict=False)


def get_json(client: httpx.Client, path: str) -> dict[str, Any]:
    """The JSON object at `path`, or an empty one when the server has none."""
    try:
        response = client.get(path)
        document = response.json() if response.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def startup_report(*, kind: str, exec_ns: int, healthy_ns: int, token_ns: int, server: dict[str, Any]) -> StartupReport:
    """The start as seen from outside, with the phases that the server reports itself.

    `server` is the body of `/v1/startup` (empty for an engine without one: then the phases are unknown, and so is
    the unaccounted time). All times are CLOCK_MONOTONIC of this machine.
    """
    unaccounted_s: float | None = None
    phases = [
        PhaseTime(
            name=span["name"],
            process=span["process"],
            start_s=(span["start_ns"] - exec_ns) / 1e9,
            duration_s=(span["end_ns"] - span["start_ns"]) / 1e9,
            attributes=span.get("attributes") or {},
        )
        for span in server.get("spans") or []
    ]
    if server.get("unaccounted_ns") is not None:
        # What the server cannot know: the time between its own readiness and our seeing it.
        seen_late_ns = max(0, healthy_ns - (server.get("healthy_ns") or healthy_ns))
        unaccounted_s = (server["unaccounted_ns"] + seen_late_ns) / 1e9
    phases.append(
        PhaseTime(
            name="first token",
            process="client",
            start_s=(healthy_ns - exec_ns) / 1e9,
            duration_s=(token_ns - healthy_ns) / 1e9,
        )
    )
    return StartupReport(
        kind=msgspec.convert(kind, type=_KIND),
        to_healthy_s=(healthy_ns - exec_ns) / 1e9,
        to_first_token_s=(token_ns - exec_ns) / 1e9,
        unaccounted_s=unaccounted_s,
        phases=phases,
    )


_KIND = next(field.type for field in msgspec.structs.fields(StartupReport) if field.name == "kind")


def slug(text: str) -> str:
    """A file name for `text`: letters, digits, dot, dash and underscore, at most 120 characters."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._")[:120] or "_"
