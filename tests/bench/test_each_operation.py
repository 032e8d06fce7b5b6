"""Properties of every operation's benchmark: names, costs, our own row, and detection of wrong results."""

from __future__ import annotations

import numpy as np
import pytest

from bench.core.cost import Cost
from bench.core.errors import BenchError
from bench.core.implementation import Choices, make
from bench.operations import OPERATIONS
from tests.bench.small import BAD, SMALL

EVERY = [(name, case) for name, cases in SMALL.items() for case in cases]
#: Further times of our own row.
FIGURES = {
    "cache": "copy",
    "prepare": "copy",
    "projection": "copy",
    "indexer-prepare": "copy",
    "indexer-loss": "forward",
}
FIGURES |= {"indexer-topk": "by_value", "indexer-logits": "not_clean"}
D_QK, D_V, PAIR = 576, 512, 576 + 512


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: operation.name)
def test_names_round_trip(operation):
    for cases in operation.suites.values():
        assert len({case.name for case in cases}) == len(cases)
        assert all(operation.parse(case.name) == case for case in cases)
    assert operation.select([], "targets") == operation.suites["targets"]
    assert all(operation.parse(case.name) is case for case in operation.suites["targets"])
    names = SMALL[operation.name]
    assert [case.name for case in operation.select([*names, names[0]], "targets")] == [*names]


@pytest.mark.parametrize(
    ("operation", "name"), [(name, case) for name in OPERATIONS for case in ("", *BAD.get(name, ()))]
)
def test_a_bad_name_is_refused(operation, name):
    with pytest.raises(BenchError, match="case"):
        OPERATIONS[operation].parse(name)


RECORD_FORWARD = 8192 * 656 + 2 * 4096 * 128 * PAIR + 4 * 4096 * 2048
PREPARED = 10 * (3 * (D_QK * 3 + 4) + 4 + 4 + 1152 + D_QK) + 2 * 10 * 32 * 4


