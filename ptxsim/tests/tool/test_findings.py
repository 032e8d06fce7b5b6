# ruff: noqa: E501 (lines of PTX are kept whole)
"""Findings: both sides of a race, source lines, synchronisations, origins; rules by name; going on; watching."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import ptxsim
from ptxsim.__main__ import main
from ptxsim.state.findings import brief, short_name
from ptxsim.testing import Simulation
from simtest.single import HEADER

RACE = """.file 1 "race.cu"
.visible .entry _ZN2ns4raceIiEEvPj(.param .u64 out)
{
.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>; .shared .align 16 .b8 s[256];
mov.u32 %r0, %tid.x; mov.u32 %r1, s; ld.param.u64 %rd1, [out]; setp.ge.u32 %p1, %r0, 32;
bar.sync 0;
.loc 1 7 3
@%p1 st.shared.u32 [%r1], %r0;
.loc 1 9 5, function_name $L__info, inlined_at 1 20 1
@!%p1 ld.shared.u32 %r2, [%r1];
@!%p1 ld.shared.u32 %r3, [%r1+0];
@%p1 st.shared.u32 [%r1+16], 1;
@!%p1 st.shared.u32 [%r1+16], 2;
ret;
}
"""
ONE_LANE = RACE.replace("@%p1 st.shared.u32 [%r1], %r0;", "setp.eq.u32 %p2, %r0, 32;\n@%p2 st.shared.u32 [%r1], %r0;")
KERNEL = "_ZN2ns4raceIiEEvPj"


def launch(**options: object) -> ptxsim.Report:
    return ptxsim.Module(HEADER + ONE_LANE).launch(KERNEL, 1, 64, [np.zeros(1, "u4")], **options)


def test_a_race_names_both_accesses() -> None:
    with pytest.raises(ptxsim.RaceError) as caught:
        launch()
    finding = caught.value.finding
    assert finding.kernel == "ns::race"
    assert finding.kind == "RaceError"
    assert finding.at.source == "race.cu:9, inlined at race.cu:20"
    assert finding.at.text == "@!%p1 ld.shared.u32 %r2, [%r1]"
    assert finding.other_at is not None
    assert finding.other_at.source == "race.cu:7"
    assert finding.other_at.text.endswith("st.shared.u32 [%r1], %r0")
    assert [place.text for place in finding.synchronised] == ["bar.sync 0"]
    assert [place.text for place in finding.other_synchronised] == ["bar.sync 0"]
    text = str(caught.value)
    assert "kernel ns::race, line 14 (race.cu:9, inlined at race.cu:20), block (0, 0, 0) warp 0" in text
    assert "the other access: block (0, 0, 0) warp 1, line 12 (race.cu:7)" in text
    assert "synchronised last at line 9: bar.sync 0" in text
    assert json.loads(json.dumps(finding.as_dict()))["other_at"]["line"] == 12


def test_a_write_after_a_read_names_the_read() -> None:
    write = ".visible .entry k()\n{\n.reg .b32 %r<9>; .reg .pred %p<9>; .shared .align 16 .b8 s[16]; mov.u32 %r1, s; mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; setp.ge.u32 %p2, %r0, 32;\n@%p1 st.shared.u32 [%r1], 1; bar.sync 0;\n@%p2 ld.shared.u32 %r2, [%r1];\n@%p1 st.shared.u32 [%r1], 2;\nret;\n}\n"
    with pytest.raises(ptxsim.RaceError, match="may still read") as caught:
        ptxsim.Module(HEADER + write).launch("k", 1, 64, [])
    assert caught.value.finding.other_at.text == "@%p2 ld.shared.u32 %r2, [%r1]"


def test_all_distinct_races_are_reported() -> None:
    report = launch(keep_going=True)
    assert [(each.at.line, each.other_at.line) for each in report.errors] == [(14, 12), (15, 12), (17, 16)]
    assert launch(keep_going=True, mode="random", seed=3).errors


def test_the_origin_of_an_undefined_value() -> None:
    body = (
        ".reg .b32 %r<9>; .reg .b64 %rd<9>; .shared .align 16 .b8 s[256];\nld.param.u64 %rd1, [out]; mov.u32 %r1, s;\n"
        "{source}\nmov.u32 %r5, 3;\nadd.u32 %r6, %r5, %r4;\nst.global.u32 [%rd1], %r6;\nret;"
    )
    for source, said in (
        ("ld.shared.u32 %r4, [%r1+8];", "line 8: ld.shared.u32 %r4, [%r1+8]"),
        ("mul.lo.u32 %r4, %r7, 2;", "line 8: a register that is never written, in mul.lo.u32 %r4, %r7, 2"),
    ):
        text = HEADER + ".visible .entry k(.param .u64 out)\n{\n" + body.replace("{source}", source) + "\n}\n"
        with pytest.raises(ptxsim.PoisonError) as caught:
            ptxsim.Module(text).launch("k", 1, 32, [np.zeros(1, "u4")])
        assert f"the value comes from {said}" in str(caught.value)
        assert len(caught.value.finding.origin) == 1
        with pytest.warns(ptxsim.StrictWarning, match="poison"):
            report = ptxsim.Module(text).launch("k", 1, 32, [np.zeros(1, "u4")], allow="poison")
        assert [each.rule for each in report.findings] == ["poison"]


def test_source_lines_of_calls_around_an_inlined_instruction() -> None:
    """A call is reported once, by its place, with the lines at which that place was inlined."""
    head = ".loc 1 30 2\n.loc 1 20 1, function_name $L__a, inlined_at 1 30 2\n"
    text = HEADER + ONE_LANE.replace(".loc 1 9 5", head + ".loc 1 9 5")
    with pytest.raises(ptxsim.RaceError) as caught:
        ptxsim.Module(text).launch(KERNEL, 1, 64, [np.zeros(1, "u4")])
    assert caught.value.finding.at.source == "race.cu:9, inlined at race.cu:20, inlined at race.cu:30"


def test_frames_of_libraries_are_left_out_of_long_chains() -> None:
    """CUTLASS's layers say little; the report shows the kernel's own main loop between them."""
    files = {20: 2, 21: 2, 22: 1, 23: 2, 24: 2}
    deep = "".join(
        f".loc {files.get(k, 1)} {k} 1, function_name $L__a, inlined_at {files.get(k + 1, 1)} {k + 1} 1\n"
        for k in range(27, 19, -1)
    )
    text = HEADER + ONE_LANE.replace(".loc 1 9 5", deep + ".loc 1 9 5").replace(
        "inlined_at 1 20 1", "inlined_at 2 20 1"
    )
    with pytest.raises(ptxsim.RaceError) as caught:
        ptxsim.Module('.file 2 "include/cute/atom.hpp"\n' + text).launch(KERNEL, 1, 64, [np.zeros(1, "u4")])
    places = [each.removeprefix("race.cu:") for each in caught.value.finding.at.source.split(", inlined at ")]
    assert places == ["9", "...", "22", "...", "25", "26", "27", "28"]


def test_a_function_that_is_called_tells_its_caller() -> None:
    function = ".func f(.param .b32 x)\n{\n.reg .b32 %r<3>;\n.loc 1 3 1\nld.shared.u32 %r1, [4];\nret;\n}\n"
    kernel = ".visible .entry k()\n{\n.param .b32 p;\n.loc 1 8 1\nst.param.b32 [p], 0;\ncall f, (p);\nret;\n}\n"
    with pytest.raises(ptxsim.MemoryFault) as caught:
        ptxsim.Module(HEADER + '.file 1 "a.cu"\n' + function + kernel).launch("k", 1, 32, [])
    assert caught.value.finding.at.source == "a.cu:3, inlined at a.cu:8"


def test_long_lists_of_registers_are_cut() -> None:
    many = "{" + ", ".join(f"%f{k}" for k in range(64)) + "}"
    assert brief(f"wgmma {many}, %rd1;") == "wgmma {%f0, ..., %f63}, %rd1;"
    assert brief("st.v4.u32 [%r1], {%r1, %r2, %r3, %r4}") == "st.v4.u32 [%r1], {%r1, %r2, %r3, %r4}"


RULES = """.visible .entry k()
{
.reg .b32 %r<9>; .reg .pred %p<4>; .shared .align 16 .b8 s[16];
mov.u32 %r0, %tid.x; mov.u32 %r1, s; setp.lt.u32 %p1, %r0, 32; mov.u32 %r3, 0;
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32; bar.sync 0;
@%p1 bra E;
tcgen05.st.sync.aligned.32x32b.x1.b32 [0x200000], {%r0}; tcgen05.wait::st.sync.aligned;
E: tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;
ret;
}
"""


def test_an_error_names_the_rule_and_how_to_allow_it() -> None:
    module = ptxsim.Module(HEADER + RULES)
    with pytest.raises(ptxsim.RaceError, match=r"\[tcgen05-fence\]") as caught:
        module.launch("k", 1, 64, [])
    assert caught.value.finding.rule == "tcgen05-fence"
    assert 'allow={"tcgen05-fence"}, or --allow tcgen05-fence' in str(caught.value)
    with pytest.warns(ptxsim.StrictWarning) as told:
        module.launch("k", 1, 64, [], allow={"tcgen05-fence"})
    assert "--allow" not in str(told[0].message)
    with pytest.raises(ptxsim.RaceError) as caught:
        launch()
    assert caught.value.finding.rule == ""
    assert "--allow" not in str(caught.value)


def test_a_deadlock_tells_the_state_of_now() -> None:
    """A warp parks before another one's arrival: the report shows the count at the end."""
    code = (
        '.file 1 "dead.cu"\n.visible .entry _Z4deadv()\n{\n.reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .pred %p<4>;'
        " .shared .align 8 .b8 m[8];\nmov.u32 %r0, %tid.x; mov.u32 %r1, m; setp.eq.u32 %p1, %r0, 0;"
        " setp.eq.u32 %p3, %r0, 32; @%p1 mbarrier.init.shared::cta.b64 [%r1], 3; bar.sync 0;\n"
        "setp.lt.u32 %p2, %r0, 32; @%p2 bra W;\nbar.sync 1, 32;\n@%p3 mbarrier.arrive.shared::cta.b64 %rd1, [%r1];\n"
        ".loc 1 12 1\nW: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0;\n@!%p2 bra W;\nret;\n}\n"
    )
    with pytest.raises(ptxsim.DeadlockError) as caught:
        ptxsim.Module(HEADER + code).launch("_Z4deadv", 1, 64, [])
    text = str(caught.value)
    assert text.startswith("kernel dead: deadlock")
    assert text.count("(dead.cu:12): waits for parity 0") == 2
    assert "3 of 3 arrivals pending" not in text
    assert text.count("2 of 3 arrivals pending") == 3


