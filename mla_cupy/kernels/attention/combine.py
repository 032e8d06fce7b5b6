"""Host side of `attention/combine.cu`."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.heuristics import COMBINE_BLOCKS_PER_SM, COMBINE_UNITS_PER_BLOCK
from mla_cupy.kernels.attention.kernel import FORM_PARAMS, with_forms
from mla_cupy.kernels.attention.split_schedule import MAX_SPLITS
from mla_cupy.kernels.params import DecodeFp8Params, DecodeParams
from mla_cupy.kernels.pipeline import Launch, LaunchArgs
from mla_cupy.kernels.spec import DTYPE_VARIANTS, HOPPER, KernelSpec, Variant, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_V, TILE_TOKENS, VALUE_WIDTHS

NARROW_WIDTHS = tuple({d_v for d_v in VALUE_WIDTHS.values() if d_v != D_V})
"""Widths of results other than the usual one."""

BF16_PARTIALS = Variant(dtype="bfloat16", partials="bfloat16")
"""The build after an attention kernel that has left `bf16_partials`."""

KERNEL: KernelSpec[object] = KernelSpec(
    "attention_combine",
    "merges the partial results of requests that were split",
    "attention/combine.cu",
    DecodeParams,
    variants=(
        *DTYPE_VARIANTS,
        *variants(dtype=HALF, head_dim_v=NARROW_WIDTHS),
        BF16_PARTIALS,
        *with_forms(*DTYPE_VARIANTS),
    ),
    core=DTYPE_VARIANTS,
    runs_on=lambda variant, arch: variant != BF16_PARTIALS or arch in HOPPER,
    facts={"max_splits": MAX_SPLITS, "tile_tokens": TILE_TOKENS},
    params_with=FORM_PARAMS,
)


def blocks(num_splits: int, device: DeviceInfo) -> int:
    """Blocks of the combine: all that are resident at once, to share the rows to merge; 0 for a single split."""
    return COMBINE_BLOCKS_PER_SM * device.sm_count if num_splits > 1 else 0


def blocks_beside_results(resident: int) -> int:
    """Blocks that leave room on each SM for one that multiplies their results by W_UV, see `projection.results`.

    It fetches its weights while they merge: on an H200 that is 2 us of a layer of 6,144 rows.
    """
    return resident // 2


def needed_blocks(resident: int, b: int, rows: int, num_splits: int) -> int:
    """Fewer for small batches: half a block per row of a split request, and more where there are more than 8 pieces."""
    units = rows * (min(b, num_splits // 2) + num_splits // 4)
    return min(resident, -(-units // COMBINE_UNITS_PER_BLOCK))


def build(dtype: str, d_v: int = D_V) -> Variant:
    """The build for results of a dtype and a width."""
    return Variant(dtype=dtype) if d_v == D_V else Variant(dtype=dtype, head_dim_v=d_v)


def build_of_groups(dtype: str) -> Variant:
    """The build for partial results of groups of queries."""
    return with_forms(Variant(dtype=dtype))[0]


def reads_bf16(args: LaunchArgs) -> bool:
    """True if the attention kernel of these arguments leaves partial results in bfloat16."""
    return isinstance(args.params, DecodeFp8Params) and bool(args.params.bf16_partials)


def launch(dtype: str, num_blocks: int, args: LaunchArgs, d_v: int = D_V, *, bf16_partials: bool = False) -> Launch:
    """Merge the partial results that the attention kernel with the same arguments left in the workspace."""
    return Launch(KERNEL, BF16_PARTIALS if bf16_partials else build(dtype, d_v), (num_blocks, 1, 1), args)


def launch_of_groups(dtype: str, num_blocks: int, args: LaunchArgs) -> Launch:
    """Merge the partial results that an attention kernel over groups of queries left in the workspace."""
    return Launch(KERNEL, build_of_groups(dtype), (num_blocks, 1, 1), args)