@pytest.mark.parametrize(
    ("operation", "case", "flops", "nbytes"),
    [
        # One query head over three keys: 3 * (576 + 512) multiply-adds; 3 keys, one q and one out in 2-byte elements.
        ("decode", "b1-sq1-hq1-skv3", 2 * 3 * PAIR, 2 * (3 * D_QK + PAIR)),
        ("decode", "b2-sq1-hq16-skv100-dqk320", 2 * 2 * 100 * 16 * 576, 2 * (2 * 100 * 320 + 2 * 16 * 576)),
        ("decode", "b2-sq1-hq16-skv100-dqk512", 2 * 2 * 100 * 16 * 1024, 2 * (2 * 100 * 512 + 2 * 16 * 1024)),
        ("decode", "b4-sq1-hq16-skv100", 2 * 4 * 100 * 16 * PAIR, 2 * (4 * 100 * D_QK + 4 * 16 * PAIR)),
        # Three queries that see 68, 69 and 70 keys.
        ("absorption", "sq3-skv70-hq2", 2 * 207 * 2 * PAIR, None),
        ("cache", "append-v32-n10", None, 10 * (656 + 2 * D_QK + 4)),
        ("cache", "gather-v4-n10", None, 10 * (584 + 2 * D_V + 4)),
        ("cache", "copy-v32-n64", None, 2 * 64 * 656),
        # Every page counts once.
        ("cascade", "b2-hq3-prefix64-suffix64", 2 * 2 * 128 * 3 * PAIR, 2 * (3 * 64 * D_QK + 2 * 3 * PAIR)),
        ("dense-decode-fp8", "b128-sq1-hq16-skv8192", 2 * 2**20 * 16 * PAIR, 2**20 * 656 + 2 * 128 * 16 * PAIR),
        ("dense-decode-fp8", "b128-sq1-hq16-skv8192-fp8", 2 * 2**20 * 16 * PAIR, 2**20 * D_QK + 2 * 128 * 16 * PAIR),
        ("indexer-logits", "sq2-skv3-h5-d32", 2 * 5 * 32 * (2 + 3), None),
        ("indexer-logits", "b2-sq1-skv10-h64", None, 2 * 10 * 132 + 2 * 64 * 132 + 4 * 2 * 64),
        ("indexer-loss", "b1-s2-h3x5-i7x32", 2 * 3 * (3 * 5 + 5 * 7 * 32), None),
        ("indexer-loss", "b1-s2-h3x72-i7x32-mha", 2 * 3 * (3 * 72 + 5 * 7 * 32), None),
        ("indexer-loss", "b1-s2-h3x5-i3x32-perhead", 2 * 3 * (2 * 3 * 5 + 5 * 3 * 32), None),
        ("indexer-topk", "sq3-skv50-k2", None, 3 * 50 * 4),  # one read of the logits
        # With the rows of cos and sin that five positions take.
        ("indexer-prepare", "sq5-h3-d32", None, 5 * 3 * (32 * 2 + 32 + 4 + 4) + 2 * 5 * 8 * 4 + 5 * 4),
        ("layer", "v3-hq16-b2-skv100", 2 * 2 * 16 * (100 * PAIR + D_V * 256),
            2 * 100 * D_QK * 2 + 2 * 16 * (192 + 128) * 2 + 16 * 256 * D_V * 2),
        ("prepare", "codes-fp8-n10-h3", None, PREPARED),
        ("prepare", "inplace-none-n10-h3-theta", None, 10 * (3 * 2 * 128 + 4)),
        ("projection", "absorb-t3-hq16", None, 16 * 128 * D_V * 2 + 3 * 16 * (128 + D_V) * 2),
        ("projection", "project-n1-t3-hq16", None, 16 * 128 * D_V * 2 + 3 * 16 * (D_V + 128) * 2),
        ("projection", "project-n5-t3-hq16", None, 16 * 128 * D_V * 2 + 3 * 16 * (5 * (D_V + 1) * 4 + 128 * 2)),
        ("sparse-forward-fp8", "sq4096-skv8192-hq128-topk2048", None, RECORD_FORWARD),
        ("sparse-decode", "b2-sq3-hq4-topk5-extra6-v4", 2 * 6 * 4 * 11 * 1024,
            6 * 11 * 584 + 2 * 6 * 4 * 1024 + 4 * 6 * 11),
        ("sparse-decode", "b2-sq3-hq4-topk5-v32-nope", 2 * 6 * 4 * 5 * 1024,
            6 * 5 * 528 + 2 * 6 * 4 * 1024 + 4 * 6 * 5),
        ("sparse-decode", "b2-sq3-hq4-topk5-extra6-v41-fp4", None,
            6 * (5 * 528 + 6 * 288) + 2 * 6 * 4 * 1024 + 4 * 6 * 11),
    ],
)  # fmt: skip
def test_costs_by_hand(operation, case, flops, nbytes):
    cost = OPERATIONS[operation].parse(case).cost
    assert flops in (None, cost.flops)
    assert nbytes in (None, cost.nbytes)


@pytest.mark.parametrize(
    ("operation", "case", "us", "tflops", "tbps"),
    [
        # Times measured on one H200 by another program, with the rates that it printed for them.
        ("decode", "b128-sq1-hq128-skv4096", 254.21, 574.4, 2.5162),
        ("decode", "b128-sq2-hq128-skv4096", 493.58, 591.7, 1.3681),
        ("decode", "b64-sq1-hq128-skv16384", 511.97, 570.5, 2.3944),
        ("decode", "b128-sq1-hq16-skv8192", 301.58, 121.1, 4.0202),
        ("decode", "b128-sq4-hq16-skv8192", 303.23, 481.6, 4.0424),
        ("decode", "b16-sq1-hq128-skv8192", 82.35, 443.3, 1.8876),
        *(
            (name, case.name, case.peer_us, tflops, None)
            for name, rates in (
                ("sparse-forward", (586, 562, 551)),
                ("sparse-backward", (442, 424, 334, 247, 114)),
                ("indexer-logits", (824, 1112)),
                ("sparse-decode", (352,)),
            )
            for case, tflops in zip(OPERATIONS[name].suites["targets"], rates, strict=False)
        ),
    ],
)
def test_rates_agree_with_the_peer_s_own_count(operation, case, us, tflops, tbps):
    cost: Cost = OPERATIONS[operation].parse(case).cost
    assert cost.tflops(us) == pytest.approx(tflops, **({"abs": 0.06} if tbps else {"rel": 0.005}))
    assert tbps is None or cost.tbps(us) == pytest.approx(tbps, rel=2e-4)


