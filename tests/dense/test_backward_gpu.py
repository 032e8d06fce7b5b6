"""The backward of dense attention on a GPU against the oracle, on hostile inputs: poisoned, ragged, non-contiguous."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.kernels.dense import DENSE_BACKWARD
from mla_cupy.kernels.dense.problem import DenseBackwardProblem
from mla_cupy.runtime.device import DeviceInfo
from tests.dense.backward_runs import KERNELS
from tests.support.dense_cases import DenseCase, make
from tests.support.dense_gradients import NAMES, GradientInputs, check_gradients, make_gradients
from tests.support.flat import flat
from tests.support.gpu import upload

pytestmark = pytest.mark.gpu

RAGGED = ((1, 200), (63, 63), (65, 10), (2, 0), (0, 9), (129, 128), (100, 213), (128, 127))
CASES: list[tuple[DenseCase, dict[str, Any]]] = [
    (DenseCase(((1, 1),), starts=False), {}),
    (DenseCase(((400, 400),), h_q=2, starts=False), {"dlse": True}),
    (DenseCase(RAGGED, h_q=5, around=(3, 70)), {"out_dtype": "float32"}),
    (DenseCase(RAGGED, h_q=16, h_kv=4, dtype="float16", q_pair=True, k_rope="per_head"), {"dlse": True}),
    (DenseCase(((130, 500),), h_q=2, causal=False, state="bfloat16"), {}),
    (DenseCase(((100, 500),), h_q=4, h_kv=1, scale=0.2), {}),  # one KV head: its last columns are nobody else's
    (DenseCase(((300, 30),), h_q=2), {}),  # most queries see nothing
    (DenseCase(((200, 300),), h_q=4, h_kv=2, d_qk=128, d_v=128, k_rope="within", dtype="float16"), {}),
    (DenseCase(((100, 170),), h_q=3, d_qk=128, d_v=128, state="bfloat16"), {"dlse": True}),
    (DenseCase(tuple((n % 5, n % 9) for n in range(300)), h_q=2, around=(1, 1)), {}),  # many sequences, some empty
    (DenseCase(((40, 64),), h_q=128), {}),
]
WIDE: list[tuple[DenseCase, dict[str, Any]]] = [
    (DenseCase(((3, 40), (65, 10)), h_q=3, d_qk=256, d_v=256, state="float32"), {"out_dtype": "float32"}),
]


def run(inputs: GradientInputs, **options: Any) -> tuple[Any, ...]:
    """The public call's results on the host."""
    import cupy

    given = {name: upload(x) if isinstance(x, np.ndarray) else x for name, x in inputs.options.items()}
    found = flat(mla_cupy.mla_prefill_backward)(*map(upload, inputs.arguments), **given, **options)
    return tuple(None if x is None else cupy.asnumpy(x) for x in found)


def need(kernel: str, gpu: DeviceInfo, d_v: int = 128) -> None:
    """Skip what the GPU does not run."""
    spec = next(spec for spec in DENSE_BACKWARD.kernels if spec.name == kernel)
    if reason := spec.unsupported(DenseBackwardProblem(1, 1, 1, 1, d_v + 64, d_v, "bfloat16"), gpu):
        pytest.skip(str(reason))


@pytest.mark.parametrize(("case", "made"), CASES + WIDE, ids=lambda x: x.id[:80] if isinstance(x, DenseCase) else "")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_matches_oracle(
    gpu: DeviceInfo, case: DenseCase, made: dict[str, Any], kernel: str, deterministic: bool
) -> None:
    if case.d_v > 128 and kernel != KERNELS[-1]:
        pytest.skip("the plain kernel alone is that wide")
    need(kernel, gpu)
    inputs = make_gradients(case, **made)
    check_gradients(run(inputs, kernel=kernel, deterministic=deterministic), inputs)


@pytest.mark.parametrize("kernel", KERNELS)
def test_same_bits_each_time(gpu: DeviceInfo, kernel: str) -> None:
    """The assignment of tiles to blocks does not affect a deterministic call."""
    need(kernel, gpu)
    inputs = make_gradients(DenseCase(RAGGED * 4, h_q=16), dlse=True)
    first = run(inputs, kernel=kernel, deterministic=True)
    for _ in range(20):
        for name, got, wanted in zip(NAMES, run(inputs, kernel=kernel, deterministic=True), first, strict=True):
            if wanted is not None:
                np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8), name)


@pytest.mark.parametrize("deterministic", [False, True])
def test_agrees_with_the_plain_kernel(gpu: DeviceInfo, deterministic: bool) -> None:
    """Sequences as in a model, for which the oracle would take minutes."""
    need(KERNELS[0], gpu)
    inputs = make_gradients_on_gpu(((1500, 1500), (300, 1000)), heads=16)
    fast = flat(mla_cupy.mla_prefill_backward)(**inputs, kernel=KERNELS[0], deterministic=deterministic)
    plain = flat(mla_cupy.mla_prefill_backward)(**inputs, kernel=KERNELS[-1])
    for name, got, wanted in zip(NAMES, fast, plain, strict=True):
        if wanted is not None:
            x, y = got.astype(np.float32), wanted.astype(np.float32)
            assert float(abs(x - y).max()) < 0.02 * float(abs(y).max()), name
            assert float(((x - y) ** 2).sum() ** 0.5) < 6e-3 * float((y**2).sum() ** 0.5), name


def make_gradients_on_gpu(sequences: tuple[tuple[int, int], ...], heads: int) -> dict[str, Any]:
    """Arrays whose forward the GPU computes."""
    inputs = upload_forward(DenseCase(sequences, h_q=heads))
    out, lse = flat(mla_cupy.mla_prefill)(**inputs)
    dout = upload(np.random.default_rng(1).standard_normal(out.shape, np.float32).astype(out.dtype))
    return {**inputs, "out": out, "dout": dout, "lse": lse}


def upload_forward(case: DenseCase) -> dict[str, Any]:
    made = make(case)
    arrays = {"q": made.q, "k": made.k, "v": made.v, **made.options}
    return {name: upload(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}


@pytest.mark.parametrize("deterministic", [False, True])
def test_graph(gpu: DeviceInfo, deterministic: bool) -> None:
    """A captured call reads the starts when it is replayed, and begins its sums anew."""
    import cupy

    inputs = make_gradients(DenseCase(((40, 70), (60, 130)), h_q=2))
    given = {name: upload(x) if isinstance(x, np.ndarray) else x for name, x in inputs.options.items()}
    arrays = dict(zip(("q", "k", "v", "out", "dout", "lse"), map(upload, inputs.arguments), strict=True)) | given
    made = flat(mla_cupy.mla_prefill_backward)(**arrays, deterministic=deterministic)
    results = {name: cupy.empty_like(x) for name, x in zip(NAMES, made, strict=True) if x is not None}
    workspace = cupy.empty(1 << 22, np.uint8)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        options = {**arrays, **results, "workspace": workspace, "deterministic": deterministic}
        flat(mla_cupy.mla_prefill_backward)(**options)
        stream.begin_capture()
        flat(mla_cupy.mla_prefill_backward)(**options)
        graph = stream.end_capture()
        for ends in ([0, 40, 100], [0, 10, 100], [0, 40, 100]):
            given["cu_seqlens_q"][:] = cupy.asarray(ends, np.int32)
            graph.launch(stream)
        stream.synchronize()
    check_gradients(tuple(results[name].get() if name in results else None for name in NAMES), inputs)
