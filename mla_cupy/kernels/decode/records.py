"""The kernels of dense decode from FP8 records."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention import mma
from mla_cupy.kernels.attention.generic import from_records
from mla_cupy.kernels.attention.kernel import (
    FORM_PARAMS,
    FORMS,
    NO_TREE,
    READS_RECORDS,
    READS_V41,
    SINK,
    AttentionKernel,
    form_variant,
    identifiers,
    narrowest,
    tree_or_forms,
    wants_forms,
    with_forms,
)
from mla_cupy.kernels.attention.records import (
    BLOCK_ROWS,
    MMA_DENSE,
    PLAIN_RECORDS,
    READ_DENSE,
    TREE_BLOCK_ROWS,
    record_variant,
    rows_variant,
)
from mla_cupy.kernels.decode.heuristics import SMALL_BLOCK_TILES
from mla_cupy.kernels.decode.problem import DecodeProblem, tree_record_variant
from mla_cupy.kernels.params import DecodeFormParams, DecodeParams
from mla_cupy.kernels.spec import BLACKWELL, HOPPER, Reason, Variant, needs_alignment, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import TILE_TOKENS

BLOCK_M = 64
_RECORDS = identifiers(MMA_DENSE)
FORM_ROWS = BLOCK_ROWS[1:]
"""Rows of the builds of `SMALL` with optional inputs."""


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if not problem.record:
        return READS_RECORDS
    if problem.record in PLAIN_RECORDS:
        return READS_V41
    return tree_or_forms(problem) if device.arch in HOPPER else needs_cc(device, "9.0")


def _small_variant(problem: DecodeProblem, device: DeviceInfo) -> Variant:
    """The build of a problem: the narrowest that holds the rows, or several blocks of the widest."""
    if wants_forms(problem):
        return form_variant(rows_variant(problem, narrowest(FORM_ROWS, problem.rows)), problem)
    return tree_record_variant(problem, device)


SMALL: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm90_records",
    "dense decode from FP8 records with WGMMA, with swapped operands: blocks of up to 32 query rows",
    "decode/sm90_records.cu",
    DecodeParams,
    HOPPER,
    (
        *variants(dtype=HALF, record=_RECORDS, block_rows=BLOCK_ROWS),
        *variants(dtype=HALF, record=_RECORDS, block_rows=TREE_BLOCK_ROWS, tree_mask=(1,)),
        *with_forms(*variants(dtype=HALF, record=_RECORDS, block_rows=FORM_ROWS)),
    ),
    facts={"tile_tokens": TILE_TOKENS},
    params_with=FORM_PARAMS,
    unsupported=unsupported,
    variant=_small_variant,
    block_rows=BLOCK_ROWS[-1],
    forms=FORMS,
)


def _not_by_seesaw(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    reason = unsupported(problem, device)
    if reason is not None:
        return reason
    if problem.tree_mask:
        return NO_TREE
    grouped = problem.forms.grouped  # then a block has rows of one query, however many there are
    if problem.s_q > 1 and problem.h_q % BLOCK_M and not grouped:
        return Reason(f"takes several query tokens with multiples of {BLOCK_M} heads only")
    if wants_forms(problem) and not problem.aligned:
        return needs_alignment("q")
    if grouped and problem.h_q <= BLOCK_M // 2:
        return Reason(f"takes lengths that vary, and windows, with more than {BLOCK_M // 2} heads only")
    return None


def _seesaw_is_faster(problem: DecodeProblem, device: DeviceInfo) -> bool:
    """True for more rows than a block of the other kernel has, unless splits are short.

    Blocks of 32 rows have fewer partial results and their first tile earlier, but take longer per tile.
    """
    if problem.rows <= BLOCK_ROWS[-1]:
        return False
    if problem.batch is None:
        return True
    row_blocks = -(-problem.rows // BLOCK_ROWS[-1])
    return problem.batch.tiles * row_blocks > SMALL_BLOCK_TILES * device.sm_count


PLAIN_SEESAW = variants(dtype=HALF, record=_RECORDS)
SEESAW: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm90_records_seesaw",
    "dense decode from FP8 records with WGMMA: the seesaw schedule over dequantised tiles, for more than 32 rows",
    "decode/sm90_records_seesaw.cu",
    DecodeParams,
    HOPPER,
    (*PLAIN_SEESAW, *with_forms(*PLAIN_SEESAW)),
    facts={"block_m": BLOCK_M, "tile_tokens": TILE_TOKENS},
    params_with=FORM_PARAMS,
    unsupported=_not_by_seesaw,
    preferred=_seesaw_is_faster,
    variant=lambda problem, device: form_variant(record_variant(problem, device), problem),
    block_rows=BLOCK_M,
    forms=FORMS,
)


BLACKWELL_BLOCK_ROWS = (32, 64)
"""Numbers of query rows that a block of the kernel for Blackwell may compute."""


def _not_on_blackwell(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if not problem.record:
        return READS_RECORDS
    if device.arch not in BLACKWELL:
        return needs_cc(device, "10.0", "10.3")
    if problem.record in PLAIN_RECORDS:
        return READS_V41
    return NO_TREE if problem.tree_mask else None


SM100: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm100_records",
    "dense decode from FP8 records with tcgen05: blocks of 32 or 64 query rows; simulated, not yet run on hardware",
    "decode/sm100_records.cu",
    DecodeParams,
    BLACKWELL,
    variants(dtype=HALF, record=_RECORDS, block_rows=BLACKWELL_BLOCK_ROWS),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=_not_on_blackwell,
    variant=lambda problem, device: rows_variant(problem, narrowest(BLACKWELL_BLOCK_ROWS, problem.rows)),
    block_rows=BLACKWELL_BLOCK_ROWS[-1],
    unproven=True,
    forms=SINK,
)


MMA = mma.from_records(
    "decode_mma_records",
    "dense decode from FP8 records",
    "decode/mma_records.cu",
    DecodeParams,
    MMA_DENSE,
    rows=lambda problem: problem.rows,
)


GENERIC = from_records(
    "decode_generic_records",
    "dense decode from FP8 records on CUDA cores, for any GPU from sm_75 on",
    "decode/generic_records.cu",
    DecodeFormParams,
    READ_DENSE,
    FORMS,
)


KERNELS = (SMALL, SEESAW, SM100, MMA, GENERIC)