@pytest.mark.parametrize(("operation", "name"), EVERY)
def test_our_own(rows_of, operation, name):
    """Results are checked before the timing, and again after they were spoiled and written by a replay."""
    for dtype in ("bfloat16", "float16") if operation == "cache" else ("bfloat16",):
        (row,) = rows_of(OPERATIONS[operation], name, dtype=dtype).values()
        assert (row["status"], row["reason"], row["case"]) == ("ok", "", name)
        assert row["share_copy"] == pytest.approx(row["bytes"] / row["timing"]["us_median"] / 1e6 / 4.0)
        assert operation not in FIGURES or row["figures_us"][FIGURES[operation]] > 0
        assert min((row["check"] or {}).get("samples", {"": 1}).values()) >= 1


def last_octets(written, sample, count):
    written.view("u1")[sample.row].reshape(-1)[sample.mask.reshape(-1).nonzero()[0][-count:]] ^= 1


def add(output, place, number):
    def spoil(outputs, samples):
        getattr(outputs, output)[place] += number

    return spoil


def next_number(outputs, samples):
    outputs.folded[4, 1] = np.nextafter(outputs.folded[4, 1], np.float32(9))


WRONG = [
    *(
        ("cache", name, lambda outputs, samples: last_octets(outputs.written, samples[-1], 1))
        for name in SMALL["cache"]
    ),
    *(
        ("prepare", name, lambda outputs, samples: last_octets(getattr(outputs, samples[-1].result), samples[-1], 40))
        for name in SMALL["prepare"]
    ),
    *(("projection", name, add("out", (-1, -1, 7), 3)) for name in SMALL["projection"]),
    *(("layer", name, add("out", (-1, 0, -1, 5), 1)) for name in SMALL["layer"][:2]),
    ("indexer-prepare", "sq5-h3-d32", next_number),
    ("indexer-prepare", "sq5-h3-d32", add("codes", (4, 1), 1)),
    ("prefill", "b2-sq3-skv5-hq2-fp8", add("out", ..., 0.5)),
    ("sparse-decode", SMALL["sparse-decode"][0], add("out", (3, 1, 7), 0.5)),
    ("sparse-decode", SMALL["sparse-decode"][0], add("lse", (0, 2), 0.5)),
    ("indexer-logits", SMALL["indexer-logits"][0], add("logits", (2, 5), 0.5)),
    ("indexer-logits", SMALL["indexer-logits"][0], add("logits", (1, 3), np.nan)),
]


@pytest.mark.parametrize(
    ("operation", "name", "spoil"), WRONG, ids=[f"{name}-{case}-{i}" for i, (name, case, _) in enumerate(WRONG)]
)
def test_a_wrong_result_is_found(device, numpy_backend, operation, name, spoil):
    operation = OPERATIONS[operation]
    case = operation.parse(name)
    inputs = operation.inputs(case, "bfloat16", 0, device)
    samples = operation.expect(case, "bfloat16", inputs, device)
    (own,) = make([], operation.implementations(Choices()))
    prepared = own.prepare(case, "bfloat16", [inputs], device)
    prepared.calls[0]()
    outputs = prepared.outputs(0)
    assert operation.judge(samples, outputs, "bfloat16", device).ok
    spoil(outputs, samples)
    verdict = operation.judge(samples, outputs, "bfloat16", device)
    assert not verdict.ok
    assert verdict.reason
