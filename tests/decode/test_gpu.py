"""Dense decode on a GPU against the oracle, on hostile inputs: poisoned, ragged, non-contiguous."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.support.cases import DecodeCase
from tests.support.gpu import run_and_check
from tests.support.kernels import DECODE_KERNELS, on_hopper, takes

pytestmark = pytest.mark.gpu

HOPPER = on_hopper(DECODE_KERNELS)
GENERIC = "attention_generic"
DTYPES = ("bfloat16", "float16")

#: 1 to 20 blocks of 64 tokens, one less and one more; and nothing.
BLOCK_EDGES = (0, *(64 * blocks + off for blocks in range(1, 21) for off in (-1, 0, 1)))

EDGES = [DecodeCase(b=len(BLOCK_EDGES), seqlens=BLOCK_EDGES, h_q=h_q, dtype=d) for d in DTYPES for h_q in (16, 128)]
HEADS = [
    DecodeCase(s_q=s_q, h_q=h_q, dtype=DTYPES[(s_q + h_q) % 2], seqlens="ragged-400")
    for s_q in (1, 2, 3, 4)
    for h_q in (1, 5, 8, 16, 32, 64, 96, 128, 192)
]
PAGES = [
    DecodeCase(page_size=page_size, s_q=1 + page_size % 3, dtype=dtype, b=5, seqlens="ragged-500")
    for page_size in (1, 2, 16, 24, 32, 64, 65, 128, 192)
    for dtype in DTYPES
]
LONG = [
    DecodeCase(b=1, h_q=128, seqlens=9000),  # one request, split over the whole GPU
    DecodeCase(b=1, h_q=16, seqlens=20000),
    DecodeCase(b=1, s_q=2, h_q=64, seqlens=8192, dtype="float16"),
    DecodeCase(b=7, h_q=128, seqlens=(5000, 1, 0, 700, 64, 3000, 2)),  # some split, some whole
    DecodeCase(b=300, h_q=8, seqlens="ragged-200"),  # more requests than parts
]
ODD = [
    DecodeCase(causal=False, s_q=3, seqlens="ragged-200"),
    DecodeCase(s_q=4, seqlens=(1, 2, 3, 4, 5, 66, 130), b=7),  # queries that see nothing
    DecodeCase(s_q=70, h_q=2, seqlens=(70, 200, 131)),  # the causal edge spans several blocks of rows and tokens
    DecodeCase(missing_pages=2, page_size=16, b=4, seqlens="ragged-300"),
    DecodeCase(missing_pages=1, page_size=128, b=4, seqlens="ragged-600"),
    DecodeCase(head_axis=False),
    DecodeCase(strides="dense"),
    DecodeCase(b=1, seqlens=0),
]


SHARDS = [
    DecodeCase(b=7, seqlens=(8191, 8192, 8193, 3, 0, 1, 700), s_q=4, h_q=h_q, cp_world=world, cp_rank=rank)
    for h_q, world, rank in ((16, 2, 1), (32, 3, 0), (128, 8, 7), (16, 5, 2))
]
NOPE = [replace(case, d_qk=512) for case in (EDGES[1], *HEADS[::5], *PAGES[::3], *LONG, *ODD)]
PAIRS = [
    pytest.param(kernel, case, id=f"{kernel}-{case.id}")
    for kernel, case in itertools.product(HOPPER, [*EDGES, *HEADS, *PAGES, *LONG, *ODD, *NOPE, *SHARDS])
    if takes(kernel, case)
]


@pytest.mark.parametrize(("kernel", "case"), PAIRS)
def test_hopper_kernels_match_oracle(hopper: object, case: DecodeCase, kernel: str) -> None:
    run_and_check(case, kernel=kernel)


@pytest.mark.parametrize(
    "case",
    [
        *EDGES[::3],
        *HEADS[::7],
        *PAGES,
        *LONG,
        *ODD,
        *NOPE[::3],
        *SHARDS,
        replace(ODD[0], strides="odd"),
        DecodeCase(strides="odd"),
    ],
    ids=lambda case: case.id,
)
def test_generic_matches_oracle(gpu: object, case: DecodeCase) -> None:
    run_and_check(case, kernel=GENERIC)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_that_tma_cannot_take_fall_back(gpu: object, dtype: str) -> None:
    run_and_check(DecodeCase(strides="odd", dtype=dtype, s_q=2))
