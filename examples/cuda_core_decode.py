"""Decode with cuda.core's device, stream, memory and graph, by a manifest: neither mla_cupy nor CuPy is imported.

mla-cupy export --op decode --h-q 16 --page-size 64 --arch sm_90a --out build/decode
python examples/cuda_core_decode.py build/decode/mla_decode.json

`launch` of cuda.core takes no struct by value, which the kernels' parameters are: the class `Exported` beside this file
makes the launches, with cuda-bindings. The result is compared with attention in NumPy.
"""

from __future__ import annotations

import argparse
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import Device
from cuda_bindings_decode import Exported, attention, bfloat16, checked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path, help="of decode over pages of 64 tokens of bfloat16")
    parser.add_argument("--graph", action="store_true", help="capture the call in a CUDA graph, and launch that twice")
    options = parser.parse_args()
    device = Device(0)
    device.set_current()
    stream, exported = device.create_stream(), Exported(options.manifest)
    heads, rng = exported.manifest["sizes"]["h_q"], np.random.default_rng(0)

    q, cache = (rng.integers(-8, 9, shape) / 8 for shape in ((2, 1, heads, 576), (4, 64, 576)))
    table, seqlens = np.array([[3, 0], [2, 0]], np.int32), np.array([70, 5], np.int32)
    out, lse = np.zeros((2, 1, heads, 512), np.uint16), np.zeros((2, heads, 1), np.float32)
    arrays = {"q": bfloat16(q), "kv_cache": bfloat16(cache), "block_table": table, "seqlens": seqlens}
    arrays |= {"out": out, "lse": lse}
    buffers: dict[str, Any] = {name: device.allocate(x.nbytes, stream=stream) for name, x in arrays.items()}
    options_of = [each for each in exported.manifest["arguments"] if "default" in each]
    given = {each["name"]: (float if each["kind"] == "real" else int)(each["default"]) for each in options_of}
    given |= {"b": 2, "num_pages": 4, "max_pages": 2, "scale": 192**-0.5}
    for name, x in arrays.items():
        checked(driver.cuMemcpyHtoDAsync(int(buffers[name].handle), x.ctypes.data, x.nbytes, stream.handle))
        given |= {f"{name}_strides[{i}]": at // x.itemsize for i, at in enumerate(x.strides)}
        given[name] = int(buffers[name].handle)
    given["workspace_bytes"] = exported.workspace(given)
    workspace = device.allocate(max(1, given["workspace_bytes"]), stream=stream)
    given["workspace"] = int(workspace.handle)

    if options.graph:
        stream.sync()
        builder = stream.create_graph_builder().begin_building()
        exported.call(given, builder.stream.handle)
        graph = builder.end_building().complete()
        for _ in range(2):
            graph.launch(stream)
    else:
        exported.call(given, stream.handle)
    for name, x in (("out", out), ("lse", lse)):
        checked(driver.cuMemcpyDtoHAsync(x.ctypes.data, given[name], x.nbytes, stream.handle))
    stream.sync()

    found = (out.astype(np.uint32) << 16).view(np.float32)
    for i, length in enumerate(seqlens):
        exact, exact_lse = attention(q[i, 0], cache[table[i]].reshape(-1, 576)[:length], given["scale"])
        error, error_lse = abs(found[i, 0] - exact).max(), abs(lse[i, :, 0] - exact_lse).max()
        print(f"{length:3} tokens: largest error of out {error:.1e}, of lse {error_lse:.1e}")
        if not (error < 0.01 and error_lse < 0.002 and math.isfinite(error)):
            raise SystemExit("wrong")
    print(f"CRC-32 of out and lse: {zlib.crc32(lse.tobytes(), zlib.crc32(out.tobytes())):08x}")
    print("all as expected")


if __name__ == "__main__":
    main()
