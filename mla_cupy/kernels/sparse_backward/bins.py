"""Launcher of `generic/sparse_rounders.cu`."""

from __future__ import annotations

from mla_cupy.launchers.spec import KernelSpec, Launch, Params, Variant, any_arch, argument_block

ROWS_PER_BLOCK = 256
LEVELS = 6
"""Sums of a deterministic backward for each element of dkv."""

PARAMS = Params(selected="u8", largest="u8", rounders="u8", s_kv="i4", additions="i4")

SPEC = KernelSpec(
    "sparse_rounders",
    "generic/sparse_rounders.cu",
    variants=(Variant(),),
    core=(),
    supports_arch=any_arch,
    params=PARAMS,
)


def launch(kernel: Launch, selected: int, largest: int, rounders: int, s_kv: int, additions: int, stream: int) -> None:
    """Write the rounder of each row, and after them their common bound: (s_kv + 1,)."""
    args = argument_block(PARAMS.size)
    PARAMS.pack_into(args.views[0], selected, largest, rounders, s_kv, additions)
    kernel((s_kv // ROWS_PER_BLOCK + 1, 1, 1), args, stream)