def test_a_cuda_file_is_compiled_with_source_lines(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    file = tmp_path / "k.cu"
    file.write_text(
        "__device__ void put(int* x, int v)\n{\n    x[threadIdx.x] = v;\n}\n"
        'extern "C" __global__ void k(int* x)\n{\n    put(x, 1);\n}\n'
    )
    with pytest.raises(ptxsim.MemoryFault) as caught:
        Simulation("early", 0)(file, block=32, args=[np.zeros(8, "i4")])
    assert [Path(each).name for each in caught.value.finding.at.source.split(", inlined at ")] == ["k.cu:3", "k.cu:7"]


def test_a_watchpoint_lists_every_access() -> None:
    watch = ptxsim.Watch(16)
    launch(keep_going=True, watch=watch)
    assert [(each.warp, each.verb, each.at.line) for each in watch.accesses] == [(1, "writes", 16), (0, "writes", 17)]
    assert "block (0, 0, 0) warp 0 writes, line 17" in str(watch.accesses[1])
    code = ".visible .entry k(.param .u64 out)\n{\n.reg .b32 %r<9>; .reg .b64 %rd<9>; ld.param.u64 %rd1, [out];\nld.global.u32 %r1, [%rd1+8];\nst.global.u32 [%rd1], %r1;\nret;\n}\n"
    array = np.zeros(4, "u4")
    watch = ptxsim.Watch(8, 4, array)
    ptxsim.Module(HEADER + code).launch("k", 1, 1, [array], race_global=True, watch=watch)
    assert [(each.verb, each.at.line) for each in watch.accesses] == [("reads", 7)]
    with pytest.raises(ValueError, match="needs race_global"):
        launch(watch=watch)
    with pytest.raises(ValueError, match="needs check"):
        launch(watch=ptxsim.Watch(0), check=False)


def test_unknown_rules() -> None:
    with pytest.raises(ValueError, match="unknown rule 'wgmma'; the rules are alloc-grows"):
        launch(allow={"wgmma"})


def test_names() -> None:
    assert short_name("_Z4kernIfEvPT_") == "kern"
    assert short_name("_ZN12_GLOBAL__N_14kernEv") == "(anonymous)::kern"
    assert short_name("plain") == "plain"
    assert len(short_name("x" * 200)) == 60


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ptx, out = tmp_path / "k.ptx", tmp_path / "f.json"
    ptx.write_text(HEADER + ONE_LANE)
    run = ["run", str(ptx), "zeros:u4:1", "--block", "64", "--json", str(out)]
    assert main(run) == 1
    assert [each["kind"] for each in json.loads(out.read_text())["findings"]] == ["RaceError"]
    assert "the other access" in capsys.readouterr().err
    assert main([*run, "--keep-going", "--watch", "0"]) == 1
    assert len(json.loads(out.read_text())["findings"]) == 3
    text = capsys.readouterr().out
    assert text.count("error: kernel ns::race") == 3
    assert text.count("watched: ") == 3
    with pytest.raises(SystemExit):
        main([*run, "--allow", "nothing"])
