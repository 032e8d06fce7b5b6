"""Pipelines of the operations on a paged cache: one launch each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypedDict

from mla_cupy.arrays.view import View
from mla_cupy.cache_formats import FORMATS, words_before_changes
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels import choice
from mla_cupy.kernels.attention import record_layout
from mla_cupy.kernels.cache import table
from mla_cupy.kernels.param_layout import Params
from mla_cupy.kernels.params import (
    CacheAppendParams,
    CacheCopyPagesParams,
    CacheGatherParams,
    CacheSlotsParams,
    CacheUpdateParams,
)
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.spec import PLAIN, KernelSpec
from mla_cupy.runtime.device import DeviceInfo


class AppendOptions(NamedTuple):
    """A call's arguments other than arrays: as passed, then as resolved by the checks."""

    kv_format: str
    scales: str
    kv_scale: float
    interleaved: bool


class GatherOptions(NamedTuple):
    """A call's arguments other than arrays: as passed, then as resolved by the checks."""

    kv_format: str
    kv_scale: float
    out_dtype: str | None


class CopyPagesOptions(NamedTuple):
    """The option of `cache_copy_pages`: whether pages start at, and have, multiples of 16 bytes."""

    aligned: bool


class UpdateOptions(NamedTuple):
    """The options of `cache_update`."""

    page_size: int


class SlotsOptions(NamedTuple):
    """The options of `cache_slots`: the caller's, then with the most pages that 32-bit slots can address."""

    page_size: int
    max_tokens: int
    num_pages: int | None


class RotationMembers(TypedDict):
    """The members of a parameter struct about RoPE by tables."""

    cos: str
    sin: str
    positions: str
    positions_stride_bytes: int
    cos_stride_elems: int
    sin_stride_elems: int
    max_position: int
    positions_are_64: bool
    interleaved: bool


class TokenMembers(TypedDict):
    """The members of a parameter struct about tokens and their slots."""

    latent_stride_bytes: int
    rope_stride_bytes: int
    slots_stride_bytes: int
    n: int
    element: int
    slots_are_64: bool
    power_of_2: bool


@dataclass(frozen=True)
class CacheConfig:
    """The GPU, and the blocks that it runs at once where that matters."""

    resident: int
    device: DeviceInfo


class CachePipeline(Pipeline[CacheConfig]):
    """One kernel, no workspace."""

    name: ClassVar[str]

    def configure(self, problem: Any, device: DeviceInfo, kernel: str | None = None) -> CacheConfig:
        """See `Pipeline.configure`. There is nothing to choose."""
        choice.choose(self.name, self.kernels, problem, device, kernel)
        return CacheConfig(table.COPY_BLOCKS_PER_SM * device.sm_count, device)

    def workspace(self, config: CacheConfig) -> Layout:
        """See `Pipeline.workspace`: a call needs none."""
        return Layout({})


def _launch(kernel: KernelSpec[Any], blocks: int, params: Params) -> list[Step]:
    return [Launch(kernel, PLAIN[0], (blocks, 1, 1), LaunchArgs(params))] if blocks else []


def _bytes(view: View | None, axis: int = 0) -> int:
    """The stride of an axis; 0 for an array that is not given."""
    return 0 if view is None else view.strides[axis] * TABLE[view.dtype].nbytes


def _is_64(view: View | None) -> bool:
    return view is not None and view.dtype == "int64"


def rotation_members(call: Call, interleaved: bool) -> RotationMembers:
    """The members of a parameter struct about RoPE by tables."""
    cos = call.views["cos"]
    return {
        "cos": call.name("cos"),
        "sin": call.name("sin"),
        "positions": call.name("positions"),
        "positions_stride_bytes": _bytes(call.views["positions"]),
        "cos_stride_elems": call.stride("cos"),
        "sin_stride_elems": call.stride("sin"),
        "max_position": cos.shape[0] if cos else 0,
        "positions_are_64": _is_64(call.views["positions"]),
        "interleaved": interleaved,
    }


def token_members(call: Call, n: int, scales: str | None) -> TokenMembers:
    """The members of a parameter struct about n tokens and their slots."""
    latent, rope, slots = call.views["latent"], call.views["rope"], call.views["slots"]
    like = latent or rope or call.view("q")
    return {
        "latent_stride_bytes": _bytes(latent),
        "rope_stride_bytes": _bytes(rope),
        "slots_stride_bytes": _bytes(slots),
        "n": n,
        "element": record_layout.KINDS[like.dtype],
        "slots_are_64": _is_64(slots),
        "power_of_2": scales == "power_of_2",
    }


