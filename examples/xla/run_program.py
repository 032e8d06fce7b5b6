"""Runs the program of `export_program.py` with JAX and the compiled module: mla_cupy and CuPy are not imported.

gcc -std=c11 -O2 -fPIC -shared -I$(python -c "import jax; print(jax.ffi.include_dir())")
    build/decode/*.c -ldl -lm -o build/decode/libmla_decode.so      (one command)
python examples/xla/run_program.py build/decode/libmla_decode.so build/decode/program

The result is compared with attention in NumPy.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

TARGET = "mla_cupy.decode.v1"
STAGES = ("instantiate", "prepare", "initialize", "execute")


def register(library: Path, platform: str) -> None:
    """Tell XLA of the module's handler, which serves all stages."""
    handler = ctypes.cast(ctypes.CDLL(str(library)).mla_decode_xla, ctypes.c_void_p).value
    stages = dict.fromkeys(STAGES, jax.ffi.pycapsule(handler))
    jax.ffi.register_ffi_target(TARGET, stages, platform=platform)


def attention(q: np.ndarray, keys: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """One token's heads attend to rows, whose first 512 numbers are the values."""
    scores = q @ keys.T * scale
    lse = np.log(np.exp(scores).sum(-1))
    return np.exp(scores - lse[:, None]) @ keys[:, :512], lse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, help="the exported module, compiled with its handler")
    parser.add_argument("program", type=Path, help="the program")
    parser.add_argument("--runs", type=int, default=1, help="how often it runs; all have the same bits (default: 1)")
    options = parser.parse_args()
    program = export.deserialize(bytearray(options.program.read_bytes()))
    (platform,) = program.platforms
    register(options.library, {"cuda": "CUDA"}.get(platform, platform))

    rng = np.random.default_rng(0)
    q, cache = (rng.integers(-8, 9, shape) / 8 for shape in ((2, 1, 16, 576), (4, 64, 576)))
    table, seqlens = np.array([[3, 0], [2, 0]], np.int32), np.array([70, 5], np.int32)
    with jax.default_device(jax.devices(platform)[0]):
        given = jnp.asarray(q, jnp.bfloat16), jnp.asarray(cache, jnp.bfloat16), jnp.asarray(table), jnp.asarray(seqlens)
        run = jax.jit(program.call)
        out, lse = map(np.asarray, run(*given))
        for _ in range(options.runs - 1):
            for first, again in zip((out, lse), run(*given), strict=True):
                assert first.tobytes() == np.asarray(again).tobytes()
    for i, length in enumerate(seqlens):
        exact, exact_lse = attention(q[i, 0], cache[table[i]].reshape(-1, 576)[:length], 192**-0.5)
        error, error_lse = abs(out[i, 0] - exact).max(), abs(lse[i, :, 0] - exact_lse).max()
        print(f"{length:3} tokens: largest error of out {error:.1e}, of lse {error_lse:.1e}")
        if not (error < 0.01 and error_lse < 0.002):
            raise SystemExit("wrong")
    bits = (out.view(np.uint32) >> 16).astype(np.uint16)  # the bfloat16 that the kernel wrote
    print(f"CRC-32 of out and lse: {zlib.crc32(lse.tobytes(), zlib.crc32(bits.tobytes())):08x}")
    assert not {"mla_cupy", "cupy"} & set(sys.modules)
    print("all as expected")


if __name__ == "__main__":
    main()
