"""Programmatic dependent launch: what the compiled kernels hold for Hopper, which needs no GPU to find out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.backends.nvidia")

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from server.compilation.pieces import _settings
from server.kernels import activation, gemv, kv_write, launch, norm, norm_gemv, paged_decode, rotary, sampling

WAIT, START = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
HALF, FLOAT, INT, LONG = "*bf16", "*fp32", "*i32", "*i64"

# By name: the kernel has too many to count.
DECODE_TYPES = {
    "q_ptr": HALF, "kv_ptr": HALF, "block_table_ptr": INT, "seq_lens_ptr": INT, "items_ptr": INT,
    "out_ptr": HALF, "partial_ptr": FLOAT, "stats_ptr": FLOAT, "counter_ptr": INT,
    "scale_log2": "fp32", "v_offset16": "i64", "block_table_stride": "i32", "q_stride8": "i32", "out_stride8": "i32",
}  # fmt: skip
DECODE = {
    "NUM_KV_HEADS": 2, "GROUP": 4, "HEAD_DIM": 64, "PAGE": 16, "PAGE_STRIDE": 4096, "ROW_STRIDE": 128,
    "HEAD_STRIDE": 64, "BLOCK_G": 16, "BLOCK_D": 64, "BLOCK_N": 16, "MIN_CHUNK": 16, "BLOCK_Q": 4, "MAX_SPLITS": 4,
    "MERGE_SPLITS": 4, "FIELDS": 8, "PLANNED": False, "UPCAST": False,
}  # fmt: skip


def decode_case(reads: int, **changed: bool) -> tuple[Any, list[str], tuple[Any, ...], int]:
    kernel = paged_decode._decode_kernel
    types = [DECODE_TYPES[name] for name in kernel.arg_names if name in DECODE_TYPES]
    constants = {**DECODE, **changed}
    return kernel, types, tuple(constants[name] for name in kernel.arg_names if name in constants), reads


def gemv_case(kernel: Any, rows: int, n: int, k: int, reads: int) -> tuple[Any, list[str], tuple[Any, ...], int]:
    config = gemv._best_config(rows, n, k, gated=kernel is gemv._gated_gemv_kernel)
    return kernel, [*[HALF] * 4, "i32"], gemv._gemv_constants(k, n, rows, False, config), reads


# Every kernel that is launched as a dependent: types of pointers and scalars, constants before PDL, and how many reads
# a thread issues before it waits.
CASES: dict[str, tuple[Any, list[str], tuple[Any, ...], int]] = {
    "gemv": gemv_case(gemv._gemv_kernel, 1, 64, 4096, 8),
    "gemv, long rows": gemv_case(gemv._gemv_kernel, 1, 64, 14336, 6),
    "gemv, short rows": gemv_case(gemv._gemv_kernel, 4, 64, 1024, 4),
    "gemv, ragged": gemv_case(gemv._gemv_kernel, 2, 37, 1096, 4),
    "gated gemv": gemv_case(gemv._gated_gemv_kernel, 1, 64, 4096, 8),
    "gated gemv, short rows": gemv_case(gemv._gated_gemv_kernel, 4, 64, 1024, 8),
    "add gemv": (norm_gemv._add_gemv_kernel, [HALF] * 5, (2048, 4, 256, 8, True), 8),
    "norm gemv": (norm_gemv._norm_gemv_kernel, [*[HALF] * 5, "fp32"], (1024, 64, 4, 256, False, True), 8),
    "norm gated gemv": (norm_gemv._norm_gemv_kernel, [*[HALF] * 5, "fp32"], (1024, 64, 4, 256, True, False), 12),
    "rms_norm": (norm._rms_norm_kernel, [HALF, HALF, HALF, "fp32"], (1024, 1, 1024, 1024), 1),
    "add_rms_norm": (norm._add_rms_norm_kernel, [*[HALF] * 5, "fp32"], (1024, 1024), 1),
    "rotary": (
        rotary._rotary_kernel,
        [HALF, LONG, FLOAT, HALF, HALF, HALF, LONG, "fp32", "i64"],
        (8, 2, 64, 16, 4096, 128, 64, 8, 32, True, True),
        8,
    ),
    "silu_and_mul": (activation._silu_and_mul_kernel, [HALF] * 2, (1536, 1024), 0),
    "write_kv": (
        kv_write._write_kv_kernel,
        [HALF, HALF, HALF, LONG, "i64", "i32", "i32"],
        (16, 4096, 128, 64, 128, 64, 128),
        1,
    ),
    "decode": decode_case(1),
    "decode of a plan": decode_case(0, PLANNED=True),
    "threshold": (sampling._threshold_kernel, [HALF, FLOAT, INT, FLOAT, FLOAT], (1024, 1024, 512), 0),
    "chunk": (
        sampling._chunk_argmax_kernel,
        [HALF, FLOAT, FLOAT, LONG, LONG, FLOAT, INT],
        (1024, 1024, 512, True, True),
        0,
    ),
    "merge": (sampling._merge_argmax_kernel, [FLOAT, INT, LONG, "i32"], (16,), 0),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def ptx_of(name: str, *, pdl: bool) -> str:
    kernel, types, constants, _ = CASES[name]
    names = kernel.arg_names
    values = dict(zip(names[len(types) :], (*constants, pdl), strict=True))
    signature = dict(zip(names, types, strict=False)) | dict.fromkeys(values, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*")}
    options = {"enable_fp_fusion": True, **({"launch_pdl": True} if pdl else {})}
    compiled = compile_kernel(
        ASTSource(kernel, signature, values, aligned), target=GPUTarget("cuda", 90, 32), options=options
    )
    assert bool(compiled.metadata.launch_pdl) == pdl
    text: str = compiled.asm["ptx"]
    return re.sub(r"//.*", "", text)


@pytest.mark.parametrize("name", CASES)
def test_every_program_waits_before_it_touches_what_others_write(name: str) -> None:
    ptx = ptx_of(name, pdl=True)
    assert ptx.count(WAIT) == 1
    before, after = ptx.split(WAIT)
    assert START in before
    assert START not in after
    # No way around the wait: nothing branches or ends before it, and nothing jumps back in front of it.
    body = before[before.index("{") :]
    assert not re.search(r"\b(bra|ret|exit)\b", body)
    assert not re.search(r"^\$L__BB\w+:", body, re.MULTILINE)
    assert not re.search(r"\b(st|red|atom)\.global\b", body)
    reads = len(re.findall(r"\bld\.global\S*", body))
    assert reads == CASES[name][3]


def test_the_cases_are_all_kernels_that_are_launched_so() -> None:
    modules = (activation, gemv, kv_write, norm, norm_gemv, paged_decode, rotary, sampling)
    kernels = {value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")}
    dependent = {kernel for kernel in kernels if "PDL" in kernel.arg_names}
    assert dependent == {case[0] for case in CASES.values()}
    assert all(kernel.arg_names[-1] == "PDL" for kernel in dependent)
    assert kernels - dependent == {gemv._skinny_kernel}


def test_weights_are_read_before_the_wait_and_x_after_it() -> None:
    before, after = ptx_of("gemv", pdl=True).split(WAIT)
    read = re.compile(r"ld\.global\S*v4")
    assert (len(read.findall(before)), len(read.findall(after))) == (8, 4)


@pytest.mark.parametrize("name", ["gemv", "decode"])
def test_older_devices_get_no_such_instruction(name: str) -> None:
    ptx = ptx_of(name, pdl=False)
    assert "griddepcontrol" not in ptx


@pytest.fixture
def fresh() -> Iterator[None]:
    launch.uses_pdl.cache_clear()
    yield
    launch.uses_pdl.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("capability", "cuda", "switch", "expected"),
    [
        ((9, 0), "13.0", None, True),
        ((12, 0), "13.0", "1", True),
        ((9, 0), "13.0", "0", False),
        ((8, 9), "13.0", None, False),
        ((9, 4), None, None, False),
    ],
)
def test_where_it_is_used(
    capability: tuple[int, int], cuda: str | None, switch: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.delenv("BENCHCTL_PDL", raising=False)
    if switch is not None:
        monkeypatch.setenv("BENCHCTL_PDL", switch)
    assert launch.uses_pdl(0) is expected


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("capturing", [True, False])
def test_both_ways_to_launch_pass_the_choice_on(used: bool, capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    class Launcher:
        launch_pdl = used

        def __call__(self, *arguments: Any) -> None:
            calls.append((arguments, {"launch_pdl": self.launch_pdl}))

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*arguments: Any, **options: Any) -> Any:
                calls.append((arguments, options))
                return SimpleNamespace(run=Launcher(), function=1, packed_metadata=2)

            return run

    class Tensor:
        def get_device(self) -> int:
            return 0

        def data_ptr(self) -> int:
            return 4096

    monkeypatch.setattr(launch, "uses_pdl", lambda device: used)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 3, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing, raising=False)
    kernel = launch.Prebound(Kernel(), (7, 8), pdl=True)
    tensor: Any = Tensor()
    kernel((1, 1, 1), (tensor,), (5,))
    kernel((1, 1, 1), (tensor,), (5,))
    (arguments, options), (again, later) = calls
    assert arguments == (tensor, 5, 7, 8, used)
    assert options.get("launch_pdl", False) is used
    assert again[-5:] == (4096, 5, 7, 8, used)
    assert later["launch_pdl"] is (used and capturing)


def test_inductors_own_way_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as config

    if not hasattr(config.triton, "enable_pdl"):
        pytest.skip("this Inductor has none")
    monkeypatch.setattr(config.triton, "enable_pdl", True)
    with _settings():
        assert not config.triton.enable_pdl
