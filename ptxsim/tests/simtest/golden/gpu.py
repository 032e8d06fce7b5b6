# ruff: noqa: E501 (the table of instructions)
"""Golden outputs of an H200: the cases, the recorder, and the comparison.

``python golden.py build FOLDER`` writes every case (PTX and arguments), ``build FOLDER new`` only those without an output;
``python golden.py record FOLDER`` runs them on a Hopper GPU with nothing but NumPy and the driver library; ``python golden.py
merge FOLDER`` adds what it wrote to ``golden_h200.npz`` beside this file. The cases are here, in golden_rows.py (tables of instructions), golden_kernels.py (matrices) and golden_copies.py.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "golden_h200.npz"


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
            import ptx_compile

            self.ptx = ptx_compile.compile_ptx(self.ptx, "sm_90a", 12)
        return self.ptx


# Instruction, inputs (i: integer edge values, f: floats), output type, tolerance in units of 2**-23 (0: bit for bit).
INSTRUCTIONS = [
    ("add.sat.s32 %d, %a, %b;", "iii", "u4", 0), ("mul.hi.s32 %d, %a, %b;", "iii", "u4", 0),
    ("mad.lo.u32 %d, %a, %b, %c;", "iii", "u4", 0), ("div.u32 %d, %a, %b;", "iii", "u4", 0),
    ("rem.s32 %d, %a, %b;", "iii", "u4", 0), ("shl.b32 %d, %a, %b;", "iii", "u4", 0),
    ("shr.s32 %d, %a, %b;", "iii", "u4", 0), ("shf.l.wrap.b32 %d, %a, %b, %c;", "iii", "u4", 0),
    ("shf.r.clamp.b32 %d, %a, %b, %c;", "iii", "u4", 0), ("lop3.b32 %d, %a, %b, %c, 0x1A;", "iii", "u4", 0),
    ("bfe.s32 %d, %a, %b, 8;", "iii", "u4", 0), ("bfe.u32 %d, %a, 28, %b;", "iii", "u4", 0),
    ("bfi.b32 %d, %a, %b, %c, 12;", "iii", "u4", 0), ("bfind.s32 %d, %a;", "iii", "u4", 0),
    ("brev.b32 %d, %a;", "iii", "u4", 0), ("clz.b32 %d, %a;", "iii", "u4", 0), ("popc.b32 %d, %a;", "iii", "u4", 0),
    ("prmt.b32 %d, %a, %b, %c;", "iii", "u4", 0), ("prmt.b32.ecl %d, %a, %b, %c;", "iii", "u4", 0),
    ("dp4a.s32.u32 %d, %a, %b, %c;", "iii", "u4", 0), ("fns.b32 %d, %a, 5, 3;", "iii", "u4", 0),
    ("szext.clamp.s32 %d, %a, %b;", "iii", "u4", 0), ("bmsk.wrap.b32 %d, %a, %b;", "iii", "u4", 0),
    ("add.f32 %d, %a, %b;", "fff", "f4", 0), ("mul.ftz.f32 %d, %a, %b;", "fff", "f4", 0),
    ("fma.rn.f32 %d, %a, %b, %c;", "fff", "f4", 0), ("fma.rz.f32 %d, %a, %b, %c;", "fff", "f4", 0),
    ("add.rm.f32 %d, %a, %b;", "fff", "f4", 0), ("add.sat.f32 %d, %a, %b;", "fff", "f4", 0),
    ("min.f32 %d, %a, %b;", "fff", "f4", 0), ("max.NaN.f32 %d, %a, %b;", "fff", "f4", 0),
    ("div.rn.f32 %d, %a, %b;", "fff", "f4", 0), ("rcp.rn.f32 %d, %a;", "fff", "f4", 0), ("sqrt.rn.f32 %d, %a;", "fff", "f4", 0),
    ("ex2.approx.ftz.f32 %d, %a;", "fff", "f4", 4), ("lg2.approx.f32 %d, %a;", "fff", "f4", 8),
    ("rcp.approx.ftz.f32 %d, %a;", "fff", "f4", 2), ("rsqrt.approx.f32 %d, %a;", "fff", "f4", 4),
    ("cvt.rzi.s32.f32 %d, %a;", "fff", "i4", 0), ("cvt.rni.u32.f32 %d, %a;", "fff", "u4", 0),
    ("cvt.rn.f32.s32 %d, %a;", "iii", "f4", 0), ("cvt.rz.f32.u32 %d, %a;", "iii", "f4", 0),
    ("cvt.rn.f16.f32 %d, %a;", "fff", "u2", 0), ("cvt.rn.bf16x2.f32 %d, %a, %b;", "fff", "u4", 0),
    ("cvt.rz.bf16x2.f32 %d, %a, %b;", "fff", "u4", 0), ("cvt.rn.satfinite.e4m3x2.f32 %d, %a, %b;", "fff", "u2", 0),
    ("cvt.rn.satfinite.e5m2x2.f32 %d, %a, %b;", "fff", "u2", 0), ("cvt.sat.u16.s32 %d, %a;", "iii", "u2", 0),
    ("add.rn.f16x2 %d, %a, %b;", "iii", "u4", 0), ("fma.rn.bf16x2 %d, %a, %b, %c;", "iii", "u4", 0),
    ("shfl.sync.bfly.b32 %d, %a, 5, 0x181F, -1;", "iii", "u4", 0), ("shfl.sync.up.b32 %d, %a, 3, 0x1000, -1;", "iii", "u4", 0),
    ("match.any.sync.b32 %d, %a, -1;", "iii", "u4", 0), ("redux.sync.xor.b32 %d, %a, -1;", "iii", "u4", 0),
]  # fmt: skip


def cases() -> Iterator[Case]:
    """Yield every case, with fresh data."""
    import golden_copies
    import golden_kernels

    yield from singles()
    yield from tables()
    yield from golden_kernels.cases()
    yield from golden_copies.cases()
    yield from compiled()


def singles() -> Iterator[Case]:
    """Yield the instructions that have a kernel each."""
    from ptx_single import EDGES32, FLOATS, program

    for code, kinds, out, ulp in INSTRUCTIONS:
        inputs = [np.roll(EDGES32 if k == "i" else FLOATS, 5 * n) for n, k in enumerate(kinds)]
        data = [*inputs, np.zeros(32, out)]
        text = program(code, inputs, data[-1]).replace("sm_100a", "sm_90a")
        yield Case(code, text, "k", 1, 32, [("array", i) for i in range(4)], data, ulp=ulp, outputs=[3])


def tables() -> Iterator[Case]:
    """Yield the tables of instructions, a kernel each."""
    from golden_rows import LANES, TABLES, given, inputs, kernel, rows

    for name, table in TABLES.items():
        arrays = inputs()
        wide = [np.concatenate([given(n, base) for n in range(4)]) for base in arrays.values()]
        data = [*wide, np.zeros((LANES, 4), "u8"), np.zeros((len(rows(table)), LANES), "u8")]
        args = [("array", i) for i in range(len(data))]
        text = kernel(rows(table), arrays)
        yield Case(f"table {name}", text, "k", 1, LANES, args, data, outputs=[len(data) - 1], table=name)


def compiled() -> Iterator[Case]:
    """Yield the compiled kernels of the tests."""
    from ptx_compile import KERNELS
    from ptx_runners import bf16

    gemm, exchange, ring = (
        (KERNELS / name).read_text() for name in ("hopper_gemm.cu", "cluster_exchange.cu", "cp_async_ring.cu")
    )
    rng = np.random.default_rng(0)
    a, b, c = bf16(rng, 128, 320).view("u2"), bf16(rng, 128, 320).view("u2"), np.zeros((128, 128), "u2")
    maps = [Map(i, 9, [w, 128], [2 * w], [64, 64], 3) for i, w in enumerate((320, 320, 128))]
    smem = 7 * 8192 + 64
    yield Case("hopper_gemm", gemm, "hopper_gemm", 2, 160, [*maps, 5], [a, b, c], smem, 1, 2**16, [2])
    tile = bf16(rng, 192, 64).view("u2")
    args = [Map(0, 9, [64, 192], [128], [64, 64], 3), ("array", 1), 3]
    data, smem = [tile, np.zeros((2, 64), "f4")], 8192 + 512
    yield Case("cluster_exchange", exchange, "cluster_exchange", 2, 64, args, data, smem, 2, 64, [1])
    args = [("array", 0), ("array", 1), 5]
    data = [rng.standard_normal((40, 128)).astype("f4"), np.zeros(128, "f4")]
    yield Case("cp_async_ring", ring, "cp_async_ring", 1, 64, args, data, outputs=[1])


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
    from golden_rows import TABLES, differing, rows

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


# ---- the GPU side: ctypes on the driver library --------------------------------------------------------------------
_NOT_READY = 600


class _Config(ctypes.Structure):
    _fields_ = [
        ("dims", ctypes.c_uint * 7), ("pad", ctypes.c_uint), ("stream", ctypes.c_void_p), ("attrs", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]  # fmt: skip


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class Hang(RuntimeError):  # noqa: N818
    """A kernel did not end; nothing can run after it."""


class Gpu:
    """Launches cases through the driver."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        self.open()

    def open(self) -> None:
        """Take the device's primary context."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.call("cuCtxSetCurrent", context)

    def finish(self, seconds: float = 5.0) -> None:
        """Wait for the launch."""
        deadline = time.monotonic() + seconds
        while status := self.lib.cuStreamQuery(None):
            if status != _NOT_READY:
                raise RuntimeError(f"the kernel failed with {status}")
            if time.monotonic() > deadline:
                raise Hang(f"the kernel still runs after {seconds} s")

    def call(self, name: str, *args: object) -> None:
        """Call a driver function and raise on failure."""
        status = getattr(self.lib, name)(*args)
        if status:
            raise RuntimeError(f"{name} failed with {status}")

    def run(self, case: Case) -> list[np.ndarray]:
        """Run a case and return its outputs."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(case.text().encode()))
        self.call("cuModuleGetFunction", ctypes.byref(function), module, case.kernel.encode())
        if case.smem > 48 * 1024:
            self.call("cuFuncSetAttribute", function, 8, case.smem)
        pointers = []
        for array in case.data:
            pointer = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(array.nbytes, 16)))
            self.call("cuMemcpyHtoD_v2", pointer, array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.nbytes))
            pointers.append(pointer)
        values = [self._argument(arg, pointers) for arg in case.args]
        array = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        attribute = _Attribute(4, 0, (ctypes.c_uint * 16)(case.cluster, 1, 1))
        config = _Config((ctypes.c_uint * 7)(case.grid, 1, 1, case.block, 1, 1, case.smem), 0, None, None, 0)
        if case.cluster > 1:
            config.attrs, config.count = ctypes.addressof(attribute), 1
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, array, None)
        self.finish()
        result = []
        for index in case.outputs:
            out = np.empty_like(case.data[index])
            self.call(
                "cuMemcpyDtoH_v2", out.ctypes.data_as(ctypes.c_void_p), pointers[index], ctypes.c_size_t(out.nbytes)
            )
            result.append(out)
        for pointer in pointers:
            self.call("cuMemFree_v2", pointer)
        self.call("cuModuleUnload", module)
        return result

    def _argument(self, arg: object, pointers: list) -> object:
        if isinstance(arg, tuple):
            return ctypes.c_uint64(pointers[arg[1]].value)
        if isinstance(arg, int):
            return ctypes.c_int(arg)
        rank = len(arg.dims)
        raw = (ctypes.c_uint8 * 256)()
        tmap = (ctypes.c_uint8 * 128).from_buffer(raw, -ctypes.addressof(raw) % 128)
        self.call(
            "cuTensorMapEncodeTiled", tmap, arg.dtype, rank, ctypes.c_void_p(pointers[arg.index].value),
            (ctypes.c_uint64 * rank)(*arg.dims), (ctypes.c_uint64 * (rank - 1))(*arg.strides),
            (ctypes.c_uint32 * rank)(*arg.box), (ctypes.c_uint32 * rank)(*(arg.steps or [1] * rank)), 0, arg.swizzle, 0,
            arg.fill,
        )  # fmt: skip
        return tmap


