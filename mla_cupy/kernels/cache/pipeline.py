"""How the operations on a paged cache run: one launch each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from mla_cupy.arrays.view import View
from mla_cupy.cache_formats import FORMATS, words_before_changes
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels import choice
from mla_cupy.kernels.attention import record_layout
from mla_cupy.kernels.cache import append, copy_pages, gather, update
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.spec import PLAIN, KernelSpec
from mla_cupy.runtime.device import DeviceInfo


class AppendOptions(NamedTuple):
    """The options of `cache_append`."""

    record: str
    scales: str
    kv_scale: float
    interleaved: bool


class GatherOptions(NamedTuple):
    """The options of `cache_gather`."""

    record: str
    kv_scale: float


class CopyPagesOptions(NamedTuple):
    """The option of `cache_copy_pages`: whether pages start at, and have, multiples of 16 bytes."""

    aligned: bool


class UpdateOptions(NamedTuple):
    """The options of `cache_update`."""

    page_size: int


@dataclass(frozen=True)
class CacheConfig:
    """The blocks that a GPU runs at once, where that matters."""

    resident: int


class CachePipeline(Pipeline[CacheConfig]):
    """One kernel, no workspace."""

    name: ClassVar[str]

    def configure(self, problem: Any, device: DeviceInfo, kernel: str | None = None) -> CacheConfig:
        """See `Pipeline.configure`. There is nothing to choose."""
        choice.choose(self.name, self.kernels, problem, device, kernel)
        return CacheConfig(copy_pages.BLOCKS_PER_SM * device.sm_count)

    def workspace(self, config: CacheConfig) -> Layout:
        """None is needed."""
        return Layout({})


def _launch(kernel: KernelSpec[Any], blocks: int, addresses: tuple[str, ...], values: tuple[float, ...]) -> list[Step]:
    return [Launch(kernel, PLAIN[0], (blocks, 1, 1), LaunchArgs(kernel, addresses, values))] if blocks else []


def _bytes(view: View | None, axis: int = 0) -> int:
    """The stride of an axis; 0 for an array that is not given."""
    return 0 if view is None else view.strides[axis] * TABLE[view.dtype].nbytes


def _is_64(view: View | None) -> bool:
    return view is not None and view.dtype == "int64"


class AppendPipeline(CachePipeline):
    """The kernel of `cache_append`."""

    name = "cache append"
    kernels = (append.KERNEL,)

    def steps(self, config: CacheConfig, call: Call) -> list[Step]:
        """One launch, unless there is no token or no page."""
        options: AppendOptions = call.options
        kept = FORMATS[options.record]
        latent, cache, cos = call.view("latent"), call.view("cache"), call.views["cos"]
        n, (num_pages, page_size, _) = latent.shape[0], cache.shape
        names = ("latent", "rope", "cache", "slots", "cos", "sin", "positions")
        page, token = record_layout.page_and_token_bytes(kept, cache)
        values = (
            *(_bytes(latent), _bytes(call.views["rope"]), _bytes(call.views["slots"]), _bytes(call.views["positions"])),
            *(*call.strides("cos", 1), *call.strides("sin", 1), page, token),
            *(n, num_pages, page_size, cos.shape[0] if cos else 0),
            *(record_layout.KINDS[latent.dtype], _is_64(call.views["slots"]), _is_64(call.views["positions"])),
            *(options.interleaved, options.scales == "power_of_2"),
            *record_layout.values(kept, page_size, token, options.kv_scale),
        )
        blocks = -(-n // append.TOKENS_PER_BLOCK) if num_pages * page_size else 0
        return _launch(append.KERNEL, blocks, tuple(call.name(name) for name in names), values)


class GatherPipeline(CachePipeline):
    """The kernel of `cache_gather`."""

    name = "cache gather"
    kernels = (gather.KERNEL,)

    def steps(self, config: CacheConfig, call: Call) -> list[Step]:
        """One launch, unless there is no row."""
        options: GatherOptions = call.options
        kept = FORMATS[options.record]
        cache, slots, rows = call.view("cache"), call.view("slots"), call.view("out")
        num_pages, page_size, _ = cache.shape
        page, token = record_layout.page_and_token_bytes(kept, cache)
        values = (
            *(_bytes(slots), _bytes(rows), page, token),
            *(slots.shape[0], num_pages, page_size, record_layout.KINDS[rows.dtype], _is_64(slots)),
            *record_layout.values(kept, page_size, token, options.kv_scale),
        )
        return _launch(gather.KERNEL, -(-slots.shape[0] // gather.ROWS_PER_BLOCK), ("cache", "slots", "out"), values)


class CopyPagesPipeline(CachePipeline):
    """The kernel of `cache_copy_pages`."""

    name = "cache copy"
    kernels = (copy_pages.KERNEL,)

    def steps(self, config: CacheConfig, call: Call) -> list[Step]:
        """One launch, unless there is no pair or no byte."""
        pool, pairs = call.view("pool"), call.view("pairs")
        layers, num_pages, page_bytes = pool.shape
        n = pairs.shape[0]
        values = (*pool.strides[:2], *pairs.strides, page_bytes, n, layers, num_pages, call.options.aligned)
        work = n * layers * -(-page_bytes // copy_pages.PIECE_BYTES) if num_pages else 0
        return _launch(copy_pages.KERNEL, min(work, config.resident), ("pool", "pairs"), values)


class UpdatePipeline(CachePipeline):
    """The kernel of `cache_update`."""

    name = "cache update"
    kernels = (update.KERNEL,)

    def steps(self, config: CacheConfig, call: Call) -> list[Step]:
        """One launch."""
        table = call.view("table")
        max_rows, max_pages = table.shape
        changes_at = words_before_changes(max_rows)
        values = (
            *(table.strides[0], call.view("step_table").strides[0]),
            *(max_rows, max_pages, call.options.page_size, changes_at),
            *((call.view("packed").shape[0] - changes_at) // 2, call.view("slots").shape[0]),
        )
        names = ("packed", "table", "seqlens", "step_table", "step_seqlens", "slots", "positions")
        return _launch(update.KERNEL, max_rows, names, values)


APPEND = AppendPipeline()
GATHER = GatherPipeline()
COPY_PAGES = CopyPagesPipeline()
UPDATE = UpdatePipeline()
