"""Plans of dense decode: the workspace, and the schedule of the step at hand."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from mla_cupy import arrays
from mla_cupy.arrays import HOST
from mla_cupy.errors import ArgumentError, DeviceError, DTypeError, PlanError, ShapeError, explain
from mla_cupy.launchers.decode_problem import HEAD_DIM_V, DecodeProblem
from mla_cupy.launchers.decode_sequence import DecodeSequence, DecodeSizes, PreparedAttention, check_variant, sequence
from mla_cupy.ops import backend
from mla_cupy.ops.checks import HALF_TYPES, MOST_TOKENS


class _Call(NamedTuple):
    """What a call looked like, and its launches."""

    options: tuple[Any, ...]
    b: int
    native: arrays.Native
    kind: type
    signatures: tuple[object, ...]  # of the six arrays; None where there was none
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    out_dtype: str
    prepared: PreparedAttention


class _LastCall(threading.local):
    """A thread's last call with a plan: launches are packed per thread."""

    call: _Call | None = None


class DecodePlan:
    """Buffers and launch configurations for decode of up to `max_b` sequences on one device.

    Made by `plan_decode`. A plan is in flight on one stream at a time: between `update` and the last call that uses
    it, no other stream may use it. Smaller batches are fine.

    Attributes
    ----------
    workspace_bytes : int
        Size of its workspace.
    device : int
        CUDA ordinal; -1 for a plan of the NumPy backend, which needs no buffers.
    """

    def __init__(
        self,
        problem: DecodeProblem,
        most: DecodeSizes,
        device: int,
        kernels: DecodeSequence | None,
        workspace: Any,
        workspace_address: int,
    ) -> None:
        self.device = device
        self.workspace_address = workspace_address
        self._problem = problem
        self._most = most
        self._kernels = kernels
        self._workspace = workspace  # keeps the memory alive
        self._scheduled_b: int | None = None
        self._last = _LastCall()

    @property
    def workspace_bytes(self) -> int:
        return self._kernels.config.workspace.nbytes if self._kernels else 0

    @property
    def variant(self) -> str:
        """Name of the kernel that it runs."""
        return self._kernels.config.kernel if self._kernels else "numpy"

    def __repr__(self) -> str:
        place = "numpy" if self.device == HOST else f"device {self.device}"
        return (
            f"DecodePlan(max_b={self._most.b}, {self._problem}, max_pages={self._most.max_pages}, "
            f"page_size={self._most.page_size}, {self.variant}, {place}, {self.workspace_bytes} bytes)"
        )

    def update(self, seqlens: Any, *, stream: Any = None) -> None:
        """Enqueue the schedule for the lengths of this step; no synchronisation, can be captured in a CUDA graph.

        Parameters
        ----------
        seqlens : array, (b,), int32
            As for the calls that follow, with b <= max_b. Its values are read on the device, when the work runs.
        stream : int or stream object, optional
            The one of the calls that follow. Default: the caller's library's current stream.

        Raises
        ------
        ShapeError, DTypeError, DeviceError, PlanError
            If `seqlens` does not fit the plan.
        """
        family = arrays.family_of(seqlens, "seqlens")
        arrays.check_stream(family, stream)
        native, lent = family.native, family.adopt(seqlens)
        lengths = native.view(lent)
        if len(lengths.shape) != 1:
            raise ShapeError(explain("seqlens.shape", lengths.shape, "(b,)"))
        if lengths.dtype != "int32":
            raise DTypeError(explain("seqlens.dtype", lengths.dtype, "int32", "convert seqlens"))
        b = lengths.shape[0]
        if b > self._most.b:
            raise PlanError(explain("seqlens.shape[0]", b, f"at most max_b={self._most.b}", "make a larger plan"))
        if self._kernels is not None:
            if not family.on_gpu:
                native, (lent,) = arrays.cupy_family(), backend.sent([lent], self.device, stream)
                lengths = native.view(lent)
            if lengths.device != self.device:
                raise DeviceError(explain("seqlens' device", lengths.device, f"{self.device}, the plan's"))
            handle = native.current_stream(self.device) if stream is None else arrays.stream_handle(stream)
            if b:
                sizes = self._most._replace(b=b)
                self._kernels.schedule(lengths.ptr, lengths.strides[0], sizes, self.workspace_address, handle)
        self._scheduled_b = b

    def repeat(self, arguments: tuple[Any, ...], options: tuple[Any, ...], stream: Any) -> tuple[Any, Any] | None:
        """Run a call that differs from this thread's last one in addresses only; None if there is more to it.

        The checks of the last call hold for this one, since everything that they look at is the same.
        """
        last = self._last.call
        if last is None or self._scheduled_b != last.b or not last.prepared.is_current():
            return None
        try:
            if options != last.options:
                return None
        except ValueError:  # an option that is an array: the checks have words for it
            return None
        addresses = last.native.addresses_if_same(arguments, last.kind, last.signatures)
        if addresses is None:
            return None
        # The kernels' demand on addresses was checked for the last ones only: see `steps_by_16_bytes`.
        if (addresses[0] | addresses[1] | addresses[4]) % 16:
            return None
        handle = last.native.current_stream(self.device) if stream is None else arrays.stream_handle(stream)
        out, lse = arguments[4], arguments[5]
        if out is None:
            out = last.native.empty(last.out_shape, last.out_dtype, self.device, handle)
            addresses[4] = last.native.peek(out)[0]
        if lse is None:
            lse = last.native.empty(last.lse_shape, "float32", self.device, handle)
            addresses[5] = last.native.peek(lse)[0]
        last.prepared.enqueue(addresses, handle)
        return out, lse

    def remember(
        self,
        native: arrays.Native,
        arguments: tuple[Any, ...],
        out_dtype: str,
        options: tuple[Any, ...],
        prepared: PreparedAttention,
    ) -> None:
        """Let this thread's next call repeat this one."""
        b, s_q, h_q, _ = arguments[0].shape
        self._last.call = _Call(
            options,
            b,
            native,
            type(arguments[0]),
            tuple(None if x is None else native.peek(x)[1] for x in arguments),
            (b, s_q, h_q, HEAD_DIM_V),
            (b, h_q, s_q),
            out_dtype,
            prepared,
        )

    def check_fit(self, problem: DecodeProblem, sizes: DecodeSizes, device: int) -> None:
        """Raise PlanError unless the plan, as last updated, serves such a call."""
        if problem != self._problem:
            remedy = "make a plan for these sizes"
            if not problem.aligned:
                remedy = "q and kv_cache must start at, and step by, multiples of 16 bytes; or call without a plan"
            raise PlanError(explain("plan", self._problem, str(problem), remedy))
        if (sizes.page_size, sizes.max_pages) != (self._most.page_size, self._most.max_pages):
            got = f"page_size={self._most.page_size}, max_pages={self._most.max_pages}"
            expected = f"page_size={sizes.page_size}, max_pages={sizes.max_pages}"
            raise PlanError(explain("plan", got, expected, "make a plan for this block_table"))
        if device != self.device:
            raise PlanError(explain("plan.device", self.device, f"{device}, where q is", "make one for that device"))
        if self._scheduled_b != sizes.b:
            got = "no update yet" if self._scheduled_b is None else f"an update for b={self._scheduled_b}"
            raise PlanError(explain("plan", got, f"one for b={sizes.b}", "call plan.update(seqlens) for this step"))

    def sequence_for(
        self, problem: DecodeProblem, sizes: DecodeSizes, device: int, variant: str | None
    ) -> DecodeSequence:
        """The plan's kernels, if it serves such a call."""
        self.check_fit(problem, sizes, device)
        kernels = self._kernels
        assert kernels is not None  # check_fit compared the devices
        if variant is not None and variant != kernels.config.kernel:
            raise PlanError(explain("variant", repr(variant), f"{self.variant!r}, the plan's, or None"))
        return kernels


