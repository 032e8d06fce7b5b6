# ruff: noqa: E501 (lines of PTX and CUDA are kept whole)
"""Statistics, bank conflicts, timeline and the command line."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import ptxsim
from ptxsim.__main__ import main
from ptxsim.state.report import tensor_cycles
from ptxsim.tool.progress import ProgressLine
from simtest import nvrtc
from simtest.runners import bf16
from simtest.single import HEADER


def gemm(timeline: ptxsim.Timeline | None = None, banks: bool = False) -> ptxsim.Report:
    """Run one tile of the Hopper GEMM with K = 128."""
    module = ptxsim.Module(nvrtc.kernel_ptx("hopper_gemm.cu"))
    arrays = [bf16(np.random.default_rng(0), 64, 128) for _ in range(2)] + [bf16(np.random.default_rng(1), 64, 64)]
    maps = [
        ptxsim.encode_tiled(
            "bfloat16", module.memory.map(a), [a.shape[1], 64], [2 * a.shape[1]], [64, 64], swizzle="128B"
        )
        for a in arrays
    ]
    return module.launch("hopper_gemm", 1, 160, [*maps, 2], 7 * 8192 + 64, mode="late", timeline=timeline, banks=banks)


def test_counts_flops_and_bytes() -> None:
    report = gemm(banks=True)
    assert report.instructions["wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"] == 2 * 4 * 4
    assert report.flops == {"wgmma bf16": 2 * 64 * 64 * 128}
    assert report.bytes["bulk read"] == 2 * 2 * 8192
    assert report.bytes["bulk written"] == 8192
    assert report.bytes["shared written"] == 8192
    assert report.counters["async wgmma"] == 8
    assert {"mbarrier at shared byte 57344", "barrier 1"} <= set(report.waits)
    assert all(times > 0 for times, _ in report.waits.values())
    assert "wgmma bf16" in str(report)
    assert "  mbarrier at shared byte 57344" in str(report)
    sites = [v for k, v in report.banks.items() if "stmatrix" in k]
    assert sites
    assert all(waves == ideal for _, waves, ideal in sites)


def test_how_busy_the_tensor_cores_can_be() -> None:
    report = gemm()
    tensor, issue = 2 * 64 * 64 * 128 / 4096, report.total / 4
    assert report.tensor_share == pytest.approx(tensor / max(tensor, issue))
    assert f"tensor cores: busy at most {report.tensor_share:.0%}" in str(report)
    assert tensor_cycles({"wgmma e4m3": 8192, "wgmma bf16": 4096}, "sm_90a") == 2
    assert tensor_cycles({"tcgen05 e2m1x2": 32768}, "sm_100a") == 1
    assert tensor_cycles({"mma f64": 1}, "sm_90a") is None


def test_progress_of_a_long_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ptxsim.Module(HEADER + ".visible .entry k()\n{\nret;\n}\n")
    seen: list[tuple[int, int, int]] = []
    module.launch("k", 3, 64, [], progress=lambda *now: seen.append(now))
    assert seen == sorted(seen)
    assert {total for _, total, _ in seen} == {3}
    stream, clock = io.StringIO(), itertools.count()
    monkeypatch.setattr("ptxsim.tool.progress.time.monotonic", lambda: next(clock))
    line = ProgressLine(stream)
    for finished in range(3):
        line(finished, 3, 100)
    assert stream.getvalue().startswith("\r1 of 3 clusters, 100 basic blocks, 2 s")
    line.clear()
    assert stream.getvalue().endswith("\r")


def test_bank_conflicts_are_counted() -> None:
    code = ".reg .b32 %r<9>; .shared .align 4 .b8 s[8192]; mov.u32 %r1, %tid.x; mov.u32 %r2, s; mad.lo.u32 %r3, %r1, {step}, %r2; st.shared.u32 [%r3], %r1; ret;"
    for step, waves in ((4, 1), (8, 2), (128, 32), (132, 1)):
        module = ptxsim.Module(HEADER + ".visible .entry k()\n{\n" + code.replace("{step}", str(step)) + "\n}\n")
        (site,) = module.launch("k", 1, 32, [], banks=True).banks.values()
        assert site == [1, waves, 1]


def test_timeline(tmp_path: Path) -> None:
    timeline = ptxsim.Timeline()
    gemm(timeline)
    timeline.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["cat"] for e in events if e["ph"] == "X"} == {"run", "wait", "async", "phase"}
    assert sum(e["name"] == "wgmma" for e in events if e["ph"] == "X") == 8
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert sorted(processes) == ["asynchronous units", "block (0, 0, 0)"]
    for track in {s.track for s in timeline.spans if s.track.startswith("warp")}:
        bars = sorted((s.start, s.end) for s in timeline.spans if s.track == track)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(bars)), track
    pytest.importorskip("matplotlib")
    timeline.draw(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_a_page_shows_every_span(tmp_path: Path) -> None:
    timeline = ptxsim.Timeline()
    gemm(timeline)
    timeline.save_page(tmp_path / "t.html", "a <kernel>")
    text = (tmp_path / "t.html").read_text()
    assert text.count("<rect ") == len(timeline.spans)
    assert "<h1>a &lt;kernel&gt;</h1>" in text
    assert text.count("<svg ") == text.count("</svg>") == 2
    assert "<title>waits for parity 0 of mbarrier at shared byte" in text
    for track in {span.track for span in timeline.spans}:
        assert f">{track}</text>" in text
    drawing = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    for bar in drawing.iter("rect"):
        assert 0 <= float(bar.get("x", "")) <= float(bar.get("x", "")) + float(bar.get("width", "")) <= 1571


def test_two_blocks_in_a_timeline(tmp_path: Path) -> None:
    """Blocks that run after one another have bars of their own."""
    timeline = ptxsim.Timeline()
    module = ptxsim.Module(HEADER + ".visible .entry k()\n{\nbar.sync 0;\nret;\n}\n")
    report = module.launch("k", 2, 64, [], timeline=timeline)
    assert {s.block for s in timeline.spans} == {(0, 0, 0), (1, 0, 0)}
    assert report.waits == {"barrier 0": (2, 4)}
    for block in ((0, 0, 0), (1, 0, 0)):
        assert {s.track for s in timeline.spans if s.block == block} == {"warp 0", "warp 1"}


def test_command_line_compiles_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    source, trace = tmp_path / "k.cu", tmp_path / "t.json"
    source.write_text(
        'extern "C" __global__ void __cluster_dims__(2) k(float *x) { __syncthreads(); x[blockIdx.x * 64 + threadIdx.x] = VALUE; }'
    )
    flags = ["--grid", "2", "--block", "64", "--mode", "late", "--banks", "--race-global", "-D", "VALUE=3"]
    page = ["--html", str(tmp_path / "t.html")]
    drawn = ["--png", str(tmp_path / "t.png")] if importlib.util.find_spec("matplotlib") else []
    assert main(["run", str(source), "zeros:f4:128", *flags, "--trace", str(trace), *page, *drawn]) == 0
    text = capsys.readouterr().out
    assert "kernel k: " in text
    assert "barrier 0" in text
    assert json.loads(trace.read_text())["traceEvents"]
    assert "<svg" in (tmp_path / "t.html").read_text()
    assert not drawn or (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["run", str(source), "zeros:f4:128", "--block", "64"]) == 1
    assert 'identifier "VALUE" is undefined' in capsys.readouterr().err


def test_runs_as_a_module(tmp_path: Path) -> None:
    """``python -m ptxsim`` in the directory that holds the package."""
    ptx = tmp_path / "k.ptx"
    ptx.write_text(HEADER + ".visible .entry k()\n{\nret;\n}\n")
    place = Path(ptxsim.__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "ptxsim", "check", str(ptx)], cwd=place, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("instructions, all modelled\n")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ptx = tmp_path / "k.ptx"
    ptx.write_text(
        nvrtc.compile_ptx(
            'extern "C" __global__ void twice(float *x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }'
        )
    )
    assert main(["check", str(ptx)]) == 0
    assert "all modelled" in capsys.readouterr().out
    save = tmp_path / "out.npz"
    assert main(["run", str(ptx), "arange:f4:40", "int:40", "--block", "64", "--save", str(save)]) == 0
    assert np.load(save)["arr_0"].tolist() == [2 * i for i in range(40)]
    assert main(["run", str(ptx), "arange:f4:30", "int:40", "--block", "64"]) == 1
    assert "out of bounds" in capsys.readouterr().err
    bad = tmp_path / "bad.ptx"
    bad.write_text(HEADER + ".visible .entry k()\n{\nfoo.b32 %r1;\nret;\n}\n")
    assert main(["check", str(bad)]) == 1


STRUCT = """.visible .entry k(.param .align 8 .b8 p[24], .param .u64 out)
{
.reg .b32 %r<9>; .reg .b64 %rd<9>;
ld.param.u64 %rd1, [out]; ld.param.u32 %r1, [p]; ld.param.u64 %rd2, [p+8]; ld.param.u16 %r2, [p+16];
ld.global.u32 %r3, [%rd2+4]; st.global.u32 [%rd1], %r1; st.global.u32 [%rd1+4], %r3; st.global.u32 [%rd1+8], %r2;
ret;
}
"""


def test_struct_arguments(tmp_path: Path) -> None:
    """A 4-byte number, the address of the first array, a 2-byte number."""
    ptx, save = tmp_path / "k.ptx", tmp_path / "out.npz"
    ptx.write_text(HEADER + STRUCT)
    words = ["data:arange:u4:8", "struct:u4=7,u8=@0,u2=9", "zeros:u4:3", "--block", "1"]
    assert main(["run", str(ptx), *words, "--save", str(save)]) == 0
    assert np.load(save)["arr_1"].tolist() == [7, 1, 9]


@pytest.mark.parametrize(
    "words",
    [["zeros:f4"], ["zeros:what:4"], ["many:f4:4"], ["int:x"], ["map:3:64:128B"], ["none.npy"], ["struct:u4"],
     ["struct:u8=@4", "zeros:u4:3"], ["zeros:u4:3"], []],
)  # fmt: skip
def test_bad_arguments_are_named(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ptx = tmp_path / "k.ptx"
    ptx.write_text(HEADER + STRUCT)
    assert main(["run", str(ptx), *words]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_bad_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    empty, binary = tmp_path / "empty.ptx", tmp_path / "binary.ptx"
    empty.write_text(HEADER)
    binary.write_bytes(bytes(range(128, 256)))
    for path in (empty, binary, tmp_path / "none.ptx"):
        assert main(["run", str(path)]) == 1
        assert capsys.readouterr().err.startswith("error: ")
