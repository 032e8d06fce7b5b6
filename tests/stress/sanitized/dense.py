"""Dense attention with keys and values per head, forward and backward: ends anywhere in a tile, poison beyond them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import mla_cupy
from mla_cupy import reference
from mla_cupy.kernels.dense import DENSE, DENSE_BACKWARD
from tests.dense import test_backward_gpu as backward
from tests.dense import test_gpu as forward
from tests.dense.test_segments import ids_of
from tests.stress.sanitized import Call
from tests.support.dense_cases import DenseCase, make
from tests.support.dense_gradients import check_gradients, make_gradients
from tests.support.flat import flat
from tests.support.gpu import fetch, upload
from tests.support.tolerance import check

FEW = (
    DenseCase(
        ((1, 70), (65, 63), (2, 0), (0, 9), (3, 140)), h_q=4, h_kv=2, around=(3, 5), q_pair=True, state="float32"
    ),
    DenseCase(((70, 150),), d_qk=128, d_v=128, h_q=2, dtype="float16", causal=False, k_rope="per_head"),
)
#: Enough tiles for several per block.
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
    for relative in (False, True):
        yield Call(f"mask, relative={relative}", partial(mask, relative=relative))
    for of_keys in (False, True):
        yield Call(f"segments, of_keys={of_keys}", partial(segments, of_keys=of_keys))


def attend(case: DenseCase, **options: Any) -> None:
    """The public call against the oracle."""
    inputs = make(case)
    check(forward.run(inputs, **options), inputs.exact, inputs.rounded, "bfloat16" if case in CODED else case.dtype)


def differentiate(case: DenseCase, **options: Any) -> None:
    """Run the backward."""
    inputs = make_gradients(case, dlse=True)
    check_gradients(backward.run(inputs, **options), inputs)


def mask(*, relative: bool) -> None:
    """Indices that name no key, sequences without keys or queries."""
    indices = np.random.default_rng(5).integers(-(2**31), 2**31, (71, 33)).astype(np.int32)
    indices[::2] %= 230
    starts = {"cu_seqlens_q": np.array([0, 1, 1, 70], np.int32), "cu_seqlens_kv": np.array([3, 73, 136, 200], np.int32)}
    got = flat(mla_cupy.prefill_mask)(
        upload(indices), 130, relative=relative, **{n: upload(x) for n, x in starts.items()}
    )
    np.testing.assert_array_equal(fetch(got), reference.prefill_mask(indices, 130, relative=relative, **starts)[0])


def segments(*, of_keys: bool) -> None:
    """More of them than there is room for, padding between, ids that come again."""
    rng = np.random.default_rng(2)
    ids, others = (ids_of(rng.permutation(np.arange(-1, 80)), rng, count, 3) for count in (180, 160))
    given = {"segment_ids_kv": others} if of_keys else {}
    got = mla_cupy.prefill_segments(upload(ids), 20, **{name: upload(x) for name, x in given.items()})
    for x, wanted in zip(got, reference.prefill_segments(ids, 20, **given), strict=True):
        np.testing.assert_array_equal(fetch(x), wanted)
