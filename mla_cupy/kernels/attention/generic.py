"""Host side of `attention/generic.cu`, which also serves the sparse forward, as decode over pages of one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import (
    FORM_PARAMS,
    FORMS,
    KEY_VARIANTS,
    NARROW_VARIANTS,
    READS_RECORDS,
    READS_ROWS,
    SINK,
    AttentionKernel,
    form_variant,
    identifiers,
    key_variant,
    narrow_or_forms,
    with_forms,
)
from mla_cupy.kernels.attention.records import record_variant
from mla_cupy.kernels.param_layout import Params
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.spec import DTYPE_VARIANTS, HOPPER, Reason, Variant, everywhere, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import TILE_TOKENS, VALUE_WIDTHS

BLOCK_M = 8
"""Query rows of a block, in all attention forwards on CUDA cores."""


def unsupported(problem: Any, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    return needs_cc(device, "7.5") if device.cc < (7, 5) else None


def unsupported_rows(problem: Any, device: DeviceInfo) -> Reason | None:
    """Reason against a problem of 16-bit rows; None if there is none."""
    return READS_ROWS if problem.record else unsupported(problem, device) or narrow_or_forms(problem)


def unsupported_records(problem: Any, device: DeviceInfo) -> Reason | None:
    """Reason against a problem of FP8 records; None if there is none."""
    return unsupported(problem, device) if problem.record else READS_RECORDS


KERNEL: AttentionKernel[Any] = AttentionKernel(
    "attention_generic",
    "dense decode and sparse forward on CUDA cores, for any GPU from sm_75 on: the fallback",
    "attention/generic.cu",
    DecodeParams,
    variants=(*KEY_VARIANTS, *NARROW_VARIANTS, *with_forms(*KEY_VARIANTS)),
    core=DTYPE_VARIANTS,
    facts={"block_m": BLOCK_M, "tile_tokens": TILE_TOKENS},
    params_with=FORM_PARAMS,
    unsupported=unsupported_rows,
    variant=lambda problem, device: form_variant(key_variant(problem, device), problem),
    block_rows=BLOCK_M,
    blocks_per_sm=2,
    fallback=True,
    value_widths=tuple(dict.fromkeys(VALUE_WIDTHS.values())),
    forms=FORMS,
)


def not_on_hopper(variant: Variant, arch: str) -> bool:
    """`is_default` of fallbacks for problems that Hopper's kernels cover completely."""
    return arch not in HOPPER


def from_records(
    name: str,
    about: str,
    source: str,
    params: type[Params],
    records: tuple[str, ...],
    forms: tuple[str, ...] = SINK,
    is_default: Callable[[Variant, str], bool] = everywhere,
) -> AttentionKernel[Any]:
    """A family's kernel of the same form that reads FP8 records: its fallback for them."""
    return AttentionKernel(
        name,
        about,
        source,
        params,
        variants=variants(dtype=HALF, record=identifiers(records)),
        is_default=is_default,
        facts=KERNEL.facts,
        unsupported=unsupported_records,
        variant=record_variant,
        block_rows=BLOCK_M,
        blocks_per_sm=2,
        fallback=True,
        forms=forms,
    )
