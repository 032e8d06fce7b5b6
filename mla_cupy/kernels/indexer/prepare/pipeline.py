"""Preparation of index queries and keys, into arrays or pages, and reading pages: one launch each."""

from __future__ import annotations

from math import prod
from typing import Any

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels import choice
from mla_cupy.kernels.indexer.prepare import quantize
from mla_cupy.kernels.indexer.prepare.quantize import (
    PrepareBothOptions,
    PrepareOptions,
    PrepareProblem,
    PrepareQueryOptions,
)
from mla_cupy.kernels.param_layout import NULL
from mla_cupy.kernels.params import GatherKeysParams, PrepareParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.spec import PLAIN, KernelSpec, Variant
from mla_cupy.runtime.device import DeviceInfo


class PreparePipeline(Pipeline[PrepareProblem]):
    """The one kernel of all that prepares.

    Parameters
    ----------
    x, weights : str
        Names of the vectors and of the weights; "" for keys, which have none and only one vector per token.
    codes, scales : str
        Names of what takes the codes and what takes the scales; "" if that is a cache, too.
    k : str
        Name of the keys beside queries, which have results of their own: `k_codes` and `k_scale`, or a cache.
    """

    kernels = (quantize.KERNEL,)

    def __init__(self, x: str, weights: str, codes: str, scales: str, k: str = "") -> None:
        self._x, self._weights, self._codes, self._scales, self._k = x, weights, codes, scales, k

    def configure(self, problem: PrepareProblem, device: DeviceInfo, kernel: str | None = None) -> PrepareProblem:
        """See `Pipeline.configure`. There is nothing to choose."""
        choice.choose("the indexer's preparation", self.kernels, problem, device, kernel)
        return problem

    def workspace(self, config: PrepareProblem) -> Layout:
        """See `Pipeline.workspace`: a call needs none."""
        return Layout({})

    def steps(self, config: PrepareProblem, call: Call) -> list[Step]:
        """One launch, unless there is no vector, or no page for it."""
        x, codes = call.view(self._x), call.view(self._codes)
        heads = x.shape[1] if self._weights else 1
        vectors = x.shape[0] * (heads + bool(self._k))
        if vectors == 0 or 0 in codes.shape:
            return []
        usual = int(self._is_usual(config, call))
        variant = Variant(head_dim=config.head_dim, usual=usual, joint=int(bool(self._k)))
        blocks = -(-vectors // (quantize.BLOCK_GROUPS * quantize.group_vectors(vectors)))
        args = LaunchArgs(self._params(config, call, x.shape[0], heads))
        return [Launch(quantize.KERNEL, variant, (blocks, 1, 1), args)]

    def _params(self, config: PrepareProblem, call: Call, tokens: int, heads: int) -> PrepareParams:
        options: PrepareOptions | PrepareQueryOptions | PrepareBothOptions = call.options
        cos, cache = call.views["cos"], call.views.get("cache")
        of_keys = not self._weights
        axes, all_heads = 1 if of_keys else 2, heads + bool(self._k)
        max_position, half_rope = cos.shape if cos else (0, 0)
        step_tokens, step_heads = divmod(quantize.WARP_VECTORS, all_heads)
        max_code = quantize.max_code(config.head_dim, options.accumulate)
        apart = of_keys and cache is not None
        return PrepareParams(
            x=self._x,
            weights=self._weights,
            cos=call.name("cos"),
            sin=call.name("sin"),
            positions=call.name("positions"),
            slots=call.name("slots"),
            codes=self._codes,
            scales=self._scales,
            k=self._k,
            k_codes=("k_codes" if cache is None else "cache") if self._k else NULL,
            k_scales=call.name("k_scale") if self._k else NULL,
            norm_weight=call.name("norm_weight"),
            norm_bias=call.name("norm_bias"),
            x_stride_n_h_elems=_strides(call, self._x, axes),
            weights_stride_n_h_elems=call.strides(self._weights, 2),
            cos_stride_elems=call.stride("cos"),
            sin_stride_elems=call.stride("sin"),
            positions_stride_elems=call.stride("positions"),
            codes_stride_n_h_elems=(0, 0) if apart else _strides(call, self._codes, axes),
            scales_stride_n_h_elems=_strides(call, self._scales, axes),
            slots_stride_bytes=slots_stride_bytes(call) if cache else 0,
            page_stride_bytes=cache.strides[0] if cache else 0,
            k_stride_elems=call.stride(self._k),
            k_codes_stride_elems=call.stride("k_codes"),
            k_scales_stride_elems=call.stride("k_scale") if self._k else 0,
            norm_weight_stride_elems=call.stride("norm_weight"),
            norm_bias_stride_elems=call.stride("norm_bias"),
            n=tokens,
            h=all_heads,
            half_rope=half_rope,
            max_position=max_position,
            interleaved=options.interleaved,
            hadamard=options.hadamard,
            power_of_2=options.scales == "power_of_2",
            rounded=options.reference_rounding,
            x_aligned=config.aligned,
            tables_aligned=_tables_are_aligned(call),
            num_pages=cache.shape[0] if cache else 0,
            page_size=cache.shape[1] if cache else 0,
            slots_are_64=slots_are_64(call) if cache else False,
            e2m1_keys=cache is not None and holds_e2m1(cache, config.head_dim),
            group_vectors=quantize.group_vectors(tokens * all_heads),
            step_tokens=step_tokens,
            step_heads=step_heads,
            independent=isinstance(options, PrepareBothOptions) and options.independent,
            h_factor=heads**-0.5,
            d_factor=config.head_dim**-0.5,
            max_code=max_code,
            inverse_max_code=1 / max_code,
            norm_eps=options.eps,
        )

    def _is_usual(self, config: PrepareProblem, call: Call) -> bool:
        """True if the build for DeepSeek-V3.2's options supports the call; queries or keys alone must be dense arrays,
        too.
        """
        options, cos, cache = call.options, call.views["cos"], call.views.get("cache")
        if cache is not None and holds_e2m1(cache, config.head_dim):
            return False
        asked = (options.interleaved, options.hadamard, options.scales, options.reference_rounding)
        return (
            (config.head_dim, cos and cos.shape[1], config.aligned) == (128, 32, True)
            and asked == (False, True, "power_of_2", True)
            and (bool(self._k) or self._are_dense(call))
            and _tables_are_aligned(call)
            and _norm_is_aligned(call)
        )

    def _are_dense(self, call: Call) -> bool:
        """True of queries or keys alone without gaps, which nothing normalises, and results in such arrays."""
        names = [name for name in (self._x, self._weights, self._codes, self._scales) if name]
        return bool(self._scales) and not call.name("norm_weight") and all(_is_dense(call.view(name)) for name in names)


def _strides(call: Call, name: str, axes: int) -> tuple[int, int]:
    """Between tokens, and between the heads of one."""
    return call.stride(name), call.stride(name, 1) if axes == 2 else 0


def _is_dense(view: View) -> bool:
    steps = tuple(prod(view.shape[axis + 1 :]) for axis in range(len(view.shape)))
    return all(size == 1 or stride == step for size, stride, step in zip(view.shape, view.strides, steps, strict=True))


def _tables_are_aligned(call: Call) -> bool:
    """True if rows of cos and sin start at multiples of 16 bytes."""
    tables = [table for table in (call.views["cos"], call.views["sin"]) if table]
    return all(not table.ptr % 16 and not table.strides[0] % 4 for table in tables)


def _norm_is_aligned(call: Call) -> bool:
    """True if a LayerNorm's weight and bias have no gaps and start at multiples of 16 bytes, or if there is none."""
    norms = [norm for norm in (call.views.get("norm_weight"), call.views.get("norm_bias")) if norm]
    return all(not norm.ptr % 16 and _is_dense(norm) for norm in norms)


def holds_e2m1(cache: View, head_dim: int) -> bool:
    """True for a cache of index keys in e2m1: half a byte per element."""
    return cache.shape[-1] - quantize.SCALE_BYTES < head_dim


KEYS_PER_BLOCK = 16

KERNEL: KernelSpec[object] = KernelSpec(
    "indexer_prepare_gather_keys",
    "reads index keys of a paged cache",
    "indexer/prepare/gather_keys.cu",
    GatherKeysParams,
    facts={"keys_per_block": KEYS_PER_BLOCK},
)


class GatherKeysPipeline(Pipeline[None]):
    """The kernel that reads index keys."""

    kernels = (KERNEL,)

    def configure(self, problem: Any, device: DeviceInfo, kernel: str | None = None) -> None:
        """See `Pipeline.configure`. There is nothing to choose."""
        choice.choose("reading index keys", self.kernels, problem, device, kernel)

    def workspace(self, config: None) -> Layout:
        """See `Pipeline.workspace`: a call needs none."""
        return Layout({})

    def steps(self, config: None, call: Call) -> list[Step]:
        """One launch, unless there is no key."""
        cache, codes = call.view("cache"), call.view("codes")
        n, d = codes.shape
        if n == 0:
            return []
        params = GatherKeysParams(
            cache="cache",
            slots="slots",
            codes="codes",
            k_scale="k_scale",
            slots_stride_bytes=slots_stride_bytes(call),
            page_stride_bytes=cache.strides[0],
            codes_stride_elems=codes.strides[0],
            k_scale_stride_elems=call.stride("k_scale"),
            n=n,
            num_pages=cache.shape[0],
            page_size=cache.shape[1],
            d=d,
            slots_are_64=slots_are_64(call),
            keys_are_e2m1=holds_e2m1(cache, d),
        )
        blocks = -(-n // KEYS_PER_BLOCK)
        return [Launch(KERNEL, PLAIN[0], (blocks, 1, 1), LaunchArgs(params))]


def slots_are_64(call: Call) -> bool:
    """True if slots are 64-bit numbers."""
    return call.view("slots").dtype == "int64"


def slots_stride_bytes(call: Call) -> int:
    """Bytes from one slot to the next."""
    slots = call.view("slots")
    return slots.strides[0] * TABLE[slots.dtype].nbytes


PREPARE_Q = PreparePipeline("q", "weights", "codes", "folded")
PREPARE_K = PreparePipeline("k", "", "codes", "k_scale")
APPEND_KEYS = PreparePipeline("k", "", "cache", "")
PREPARE_BOTH = PreparePipeline("q", "weights", "codes", "folded", "k")
GATHER_KEYS = GatherKeysPipeline()
