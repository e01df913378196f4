"""How often the gate errs and how often it finds a slowdown, over thousands of made-up histories of server runs.

    python scripts/simulate_gate.py                 the table of docs/gate.md: false alarms and power with 8 pairs
    python scripts/simulate_gate.py --intervals     why the interval of the median is studentised
    python scripts/simulate_gate.py -n 20000        more histories per row (default 4000)

The unit of the columns is the minimum effect: `noise 0.5` is a machine on which a pair's log ratio has a standard
deviation of half the minimum effect. Exit code 1 when a promise of the gate is broken.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from scipy import special

from benchctl.gate.sequential import PASS, REGRESSION, plan_looks, play
from benchctl.gate.statistics import bootstrap_medians, p_above, reachable_p
from benchctl.gate.synthetic import History, log_ratios

ALPHA, BETA, PAIRS = 0.05, 0.10, 8
POWER, POWER_NOISE = 0.9, 0.5
"""The promise: this power at twice the minimum effect while a pair's noise is at most this share of it."""

HISTORIES = {
    "normal": History(),
    "heavy tails (t3)": History(tail="t3"),
    "outliers (1 run in 20 off by 5x)": History(tail="outliers"),
    "autocorrelation 0.6": History(autocorrelation=0.6),
    "drift of 4 noises": History(drift=4.0),
    "a lasting step of 2 noises": History(step=2.0),
    "t3, autocorrelation 0.5, drift 3": History(tail="t3", autocorrelation=0.5, drift=3.0),
}
LEVELS = (0.05, 0.01, 0.005)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=4000, help="histories per row")
    parser.add_argument("--intervals", action="store_true", help="compare intervals of the median instead")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generator = np.random.default_rng(arguments.seed)
    if arguments.intervals:
        compare_intervals(arguments.n, generator)
        return 0
    broken = gate_table(1, arguments.n, generator) + gate_table(6, arguments.n, generator)
    for line in broken:
        print(f"BROKEN PROMISE: {line}", file=sys.stderr)
    return 1 if broken else 0


def gate_table(metrics: int, n: int, generator: np.random.Generator) -> list[str]:
    """Print a row per kind of history; promises that do not hold."""
    looks = plan_looks(4, PAIRS, alpha=ALPHA, beta=BETA, metrics=metrics)
    zero, all_slow = np.zeros(metrics), np.ones(metrics)
    one_slow = (np.arange(metrics) == 0).astype(float)
    cases = {
        "A/A noise 5: alarms": (5.0, zero, REGRESSION),
        "A/A noise 1: alarms": (1.0, zero, REGRESSION),
        "1x, noise 0.5: alarms": (0.5, all_slow, REGRESSION),
        "2x, noise 0.5: found": (POWER_NOISE, 2 * all_slow, REGRESSION),
        "2x, noise 0.5: passed": (POWER_NOISE, 2 * all_slow, PASS),
        "A/A noise 0.5: passed": (0.5, zero, PASS),
    }
    if metrics > 1:
        cases["2x in one, noise 0.35: found"] = (0.35, 2 * one_slow, REGRESSION)
    print(
        f"\n{metrics} gated metric{'s' if metrics > 1 else ''}, {n} histories a row, at most {PAIRS} pairs, "
        f"alpha {ALPHA}, beta {BETA}\n"
    )
    print("| history | " + " | ".join(cases) + " | pairs A/A | pairs 2x |")
    print("|---|" + "---:|" * (len(cases) + 2))
    broken = []
    for name, history in HISTORIES.items():
        shares, used = [], {}
        for case, (noise, effects, wanted) in cases.items():
            d = log_ratios(history, (n, metrics, PAIRS), noise=noise, effects=effects, generator=generator)
            outcome, pairs = play(d, np.ones(metrics), looks)
            share = float((outcome == wanted).mean())
            shares.append(share)
            used[case] = float(pairs.mean())
            broken += [f"{metrics} metrics, {name}, {case}: {share:.3f}"] if is_broken(case, share, n) else []
        row = [f"{share:.3f}" for share in shares]
        row += [f"{used['A/A noise 0.5: passed']:.1f}", f"{used['2x, noise 0.5: found']:.1f}"]
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)
    return broken


def is_broken(case: str, share: float, n: int) -> bool:
    """Whether a share contradicts the promise by more than three standard errors of the simulation."""

    def slack(rate: float) -> float:
        return 3 * (rate * (1 - rate) / n) ** 0.5

    if case.endswith("alarms"):
        return share > ALPHA + slack(ALPHA)
    if case == "2x, noise 0.5: passed":
        return share > BETA + slack(BETA)
    return case.endswith("found") and share < POWER - slack(POWER)


def compare_intervals(n: int, generator: np.random.Generator) -> None:
    """Print how often a one-sided bound of each kind errs, as a multiple of its stated level."""
    print("One-sided error of bounds of the median divided by the stated level (1 is exact, above 1 is too many)\n")
    print("| pairs | tails | " + " | ".join(f"{kind} {level}" for kind in KINDS for level in LEVELS) + " |")
    print("|---|---|" + "---:|" * (len(KINDS) * len(LEVELS)))
    for pairs in (6, 8, 10, 12, 16):
        for tail in ("normal", "t3", "outliers"):
            d = log_ratios(History(tail=tail), (n * 5, 1, pairs), noise=1.0, effects=np.zeros(1), generator=generator)
            p_values = kinds_p(d[:, 0, :])
            ratios = [
                "unreachable" if level < reachable_p(pairs) else f"{(p <= level).mean() / level:.2f}"
                for p in p_values
                for level in LEVELS
            ]
            print(f"| {pairs} | {tail} | " + " | ".join(ratios) + " |", flush=True)


KINDS = ("percentile", "BCa", "studentised")


def kinds_p(d: np.ndarray) -> list[np.ndarray]:
    """One-sided p values against "the median is at most 0" by each kind of bootstrap interval."""
    left, right, weight = bootstrap_medians(d.shape[-1])
    ordered = np.sort(d, axis=-1)
    medians = (ordered[:, left] + ordered[:, right]) / 2
    middle = np.median(d, axis=-1)[:, None]

    def share_below(threshold: float | np.ndarray) -> np.ndarray:
        return ((medians < threshold) + 0.5 * (medians == threshold)) @ weight

    percentile = share_below(0.0)
    # The jackknife of a median takes two values only, so that its acceleration is 0: BCa only corrects the bias.
    bias = special.ndtri(np.clip(share_below(middle), 1e-9, 1 - 1e-9))
    bca = special.ndtr(special.ndtri(np.clip(percentile, 1e-12, 1 - 1e-12)) - 2 * bias)
    return [percentile, bca, p_above(d, 0.0)]


if __name__ == "__main__":
    sys.exit(main())
