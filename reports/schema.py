"""The versioned result schema: one `CellResult` per matrix cell (or `benchctl run`), written as JSON.

Rules: a value that is not known is null and never 0; seconds are SI seconds as floats; a distribution of nothing has
null statistics and says why. Field names are stable within a major schema version.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

SCHEMA_VERSION = "1.0"

Status = Literal["ok", "invalid", "unsupported", "failed", "timeout", "interrupted"]
"""ok: measured. invalid: measured but not to be trusted (client saturated); see `reason`. unsupported: cannot run here.
failed: server or run broke. timeout: did not end in its time. interrupted: Ctrl-C; partial results."""

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)


class Distribution(msgspec.Struct, kw_only=True):
    """Statistics of a metric over requests or gaps, in the metric's unit (seconds for times)."""

    n: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    percentiles: dict[str, float | None] = {}
    """Keys "p50", "p99", "p99.9"...; linear interpolation (numpy's default)."""
    reason: str | None = None
    """Why the statistics are null."""


class Throughput(msgspec.Struct, kw_only=True):
    """Work completed per second between `start` (first scheduled) and `end` (last completion) of a window."""

    window_s: float | None = None
    window_start_s: float | None = None
    """Relative to the run's first scheduled request."""
    requests_per_s: float | None = None
    output_tokens_per_s: float | None = None
    total_tokens_per_s: float | None = None
    requests: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None


class Goodput(msgspec.Struct, kw_only=True):
    slo: str
    requests_per_s: float | None
    share: float | None
    """Of all requests sent, failed ones included."""
    met: int
    total: int


class LoadMetrics(msgspec.Struct, kw_only=True):
    """Everything measured by the client in one load run; definitions in the README's metric table."""

    ttft_s: Distribution
    """From `scheduled` to the first event with generated text."""
    ttft_from_sent_s: Distribution
    itl_s: Distribution
    """Gaps between token events; an event with k tokens is one gap."""
    itl_per_token_s: Distribution
    """The same gaps spread over the tokens that each brought."""
    tpot_s: Distribution
    e2el_s: Distribution
    client_lag_s: Distribution
    prompt_tokens: Distribution
    output_tokens: Distribution
    throughput: Throughput
    steady_state: Throughput | None
    """None with fewer requests than a steady state can be found in."""
    steady_ttft_s: Distribution | None = None
    steady_tpot_s: Distribution | None = None
    goodput: list[Goodput] = []
    completed: int
    failed: int
    interrupted: int = 0
    """Sent, but the load was ended before their answers; neither completed nor failed."""
    unsent: int = 0
    """Due when the load was ended, but not sent yet: they waited for the concurrency cap or a connection."""
    errors: dict[str, int] = {}
    """Failed requests by cause, e.g. {"timeout": 2, "http 503": 1}."""
    retries: int = 0
    excluded_warmup: int = 0
    excluded_cooldown: int = 0
    output_token_source: Literal["usage", "tokenizer", "events", "mixed"]
    """Where output token counts came from; `events` counts one per event and is an approximation."""
    forced_output_tokens: int | None = None
    """Output tokens of the completed requests, had each the length that was forced; None: no length was."""
    shorter_answers: int = 0
    """Completed, with fewer output tokens than were forced (by more than a tenth, where the server gives no usage)."""
    longer_answers: int = 0
    achieved_rate: float | None = None
    """Requests sent per second over the sending time."""
    offered_rate: float | None = None
    client_saturated: bool = False
    client_lag_bound_s: float
    timeseries: dict[str, list[float | None]] = {}
    """Per second of the run: "t", "output_tokens_per_s", "requests_in_flight", "ttft_p50_s", "completed_per_s"."""
    workers: int = 1


class PhaseTime(msgspec.Struct, kw_only=True):
    """One row of a start-up report."""

    name: str
    process: str
    start_s: float
    """Relative to exec."""
    duration_s: float
    attributes: dict[str, Any] = {}


class StartupReport(msgspec.Struct, kw_only=True):
    """One start of a server, from exec."""

    kind: Literal["cold", "warm", "unknown"]
    to_healthy_s: float | None
    to_first_token_s: float | None
    unaccounted_s: float | None = None
    phases: list[PhaseTime] = []


