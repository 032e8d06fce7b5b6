"""The kernels of the probes compile for every target that they are for, on both lines of NVRTC."""

from __future__ import annotations

import warnings

import pytest

from mla_cupy.runtime import cache, sources, worker
from mla_cupy.runtime.build import Build
from mla_cupy.selftest import catalog
from mla_cupy.selftest.probe import ARCHS, InstructionProbe
from tools import budgets

REQUESTS = sorted(
    {
        (request.name, request, probe.kernel)
        for arch in ARCHS
        for probe in catalog.probes(arch)
        if isinstance(probe, InstructionProbe)
        for request in probe.requests(arch)
    },
    key=lambda found: found[0],
)
REGISTERS_OF_AN_SM = 65536
SMEM_OF_A_BLOCK = 227 << 10


def built(line: int, request: object) -> Build:
    if not budgets.library(line):
        pytest.skip(f"no NVRTC wheel of CUDA {line} is installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nothing is writable: then nothing is shared
        places = cache.places()
    return worker.build_here(request, budgets.library(line), places.read, places.write)[0]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("line", budgets.LINES)
@pytest.mark.parametrize("name", [name for name, _, _ in REQUESTS])
def test_compiles_and_fits(name: str, line: int) -> None:
    ((_, request, spec),) = (found for found in REQUESTS if found[0] == name)
    made = built(line, request)
    info, facts = made.info, made.facts
    assert info["notes"] == []
    assert (info["spill_stores"], info["spill_loads"], info["stack"]) == (0, 0, 0)
    assert f".target {request.arch}".encode() in made.ptx
    assert info["registers"] * facts["threads"] <= REGISTERS_OF_AN_SM
    assert info["static_smem"] + facts.get("smem_bytes", 0) <= SMEM_OF_A_BLOCK
    layout = facts["params_layout"]
    assert spec.layout(spec.variants[0]).offsets() == (layout if isinstance(layout, list) else [layout])
    if "setmaxnreg" in facts:  # two warpgroups: none may wait for registers that the block does not have
        more, less = facts["setmaxnreg"]
        assert less <= info["registers"] <= more
        assert more + less <= 2 * info["registers"]


def test_every_variant_is_used() -> None:
    """Every variant for Blackwell is used; and the kernels could share headers with each source."""
    used = {(spec.name, request.label) for _, request, spec in REQUESTS if request.arch == "sm_100a"}
    assert used == {(spec.name, str(variant)) for spec in catalog.KERNELS.values() for variant in spec.variants}
    for spec in catalog.KERNELS.values():
        assert spec.source.startswith("probes/")
        assert len(sources.gather(spec.source)) > 1
