"""The attention modules of one model, and the caches that they share."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from mla_cupy.transformers.cache import LatentLayer, LatentStore, Options
from mla_cupy.transformers.families import Family, Sizes
from mla_cupy.transformers.learning import Learning
from mla_cupy.transformers.ragged import Ragged

logger = logging.getLogger("mla_cupy.transformers")

#: Groups by the `id` of the configuration that a model's modules share; it is also compared, as `id` values recur.
_groups: dict[int, tuple[weakref.ref[Any], Group]] = {}


class Group:
    """The served attention modules of one model.

    Attributes
    ----------
    modules : dict
        layer_idx -> module.
    family : Family
    reference : bool
        Also serve tensors on the CPU, with the NumPy reference.
    sparse : bool
        Attend to the tokens that the indexers select.
    context : ProcessGroup, optional
        Ranks that divide the tokens of each row.
    learning : Learning, optional
        Collects the indexers' losses; gradient checkpointing needs it after the forward pass, too.
    """

    def __init__(self, family: Family, reference: bool) -> None:
        self.family, self.reference = family, reference
        self.sparse = family.indexer is not None
        self.context: Any = None
        self.learning: Learning | None = None
        self.modules: dict[int, nn.Module] = {}
        self._said: set[str] = set()

    @property
    def learns_now(self) -> Learning | None:
        """`learning` during its forward pass, and where a backward pass recomputes layers."""
        is_backward = torch._C._current_graph_task_id() != -1
        return self.learning if self.learning and (self.learning.is_open or is_backward) else None

    def register(self, config: Any) -> None:
        """Let modules with this configuration, and their masks, find the group."""
        _groups[id(config)] = (weakref.ref(config), self)

    def say(self, layer: int, reason: str) -> None:
        """Log once why calls are left to the stock code."""
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("mla_cupy: layer %s: %s; the stock code computes such calls", layer, reason)

    def problem_of(self, cache: Any, module: Any) -> str | None:
        """Say why a cache cannot hold latents for a module."""
        i = module.layer_idx
        if not hasattr(cache, "layers"):
            return f"a cache of type {type(cache).__name__}"
        if getattr(cache, "layer_class_to_replicate", None) is not None:
            cache.layers.extend(cache.layer_class_to_replicate() for _ in range(i + 1 - len(cache.layers)))
        layer = cache.layers[i]
        if isinstance(layer, LatentLayer):
            other = bool(layer.store.index_width) != self.sparse
            return "a cache with tokens of dense attention, or of sparse attention," if other else None
        if cache.offloading or type(layer) not in (DynamicLayer, DynamicIndexedLayer):
            return f"a cache of {type(layer).__name__}{', offloaded' if cache.offloading else ''}"
        if layer.get_seq_length() and (layer.keys.shape[1], layer.keys.shape[-1]) != (1, module.kv_lora_rank):
            return "a cache of expanded keys"
        return None

    def adopt(
        self, cache: Any, module: Any, rope: str, x: torch.Tensor, mask: torch.Tensor | None
    ) -> LatentLayer | str:
        """The cache's layer for a module, as latents in pages, or the reason why there is none.

        An empty layer is replaced; one in which the stock code has stored latents is copied first.
        """
        i = module.layer_idx
        layer = cache.layers[i]
        if isinstance(layer, LatentLayer):
            return layer
        stored = layer.get_seq_length()
        store = self._store(cache, module, rope, x)
        if stored != store.length_before(i) and store.counts:
            return f"a cache whose layers have {stored} and {store.length_before(i)} tokens"
        made = LatentLayer(store, i)
        if stored:
            padding = None if mask is None else mask[:, :stored]
            store.copy(i, layer, Ragged.of(padding, len(layer.keys), stored, x.device))
        cache.layers[i] = made
        return made

    def _store(self, cache: Any, module: Any, rope: str, x: torch.Tensor) -> LatentStore:
        stores: dict[torch.device, LatentStore] = cache.__dict__.setdefault("latent_stores", {})
        if x.device not in stores:
            sizes = Sizes.of(module)
            stores[x.device] = LatentStore(
                sizes,
                tuple(sorted(i for i, m in self.modules.items() if next(m.kv_b_proj.parameters()).device == x.device)),
                module.config.index_head_dim if self.sparse else 0,
                x.device,
                x.dtype,
                getattr(cache, "latent_options", Options()),
                rope == "interleaved" and sizes.is_fused,
            )
        return stores[x.device]


def group_of(config: Any) -> Group | None:
    """The served modules that share a configuration."""
    known = _groups.get(id(config))
    return known[1] if known and known[0]() is config else None


def forget(config: Any) -> None:
    """Serve no modules with this configuration."""
    _groups.pop(id(config), None)
