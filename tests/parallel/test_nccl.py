"""The transport through NCCL, as far as it goes without: how ranks join."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from mla_cupy import arrays
from mla_cupy.parallel import LocalGroup, NcclTransport

UNIQUE = bytes(range(100, 228))


@pytest.mark.parametrize("kind", [bytes, tuple], ids=["cupy 14", "cupy 13"])
def test_the_identifier_in_the_form_of_this_cupy(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes since CuPy 14, signed numbers before; `get_unique_id` gives what the communicator takes."""
    own = UNIQUE if kind is bytes else tuple(x - 256 if x > 127 else x for x in UNIQUE)

    def communicator(world: int, unique: Any, rank: int) -> Any:
        if not isinstance(unique, kind):
            raise TypeError(f"expected {kind.__name__}")
        assert (world, unique, rank) == (1, own, 0)
        return SimpleNamespace(abort=None)

    nccl = SimpleNamespace(get_unique_id=lambda: own, NcclCommunicator=communicator)
    cupy = SimpleNamespace(
        nccl=lambda: nccl, current_device=lambda: 0, on_device=lambda device: contextlib.nullcontext()
    )
    monkeypatch.setattr(arrays, "cupy_family", lambda: cupy)
    assert NcclTransport(LocalGroup(1).member(0)).world == 1
