"""Plans of dense decode: the workspace, and the schedule of the step at hand."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mla_cupy import arrays, cache_formats, dtypes
from mla_cupy.arrays import HOST, Native, View
from mla_cupy.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    MlaError,
    PlanError,
    ShapeError,
    either,
    explain,
    renamed,
)
from mla_cupy.kernels.attention.records import READ_DENSE as RECORDS
from mla_cupy.kernels.choice import check_kernel, check_somewhere
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.configs import DecodeConfig, InClusters, InGroups, InSplits
from mla_cupy.kernels.decode.finish import LeavePartials
from mla_cupy.kernels.decode.problem import Batch, BatchStep, DecodeProblem, Forms
from mla_cupy.kernels.decode.schedule_pieces import Pieces
from mla_cupy.kernels.decode.sm90_fp8 import QUERIES
from mla_cupy.kernels.merge.exchange import Splits
from mla_cupy.kernels.pipeline import Prepared, Step, load
from mla_cupy.ops import backend, combinations
from mla_cupy.ops.call import MAX_ENTRIES
from mla_cupy.ops.checks import (
    MATH_OF_DENSE_DECODE,
    check_codes,
    check_count,
    check_drafts,
    check_flag,
    check_math,
    check_memory,
    check_pieces,
    check_shard,
    check_terms,
    is_integer,
)
from mla_cupy.ops.entry import Plan, Request
from mla_cupy.ops.groups import Fp8, Shard, taken
from mla_cupy.ops.operation import Views
from mla_cupy.ops.schema import low_words, misstep, narrowed
from mla_cupy.runtime import device as devices
from mla_cupy.runtime import driver
from mla_cupy.shapes import D_HEADS, D_QK, D_V, MAX_INT32, MAX_TOKENS, TILE_TOKENS, VALUE_WIDTHS

__all__ = ["DecodePlan", "plan_decode"]


_CODES = "float8_e4m3fn"


class Limits(NamedTuple):
    """The largest batch that a plan serves, and the sizes that every call must have."""

    max_b: int
    max_pages: int
    page_size: int
    cp_world: int
    cp_rank: int


class _Updates(threading.local):
    """A thread's launches of the schedule, by the batch and the strides of its lengths."""

    def __init__(self) -> None:
        self.prepared: dict[Hashable, Prepared] = {}


