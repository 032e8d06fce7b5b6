"""The arrays of a cache as JAX's, which cannot be written: a step and a write make new ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache.memory import HostMemory, Layout, Tables
from mla_cupy.cache_formats import PAGE_ALIGNMENT
from mla_cupy.dtypes import numpy_dtype
from mla_cupy.errors import ArgumentError, DTypeError, ShapeError, explain

Array = npt.NDArray[Any]


class JaxMemory(HostMemory):
    """An array for each layer of a pool, and tables that are copied from the host after each step."""

    in_place = False

    def __init__(self, layout: Layout, device: Any) -> None:
        self._device = device
        super().__init__(layout)

    def _make_pools(self) -> Mapping[str, Any]:
        import jax

        layout = self._layout
        made = {}
        for name, record in layout.formats.items():
            page_bytes = record.page_bytes(layout.page_size)
            if page_bytes % PAGE_ALIGNMENT:
                got, expected = f"{layout.page_size}, pages of {page_bytes} bytes", f"a multiple of {PAGE_ALIGNMENT}"
                raise ArgumentError(explain("page_size", got, expected, f"pool {name!r} has no room between pages"))
            shape = (layout.num_pages, layout.page_size, record.width)
            zeros = np.zeros(shape, numpy_dtype(record.dtype))
            made[name] = [jax.device_put(zeros, self._device) for _ in range(layout.num_layers)]
        return made

    @property
    def tables(self) -> Tables:
        """See `Memory`."""
        return Tables(*map(self.lend, self._tables))

    def step(self, b: int, tokens: int) -> tuple[Any, Any, Any, Any]:
        """Copies, made by one call."""
        import jax

        made = jax.device_put([x.copy() for x in self._tables.of_step(b, tokens)], self._device)
        return made[0], made[1], made[2], made[3]

    def _copy_pages(self, pairs: Array) -> None:
        sources, targets = pairs.T
        targets = np.where(targets < 0, self._layout.num_pages, targets)  # JAX drops what is past the end alone
        for layers in self.pools.values():
            layers[:] = [_copier()(layer, self.lend(sources), self.lend(targets)) for layer in layers]

    def layer(self, pool: str, layer: int) -> Any:
        """See `Memory`."""
        return self.pools[pool][layer]

    def write(self, operation: str, arrays: Sequence[Any], pool: str, layer: int, *more: Any, **options: Any) -> None:
        """See `Memory`."""
        from mla_cupy import jax

        self.pools[pool][layer] = getattr(jax, operation)(*arrays, self.pools[pool][layer], *more, **options)

    def set_layer(self, pool: str, layer: int, pages: Any) -> None:
        """Replace a layer's pages."""
        known = self.pools[pool][layer]
        if tuple(pages.shape) != tuple(known.shape):
            raise ShapeError(explain("pages.shape", tuple(pages.shape), str(known.shape)))
        if pages.dtype != known.dtype:
            raise DTypeError(explain("pages.dtype", pages.dtype, str(known.dtype)))
        self.pools[pool][layer] = pages

    def lend(self, x: Array) -> Any:
        """A copy on the device: the host's array will change."""
        import jax

        return jax.device_put(x.copy(), self._device)


@functools.cache
def _copier() -> Callable[[Any, Any, Any], Any]:
    import jax

    def copied(pages: Any, sources: Any, targets: Any) -> Any:
        return pages.at[targets].set(pages[sources], mode="drop")

    return jax.jit(copied, donate_argnums=0)  # type: ignore[no-any-return]


def default_place() -> int | str:
    """The CUDA ordinal of JAX's default device, or "cpu"."""
    import jax

    first = jax.devices()[0]
    return "cpu" if first.platform == "cpu" else int(first.local_hardware_id or 0)


def device_at(place: int | str) -> Any:
    """The device of JAX with this CUDA ordinal, or its CPU."""
    import jax

    if place == "cpu":
        return jax.devices("cpu")[0]
    try:
        found = jax.devices("gpu")
    except RuntimeError as error:
        raise ArgumentError(explain("device", place, "a device of JAX", f"'cpu': {error}")) from error
    if int(place) >= len(found):
        raise ArgumentError(explain("device", place, f"0 to {len(found) - 1}, JAX's GPUs"))
    return found[int(place)]
