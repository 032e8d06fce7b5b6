"""Launcher of `generic/sparse_norms.cu`."""

from __future__ import annotations

from mla_cupy.launchers.spec import DTYPE_VARIANTS, KernelSpec, Launch, Params, any_arch, argument_block

ROWS_PER_BLOCK = 8

PARAMS = Params(kv="u8", selected="u8", norms="u8", kv_stride_s_elems="i8", s_kv="i4")

SPEC = KernelSpec(
    "sparse_norms",
    "generic/sparse_norms.cu",
    variants=DTYPE_VARIANTS,
    core=(),
    supports_arch=any_arch,
    params=PARAMS,
)


def launch(kernel: Launch, kv: int, selected: int, norms: int, kv_stride: int, s_kv: int, stream: int) -> None:
    """Write the length of the value part of each row that is selected."""
    args = argument_block(PARAMS.size)
    PARAMS.pack_into(args.views[0], kv, selected, norms, kv_stride, s_kv)
    kernel((-(-s_kv // ROWS_PER_BLOCK), 1, 1), args, stream)
