"""Results as a matrix writes them, made up but consistent: for tests of the writers and for looking at the report."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from reports.directory import ResultSet
from reports.schema import (
    PERCENTILES,
    CellConfig,
    CellResult,
    Distribution,
    Goodput,
    LoadMetrics,
    MatrixIndex,
    PhaseTime,
    Provenance,
    ReferenceFigure,
    ServerInfo,
    StartupReport,
    Status,
    Throughput,
    WorkloadInfo,
    config_digest,
)

SPEED = {"TORCH_SDPA": 1.0, "TRITON_ATTN": 1.3, "FLASH_ATTN": 1.45}


def distribution(median: float, sigma: float, n: int = 400, seed: int = 0) -> Distribution:
    values = np.random.default_rng(seed).lognormal(math.log(median), sigma, n)
    points = np.percentile(values, PERCENTILES)
    return Distribution(
        n=n,
        mean=float(values.mean()),
        std=float(values.std()),
        min=float(values.min()),
        max=float(values.max()),
        percentiles={f"p{p:g}": float(v) for p, v in zip(PERCENTILES, points, strict=True)},
    )


def unknown(reason: str) -> Distribution:
    return Distribution(n=0, reason=reason)


def load_metrics(speed: float, rate: float, *, seed: int = 0, failed: int = 0) -> LoadMetrics:
    """Metrics that get worse as `rate` nears the capacity of a server of this `speed`."""
    capacity = 24.0 * speed
    load = min(rate / capacity, 0.97)
    wait = 1 / (1 - load)
    output_rate = min(rate, capacity) * 160
    seconds = np.arange(60)
    wobble = np.random.default_rng(seed).normal(1, 0.06, len(seconds))
    ramp = np.minimum(1, (seconds + 1) / 6) * np.minimum(1, (61 - seconds) / 8)
    tokens: list[float | None] = [float(v) for v in output_rate * ramp * wobble]
    return LoadMetrics(
        ttft_s=distribution(0.018 / speed * wait, 0.35, seed=seed),
        ttft_from_sent_s=distribution(0.0178 / speed * wait, 0.35, seed=seed),
        itl_s=distribution(0.0062 / speed * wait**0.5, 0.2, 20_000, seed=seed + 1),
        itl_per_token_s=distribution(0.0062 / speed * wait**0.5, 0.2, 20_000, seed=seed + 1),
        tpot_s=distribution(0.0064 / speed * wait**0.5, 0.1, seed=seed + 2),
        e2el_s=distribution(1.02 / speed * wait**0.5, 0.4, seed=seed + 3),
        client_lag_s=distribution(0.0004, 0.5, seed=seed + 4),
        prompt_tokens=distribution(220, 0.9, seed=5),
        output_tokens=distribution(160, 0.7, seed=6),
        throughput=Throughput(
            window_s=60.0,
            requests_per_s=output_rate / 160,
            output_tokens_per_s=output_rate,
            total_tokens_per_s=output_rate * 2.4,
            requests=400,
        ),
        steady_state=Throughput(window_s=44.0, output_tokens_per_s=output_rate * 1.04, requests=330),
        completed=400 - failed,
        failed=failed,
        errors={"timeout": failed} if failed else {},
        output_token_source="usage",
        client_lag_bound_s=0.005,
        offered_rate=rate,
        achieved_rate=rate * 0.998,
        timeseries={
            "t": [float(s) for s in seconds],
            "output_tokens_per_s": tokens,
            "requests_in_flight": [float(rate * wait * r) for r in ramp],
        },
    )


def startup(mode: str, kind: str, speed: float) -> StartupReport:
    compiling = {"cold": 8.4, "warm": 1.6}[kind] / speed if mode == "compile" else 0.0
    worker = [("spawn", 0.12), ("imports", 1.7), ("device", 0.4), ("weights", 2.1)]
    if compiling:
        worker += [("compile/dynamo", 0.9 if kind == "cold" else 0.05)]
        worker += [(f"compile/inductor/piece-{i}", compiling / 3) for i in range(3)]
    worker += [("kv-cache", 0.3)]
    if compiling:
        worker += [("graphs/capture", 1.9)]
    worker += [("warm-up", 0.6)]
    at = 0.08
    phases = [PhaseTime(name="imports", process="supervisor", start_s=0.0, duration_s=0.09)]
    for name, duration in worker:
        phases.append(PhaseTime(name=name, process="worker-0", start_s=at, duration_s=duration))
        at += duration
    healthy = at + 0.11
    phases.append(PhaseTime(name="imports", process="api-0", start_s=0.2, duration_s=0.7))
    phases.append(PhaseTime(name="port open", process="api-0", start_s=at + 0.05, duration_s=0.06))
    phases.append(PhaseTime(name="first token", process="client", start_s=healthy, duration_s=0.03))
    return StartupReport(
        kind="cold" if kind == "cold" else "warm",
        to_healthy_s=healthy,
        to_first_token_s=healthy + 0.03,
        unaccounted_s=0.05,
        phases=phases,
    )


def provenance(**changes: Any) -> Provenance:
    values: dict[str, Any] = {
        "started_at": "2026-03-14T09:26:53+00:00",
        "benchctl_version": "0.1.0",
        "git_commit": "3f2a9c1e5b7d8a6f4e2c1b0a9d8e7f6a5b4c3d2e",
        "git_dirty": False,
        "python": "3.12.3",
        "platform": "Linux-6.8.0-x86_64-with-glibc2.39",
        "cpu": "AMD EPYC 9654 96-Core Processor",
        "cpu_count": 16,
        "memory_bytes": 128 * 2**30,
        "gpus": [{"name": "NVIDIA H200", "memory_bytes": 139 * 2**30, "driver": "570.86", "power_limit_w": 700.0}],
        "packages": {"torch": "2.11.0", "triton": "3.6.0", "flash-attn-4": "4.0.0b36"},
        "command": ["benchctl", "matrix", "--suite", "full"],
    }
    return Provenance(**{**values, **changes})


def cell(
    mode: str,
    backend: str,
    rate: float,
    *,
    model: str = "llama-3.1-8b",
    status: Status = "ok",
    reason: str | None = None,
    log_tail: list[str] | None = None,
    failed: int = 0,
) -> CellResult:
    config = CellConfig(
        model=model,
        mode=mode,
        attention_backend=backend,
        server_args={"max_model_len": 4096},
        workload={"name": "sharegpt-like", "num_requests": 400},
        arrival={"name": "poisson", "rate": rate},
        slos=["ttft:200ms tpot:20ms"],
    )
    speed = SPEED.get(backend, 1.0) * (1.6 if mode == "compile" else 1.0)
    measured = status in ("ok", "invalid")
    seed = int(rate * 10) + len(backend)
    metrics = load_metrics(speed, rate, seed=seed, failed=failed) if measured else None
    if metrics is not None:
        met = min(metrics.completed, int(480 * (1 - rate / (60 * speed))))
        metrics.goodput = [
            Goodput(slo=slo, requests_per_s=met / 60, share=met / 400, met=met, total=400) for slo in config.slos
        ]
    return CellResult(
        cell_id=f"benchctl/{model}/{mode}/{backend}/sharegpt-like/rate-{rate:g}",
        config=config,
        config_digest=config_digest(config),
        status=status,
        reason=reason,
        log_tail=log_tail or [],
        workload=WorkloadInfo(
            name="sharegpt-like",
            digest="ab" * 32,
            requests=400,
            forced_lengths=True,
            prompt_tokens_total=88_000,
            output_tokens_requested=64_000,
            notes=["lengths drawn from a lognormal fit"],
        ),
        metrics=metrics,
        startup=[startup(mode, kind, speed) for kind in ("cold", "warm")] if measured else [],
        server=ServerInfo(engine_version="0.1.0", attention_backend=backend, mode=mode, dtype="bfloat16", block_size=64)
        if measured
        else None,
        telemetry={"t": [0.0, 1.0, 2.0], "gpu0.power_w": [120.0, 612.0, None], "server.rss_bytes": [1e9, 3.1e9, 3.2e9]}
        if measured
        else {},
        server_metrics={"t": [0.0, 1.0], "vllm:num_requests_running": [0.0, 12.0]} if measured else {},
        provenance=provenance(),
        duration_s=64.2 if measured else None,
    )


def matrix() -> ResultSet:
    """Two modes, three backends, four rates; FLASH_ATTN cannot run, one cell failed, one is invalid."""
    results = []
    for backend in ("FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA"):
        for mode in ("compile", "eager"):
            for rate in (2.0, 8.0, 16.0, 24.0):
                if backend == "FLASH_ATTN":
                    reason = (
                        "--attention-backend FLASH_ATTN: needs the package flash-attn-4 (pip install 'benchctl[gpu]')"
                    )
                    results.append(cell(mode, backend, rate, status="unsupported", reason=reason))
                elif (mode, backend, rate) == ("eager", "TORCH_SDPA", 24.0):
                    reason = "the server died during the run (killed by SIGKILL)"
                    tail = ["INFO worker-0: step 1871", "ERROR worker-0: out of memory <b>not markup</b>"]
                    results.append(cell(mode, backend, rate, status="failed", reason=reason, log_tail=tail))
                elif (mode, backend, rate) == ("compile", "TRITON_ATTN", 24.0):
                    reason = "client saturated: client lag p99 7.2 ms is above 5 ms"
                    results.append(cell(mode, backend, rate, status="invalid", reason=reason))
                else:
                    results.append(cell(mode, backend, rate, failed=3 if (mode, rate) == ("eager", 16.0) else 0))
    index = MatrixIndex(
        suite="full",
        suite_digest="cd" * 32,
        cells=[f"{n}.json" for n in range(len(results))],
        provenance=provenance(),
        description="Every mode and attention backend over rising rates.",
        reference=[
            ReferenceFigure(
                cell_id=results[8].cell_id,
                source="vLLM 0.24.0, one H200, the same client",
                metric="ttft_p50_s",
                value=0.0196,
                target=0.015,
            ),
            ReferenceFigure(
                cell_id=results[8].cell_id,
                source="vLLM 0.24.0, one H200, the same client",
                metric="tpot_p50_s",
                value=0.00471,
                limit=0.00345,
                target=0.0038,
            ),
        ],
    )
    return ResultSet(title="full", results=results, index=index)
