"""The schedule object of `mla_cupy.compat.flash_mla`: a plan, and the shapes and options that it serves."""

from __future__ import annotations

from typing import Any, NamedTuple

from mla_cupy import arrays, dtypes
from mla_cupy.arrays import Family, View
from mla_cupy.cache_formats import BYTE_DTYPES, format_of, head_axis
from mla_cupy.errors import ArgumentError, DTypeError, PlanError, ShapeError, explain
from mla_cupy.ops import DecodePlan, Fp8, plan_decode
from mla_cupy.ops.checks import WORKSPACE_ALIGNMENT
from mla_cupy.ops.schema import steps_by_16_bytes


class Form(NamedTuple):
    """Shapes and options that all calls with one schedule share. `max_pages` is 0 with indices, `topk` is None without.

    `record` is "" for a cache of 16-bit rows. The last two are None without a second cache.
    """

    b: int
    s_q: int
    h_q: int
    page_size: int
    d_qk: int
    max_pages: int
    causal: bool
    topk: int | None
    record: str
    extra_page_size: int | None
    extra_topk: int | None
    math: str = "exact"


def form_of(
    q: Any,
    k_cache: Any,
    block_table: Any,
    causal: bool,
    indices: Any,
    fp8: bool,
    extra: tuple[Any, Any],
    math: str = "exact",
    kv_format: str | None = None,
) -> Form:
    """The form of a call; `extra` are the second cache and its indices, or None, `kv_format` a record's name or None.

    Raises
    ------
    ShapeError, DTypeError
        If an array has a wrong number of axes, or an FP8 cache is not one.
    """
    try:
        b, s_q, h_q, d_qk = q.shape
        page_size, width = _page(k_cache, "k_cache")
        _, max_pages = (0, 0) if block_table is None or indices is not None else block_table.shape
        _, _, topk = (0, 0, None) if indices is None else indices.shape
        extra_page_size = extra_topk = None
        if extra[0] is not None:
            (extra_page_size, _), (_, _, extra_topk) = _page(extra[0], "extra_k_cache"), extra[1].shape
    except (AttributeError, IndexError, TypeError, ValueError):
        names = ("q", "k_cache", "block_table", "indices", "extra_k_cache", "extra_indices_in_kvcache")
        _check_axes(dict(zip(names, (q, k_cache, block_table, indices, *extra), strict=True)))
        raise
    dtype = dtypes.name_of(k_cache.dtype)
    if not fp8 and dtype in BYTE_DTYPES:
        raise DTypeError(explain("k_cache.dtype", dtype, "q's dtype", "pass is_fp8_kvcache=True with an FP8 cache"))
    record = _record_of(dtype, width, kv_format, d_qk) if fp8 else ""
    queries = dtypes.name_of(q.dtype)
    if math == "exact" and queries in BYTE_DTYPES:
        remedy = "call flash_mla_with_kvcache_fp8 for queries in e4m3"
        raise DTypeError(explain("q.dtype", queries, "bfloat16 or float16", remedy))
    sizes = (b, s_q, h_q, page_size, d_qk, max_pages)
    return Form(*sizes, bool(causal), topk, record, extra_page_size, extra_topk, math)


def _page(cache: Any, argument: str) -> tuple[int, int]:
    """Tokens of a page, and the width of one; the axis of the one KV head is on either side of the tokens."""
    _, first, second, width = cache.shape
    return (first if head_axis(cache.shape, argument) == 2 else second), width


def _record_of(dtype: str, width: int, name: str | None, d_qk: int) -> str:
    if dtype not in BYTE_DTYPES:
        raise DTypeError(explain("k_cache.dtype", dtype, " or ".join(BYTE_DTYPES), "as is_fp8_kvcache is True"))
    return format_of(dtype, width, "k_cache", name, d_qk=d_qk).name


_AXES = {
    "q": "(b, s_q, h_q, d_qk)",
    "k_cache": "(num_blocks, page_size, 1, d_qk)",
    "block_table": "(b, max_pages)",
    "indices": "(b, s_q, topk)",
    "extra_k_cache": "(num_blocks, page_size, 1, d_qk)",
    "extra_indices_in_kvcache": "(b, s_q, topk)",
}
_OPTIONAL = ("block_table", "indices", "extra_k_cache", "extra_indices_in_kvcache")


