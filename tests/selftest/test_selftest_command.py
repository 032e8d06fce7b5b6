"""`mla-cupy selftest`: what it shows and writes, and its exit status."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from mla_cupy import cli, parts
from mla_cupy.runtime import nvrtc
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.selftest import catalog, mma, place
from tests.selftest.test_selftest_mutants import upper_lanes_too
from tests.support import sim_driver  # noqa: F401 (the tests' own copy of the simulator)

Captured = pytest.CaptureFixture[str]


def test_all_well(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "report.json"
    command = ["selftest", "--arch", "sm_100a", "--simulate", "--probes", "stmatrix/*", "--json", str(path)]
    assert cli.main(command) == 0
    shown = capsys.readouterr()
    assert "Not on a GPU but in the simulator: asked for." in shown.err
    (block,) = re.findall(r"```\n(.*?)\n```", shown.out, re.DOTALL)
    assert "mla-cupy selftest for sm_100a" in block
    assert "the simulator (ptxsim, mode late), not a GPU: asked for" in block
    assert "NVRTC 12" in block or "NVRTC 13" in block
    assert "small integers" in block
    assert "all well: 4 pass" in block
    assert re.search(r"^pass +[\d.]+ s  stmatrix/bfloat16-32keys$", block, re.MULTILINE)
    assert max(map(len, block.splitlines())) <= 120
    written = json.loads(path.read_text())
    assert written["success"]
    assert written["simulated"]
    assert written["counts"] == {"passed": 4}
    assert written["nvrtc"] in block
    assert {row["name"] for row in written["results"]} == {
        probe.name for probe in catalog.probes("sm_100a", "stmatrix/*")
    }
    assert {"name", "status", "seconds", "message", "compared", "about"} == written["results"][0].keys()


def test_failure_is_reported(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first mismatch with its index, and what was skipped for it."""
    monkeypatch.setattr(mma, "sum_cells", upper_lanes_too)
    path = tmp_path / "report.json"
    wanted = "mma/bfloat16/s-m64n32*"
    command = ["selftest", "--arch", "sm_100a", "--simulate", "--json", str(path)]
    assert cli.main([*command, "--probes", wanted]) == 1
    block = capsys.readouterr().out.partition("```\n")[2]
    assert "NOT WELL: 3 FAIL" in block
    assert re.search(r"FAIL +[\d.]+ s  mma/bfloat16/s-m64n32\n +tcgen05.mma: M 64 N 32", block)
    assert re.search(
        r"dump\[lane \d+, column \d+\]: got -?[\d.]+, expected -?[\d.]+ \(\d+ of 16384 values differ\)", block
    )
    assert not json.loads(path.read_text())["success"]

    some = [probe for probe in catalog.probes("sm_100a") if probe.name in ("mma/bfloat16/s-m64n32", SMALL_BLOCK)]
    monkeypatch.setattr(catalog, "probes", lambda arch, pattern="*": some)
    assert cli.main(command) == 1
    assert re.search(rf"skip +0.00 s  {SMALL_BLOCK}\n +mma/bfloat16/s-m64n32 failed", capsys.readouterr().out)
    assert cli.main([*command, "--keep-going"]) == 1
    shown = capsys.readouterr().out
    assert re.search(rf"pass +[\d.]+ s  {SMALL_BLOCK}\n +1 calls, 64 heads: error of dq", shown)
    assert "--keep-going" in shown


SMALL_BLOCK = "block/sparse_backward_sm100/bfloat16"


def test_list(capsys: Captured) -> None:
    assert cli.main(["selftest", "--arch", "sm_90a", "--list"]) == 0
    shown = capsys.readouterr().out
    for probe in catalog.probes("sm_90a"):
        assert probe.name in shown
    assert not any(line.lstrip().startswith("mma/") for line in shown.splitlines())
    assert cli.main(["selftest", "--arch", "sm_103a", "--list", "--probes", "*gather4*"]) == 0
    assert capsys.readouterr().out.count("copy/") == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--arch", "sm_75"], "--arch: got 'sm_75', expected one of sm_80, sm_86,"),
        (["--arch", "sm_100a", "--probes", "nma/*"], "--probes: got 'nma/*', expected a pattern that matches a probe"),
    ],
)
def test_wrong_names(options: list[str], said: str, capsys: Captured) -> None:
    assert cli.main(["selftest", *options]) == 2
    assert said in capsys.readouterr().err


def test_help(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["selftest", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--arch", "--probes", "--list", "--json", "--simulate", "--keep-going", "examples:"):
        assert option in shown


def test_default_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place.device, "nvml_archs", lambda: ["sm_75", "sm_90a"])
    assert place.default_arch() == "sm_90a"
    monkeypatch.setattr(place.device, "nvml_archs", lambda: ["sm_75"])
    assert place.default_arch() == "sm_100a"


def test_without_the_simulator(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """An installation without it, on a machine without the GPU: an error that says where it was looked for."""
    monkeypatch.delitem(sys.modules, "ptxsim")
    monkeypatch.setattr(parts, "_find_simulator", lambda: sys.modules.update({"ptxsim": None}))
    assert cli.main(["selftest", "--arch", "sm_90a", "--simulate", "--probes", "reduce/s32*"]) == 2
    assert (
        "ptxsim: got nothing, expected ptxsim; install it from a checkout: pip install ./ptxsim"
        in capsys.readouterr().err
    )


def test_without_nvrtc_it_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Not one failure for each probe; the list needs none."""
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    assert cli.main(["selftest", "--arch", "sm_100a", "--simulate"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("mla-cupy: NVRTC: got none, expected an installed libnvrtc; pip install")
    assert cli.main(["selftest", "--arch", "sm_100a", "--list"]) == 0


@pytest.mark.gpu
def test_on_hopper(hopper: DeviceInfo, tmp_path: Path) -> None:
    """Real run: instructions and one block of each kernel."""
    path = tmp_path / "report.json"
    assert cli.main(["selftest", "--arch", "sm_90a", "--probes", "[bcrs]*", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert not written["simulated"]
    assert set(written["counts"]) <= {"passed", "unfit"}
