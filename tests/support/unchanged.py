"""Which kernels are as they were when all of their builds were made: an ordinary run has less of their tests.

Such a kernel shows what it showed then, unless the host's side or the simulator has changed. All kernels have these in
common, so that some of them stand for all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from mla_cupy.kernels import KERNELS
from tests.budgets import builds


def kernel(name: str) -> bool:
    """Whether this kernel is."""
    return name in KERNELS and builds.fingerprint(name) == builds.verified().get(name)


@functools.cache
def source(file: str) -> bool:
    """Whether all kernels of a source are."""
    return _all(name for name, spec in KERNELS.items() if spec.source == file)


@functools.cache
def family(folder: str) -> bool:
    """Whether all kernels of a family are; those of what families share are of every family."""
    own = [name for name in KERNELS if name.startswith(f"{folder}_")]
    return bool(own) and _all([*own, *(name for name in KERNELS if name.startswith("attention_"))])


def _all(names: Iterable[str]) -> bool:
    return all(map(kernel, names))
