"""The package's side of a comparison: what it would launch, written down as `stub.c` writes it."""

from __future__ import annotations

import contextlib
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from mla_cupy.arrays.view import View
from mla_cupy.export import explore
from mla_cupy.export.module import Module
from mla_cupy.export.record import RecordedLaunch
from mla_cupy.export.subject import Subject
from mla_cupy.kernels.spec import KernelSpec
from mla_cupy.ops import overlap
from mla_cupy.ops.call import examine
from mla_cupy.ops.checks import check_memory
from mla_cupy.runtime import driver, launching, loader, tensormap
from mla_cupy.runtime.build import BuildRequest
from mla_cupy.runtime.device import DeviceInfo, number_of, smem_per_block
from mla_cupy.runtime.tensormap import TensorMapSpec

STREAM = 0x5EED


def fake_build(request: BuildRequest) -> Any:
    """A build whose facts differ from kernel to kernel, and whose image is its name."""
    digest = zlib.crc32(request.name.encode())
    blocks = 8 if "cluster" in request.entry or ("MLA_CLUSTER_BLOCKS", "8") in request.defines else 1
    return SimpleNamespace(
        cubin=request.name.encode(),
        ptx=f"// {request.name}".encode(),
        facts={"threads": 32 * (1 + digest % 32), "cluster": blocks},
        dynamic_smem=digest % 200_000,
        info={"arch": request.arch, "nvrtc": "12.9", "registers": 128},
    )


def device(arch: str, sm_count: int, l2_bytes: int = 50 << 20) -> DeviceInfo:
    """A GPU."""
    cc = divmod(number_of(arch), 10)
    return DeviceInfo(0, "a fake GPU", cc, sm_count, smem_per_block(cc), l2_bytes, 1 << 36)


