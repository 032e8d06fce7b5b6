"""Launcher of `generic/decode_schedule.cu`."""

from __future__ import annotations

from mla_cupy.launchers.spec import KernelSpec, Launch, Params, Variant, any_arch, argument_block

PARAMS = Params(seqlens="u8", schedule="u8", seqlens_stride_elems="i8", most_tokens="i8", b="i4", num_parts="i4")
POINT_BYTES = 8

SPEC = KernelSpec(
    "decode_schedule",
    "generic/decode_schedule.cu",
    variants=(Variant(),),
    core=(Variant(),),
    supports_arch=any_arch,
    params=PARAMS,
)


def launch(
    kernel: Launch, seqlens: int, stride: int, b: int, most_tokens: int, schedule: int, num_parts: int, stream: int
) -> None:
    """Write the cuts of the batch to `schedule`, of `num_parts` + 1 points."""
    args = argument_block(PARAMS.size)
    PARAMS.pack_into(args.views[0], seqlens, schedule, stride, most_tokens, b, num_parts)
    kernel((1, 1, 1), args, stream)
