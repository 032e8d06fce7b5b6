"""Launcher of `generic/sparse_dkv.cu`."""

from __future__ import annotations

from mla_cupy.launchers.spec import DTYPE_VARIANTS, KernelSpec, Launch, Params, any_arch, argument_block

ROWS_PER_BLOCK = 8

PARAMS = Params(
    sums="u8",
    dkv="u8",
    dkv_stride_s_elems="i8",
    s_kv="i4",
    d_qk="i4",
    levels="i4",
    order="i4",
    dkv_is_fp32="i4",
)

SPEC = KernelSpec(
    "sparse_dkv",
    "generic/sparse_dkv.cu",
    variants=DTYPE_VARIANTS,
    core=DTYPE_VARIANTS,
    supports_arch=any_arch,
    params=PARAMS,
)


def launch(
    kernel: Launch,
    sums: int,
    dkv: int,
    dkv_stride: int,
    sizes: tuple[int, int, int],
    flags: tuple[int, bool],
    stream: int,
) -> None:
    """Write dkv. `sizes` is (s_kv, d_qk, levels), `flags` (order, dkv_is_fp32)."""
    args = argument_block(PARAMS.size)
    PARAMS.pack_into(args.views[0], sums, dkv, dkv_stride, *sizes, *flags)
    kernel((-(-sizes[0] // ROWS_PER_BLOCK), 1, 1), args, stream)
