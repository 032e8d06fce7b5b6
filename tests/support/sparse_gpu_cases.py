"""The cases that the sparse forward and its backward both run on a GPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tests.support.sparse_cases import SparseCase, SparseInputs

DTYPES = ("bfloat16", "float16")
_SEQUENCES = ((5, 400), (0, 30), (3, 2), (1, 0), (9, 700), (1, 1))

_HEADS = [
    SparseCase(h_q=h_q, dtype=DTYPES[h_q % 2], d_qk=(576, 512)[h_q % 3 == 0], topk=150, sink=h_q % 4 == 0)
    for h_q in (1, 2, 5, 8, 16, 24, 32, 33, 48, 63, 64, 65, 96, 100, 128, 192)
]
_TOPK = [
    SparseCase(topk=topk, h_q=h_q, s_kv=700, dtype=DTYPES[topk % 2], lengths=topk % 3 == 0)
    for topk in (0, 1, 2, 63, 64, 65, 127, 128, 129, 192, 256, 257, 500, 1024, 1500)
    for h_q in (8, 64)
]
_MASKS = [
    SparseCase(s_q=30, h_q=h_q, topk=130, s_kv=s_kv, causal=causal, lengths=lengths, sink=lengths)
    for h_q in (16, 128)
    for s_kv in (20, 400)  # fewer rows than queries, and more
    for causal in (False, True)
    for lengths in (False, True)
]
_RAGGED = [
    SparseCase(s_q=21, s_kv=1200, h_q=h_q, topk=200, sequences=_SEQUENCES, causal=causal, sink=causal, lengths=causal)
    for h_q in (16, 64, 128)
    for causal in (False, True)
]
_SIZES = [
    SparseCase(s_q=1, s_kv=20_000, h_q=128, topk=9000, invalid=0.01),  # one query, over the whole GPU
    SparseCase(s_q=2, s_kv=20_000, h_q=16, topk=4000, sink=True),
    SparseCase(s_q=600, s_kv=900, h_q=16, topk=70, lengths=True),  # more queries than blocks
    SparseCase(s_q=600, s_kv=900, h_q=128, topk=64, sink=True),
    SparseCase(s_q=150, s_kv=900, h_q=5, topk=1100),  # and lists of many tiles
    SparseCase(s_q=40, s_kv=60_000, h_q=64, topk=700, sink=True),  # kv is walked in order
    SparseCase(s_q=40, s_kv=60_000, h_q=16, topk=700, d_qk=512, lengths=True),
    SparseCase(s_q=4, s_kv=3, h_q=16, topk=300, invalid=0.0),  # each row a hundred times
    SparseCase(s_q=1, s_kv=1, h_q=1, topk=1, invalid=0.0),
    SparseCase(s_kv=0, sink=True),
]
_LAYOUTS = [
    SparseCase(strides="dense", h_q=64),
    SparseCase(head_axis=True, h_q=64),
    SparseCase(head_axis=True, strides="dense", lengths=True, sequences=((3, 100), (4, 200))),
    SparseCase(invalid=1.0, h_q=64, sink=True),
    SparseCase(invalid=0.9, h_q=128, topk=300),
]
CASES = (*_HEADS, *_TOPK, *_MASKS, *_RAGGED, *_SIZES, *_LAYOUTS)
#: Which the fast kernels cannot take.
ODD_STRIDES = (
    SparseCase(strides="odd", h_q=16, lengths=True, sink=True),
    SparseCase(strides="odd", h_q=128, dtype="float16", d_qk=512, head_axis=True),
    SparseCase(strides="odd", s_q=21, s_kv=1200, h_q=5, sequences=_SEQUENCES, causal=True, lengths=True),
)


def without_heaviest(inputs: SparseInputs) -> npt.NDArray[np.int32]:
    """The indices without the row that weighs most for a head of the first query."""
    keys = inputs.kv[inputs.rows[0]].astype(np.float32)
    scores = inputs.q[0].astype(np.float32) @ keys.T
    heaviest = inputs.rows[0][np.argmax(scores.max(axis=0))]
    indices: npt.NDArray[np.int32] = inputs.indices.copy()
    indices[0, inputs.indices[0] == heaviest] = -1
    return indices
