"""A whole decode step of a model as one CUDA graph."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.transformers.cache import LatentCache, LatentLayer, LatentStore
from mla_cupy.transformers.group import group_of
from mla_cupy.transformers.ragged import Ragged


class StepGraph:
    """Calls of a patched model with decode steps, of one token per sequence, replayed from one CUDA graph.

    With few sequences a step is bound by the host's launches; a replay is a single launch.

    Parameters
    ----------
    model : PreTrainedModel
        A patched model in eval mode, on one GPU; on a CPU all calls run eagerly. The stock code around attention must
        be capturable, as transformers' default experts are.
    cache : LatentCache
        A cache with `max_length`; it may already hold tokens.

    Raises
    ------
    ArgumentError
        If the cache may grow, or is full, or one of its layers does not hold latents.

    Notes
    -----
    Prompts, and the first single token, run eagerly; the second single token is captured. The logits of a replay are
    overwritten by the next one. After `crop`, `reorder_cache` or `reset` of the cache the graph stays valid for a batch
    of the same size.

    Examples
    --------
    >>> step = StepGraph(model, LatentCache(model.config, max_length=4096))  # doctest: +SKIP
    >>> token = step(prompt)[:, -1:].argmax(-1)  # doctest: +SKIP
    >>> token = step(token).argmax(-1)  # doctest: +SKIP
    """

    def __init__(self, model: Any, cache: LatentCache) -> None:
        if group_of(getattr(model, "config", None)) is None and group_of(_text_config(model)) is None:
            raise ArgumentError(explain("model", type(model).__name__, "a patched model", "call patch(model) first"))
        if not isinstance(cache, LatentCache):
            raise ArgumentError(explain("cache", type(cache).__name__, "a LatentCache with max_length"))
        if cache.latent_options.max_length is None:
            raise ArgumentError(
                explain("cache", "max_length=None", "a LatentCache with max_length", "it must not grow")
            )
        self._model, self._cache, self._argument = model, cache, cache_argument(model)
        self._graph: Any = None
        self._warm = 0  # sequences of the single tokens that have run
        self._ids = self._positions = self._logits = torch.empty(0)

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [b, s, vocabulary] of tokens [b, s].

        A prompt may have a padding mask. The position of a single token defaults to its row's number of real tokens.
        """
        b, s = input_ids.shape
        if s != 1 or not input_ids.is_cuda or self._warm != b:
            self._warm, self._graph = b if s == 1 else 0, None if self._warm not in (0, b) else self._graph
            if s == 1 and position_ids is None and self._cache.get_seq_length():
                position_ids = self._next_positions().to(input_ids.device)
            return self._run(input_ids, position_ids, attention_mask)
        self._prepare(input_ids, position_ids)
        if self._graph is None:
            self._capture()
        else:
            self._graph.replay()
            for store in self._stores:
                store.all_written()
        return self._logits

    def _run(self, ids: torch.Tensor, positions: torch.Tensor | None, mask: torch.Tensor | None = None) -> torch.Tensor:
        call = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, self._argument: self._cache}
        with torch.no_grad():
            found: torch.Tensor = self._model(**call, use_cache=True).logits
        return found

    def _prepare(self, ids: torch.Tensor, positions: torch.Tensor | None) -> None:
        counts = self._stores[0].counts
        following = self._next_positions()
        if self._graph is None:
            self._ids = torch.zeros_like(ids)
            self._positions = torch.zeros(ids.shape, dtype=torch.int64, device=ids.device)
        self._ids.copy_(ids)
        self._positions.copy_(following if positions is None else positions)
        for store in self._stores:
            store.extend(Ragged.of(None, len(counts), 1, store.device))

    def _next_positions(self) -> torch.Tensor:
        """The positions of the next tokens, for which there must be room."""
        counts = self._stores[0].counts
        if max(counts) >= (self._cache.latent_options.max_length or 0):
            remedy = "make the LatentCache with a larger max_length"
            raise ArgumentError(explain("cache", f"{max(counts)} tokens", "less than max_length", remedy))
        return torch.tensor(counts)[:, None]

    def _capture(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self._run(self._ids, self._positions)
        self._graph.replay()

    @property
    def _stores(self) -> tuple[LatentStore, ...]:
        if not all(isinstance(layer, LatentLayer) for layer in self._cache.layers):
            got = ", ".join(sorted({type(layer).__name__ for layer in self._cache.layers}))
            raise ArgumentError(explain("cache", f"layers of {got}", "latents in all layers", "call the model itself"))
        return tuple(self._cache.latent_stores.values())


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None


def cache_argument(model: Any) -> str:
    """Name of a model's cache argument, which newer versions of transformers shortened."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
