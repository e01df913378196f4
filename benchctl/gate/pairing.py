"""The order in which a gate runs baseline and candidate: ABBA blocks, each turned at random."""

from __future__ import annotations

import random
from typing import Literal

Side = Literal["baseline", "candidate"]
SIDES: tuple[Side, Side] = ("baseline", "candidate")


def run_order(pairs: int, seed: int) -> list[tuple[Side, Side]]:
    """The two sides of every pair in the order in which they run.

    Pairs come in blocks of two with opposite orders (ABBA or BAAB), which cancels a linear drift of the machine in
    every block; a coin decides which of the two a block is, so that no periodic disturbance can favour a side.
    """
    generator = random.Random(seed)
    order: list[tuple[Side, Side]] = []
    while len(order) < pairs:
        first: tuple[Side, Side] = SIDES if generator.random() < 0.5 else (SIDES[1], SIDES[0])
        order += [first, (first[1], first[0])]
    return order[:pairs]