def main() -> None:
    """Build, record or merge."""
    command, folder = sys.argv[1], Path(sys.argv[2])
    if command == "build":
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        known = np.load(FILE).files if "new" in sys.argv else []
        chosen = [case for case in cases() if f"{case.name} #0" not in known and f"{case.name} failed" not in known]
        for case in chosen:
            case.text()  # compiled here: the GPU's machine may have no compiler
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cases.pickle").write_bytes(pickle.dumps(chosen))
        print(f"{len(chosen)} cases")
    elif command == "merge":
        both = dict(np.load(FILE)) | dict(np.load(folder / FILE.name))
        FILE.unlink()
        np.savez_compressed(FILE, **both)
    else:
        record(folder)


def record(folder: Path) -> None:
    """Run every case; one that fails is named and left out, and a fresh process goes on after it."""
    target, log = folder / FILE.name, folder / "failed.txt"
    results = dict(np.load(target)) if log.exists() and target.exists() else {}
    failed = log.read_text().splitlines() if log.exists() else []
    gpu = Gpu()
    for case in pickle.loads((folder / "cases.pickle").read_bytes()):
        if f"{case.name} #0" in results or any(line.startswith(f"{case.name}: ") for line in failed):
            continue
        try:
            for index, out in enumerate(gpu.run(case)):
                results[f"{case.name} #{index}"] = out
        except RuntimeError as error:
            results[f"{case.name} failed"] = np.array(str(error))
            np.savez_compressed(target, **results)
            log.write_text("\n".join([*failed, f"{case.name}: {error}"]))
            os.execv(sys.executable, [sys.executable, *sys.argv])
    np.savez_compressed(target, **results)
    log.unlink(missing_ok=True)
    print(f"{len(results)} outputs recorded")
    print("\n".join(["failed:", *failed]) if failed else "no case failed")


if __name__ == "__main__":
    sys.modules["golden"] = sys.modules["__main__"]
    main()
