"""Decode with its heads over two devices of JAX: of its CPU client, as a host program for `ptxsim run-host`, or GPUs.

    python -m tests.export.sharded_program MANIFEST LIBRARY [PLATFORM]

Every device calls the module for its heads; the cache is on both, and is never gathered. So in `shard_map`, and where
the types of the arrays say how they are divided, sequences among them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from math import prod
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mla_cupy import reference
from mla_cupy.jax import ExportedCall

SCALE = 192**-0.5


def main(manifest: str, library: str, platform: str = "cpu") -> None:
    """Run one call."""
    decode = ExportedCall(manifest, **({"sm_count": 2} if platform == "cpu" else {}))
    handler = ctypes.cast(ctypes.CDLL(library).mla_decode_xla, ctypes.c_void_p).value
    stages = dict.fromkeys(("instantiate", "prepare", "initialize", "execute"), jax.ffi.pycapsule(handler))
    jax.ffi.register_ffi_target(decode.target, stages, platform=platform)
    rng = np.random.default_rng(0)
    q, cache = (rng.integers(-8, 9, shape) / 8 for shape in ((2, 1, 32, 576), (4, 64, 576)))
    table, seqlens = np.array([[3, 0], [2, 0]], np.int32), np.array([70, 5], np.int32)
    shard_map = jax.shard_map(
        lambda *arrays: decode(*arrays, scale=SCALE),
        mesh=Mesh(np.array(jax.devices()[:2]), ("heads",)),
        in_specs=(P(None, None, "heads"), P(), P(), P()),
        out_specs=(P(None, None, "heads"), P(None, "heads")),
        check_vma=False,
    )
    arrays = jnp.asarray(q, jnp.bfloat16), jnp.asarray(cache, jnp.bfloat16), table, seqlens
    program = jax.jit(shard_map).lower(*arrays).compile()
    assert "all-gather" not in program.as_text()
    out, lse = map(np.asarray, program(*arrays))
    exact, exact_lse = reference.mla_decode(q, cache, table, seqlens, scale=SCALE)
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=1e-2, atol=2e-3)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-4)
    for name, specs in SPECS.items():
        if len(jax.devices()) < (4 if "sequences" in specs[0] else 2):
            print(f"{name}: not tried on {len(jax.devices())} devices")
            continue
        again = in_types(decode, specs, arrays)
        for got, expected in zip(again, (out, lse), strict=True):
            assert np.asarray(got).tobytes() == expected.tobytes(), name
    print("all as expected")


SPECS = {
    "heads": (P(None, None, "heads"), P(), P(), P()),
    "heads and sequences": (P("sequences", None, "heads"), P(), P("sequences"), P("sequences")),
}


def in_types(decode: ExportedCall, specs: tuple[P, ...], arrays: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    """The arrays' types describe the division: a plain `jit`, which gathers nothing."""
    sizes = {"heads": 2, "sequences": 2 if "sequences" in specs[0] else 1}
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=jax.devices()[: prod(sizes.values())]
    )
    given = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    step = jax.jit(lambda *x: decode(*x, scale=SCALE))
    program = step.lower(*given).compile()
    assert not any(word in program.as_text() for word in ("all-gather", "all-to-all", "collective-permute"))
    found: tuple[jax.Array, ...] = step(*given)
    assert found[0].sharding.shard_shape(found[0].shape)[2] == 16
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
