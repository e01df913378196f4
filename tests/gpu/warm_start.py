"""Run by `test_compilation.py` in a process of its own: start a worker, say what the start did, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.gpu.in_process_worker import forced_logprobs, some_prompts, start_worker


def main() -> None:
    worker = start_worker(Path(sys.argv[1]))
    from torch._dynamo import utils

    benchmarks = len(utils.compilation_time_metrics.get("CachingAutotuner.benchmark_all_configs", ()))
    compilations = len(utils.compilation_time_metrics.get("compile_fx_inner", ()))
    (rows,) = forced_logprobs(worker, some_prompts([40]), 7)
    seconds = {span.name: (span.end_ns - span.start_ns) / 1e9 for span in worker.timeline.spans}
    print(
        json.dumps(
            {
                "benchmarks": benchmarks,
                "compilations": compilations,
                "frames": utils.counters["frames"]["total"],
                "cache": [s.attributes.get("cache") for s in worker.timeline.spans if s.name == "compile/fetch"],
                "checksum": float(rows.double().sum()),
                "seconds": seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