class CellConfig(msgspec.Struct, kw_only=True):
    """What a cell runs; two cells with equal digests are the same experiment."""

    engine: str = "benchctl"
    """`benchctl`, `vllm`, `sglang` or `url`."""
    model: str
    mode: str | None = None
    attention_backend: str | None = None
    server_args: dict[str, Any] = {}
    endpoint: Literal["completions", "chat"] = "completions"
    url: str | None = None
    workload: dict[str, Any]
    """The workload's full specification, with its name under "name"."""
    arrival: dict[str, Any]
    """The arrival process' full specification, its name under "name", e.g. {"name": "poisson", "rate": 4.0}."""
    seed: int = 0
    slos: list[str] = []
    client: dict[str, Any] = {}
    """How the load generator was told to send and to count (`[client]` of a suite); empty: its defaults."""


class WorkloadInfo(msgspec.Struct, kw_only=True):
    name: str
    digest: str
    schedule_digest: str | None = None
    requests: int
    forced_lengths: bool
    prompt_tokens_total: int | None = None
    output_tokens_requested: int
    dropped: dict[str, int] = {}
    notes: list[str] = []


class Provenance(msgspec.Struct, kw_only=True):
    """Where and with what a result was made."""

    started_at: str
    """ISO 8601, UTC."""
    benchctl_version: str
    git_commit: str | None = None
    git_dirty: bool | None = None
    python: str
    platform: str
    cpu: str | None = None
    cpu_count: int | None = None
    memory_bytes: int | None = None
    gpus: list[dict[str, Any]] = []
    packages: dict[str, str] = {}
    hostname_hash: str | None = None
    command: list[str] = []


class ServerInfo(msgspec.Struct, kw_only=True):
    """What the server said of itself (`/version`, `/v1/startup`), as far as it is ours."""

    engine_version: str | None = None
    attention_backend: str | None = None
    mode: str | None = None
    dtype: str | None = None
    device: str | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    max_model_len: int | None = None
    api_server_count: int | None = None
    """API processes, as many as were chosen where the configuration left that to the server."""


class CellResult(msgspec.Struct, kw_only=True):
    """The result of one cell."""

    schema_version: str = SCHEMA_VERSION
    cell_id: str
    """Readable and unique within a matrix, e.g. `benchctl/smollm2-135m/eager/TORCH_SDPA/sharegpt-like/rate-4`."""
    config: CellConfig
    config_digest: str
    status: Status
    reason: str | None = None
    log_tail: list[str] = []
    workload: WorkloadInfo | None = None
    metrics: LoadMetrics | None = None
    startup: list[StartupReport] = []
    server: ServerInfo | None = None
    server_metrics: dict[str, list[float | None]] = {}
    """Samples of the server's /metrics during the run: "t" in seconds and one list per series."""
    telemetry: dict[str, list[float | None]] = {}
    """GPU (or CPU) samples during the run: "t" and one list per series, e.g. "gpu0.power_w", "gpu0.sm_clock_mhz"."""
    provenance: Provenance
    raw_records: str | None = None
    """File name of the raw timestamps beside this result."""
    duration_s: float | None = None


class ReferenceFigure(msgspec.Struct, kw_only=True):
    """A figure measured elsewhere that a report shows beside ours."""

    cell_id: str
    source: str
    """What measured it, and on what."""
    metric: str
    """A key of `reports.metrics.METRICS`."""
    value: float
    limit: float | None = None
    """The hardware's bound."""
    target: float | None = None


class MatrixIndex(msgspec.Struct, kw_only=True):
    """`matrix.json` in a result directory: the suite, in order, and where each cell's result is."""

    schema_version: str = SCHEMA_VERSION
    suite: str
    suite_digest: str
    cells: list[str]
    """File names relative to the directory."""
    provenance: Provenance
    interrupted: bool = False
    description: str = ""
    reference: list[ReferenceFigure] = []


class ReportDocument(msgspec.Struct, kw_only=True):
    """`report.json`: all results of a directory in one document."""

    schema_version: str = SCHEMA_VERSION
    index: MatrixIndex | None
    """null: single runs, not a matrix."""
    results: list[CellResult]


def config_digest(config: CellConfig) -> str:
    """Hex SHA-256 of a cell's configuration in canonical JSON; the key of `--resume`."""
    import hashlib

    return hashlib.sha256(msgspec.json.encode(config, order="deterministic")).hexdigest()
