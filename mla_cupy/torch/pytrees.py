"""Groups of arguments as pytrees of PyTorch: tensors are leaves, numbers and names are part of the structure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.utils._pytree as pytree

from mla_cupy.ops.groups import GROUPS, Group, Structure, joined, leaves


def _register(kind: type[Group]) -> None:
    def unflatten(children: Iterable[Any], structure: Structure) -> Group:
        return joined(kind, structure, children)

    pytree.register_pytree_node(kind, leaves, unflatten, serialized_type_name=f"mla_cupy.{kind.__name__}")


for _kind in GROUPS:
    _register(_kind)