class AppendPipeline(CachePipeline):
    """The kernel of `cache_append`."""

    name = "cache append"
    kernels = (table.APPEND,)

    def steps(self, config: CacheConfig, call: Call) -> list[Step]:
        """One launch, unless there is no token or no page."""
        options: AppendOptions = call.options
        kept = FORMATS[options.kv_format]
        cache, n = call.view("cache"), call.view("latent").shape[0]
        num_pages, page_size, _ = cache.shape
        page, token = record_layout.page_and_token_bytes(kept, cache)
        params = CacheAppendParams(
            latent="latent",
            rope=call.name("rope"),
            cache="cache",
            slots="slots",
            page_stride_bytes=page,
            token_stride_bytes=token,
            num_pages=num_pages,
            page_size=page_size,
            **rotation_members(call, options.interleaved),
            **token_members(call, n, options.scales),
            **record_layout.members(kept, page_size, token, options.kv_scale),
        )
        return _launch(table.APPEND, -(-n // table.APPENDED_PER_BLOCK) if num_pages * page_size else 0, params)


class GatherPipeline(CachePipeline):
    """The kernel of `cache_gather`."""

    name = "cache gather"
    kernels = (table.GATHER,)

    def steps(self, config: CacheConfig, call: Call) -> list[Step]:
        """One launch, unless there is no row."""
        options: GatherOptions = call.options
        kept = FORMATS[options.kv_format]
        cache, slots, rows = call.view("cache"), call.view("slots"), call.view("out")
        num_pages, page_size, _ = cache.shape
        page, token = record_layout.page_and_token_bytes(kept, cache)
        params = CacheGatherParams(
            cache="cache",
            slots="slots",
            rows="out",
            slots_stride_bytes=_bytes(slots),
            rows_stride_bytes=_bytes(rows),
            page_stride_bytes=page,
            token_stride_bytes=token,
            n=slots.shape[0],
            num_pages=num_pages,
            page_size=page_size,
            element=record_layout.KINDS[rows.dtype],
            slots_are_64=_is_64(slots),
            **record_layout.members(kept, page_size, token, options.kv_scale),
        )
        return _launch(table.GATHER, -(-slots.shape[0] // table.GATHERED_PER_BLOCK), params)


class CopyPagesPipeline(CachePipeline):
    """The kernel of `cache_copy_pages`."""

    name = "cache copy"
    kernels = (table.COPY_PAGES,)

    def steps(self, config: CacheConfig, call: Call) -> list[Step]:
        """One launch, unless there is no pair or no byte."""
        layers, num_pages, page_bytes = call.view("pool").shape
        n = call.view("pairs").shape[0]
        params = CacheCopyPagesParams(
            pool="pool",
            pairs="pairs",
            layer_stride_bytes=call.stride("pool", 0),
            page_stride_bytes=call.stride("pool", 1),
            pairs_stride_n_elems=call.stride("pairs", 0),
            pairs_stride_elems=call.stride("pairs", 1),
            page_bytes=page_bytes,
            n=n,
            num_layers=layers,
            num_pages=num_pages,
            aligned=call.options.aligned,
        )
        work = n * layers * -(-page_bytes // table.PIECE_BYTES) if num_pages else 0
        return _launch(table.COPY_PAGES, min(work, config.resident), params)


class UpdatePipeline(CachePipeline):
    """The kernel of `cache_update`."""

    name = "cache update"
    kernels = (table.UPDATE,)

    def steps(self, config: CacheConfig, call: Call) -> list[Step]:
        """One launch."""
        max_rows, max_pages = call.view("table").shape
        changes_at = words_before_changes(max_rows)
        params = CacheUpdateParams(
            packed="packed",
            table="table",
            seqlens="seqlens",
            step_table="step_table",
            step_seqlens="step_seqlens",
            slots="slots",
            positions="positions",
            table_stride_elems=call.stride("table"),
            step_table_stride_elems=call.stride("step_table"),
            max_rows=max_rows,
            max_pages=max_pages,
            page_size=call.options.page_size,
            changes_at=changes_at,
            max_changes=(call.view("packed").shape[0] - changes_at) // 2,
            max_tokens=call.view("slots").shape[0],
        )
        return _launch(table.UPDATE, max_rows, params)


class SlotsPipeline(CachePipeline):
    """The kernel of `cache_slots`."""

    name = "slots"
    kernels = (table.SLOTS,)

    def steps(self, config: CacheConfig, call: Call) -> list[Step]:
        """One launch; where there is no slot, of a block that writes where the sequences begin."""
        options: SlotsOptions = call.options
        b, max_pages = call.view("block_table").shape
        assert options.num_pages is not None
        params = CacheSlotsParams(
            block_table="block_table",
            starts="starts",
            lengths="lengths",
            slots="slots",
            cu_seqlens="cu_seqlens",
            block_table_stride_b_page_elems=call.strides("block_table", 2),
            starts_stride_elems=call.stride("starts"),
            lengths_stride_elems=call.stride("lengths"),
            slots_stride_elems=call.stride("slots"),
            cu_seqlens_stride_elems=call.stride("cu_seqlens"),
            b=b,
            max_pages=max_pages,
            page_size=options.page_size,
            num_pages=options.num_pages,
            max_tokens=options.max_tokens,
        )
        return _launch(table.SLOTS, max(1, -(-options.max_tokens // table.SLOTS_PER_BLOCK)), params)


APPEND = AppendPipeline()
GATHER = GatherPipeline()
COPY_PAGES = CopyPagesPipeline()
UPDATE = UpdatePipeline()
SLOTS = SlotsPipeline()
