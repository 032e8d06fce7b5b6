"""The two halves of kv_b_proj that absorbed attention multiplies by."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mla_cupy.transformers.families import Sizes


class Halves:
    """W_UK and W_UV of one attention module: views of its weights, or of a copy where the weights are no plain matrix.

    The matrix of a quantised projection, or of one that an adapter changes, is obtained by multiplying it by the
    identity. The copy takes heads * (nope + v) * latent elements of 16 bits: 32 MiB a layer for 128 heads of 128 + 128.
    It is made again when a parameter of the projection changes.
    """

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._key: Any = None
        self._found: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, projection: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(heads, nope, latent) and (heads, v, latent)."""
        if is_plain(projection, dtype):
            key: Any = (id(projection.weight), projection.weight.data_ptr())
        else:
            key = _state_of(projection)
        if torch.is_grad_enabled() and any(p.requires_grad for p in projection.parameters()):
            return self._split(self._matrix(projection, dtype))
        if self._found is None or key != self._key:
            self._found, self._key = self._split(self._matrix(projection, dtype)), key
        return self._found

    def _matrix(self, projection: nn.Module, dtype: torch.dtype) -> torch.Tensor:
        if is_plain(projection, dtype):
            weight: torch.Tensor = projection.weight
            return weight
        device = next(projection.parameters()).device
        made: torch.Tensor = projection(torch.eye(self._sizes.latent, dtype=dtype, device=device)).T.contiguous()
        return made

    def _split(self, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = self._sizes
        w = matrix.view(-1, sizes.nope + sizes.v, sizes.latent)
        return w[:, : sizes.nope], w[:, sizes.nope :]


def is_plain(projection: nn.Module, dtype: torch.dtype) -> bool:
    """True if the projection is a plain matrix of this dtype; torchao's weights are a separate class."""
    if type(projection) is not nn.Linear or projection.bias is not None:
        return False
    weight = projection.weight
    return type(weight) in (nn.Parameter, torch.Tensor) and weight.dtype == dtype


def has_dropout(projection: nn.Module) -> bool:
    """True if an adapter of the projection drops inputs in training."""
    return projection.training and any(isinstance(m, nn.Dropout) and m.p > 0 for m in projection.modules())


def _state_of(projection: nn.Module) -> tuple[Any, ...]:
    """Describe all that the projection's result depends on."""
    versions = [(id(p), p.data_ptr(), p._version) for p in projection.parameters()]
    adapters = (getattr(projection, name, None) for name in ("active_adapters", "disable_adapters", "merged_adapters"))
    return (*versions, *map(str, adapters), str(getattr(projection, "scaling", None)))