def plan_decode(
    *,
    max_b: int,
    s_q: int,
    h_q: int,
    h_kv: int = 1,
    max_pages: int,
    page_size: int,
    dtype: Any,
    device: int | None = None,
    workspace: Any = None,
    variant: str | None = None,
) -> DecodePlan:
    """Prepare decode steps of one shape: compile, load, allocate once.

    Parameters
    ----------
    max_b : int
        Largest batch.
    s_q, h_q, h_kv : int
        Query tokens, query heads and KV heads, as in the calls.
    max_pages, page_size : int
        As in the calls' `block_table` and `kv_cache`.
    dtype : str or dtype
        "bfloat16" or "float16", or a dtype of that name.
    device : int, optional
        CUDA ordinal. Default: CuPy's current device; without a GPU, the NumPy backend.
    workspace : array, uint8, optional
        Memory of the caller's for the plan, of at least `workspace_bytes`, 256-byte aligned, on `device`.
    variant : str, optional
        Name of the kernel to run. Default: the fastest that fits.

    Returns
    -------
    DecodePlan

    Raises
    ------
    ArgumentError, DTypeError, PlanError
        If a size, the dtype or the workspace does not fit.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Examples
    --------
    >>> import mla_cupy
    >>> plan = mla_cupy.plan_decode(max_b=8, s_q=1, h_q=128, max_pages=64, page_size=64, dtype="bfloat16")
    """
    sizes = {"max_b": max_b, "s_q": s_q, "h_q": h_q, "h_kv": h_kv, "max_pages": max_pages, "page_size": page_size}
    for argument, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ArgumentError(explain(argument, value, "an integer of at least 1"))
    if h_q % h_kv:
        raise ArgumentError(explain("h_q", h_q, f"a multiple of h_kv={h_kv}"))
    if max_pages * page_size > MOST_TOKENS:
        raise ArgumentError(
            explain("max_pages * page_size", max_pages * page_size, f"at most {MOST_TOKENS} = 2^31 - 64")
        )
    check_variant(variant)
    problem = DecodeProblem(s_q, h_q, h_kv, _dtype_name(dtype))
    most = DecodeSizes(max_b, 0, page_size, max_pages)
    if device is None and not backend.use_gpu():
        return DecodePlan(problem, most, HOST, None, None, 0)
    cupy = arrays.cupy_family()
    device = cupy.current_device() if device is None else device
    kernels = sequence(problem, device, variant)
    kernels.bind(cupy.current_stream(device))
    nbytes = kernels.config.workspace.nbytes
    if workspace is None:
        workspace = cupy.own_memory(nbytes, device)
        return DecodePlan(problem, most, device, kernels, workspace, workspace.ptr)
    return DecodePlan(problem, most, device, kernels, workspace, _workspace_address(workspace, nbytes, device))


