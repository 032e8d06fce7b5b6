"""Kernels that a run admits and withdraws; a simulated run admits none."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mla_cupy import cli
from mla_cupy.errors import UnsupportedDeviceError
from mla_cupy.kernels import KERNELS, choice
from mla_cupy.kernels.sparse_backward import SPARSE_BACKWARD
from mla_cupy.kernels.sparse_backward.problem import SparseBackwardProblem
from mla_cupy.kernels.spec import BLACKWELL
from mla_cupy.runtime import admission, cache, device
from mla_cupy.runtime.device import DeviceInfo, VisibleGpu
from mla_cupy.selftest import catalog, place, runner, verdict
from mla_cupy.selftest.place import Place
from mla_cupy.selftest.trial import DIED, FAILED, HUNG, PASSED, SKIPPED, UNFIT, Result
from tests.support.recorder import B200

KERNEL = "sparse_backward_sm100"
OTHER = "sparse_backward_sm100_ws"
UNPROVEN = {name for name, kernel in KERNELS.items() if kernel.unproven}
NAME, DRIVER = "NVIDIA B200", "580.1"
GPU = Place("sm_100a", NAME, DRIVER, "")
SIMULATED = Place("sm_100a", "", DRIVER, "asked for")
PROBES = catalog.probes("sm_100a")


def results(changed: dict[str, str] | None = None, left_out: Sequence[str] = ()) -> list[Result]:
    """Everything passed, but for what is named."""
    outcome = changed or {}
    return [Result(one.name, outcome.get(one.name, PASSED), 0.1) for one in PROBES if one.name not in left_out]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeviceInfo:
    """A B200 in NVML and CUDA, whose probes nobody runs; an empty cache."""
    gpu = replace(B200, name=NAME, admitted=frozenset())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("MLA_CUPY_ADMISSION", raising=False)
    monkeypatch.setenv("MLA_CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(device, "nvml_gpus", lambda: [VisibleGpu(NAME, (10, 0), 1 << 37, DRIVER)])
    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    monkeypatch.setattr(device, "describe", lambda ordinal: gpu)
    found = importlib.util.find_spec
    monkeypatch.setattr(place.importlib.util, "find_spec", lambda name: name == "cupy" or found(name))
    return gpu


def admitted() -> set[str]:
    return set(admission.admitted(NAME, "sm_100a"))


# -- What a kernel needs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", BLACKWELL)
@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel.unproven])
def test_each_unproven_kernel_can_be_admitted(name: str, arch: str) -> None:
    """It has probes of single blocks and of whole calls, and these need probes of its instructions."""
    if not KERNELS[name].supports_arch(arch):
        pytest.skip(f"not for {arch}")
    stages = {catalog.stage(probe.name) for probe in verdict.needed(name, catalog.probes(arch))}
    assert {"block", "kernel", "tmem"} <= stages
    codes = name.startswith("indexer_") or name.endswith("_fp8")
    products = "mma.pair" if name.endswith("_joint") else "mma.f8f6f4" if codes else "mma"
    assert products in stages


def test_kernels_with_tcgen05_are_unproven() -> None:
    """All that are for Blackwell alone, unless they run on request only: no such GPU has run one."""
    alone = {name for name, kernel in KERNELS.items() if kernel.archs and set(kernel.archs) <= set(BLACKWELL)}
    unproven = {name for name, kernel in KERNELS.items() if kernel.unproven}
    assert unproven <= alone
    assert not [name for name in alone - unproven if not KERNELS[name].on_request]


def test_what_a_kernel_needs() -> None:
    """Its calls, what those need, and what that needs in turn; no other kernel's."""
    names = {probe.name for probe in verdict.needed(KERNEL, PROBES)}
    assert {f"kernel/{KERNEL}/deterministic", f"block/{KERNEL}/bfloat16-without-rope"} <= names
    assert {"mma/float16/s-m64n32", "tmem/ld/32x32b.x32-lane0", "copy/gather4/4rows-none"} <= names
    assert not any(OTHER in name or name.startswith("mma.ws") for name in names)
    assert any(probe.name.startswith("mma.ws") for probe in verdict.needed(OTHER, PROBES))


# -- Verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [FAILED, DIED, HUNG, SKIPPED])
@pytest.mark.parametrize("name", ["tmem/ld/32x32b.x32-lane0", f"block/{KERNEL}/float16", f"kernel/{KERNEL}/64heads"])
def test_one_bad_probe_is_enough(name: str, status: str) -> None:
    found = verdict.judge(KERNEL, PROBES, results({name: status}))
    assert (found.passed, found.failed, found.reason) == (False, True, f"{name} {status}")


def test_others_probes_say_nothing_of_a_kernel() -> None:
    bad = results({f"kernel/{OTHER}/64heads": FAILED, "mma.ws/bfloat16/m64n64": DIED})
    assert verdict.judge(KERNEL, PROBES, bad).passed
    assert verdict.judge(OTHER, PROBES, bad).failed


def test_probes_that_were_left_out() -> None:
    """Then nothing is known, unless one that ran was bad."""
    left_out = [f"kernel/{KERNEL}/64heads"]
    found = verdict.judge(KERNEL, PROBES, results(left_out=left_out))
    assert (found.passed, found.failed) == (False, False)
    assert re.fullmatch(r"1 of its \d+ probes were left out", found.reason)
    assert verdict.judge(KERNEL, PROBES, results({"tmem/ld/32x32b.x32-lane0": FAILED}, left_out)).failed


