"""Kernels that Triton has compiled (simtest/triton) run with Triton's own arguments; what they leave out is found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ptxsim
from ptxsim import triton
from simtest.triton import FOLDER

MODES = ["early", "late", "random"]


def rules_of(report: ptxsim.Report) -> set[str]:
    return {finding.rule for finding in report.findings}


@pytest.mark.parametrize("mode", MODES)
def test_pointers_and_scalars(mode: str) -> None:
    x, y = np.random.default_rng(1).standard_normal((2, 1000)).astype("f4")
    out = np.full(1000, np.nan, "f4")
    report = triton.launch(FOLDER / "scaled_sum_sm90.json", 4, [x, y, out, 1000, 2.5], mode=mode)
    assert np.allclose(out, 2.5 * x + y, rtol=1e-6, atol=1e-6)  # the sum is fused
    assert not report.findings


def product(kernel: triton.Kernel, **options: Any) -> set[str]:
    """The rules that a product of 128 x 192 and 192 x 128 breaks; its result is checked."""
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((128, 192)).astype("f2"), rng.standard_normal((192, 128)).astype("f2")
    out = np.full((128, 128), np.nan, "f2")
    with pytest.warns(ptxsim.StrictWarning):
        report = kernel.launch((2, 2), [a, b, out, 192], **options)
    assert np.allclose(out.astype("f4"), a.astype("f4") @ b.astype("f4"), rtol=2e-3, atol=2e-2)
    return rules_of(report)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_host_descriptors(arch: str, mode: str) -> None:
    """TMA, and WGMMA or tcgen05: right by the preset rules; Triton breaks some of them."""
    broken = product(triton.Kernel(FOLDER / f"matmul_{arch}.json"), mode=mode)
    more = {"tcgen05-fence", "copy-proxy", "ld-wait"} if arch == "sm100" else set()
    assert broken == {"mbarrier-init-fence"} | more


def spoiled(pattern: str, by: str = "") -> triton.Kernel:
    """The product on Blackwell with a bug."""
    text, count = re.subn(pattern, by, (FOLDER / "matmul_sm100.ptx").read_text())
    assert count
    facts = json.loads((FOLDER / "matmul_sm100.json").read_text())
    return triton.Kernel(SimpleNamespace(metadata=SimpleNamespace(_asdict=lambda: facts), asm={"ptx": text}))


@pytest.mark.filterwarnings("ignore::ptxsim.StrictWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("pattern", "kind", "text"),
    [
        (r"tcgen05\.wait::ld\.sync\.aligned;", ptxsim.SyncError, "ld-no-wait"),
        (r"tcgen05\.wait::st\.sync\.aligned;", ptxsim.RaceError, "tcgen05.st"),
        (r"@\S+ tcgen05\.commit[^;]*;", ptxsim.DeadlockError, "mbarrier"),
    ],
)
def test_what_is_left_out_is_found(pattern: str, kind: type[ptxsim.SimError], text: str, mode: str) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        product(spoiled(pattern), mode=mode)


def test_scratch_memory_is_that_of_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = triton.Kernel(FOLDER / "scaled_sum_sm90.json")
    kernel._facts.update(global_scratch_size=48, num_ctas=2)
    launched: list[Any] = []
    monkeypatch.setattr(ptxsim.Module, "launch", lambda self, *args, **options: launched.append((args, options)))
    kernel.launch((3, 2), [np.zeros(8, "f4")] * 3 + [8, 1.0])
    ((name, grid, block, args), options) = launched[0]
    assert (name, grid, block) == ("scaled_sum", [6, 2, 1], 128)
    assert [arg.nbytes for arg in args[5:6]] == [12 * 48]
    assert args[6:] == [0]
    assert options == {"smem": 0, "cluster": 2}


def test_misuse(tmp_path: Path) -> None:
    x, half = np.zeros(8, "f4"), np.zeros((128, 128), "f2")
    cases: list[tuple[str, list[Any], str]] = [
        ("scaled_sum_sm90", [x, x, x, 8], "takes more arguments"),
        ("scaled_sum_sm90", [x, x, x, 8, 1.0, 2, 3, 4], "has no parameter for argument 7"),
        ("matmul_sm90", [1, half, half, 128], "argument 0 of matmul: got 1, expected the array of a tensor descriptor"),
        ("matmul_sm90", [half.astype("f4"), half, half, 128], r"got an array float32\(128, 128\), expected 2 axes"),
        ("matmul_sm90", [half[0], half, half, 128], "expected 2 axes and items of 2 bytes"),
    ]
    for name, args, text in cases:
        with pytest.raises(ptxsim.SimError, match=text):
            triton.launch(FOLDER / f"{name}.json", 1, args)
    (tmp_path / "a.json").write_text("{}")
    for given in (tmp_path / "a.json", tmp_path / "none.json", 3):
        with pytest.raises(ptxsim.SimError, match=r"expected a kernel's \.json|expected what triton\.compile returns"):
            triton.Kernel(given)
    (tmp_path / "a.ptx").write_text((FOLDER / "scaled_sum_sm90.ptx").read_text())
    with pytest.raises(ptxsim.SimError, match="no description of a kernel by Triton: it has no 'name'"):
        triton.Kernel(tmp_path / "a.json")
