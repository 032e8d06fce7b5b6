"""Command line: ``python -m ptxsim run|check FILE ...`` (also ``mla-cupy sim``)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from .cuda_file import compile_cuda
from .errors import SimError
from .module import Module
from .tensormap import encode_tiled
from .timeline import Timeline

_DTYPES = {"bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
_EPILOG = """arguments of the kernel, in order:
  zeros:DTYPE:SHAPE   randn:DTYPE:SHAPE   arange:DTYPE:SHAPE     an array (f4, i4, bf16, ...; SHAPE as 64x128)
  file.npy                an array from a file
  int:N   float:X         a scalar
  data:KIND:DTYPE:SHAPE   an array that only tensor maps refer to (not passed itself)
  map:INDEX:BOX:SWIZZLE   a tensor map over array number INDEX, as map:0:64x64:128B (the box innermost first)
"""


def load_module(options: argparse.Namespace, strict: bool) -> Module:
    """Load PTX, or compile CUDA."""
    if options.file.suffix == ".ptx":
        return Module(options.file.read_text(), strict=strict)
    return Module(compile_cuda(options.file, options.arch, options.include, options.define), strict=strict)


def make_array(kind: str, dtype: str, shape: str, rng: np.random.Generator) -> np.ndarray:
    """Make an array from its command-line description."""
    dims = tuple(int(v) for v in shape.split("x"))
    element = np.dtype(_DTYPES.get(dtype, dtype))
    if kind == "zeros":
        return np.zeros(dims, element)
    if kind == "arange":
        return np.arange(np.prod(dims)).reshape(dims).astype(element)
    if kind == "randn":
        return rng.standard_normal(dims).astype(element)
    raise SimError(f"unknown array kind {kind!r}")


_MAP_TYPES = ("bfloat16", "float16", "float32", "float64", "int32", "int64")


def build_arguments(module: Module, texts: Sequence[str], seed: int) -> tuple[list, list[np.ndarray]]:
    """Turn command-line arguments into kernel arguments; also return all arrays in order."""
    rng = np.random.default_rng(seed)
    arrays: list[np.ndarray] = []
    args: list = []
    for text in texts:
        kind, *rest = text.split(":")
        if kind == "int":
            args.append(int(rest[0], 0))
        elif kind == "float":
            args.append(float(rest[0]))
        elif kind == "map":
            array = arrays[int(rest[0])]
            box = [int(v) for v in rest[1].split("x")]
            name = array.dtype.name if array.dtype.name in _MAP_TYPES else f"uint{8 * array.itemsize}"
            strides = [array.strides[-1 - i] for i in range(1, array.ndim)]
            dims = list(reversed(array.shape))
            args.append(encode_tiled(name, module.memory.map(array), dims, strides, box, swizzle=rest[2]))
        elif kind == "data":
            arrays.append(make_array(*rest, rng))
        else:
            arrays.append(np.load(text) if text.endswith(".npy") else make_array(kind, *rest, rng))
            args.append(arrays[-1])
    return args, arrays


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(v) for v in text.replace("x", ",").split(","))


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    main = argparse.ArgumentParser(prog="ptxsim", description="Run compiled CUDA kernels without a GPU.")
    commands = main.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="list kernels, and instructions that are not modelled")
    run = commands.add_parser("run", help="run a kernel", epilog=_EPILOG, formatter_class=argparse.RawTextHelpFormatter)
    for each in (check, run):
        each.add_argument("file", type=Path, help="a .ptx file, or a .cu file (compiled with NVRTC)")
        each.add_argument("--arch", default="sm_90a", help="architecture for .cu files")
        each.add_argument("-I", "--include", type=Path, action="append", default=[], help="header directory (.cu)")
        each.add_argument("-D", "--define", action="append", default=[], help="macro for .cu files, as NAME=VALUE")
    run.add_argument("args", nargs="*", help="arguments of the kernel")
    run.add_argument("--kernel", help="entry function (default: the only one)")
    run.add_argument("--grid", type=_dims, default=(1,))
    run.add_argument("--block", type=_dims, default=(32,))
    run.add_argument("--cluster", type=_dims, help="default: what the kernel declares, else one block")
    run.add_argument("--smem", type=int, default=0, help="dynamic shared memory in bytes")
    run.add_argument("--mode", choices=("early", "late", "random"), default="early")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--resident", type=int, default=1, help="clusters that run interleaved")
    run.add_argument("--max-steps", type=int, default=50_000_000, help="basic blocks after which a launch is a hang")
    run.add_argument("--race-global", action="store_true", help="look for races in global memory too")
    run.add_argument("--no-check", action="store_true", help="no race detection")
    run.add_argument("--lenient", action="store_true", help="warn where production kernels bend the rules")
    run.add_argument("--banks", action="store_true", help="count shared-memory bank conflicts")
    run.add_argument("--trace", type=Path, help="write a Chrome trace")
    run.add_argument("--png", type=Path, help="draw the timeline")
    run.add_argument("--save", type=Path, help="write all arrays to an .npz file")
    return main


def check_file(options: argparse.Namespace) -> int:
    """List kernels and what they need that is missing."""
    module = load_module(options, False)
    status = 0
    for name in module.kernels:
        try:
            program = module.program(name)
            print(f"{name}: {len(program.cfg.code.instrs)} instructions, all modelled")
        except SimError as error:
            status = 1
            print(f"{name}: {error}")
    return status


def run_file(options: argparse.Namespace) -> int:
    """Run one kernel and print its report."""
    module = load_module(options, not options.lenient)
    name = options.kernel or module.kernels[0]
    args, arrays = build_arguments(module, options.args, options.seed)
    timeline = Timeline() if options.trace or options.png else None
    report = module.launch(
        name,
        options.grid,
        options.block,
        args,
        options.smem,
        options.cluster,
        options.mode,
        options.seed,
        not options.no_check,
        options.resident,
        options.max_steps,
        race_global=options.race_global,
        banks=options.banks,
        timeline=timeline,
    )
    print(report)
    if options.trace:
        timeline.save(options.trace)
    if options.png:
        timeline.draw(options.png)
    if options.save:
        np.savez(options.save, *(a if a.dtype.kind != "V" else a.astype("f4") for a in arrays))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = parser().parse_args(argv)
    try:
        return check_file(options) if options.command == "check" else run_file(options)
    except SimError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
