"""The public entry: load PTX, launch kernels."""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from .errors import SimError, StepLimitError
from .instructions import (  # noqa: F401 (emitters register themselves)
    alu,
    async_forms,
    atomics,
    barriers,
    bits,
    cluster_launch,
    control,
    convert,
    floats,
    load_store,
    mbarrier,
    printing,
    tensormap_edits,
    warp_wide,
)
from .memory.spaces import GENERIC_BASE, Buffer, Memory
from .memory.tensormap import TensorMap
from .parsing.garbage import seldom_collected
from .parsing.ir import TYPE_BITS, Instr, ModuleIR
from .parsing.parse import parse
from .rules import allowed
from .state.jobs import run as run_in_processes
from .state.machine import Launch
from .state.report import BankCounter, Report
from .state.watch import Watch
from .tensor_cores import mma_sync, tcgen05_forms, wgmma_forms, wmma  # noqa: F401
from .translation.program import Program, constant_image, place

Dims = int | Sequence[int]
MAX_SHARED = 227 * 1024
"""Bytes of shared memory that a block of sm_90 or sm_100 can have."""


_ALONE = threading.RLock()
"""Held by whoever loads or launches: modules of one text share compiled kernels, launches a module's memory."""
P = ParamSpec("P")
R = TypeVar("R")


