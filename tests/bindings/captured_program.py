"""Runs programs that another process has exported, a few times, for tests of XLA's command buffers.

    python -m tests.bindings.captured_program FOLDER

Prints how often Python was entered for the GPU, how often while XLA captured a CUDA graph, and a checksum of each
program's results, which are the same in every run.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from mla_cupy.jax import ffi
from mla_cupy.ops.bind import Launcher
from mla_cupy.runtime import driver

RUNS = 6
CAPTURING = "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
"""Flags of XLA: what may be captured, and that a graph may be as small as these programs."""
NOTHING = "--xla_gpu_enable_command_buffer="


def main(folder: str) -> None:
    """Run all programs of the folder."""
    entered: list[bool] = []
    enqueue = Launcher.enqueue

    def counted(self: Launcher, ordinal: int, addresses: Any, stream: int) -> None:
        entered.append(driver.current().is_capturing(stream))
        enqueue(self, ordinal, addresses, stream)

    Launcher.enqueue = counted  # type: ignore[method-assign]
    ffi.register()
    sums = []
    for path in sorted(Path(folder).glob("*.program")):
        program = export.deserialize(bytearray(path.read_bytes()))
        run = jax.jit(program.call)
        arrays = np.load(path.with_suffix(".npz"))
        device = jax.devices(program.platforms[0])[0]
        kinds = [x.dtype for x in program.in_avals]
        given = [jax.device_put(arrays[f"arr_{i}"].view(kind), device) for i, kind in enumerate(kinds)]
        found = {checksum(run(*given)) for _ in range(RUNS)}
        assert len(found) == 1, found
        sums += found
    print(f"{len(entered)} calls, {sum(entered)} captured: {' '.join(sums)}")


def checksum(results: Any) -> str:
    """CRC-32 of all results."""
    found = 0
    for x in jax.tree.leaves(results):
        found = zlib.crc32(np.ascontiguousarray(x).view(np.uint8).tobytes(), found)
    return f"{found:08x}"


if __name__ == "__main__":
    main(*sys.argv[1:])
