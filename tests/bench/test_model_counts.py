"""The model's counts, from the kernels' constants, match the simulator's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import mla_cupy
from bench.model import counts
from bench.ops.sparse_backward import SparseBackwardCase
from mla_cupy.kernels import KERNELS
from tests.support.flat import flat
from tests.support.sim_driver import simulated
from tests.support.sparse_cases import SparseCase, make

ARCH = "sm_100a"
NAMES = counts.names(ARCH)
#: Tiles of 32 keys: 1, 2, 3, 3, any; of 64: 1, 1, 2, 2, any. The last: queries without a row, blocks of 36 heads.
CASES = [
    SparseCase(s_q=1, h_q=64, topk=32, invalid=0.0),
    SparseCase(s_q=1, h_q=128, topk=64, invalid=0.0, d_qk=512),
    SparseCase(s_q=1, h_q=64, topk=96, invalid=0.0, d_qk=512, dtype="float16"),
    SparseCase(s_q=1, h_q=128, topk=70, invalid=0.0),
    SparseCase(s_q=4, h_q=100, topk=70, lengths=True),
]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Number of products of each M x N: the report only has their sum."""
    from ptxsim.tensor_cores import umma

    decode, seen = umma.decode_instruction_descriptor, Counter()

    def counting(*arguments: Any) -> Any:
        desc = decode(*arguments)
        seen[desc.m, desc.n] += 1
        return desc

    monkeypatch.setattr(umma, "decode_instruction_descriptor", counting)
    return seen


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("name", NAMES)
def test_simulator_counts_the_same(name: str, case: SparseCase, shapes: Counter[tuple[int, int]]) -> None:
    inputs = make(case)
    with simulated(2, (10, 0)) as target:
        flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.options, kernel=name)
    (report,) = (one for one in target.reports if one.kernel == KERNELS[name].entry)
    kernel = counts.load(name, ARCH, case.d_qk, case.dtype)
    lengths = [len(rows) for rows in inputs.rows]
    counted = counts.call_counts(kernel, case.h_q, lengths)

    assert report.flops == {f"tcgen05 {'bf16' if case.dtype == 'bfloat16' else 'f16'}": counted.flops}
    assert report.counters["async tcgen05.mma"] == counted.products
    assert report.bytes["bulk read"] == counted.loaded
    assert report.bytes["bulk written"] == counted.stored
    assert report.bytes["shared written"] == counted.written
    assert report.bytes["tensor memory"] == counted.tmem
    assert report.bytes["global atomic"] == counted.added

    expected: Counter[tuple[int, int]] = Counter()
    for keys in lengths:
        for heads in kernel.blocks(case.h_q) if keys else ():
            for product in kernel.issued(heads):
                expected[product.m, product.n] += product.count * -(-keys // kernel.tile_keys)
    assert shapes == +expected

    stationary = sum(count for opcode, count in report.instructions.items() if opcode.startswith("tcgen05.mma.ws"))
    assert stationary == (counted.products if kernel.weight_stationary else 0)


@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("name", NAMES)
def test_facts_agree_with_the_mathematics(name: str, d_qk: int) -> None:
    """Five products per pair of query and key, and the same FLOPs as in every other benchmark."""
    kernel = counts.load(name, ARCH, d_qk)
    assert (kernel.d_qk, kernel.d_v) == (d_qk, 512)
    assert kernel.tmem_columns_used <= kernel.tmem_columns
    case = SparseBackwardCase(3, 100, 2 * kernel.block_heads, 4 * kernel.tile_keys, d_qk)
    assert counts.call_counts(kernel, case.h_q, [case.topk] * case.s_q).flops == case.cost.flops
