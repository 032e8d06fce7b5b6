"""Dense attention on a GPU against the oracle, on hostile inputs: poisoned, ragged, non-contiguous."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.kernels.dense.problem import DenseProblem
from mla_cupy.runtime.device import DeviceInfo
from tests.dense.runs import BY_NAME, GENERIC, GENERIC_FP8, HOPPER, HOPPER_FP8, KERNELS, MMA
from tests.support.dense_cases import DenseCase, DenseInputs, make
from tests.support.flat import flat
from tests.support.gpu import upload
from tests.support.kernels import in_both_sizes
from tests.support.tolerance import check

pytestmark = pytest.mark.gpu

TENSOR_CORES = in_both_sizes((HOPPER, MMA))
RAGGED = ((1, 700), (63, 63), (65, 10), (2, 0), (0, 9), (129, 128), (200, 513), (128, 127))
CASES = [
    DenseCase(((1, 1),), starts=False),
    DenseCase(((1000, 1000),), h_q=2, starts=False),
    DenseCase(RAGGED, h_q=5, around=(3, 70)),
    DenseCase(RAGGED, h_q=16, h_kv=4, dtype="float16", q_pair=True, k_rope="per_head", state="float32"),
    DenseCase(((300, 1500),), h_q=2, causal=False, state="bfloat16"),
    DenseCase(((200, 1500),), h_q=2, scale=1.0),  # maxima that rise
    DenseCase(((600, 30),), h_q=2),  # most queries see nothing
    DenseCase(RAGGED, h_q=3, d_qk=256, d_v=256, state="float32"),
    DenseCase(((500, 777),), h_q=2, d_qk=256, d_v=256, dtype="float16", k_rope="within", causal=False, q_pair=True),
    DenseCase(RAGGED, h_q=4, h_kv=2, d_qk=128, d_v=128, k_rope="within", dtype="float16"),
    DenseCase(((700, 900),), h_q=3, d_qk=128, d_v=128, state="bfloat16"),
    DenseCase(tuple((n % 5, n % 9) for n in range(500)), h_q=2, around=(1, 1)),  # many sequences, some empty
    DenseCase(((40, 64),), h_q=128),
    DenseCase(RAGGED, h_q=5, around=(3, 70), mask=0.3),
    DenseCase(RAGGED, h_q=4, h_kv=2, d_qk=256, d_v=256, dtype="float16", q_pair=True, state="float32", mask=0.6),
    DenseCase(RAGGED, h_q=3, d_qk=128, d_v=128, k_rope="within", causal=False, mask=0.02),
    DenseCase(((300, 1500),), h_q=2, k_rope="per_head", scale=1.0, state="bfloat16", mask=0.9),
]


F8 = "float8_e4m3fn"
CODED = [
    DenseCase(((1, 1),), starts=False, dtype="uint8"),
    DenseCase(((1000, 1000),), h_q=2, starts=False, dtype=F8, scales="qkv"),
    DenseCase(RAGGED, h_q=5, around=(3, 70), dtype=F8, scales="kv"),
    DenseCase(RAGGED, h_q=16, h_kv=4, dtype="uint8", q_pair=True, k_rope="per_head", scales="qkv"),
    DenseCase(((300, 1500),), h_q=2, causal=False, dtype=F8, k_rope="within"),
    DenseCase(((200, 1500),), h_q=2, scale=1.0, dtype=F8),  # maxima that rise
    DenseCase(((200, 1500),), h_q=2, scale=40.0, dtype=F8),  # by more than 2^64
    DenseCase(((600, 30),), h_q=2, dtype=F8),  # most queries see nothing
    DenseCase(tuple((n % 5, n % 9) for n in range(500)), h_q=2, around=(1, 1), dtype=F8, scales="qkv"),
]


def on_gpu(inputs: DenseInputs) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the public call."""
    options = {name: upload(x) if isinstance(x, np.ndarray) else x for name, x in inputs.options.items()}
    return [upload(x) for x in inputs.arguments], options


