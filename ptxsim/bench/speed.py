"""How fast the simulator is: ``python bench/speed.py [--json FILE]``, in ptxsim. Needs NVRTC's wheels.

Times are CPU time of one process with one thread for matrix products, the best of several runs: microseconds for each
warp-instruction (one PTX instruction of one warp) of the test kernels, with and without race detection, and the seconds
that loading takes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ[name] = "1"  # threads that wait for products are CPU time, too

HOUSE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HOUSE), str(HOUSE / "tests")]

import ptxsim  # noqa: E402
from ptxsim.parsing.parse import parse  # noqa: E402
from simtest import nvrtc  # noqa: E402
from simtest.mutants.run import DEFINES, arch_of  # noqa: E402
from simtest.runners import RUNNERS  # noqa: E402

LARGE = 686_000
"""Bytes of PTX whose loading is timed: as much as a large production module has."""


def best(work: Callable[[], object], times: int) -> float:
    """Return the least CPU time of some runs."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return min(taken)


def launches(name: str, ptx: str, check: bool) -> tuple[float, int]:
    """Run a test kernel; return the CPU time of its launches alone, and their warp-instructions."""
    seconds, instructions, real = 0.0, 0, ptxsim.Module.launch

    def timed(self: ptxsim.Module, *args: object, **options: object) -> ptxsim.Report:
        nonlocal seconds, instructions
        start = time.process_time()
        report = real(self, *args, **options)
        seconds += time.process_time() - start
        instructions += report.total
        return report

    with mock.patch.object(ptxsim.Module, "launch", timed):
        RUNNERS[name](ptx, "late", 0, check)
    return seconds, instructions


def kernels(times: int) -> list[dict]:
    """Time every test kernel."""
    rows = []
    for name in RUNNERS:
        ptx = nvrtc.kernel_ptx(f"{name}.cu", arch_of(name), None, DEFINES.get(name, ()))
        row: dict = {"kernel": name}
        for label, check in (("checked", True), ("unchecked", False)):
            runs = [launches(name, ptx, check) for _ in range(times)]
            row |= {"warp-instructions": runs[0][1], label: 1e6 * min(seconds for seconds, _ in runs) / runs[0][1]}
        rows.append(row)
    return rows


def loading(times: int) -> dict:
    """Time the loading of a large module: the text, then all its kernels."""
    text = nvrtc.kernel_ptx("hopper_gemm.cu")
    head, body = text.split(".visible", 1)
    copies = -(-LARGE // len(body))
    large = head + "".join(
        ".visible" + body.replace("hopper_gemm", f"k{i}").replace("$L__BB", f"$L__{i}BB") for i in range(copies)
    )
    parsed = best(lambda: parse(large), times)
    module = ptxsim.Module(large)
    start = time.process_time()
    for name in module.kernels:
        module.program(name)
    return {"bytes": len(large), "kernels": copies, "text": parsed, "programs": time.process_time() - start}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=5, help="runs of each kernel; the best counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    rows, load = kernels(options.times), loading(options.times)
    print("| kernel | warp-instructions | us each, checked | us each, unchecked |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['kernel']} | {row['warp-instructions']:,} | {row['checked']:.1f} | {row['unchecked']:.1f} |")
    print(f"\nLoading {load['bytes']:,} bytes of PTX takes {load['text']:.2f} s, ", end="")
    print(f"its {load['kernels']} kernels {load['programs']:.2f} s")
    if options.json:
        options.json.write_text(json.dumps({"kernels": rows, "loading": load}, indent=1) + "\n")


if __name__ == "__main__":
    main()
