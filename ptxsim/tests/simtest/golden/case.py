"""One golden case: a launch and its data, simulated and compared with an H200's output. Needs only NumPy to load."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("h200.npz")


@dataclass
class Map:
    """A tensor map over array number ``index`` of the case's data."""

    index: int
    dtype: int
    dims: list[int]
    strides: list[int]
    box: list[int]
    swizzle: int
    steps: list[int] | None = None
    fill: int = 0


@dataclass
class Case:
    """One launch. ``args`` refer to ``data`` by ("array", i); other entries are ints and maps.

    Results may differ by ``ulp`` units of 2**-23, relative to numbers above ``floor``. ``ptx`` may also be
    CUDA, which :meth:`text` compiles: NVRTC need not be there to list the cases.
    """

    name: str
    ptx: str
    kernel: str
    grid: int
    block: int
    args: list
    data: list[np.ndarray]
    smem: int = 0
    cluster: int = 1
    ulp: float = 0.0
    outputs: list[int] = field(default_factory=list)
    table: str = ""
    floor: float = 2.0**-100

    def text(self) -> str:
        """Return the PTX; CUDA is compiled by NVRTC 12, as at the recording."""
        if ".version" not in self.ptx:
            from simtest import nvrtc

            self.ptx = nvrtc.compile_ptx(self.ptx, "sm_90a", 12)
        return self.ptx


def simulate(case: Case) -> list[np.ndarray]:
    """Run a case in the simulator and return its outputs."""
    import ptxsim

    module = ptxsim.Module(case.text())
    args = []
    for arg in case.args:
        if isinstance(arg, Map):
            address = module.memory.map(case.data[arg.index])
            shape = (arg.dims, arg.strides, arg.box, arg.steps)
            args.append(ptxsim.encode_tiled(arg.dtype, address, *shape, swizzle=arg.swizzle, oob_fill=arg.fill))
        else:
            args.append(case.data[arg[1]] if isinstance(arg, tuple) else arg)
    module.launch(case.kernel, case.grid, case.block, args, case.smem, case.cluster)
    return [case.data[i] for i in case.outputs]


def differences(case: Case, got: np.ndarray, want: np.ndarray) -> list[str]:
    """Compare an output with the GPU's and say what differs: nothing, when all agrees."""
    if not case.table:
        return [] if agrees(case, got, want) else [f"{case.name}: {got} for {want}"]
    from simtest.golden.rows import TABLES, differing, rows

    return differing(rows(TABLES[case.table]), got, want)


def agrees(case: Case, got: np.ndarray, want: np.ndarray) -> bool:
    """Compare an output with the GPU's: bit for bit (any NaN equals any NaN), or within the case's tolerance."""
    if got.dtype.kind != "f" and case.ulp:  # bf16 results as raw bits
        got, want = ((x.astype("u4") << 16).view("f4") for x in (got, want))
    if got.dtype.kind == "f":
        nan = np.isnan(got)
        if (nan != np.isnan(want)).any():
            return False
        got, want = np.where(nan, 0, got), np.where(nan, 0, want)
    if not case.ulp:
        return got.tobytes() == want.tobytes()
    with np.errstate(invalid="ignore"):
        close = np.abs(got - want) <= case.ulp * 2.0**-23 * np.maximum(np.abs(want), case.floor)
    return bool((close | (got == want)).all())
