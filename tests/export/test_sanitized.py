"""Exported modules in programs of their own, with the sanitizers of addresses and undefined behaviour.

The calls are random: most are accepted and launched through the stub driver, some have numbers that no call should.
"""

from __future__ import annotations

import functools
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mla_cupy.export import command
from mla_cupy.export.module import Module
from mla_cupy.export.subject import Subject
from tests.export import draws, modules, package
from tests.export.library import STUB, compiled, compiler, filled, struct_of
from tests.export.test_operations import CASES, LIMITS

DRIVE = Path(__file__).with_name("drive.c")
SANITIZED = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
"""Options of the sanitizers, whose libraries not every installation of gcc has."""
LAUNCHES = 1000
"""Launched calls of each module in slow runs."""
ENDS = (0, -1, 2**63 - 1, -(2**63), 2**62, 2**50, 1 << 48, 1 << 40, 2**31 - 1, 2**31)
FEW = ("decode", "merge_states", "merge_project", "indexer_logits_paged")
"""Modules of ordinary runs: dense decode, and those whose strides are the largest multiples of their sizes."""


def made(case: str) -> Module:
    if case == "decode":
        return modules.decode()
    operation, options = CASES[case]
    return modules.made(operation, ("sm_90a",), **options)


def structs(subject: Subject, count: int) -> bytes:
    """Arguments of calls; in every eighth call a tenth of the numbers are ends of 64 bits or of other spans."""
    kind, rng, found = struct_of([*subject.arguments()]), random.Random(39), bytearray()
    for at in range(count):
        values = draws.values(subject, rng, LIMITS)
        if at % 8 == 0:
            values |= {name: rng.choice(ENDS) for name, value in values.items() if _is_spoilt(value, rng)}
        found += bytes(filled(kind, values))
    return bytes(found)


def _is_spoilt(value: Any, rng: random.Random) -> bool:
    return isinstance(value, int) and rng.random() < 0.1


@functools.cache
def sanitizers() -> tuple[str, ...]:
    """Options with which a program links: the sanitizers', or none."""
    command = [compiler(), "-x", "c", "-", *SANITIZED, "-o", "/dev/null"]
    tried = subprocess.run(command, input="int main(void) { return 0; }", text=True, capture_output=True, check=False)
    return SANITIZED if tried.returncode == 0 else ()


def driven(module: Module, folder: Path, count: int) -> dict[str, int]:
    """Make `count` calls; returns the numbers launched, launched with a plan, and refused."""
    command.write(module, folder)
    driver = compiled(folder / "libstub.so", [STUB], "-shared", "-fPIC")
    sources = [DRIVE, folder / f"{module.name}.c", folder / f"{module.name}_images.c"]
    defines = [f"-DMODULE={module.name}", f"-DHEADER=<{module.name}.h>", f'-DMLA_CUDA_LIBRARY="{driver}"']
    defines += ["-DPLANNED"] * module.is_planned
    program = compiled(folder / "drive", sources, *sanitizers(), *defines, f"-I{folder}", str(driver), "-ldl", "-lm")
    calls = folder / "calls"
    calls.write_bytes(structs(module.subject, count))
    entries = [f"{word}" for name, sizes in package.parameters(module).items() for word in (name, len(sizes), *sizes)]
    done = subprocess.run([program, calls, *entries], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    words = done.stdout.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


@pytest.mark.parametrize("case", FEW)
def test_some_calls(case: str, tmp_path: Path) -> None:
    found = driven(made(case), tmp_path, 400)
    assert found["launched"] > 100
    assert found["refused"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("case", ["decode", *CASES])
def test_the_launch_path_runs_a_thousand_times(case: str, tmp_path: Path) -> None:
    module = made(case)
    found = driven(module, tmp_path, 5 * LAUNCHES)
    assert found["launched"] >= LAUNCHES
    if module.is_planned:
        assert found["planned"] >= LAUNCHES // 2