def _workspace_address(workspace: Any, nbytes: int, device: int) -> int:
    family = arrays.family_of(workspace, "workspace")
    if not family.on_gpu or not family.mutable:
        raise PlanError(explain("workspace", f"an array of {family.name}", "a writable array on the GPU"))
    view = family.native.view(family.adopt(workspace))
    if view.device != device:
        raise PlanError(explain("workspace's device", view.device, str(device)))
    if view.dtype != "uint8" or len(view.shape) != 1 or view.strides != (1,):
        raise PlanError(explain("workspace", f"{view.dtype} {view.shape}", "a contiguous vector of uint8"))
    if view.shape[0] < nbytes:
        raise PlanError(explain("workspace.shape[0]", view.shape[0], f"at least {nbytes} bytes"))
    if view.ptr % 256:
        raise PlanError(explain("workspace's address", hex(view.ptr), "a multiple of 256"))
    return view.ptr


def _dtype_name(dtype: Any) -> str:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
    if "bfloat16" in str(dtype):
        name = "bfloat16"
    if name not in HALF_TYPES and getattr(dtype, "__name__", None) in HALF_TYPES:
        name = dtype.__name__
    if name not in HALF_TYPES:
        raise DTypeError(explain("dtype", dtype, "bfloat16 or float16"))
    return str(name)
