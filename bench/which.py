"""`bench which`: the kernel that a case runs on a GPU, why no other, and the roofline."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from mla_cupy.kernels.gpus import Gpu, described, gpu_of
from mla_cupy.ops.choices import KernelChoice, which
from mla_cupy.runtime import device as devices
from mla_cupy.terminal import show, table

from . import calls
from .core.cost import Cost, roofline_us
from .core.device import DTYPES

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = """Tell which kernels a call runs, and why no others; needs no GPU.

Registers and shared memory come from the cached build; `mla-cupy compile` makes one. The time is the roofline
of the GPU's published rates, which no kernel reaches.
"""
EPILOG = """examples:
  which decode b128-sq1-hq128-skv4096
  which decode b128-sq1-hq128-skv4096 --arch sm_89
  which sparse-forward sq4096-skv8192-hq128-topk2048 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `which`."""
    parser.add_argument("operation", choices=calls.NAMES, metavar="OPERATION", help=", ".join(calls.NAMES))
    parser.add_argument("case", metavar="CASE", help="as `mla-cupy bench list` prints them, or any like them")
    parser.add_argument("--arch", metavar="TARGET", help="such as sm_89 (default: this machine's GPU, or sm_90a)")
    parser.add_argument("--kernel", metavar="NAME", help="ask about a kernel by name")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the inputs (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace, console: Console) -> int:
    """`which`."""
    from .operations import OPERATIONS

    case = OPERATIONS[args.operation].parse(args.case)
    call = calls.call_of(args.operation, case, args.dtype)
    choice = which(call, arch=args.arch, **({"kernel": args.kernel} if args.kernel else {}))
    us = expected_us(case, gpu_asked(choice))
    if args.json:
        print(json.dumps({**choice.as_dict(), "case": case.name, "roofline_us": us}, indent=1))
    else:
        _show(choice, case.name, us, console)
    return 0


def gpu_asked(choice: KernelChoice) -> Gpu:
    """The GPU of an answer, with its rates."""
    model = gpu_of(choice.arch)
    return model if model.name == choice.gpu else described(devices.describe(0))


def expected_us(case: Any, gpu: Gpu) -> float | None:
    """The roofline of a case at a GPU's published rates; None if they are not known."""
    cost: Cost = case.cost
    rate = gpu.fp8_tflops or gpu.tflops if _in_fp8(case) else gpu.tflops
    return None if gpu.tflops is None else roofline_us(cost, rate, gpu.tbps)


def _in_fp8(case: Any) -> bool:
    """True if a case multiplies numbers of 8 bits."""
    codes = case.op.startswith("indexer_logits") and not case.bf16
    return codes or getattr(case, "math", "exact") == "fp8" or any(getattr(case, x, False) for x in ("fp8", "fp8_math"))


def _show(choice: KernelChoice, case: str, us: float | None, console: Console) -> None:
    ran = "measured" if choice.has_run else "compiled and simulated; never run on this GPU: try `mla-cupy selftest`"
    facts = (
        ("call", f"{choice.operation} {case}"),
        ("GPU", f"{choice.gpu} ({choice.arch})"),
        ("kernel", choice.kernel),
        ("state", ran),
        ("roofline", "unknown" if us is None else f"{us:.1f} us"),
    )
    launches = ((x.kernel, x.build, "x".join(map(str, x.grid)), *_resources(x)) for x in choice.launches)
    show(
        table("", ("what", "value"), facts),
        table("launches", ("kernel", "build", "grid", "registers", "shared memory"), launches),
        table("other kernels", ("kernel", "why not"), choice.passed_over.items()),
    )


def _resources(launch: Any) -> tuple[str, str]:
    if launch.registers is None:
        return "not built yet", ""
    return str(launch.registers), f"{launch.smem_bytes} bytes"