def run(inputs: DenseInputs, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """The public call's results on the host."""
    import cupy

    arguments, given = on_gpu(inputs)
    out, lse = flat(mla_cupy.mla_prefill)(*arguments, **given, **options)
    return cupy.asnumpy(out), cupy.asnumpy(lse)


def need(kernel: str, gpu: DeviceInfo, d_v: int = 128, dtype: str = "bfloat16") -> None:
    """Skip what the GPU, or the kernel, does not run."""
    if reason := BY_NAME[kernel].unsupported(DenseProblem(1, 1, 1, 1, 192, d_v, dtype), gpu):
        pytest.skip(str(reason))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.id[:60]}_{case.id[-24:]}")
@pytest.mark.parametrize("kernel", in_both_sizes(KERNELS))
def test_matches_oracle(gpu: DeviceInfo, case: DenseCase, kernel: str) -> None:
    need(kernel, gpu, case.d_v)
    inputs = make(case)
    check(run(inputs, kernel=kernel), inputs.exact, inputs.rounded, case.dtype)


@pytest.mark.parametrize("factor", [40.0, 1000.0])
@pytest.mark.parametrize(("d_qk", "d_v"), [(192, 128), (256, 256), (128, 128)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tiles_far_above_those_before(gpu: DeviceInfo, factor: float, d_qk: int, d_v: int, dtype: str) -> None:
    """Tiles that do not look for maxima, with weights that are large, and infinite."""
    need(HOPPER, gpu)
    inputs = make(DenseCase(((300, 2000), (40, 700)), h_q=4, d_qk=d_qk, d_v=d_v, dtype=dtype))
    for first in (5, 400, 1200, 2100):
        inputs.k[first : first + 20, :, :8] *= inputs.k.dtype.type(factor * 1.5 ** (-first / 400))
    check(run(inputs, kernel=HOPPER), inputs.exact, inputs.rounded, dtype)


@pytest.mark.parametrize("case", CODED, ids=lambda case: f"{case.id[:60]}_{case.id[-24:]}")
@pytest.mark.parametrize("kernel", [HOPPER_FP8, GENERIC_FP8])
def test_codes_match_the_oracle(gpu: DeviceInfo, case: DenseCase, kernel: str) -> None:
    need(kernel, gpu, dtype=F8)
    inputs = make(case)
    check(run(inputs, kernel=kernel), inputs.exact, inputs.rounded, "bfloat16")


def test_sums_of_codes_do_not_shrink(gpu: DeviceInfo) -> None:
    """Values of mean 1 keep their size, to what the plain kernel finds; and each run has the same bits."""
    need(HOPPER_FP8, gpu, dtype=F8)
    inputs = make(DenseCase(((3000, 8192), (1000, 3000)), h_q=8, dtype=F8, scales="qk", mean=1.0))
    out, lse = run(inputs, kernel=HOPPER_FP8, out_dtype="float32")
    plain, plain_lse = run(inputs, kernel=GENERIC_FP8, out_dtype="float32")
    # Each of the six products of a score loses up to 2^-13 of its sum.
    np.testing.assert_allclose(lse, plain_lse, rtol=6 * 2**-13)
    assert abs((out - plain).mean() / plain.mean()) < 3e-4
    for got, wanted in zip(run(inputs, kernel=HOPPER_FP8, out_dtype="float32"), (out, lse), strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("kernel", TENSOR_CORES)
def test_same_bits_each_time(gpu: DeviceInfo, kernel: str) -> None:
    """The assignment of tiles to blocks does not affect the result."""
    need(kernel, gpu)
    inputs = make(DenseCase(RAGGED * 4, h_q=16))
    first = run(inputs, kernel=kernel)
    for _ in range(20):
        for got, wanted in zip(run(inputs, kernel=kernel), first, strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("kernel", TENSOR_CORES)
def test_agrees_with_the_plain_kernel(gpu: DeviceInfo, kernel: str) -> None:
    """A prefill as in a model, for which the oracle would take minutes."""
    need(kernel, gpu)
    inputs = make(DenseCase(((3000, 3000), (1000, 3000)), h_q=16))
    out, lse = run(inputs, kernel=kernel, out_dtype="float32")
    plain, plain_lse = run(inputs, kernel=GENERIC, out_dtype="float32")
    np.testing.assert_allclose(lse, plain_lse, rtol=0, atol=1e-4)
    np.testing.assert_allclose(out, plain, rtol=0, atol=8e-3)


@pytest.mark.parametrize("kernel", TENSOR_CORES)
def test_selected_keys(gpu: DeviceInfo, kernel: str) -> None:
    """The mask of a selection as a model makes it, on both kernels; and values of hidden keys that are not finite."""
    import cupy

    need(kernel, gpu)
    inputs = make(DenseCase(((3000, 3000), (200, 1000)), h_q=16))
    rng = np.random.default_rng(5)
    indices = np.sort(rng.integers(-1, 4000, (3200, 600)).astype(np.int32), axis=1)
    starts = {name: inputs.options[name] for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    on_device = {name: cupy.asarray(x) for name, x in starts.items()}
    for relative in (False, True):
        mask = flat(mla_cupy.prefill_mask)(cupy.asarray(indices), 3000, relative=relative, **on_device)
        wanted = reference.prefill_mask(indices, 3000, relative=relative, **starts)[0]
        np.testing.assert_array_equal(mask.get(), wanted)
    hidden = ~np.unpackbits(wanted[:3000], axis=1, bitorder="little").any(axis=0)[:3000]
    hidden[1000:1010] = True
    wanted[:, 125:127] = 0  # keys 1000 to 1015
    inputs.options["mask"] = wanted
    inputs.v[:3000][hidden] = np.nan
    inputs.v[3000 + 1000 - 1, 3] = np.inf  # that the last queries may see
    out, lse = run(inputs, kernel=kernel, out_dtype="float32")
    plain, plain_lse = run(inputs, kernel=GENERIC, out_dtype="float32")
    assert np.isfinite(out[:3000]).all()
    np.testing.assert_allclose(lse, plain_lse, rtol=0, atol=1e-4)
    np.testing.assert_allclose(out, plain, rtol=0, atol=8e-3)


@pytest.mark.parametrize("kernel", TENSOR_CORES)
def test_chunks(gpu: DeviceInfo, kernel: str) -> None:
    """Earlier chunks by their states, one after another, as the whole at once."""
    need(kernel, gpu)
    inputs = make(DenseCase(((300, 1000),), h_q=4, starts=False))
    (q, k, v), options = on_gpu(inputs)
    k_rope = options["k_rope"]
    state: dict[str, Any] = {}
    for first in (0, 250, 500):
        part = slice(first, first + 250 if first < 500 else 700)
        out, lse = flat(mla_cupy.mla_prefill)(
            q, k[part], v[part], k_rope=k_rope[part], causal=False, out_dtype="float32", kernel=kernel, **state
        )
        state = {"state_out": out, "state_lse": lse}
    out, lse = flat(mla_cupy.mla_prefill)(q, k[700:], v[700:], k_rope=k_rope[700:], kernel=kernel, **state)
    check((out.get(), lse.get()), inputs.exact, inputs.rounded, inputs.case.dtype)


def test_graph(gpu: DeviceInfo) -> None:
    """A captured call reads the starts when it is replayed."""
    import cupy

    inputs = make(DenseCase(((40, 70), (60, 130)), h_q=2))
    arguments, options = on_gpu(inputs)
    out, lse = cupy.empty((100, 2, 128), arguments[0].dtype), cupy.empty((100, 2), np.float32)
    workspace = cupy.empty(1 << 16, np.uint8)
    starts_q = options["cu_seqlens_q"].copy()
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        flat(mla_cupy.mla_prefill)(*arguments, **options, out=out, lse=lse, workspace=workspace)
        stream.begin_capture()
        flat(mla_cupy.mla_prefill)(*arguments, **options, out=out, lse=lse, workspace=workspace)
        graph = stream.end_capture()
        for ends in ([0, 40, 100], [0, 10, 100], [0, 40, 100]):
            options["cu_seqlens_q"][:] = cupy.asarray(ends, np.int32)
            graph.launch(stream)
        stream.synchronize()
    assert (options["cu_seqlens_q"] == starts_q).all()
    check((out.get(), lse.get()), inputs.exact, inputs.rounded, inputs.case.dtype)
