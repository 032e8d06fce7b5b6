"""Writes a program of JAX that decodes a batch through an exported module, for processes without mla_cupy.

mla-cupy export --op decode --h-q 16 --page-size 64 --arch sm_90a --xla --out build/decode
python examples/xla/export_program.py build/decode/mla_decode.json build/decode/program

`run_program.py` runs it. No GPU is needed to write it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import export

import mla_cupy.jax

BATCH, PAGES, MAX_PAGES = 2, 4, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path, help="of decode of 16 heads over pages of 64 tokens of bfloat16")
    parser.add_argument("program", type=Path, help="where the program is written")
    parser.add_argument("--platform", default="cuda", help="cuda, or cpu to try it out (default: cuda)")
    parser.add_argument("--sm-count", type=int, default=132, help="multiprocessors of the GPU (default: 132)")
    options = parser.parse_args()
    decode = mla_cupy.jax.ExportedCall(options.manifest, sm_count=options.sm_count)

    def step(q: jax.Array, kv_cache: jax.Array, table: jax.Array, seqlens: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, lse = decode(q, kv_cache, table, seqlens, scale=192**-0.5)
        return out.astype(jnp.float32), lse  # whatever else the program does

    allowed = [export.DisabledSafetyCheck.custom_call(decode.target)]
    shapes = {
        "q": jax.ShapeDtypeStruct((BATCH, 1, 16, 576), jnp.bfloat16),
        "kv_cache": jax.ShapeDtypeStruct((PAGES, 64, 576), jnp.bfloat16),
        "table": jax.ShapeDtypeStruct((BATCH, MAX_PAGES), jnp.int32),
        "seqlens": jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    }
    make = export.export(jax.jit(step), platforms=[options.platform], disabled_checks=allowed)
    program = make(*shapes.values())
    options.program.write_bytes(program.serialize())
    print(f"{options.program}: a program for {options.platform} that calls {decode.target}")


if __name__ == "__main__":
    main()