class DecodePlan(Plan):
    """Buffers and launch configurations for decode of up to `max_b` sequences on one device.

    Made by `plan_decode`. Use a plan on one stream at a time: between `update` and the last call that uses the plan, no
    other stream may use it. Batches may be smaller than `max_b`.

    Attributes
    ----------
    workspace_bytes : int
        Size of the plan's workspace.
    device : int
        CUDA ordinal; -1 for a plan of the NumPy backend, which needs no buffers.
    """

    operation = "mla_decode"

    def __init__(
        self, problem: DecodeProblem, limits: Limits, device: int, config: DecodeConfig | None, memory: tuple[Any, int]
    ) -> None:
        self.device = device
        self._problem = problem
        self._limits = limits
        self._config = config
        self._workspace, self.address = memory  # the first keeps the second alive
        self._keeps_zeros = False  # no other call writes to the workspace, and the kernels leave its zeros as they were
        self._scheduled_b: int | None = None
        self._scheduled_q = 0  # packed queries of all sequences
        self._updates = _Updates()
        self._identity = object()  # unlike `id`, never reused by a later plan
        # Changes when the plan must no longer serve a cached call: see `ops.call`.
        self.state: Hashable = (self._identity, None)

    @property
    def workspace_bytes(self) -> int:
        """Size of the workspace."""
        return DECODE.workspace(self._config).nbytes if self._config else 0

    @property
    def kernel(self) -> str:
        """Name of the kernel that the plan runs."""
        return self._config.kernel.name if self._config else "numpy"

    @property
    def splits(self) -> Splits | None:
        """Pieces of split requests that the plan's calls leave unmerged; None if there are none, or not in the form of
        `Splits`.
        """
        config = self._config
        if not isinstance(config, (InSplits, InGroups)) or not config.combine_blocks:
            return None
        at = {name: self.address + offset for name, offset in DECODE.workspace(config).offsets.items()}
        addresses = at["schedule"], at["partial_out"], at["partial_lse"]
        return Splits(*addresses, config.num_splits, config.num_splits)

    def __repr__(self) -> str:
        place = "numpy" if self.device == HOST else f"device {self.device}"
        limits = ", ".join(f"{name}={value}" for name, value in self._limits._asdict().items())
        sizes = ", ".join(f"{name}={value!r}" for name, value in self._problem.told.items())
        return f"DecodePlan({limits}, {sizes}, {self.kernel}, {place}, {self.workspace_bytes} bytes)"

    def __reduce__(self) -> NoReturn:
        remedy = "make another plan with plan_decode: a plan owns device memory"
        raise PlanError(explain("plan", "a copy or a pickle of it", "the plan itself", remedy))

    def update(self, seqlens: Any, *, cu_seqlens_q: Any = None, total_q: int | None = None, stream: Any = None) -> None:
        """Enqueue the schedule for the lengths of this step. Does not synchronise, and can be captured in a CUDA graph.

        Parameters
        ----------
        seqlens : array, (b,), int32
            As in the following calls, with b <= max_b. The values are read on the device, when the work runs.
        cu_seqlens_q : array, (b + 1,), int32, optional
            As in the following calls, if they are packed.
        total_q : int, optional
            With `cu_seqlens_q`: total number of queries in the following calls, at most max_b * s_q.
        stream : int or stream object, optional
            Stream of the following calls. Default: the caller's library's current stream.

        Raises
        ------
        ShapeError, DTypeError, DeviceError, PlanError
            If an argument does not fit the plan.
        """
        self.schedule(seqlens, self.address, stream, cu_seqlens_q, total_q)

    def schedule(
        self, seqlens: Any, address: int, stream: Any = None, cu_seqlens_q: Any = None, total_q: Any = None
    ) -> None:
        """Like `update`, but in a workspace at `address`, such as a copy of the plan's own."""
        given = {"seqlens": seqlens, "cu_seqlens_q": cu_seqlens_q}
        family = arrays.common_family(given, ("cu_seqlens_q",))
        arrays.check_stream(family, stream)
        native = family.native
        lent = {name: family.adopt(x) for name, x in given.items() if x is not None}
        if not family.on_gpu:
            lent = {name: narrowed(name, x) for name, x in lent.items()}
        views = {name: low_words(native.view(x, name)) for name, x in lent.items()}
        b = self.check_lengths(views["seqlens"])
        total = self._check_starts(b, views.get("cu_seqlens_q"), total_q)
        if self._config is not None:
            if not family.on_gpu:
                native, lent = arrays.cupy_family(), backend.sent(lent, self.device, stream)
                views = {name: native.view(x, name) for name, x in lent.items()}
            for name, view in views.items():
                if view.device != self.device:
                    raise DeviceError(explain(f"{name}' device", view.device, f"{self.device}, the plan's"))
            if b and (total or not self._problem.forms.packed):
                self._enqueue_schedule(self._config, native, views, total, address, stream)
                family.settle(tuple(lent.values()))
        self.mark_scheduled(b, total)

    def _check_starts(self, b: int, starts: View | None, total_q: Any) -> int:
        """Check a step's arguments for packed queries, and return the total number of queries."""
        packed = self._problem.forms.packed
        for name, value in (("cu_seqlens_q", starts), ("total_q", total_q)):
            if (value is not None) != packed:
                expected = "one for this plan" if packed else "None: the plan is for queries of one length"
                raise PlanError(explain(name, "None" if packed else "one", expected, "see plan_decode(packed=)"))
        if starts is None:
            return 0
        if starts.shape != (b + 1,):
            raise ShapeError(explain("cu_seqlens_q.shape", starts.shape, f"({b + 1},): b+1"))
        if starts.dtype != "int32":
            raise DTypeError(explain("cu_seqlens_q.dtype", starts.dtype, "int32 or int64", "convert cu_seqlens_q"))
        return check_count("total_q", total_q, 0, self._limits.max_b * self._problem.s_q)

    def check_lengths(self, lengths: View) -> int:
        """Check the lengths of a step, and return how many there are.

        Raises
        ------
        ShapeError, DTypeError, PlanError
        """
        if len(lengths.shape) != 1:
            raise ShapeError(explain("seqlens.shape", lengths.shape, "(b,)"))
        if lengths.dtype != "int32":
            raise DTypeError(explain("seqlens.dtype", lengths.dtype, "int32 or int64", "convert seqlens"))
        b, max_b = lengths.shape[0], self._limits.max_b
        if b > max_b:
            raise PlanError(explain("seqlens.shape[0]", b, f"at most max_b={max_b}", "make a larger plan"))
        return b

    def mark_scheduled(self, b: int | None, total_q: int = 0) -> None:
        """Serve calls with `b` sequences and `total_q` packed queries from now on."""
        self._scheduled_b, self._scheduled_q = b, total_q
        self.state = (self._identity, b, total_q)

    def zero_tickets(self) -> None:
        """Zero, once, the counters of clusters that share requests; the plan alone owns the workspace."""
        assert self._config is not None
        layout = DECODE.workspace(self._config)
        first = layout.offsets["tickets"]
        zeros = np.zeros(layout.nbytes - first, np.uint8)
        if zeros.size:
            arrays.cupy_family().write(self.address + first, zeros, self.device)
        self._keeps_zeros = True

    def _enqueue_schedule(
        self, config: DecodeConfig, native: Native, views: dict[str, View], total_q: int, address: int, stream: Any
    ) -> None:
        handle = native.current_stream(self.device) if stream is None else arrays.stream_handle(stream)
        lengths, starts = views["seqlens"], views.get("cu_seqlens_q")
        starts_stride = starts.strides[0] if starts else 0
        key = (lengths.shape[0], lengths.strides[0], total_q, starts_stride)
        prepared = self._updates.prepared.get(key)
        if address == self.address and self._keeps_zeros:
            return
        if prepared is None or prepared.driver is not driver.active:
            if len(self._updates.prepared) >= MAX_ENTRIES:
                self._updates.prepared.clear()
            b, stride, _, _ = key
            steps = self.steps(config, stride, b, total_q, starts_stride)
            info, layout = devices.describe(self.device), DECODE.workspace(config)
            names = ("seqlens", "cu_seqlens_q")
            prepared = self._updates.prepared[key] = Prepared(steps, names, layout, info, handle)
        prepared.enqueue([0, lengths.ptr, starts.ptr if starts else 0], address, handle)

    def steps(self, config: DecodeConfig, stride: int, b: int, total_q: int = 0, starts_stride: int = 0) -> list[Step]:
        """The steps of an update for `b` lengths that are `stride` elements apart, and packed queries."""
        limits = self._limits
        s_q = total_q if config.problem.forms.packed else config.problem.s_q
        max_tokens, shard = limits.max_pages * limits.page_size, (limits.cp_world, limits.cp_rank)
        return config.schedule(BatchStep(b, s_q, max_tokens, stride, starts_stride, shard))

    def configuration(self, request: Request) -> DecodeConfig | None:
        """The plan's own, if the plan, as last updated, serves such a call.

        Raises
        ------
        PlanError
            If it does not.
        """
        problem, sizes, limits = request.problem, request.sizes, self._limits
        if self.device == HOST:
            problem = replace(problem, aligned=True)  # the oracle does not mind
        self._check_alignment(request.views, problem)
        packed = problem.forms.packed
        if packed:  # what most sequences have decides nothing with a plan
            problem = replace(problem, s_q=self._problem.s_q)
        if problem != self._problem:
            mine, theirs = self._problem.told, problem.told
            differing = [name for name in mine if mine[name] != theirs[name]]
            got, expected = (", ".join(f"{name}={told[name]!r}" for name in differing) for told in (mine, theirs))
            raise PlanError(explain("plan", got, f"{expected}, as in the call", "make a plan for these sizes"))
        if (sizes["page_size"], sizes["max_pages"]) != (limits.page_size, limits.max_pages):
            got = f"page_size={limits.page_size}, max_pages={limits.max_pages}"
            expected = f"page_size={sizes['page_size']}, max_pages={sizes['max_pages']}"
            raise PlanError(explain("plan", got, expected, "make a plan for this block_table"))
        options = request.options
        if (options.cp_world, options.cp_rank) != (limits.cp_world, limits.cp_rank):
            got = f"shard=Shard({limits.cp_world}, {limits.cp_rank})"
            expected = f"shard=Shard({options.cp_world}, {options.cp_rank})"
            raise PlanError(explain("plan", got, expected, "pass the plan's to the call"))
        if request.device != self.device:
            expected = f"{request.device}, where q is"
            raise PlanError(explain("plan.device", self.device, expected, "make one for that device"))
        if self._scheduled_b != sizes["b"]:
            got = "no update yet" if self._scheduled_b is None else f"an update for b={self._scheduled_b}"
            raise PlanError(explain("plan", got, f"one for b={sizes['b']}", "call plan.update(seqlens) for this step"))
        if packed and self._scheduled_q != sizes["total_q"]:
            got, expected = f"an update for total_q={self._scheduled_q}", f"one for total_q={sizes['total_q']}"
            raise PlanError(explain("plan", got, expected, "call plan.update for this step"))
        if request.kernel not in (None, self.kernel) and self._config is not None:
            raise PlanError(explain("kernel", repr(request.kernel), f"{self.kernel!r}, the plan's, or None"))
        return self._config

    def _check_alignment(self, views: Views, problem: DecodeProblem) -> None:
        """Check that arrays are aligned as those that the plan is for."""
        if problem.aligned or not self._problem.aligned:
            return
        names = ("q", "q_rope") if problem.record else ("q", "q_rope", "kv_cache")
        given = {name: view for name in names if (view := views[name]) is not None}
        for name, view in given.items():
            if got := misstep(view):
                expected = "with a plan, a start and steps that are positive multiples of 16 bytes"
                raise PlanError(explain(name, got, expected, f"copy {name}, or leave the plan out"))
        raise PlanError(explain("kv_cache.shape[0]", 0, "at least 1 page with a plan"))


