from __future__ import annotations

import pytest

from bench import operations
from bench.core.cost import Cost, roofline_us
from bench.core.errors import BenchError
from bench.ops.decode.cases import CASES, SUITES, DecodeCase, parse


@pytest.mark.parametrize(
    ("name", "us", "tflops", "tbps"),
    [
        # Times measured on one H200 by another program, with the rates that it printed for them.
        ("b128-sq1-hq128-skv4096", 254.21, 574.4, 2.5162),
        ("b128-sq2-hq128-skv4096", 493.58, 591.7, 1.3681),
        ("b64-sq1-hq128-skv16384", 511.97, 570.5, 2.3944),
        ("b128-sq1-hq16-skv8192", 301.58, 121.1, 4.0202),
        ("b128-sq4-hq16-skv8192", 303.23, 481.6, 4.0424),
        ("b16-sq1-hq128-skv8192", 82.35, 443.3, 1.8876),
    ],
)
def test_rates_agree_with_the_peers_own_count(name, us, tflops, tbps):
    cost = parse(name).cost
    assert cost.tflops(us) == pytest.approx(tflops, abs=0.06)
    assert cost.tbps(us) == pytest.approx(tbps, rel=2e-4)


def test_cost_of_one_row_by_hand():
    # One query head over three keys: 3 * (576 + 512) multiply-adds; 3 keys, one q and one out in 2-byte elements.
    cost = DecodeCase(b=1, s_q=1, h_q=1, s_kv=3).cost
    assert cost == Cost(flops=2 * 3 * 1088, nbytes=2 * (3 * 576 + 576 + 512))


def test_a_second_kv_head_doubles_only_the_cache():
    one, two = (DecodeCase(4, 1, 16, 100, h_kv=h_kv).cost for h_kv in (1, 2))
    assert two.flops == one.flops
    assert two.nbytes - one.nbytes == 4 * 100 * 576 * 2


def test_roofline_takes_the_tighter_limit():
    cost = Cost(flops=700_000_000, nbytes=8_000_000)
    assert roofline_us(cost, tflops=700, tbps=4) == pytest.approx(2.0)
    assert roofline_us(cost, tflops=100, tbps=4) == pytest.approx(7.0)
    assert roofline_us(cost, tflops=None, tbps=4) == pytest.approx(2.0)
    assert roofline_us(cost, tflops=None, tbps=None) is None


def test_names_round_trip_and_are_unique():
    assert len({case.name for case in CASES}) == len(CASES) == 17
    for case in CASES:
        assert parse(case.name) is case
    odd = DecodeCase(3, 2, 10, 1000, h_kv=2, page_size=24)
    assert odd.name == "b3-sq2-hq10-skv1000-hkv2-page24"
    assert parse(odd.name) == odd


@pytest.mark.parametrize(
    "name", ["", "b1", "b1-sq1-hq128", "b0-sq1-hq1-skv1", "b1-sq1-hq3-skv9-hkv2", "xb1-sq1-hq1-skv1"]
)
def test_a_bad_name_is_refused(name):
    with pytest.raises(BenchError, match="case"):
        parse(name)


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
    assert operations.DECODE.select([], "targets") == CASES
    name = "b2-sq1-hq8-skv64"
    assert [case.name for case in operations.DECODE.select([name, name], "targets")] == [name]
    assert all(case.flashmla_us and case.fa3_us and case.target_us for case in CASES)
    assert all(case.target_us < min(case.flashmla_us, case.fa3_us) for case in CASES)


def test_the_whole_table():
    table = SUITES["table"]
    assert len({case.name for case in table}) == len(table) == 17 + len(SUITES["heads"]) - 2 + 6 + 40
    assert all(parse(case.name) == case for case in table)
    assert {case.h_q for case in SUITES["heads"]} == {8, 12, 16, 96}
    assert {case.d_qk for case in SUITES["nope"]} == {512}
    assert max(case.b for case in SUITES["small-batches"]) == 8


def test_mixes_of_lengths():
    for case in SUITES["mixes"]:
        lengths = case.lengths()
        assert lengths.shape == (case.b,)
        assert 1 <= lengths.min() <= lengths.max() <= case.s_kv
        assert (lengths == parse(case.name).lengths()).all()
        keys = int(lengths.sum())
        assert case.cost.flops == 2 * keys * case.h_q * (576 + 512)
        assert case.cost.nbytes == 2 * (keys * 576 + case.b * case.h_q * (576 + 512))
    assert len({case.lengths().tobytes() for case in SUITES["mixes"]}) == 40


def test_a_narrow_key_costs_less():
    narrow, wide = (parse(f"b2-sq1-hq16-skv100{text}") for text in ("-dqk512", ""))
    assert narrow.cost.flops * (576 + 512) == wide.cost.flops * 1024
    assert narrow.scale == 512**-0.5


def test_narrow_values_cost_less():
    case = parse("b2-sq1-hq16-skv100-dqk320")
    assert case.cost.flops == 2 * 2 * 100 * 16 * (320 + 256)
    assert case.cost.nbytes == 2 * (2 * 100 * 320 + 2 * 16 * (320 + 256))
    assert case.options == {"d_v": 256}
    assert {(case.d_qk, case.d_v) for case in SUITES["narrow"]} == {(320, 256), (288, 256)}
    assert all(parse(case.name) == case for case in SUITES["narrow"])
