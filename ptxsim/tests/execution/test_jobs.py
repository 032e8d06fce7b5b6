"""A launch in several processes does what it does in one."""

from __future__ import annotations

import os
import signal
import warnings

import numpy as np
import pytest

import ptxsim
from ptxsim.__main__ import main

HEAD = """
.version 8.6
.target sm_90a
.address_size 64
"""

# Each thread adds its number to its own element and one to the counter, and appends by compare-and-swap; the last block
# to arrive writes down how many it has seen.
COUNT = (
    HEAD
    + """
.visible .entry count(.param .u64 out, .param .u64 total, .param .u64 tickets)
{
    .reg .pred %p<3>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd0, [out];
    ld.param.u64 %rd1, [total];
    ld.param.u64 %rd2, [tickets];
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ntid.x;
    mad.lo.u32 %r3, %r0, %r2, %r1;
    mad.wide.u32 %rd3, %r3, 4, %rd0;
    ld.global.u32 %r4, [%rd3];
    add.u32 %r4, %r4, %r3;
    st.global.u32 [%rd3], %r4;
    red.relaxed.gpu.global.add.u32 [%rd1], 1;
RETRY:
    ld.relaxed.gpu.global.u32 %r5, [%rd1+4];
    add.u32 %r6, %r5, %r3;
    atom.relaxed.gpu.global.cas.b32 %r7, [%rd1+4], %r5, %r6;
    setp.ne.u32 %p0, %r7, %r5;
    @%p0 bra RETRY;
    bar.sync 0;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    atom.acq_rel.gpu.global.add.u32 %r8, [%rd2], 1;
    mov.u32 %r9, %nctaid.x;
    sub.u32 %r9, %r9, 1;
    setp.ne.u32 %p2, %r8, %r9;
    @%p2 bra DONE;
    ld.relaxed.gpu.global.u32 %r10, [%rd1];
    st.global.u32 [%rd2+4], %r10;
DONE:
    ret;
}
"""
)

# The block whose number is given reads behind the array.
FAULT = (
    HEAD
    + """
.visible .entry fault(.param .u64 x, .param .u32 bad)
{
    .reg .pred %p;
    .reg .b32 %r<4>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd0, [x];
    ld.param.u32 %r0, [bad];
    mov.u32 %r1, %ctaid.x;
    mul.wide.u32 %rd1, %r1, 4;
    add.s64 %rd2, %rd0, %rd1;
    st.global.u32 [%rd2], %r1;
    setp.ne.u32 %p, %r1, %r0;
    @%p bra DONE;
    ld.global.u32 %r2, [%rd0+4096];
    st.global.u32 [%rd2], %r2;
DONE:
    ret;
}
"""
)


def counted(jobs: int, mode: str = "early", seed: int = 0, **options: object) -> tuple[ptxsim.Report, list[np.ndarray]]:
    arrays = [np.arange(13 * 64, dtype="u4"), np.zeros(2, "u4"), np.zeros(2, "u4")]
    report = ptxsim.Module(COUNT).launch("count", 13, 64, arrays, mode=mode, seed=seed, jobs=jobs, **options)
    return report, arrays


@pytest.mark.parametrize(
    ("jobs", "mode", "seed"), [(2, "early", 0), (3, "late", 0), (3, "random", 4), (40, "early", 0)]
)
def test_atomics_of_all_processes(jobs: int, mode: str, seed: int) -> None:
    _, (out, total, tickets) = counted(jobs, mode, seed)
    threads = np.arange(13 * 64)
    assert out.tolist() == (2 * threads).tolist()
    assert total.tolist() == [13 * 64, threads.sum()]
    assert tickets.tolist() == [13, 13 * 64]


def test_the_report_counts_what_one_process_would() -> None:
    whole, _ = counted(1, banks=True)
    shared, _ = counted(3, banks=True)
    retried = {"ld.relaxed.gpu.global.u32", "add.u32", "atom.relaxed.gpu.global.cas.b32", "setp.ne.u32", "bra"}
    for name, times in whole.instructions.items():
        assert shared.instructions[name] == times or (name in retried and shared.instructions[name] > times)
    assert shared.bytes["global written"] == whole.bytes["global written"]
    assert shared.missed == whole.missed == []


def test_the_same_seed_is_the_same_schedule() -> None:
    """Where nothing but the order of warps is random."""
    steps = [
        ptxsim.Module(FAULT).launch("fault", 16, 32, [np.zeros(16, "u4"), 99], mode="random", seed=seed, jobs=3).steps
        for seed in (1, 1)
    ]
    assert steps[0] == steps[1]