class UnmergedPlan(Plan):
    """A plan whose calls leave the pieces of split requests in its workspace, for the caller to merge."""

    operation = "mla_decode"

    def __init__(self, plan: DecodePlan) -> None:
        self._plan = plan
        self.address, self.device, self.state = plan.address, plan.device, ("unmerged", plan.state)

    def configuration(self, request: Request) -> DecodeConfig | None:
        """The plan's own, without the last step; only splits leave partial results to be merged."""
        config = self._plan.configuration(request)
        return replace(config, finish=LeavePartials()) if isinstance(config, InSplits) else config


def plan_decode(
    *,
    max_b: int,
    s_q: int,
    h_q: int,
    d_qk: int = D_QK,
    kv_format: str | None = None,
    max_pages: int,
    page_size: int,
    dtype: Any,
    q_rope: bool = False,
    packed: bool = False,
    window: int | None = None,
    tree_mask: bool = False,
    attn_sink: bool = False,
    out_rope: bool = False,
    d_head: int = 0,
    fp8_out: bool = False,
    fp8: Fp8 | None = None,
    shard: Shard | None = None,
    batch_invariant: bool = False,
    split_tokens: int = 4096,
    after_prepare: bool = False,
    device: int | str | None = None,
    workspace: Any = None,
    kernel: str | None = None,
) -> DecodePlan:
    """Prepare decode steps of one shape: compile, load, allocate once.

    Parameters
    ----------
    max_b : int
        Largest batch.
    s_q, h_q : int
        Query tokens and query heads, as in the calls. With `packed`, s_q is the usual number of query tokens per
        sequence; calls accept up to max_b * s_q in all.
    d_qk : int
        Width of the keys: 576, or 512; or 320 or 288.
    kv_format : str, optional
        FP8 format of the cache: "v32", "v32-nope", "v4", "v41" or "fp8"; "v32-nope", "v4" and "v41" require a d_qk of
        512. Default: rows of 16-bit elements.
    max_pages, page_size : int
        As in the calls' `block_table` and `kv_cache`.
    dtype : str or dtype
        Dtype of the calls' queries: "bfloat16" or "float16", or "float8_e4m3fn" for FP8 matmuls.
    q_rope, packed, tree_mask, attn_sink, out_rope : bool
        True if the calls pass this argument.
    window : int, optional
        As in the calls.
    d_head : int
        Width of heads after W_UV if the calls pass `project`, else 0.
    fp8_out : bool
        True if the calls return e4m3 codes: an `out_dtype` of "float8_e4m3fn" or "uint8".
    fp8, shard : Fp8, Shard, optional
        As in the calls; the plan does not depend on scales.
    batch_invariant : bool
        Give `out` and `lse` of a sequence the same bits whatever else is in the batch, and wherever in the batch the
        sequence is. Every sequence is then split on its own into pieces of `split_tokens`, one thread block per piece,
        and the workspace holds partial results for the most pieces that `max_b` sequences can have. The bits depend on
        the sequence, on the arguments of this function other than `max_b` and `max_pages`, and on the GPU's
        architecture.
    split_tokens : int
        A multiple of 64, and at least 1/256 of max_pages * page_size. Has no effect without `batch_invariant`.
    after_prepare : bool
        A promise about every call with the plan: of its inputs, the call right before it on the stream writes only the
        queries and the last s_q tokens of each sequence, as `mla_prepare` does. Attention with few query rows then
        reads the lengths, the block table and older tokens while that call runs. "Around attention" in the
        documentation has the rules.
    device : int or "cpu", optional
        CUDA ordinal. Default: CuPy's current device; without a GPU, the NumPy backend. "cpu": for arrays in host
        memory, which are computed on a GPU if there is one.
    workspace : array, uint8, or function, optional
        Memory for the plan: at least `workspace_bytes` bytes, 256-byte aligned, on `device`; or a function that
        allocates it, `workspace(nbytes)`, called once. The NumPy backend uses neither.
    kernel : str, optional
        Name of the kernel to run, see `mla-cupy list`. Default: the fastest that fits. The choice also depends on
        `max_b` and on max_pages * page_size: some kernels serve short sequences in small batches.

    Returns
    -------
    DecodePlan

    Raises
    ------
    ArgumentError, DTypeError, PlanError
        If a size, the dtype or the workspace does not fit.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    Calls with the plan require arrays that start at and step by multiples of 16 bytes, see `mla_decode`. A
    batch-invariant plan supports neither `packed` nor a `window`.

    Examples
    --------
    >>> import mla_cupy
    >>> plan = mla_cupy.plan_decode(max_b=8, s_q=1, h_q=128, max_pages=64, page_size=64, dtype="bfloat16")
    """
    early = check_flag("after_prepare", after_prepare)
    try:
        problem, limits, pieces = examine_plan(
            max_b=max_b,
            s_q=s_q,
            h_q=h_q,
            d_qk=d_qk,
            kv_format=kv_format,
            max_pages=max_pages,
            page_size=page_size,
            dtype=dtype,
            shard=taken(shard, Shard, "shard", ("cp_world", "cp_rank")),
            forms={
                "q_rope": check_flag("q_rope", q_rope),
                "packed": check_flag("packed", packed),
                "attn_sink": check_flag("attn_sink", attn_sink),
                "out_rope": check_flag("out_rope", out_rope),
                "window": 0 if window is None else check_count("window", window, 1, MAX_INT32),
            },
            tree_mask=tree_mask,
            d_head=d_head,
            fp8_out=fp8_out,
            math=taken(fp8, Fp8, "fp8", tuple(Fp8.absent))[0],
            batch_invariant=batch_invariant,
            split_tokens=split_tokens,
            kernel=kernel,
        )
    except MlaError as error:
        raise renamed(error, {**Fp8.paths("fp8"), **Shard.paths("shard")}) from None
    ordinal = _ordinal(device)
    if ordinal == HOST:
        check_somewhere("plan_decode", kernel, lambda info: DECODE.configure(problem, info, kernel))
        if workspace is not None and not callable(workspace):
            _workspace_address(workspace, 0, HOST)
        return DecodePlan(problem, limits, HOST, None, (None, 0))
    info = devices.describe(ordinal)
    config = DECODE.configure(problem, info, kernel)
    if pieces:
        if not isinstance(config, (InSplits, InGroups)):
            expected = "a kernel with a schedule: clusters divide the batch by all lengths"
            raise ArgumentError(explain("kernel", repr(kernel), expected, "leave kernel or batch_invariant out"))
        config = DECODE.in_pieces(config, pieces, info)
    config = replace(config, after_prepare=early)
    load(DECODE.builds(config), info, arrays.cupy_family().current_stream(ordinal))
    nbytes = DECODE.workspace(config).nbytes
    if workspace is None:
        memory = arrays.cupy_family().own_memory(nbytes, ordinal)
        plan = DecodePlan(problem, limits, ordinal, config, (memory, memory.ptr))
        if isinstance(config, InClusters):
            plan.zero_tickets()
        return plan
    memory = workspace(nbytes) if callable(workspace) else workspace
    return DecodePlan(problem, limits, ordinal, config, (memory, _workspace_address(memory, nbytes, ordinal)))


