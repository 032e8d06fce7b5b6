"""Host programs, compiled here with the C compiler, run with their kernels simulated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ptxsim.__main__ import main
from ptxsim.host.builder import stub_directory
from simtest.fatbins import entry, fatbin

HERE = Path(__file__).parent / "programs"
PTX = HERE / "scale.ptx"


def compile_program(source: Path, out: Path, *libraries: str) -> Path:
    """Build a program that links the stubs under the names of the CUDA libraries."""
    stubs = stub_directory()
    command = ["cc", "-Wall", "-Werror", str(source), "-o", str(out), *(str(stubs / each) for each in libraries)]
    subprocess.run(command, check=True)
    return out


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    if shutil.which("cc") is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")


@pytest.fixture(scope="module", name="driver")
def _driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program(HERE / "driver.c", tmp_path_factory.mktemp("driver") / "program", "libcuda.so.1")


@pytest.fixture(scope="module", name="runtime")
def _runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    libraries = ("libcudart.so.13", "libcuda.so.1")
    return compile_program(HERE / "runtime.c", tmp_path_factory.mktemp("runtime") / "program", *libraries)


def run(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run ``ptxsim run-host``; return its status, the program's output, and what the simulator said."""
    status = main(["run-host", *map(str, words)])
    out, err = capfd.readouterr()
    return status, out, err


def test_driver_interface(driver: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capfd, "--sms", 7, driver, PTX)
    assert (status, out) == (0, "right on 7 SMs of sm_90, entries found\n")
    assert "scale: 46 warp-instructions" in err
    assert "1 launches" in err


@pytest.mark.parametrize("how", ["buffer", "opt-in"])
def test_other_ways_to_launch(driver: Path, capfd: pytest.CaptureFixture[str], how: str) -> None:
    status, out, _ = run(capfd, driver, PTX, how)
    assert (status, out[:5]) == (0, "right")


@pytest.mark.parametrize(
    ("how", "said", "reason"),
    [
        ("exchange", "cuLaunchKernel", "PoisonError"),
        ("bounds", "cuLaunchKernel", "out of bounds"),
        ("shared", "cuLaunchKernel", "50000 bytes of dynamic shared memory, but only 49152 are set"),
        ("beyond", "cuMemcpyDtoH_v2(host, data + 4, sizeof host): cudaErrorInvalidValue", ""),
        ("map", "cuTensorMapEncodeTiled", "strides (30,): multiples of 16"),
    ],
)
def test_errors_reach_the_program(
    driver: Path, capfd: pytest.CaptureFixture[str], how: str, said: str, reason: str
) -> None:
    status, out, err = run(capfd, driver, PTX, how)
    assert status == 3
    assert out.startswith(said)
    assert reason in err
    assert ("nothing found" in err) == (how not in ("exchange", "bounds"))


def test_loads_no_such_module(driver: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(capfd, driver, tmp_path / "absent")[1] == "cuModuleLoad(&module, argv[1]): cudaErrorFileNotFound\n"
    cubin = tmp_path / "cubin"
    cubin.write_bytes(b"\x7fELF" + bytes(100))
    status, _, err = run(capfd, driver, cubin)
    assert status == 3
    assert "machine code, which cannot be simulated" in err


@pytest.mark.parametrize("how", ["", "cluster"])
def test_runtime_interface(
    runtime: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("FATBIN", str(tmp_path / "fatbin"))
    text = PTX.read_bytes()
    (tmp_path / "fatbin").write_bytes(fatbin(entry(1, 80, b"no PTX"), entry(1, 90, text)))
    status, out, err = run(capfd, runtime, how)
    assert (status, out) == (0, "ptxsim sm_90a: right, 256 threads, occupancy 2, 2112 clusters, entry\n")
    assert "1 launches" in err


def test_newest_ptx_decides_the_device(
    runtime: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FATBIN", str(tmp_path / "fatbin"))
    (tmp_path / "fatbin").write_bytes(fatbin(entry(1, 100, PTX.read_bytes().replace(b"90a", b"100a"))))
    assert run(capfd, runtime)[1].startswith("ptxsim sm_100a: right")
    status, _, err = run(capfd, "--device", "sm_90a", runtime)
    assert status == 3
    assert "no PTX for sm_90 in an image (it has compute_100)" in err


def test_absent_function_is_named(
    runtime: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FATBIN", str(tmp_path / "fatbin"))
    (tmp_path / "fatbin").write_bytes(fatbin(entry(1, 90, PTX.read_bytes())))
    status, out, err = run(capfd, runtime, "graph")
    assert status == 98
    assert out.startswith("cudaErrorNotSupported\n")
    assert "ptxsim: cudaGraphCreate is not modelled" in err


def test_recorded_launches_run_again(driver: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(capfd, "--record", tmp_path, driver, PTX)[0] == 0
    assert main(["replay", str(tmp_path)]) == 0
    out = capfd.readouterr().out
    assert out.count("right") == 4
    stored = tmp_path / "launch-0001/launch.json"
    stored.write_text(stored.read_text().replace("00004040", "00004041"))  # another factor
    assert main(["replay", str(tmp_path / "launch-0001")]) == 1
    assert "wrong elements at 0x2000" in capfd.readouterr().out
    assert main(["replay", "--close", "f4:0:999", str(tmp_path)]) == 0
    assert main(["replay", "--mutate", str(tmp_path)]) == 1


def test_programs_of_the_stub_alone_end(driver: Path) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(stub_directory())}
    environment.pop("PTXSIM_SOCKET", None)
    done = subprocess.run([driver, PTX], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 97
    assert "only works in a program that `ptxsim run-host` has started" in done.stderr


def test_one_process_at_a_time(driver: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capfd, "sh", "-c", f"{driver} {PTX} && {driver} {PTX}")
    assert (status, out.count("right"), err.count("1 launches")) == (0, 2, 2)


def test_status_and_signals_are_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(capfd, "sh", "-c", "exit 5")[0] == 5
    status, _, err = run(capfd, "sh", "-c", "kill -SEGV $$")
    assert status == 139
    assert "ended by SIGSEGV" in err
    assert run(capfd, "./absent-program")[0] == 1
    assert run(capfd)[0] == 1


def test_options_of_the_program_are_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(capfd, "--sms", 4, "echo", "--sms=3", "--m=2", "--help")[1] == "--sms=3 --m=2 --help\n"


def test_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    status, _, err = run(capfd, "true")
    assert status == 1
    assert "cannot be built" in err
