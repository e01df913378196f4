"""The vector instructions that Inductor uses on CPU.

To find them Inductor compiles small programs and runs each in a Python process of its own, at every start: seconds of
a warm one. An entry of the cache is bound to the CPU's flags and to the compiler, so what was found when it was made
still holds: the results are stored beside the pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch._inductor.cpu_vec_isa import VecISA

_results: dict[str, bool] = {}
"""Of this process. Inductor tries out only once, whatever is compiled later."""


@contextmanager
def known_results(known: dict[str, bool]) -> Iterator[dict[str, bool]]:
    """Answer from `known` what Inductor wants to try out within the block. Yields all results so far, `known` ones
    and those of what had to be tried out after all."""
    _results.update(known)
    try_out = VecISA.check_build

    def check_build(isa: Any, code: str) -> bool:
        digest = hashlib.sha256(f"{isa._arch_flags}\n{code}".encode()).hexdigest()[:16]
        key = f"{type(isa).__name__} {digest}"
        if key not in _results:
            _results[key] = bool(try_out(isa, code))
        return _results[key]

    with patch.object(VecISA, "check_build", check_build):
        yield _results
