"""Groups of arguments as pytrees of JAX: arrays are leaves, numbers and names are static."""

from __future__ import annotations

from functools import partial

from jax.tree_util import register_pytree_node

from mla_cupy.ops.groups import GROUPS, joined, leaves

for _kind in GROUPS:
    register_pytree_node(_kind, leaves, partial(joined, _kind))
