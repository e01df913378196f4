"""Samples taken beside a run: GPUs, the server's processes, the host, and the server's own /metrics."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from types import TracebackType

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchctl.nvml import nvml_handles, sample_gpus

INTERVAL_S = 1.0
# A server with very many labelled series must not make the result unbounded.
MAX_SERIES = 64
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Series = dict[str, list[float | None]]


class SeriesTable:
    """Columns of equal length: "t" and one per name; a sample that a row lacks is None."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._columns: Series = {}

    def add(self, time_s: float, row: dict[str, float]) -> None:
        for name in row:
            if name not in self._columns and len(self._columns) < MAX_SERIES:
                self._columns[name] = [None] * len(self._times)
        self._times.append(time_s)
        for name, column in self._columns.items():
            column.append(row.get(name))

    def series(self) -> Series:
        """All columns, "t" first; empty when nothing was sampled."""
        return {"t": list(self._times), **self._columns} if self._columns else {}


class Telemetry:
    """Samples in a thread between entering and leaving the context.

    `pid` is the server's process on this machine (None: unknown or remote), `url` its base URL (None: do not ask
    /metrics). `t` counts seconds from entering. A source that fails gives no sample; it never disturbs the run.
    """

    def __init__(self, *, pid: int | None, url: str | None, interval_s: float = INTERVAL_S) -> None:
        self._pid = pid
        self._url = url
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._machine = SeriesTable()
        self._server = SeriesTable()

    @property
    def telemetry(self) -> Series:
        """GPU, process and host samples; complete once the context is left."""
        return self._machine.series()

    @property
    def server_metrics(self) -> Series:
        """The server's gauges and counters; complete once the context is left."""
        return self._server.series()

    def __enter__(self) -> Telemetry:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        start = time.monotonic()
        host, tree = CpuUse(), CpuUse()
        with contextlib.ExitStack() as stack:
            handles = stack.enter_context(nvml_handles())
            client = stack.enter_context(httpx.Client(timeout=2.0, trust_env=False)) if self._url else None
            while True:
                now = time.monotonic() - start
                row = sample_gpus(handles)
                if (cores := host.cores(host_cpu_s())) is not None:
                    row["host.cpu_cores_busy"] = cores
                if self._pid is not None:
                    cpu_s, rss_bytes = tree_use(self._pid)
                    if (cores := tree.cores(cpu_s)) is not None:
                        row["server.cpu_cores"] = cores
                    if rss_bytes is not None:
                        row["server.rss_bytes"] = rss_bytes
                self._machine.add(now, row)
                if client is not None:
                    with contextlib.suppress(httpx.HTTPError, ValueError):
                        response = client.get(f"{self._url}/metrics")
                        if response.status_code == 200:
                            self._server.add(now, parse_metrics(response.text))
                if self._stop.wait(max(0.0, self._interval_s - (time.monotonic() - start - now))):
                    return


class CpuUse:
    """Cores in use between two calls, from a counter of CPU seconds."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def cores(self, used: float | None) -> float | None:
        """Cores in use since the last call, when the counter reads `used` CPU seconds now.

        None at the first call and when the counter is unknown or went back (a process of the tree ended).
        """
        now = time.monotonic()
        if used is None:
            self._last = None
            return None
        last, self._last = self._last, (used, now)
        if last is None or now <= last[1] or used < last[0]:
            return None
        return (used - last[0]) / (now - last[1])


def host_cpu_s() -> float | None:
    """CPU seconds that all cores have been busy since boot (steal and I/O wait not counted)."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq = (int(field) for field in fields[1:8])
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def tree_use(pid: int) -> tuple[float | None, float | None]:
    """(CPU seconds, resident bytes) of a process and its descendants; pages shared among them count for each.

    Nones once the process is gone.
    """
    usage: dict[int, tuple[int, float, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
                usage[int(entry.name)] = (int(fields[1]), cpu_s, float(int(fields[21]) * _PAGE_BYTES))
    if pid not in usage:
        return None, None
    members, grown = {pid}, True
    while grown:
        more = {child for child, (parent, _, _) in usage.items() if parent in members and child not in members}
        members |= more
        grown = bool(more)
    return sum(usage[member][1] for member in members), sum(usage[member][2] for member in members)


def parse_metrics(text: str) -> dict[str, float]:
    """Gauges and counters of a Prometheus text page by `name{label=value}`; histograms and summaries are left out.

    Labels with one value for the whole server (`model_name`, `engine`) are dropped from the name. Raises ValueError
    for text that is not in the exposition format.
    """
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type not in ("gauge", "counter"):
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            inside = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
            name = f"{sample.name}{{{inside}}}" if inside else sample.name
            samples[name] = samples.get(name, 0.0) + sample.value
    return samples
