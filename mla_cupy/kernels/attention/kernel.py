"""Host side that the attention kernels share: dense decode, the sparse forward and sparse decode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.split_schedule import MAX_SPLITS
from mla_cupy.kernels.param_layout import Params
from mla_cupy.kernels.params import DecodeFormParams
from mla_cupy.kernels.spec import DTYPE_VARIANTS, KernelSpec, ProblemT, Reason, Variant, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec
from mla_cupy.shapes import D_QK, D_V, VALUE_WIDTHS

READS_ROWS = Reason("reads a cache of 16-bit rows, and no records")
READS_RECORDS = Reason("reads a cache of FP8 records, and no 16-bit rows")
READS_V41 = Reason("reads other records than v41")
NO_TREE = Reason("takes no tree_mask")
NO_NARROW_FORMS = Reason(f"takes values of {D_V} columns only with optional inputs other than attn_sink")
NO_TREE_WITH_FORMS = Reason("takes no tree_mask with optional inputs other than attn_sink")
SINK = ("attn_sink",)
"""The only optional input of some kernels: a sink."""
FORMS = (*SINK, "q_rope", "packed", "out_rope", "window")
"""All optional inputs."""
ON_DEMAND_RECORDS = ("v32-nope",)
"""Formats with builds that are compiled at the first call that needs them: no image contains these builds."""
IN_PARTS = ("q_rope",)
"""The optional input of plain builds with `DecodeRopeParams`: queries in two arrays."""
FORM_PARAMS: dict[str, type[Params]] = {"forms": DecodeFormParams}
"""The parameters of builds `with_forms`."""


@dataclass(frozen=True)
class SplitGrid:
    """Division of the work: `row_blocks` blocks side by side, each in `num_splits` splits."""

    row_blocks: int
    num_splits: int


def narrowest(builds: Sequence[int], rows: int) -> int:
    """Rows of the narrowest block that holds `rows`, or of the widest block if none does."""
    return next((block for block in builds if rows <= block), builds[-1])


def identifier(record: str) -> str:
    """Name of a record in `cuda_src/attention/token_record.cuh`, and in builds."""
    return record.replace("-", "_")


def identifiers(records: Iterable[str]) -> tuple[str, ...]:
    """Names of records in builds."""
    return tuple(identifier(record) for record in records)


def key_variant(problem: Any, device: DeviceInfo) -> Variant:
    """The build for a problem's `dtype` and `d_qk`, for kernels with a default key width of 576."""
    if problem.d_qk == D_QK:
        return Variant(dtype=problem.dtype)
    return Variant(dtype=problem.dtype, head_dim_qk=problem.d_qk)


KEY_VARIANTS = (*DTYPE_VARIANTS, *variants(dtype=HALF, head_dim_qk=(D_V,)))
"""All builds that `key_variant` may select."""
NARROW_WIDTHS = tuple(d_qk for d_qk, d_v in VALUE_WIDTHS.items() if d_v != D_V)
"""Widths of keys with values narrower than DeepSeek's."""
NARROW_VALUES = tuple(dict.fromkeys(VALUE_WIDTHS[d_qk] for d_qk in NARROW_WIDTHS))
"""Widths of these values."""
NARROW_VARIANTS = variants(dtype=HALF, head_dim_qk=NARROW_WIDTHS)
"""Further builds of kernels that support them."""
TREE_VARIANTS = variants(dtype=HALF, head_dim_qk=(D_QK, D_V), tree_mask=(1,))
"""Further builds that `tree_variant` may select."""


def with_forms(*builds: Variant) -> tuple[Variant, ...]:
    """Builds with all optional inputs; their parameters are `DecodeFormParams`."""
    return tuple(build.extended(forms="forms") for build in builds)


def form_variant(plain: Variant, problem: Any, own: tuple[str, ...] = ()) -> Variant:
    """The build for a problem like `plain`: with optional inputs if the problem has more than a sink and `own` ones."""
    return with_forms(plain)[0] if wants_forms(problem, own) else plain


