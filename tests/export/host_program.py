"""A host program for `ptxsim run-host`: calls an exported module on arrays of a file, and writes the results to one.

    python -m tests.export.host_program FOLDER OPERATION OPTIONS INPUTS OUTPUTS

FOLDER has the module's files, OPTIONS are JSON, and the files are NumPy's. Arrays are contiguous.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mla_cupy.dtypes import numpy_dtype
from mla_cupy.export.operations import subject_of
from tests.export.library import RealLibrary


def main(folder: str, operation: str, options: str, inputs: str, outputs: str) -> None:
    """Run one call."""
    subject = subject_of(operation, json.loads(options))
    library, driver = RealLibrary(Path(folder), subject), ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    assert driver.cuInit(0) == driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0

    def allocated(nbytes: int, data: bytes = b"") -> int:
        address = ctypes.c_uint64()
        assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(max(1, nbytes))) == 0
        if data:
            assert driver.cuMemcpyHtoD_v2(address, data, ctypes.c_size_t(len(data))) == 0
        return address.value

    given = dict(np.load(inputs))
    args: Any = library.Args()
    library.function("defaults")(ctypes.byref(args))
    for size in subject.free_sizes:
        setattr(args, size.name, int(given[f"size.{size.name}"]))
    library.function("contiguous")(ctypes.byref(args))
    shapes = {}
    for array in subject.arrays:
        sizes = [int(given.get(f"size.{axis}", subject.sizes.get(axis.removesuffix("?"), 0))) for axis in array.axes]
        shapes[array.name] = given[array.name].shape if array.name in given else tuple(sizes)
        dtype = numpy_dtype(array.dtype)
        data = given[array.name].tobytes() if array.name in given else b""
        nbytes = int(np.prod(shapes[array.name])) * dtype.itemsize
        setattr(args, array.name, allocated(nbytes, data or b"\xff" * nbytes))
    handle, needed = library.open(), ctypes.c_size_t()
    assert library.function("workspace")(handle, ctypes.byref(args), ctypes.byref(needed)) == 0, library.why()
    args.workspace, args.workspace_bytes = allocated(needed.value), needed.value
    assert library.function("call")(handle, ctypes.byref(args), None) == 0, library.why()
    found = {}
    for array in subject.arrays:
        if array.written:
            result = np.zeros(shapes[array.name], numpy_dtype(array.dtype))
            copied = driver.cuMemcpyDtoH_v2(
                ctypes.c_void_p(result.ctypes.data), ctypes.c_uint64(getattr(args, array.name)), result.nbytes
            )
            assert copied == 0
            found[array.name] = result
    np.savez(outputs, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
