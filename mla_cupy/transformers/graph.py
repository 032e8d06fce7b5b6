"""A whole decode step of a model as one CUDA graph."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.transformers.cache import PAGE, LatentCache, LatentLayer, LatentStore
from mla_cupy.transformers.ragged import Ragged


class StepGraph:
    """One decode step of a patched model, one token a sequence, captured once and replayed.

    With few sequences a step takes as long as the host takes to launch it; a replay is one launch.

    Parameters
    ----------
    model : PreTrainedModel
        Patched, on one GPU, in eval mode. What the stock code does around attention must be capturable: load a
        mixture-of-experts model with `experts_implementation="grouped_mm"`.
    cache : LatentCache
        With `max_length`, filled by a prefill.

    Raises
    ------
    ArgumentError
        If the cache does not fit.

    Notes
    -----
    The first call runs eagerly, the second captures. Logits are overwritten by the next call.

    Examples
    --------
    >>> cache = LatentCache(model.config, max_length=4096)  # doctest: +SKIP
    >>> logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits  # doctest: +SKIP
    >>> step = StepGraph(model, cache)  # doctest: +SKIP
    >>> logits = step(logits[:, -1:].argmax(-1))  # doctest: +SKIP
    """

    def __init__(self, model: Any, cache: LatentCache) -> None:
        layers = cache.layers
        if not (layers and all(isinstance(layer, LatentLayer) and layer.get_seq_length() for layer in layers)):
            remedy = "call the patched model with the prompt first; models with other layers cannot be captured"
            raise ArgumentError(explain("cache", "layers that are not latent, or empty", "latents of a prompt", remedy))
        if cache.latent_options.max_length is None:
            raise ArgumentError(
                explain("cache", "max_length=None", "a LatentCache with max_length", "it must not grow")
            )
        self._model, self._cache, self._argument = model, cache, cache_argument(model)
        self._stores: tuple[LatentStore, ...] = tuple(cache.latent_stores.values())
        store = self._stores[0]
        self._new = Ragged.of(None, len(store.counts), 1, store.device)
        self._ids, self._positions = (
            torch.zeros(len(store.counts), 1, dtype=torch.int64, device=store.device) for _ in range(2)
        )
        self._graph: Any = None
        self._logits: torch.Tensor | None = None
        self._warm = False

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [b, 1, vocabulary] of the next tokens [b, 1]; positions default to each row's number of tokens."""
        store = self._stores[0]
        if max(store.counts) >= (self._cache.latent_options.max_length or 0):
            got, remedy = f"{max(store.counts)} tokens", "make the LatentCache with a larger max_length"
            raise ArgumentError(explain("cache", got, f"less than max_length, in pages of {PAGE}", remedy))
        self._ids.copy_(input_ids)
        self._positions.copy_(torch.tensor(store.counts)[:, None] if position_ids is None else position_ids)
        for each in self._stores:
            each.extend(self._new)
        if self._graph is not None:
            self._graph.replay()
            for each in self._stores:
                each.all_written()
        elif self._warm:
            self._capture()
        else:
            self._logits, self._warm = self._step(), True
        assert self._logits is not None
        return self._logits

    def _step(self) -> torch.Tensor:
        call = {"input_ids": self._ids, "position_ids": self._positions, self._argument: self._cache}
        with torch.no_grad():
            found: torch.Tensor = self._model(**call, use_cache=True).logits
        return found

    def _capture(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self._step()
        self._graph.replay()


def cache_argument(model: Any) -> str:
    """The name of a model's cache, which newer versions of transformers have shortened."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