def wants_forms(problem: Any, own: tuple[str, ...] = ()) -> bool:
    """True if a problem has optional inputs other than a sink and a plain build's `own`.

    Problems of sparse attention have none.
    """
    forms = getattr(problem, "forms", None)
    return forms is not None and not {*forms.names} <= {*SINK, *own}


def tree_or_forms(problem: Any) -> Reason | None:
    """Reason against a kernel with builds for a tree or for optional inputs, never both."""
    return NO_TREE_WITH_FORMS if problem.tree_mask and wants_forms(problem) else None


def narrow_or_forms(problem: Any) -> Reason | None:
    """Reason against a kernel with builds for narrow values or for optional inputs, never both."""
    return NO_NARROW_FORMS if problem.d_qk in NARROW_WIDTHS and wants_forms(problem) else None


@dataclass(frozen=True)
class AttentionKernel(KernelSpec[ProblemT]):
    """An attention kernel over a schedule of splits, of dense decode or the sparse forward.

    Attributes
    ----------
    variant : callable
        `variant(problem, device)`: the build for a problem.
    block_rows : int
        Query rows of a block.
    blocks_per_sm : int
        Blocks that are resident on an SM at once.
    kv_maps : callable
        `kv_maps(kv_cache, variant)`: the tensor maps of a build that fetches by TMA.
    cluster_blocks : int
        Blocks of a cluster that shares the tokens of a request and merges its results: such a kernel needs neither a
        schedule nor a combine.
    math : str
        Arithmetic of its matmuls: "exact" for 16-bit elements, or "fp8".
    other_math : tuple of str
        Further arithmetic, of some of its builds: "fp8x2".
    counts_partials : bool
        Whether its schedule prices partial results (`cuda_src/attention/split_schedule.cuh`), where that was measured.
    bf16_partials : bool
        Whether it can store partial results of bfloat16 results in bfloat16, for `combine.BF16_PARTIALS`.
    sized : callable
        `sized(problem, device)`: the kernel with other block sizes for some problems; else None.
    value_widths : tuple of int
        Supported widths of values.
    forms : tuple of str
        Supported optional inputs, such as a window: see `kernels/decode/problem.py`.
    """

    variant: Callable[[ProblemT, DeviceInfo], Variant] = lambda problem, device: Variant()
    block_rows: int = 64
    blocks_per_sm: int = 1
    kv_maps: Callable[[View, Variant], tuple[TensorMapSpec, ...]] = lambda kv_cache, variant: ()
    cluster_blocks: int = 1
    math: str = "exact"
    other_math: tuple[str, ...] = ()
    counts_partials: bool = False
    bf16_partials: bool = False
    sized: Callable[[ProblemT, DeviceInfo], AttentionKernel[Any] | None] = lambda problem, device: None
    value_widths: tuple[int, ...] = (D_V,)
    forms: tuple[str, ...] = ()

    def defaults_on(self, arch: str) -> tuple[Variant, ...]:
        """See `KernelSpec.defaults_on`: without the builds that are compiled on demand."""
        rare = [identifier(record) for record in ON_DEMAND_RECORDS]
        return tuple(one for one in super().defaults_on(arch) if getattr(one, "record", "") not in rare)

    def objection(self, problem: ProblemT, device: DeviceInfo) -> Reason | None:
        """See `KernelSpec.objection`: support also depends on the problem's optional inputs."""
        wanted = getattr(problem, "forms", None)
        lacking = [name for name in (wanted.names if wanted else ()) if name not in self.forms]
        d_v = getattr(problem, "d_v", D_V)
        if d_v not in self.value_widths:
            return Reason(f"takes no values of {d_v} columns")
        reason = self.unsupported(problem, device)
        return Reason("takes no " + " and no ".join(lacking)) if lacking and reason is None else reason

    def splits(self, rows: int, device: DeviceInfo) -> SplitGrid:
        """Number of splits that keeps every block of the grid resident at once."""
        row_blocks = -(-rows // self.block_rows)
        resident = self.blocks_per_sm * device.sm_count
        return SplitGrid(row_blocks, min(MAX_SPLITS, max(1, resident // row_blocks)))
