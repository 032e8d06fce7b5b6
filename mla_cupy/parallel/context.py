"""Decode with the tokens of each sequence divided among the ranks of a group."""

from __future__ import annotations

from math import inf
from typing import Any

from mla_cupy import arrays
from mla_cupy.dtypes import FLOATS, HALF, name_of
from mla_cupy.errors import ArgumentError, DTypeError, explain
from mla_cupy.kernels.lse import LseOptions
from mla_cupy.ops.checks import check_flag, explains_scale, is_e4m3
from mla_cupy.ops.decode import mla_decode
from mla_cupy.ops.decode_plan import DecodePlan, UnmergedPlan
from mla_cupy.ops.groups import Fp8, Shard
from mla_cupy.parallel.transport import MergesSplits, Result, Transport, heads_per_rank


class ContextParallel:
    """Decode over the tokens of all ranks of a transport.

    Parameters
    ----------
    transport : Transport
        `PeerTransport`, `NcclTransport` or `HostTransport`.
    partial_dtype : str, optional
        Dtype in which partial results travel: "float32", the default, which rounds once, at the end; or the dtype of
        the queries, which halves the bytes and rounds a second time.

    Notes
    -----
    Use it from one thread and one stream at a time. It keeps buffers for the partial results of every shape of `q` that
    it has seen, because CUDA graphs may still use them: b * s_q * h_q * 2 KB in float32. Every rank must make the same
    calls in the same order.

    Examples
    --------
    Two ranks, as threads, on the host:

    >>> import numpy as np, mla_cupy
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> from mla_cupy.parallel import ContextParallel, HostTransport, LocalGroup
    >>> q, cache = np.ones((1, 1, 4, 576), np.float16), np.ones((2, 64, 576), np.float16)
    >>> table, seqlens = np.array([[1, 0]], np.int32), np.array([150], np.int32)  # 75 tokens on each rank
    >>> group = LocalGroup(2)
    >>> def rank(r):
    ...     return ContextParallel(HostTransport(group.member(r))).decode(q, cache, table, seqlens, scale=192**-0.5)
    >>> with ThreadPoolExecutor(2) as threads:
    ...     (out, lse), _ = threads.map(rank, range(2))
    >>> out.shape, round(float(lse[0, 0, 0]), 3)
    ((1, 1, 2, 512), 46.58)
    """

    def __init__(self, transport: Transport, *, partial_dtype: Any = "float32") -> None:
        if not isinstance(transport, Transport):
            expected = "a PeerTransport, a NcclTransport or a HostTransport"
            raise ArgumentError(explain("transport", repr(transport), expected))
        self.transport = transport
        self.world, self.rank = transport.world, transport.rank
        self._merger = transport if isinstance(transport, MergesSplits) else None
        self._partial_dtype = name_of(partial_dtype)
        if self._partial_dtype not in FLOATS:
            raise DTypeError(explain("partial_dtype", repr(partial_dtype), " or ".join(FLOATS)))
        self._buffers: dict[Any, tuple[Any, Any]] = {}

    @explains_scale
    def decode(
        self,
        q: Any,
        kv_cache: Any,
        block_table: Any,
        seqlens: Any,
        *,
        scale: float,
        causal: bool = True,
        fp8: Fp8 | None = None,
        local_seqlens: bool = False,
        plan: Any = None,
        out: Any = None,
        lse: Any = None,
        out_dtype: Any = None,
        lse_base: str = "e",
        empty_lse: float = -inf,
        kernel: str | None = None,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Attend to the tokens of all ranks, and return the result for this rank's heads.

        Parameters
        ----------
        q : array, (b, s_q, h_q, d_qk), bfloat16 or float16; or e4m3 with `fp8`
            The queries of all heads, the same on every rank.
        kv_cache : array, (num_pages, page_size, d_qk), or in an FP8 format
            This rank's tokens: its token j is token j * world + rank of the sequence, unless `local_seqlens`.
        block_table : array, (b, max_pages), int32
            Page table of this rank's cache.
        seqlens : array, (b,), int32
            Tokens of the whole sequences, the same on every rank; with `local_seqlens` the tokens on this rank.
        scale, causal, fp8, kernel
            As for `mla_decode`; the same on every rank, but for `kernel` and the scale of the cache.
        local_seqlens : bool
            `seqlens` count this rank's own tokens, which may be any tokens of the sequence in any order. Every
            query sees all of them, so s_q must be 1 or `causal` False. The same on every rank. Default False.
        plan : DecodePlan, optional
            From `plan_decode` with this world and rank, updated for these `seqlens`; with `local_seqlens` from
            `plan_decode` without either.
        out : array, (b, s_q, h_q / world, 512), optional
            Output array for the result.
        lse : array, (b, h_q / world, s_q), float32, optional
            Output array for the log-sum-exps.
        out_dtype, lse_base, empty_lse
            As for `mla_decode`, but `out_dtype` is 16 bits or float32: the dtype of `q` by default, bfloat16 for
            queries in e4m3.
        stream : int or stream object, optional
            Stream to run on. Default: the current stream of the arrays' library.

        Returns
        -------
        out : array, (b, s_q, h_q / world, 512)
            Heads rank * h_q / world up to (rank + 1) * h_q / world.
        lse : array, (b, h_q / world, s_q), float32

        Raises
        ------
        ShapeError, DTypeError, DeviceError, ArgumentError, PlanError
            If an argument does not fit; nothing has been launched.
        ParallelError
            If another rank is gone or has made another call. On a GPU the failure of an exchange shows in the next
            call, or in `transport.check()`; the results of the call that failed are NaN.

        Notes
        -----
        Deterministic for a given world: partial results are added in the order of the ranks.
        """
        self.transport.check()
        family = arrays.family_of(q, "q")
        shape = tuple(q.shape)
        local_seqlens, causal = check_flag("local_seqlens", local_seqlens), check_flag("causal", causal)
        if len(shape) == 4:  # else mla_decode says what is wrong
            heads_per_rank(shape, (shape[0], shape[2], shape[1]), self.world)
            if local_seqlens and causal and shape[1] > 1:
                remedy = "or deal tokens out in turn and give the lengths of the whole sequences"
                got = f"True with s_q={shape[1]} and causal=True: which tokens a query sees is unknown"
                raise ArgumentError(explain("local_seqlens", got, "s_q=1 or causal=False", remedy))
        if is_e4m3(out_dtype):
            raise DTypeError(
                explain("out_dtype", name_of(out_dtype), "16 bits or float32", "quantise the merged result")
            )
        if out is None and out_dtype is None:
            out_dtype = q.dtype if name_of(q.dtype) in HALF else "bfloat16"
        result = Result(out, lse, out_dtype, LseOptions(lse_base, empty_lse), stream)
        kept, call = self._partials(family, q, stream), (q, kv_cache, block_table, seqlens)
        shard = None if local_seqlens else Shard(self.world, self.rank)
        options: dict[str, Any] = {"scale": scale, "causal": causal, "fp8": fp8, "shard": shard}
        options |= {"lse_base": lse_base, "kernel": kernel, "stream": stream}
        splits = plan.splits if isinstance(plan, DecodePlan) and kept is not None else None
        if kept is None:
            outs, lses = mla_decode(*call, plan=plan, out_dtype=self._partial_dtype, **options)
        elif splits is None or self._merger is None:
            outs, lses = mla_decode(*call, plan=plan, out=kept[0], lse=kept[1], **options)
        else:
            unmerged: Any = UnmergedPlan(plan)
            mla_decode(*call, plan=unmerged, out=kept[0], lse=kept[1], **options)
            return self._merger.merge_splits(*kept, splits, result)
        return self.transport.merge(outs, lses, result)

    def merge(
        self,
        outs: Any,
        lses: Any,
        *,
        out: Any = None,
        lse: Any = None,
        out_dtype: Any = None,
        lse_base: str = "e",
        empty_lse: float = -inf,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Exchange and merge the caller's partial results, such as projected ones.

        The projection of values, 512 to 128 per head, is linear. Applied before the exchange, it reduces the bytes to
        a quarter.

        Parameters
        ----------
        outs : array, (b, s_q, h_q, d), bfloat16, float16 or float32
            Partial outputs of all heads over this rank's tokens.
        lses : array, (b, h_q, s_q), float32
            Their log-sum-exps in base `lse_base`; either infinity means that the row saw no token.
        out, lse, out_dtype, lse_base, empty_lse, stream
            As for `decode`; `out_dtype` is the dtype of `outs` by default.

        Returns
        -------
        out : array, (b, s_q, h_q / world, d)
        lse : array, (b, h_q / world, s_q), float32

        Raises
        ------
        ShapeError, DTypeError, DeviceError, ArgumentError, ParallelError
            See `decode`.
        """
        self.transport.check()
        return self.transport.merge(outs, lses, Result(out, lse, out_dtype, LseOptions(lse_base, empty_lse), stream))

    def _partials(self, family: arrays.Family, q: Any, stream: Any) -> tuple[Any, Any] | None:
        """Arrays for the partial results of `q`, heads outermost; None if the library's arrays are immutable."""
        if not (family.on_gpu and family.mutable) or len(q.shape) != 4:
            return None
        b, s_q, h_q, _ = q.shape
        key = family.name, b, s_q, h_q, self._device_of(family, q)
        if key not in self._buffers:
            native, device = family.native, key[-1]
            handle = native.current_stream(device) if stream is None else arrays.stream_handle(stream)
            outs = native.empty((h_q, b, s_q, 512), self._partial_dtype, device, handle)
            lses = native.empty((h_q, b, s_q), "float32", device, handle)
            self._buffers[key] = native.transposed(outs, (1, 2, 0, 3)), native.transposed(lses, (1, 0, 2))
        return self._buffers[key]

    @staticmethod
    def _device_of(family: arrays.Family, q: Any) -> int:
        return family.native.view(family.adopt(q), "q").device