def examine_plan(
    *,
    max_b: int,
    s_q: int,
    h_q: int,
    d_qk: int,
    kv_format: str | None,
    max_pages: int,
    page_size: int,
    dtype: Any,
    shard: tuple[int, int],
    forms: dict[str, Any],
    tree_mask: bool,
    d_head: int = 0,
    fp8_out: bool = False,
    math: str,
    batch_invariant: bool,
    split_tokens: int,
    kernel: str | None,
) -> tuple[DecodeProblem, Limits, Pieces | None]:
    """Run every check of a plan that needs no device; returns its problem, and its pieces if it is batch-invariant."""
    sizes = {"max_b": max_b, "s_q": s_q, "h_q": h_q, "max_pages": max_pages, "page_size": page_size}
    for argument, value in sizes.items():
        if not is_integer(value) or not 1 <= value <= MAX_INT32:
            raise ArgumentError(explain(argument, value, f"an integer from 1 to {MAX_INT32}"))
    max_b, s_q, h_q, max_pages, page_size = map(int, sizes.values())  # of NumPy's, which overflow
    if not (is_integer(d_qk) and d_qk in VALUE_WIDTHS):
        raise ArgumentError(explain("d_qk", repr(d_qk), either([str(width) for width in VALUE_WIDTHS])))
    if not (is_integer(d_head) and d_head in (0, *D_HEADS)):
        raise ArgumentError(explain("d_head", repr(d_head), either([str(width) for width in (0, *D_HEADS)])))
    if max_pages * page_size > MAX_TOKENS:
        tokens = max_pages * page_size
        raise ArgumentError(explain("max_pages * page_size", tokens, f"at most {MAX_TOKENS} = 2^31 - 64"))
    check_kernel(DECODE.kernels, kernel)
    shard = check_shard(*shard)
    masked = check_flag("tree_mask", tree_mask)
    check_drafts(masked, s_q)
    chosen = _record(kv_format, d_qk)
    arithmetic = check_math(math, MATH_OF_DENSE_DECODE)
    queries = _dtype(dtype)
    wanted = Forms(**forms)
    results = _CODES if check_flag("fp8_out", fp8_out) else None
    groups = max_b * s_q + 2 if wanted.grouped else max_b
    pieces = _check_pieces(batch_invariant, split_tokens, max_b, max_pages * page_size, groups)
    parts: combinations.Parts = {
        **combinations.multiplied(arithmetic, queries),
        **combinations.held(chosen),
        "tree_mask": masked or None,
        "q_rope": wanted.q_rope or None,
        "cu_seqlens_q": wanted.packed or None,
        "out_cos": wanted.out_rope or None,
        "window": wanted.window or None,
        "w_uv": f"d_head={d_head}" if d_head else None,
        "fp8_out": results,
        "batch_invariant": True if pieces else None,
        "narrow": d_qk if VALUE_WIDTHS[d_qk] != D_V else None,
        "cp_world": combinations.other_than(1, shard[0]),
    }
    combinations.check(combinations.DECODE, parts)
    problem = DecodeProblem(
        s_q, h_q, queries, d_qk=d_qk, record=chosen, tree_mask=masked, math=arithmetic, forms=wanted
    )
    problem = replace(problem, d_head=int(d_head), fp8_out=check_codes(results, int(d_head), "d_head"))
    check_terms(problem)
    if not batch_invariant:  # with it, results must not depend on these sizes
        most = max_b * s_q if wanted.packed else 0
        problem = replace(problem, batch=Batch(max_b, max_pages * page_size, most))
    return problem, Limits(max_b, max_pages, page_size, *shard), pieces


