from __future__ import annotations

import pytest

from bench.core.cost import Cost, roofline_us
from bench.ops.decode import DECODE
from bench.ops.decode_cases import CASES, SUITES, DecodeCase


def test_roofline_takes_the_tighter_limit():
    cost = Cost(flops=700_000_000, nbytes=8_000_000)
    assert roofline_us(cost, tflops=700, tbps=4) == pytest.approx(2.0)
    assert roofline_us(cost, tflops=100, tbps=4) == pytest.approx(7.0)
    assert roofline_us(cost, tflops=None, tbps=4) == pytest.approx(2.0)
    assert roofline_us(cost, tflops=None, tbps=None) is None


def test_pages_cover_a_partial_last_page():
    case = DecodeCase(2, 1, 1, 130)
    assert (case.max_pages, case.num_pages) == (3, 6)


def test_suites_and_selection():
    assert [case.name for case in SUITES["quick"]] == [
        "b128-sq1-hq128-skv4096",
        "b64-sq1-hq128-skv16384",
        "b128-sq1-hq16-skv8192",
        "b1-sq1-hq128-skv8192",
    ]
    assert all(case.flashmla_us and case.fa3_us and case.target_us for case in CASES)
    assert all(case.target_us < min(case.flashmla_us, case.fa3_us) for case in CASES)


def test_the_whole_table():
    table = SUITES["table"]
    assert len({case.name for case in table}) == len(table) == 17 + len(SUITES["heads"]) - 2 + 6 + 40
    assert all(DECODE.parse(case.name) == case for case in table)
    assert {case.h_q for case in SUITES["heads"]} == {8, 12, 16, 96}
    assert {case.d_qk for case in SUITES["nope"]} == {512}
    assert max(case.b for case in SUITES["small-batches"]) == 8


def test_mixes_of_lengths():
    for case in SUITES["mixes"]:
        lengths = case.lengths()
        assert lengths.shape == (case.b,)
        assert 1 <= lengths.min() <= lengths.max() <= case.s_kv
        assert (lengths == DECODE.parse(case.name).lengths()).all()
        keys = int(lengths.sum())
        assert case.cost.flops == 2 * keys * case.h_q * (576 + 512)
        assert case.cost.nbytes == 2 * (keys * 576 + case.b * case.h_q * (576 + 512))
    assert len({case.lengths().tobytes() for case in SUITES["mixes"]}) == 40


def test_narrow_cases():
    assert DECODE.parse("b2-sq1-hq16-skv100-dqk512").scale == 512**-0.5
    assert DECODE.parse("b2-sq1-hq16-skv100-dqk320").d_v == 256
    assert {(case.d_qk, case.d_v) for case in SUITES["narrow"]} == {(320, 256), (288, 256)}