def _check_axes(given: dict[str, Any]) -> None:
    for name, x in given.items():
        if x is not None or name not in _OPTIONAL:
            arrays.family_of(x, name)
        shape, absent = tuple(getattr(x, "shape", ())), x is None and name in _OPTIONAL
        if not absent and len(shape) != _AXES[name].count(",") + 1:
            raise ShapeError(explain(f"{name}.shape", shape, _AXES[name]))


def view_of(x: Any, argument: str) -> View:
    """An array of any library, seen from outside."""
    family = arrays.family_of(x, argument)
    return family.native.view(family.adopt(x), argument)


class FlashMLASchedMeta:
    """The schedule of a decode step, made by the first call that receives it.

    It serves calls of equal shapes with equal values of `cache_seqlens`: the layers of one step. For the lengths of the
    next step call `update`, or start from a new object.

    Attributes
    ----------
    have_initialized : bool
        Whether a call has made the schedule.
    """

    def __init__(self) -> None:
        self.have_initialized = False
        self._form: Form | None = None
        self._plan: DecodePlan | None = None

    def update(self, cache_seqlens: Any) -> None:
        """Enqueue the schedule for other lengths in the same memory. Does not synchronise, and can be captured.

        FlashMLA has no counterpart. A CUDA graph with decode calls follows the lengths of each step if `update` runs
        before each replay, or is captured with them.

        Parameters
        ----------
        cache_seqlens : array, (b,), int32

        Raises
        ------
        PlanError
            If no dense call has made the schedule.
        """
        if self._plan is None:
            raise PlanError(explain("tile_scheduler_metadata", "no schedule", "a schedule made by a dense call"))
        self._plan.update(cache_seqlens)

    def check(self, form: Form) -> None:
        """Raise PlanError if earlier calls had another form."""
        if self._form is not None and self._form != form:
            mine, theirs = self._form._asdict(), form._asdict()
            differing = [name for name in mine if mine[name] != theirs[name]]
            got, expected = (", ".join(f"{name}={told[name]!r}" for name in differing) for told in (mine, theirs))
            remedy = "pass a new get_mla_metadata()[0]"
            raise PlanError(explain("tile_scheduler_metadata", f"one for {got}", f"one for {expected}", remedy))

    def keep(self, form: Form, plan: DecodePlan | None) -> None:
        """Remember the form and the plan of a call that succeeded, for the calls that follow."""
        self._form, self._plan, self.have_initialized = form, plan, True

    def plan(self, form: Form, q: Any, k_cache: Any, cache_seqlens: Any) -> DecodePlan | None:
        """The plan of earlier calls, or a new one for these lengths; None where a plan does not serve the call."""
        if self._plan is not None:
            return self._plan
        view = view_of(q, "q")
        views = [view] if form.record else [view, view_of(k_cache, "k_cache")]
        aligned = all(x.dtype in dtypes.TABLE and steps_by_16_bytes(x) for x in views)
        if not (aligned and form.b and form.max_pages):
            return None
        try:
            plan = _make_plan(form, arrays.family_of(q, "q"), view)
        except (ArgumentError, DTypeError):  # of sizes: the operation says which array has them
            return None
        plan.update(cache_seqlens)
        return plan


def _make_plan(form: Form, family: Family, view: View) -> DecodePlan:
    """Make a plan in memory of the caller's library; PyTorch's allocator also works during a capture."""
    names = ("s_q", "h_q", "d_qk", "max_pages", "page_size")
    sizes: dict[str, Any] = {name: getattr(form, name) for name in names}
    sizes |= {"kv_format": form.record or None, "fp8": Fp8(form.math)}
    sizes["dtype"] = "float8_e4m3fn" if view.dtype in BYTE_DTYPES else view.dtype
    if not family.on_gpu:
        return plan_decode(max_b=form.b, **sizes)
    stream = family.native.current_stream(view.device)

    def allocate(nbytes: int) -> Any:
        memory = family.native.empty((nbytes + WORKSPACE_ALIGNMENT,), "uint8", view.device, stream)
        first = -family.native.address(memory) % WORKSPACE_ALIGNMENT
        return memory[first : first + nbytes]

    return plan_decode(max_b=form.b, **sizes, device=view.device, workspace=allocate)
