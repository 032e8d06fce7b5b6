"""Preparation of index queries and keys, into arrays or pages, and reading pages: one launch each."""

from __future__ import annotations

from math import prod
from typing import Any

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels import choice
from mla_cupy.kernels.indexer.prepare import gather_keys, quantize
from mla_cupy.kernels.indexer.prepare.quantize import PrepareOptions, PrepareProblem, PrepareVariant
from mla_cupy.kernels.pipeline import NULL, Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.spec import PLAIN
from mla_cupy.runtime.device import DeviceInfo


class PreparePipeline(Pipeline[PrepareProblem]):
    """The one kernel of all that prepares.

    Parameters
    ----------
    x, weights : str
        Names of the vectors and of the weights; "" for keys, which have none and only one vector per token.
    codes, scales : str
        Names of what takes the codes and what takes the scales; "" if that is a cache, too.
    """

    kernels = (quantize.KERNEL,)

    def __init__(self, x: str, weights: str, codes: str, scales: str) -> None:
        self._x, self._weights, self._codes, self._scales = x, weights, codes, scales

    def configure(self, problem: PrepareProblem, device: DeviceInfo, kernel: str | None = None) -> PrepareProblem:
        """See `Pipeline.configure`. There is nothing to choose."""
        choice.choose("the indexer's preparation", self.kernels, problem, device, kernel)
        return problem

    def workspace(self, config: PrepareProblem) -> Layout:
        """None is needed."""
        return Layout({})

    def steps(self, config: PrepareProblem, call: Call) -> list[Step]:
        """One launch, unless there is no vector, or no page for it."""
        options: PrepareOptions = call.options
        x, codes, cos = call.view(self._x), call.view(self._codes), call.views["cos"]
        paged = not self._scales
        heads = x.shape[1] if self._weights else 1
        vectors = x.shape[0] * heads
        if vectors == 0 or 0 in codes.shape:
            return []
        axes = 2 if self._weights else 1
        variant = PrepareVariant(config.head_dim, int(self._is_usual(config, call)))
        max_code = quantize.max_code(config.head_dim, options.accumulate)
        group_vectors = quantize.group_vectors(vectors)
        values = (
            *self._strides(call, self._x, axes),
            *(call.strides(self._weights, 2) if self._weights else (0, 0)),
            *(call.strides(name, 1)[0] for name in ("cos", "sin", "positions")),
            *((0, 0) if paged else self._strides(call, self._codes, axes)),
            *((0, 0) if paged else self._strides(call, self._scales, axes)),
            *((slots_stride_bytes(call), codes.strides[0]) if paged else (0, 0)),
            *(x.shape[0], heads, *(cos.shape[::-1] if cos else (0, 0))),
            *(options.interleaved, options.hadamard, options.scales == "power_of_2", options.reference_rounding),
            *(config.aligned, _tables_are_aligned(call)),
            *((*codes.shape[:2], slots_are_64(call)) if paged else (0, 0, False)),
            *(group_vectors, *divmod(quantize.WARP_VECTORS, heads)),
            *(heads**-0.5, config.head_dim**-0.5, max_code, 1 / max_code),
        )
        tables = (call.name(name) for name in ("cos", "sin", "positions"))
        names = (self._x, self._weights, *tables, "slots" if paged else NULL, self._codes, self._scales)
        record = LaunchArgs(quantize.KERNEL, names, values)
        blocks = -(-vectors // (quantize.BLOCK_GROUPS * group_vectors))
        return [Launch(quantize.KERNEL, variant, (blocks, 1, 1), record)]

    def _is_usual(self, config: PrepareProblem, call: Call) -> bool:
        """Whether the build for DeepSeek-V3.2's options and dense arrays takes the call."""
        options, cos = call.options, call.views["cos"]
        asked = (options.interleaved, options.hadamard, options.scales, options.reference_rounding)
        names = [name for name in (self._x, self._weights, self._codes, self._scales) if name]
        return (
            (config.head_dim, cos and cos.shape[1], config.aligned) == (128, 32, True)
            and asked == (False, True, "power_of_2", True)
            and bool(self._scales)
            and _tables_are_aligned(call)
            and all(_is_dense(call.view(name)) for name in names)
        )

    @staticmethod
    def _strides(call: Call, name: str, axes: int) -> tuple[int, int]:
        """Between tokens, and between the heads of one."""
        strides = call.strides(name, axes)
        return strides[0], strides[1] if axes == 2 else 0


def _is_dense(view: View) -> bool:
    steps = tuple(prod(view.shape[axis + 1 :]) for axis in range(len(view.shape)))
    return all(size == 1 or stride == step for size, stride, step in zip(view.shape, view.strides, steps, strict=True))


def _tables_are_aligned(call: Call) -> bool:
    """Whether rows of cos and sin start at multiples of 16 bytes."""
    tables = [table for table in (call.views["cos"], call.views["sin"]) if table]
    return all(not table.ptr % 16 and not table.strides[0] % 4 for table in tables)


class GatherKeysPipeline(Pipeline[None]):
    """The kernel that reads index keys."""

    kernels = (gather_keys.KERNEL,)

    def configure(self, problem: Any, device: DeviceInfo, kernel: str | None = None) -> None:
        """See `Pipeline.configure`. There is nothing to choose."""
        choice.choose("reading index keys", self.kernels, problem, device, kernel)

    def workspace(self, config: None) -> Layout:
        """None is needed."""
        return Layout({})

    def steps(self, config: None, call: Call) -> list[Step]:
        """One launch, unless there is no key."""
        cache, codes = call.view("cache"), call.view("codes")
        n, d = codes.shape
        if n == 0:
            return []
        values = (
            *(slots_stride_bytes(call), cache.strides[0], codes.strides[0], call.strides("k_scale", 1)[0]),
            *(n, *cache.shape[:2], d, slots_are_64(call)),
        )
        record = LaunchArgs(gather_keys.KERNEL, ("cache", "slots", "codes", "k_scale"), values)
        return [Launch(gather_keys.KERNEL, PLAIN[0], (-(-n // gather_keys.KEYS_PER_BLOCK), 1, 1), record)]


def slots_are_64(call: Call) -> bool:
    """Whether slots are 64-bit numbers."""
    return call.view("slots").dtype == "int64"


def slots_stride_bytes(call: Call) -> int:
    """From one slot to the next."""
    slots = call.view("slots")
    return slots.strides[0] * TABLE[slots.dtype].nbytes


PREPARE_Q = PreparePipeline("q", "weights", "codes", "folded")
PREPARE_K = PreparePipeline("k", "", "codes", "k_scale")
APPEND_KEYS = PreparePipeline("k", "", "cache", "")
GATHER_KEYS = GatherKeysPipeline()