def test_an_error_ends_the_launch() -> None:
    x = np.zeros(8, "u4")
    with pytest.raises(ptxsim.MemoryFault, match=r"out of bounds") as caught:
        ptxsim.Module(FAULT).launch("fault", 8, 32, [x, 5], jobs=2)
    assert caught.value.finding.block == (5, 0, 0)
    assert x[5] == 5, "what was written before stays written"


def test_a_process_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptxsim.state.jobs._run_part", lambda launch, clusters: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(ptxsim.SimError, match="a process of the launch has ended with status -9"):
        counted(2)


def test_arrays_that_overlap_and_arrays_that_are_read_only() -> None:
    """Views of one array stay views of one array; afterwards everything is where it was."""
    base = np.zeros(64, "u4")
    module = ptxsim.Module(FAULT)
    first, second = base[:32], base[16:]
    module.memory.map(first)
    address = module.memory.map(second)
    frozen = np.ones(4, "u4")
    frozen.flags.writeable = False
    module.memory.map(frozen)
    module.launch("fault", 20, 32, [second, 99], jobs=3)
    assert base[16:36].tolist() == list(range(20))
    assert first[16:].tolist() == list(range(16))
    assert module.memory.slice(address, 8).view("u4").tolist() == [0, 1]
    base[16] = 7
    assert module.memory.slice(address, 4).view("u4").tolist() == [7], "the caller's memory again"


def test_findings_are_warned_of_once() -> None:
    """A broken rule that is allowed, in every block: one warning, one finding."""
    ptx = COUNT.replace("bar.sync 0;", "@%p0 bra DONE;\n    barrier.sync 0, 96;")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alone = _findings(ptx, 1)
        once = len(caught)
        together = _findings(ptx, 3)
    assert len(caught) == 2 * once
    assert together == alone


def _findings(ptx: str, jobs: int) -> object:
    arrays = [np.arange(13 * 64, dtype="u4"), np.zeros(2, "u4"), np.zeros(2, "u4")]
    try:
        report = ptxsim.Module(ptx, strict=False).launch("count", 13, 64, arrays, jobs=jobs)
    except ptxsim.SimError as error:
        return type(error)
    return {finding.key for finding in report.findings}


def test_progress_tells_of_all_clusters() -> None:
    seen: list[tuple[int, int, int]] = []
    report, _ = counted(2, progress=lambda *far: seen.append(far))
    assert seen[-1] == (13, 13, report.steps)


@pytest.mark.parametrize("option", ["cooperative", "race_global", "watch", "timeline"])
def test_what_needs_one_process(option: str) -> None:
    value = {"watch": ptxsim.Watch(0), "timeline": ptxsim.Timeline()}.get(option, True)
    with pytest.raises(ptxsim.SimError, match=f"{option} needs all clusters in one process"):
        counted(2, **{option: value})
    with pytest.raises(ValueError, match="jobs 0"):
        counted(0)


def test_on_the_command_line(tmp_path, capsys) -> None:
    file = tmp_path / "count.ptx"
    file.write_text(COUNT)
    arguments = ["zeros:u4:256", "zeros:u4:2", "zeros:u4:2", "--grid", "4", "--block", "64"]
    assert main(["run", str(file), *arguments, "--jobs", "2", "--save", str(tmp_path / "x.npz")]) == 0
    assert np.load(tmp_path / "x.npz")["arr_1"].tolist()[0] == 256
    assert main(["run", str(file), *arguments, "--jobs", "2", "--race-global"]) == 1
    assert "race_global needs all clusters in one process" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", str(file), *arguments, "--jobs", "0"])


# Every block adds one to 4096 numbers, 500 times, by the copy engine.
REDUCE = (
    HEAD
    + """
.visible .entry reduce(.param .u64 total)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<2>;
    .shared .align 128 .b8 ones[16384];
    ld.param.u64 %rd0, [total];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, ones;
    mad.lo.u32 %r2, %r0, 16, %r1;
    mov.u32 %r4, 1;
    mov.u32 %r3, 0;
FILL:
    st.shared.v4.u32 [%r2], {%r4, %r4, %r4, %r4};
    add.u32 %r2, %r2, 512;
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p0, %r3, 32;
    @%p0 bra FILL;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra DONE;
    mov.u32 %r3, 0;
AGAIN:
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd0], [%r1], 16384;
    cp.async.bulk.commit_group;
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p1, %r3, 500;
    @%p1 bra AGAIN;
    cp.async.bulk.wait_group 0;
DONE:
    ret;
}
"""
)


def test_reductions_by_the_copy_engine() -> None:
    total = np.zeros(4096, "u4")
    ptxsim.Module(REDUCE).launch("reduce", 6, 32, [total], jobs=3)
    assert set(total.tolist()) == {3000}
