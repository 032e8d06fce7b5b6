"""Answers the stub libraries of one host program: memory, modules, launches."""

from __future__ import annotations

import math
import struct
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import MemoryFault, SimError, StrictWarning
from ..module import Module
from ..state.report import Report
from ..translation.program import Program
from . import maps
from .builder import Op
from .device import ERRORS, Device
from .fatbin import FatbinError, ptx_images
from .heap import BASE, SIZE, HeapMemory, shared_heap
from .images import HostError, Image, Kernel
from .record import Recording

_LAUNCH = struct.Struct("<Q3I3I3I3I")


@dataclass
class Settings:
    """Options for running the kernels of a host program.

    Attributes
    ----------
    sms : int
        Multiprocessors that the program is told of.
    arch : int
        Architecture of the device, 90 or 100; 0 for the newest that the program carries PTX of.
    strict : bool
        Rules that production kernels bend are errors.
    options : dict
        Passed to every :meth:`ptxsim.Module.launch`.
    recording : Recording, optional
        Where launches are recorded.
    quiet : bool
        Do not print a line per launch.
    """

    sms: int = 132
    arch: int = 0
    strict: bool = True
    options: dict = field(default_factory=dict)
    recording: Recording | None = None
    quiet: bool = False


class Session:
    """One process of the host program.

    Attributes
    ----------
    failed : bool
        A kernel broke a rule or a call is not modelled.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.heap = shared_heap()
        self.heap.clear()
        self.memory = HeapMemory(self.heap)
        self.images: list[Image] = []
        self.kernels: dict[int, Kernel] = {}
        self.variables: dict[int, tuple[Image, str]] = {}
        self.failed, self.broken = False, 0
        self.launches, self.instructions = 0, 0
        self.findings: Counter[str] = Counter()
        self._device: Device | None = None
        tensor_maps: dict[int, Callable[[bytes], bytes]]
        tensor_maps = {Op.TENSOR_TILED: maps.tiled, Op.TENSOR_IM2COL: maps.im2col, Op.TENSOR_ADDRESS: maps.moved}
        own: dict[int, Callable[[bytes], bytes]] = {
            op: getattr(self, f"_{op.name.lower()}") for op in Op if op not in tensor_maps
        }
        self.handlers = own | tensor_maps

    def answer(self, op: int, data: bytes) -> tuple[int, bytes]:
        """Carry out one request; return its status and result."""
        try:
            return 0, self.handlers[op](data)
        except HostError as error:
            self.failed |= error.bad
            if error.reason:
                self.tell(error.reason)
            return error.code, b""

    def tell(self, text: str) -> None:
        """Print a line about the program's kernels and calls."""
        print(f"ptxsim: {text}", file=sys.stderr, flush=True)

    def summary(self) -> str:
        """Return a line about the launches and their findings."""
        broken = "".join(f", {count} x {rule}" for rule, count in sorted(self.findings.items()))
        found = broken or ("" if self.broken else ", nothing found")
        stopped = ", one launch stopped by an error" if self.broken else ""
        return f"{self.launches} launches, {self.instructions} warp-instructions{found}{stopped}"

    # Queries about the program and the device.

    def _hello(self, _: bytes) -> bytes:
        return struct.pack("<QQ", BASE, SIZE) + self.heap.path.encode() + b"\0"

    def _unsupported(self, data: bytes) -> bytes:
        raise HostError(801, f"{data.decode()} is not modelled")

    def _error(self, data: bytes) -> bytes:
        code = struct.unpack("<i", data)[0]
        name, text = ERRORS.get(code, ("Unknown", f"error {code}"))
        return f"cudaError{name}\n{text}\0".encode() if code else b"cudaSuccess\nno error\0"

    @property
    def device(self) -> Device:
        """The simulated GPU, chosen on first use."""
        if self._device is None:
            newest = max((arch for image in self.images for arch, _ in image.texts), default=90)
            arch = self.settings.arch or (100 if newest >= 100 else 90)
            self._device = Device(arch, self.settings.sms, SIZE)
        return self._device

    def _attribute(self, data: bytes) -> bytes:
        number = struct.unpack("<i", data)[0]
        value = self.device.attributes().get(number)
        if value is None:
            raise HostError(1, f"device attribute {number} is unknown")
        return struct.pack("<i", value)

    def _properties(self, data: bytes) -> bytes:
        return self.device.properties(struct.unpack("<i", data)[0])

    def _memory_info(self, _: bytes) -> bytes:
        return struct.pack("<QQ", SIZE - self.heap.used, SIZE)

    # Memory.

    def _allocate(self, data: bytes) -> bytes:
        size, kind = struct.unpack("<QQ", data)
        address = self.memory.allocate(size, kind) if size else 0
        if size and not address:
            raise HostError(2)
        return struct.pack("<Q", address)

    def _free(self, data: bytes) -> bytes:
        address = struct.unpack("<Q", data)[0]
        if not self.memory.free(address):
            raise HostError(1, f"free of {address:#x}, which is no allocation")
        return b""

    def _range(self, data: bytes) -> bytes:
        start = self.heap.find(struct.unpack("<Q", data)[0])
        if start is None:
            raise HostError(1)
        return struct.pack("<QQQ", start, *self.heap.live[start])

    # Modules.

    def _load(self, data: bytes) -> bytes:
        try:
            texts = [*ptx_images(data)]
        except (FatbinError, struct.error) as error:
            raise HostError(200, str(error)) from None
        self.images.append(Image(texts))
        return struct.pack("<Q", len(self.images))

    def _image(self, handle: int) -> Image:
        if not 0 < handle <= len(self.images):
            raise HostError(400)
        return self.images[handle - 1]

    def _module(self, image: Image) -> Module:
        return image.module(self.device.arch, self.settings.strict, self.memory)

    def _register_function(self, data: bytes) -> bytes:
        handle, host = struct.unpack_from("<QQ", data)
        self.kernels[host] = Kernel(self._image(handle), data[16:].decode())
        return b""

    def _register_variable(self, data: bytes) -> bytes:
        handle, host = struct.unpack_from("<QQ", data)
        self.variables[host] = (self._image(handle), data[16:].decode())
        return b""

    def _get_function(self, data: bytes) -> bytes:
        image, name = self._image(struct.unpack_from("<Q", data)[0]), data[8:].decode()
        if name not in self._module(image).kernels:
            raise HostError(500)
        identity = 0x70000000 + len(self.kernels)
        self.kernels[identity] = Kernel(image, name)
        return struct.pack("<Q", identity)

    def _get_variable(self, data: bytes) -> bytes:
        return self._place(self._image(struct.unpack_from("<Q", data)[0]), data[8:].decode(), 500)

    def _symbol(self, data: bytes) -> bytes:
        found = self.variables.get(struct.unpack("<Q", data)[0])
        if found is None:
            raise HostError(13)
        return self._place(*found, 13)

    def _place(self, image: Image, name: str, missing: int) -> bytes:
        module = self._module(image)
        variable = module.ir.variables.get(name)
        if variable is None or name not in module.offsets:
            raise HostError(missing)
        space, offset = module.offsets[name]
        if space == "const":
            offset += module.constants.bytes.ctypes.data
        return struct.pack("<QQ", offset, variable.size)

    # Kernels.

    def _kernel(self, identity: int) -> Kernel:
        if identity not in self.kernels:
            raise HostError(98)
        return self.kernels[identity]

    def _program(self, kernel: Kernel) -> Program:
        return kernel.program(self._module(kernel.image))

    def _attributes_of(self, identity: int) -> dict[int, int]:
        kernel = self._kernel(identity)
        return kernel.attributes(self._program(kernel), self.device.arch)

    def _parameters(self, data: bytes) -> bytes:
        program = self._program(self._kernel(struct.unpack("<Q", data)[0]))
        return b"".join(struct.pack("<II", each.offset, each.size) for each in program.function.params)

    def _function_attribute(self, data: bytes) -> bytes:
        identity, number = struct.unpack("<QQ", data)
        value = self._attributes_of(identity).get(number)
        if value is None:
            raise HostError(1, f"function attribute {number} is unknown")
        return struct.pack("<i", value)

    def _function_attributes(self, data: bytes) -> bytes:
        at = self._attributes_of(struct.unpack("<Q", data)[0])
        numbers = (at[each] for each in (1, 2, 3, 0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 14))
        return struct.pack("<3Q13i64x", *numbers)

    def _set_function_attribute(self, data: bytes) -> bytes:
        identity, number, value = struct.unpack("<Qqq", data)
        kernel = self._kernel(identity)
        kernel.set_attribute(self._program(kernel), number, value)
        return b""

    def _occupancy(self, data: bytes) -> bytes:
        identity, threads, shared = struct.unpack("<QQQ", data)
        static = self._program(self._kernel(identity)).static_shared
        return struct.pack("<i", self.device.occupancy(threads, shared + static))

    def _clusters(self, data: bytes) -> bytes:
        identity, *rest = _LAUNCH.unpack_from(data)
        block, cluster, shared = rest[3:6], rest[6:9], rest[9]
        fit = self.device.occupancy(math.prod(block), shared + self._program(self._kernel(identity)).static_shared)
        return struct.pack("<i", fit * self.device.sms // max(1, math.prod(cluster)))

    def _launch(self, data: bytes) -> bytes:
        identity, *rest = _LAUNCH.unpack_from(data)
        grid, block, cluster = (tuple(rest[at : at + 3]) for at in (0, 3, 6))
        shared, cooperative, size = rest[9:12]
        kernel = self._kernel(identity)
        program = self._program(kernel)
        if self.broken:
            raise HostError(self.broken)
        kernel.check(program, grid, block, cluster, shared)
        buffer = data[_LAUNCH.size : _LAUNCH.size + size]
        shape = {"grid": grid, "block": block, "smem": shared, "cluster": cluster if any(cluster) else None}
        if cooperative:
            shape["cooperative"] = True
        self._run(kernel, shape, [buffer[each.offset : each.offset + each.size] for each in program.function.params])
        return b""

    def _run(self, kernel: Kernel, shape: dict, args: list[bytes]) -> None:
        module, recording = kernel.image.loaded, self.settings.recording
        before = recording.before(self.heap, kernel.name) if recording else None
        options = {**shape, **self.settings.options}
        start = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", StrictWarning)
                report = module.launch(kernel.name, args=args, **options)
        except SimError as error:
            self.broken = 700 if isinstance(error, MemoryFault) else 719
            raise HostError(self.broken, f"{kernel.name}: {type(error).__name__}: {error}") from None
        finally:
            sys.stdout.flush()
        if before is not None:
            recording.save(kernel.name, module, kernel.image.text, shape, args, before, self.heap)
        self._count(report, time.perf_counter() - start)

    def _count(self, report: Report, seconds: float) -> None:
        self.launches += 1
        self.instructions += report.total
        self.findings.update(each.rule for each in report.findings)
        if report.errors:
            self.failed = True
            for each in report.errors:
                self.tell(f"{report.kernel}: {each}")
        if not self.settings.quiet:
            found = f", {len(report.findings)} findings" if report.findings else ""
            self.tell(f"{report.kernel}: {report.total} warp-instructions in {seconds:.2f} s{found}")
