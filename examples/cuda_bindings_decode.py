"""Decode through cuda-bindings alone, by a manifest: neither mla_cupy nor CuPy is imported, and nothing is compiled.

mla-cupy export --op decode --h-q 16 --page-size 64 --arch sm_90a --out build/decode
python examples/cuda_bindings_decode.py build/decode/mla_decode.json

`Exported` runs any exported operation. The result is compared with attention in NumPy. Which spans the numbers must
lie in, the manifest's bounds, is not checked.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import operator
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "ceil//": lambda a, b: -(-a // b),
    "%": operator.mod,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "min": min,
    "max": max,
    "abs": abs,
    "real()": float,
    "int()": int,
    "where": lambda condition, then, otherwise: then if condition else otherwise,
}
CODES = {"uint64": "Q", "int64": "q", "int32": "i", "float32": "f"}
DTYPES = {"uint8": 0, "uint16": 1, "int32": 3, "float16": 6, "float32": 7, "bfloat16": 9}  # CUtensorMapDataType
SPANS = {name: code for code, name in enumerate(("none", "32B", "64B", "128B"))}  # CUtensorMapSwizzle
L2 = {name: code for code, name in enumerate(("none", "64B", "128B", "256B"))}  # CUtensorMapL2promotion


def checked(returned: tuple[Any, ...]) -> Any:
    """Result of a function of the driver."""
    if int(returned[0]) != 0:
        raise RuntimeError(str(returned[0]))
    return returned[1] if len(returned) == 2 else returned[1:]


class Exported:
    """A manifest's module, loaded for the current context."""

    def __init__(self, path: Path) -> None:
        from cuda.bindings import driver

        self.cuda, self.manifest = driver, json.loads(path.read_text())
        if self.manifest["schema"] != 1:
            raise ValueError(f"schema {self.manifest['schema']} of {path} is not known")
        device, of = checked(driver.cuCtxGetDevice()), driver.CUdevice_attribute
        asked = ("MULTIPROCESSOR_COUNT", "L2_CACHE_SIZE", "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR")
        names = (getattr(of, f"CU_DEVICE_ATTRIBUTE_{name}") for name in asked)
        sms, l2, *capability = (checked(driver.cuDeviceGetAttribute(name, device)) for name in names)
        memory = checked(driver.cuDeviceTotalMem(device))
        self.device = {"device.sm_count": sms, "device.l2_bytes": l2, "device.total_memory": memory}
        targets = self.manifest["targets"].items()
        self.target = next(arch for arch, target in targets if target["compute_capability"] == capability)
        source = path.with_name(f"{self.manifest['name']}_images.c").read_text()
        self.functions = [self._function(kernel, source) for kernel in self.manifest["kernels"]]
        address = checked(driver.cuGetProcAddress(b"cuTensorMapEncodeTiled", 12000, 0))[0]
        self.encode = ctypes.CFUNCTYPE(ctypes.c_int)(int(address))

    def _function(self, kernel: dict[str, Any], source: str) -> Any:
        """A kernel of the target, with all the shared memory that it takes; its image is words in the C source."""
        if kernel["target"] != self.target:
            return None
        words = re.search(rf"{kernel['image']}\[\d+\] = {{([^}}]*)}}", source)
        assert words is not None
        image = b"".join(struct.pack("<Q", int(word, 16)) for word in re.findall(r"0x\w+", words[1]))
        module = checked(self.cuda.cuModuleLoadData(image))
        function = checked(self.cuda.cuModuleGetFunction(module, kernel["entry"].encode()))
        most = self.cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(self.cuda.cuFuncSetAttribute(function, most, kernel["shared_bytes"]))
        return function

    def _value(self, row: int, given: dict[str, Any], known: dict[int, Any]) -> Any:
        if row not in known:
            op, *args = self.manifest["expressions"][row]
            if op in ("integer", "real", "variable"):
                known[row] = given[args[0]] if op == "variable" else float(args[0]) if op == "real" else args[0]
            else:
                known[row] = OPERATORS[op](*(self._value(arg, given, known) for arg in args))
        return known[row]

    def look_up(self, what: str, given: dict[str, Any], procedure: str = "call") -> Any:
        """Outcome of a procedure's "steps" or "workspace" for numbers, with a function that evaluates its rows."""
        of, known = self.manifest["targets"][self.target]["procedures"][procedure], dict[int, Any]()

        def value(row: int) -> Any:
            return self._value(row, given | self.device, known)

        def outcome(node: int) -> dict[str, Any]:
            row: dict[str, Any] = of["nodes"][node]
            return outcome(row["then"] if value(row["if"]) else row["else"]) if "if" in row else row

        for rule in of["rules"] if what == "steps" else ():
            found = outcome(rule)
            if "refuse" in found:
                pieces = (x if isinstance(x, str) else format(value(x[0]), x[1]) for x in found["text"])
                raise ValueError("".join(pieces))
        return outcome(of[what]), value

    def workspace(self, given: dict[str, Any]) -> int:
        """Bytes of workspace that a call needs."""
        found, value = self.look_up("workspace", given)
        return int(value(found["bytes"]))

    def call(self, given: dict[str, Any], stream: Any) -> None:
        """Check numbers, and enqueue what they mean."""
        found, value = self.look_up("steps", given)
        for step in found["steps"]:
            if "fill" in step:
                checked(self.cuda.cuMemsetD8Async(value(step["fill"]), 0, value(step["bytes"]), stream))
            else:
                self._launch(step, value, stream)

    def _launch(self, step: dict[str, Any], value: Any, stream: Any) -> None:
        kernel, layout = self.manifest["kernels"][step["launch"]], self.manifest["structs"][step["struct"]]
        params = ctypes.create_string_buffer(layout["bytes"])
        for member, row in zip(layout["members"], step["values"], strict=True):
            struct.pack_into("<" + CODES[member["type"]], params, member["offset"], value(row))
        maps = [self._map(each, value) for each in step["maps"]]
        pointers = (ctypes.c_void_p * (1 + len(maps)))(ctypes.addressof(params), *(at for _, at in maps))
        config = self.cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = map(value, step["grid"])
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel["threads"], 1, 1
        config.sharedMemBytes, config.hStream = kernel["shared_bytes"], stream
        cluster, programmatic = self.cuda.CUlaunchAttribute(), self.cuda.CUlaunchAttribute()
        kinds = self.cuda.CUlaunchAttributeID
        cluster.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = kernel["cluster"], 1, 1
        programmatic.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        programmatic.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [cluster] * (kernel["cluster"] > 1) + [programmatic] * step["dependent"]
        config.numAttrs = len(config.attrs)
        checked(self.cuda.cuLaunchKernelEx(config, self.functions[step["launch"]], ctypes.addressof(pointers), 0))

    def _map(self, each: dict[str, Any], value: Any) -> tuple[Any, int]:
        """A tensor map: memory that holds it, and its address, a multiple of 128."""
        memory, rank = ctypes.create_string_buffer(256), len(each["dims"])
        address = -(-ctypes.addressof(memory) // 128) * 128
        dims, strides = ((ctypes.c_uint64 * 5)(*map(value, each[name])) for name in ("dims", "strides_bytes"))
        box, steps = (ctypes.c_uint32 * 5)(*map(value, each["box"])), (ctypes.c_uint32 * 5)(*[1] * 5)
        base, codes = ctypes.c_void_p(value(each["base"])), (SPANS[each["swizzle"]], L2[each["l2"]])
        target = ctypes.c_void_p(address)
        status = self.encode(target, DTYPES[each["dtype"]], rank, base, dims, strides, box, steps, 0, *codes, 0)
        checked((status,))
        return memory, address


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Bits of numbers that bfloat16 has exactly."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def attention(q: np.ndarray, keys: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """One token's heads attend to rows, whose first 512 numbers are the values."""
    scores = q @ keys.T * scale
    lse = np.log(np.exp(scores).sum(-1))
    return np.exp(scores - lse[:, None]) @ keys[:, :512], lse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path, help="of decode over pages of 64 tokens of bfloat16")
    options = parser.parse_args()
    from cuda.bindings import driver

    checked(driver.cuInit(0))
    checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(0))))))
    exported = Exported(options.manifest)
    heads, rng = exported.manifest["sizes"]["h_q"], np.random.default_rng(0)

    q, cache = (rng.integers(-8, 9, shape) / 8 for shape in ((2, 1, heads, 576), (4, 64, 576)))
    table, seqlens = np.array([[3, 0], [2, 0]], np.int32), np.array([70, 5], np.int32)
    out, lse = np.zeros((2, 1, heads, 512), np.uint16), np.zeros((2, heads, 1), np.float32)

    def on_gpu(x: np.ndarray) -> int:
        address = checked(driver.cuMemAlloc(x.nbytes))
        checked(driver.cuMemcpyHtoD(address, np.ascontiguousarray(x).ctypes.data, x.nbytes))
        return int(address)

    arrays = {"q": bfloat16(q), "kv_cache": bfloat16(cache), "block_table": table, "seqlens": seqlens}
    arrays |= {"out": out, "lse": lse}
    options_of = [each for each in exported.manifest["arguments"] if "default" in each]
    given = {each["name"]: (float if each["kind"] == "real" else int)(each["default"]) for each in options_of}
    given |= {"b": 2, "num_pages": 4, "max_pages": 2, "scale": 192**-0.5}
    for name, x in arrays.items():
        given |= {name: on_gpu(x)} | {f"{name}_strides[{i}]": at // x.itemsize for i, at in enumerate(x.strides)}
    given["workspace_bytes"] = exported.workspace(given)
    given["workspace"] = int(checked(driver.cuMemAlloc(max(1, given["workspace_bytes"]))))

    exported.call(given, driver.CUstream(0))
    checked(driver.cuCtxSynchronize())
    for x, name in ((out, "out"), (lse, "lse")):
        checked(driver.cuMemcpyDtoH(x.ctypes.data, given[name], x.nbytes))

    found = (out.astype(np.uint32) << 16).view(np.float32)
    for i, length in enumerate(seqlens):
        exact, exact_lse = attention(q[i, 0], cache[table[i]].reshape(-1, 576)[:length], given["scale"])
        error, error_lse = abs(found[i, 0] - exact).max(), abs(lse[i, :, 0] - exact_lse).max()
        print(f"{length:3} tokens: largest error of out {error:.1e}, of lse {error_lse:.1e}")
        if not (error < 0.01 and error_lse < 0.002 and math.isfinite(error)):
            raise SystemExit("wrong")
    print(f"CRC-32 of out and lse: {zlib.crc32(lse.tobytes(), zlib.crc32(out.tobytes())):08x}")
    try:
        exported.call(given | {"kv_cache": 0}, driver.CUstream(0))  # a mistake is told, and nothing is launched
    except ValueError as error:
        print(f"refused: {error}")
    print("all as expected")


if __name__ == "__main__":
    main()