class Writer:
    """A driver that writes down what `stub.c` would."""

    def __init__(self, parameters: Mapping[str, Sequence[int]]) -> None:
        self.log = bytearray()
        self._parameters = parameters

    def take(self) -> bytes:
        """The log, which is empty afterwards."""
        log, self.log = bytes(self.log), bytearray()
        return log

    def wanted(self, request: BuildRequest) -> BuildRequest:
        return request

    def encode_tiled(self, spec: TensorMapSpec) -> bytes:
        spec.validate()
        element, swizzle, l2 = tensormap.codes(spec.dtype, spec.swizzle, spec.l2)
        rank = len(spec.dims)
        found = struct.pack("<Q6B2x", spec.base, element, rank, 0, swizzle, l2, 0)
        lists = ((spec.dims, "Q", 5), (spec.strides_bytes, "Q", 4), (spec.box, "I", 5), ((1,) * rank, "I", 5))
        return found + b"".join(struct.pack(f"<{n}{kind}", *x, *(0,) * (n - len(x))) for x, kind, n in lists)

    def memset(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        self.log += b"F" + struct.pack("<QIQQ", ptr, value, nbytes, stream)

    def prepare(
        self,
        kernel: launching.LoadedKernel,
        grid: launching.Dim3,
        block: launching.Dim3,
        cluster: launching.Dim3,
        smem: int,
        args: launching.ArgumentBlock,
        pdl: bool,
    ) -> launching.PreparedLaunch:
        attributes = [(4, *cluster)] if cluster != (1, 1, 1) else []
        attributes += [(6, 1, 0, 0)] if pdl else []

        def enqueue(stream: int) -> None:
            self.log += b"L" + kernel.entry.encode().ljust(96, b"\0")
            self.log += struct.pack("<7IQI", *grid, *block, smem, stream, len(attributes))
            self.log += b"".join(struct.pack("<4I", *attribute) for attribute in attributes)
            sizes = self._parameters[kernel.entry]
            self.log += b"".join(bytes(view)[:size] for view, size in zip(args.views, sizes, strict=False))

        return enqueue

    def in_order(self, launches: Sequence[launching.PreparedLaunch]) -> launching.PreparedLaunch:
        return launching.one_by_one(launches)

    def is_capturing(self, stream: int) -> bool:
        return False

    def device_guard(self, device: int) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


@contextlib.contextmanager
def writing(parameters: Mapping[str, Sequence[int]]) -> Iterator[Writer]:
    """Within a with statement the package launches to a Writer, and builds are fake."""
    before = loader.obtain, loader.loaded
    loader.obtain = fake_build
    loader.loaded = lambda request, device, stream=0: launching.LoadedKernel(request.entry, device, 1)
    try:
        with driver.use(Writer(parameters)) as writer:  # type: ignore[arg-type]
            assert isinstance(writer, Writer)
            yield writer
    finally:
        loader.obtain, loader.loaded = before


def parameters(module: Module) -> dict[str, list[int]]:
    """The bytes of each parameter that the module's kernels take, by their entries.

    Launches may share arguments with a kernel that takes maps: the others ignore these. Variants of one entry may take
    structs of different sizes: then as many bytes as the smallest has.
    """
    found: dict[str, list[int]] = {}
    for target in module.targets:
        for procedure in target.procedures.values():
            for steps in explore.outcomes(procedure.steps):
                for step in steps if isinstance(steps, tuple) else ():
                    if isinstance(step, RecordedLaunch):
                        kernel = target.kernels[step.build[0]]
                        maps = len(step.args.maps) if takes_maps(kernel) else 0
                        sizes = [kernel.layout(step.build[1]).size, *[tensormap.MAP_BYTES] * maps]
                        found[kernel.entry] = min(sizes, found.get(kernel.entry, sizes))
    return found


def takes_maps(kernel: KernelSpec[Any]) -> bool:
    """True if a kernel fetches through tensor maps."""
    fields = type(kernel).__dataclass_fields__
    return any(getattr(kernel, name) is not fields[name].default for name in ("kv_map", "maps") if name in fields)


class Call:
    """A call of the package on plain numbers: what a C caller gives, by the names of the recorded arguments."""

    def __init__(self, subject: Subject, values: Mapping[str, Any]) -> None:
        self.subject, self.values = subject, values

    def views(self) -> dict[str, View | None]:
        """The arrays."""
        return dict.fromkeys(self.subject.operation.names) | {
            array.name: self.view(array.name) for array in self.subject.arrays
        }

    def view(self, name: str) -> View:
        """One array."""
        array = next(each for each in self.subject.arrays if each.name == name)
        shape = tuple(self.size(axis) for axis in array.axes)
        strides = [self.values[f"{name}_strides[{axis}]"] for axis in range(array.num_strides)]
        return View(self.values[name], shape, (*strides, *(1,) * (len(shape) - len(strides))), array.dtype, 0)

    def size(self, axis: str) -> int:
        """The size of an axis."""
        name = axis.removesuffix("?")
        if name in self.subject.sizes:
            return self.subject.sizes[name]
        base, _, more = name.partition("+")
        factors = [self.subject.sizes.get(factor, self.values.get(factor, 0)) for factor in base.split("*")]
        return math.prod(factors) + int(more or 0)

    def options(self) -> tuple[Any, ...]:
        """The options."""
        given = {**self.values, **self.subject.fixed}
        return tuple(given[name] for name in self.subject.operation.options._fields)

    def request(self) -> Any:
        """The checks of a call."""
        views = self.views()
        request = examine(self.subject.operation, views, self.options())
        present = {name: view for name, view in views.items() if view is not None}
        overlap.check_apart(present, self.subject.operation.written, self.subject.operation.in_place)
        return request

    def addresses(self) -> list[int]:
        """Addresses in the form of `Prepared.enqueue`."""
        return [0, *(self.values.get(name, 0) for name in self.subject.operation.names)]

    def nbytes(self, gpu: DeviceInfo) -> int:
        """The bytes of workspace."""
        request, operation = self.request(), self.subject.operation
        return operation.pipeline.workspace(operation.configure(request, request.problem, None, gpu)).nbytes

    def run(self, gpu: DeviceInfo, stream: int = STREAM) -> None:
        """Check, prepare and enqueue."""
        request, operation = self.request(), self.subject.operation
        config = operation.configure(request, request.problem, None, gpu)
        self.check_workspace(operation.pipeline.workspace(config).nbytes)
        prepared = operation.pipeline.prepare(config, request, operation.names, gpu, stream)
        prepared.enqueue(self.addresses(), self.values["workspace"], stream)

    def check_workspace(self, nbytes: int) -> None:
        """Check the workspace as `ops.call` does."""
        if nbytes:
            view = View(self.values["workspace"], (self.values["workspace_bytes"],), (1,), "uint8", 0)
            check_memory(view, nbytes, 0)