def _check_pieces(batch_invariant: Any, split_tokens: Any, max_b: int, max_tokens: int, groups: int) -> Pieces | None:
    """The pieces of a plan for up to `max_b` sequences of up to `max_tokens`; None if it is not batch-invariant.

    `groups` is the largest number of groups of queries; each has separate pieces.
    """
    tiles = check_pieces(
        batch_invariant, split_tokens, ("max_pages * page_size", max_tokens), (f"max_b={max_b} sequences", groups)
    )
    return Pieces.of(tiles, -(-max_tokens // TILE_TOKENS), max_b)


def _record(name: Any, d_qk: int) -> str:
    """The record of a cache of bytes, "" for 16-bit rows."""
    if name is None:
        return ""
    if not (isinstance(name, str) and name in RECORDS):
        raise ArgumentError(explain("kv_format", repr(name), "None, or one of " + ", ".join(RECORDS)))
    if d_qk != cache_formats.FORMATS[name].d_qk:
        raise ArgumentError(explain("d_qk", d_qk, f"{cache_formats.FORMATS[name].d_qk} for {name}"))
    return str(name)


def _ordinal(device: Any) -> int:
    """The CUDA ordinal of a plan's device, or HOST."""
    if device is None or (isinstance(device, str) and device == "cpu"):
        simulated = device is None and arrays.NUMPY.on_gpu
        return arrays.cupy_family().current_device() if simulated or backend.use_gpu() else HOST
    if not is_integer(device) or device < 0:
        raise ArgumentError(explain("device", repr(device), 'a CUDA ordinal, "cpu" or None'))
    return int(device)


def _workspace_address(workspace: Any, nbytes: int, device: int) -> int:
    family = arrays.family_of(workspace, "workspace")
    if family.on_gpu != (device != HOST) or not family.mutable:
        place = "in the host's memory" if device == HOST else "on the GPU"
        raise PlanError(explain("workspace", f"an array of {family.name}", f"a writable array {place}"))
    view = family.native.view(family.adopt(workspace), "workspace")
    if device == HOST:
        view = view._replace(ptr=0)  # not used: where it begins does not matter
    try:
        check_memory(view, nbytes, device)
    except (ShapeError, DeviceError) as error:
        raise PlanError(str(error)) from None
    return view.ptr


def _dtype(dtype: Any) -> str:
    name = dtypes.name_of(dtype)
    if name not in QUERIES:
        raise DTypeError(explain("dtype", dtype, either(QUERIES)))
    return name