def _alone(function: Callable[P, R]) -> Callable[P, R]:
    """Let one thread at a time run a function; the others wait."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _ALONE:
            return function(*args, **kwargs)

    return call


@lru_cache(maxsize=64)
@seldom_collected
def _loaded(ptx: str) -> tuple[ModuleIR, dict[str, Program]]:
    """Parse a text once: modules made from it share compiled code, but no state that a launch changes."""
    return parse(ptx), {}


class Module:
    """A PTX module, loaded: ``Module(ptx).launch(name, grid, block, args)``.

    Parameters
    ----------
    ptx : str
        PTX text for sm_90a or sm_100a. A NUL at its end is ignored.
    strict : bool, optional
        Rules of the ISA that production kernels bend are errors (default) or warnings.
    memory : Memory, optional
        Global memory to share between modules.
    allow : collection of str, optional
        Names of rules (:data:`~.rules.RULES`) that may be broken, with a warning. ``strict=False`` allows all that
        production kernels are known to break; every check is still made, and the report lists what was found.

    Raises
    ------
    PtxSyntaxError
        The text cannot be parsed. A kernel's body is parsed, and checked, when it is first used.
    """

    def __init__(
        self, ptx: str, strict: bool = True, memory: Memory | None = None, allow: Collection[str] = ()
    ) -> None:
        self.ir, self._programs = _loaded(ptx)
        self.strict, self.allow = strict, allow
        self.memory = memory or Memory()
        self.on_idle = None
        self._load()

    def _load(self) -> None:
        """Put the module's variables into memory."""
        image, constants = constant_image(self.ir)
        self.constants = Buffer(self.memory.store("", image), 0, "constant memory")
        self.offsets: dict[str, tuple[str, int]] = {name: ("const", at) for name, at in constants.items()}
        self.offsets |= {name: ("function", self.ir.address_of(name)) for name in self.ir.taken}
        self.globals: dict[str, np.ndarray] = {}
        for var in self.ir.variables.values():
            if var.space == "global" and not var.extern:
                self.globals[var.name] = self.memory.store(var.name, np.zeros(var.size, np.uint8))
                place(self.globals[var.name], var)
                self.offsets[var.name] = ("global", self.memory.map(self.globals[var.name], var.name))
        self._relocate(constants)

    def _relocate(self, constants: dict[str, int]) -> None:
        """Write the addresses that initialisers refer to."""
        for var in self.ir.variables.values():
            for at, width, name, generic, addend in var.relocs:
                kind, value = self.offsets.get(name, ("global", 0))
                value += addend + (GENERIC_BASE[kind] if generic and kind != "function" else 0)
                raw = np.frombuffer(value.to_bytes(8, "little")[:width], np.uint8)
                if var.space == "const":
                    start = constants[var.name] + at
                    self.constants.bytes[start : start + width] = raw
                else:
                    self.globals[var.name][at : at + width] = raw

    @_alone
    def variant(self, name: str, changes: Mapping[Instr, Instr], memory: Memory | None = None) -> Module:
        """Return the module with instructions of a kernel replaced (see :meth:`Program.variant`).

        It has memory of its own, unless it is given some.
        """
        other = copy.copy(self)
        other._programs = {name: self.program(name).variant(changes)}
        other.memory = memory or self.memory.fresh()
        other._load()
        return other

    @property
    def kernels(self) -> list[str]:
        """Names of the entry functions."""
        return [f.name for f in self.ir.functions.values() if f.entry]

    def parameter_sizes(self, name: str) -> list[int]:
        """Return the bytes of each parameter of a kernel, in order."""
        return [param.size for param in self.program(name).function.params]

    @_alone
    @seldom_collected
    def program(self, name: str) -> Program:
        """Return a kernel, lowered and checked for unknown instructions."""
        if name not in self._programs:
            function = self.ir.functions.get(name)
            if function is None or not function.entry:
                raise SimError(f"no kernel {name!r}; the module has {', '.join(self.kernels) or 'none'}")
            try:
                self._programs[name] = Program(self.ir, function)
            except SimError:
                raise
            except Exception as error:
                raise SimError(f"kernel {name} cannot be loaded ({type(error).__name__}: {error})") from error
        return self._programs[name]

    @_alone
    @seldom_collected
    def launch(
        self,
        name: str,
        grid: Dims,
        block: Dims,
        args: Sequence[Any],
        smem: int = 0,
        cluster: Dims | None = None,
        mode: str = "early",
        seed: int = 0,
        check: bool = True,
        resident: int = 1,
        max_steps: int = 50_000_000,
        strict: bool | None = None,
        allow: Collection[str] | None = None,
        keep_going: bool = False,
        watch: Watch | None = None,
        banks: bool = False,
        timeline: Any = None,
        race_global: bool = False,
        race_lanes: bool = False,
        tma_outside: bool = False,
        tmem_base: int = 0,
        elect: str = "lowest",
        progress: Callable[[int, int, int], None] | None = None,
        cooperative: bool = False,
        jobs: int = 1,
    ) -> Report:
        """Run a kernel to its end.

        Threads may share a module: their launches run one after another.

        Parameters
        ----------
        name : str
            Entry function.
        grid, block, cluster : int or sequence of int
            Dimensions in blocks, threads and blocks; a cluster defaults to the kernel's declaration, else to one block.
        args : sequence
            One per parameter: a contiguous NumPy array (its address is passed), an int or float, ``bytes`` or a NumPy
            record (a struct by value), or a :class:`~.memory.tensormap.TensorMap`.
        smem : int, optional
            Dynamic shared memory in bytes.
        mode : {'early', 'late', 'random'}, optional
            When asynchronous work completes.
        seed : int, optional
            Seeds every random choice.
        check : bool, optional
            Race and proxy detection in shared and tensor memory.
        resident : int, optional
            How many clusters run interleaved.
        max_steps : int, optional
            Basic blocks after which the launch is given up as a hang.
        strict, allow : optional
            Override the module's settings.
        keep_going : bool, optional
            Go on after a race, and list all distinct ones in the report's findings, instead of raising the first.
        watch : Watch, optional
            Bytes of memory whose accesses the report lists. Needs ``check`` (for global memory ``race_global``).
        banks : bool, optional
            Count shared-memory bank conflicts per instruction.
        timeline : Timeline, optional
            Records what every warp and asynchronous unit does.
        race_global : bool, optional
            Race and proxy detection in global memory as well (blocks that exchange data).
        race_lanes : bool, optional
            Race detection between lanes of one warp, too: what only their common execution orders in shared memory.
        tma_outside : bool, optional
            A tensor copy whose box lies wholly outside its tensor is an error. Hardware fills it or drops it silently.
        tmem_base : int, optional
            First tensor-memory column that allocations start at.
        elect : {'lowest', 'random'}, optional
            Which lane ``elect.sync`` elects: the lowest of its mask, as hardware does and production kernels assume, or
            one that the seed draws, which the ISA allows too.
        progress : callable, optional
            Called now and then with the clusters that have finished, all clusters, and the executed blocks so far.
        cooperative : bool, optional
            All blocks are resident, and may wait for each other with cooperative groups' grid barrier.
        jobs : int, optional
            Processes that share the clusters out, where they can be forked. Not for kernels whose clusters wait for
            each other, nor with ``cooperative``, ``race_global``, ``watch`` or ``timeline``. Atomics of different
            processes come in any order.

        Returns
        -------
        Report
            Statistics of the launch.
        """
        if mode not in ("early", "late", "random"):
            raise ValueError(f"mode {mode!r} is not 'early', 'late' or 'random'")
        if elect not in ("lowest", "random"):
            raise ValueError(f"elect {elect!r} is not 'lowest' or 'random'")
        if jobs < 1:
            raise ValueError(f"jobs {jobs!r} is not at least 1")
        alone = {"cooperative": cooperative, "race_global": race_global, "watch": watch, "timeline": timeline}
        alone["on_idle"] = self.on_idle
        if jobs > 1 and (given := [key for key, value in alone.items() if value]):
            raise SimError(f"{given[0]} needs all clusters in one process: jobs=1, not {jobs}")
        program = self.program(name)
        grid3, block3 = _dims(grid), _dims(block)
        cluster3 = check_shape(program, grid3, block3, cluster, smem)
        if math.prod(grid3) // math.prod(cluster3) > max_steps:
            raise StepLimitError(f"kernel {name}: a grid of {grid3} needs more than max_steps={max_steps} basic blocks")
        barrier = np.zeros(2, np.uint32)
        launch = Launch(
            self,
            program,
            self.memory,
            self._pack(program, args),
            grid=grid3,
            block=block3,
            cluster=cluster3,
            smem=smem,
            mode=mode,
            seed=seed,
            check=check,
            resident=int(np.prod(grid3)) if cooperative else resident,
            workspace=self.memory.map(barrier, "the grid barrier") if cooperative else 0,
            max_steps=max_steps,
            allow=allowed(self.strict if strict is None else strict, self.allow if allow is None else allow),
            keep_going=keep_going,
            watch=watch,
            banks=BankCounter() if banks else None,
            timeline=timeline,
            race_global=race_global,
            race_lanes=race_lanes,
            tma_outside=tma_outside,
            tmem_base=tmem_base,
            elect=elect,
            progress=progress,
        )
        if watch is not None:
            watch.attach(launch)
        try:
            if jobs > 1:
                run_in_processes(launch, jobs)
            else:
                launch.run()
        finally:
            sys.stdout.write("".join(launch.printed))
            if cooperative:
                self.memory.unmap(launch.workspace)
        return Report(launch)

    def _pack(self, program: Program, args: Sequence[Any]) -> Buffer:
        """Lay the arguments out as the kernel's parameter buffer."""
        params = program.function.params
        if len(args) != len(params):
            raise SimError(f"kernel {program.name} takes {len(params)} arguments, {len(args)} given")
        data = np.zeros(program.param_size, np.uint8)
        for param, arg in zip(params, args, strict=False):
            raw = self._argument(param, arg)
            if len(raw) != param.size:
                raise SimError(f"kernel {program.name}: {param.name} has {param.size} bytes, the argument {len(raw)}")
            data[param.offset : param.offset + param.size] = np.frombuffer(raw, np.uint8)
        data.flags.writeable = False
        return Buffer(data, 0, "kernel parameters")

    def _argument(self, param: Any, arg: Any) -> bytes:
        """Return the bytes of one argument."""
        if isinstance(arg, TensorMap):
            return bytes(arg)
        if isinstance(arg, (bytes, bytearray)):
            return bytes(arg)
        if isinstance(arg, np.void) or (isinstance(arg, np.ndarray) and arg.ndim == 0 and arg.dtype.names):
            return arg.tobytes()
        if isinstance(arg, np.ndarray):
            if not (arg.flags.c_contiguous or arg.flags.f_contiguous):
                raise SimError(
                    f"parameter {param.name}: got an array of shape {arg.shape} and strides {arg.strides}, expected a"
                    " contiguous one, since a kernel sees an address alone; pass a copy, or, to a kernel that takes"
                    " strides, the whole array or the address module.memory.map(array)"
                )
            return self.memory.map(arg).to_bytes(8, "little")
        if isinstance(arg, np.generic):
            return arg.tobytes()
        if isinstance(arg, bool):
            arg = int(arg)
        if isinstance(arg, int):
            return (arg & ((1 << 8 * param.size) - 1)).to_bytes(param.size, "little")
        if isinstance(arg, float):
            code = {4: "f4", 8: "f8", 2: "f2"}.get(TYPE_BITS[param.type] // 8, "f4")
            return np.array(arg, code).tobytes()
        raise SimError(f"argument {arg!r} for {param.name} is of no supported kind")


def check_shape(program: Program, grid: tuple, block: tuple, cluster: Dims | None, smem: int) -> tuple[int, int, int]:
    """Check a launch's dimensions as the driver does; return the cluster's dimensions."""
    name, directives = program.name, program.function.directives
    declared = directives.get("reqnctapercluster")
    if declared and cluster is not None and _dims(declared) != _dims(cluster):
        raise SimError(f"kernel {name}: cluster {_dims(cluster)} differs from .reqnctapercluster {declared}")
    cluster3 = _dims(cluster if cluster is not None else declared or 1)
    if min(*grid, *cluster3) < 1:
        raise SimError(f"kernel {name}: a grid of {grid} in clusters of {cluster3} has no block")
    if any(g % c for g, c in zip(grid, cluster3, strict=True)):
        raise SimError(f"kernel {name}: grid {grid} is not a multiple of the cluster {cluster3}")
    blocks = int(np.prod(cluster3))
    if blocks > min([16, *directives.get("maxclusterrank", ())]):
        raise SimError(f"kernel {name}: a cluster of {blocks} blocks is not possible")
    threads = math.prod(block)
    if min(block) < 1 or not 1 <= threads <= 1024 or block[2] > 64:
        raise SimError(f"kernel {name}: a block of {block} threads is not possible")
    if threads > int(np.prod(directives.get("maxntid", (1024,)))):
        raise SimError(f"kernel {name}: {threads} threads exceed .maxntid {directives['maxntid']}")
    required = directives.get("reqntid")
    if required and _dims(required) != block:
        raise SimError(f"kernel {name}: block {block} differs from .reqntid {required}")
    size = program.dynamic_offset + smem
    if size > MAX_SHARED:
        raise SimError(f"kernel {name}: {size} bytes of shared memory exceed the {MAX_SHARED} that a block can have")
    return cluster3


def _dims(value: Dims) -> tuple[int, int, int]:
    """Return three dimensions."""
    values = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
    x, y, z = (int(v) for v in (*values, 1, 1)[:3])
    return x, y, z