def test_cases_that_a_kernel_does_not_take() -> None:
    """Do not matter, unless there is nothing else."""
    assert verdict.judge(KERNEL, PROBES, results({f"kernel/{KERNEL}/64heads": UNFIT})).passed
    all_unfit = {probe.name: UNFIT for probe in PROBES if probe.name.startswith(f"kernel/{KERNEL}/")}
    found = verdict.judge(KERNEL, PROBES, results(all_unfit))
    assert (found.passed, found.failed, found.reason) == (False, False, "no probe of a kernel passed")


# -- Records ---------------------------------------------------------------------------------------------------------


def test_a_run_admits_and_a_later_one_withdraws(machine: DeviceInfo) -> None:
    lines = verdict.settle(GPU, results())
    assert f"{KERNEL} is admitted on NVIDIA B200, driver 580.1" in lines
    assert admitted() == UNPROVEN
    verdict.settle(GPU, results(left_out=[f"kernel/{KERNEL}/64heads"]))
    assert admitted() == UNPROVEN
    lines = verdict.settle(GPU, results({f"block/{KERNEL}/float16": HUNG}))
    assert f"{KERNEL} is not admitted on NVIDIA B200, driver 580.1: block/{KERNEL}/float16 hung" in lines
    assert admitted() == UNPROVEN - {KERNEL}


def test_a_simulated_run_admits_nothing(machine: DeviceInfo, tmp_path: Path) -> None:
    assert verdict.settle(SIMULATED, results()) == ["a run in the simulator admits no kernel"]
    assert not (tmp_path / "cache" / admission.LAYOUT).exists()
    assert verdict.settle(Place("sm_90a", "NVIDIA H200", DRIVER, ""), []) == []


def test_a_cache_that_cannot_be_written(machine: DeviceInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "places", lambda: cache.Places((), None))
    *_, said = verdict.settle(GPU, results())
    assert "not recorded, so nothing changes: " in said
    assert "no cache directory can be written; set MLA_CUPY_CACHE_DIR, or MLA_CUPY_ADMISSION=all" in said
    assert admitted() == set()


def test_the_command_records_and_reports(
    machine: DeviceInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command records and reports on a simulated GPU; `mla-cupy info` shows it before and after."""
    assert cli.main(["info"]) == 0
    told = " ".join(capsys.readouterr().out.split())  # one line of several
    (said,) = re.findall(r"NVIDIA B200: `mla-cupy selftest` has not admitted ((?:\w+, )*\w+)\.", told)
    assert set(said.split(", ")) == {name for name in UNPROVEN if not KERNELS[name].on_request}
    monkeypatch.setattr(runner, "run", lambda probes, *more: results())
    monkeypatch.setattr("mla_cupy.selftest.command.compile_all", lambda *given: [])
    path = tmp_path / "report.json"
    assert cli.main(["selftest", "--arch", "sm_100a", "--json", str(path)]) == 0
    line = f"{KERNEL} is admitted on NVIDIA B200, driver 580.1"
    assert f"  admission   {line}\n" in capsys.readouterr().out
    assert line in json.loads(path.read_text())["admission"]
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"NVIDIA B200 +sm_100a +580.1 .* in force", shown)
    assert set(re.findall(r"\w+", shown)) >= UNPROVEN  # on several lines
    assert "has not admitted" not in shown
    assert cli.main(["info", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["admitted"]
    assert (record["gpu"], record["kernels"]) == (NAME, sorted(UNPROVEN))


# -- The choice of kernels -------------------------------------------------------------------------------------------

PROBLEM = SparseBackwardProblem(5, 300, 64, 64, 576, "bfloat16")


def test_an_unproven_kernel_is_chosen_only_where_it_is_admitted(
    machine: DeviceInfo, caplog: pytest.LogCaptureFixture
) -> None:
    """An unadmitted kernel is replaced by the next one, with one warning; it still runs by name."""
    choice._say_waiting.cache_clear()
    with caplog.at_level(logging.WARNING, "mla_cupy"):
        assert SPARSE_BACKWARD.configure(PROBLEM, machine, KERNEL).kernel.name == KERNEL
        known = replace(machine, admitted=frozenset((KERNEL,)))
        assert SPARSE_BACKWARD.configure(PROBLEM, known).kernel.name == KERNEL
        assert caplog.records == []
        for _ in range(3):
            assert SPARSE_BACKWARD.configure(PROBLEM, machine).kernel.name == "sparse_backward_mma"
    assert len(caplog.records) == 1
    assert f"the sparse backward runs on sparse_backward_mma on NVIDIA B200: {KERNEL} has never" in caplog.text
    assert "`mla-cupy selftest`" in caplog.text


def test_nothing_is_said_of_a_kernel_that_would_not_run(machine: DeviceInfo, caplog: pytest.LogCaptureFixture) -> None:
    """It does not take the call, admitted or not."""
    choice._say_waiting.cache_clear()
    with caplog.at_level(logging.WARNING, "mla_cupy"):
        SPARSE_BACKWARD.configure(replace(PROBLEM, aligned=False), machine)
    assert "never run on hardware" not in caplog.text


def test_no_other_kernel_fits(machine: DeviceInfo) -> None:
    with pytest.raises(UnsupportedDeviceError, match=f"{KERNEL} has never run on hardware, .*`mla-cupy selftest`"):
        choice.choose("a call", [KERNELS[KERNEL]], PROBLEM, machine)


def test_an_admitted_kernel_that_is_on_request_stays_so(machine: DeviceInfo) -> None:
    known = replace(machine, admitted=frozenset((OTHER,)))
    assert SPARSE_BACKWARD.configure(PROBLEM, known).kernel.name == "sparse_backward_mma"
