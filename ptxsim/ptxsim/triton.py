"""Runs kernels compiled by Triton: their PTX, with the arguments that Triton's own launcher would pass.

Triton need not be here, nor a GPU where the kernel is compiled: ``triton.compile`` with a ``GPUTarget`` leaves the PTX
and a description of it in its cache, and returns both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import SimError
from .memory.tensormap import encode_tiled
from .module import Module
from .parsing.ir import Param
from .state.report import Report

ALLOWED = frozenset(("copy-proxy", "ld-wait", "lane-store", "mbarrier-init-fence", "tcgen05-fence"))
"""Rules that Triton's code is known to break without harm (CORPUS.md): broken, they are warnings."""

_SWIZZLES = ("none", "32B", "64B", "128B")
"""Swizzles by their number in the driver's interface, as Triton's description has them."""

_MAP_BYTES = 128


class Kernel:
    """A kernel as Triton has compiled it.

    Parameters
    ----------
    compiled : object, str or Path
        What ``triton.compile`` returns; or the file ``NAME.json`` of Triton's cache, with ``NAME.ptx`` beside it.

    Attributes
    ----------
    module : Module
        Its PTX; the rules in ``ALLOWED`` may be broken.
    name : str
        Its entry function.

    Raises
    ------
    SimError
        This is neither, or no description of Triton's.
    """

    def __init__(self, compiled: Any) -> None:
        self._facts, ptx = _read(compiled)
        self.name: str = self._fact("name")
        self.module = Module(ptx, allow=ALLOWED)

    def launch(self, grid: int | Sequence[int], args: Sequence[Any], **options: Any) -> Report:
        """Run the kernel to its end.

        Parameters
        ----------
        grid : int or sequence of int
            Programs along each axis, as in Triton.
        args : sequence
            What the Triton function takes, without its ``constexpr`` parameters: arrays for pointers and for tensor
            descriptors (of the whole array), ints and floats. Contents change in place.
        **options
            More of what :meth:`ptxsim.Module.launch` takes.

        Returns
        -------
        Report
            Statistics of the launch.
        """
        sizes = (grid,) if isinstance(grid, (int, np.integer)) else tuple(grid)
        blocks = [int(size) for size in (*sizes, 1, 1)[:3]]
        ctas = int(self._facts.get("num_ctas", 1))
        blocks[0] *= ctas
        params = self.module.program(self.name).function.params
        given = list(self._expanded(params, args))
        given += self._scratch(len(params) - len(given), int(np.prod(blocks)))
        options = {"smem": int(self._fact("shared")), "cluster": ctas, **options}
        return self.module.launch(self.name, blocks, self._threads(), given, **options)

    def _threads(self) -> int:
        """Return the threads of a block: with warp specialisation more than Triton's ``num_warps`` says."""
        directives = self.module.program(self.name).function.directives
        declared = directives.get("reqntid") or directives.get("maxntid")
        return int(np.prod(declared)) if declared else 32 * int(self._fact("num_warps"))

    def _expanded(self, params: Sequence[Param], args: Sequence[Any]) -> Iterator[Any]:
        """Yield the kernel's parameters: of a descriptor its map, then each size and each stride of the tensor."""
        descriptors = iter(self._facts.get("tensordesc_meta") or ())
        at = 0
        for number, arg in enumerate(args):
            if at >= len(params):
                raise SimError(
                    f"kernel {self.name} has no parameter for argument {number}: constexpr ones are left out"
                )
            if params[at].size != _MAP_BYTES:
                yield arg
                at += 1
                continue
            described = next(descriptors, None)
            if described is None or not isinstance(arg, np.ndarray):
                raise SimError(
                    f"argument {number} of {self.name}: got {arg!r}, expected the array of a tensor descriptor"
                )
            yield self._map(arg, described)
            yield from arg.shape
            yield from (stride // arg.itemsize for stride in arg.strides)
            at += 1 + 2 * arg.ndim

    def _map(self, array: np.ndarray, described: dict) -> Any:
        """Return a tensor map over an array, as Triton's launcher asks the driver for one."""
        box, size = described["block_size"], described["elem_size"]
        if described.get("fp4_padded") or described.get("is_im2col"):
            raise SimError(f"kernel {self.name}: padded 4-bit and im2col descriptors are not modelled here")
        if array.itemsize != size or array.ndim != len(box):
            expected = f"{len(box)} axes and items of {size} bytes"
            raise SimError(f"kernel {self.name}: got an array {array.dtype}{array.shape}, expected {expected}")
        kind = f"uint{8 * size}" if array.dtype.kind not in "fV" else {2: "float16", 4: "float32"}.get(size, "uint8")
        address = self.module.memory.map(array)
        strides = array.strides[-2::-1]
        return encode_tiled(
            kind, address, array.shape[::-1], strides, box[::-1], swizzle=_SWIZZLES[described["swizzle"]]
        )

    def _scratch(self, count: int, blocks: int) -> list:
        """Return the arguments that Triton appends: memory of all programs, for the kernel and for a profiler."""
        sizes = [int(self._facts.get(f"{kind}_scratch_size", 0)) for kind in ("global", "profile")]
        if not 0 <= count <= len(sizes):
            wrong = "more" if count > 0 else "fewer"
            raise SimError(f"kernel {self.name} takes {wrong} arguments than were given; constexpr ones are left out")
        return [np.zeros(size * blocks, np.uint8) if size else 0 for size in sizes[:count]]

    def _fact(self, name: str) -> Any:
        if name not in self._facts:
            raise SimError(f"this is no description of a kernel by Triton: it has no {name!r}")
        return self._facts[name]


def _read(compiled: Any) -> tuple[dict, str]:
    """Return the description and the PTX of a compiled kernel."""
    if isinstance(compiled, (str, Path)):
        path = Path(compiled)
        try:
            return json.loads(path.read_text()), path.with_suffix(".ptx").read_text()
        except (OSError, ValueError) as error:
            raise SimError(f"{path}: expected a kernel's .json of Triton's cache, with its .ptx ({error})") from error
    try:
        return compiled.metadata._asdict(), compiled.asm["ptx"]
    except (AttributeError, KeyError, TypeError) as error:
        raise SimError(f"got {compiled!r}, expected what triton.compile returns for a CUDA target") from error


def launch(compiled: Any, grid: int | Sequence[int], args: Sequence[Any], **options: Any) -> Report:
    """Run a kernel once: :class:`Kernel`, and its :meth:`Kernel.launch`."""
    return Kernel(compiled).launch(grid, args, **options)
