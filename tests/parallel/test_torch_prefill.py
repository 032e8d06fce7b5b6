"""Context-parallel prefill of PyTorch tensors: ranks of a gloo group agree with one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mla_cupy.parallel import Zigzag
from tests.parallel import training
from tests.parallel.ranks import on_all_ranks
from tests.parallel.training import Sequences

_TOLERANCE = {"out": 4e-3, "lse": 1e-5}
_OF_GRADIENTS = 8e-3


@pytest.mark.parametrize(
    ("world", "lengths", "chunk_tokens"),
    [(2, (40,), 12), (4, (64, 24), 16), (4, (37, 2, 0, 19), 16)],
)
def test_ranks_agree_with_one_process(world: int, lengths: tuple[int, ...], chunk_tokens: int) -> None:
    """Of one sequence, of several, and of lengths that no rank count divides."""
    given = Sequences(lengths)
    ranks = on_all_ranks(world, training.on_rank, given, world, chunk_tokens)
    assert not any(isinstance(x, str) for x in ranks), ranks
    expected, found = training.in_one(given), training.joined(ranks, Zigzag(lengths, world))
    for name, x in expected.items():
        assert training.error(found[name], x) < _TOLERANCE.get(name, _OF_GRADIENTS), name
