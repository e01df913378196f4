"""Does the gate hold on this machine with real servers? A/A several times, then a slowdown put into the engine step.

    python scripts/check_gate.py                          ten A/A gates and one with 15% longer steps, suite `gate`
    python scripts/check_gate.py --repeats 2 --share 0.3 --suite my.toml

Works on a clone of this checkout's HEAD in a temporary folder, in the `--base-rev` form: the clone's working tree is
the candidate. Prints a line per gate; exit code 1 when an A/A gate did not pass or the slowdown was not found. Use a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEP = Path("server") / "worker" / "model_runner.py"
SLOWER = """

_execute = ModelRunner.execute


def _slow_execute(self, step):
    began = time.perf_counter()
    output = _execute(self, step)
    time.sleep({share} * (time.perf_counter() - began))
    return output


ModelRunner.execute = _slow_execute
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="gate", help="shipped suite or TOML file")
    parser.add_argument("--repeats", type=int, default=10, help="A/A gates")
    parser.add_argument("--share", type=float, default=0.15, help="of a step that the slowdown adds")
    arguments = parser.parse_args()
    suite = str(Path(arguments.suite).resolve()) if arguments.suite.endswith(".toml") else arguments.suite
    with tempfile.TemporaryDirectory(prefix="benchctl-check-gate-") as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        passes = [gate(clone, suite, Path(folder) / f"same-{n}", "A/A") == "pass" for n in range(arguments.repeats)]
        with (clone / STEP).open("a", encoding="utf-8") as file:
            file.write(SLOWER.format(share=arguments.share))
        found = gate(clone, suite, Path(folder) / "slower", f"{arguments.share:.0%} slower steps") == "regression"
    print(f"A/A passed {sum(passes)} of {len(passes)}; the slowdown was {'found' if found else 'NOT found'}")
    return 0 if all(passes) and found else 1


def gate(clone: Path, suite: str, output: Path, name: str) -> str:
    """Run one gate, print its result, return the verdict."""
    argv = [sys.executable, "-m", "benchctl", "gate", "--base-rev", "HEAD", "--suite", suite, "--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(argv, cwd=clone, env=environment, capture_output=True, text=True, check=False)
    try:
        verdict = json.loads((output / "verdict.json").read_bytes())
    except OSError:
        print(f"{name}: no verdict (exit code {done.returncode}): {done.stderr.strip()}", flush=True)
        return "none"
    print(f"{name}: {verdict['summary']} in {verdict['duration_s']:.0f} s", flush=True)
    for one in verdict["metrics"]:
        if one["change"] is not None:
            bounds = f"[{one['change_low']:+.1%}, {one['change_high']:+.1%}]"
            print(f"  {one['outcome']:<10} {one['cell_id']} {one['label']} {one['change']:+.1%} {bounds}", flush=True)
    return str(verdict["verdict"])


if __name__ == "__main__":
    sys.exit(main())
