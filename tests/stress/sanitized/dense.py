"""Dense attention with keys and values per head, forward and backward: ends anywhere in a tile, poison beyond them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from mla_cupy.kernels.dense import DENSE, DENSE_BACKWARD
from tests.dense import test_backward_gpu as backward
from tests.dense import test_gpu as forward
from tests.stress.sanitized import Call
from tests.support.dense_cases import DenseCase, make
from tests.support.dense_gradients import check_gradients, make_gradients
from tests.support.tolerance import check

FEW = (
    DenseCase(
        ((1, 70), (65, 63), (2, 0), (0, 9), (3, 140)), h_q=4, h_kv=2, around=(3, 5), q_pair=True, state="float32"
    ),
    DenseCase(((70, 150),), d_qk=128, d_v=128, h_q=2, dtype="float16", causal=False, k_rope="per_head"),
)
#: So many tiles that a block has several.
MANY = (DenseCase(((130, 130), (90, 200)) * 8, h_q=10, h_kv=5),)
#: e4m3 codes, which have kernels of their own.
CODED = (
    DenseCase(((1, 70), (65, 63), (2, 0), (0, 9), (3, 140)), h_q=4, h_kv=2, around=(3, 5), dtype="uint8", scales="qkv"),
    DenseCase(((130, 130), (90, 200)) * 8, h_q=10, h_kv=5, dtype="float8_e4m3fn"),
)
WIDE = DenseCase(((20, 90),), d_qk=256, d_v=256, k_rope="within")


def calls() -> Iterator[Call]:
    """Every kernel; the backward in both forms."""
    for case in (*FEW, WIDE, *MANY, *CODED):
        for kernel in DENSE.kernels:
            if kernel.name.endswith("_fp8") == (case in CODED):
                short = case not in (*MANY, CODED[-1])
                yield Call(f"{kernel.name} {case.id}", partial(attend, case, kernel=kernel.name), short)
    for case in (*FEW, *MANY):
        for main in DENSE_BACKWARD.kernels:
            for deterministic in (False, True):
                run = partial(differentiate, case, kernel=main.name, deterministic=deterministic)
                name = f"{main.name} {case.id}{' deterministic' if deterministic else ''}"
                yield Call(name, run, case not in MANY)


def attend(case: DenseCase, **options: Any) -> None:
    """The public call against the oracle."""
    inputs = make(case)
    check(forward.run(inputs, **options), inputs.exact, inputs.rounded, "bfloat16" if case in CODED else case.dtype)


def differentiate(case: DenseCase, **options: Any) -> None:
    """The same backward."""
    inputs = make_gradients(case, dlse=True)
    check_gradients(backward.run(inputs, **options), inputs)
