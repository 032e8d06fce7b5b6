"""A cache of latents for transformers, in the pages of `mla_cupy.PagedKVCache`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache

import mla_cupy.torch as mla
from mla_cupy.cache import PagedKVCache
from mla_cupy.cache.reports import CacheStep
from mla_cupy.cache_formats import FORMATS, CacheFormat, Field
from mla_cupy.errors import ArgumentError, explain
from mla_cupy.transformers.families import Sizes
from mla_cupy.transformers.ragged import Ragged

PAGE = 64
_GROWTH = 256


@dataclass(frozen=True)
class Options:
    """Options of a cache.

    Attributes
    ----------
    kv_format : str
        "auto" (rows of the model's dtype) or "v32".
    max_length : int, optional
        Tokens of each sequence to allocate pages for at once. Default: the prompt's, and more as they come.
    """

    kv_format: str = "auto"
    max_length: int | None = None


class LatentCache(DynamicCache):
    """A transformers `Cache` that stores each token's latent once, for all heads: 1,152 bytes a layer in bfloat16.

    Pass it as `past_key_values`, also to `generate`. A patched model converts any `DynamicCache` to one with the
    default options.

    Parameters
    ----------
    config : PreTrainedConfig
        Configuration of the model.
    kv_format : {"auto", "v32"}
        "auto" stores rows of the model's dtype. "v32" stores 656 bytes per token: latents in e4m3 with a scale per 128
        columns; it requires latents of 512 + 64 columns.
    max_length : int, optional
        Tokens of a sequence to allocate at once, so that addresses never change, as CUDA graphs require. The cache
        grows for longer sequences, or without `max_length`: by a quarter, and its pages are copied.

    Raises
    ------
    ArgumentError
        If an option is invalid.

    Notes
    -----
    Works with unpatched models like any `DynamicCache`. Padding uses no memory. `reorder_cache` and
    `batch_repeat_interleave` share pages, and a page is copied when one of its sequences writes to it. `crop`,
    `batch_select_indices` and `reset` free pages. Indexer keys of DeepSeek sparse attention are stored in the same
    pages, in the model's dtype. Cached tokens have no gradient.
    """

    def __init__(self, config: Any, *, kv_format: str = "auto", max_length: int | None = None) -> None:
        if kv_format not in ("auto", "v32"):
            raise ArgumentError(explain("kv_format", repr(kv_format), '"auto" or "v32"'))
        sizes = Sizes.of(config.get_text_config(decoder=True))
        if kv_format == "v32" and not sizes.is_sparse:
            got = f"'v32' for latents of {sizes.latent} + {sizes.rope} columns"
            raise ArgumentError(explain("kv_format", got, "latents of 512 + 64 columns", 'pass kv_format="auto"'))
        super().__init__(config=config)
        self.latent_options = Options(kv_format, max_length)


@dataclass
class LatentStore:
    """The pages of all MLA layers on one device, and the batch's sequences in them.

    Attributes
    ----------
    sizes : Sizes
    layers : tuple of int
        The model's indices of these layers.
    index_width : int
        Columns of an indexer key; 0 without an indexer.
    device, dtype
        Of the model.
    options : Options
    halves : bool
        Rotated RoPE columns arrive as halves, and are stored as pairs.
    length : int
        Tokens of the batch's longest row, padding included, as transformers counts them.
    padding : tensor, optional
        (b, up to length) of bool, False for padding; None if there is none. Later tokens are real.
    counts : list of int
        Tokens of each sequence.
    """

    sizes: Sizes
    layers: tuple[int, ...]
    index_width: int
    device: torch.device
    dtype: torch.dtype
    options: Options
    halves: bool
    length: int = 0
    padding: torch.Tensor | None = None
    counts: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    plans: dict[Any, Any] = field(default_factory=dict)
    _cache: PagedKVCache | None = None
    _step: CacheStep | None = None
    _written: set[int] = field(default_factory=set)
    _pages: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    _counted: int = 0
    _max_seqs: int = 0
    _max_pages: int = 0
    _max_tokens: int = 0

    @property
    def cache(self) -> PagedKVCache:
        """The pages."""
        assert self._cache is not None
        return self._cache

    @property
    def is_quantised(self) -> bool:
        """True if tokens are bytes of an FP8 format."""
        return self.options.kv_format != "auto"

    def pages(self, layer: int, pool: str = "kv") -> torch.Tensor:
        """Pages of a layer of the model, (num_pages, page_size, width)."""
        found = self._pages.get((layer, pool))
        if found is None:
            found = self._pages[layer, pool] = self.cache.layer(self.layers.index(layer), pool)
        return found

    # ---- Steps

    def begin(self, layer: int, new: Ragged) -> CacheStep:
        """The step of a forward pass: its first layer makes room for the tokens, the others use the same arrays."""
        if self._step is None or layer in self._written:
            self.extend(new)
        assert self._step is not None
        if not self._written:
            self._count(new)
        self._written.add(layer)
        return self._step

    @property
    def step(self) -> CacheStep:
        """The latest step."""
        assert self._step is not None
        return self._step

    def plan(self, key: tuple[int, ...], **sizes: Any) -> Any:
        """A decode plan for (b, s, ...), up to date with the latest step.

        Attention may read old tokens while new ones are stored: call this before they are.
        """
        if key not in self.plans:
            options = {"page_size": PAGE, "device": self.device, "dtype": self.dtype, "after_prepare": True}
            made = mla.plan_decode(max_pages=self._max_pages, **options, **sizes)
            self.plans[key] = [made, None]
        plan, number = self.plans[key]
        if number != self.step.number:
            plan.update(self.step.seqlens)
            self.plans[key][1] = self.step.number
        return plan

    def length_before(self, layer: int) -> int:
        """`length` before the step of the forward pass that calls this layer now."""
        return self.length - (self._counted if self._written and layer not in self._written else 0)

    def extend(self, new: Ragged) -> None:
        """Make room for the tokens of the next forward pass, and upload where they are.

        Raises
        ------
        ArgumentError
            If the batch has another size than the cached one.
        """
        if self.sequences and new.b != len(self.sequences):
            remedy = "pass the cache of this batch, or batch_select_indices and batch_repeat_interleave first"
            raise ArgumentError(explain("hidden_states.shape[0]", new.b, f"{len(self.sequences)}, as cached", remedy))
        before = self.counts or [0] * new.b
        after = [old + more for old, more in zip(before, new.counts, strict=True)]
        self._reserve(new.b, max(after, default=0), sum(new.counts))
        if not self.sequences:
            self.sequences = [self.cache.allocate()[0] for _ in range(new.b)]
        same = len(set(new.counts)) == 1
        self._step = self.cache.extend(self.sequences, new.counts[0] if same else list(new.counts))
        self.counts = after
        self._written.clear()

    def _count(self, new: Ragged) -> None:
        if new.rows is not None:
            ones = torch.ones(new.b, new.s, dtype=torch.bool, device=self.device)
            self.padding = torch.cat([self.is_real(new.b), new.put(new.take(ones))], 1)
        self.length += new.s
        self._counted = new.s

    def is_real(self, b: int) -> torch.Tensor:
        """(b, length) of bool: all that came after the last padding is real."""
        old = torch.ones(b, 0, dtype=torch.bool, device=self.device) if self.padding is None else self.padding
        return torch.cat([old, old.new_ones(b, self.length - old.shape[1])], 1)

    def all_written(self) -> None:
        """Count a step of one token that a CUDA graph has written."""
        self.length += 1
        self._counted = 1
        self._written.update(self.layers)

    def _reserve(self, b: int, length: int, tokens: int) -> None:
        pages = -(-length // PAGE)
        cache = self._cache
        if cache is not None and b <= self._max_seqs and pages <= self._max_pages and tokens <= self._max_tokens:
            return
        most = self.options.max_length
        room = most if most and length <= most else length + max(length // 4, _GROWTH)
        self._max_seqs, self._max_pages, self._max_tokens = b, -(-room // PAGE), max(8192, tokens)
        made = PagedKVCache(
            self._formats(),
            num_pages=b * self._max_pages,
            page_size=PAGE,
            num_layers=len(self.layers),
            max_seqs=b,
            max_pages=self._max_pages,
            max_tokens=self._max_tokens,
            library="torch",
            device=str(self.device),
        )
        self.plans.clear()
        self._pages.clear()
        self._cache, old = made, cache
        if old is not None and self.sequences:
            self._move(old)

    def _formats(self) -> dict[str, str | CacheFormat]:
        found: dict[str, str | CacheFormat] = {"kv": self.options.kv_format}
        kind = str(self.dtype).removeprefix("torch.")
        if not self.is_quantised:
            found["kv"] = _rows(kind, self.sizes.key)
        if self.index_width:
            found["index"] = _rows(kind, self.index_width)
        return found

    def _move(self, old: PagedKVCache) -> None:
        """Copy the pages of all sequences to a larger cache."""
        new, places = self.cache, [old.pages(sequence) for sequence in self.sequences]
        self.sequences = [new.allocate()[0] for _ in places]
        left = list(self.counts)
        while any(left):
            part = [min(n, self._max_tokens // len(left)) for n in left]
            new.extend(self.sequences, part)
            left = [n - done for n, done in zip(left, part, strict=True)]
        target = torch.cat([new.pages(sequence) for sequence in self.sequences]).long().to(self.device)
        source = torch.cat(places).long().to(self.device)
        for pool in new.formats:
            for layer in range(len(self.layers)):
                new.layer(layer, pool)[target] = old.layer(layer, pool)[source]

    # ---- Tokens

    def write(self, layer: int, latent: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor) -> None:
        """Store tokens [n, ...] with rotated RoPE columns as the stock code returns them; they keep no gradient."""
        pages, latent, rope = self.pages(layer), latent.detach(), self._as_stored(rope.detach())
        if self.sizes.is_sparse:
            mla.cache_append(latent.contiguous(), rope.contiguous(), pages, slots, kv_format=self.kv_format)
        else:
            pages.view(-1, self.sizes.key)[slots.long()] = torch.cat([latent, rope], -1).to(pages.dtype)

    def write_index_keys(self, layer: int, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Store indexer keys [n, index_width]."""
        self.pages(layer, "index").view(-1, self.index_width)[slots.long()] = keys.detach().to(self.dtype)

    @property
    def kv_format(self) -> str | None:
        return self.options.kv_format if self.is_quantised else None

    def copy(self, layer: int, stock: Any, tokens: Ragged) -> None:
        """Store the contents of a stock layer; the first such layer makes room for all."""
        if not self.sequences:
            self.extend(tokens)
            self._count(tokens)
            self._written.update(self.layers)
        slots = self.slots(tokens.counts)
        self.write(layer, tokens.take(stock.keys[:, 0]), tokens.take(stock.values[:, 0]), slots)
        if self.index_width and stock.indexer_keys is not None:
            self.write_index_keys(layer, tokens.take(stock.indexer_keys), slots)

    def index_keys(self, layer: int) -> tuple[torch.Tensor, int]:
        """Indexer keys of all sequences, [b * stride, index_width], and the rows of a sequence."""
        pages = self._max_pages if _is_capturing() else -(-max(self.counts) // PAGE)
        found = self.pages(layer, "index")[self.step.block_table[:, :pages].long()]
        return found.view(-1, self.index_width), pages * PAGE

    def slots_at(self, positions: torch.Tensor, new: Ragged) -> torch.Tensor:
        """Slots of positions [n, topk] in the sequences of the step's tokens; -1 stays."""
        page = self.step.block_table[new.sequence.long()[:, None], positions.clamp(min=0).long() // PAGE]
        return torch.where(positions < 0, -1, page * PAGE + positions % PAGE)

    def slots(self, counts: Sequence[int]) -> torch.Tensor:
        """Slots of the first tokens of each sequence, one sequence after the other."""
        lists = [_slots_of(self.cache.pages(x).to(self.device), n) for x, n in zip(self.sequences, counts, strict=True)]
        return torch.cat(lists)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents and RoPE columns of tokens, as the stock code computes them."""
        pages = self.pages(layer)
        if self.is_quantised:
            rows = mla.cache_gather(pages, slots.to(torch.int32), out_dtype=self.dtype)
        else:
            rows = pages.view(-1, self.sizes.key)[slots]
        return rows[:, : self.sizes.latent], self._as_stock(rows[:, self.sizes.latent :])

    def _as_stored(self, rope: torch.Tensor) -> torch.Tensor:
        return rope.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) if self.halves else rope

    def _as_stock(self, rope: torch.Tensor) -> torch.Tensor:
        return rope.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.halves else rope

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Cached tokens [n, ...] at their places in the padded batch [b, length, ...]; padding is 0."""
        b = len(self.counts)
        mask = None if self.padding is None else self.is_real(b)
        return Ragged.of(mask, b, self.length, self.device).put(x)

    # ---- Sequences

    def crop(self, tokens: int) -> None:
        """Drop the last tokens of each row."""
        if self.padding is None:
            self.counts = [max(0, n - tokens) for n in self.counts]
        else:
            self.padding = self.is_real(len(self.counts))[:, : max(0, self.length - tokens)]
            self.counts = self.padding.sum(1).tolist()
        self.length = max(0, self.length - tokens)
        if self.sequences:
            self.cache.truncate(self.sequences, self.counts)
        self._step = None

    def select(self, rows: Sequence[int]) -> None:
        """Make the batch of these rows of it; a row that is named again shares its pages."""
        kept = sorted(set(rows))
        self.cache.free([x for i, x in enumerate(self.sequences) if i not in kept])
        self.sequences, self.counts = [self.sequences[i] for i in kept], [self.counts[i] for i in kept]
        self._reserve(len(rows), max(self.counts, default=0), 0)
        uses: dict[int, list[int]] = {}
        for i in kept:
            own = self.sequences[kept.index(i)]
            uses[i] = [own, *self.cache.fork(own, sum(row == i for row in rows) - 1)]
        self.counts = [self.counts[kept.index(i)] for i in rows]
        self.sequences = [uses[i].pop() for i in rows]
        if self.padding is not None:
            self.padding = self.padding[torch.tensor(list(rows), device=self.device)]
        self._step = None

    def reset(self) -> None:
        """Free all pages of the batch, and keep the memory."""
        if self.sequences:
            self.cache.free(self.sequences)
        self.sequences, self.counts, self.length, self.padding, self._step = [], [], 0, None, None


class LatentLayer(CacheLayerMixin):
    """One layer of a `LatentStore`, as transformers sees it."""

    is_sliding = False
    is_croppable = True

    def __init__(self, store: LatentStore, layer: int) -> None:
        super().__init__()
        self.store, self.layer = store, layer
        self.device, self.dtype = store.device, store.dtype
        self.is_initialized = self.is_indexer_initialized = True
        self.next_padding: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the store allocates."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store latents [b, 1, s, latent] and RoPE columns [b, 1, s, rope] for the stock code; returns all tokens'."""
        store, sizes = self.store, self.store.sizes
        if (key_states.shape[1], key_states.shape[-1]) != (1, sizes.latent):
            expected = f"latents, (b, 1, s, {sizes.latent})"
            remedy = "this version of transformers caches expanded keys: unpatch the model, and begin with a new cache"
            raise ArgumentError(explain("key_states.shape", tuple(key_states.shape), expected, remedy))
        b, _, s, _ = key_states.shape
        new = Ragged.of(self.next_padding, b, s, self.device)
        step = store.begin(self.layer, new)
        store.write(self.layer, new.take(key_states[:, 0]), new.take(value_states[:, 0]), step.slots)
        parts = store.read(self.layer, store.slots(store.counts))
        found = (store.spread(part)[:, None] for part in parts)
        if not (key_states.requires_grad or value_states.requires_grad):
            latent, rope = found
            return latent, rope
        news = (key_states, value_states)
        latent, rope = (torch.cat([x[:, :, :-s], new], 2) for x, new in zip(found, news, strict=True))
        return latent, rope

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store indexer keys [b, s, width] of the step that `update` began; returns the keys of all tokens."""
        store = self.store
        b, s, _ = indexer_key_states.shape
        new = Ragged.of(self.next_padding, b, s, self.device)
        store.write_index_keys(self.layer, new.take(indexer_key_states), store.step.slots)
        keys = store.pages(self.layer, "index").view(-1, store.index_width)[store.slots(store.counts)]
        return store.spread(keys)

    def get_seq_length(self) -> int:
        """Tokens, padding included; in a forward pass those before it, until the layer's turn."""
        return self.store.length_before(self.layer)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that a step of `query_length` queries sees, and 0."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit."""
        return -1

    @property
    def _is_first(self) -> bool:
        return self.layer == self.store.layers[0]

    def crop(self, tokens_to_remove: int) -> None:
        """Keep a positive number of tokens, or drop a negative one; the first layer does it for all."""
        if self._is_first:
            length, wanted = self.store.length, int(tokens_to_remove)
            kept = wanted if wanted > 0 else length + wanted
            self.store.crop(max(0, length - kept))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue with these rows of the batch."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Continue with these rows of the batch."""
        if self._is_first and self.store.counts:
            rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
            self.store.select([int(i) for i in rows.tolist()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch `repeats` times; the copies share pages."""
        if self._is_first and self.store.counts:
            self.store.select([i for i in range(len(self.store.counts)) for _ in range(repeats)])

    def reset(self) -> None:
        """Forget all tokens."""
        if self._is_first:
            self.store.reset()

    def offload(self) -> None:
        """Pages stay on the device."""

    def prefetch(self) -> None:
        """Pages stay on the device."""


def _rows(kind: str, width: int) -> CacheFormat:
    """Plain rows of a 16-bit dtype."""
    name = {("bfloat16", 576): "bf16", ("float16", 576): "fp16"}.get((kind, width))
    if name:
        return FORMATS[name]
    row = Field("row", kind, width, 0)  # type: ignore[arg-type]
    return CacheFormat(f"{kind}-{width}", "rows of a model in transformers", (2 * width,), (row,), d_qk=width)


def _is_capturing() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _slots_of(pages: torch.Tensor, count: int) -> torch.Tensor:
    places = torch.arange(PAGE, device=pages.device)
    return (pages.long()[:, None] * PAGE + places).flatten()[:count]
