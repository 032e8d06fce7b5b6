"""Every probe passes in the simulator, whenever asynchronous work is done."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from mla_cupy.kernels import KERNELS
from mla_cupy.runtime import worker
from mla_cupy.selftest import catalog, trial
from mla_cupy.selftest.mma_calls import MmaProbe
from mla_cupy.selftest.place import Place, opened
from mla_cupy.selftest.probe import ARCHS, HOPPER, Machine
from tests.support import sim_driver  # noqa: F401 (the tests' own copy of the simulator)

CALLS = ("block", "kernel")
#: Targets, modes, and whether with calls: kernels have tests of their own, in all modes.
RUNS = (
    ("sm_100a", "early", True),
    ("sm_100a", "late", False),
    ("sm_103a", "late", False),
    ("sm_90a", "early", False),
    ("sm_90a", "late", False),
)
#: A call on Hopper, so that those are tried too.
ONE_CALL = ("sm_90a", "block/sparse_backward_sm90/bfloat16")
#: Calls of forward kernels, and of all with mma.sync.
MMA_CALLS = (
    ("sm_80", "block/attention_mma/bfloat16"),
    ("sm_89", "block/attention_mma/float16"),
    ("sm_120", "kernel/attention_mma_small/bfloat16"),
    ("sm_120", "block/indexer_logits_mma/float8_e4m3fn"),
    *(("sm_100a", f"block/decode_sm100/{name}") for name in ("16heads", "48heads", "float16", "without-rope")),
    ("sm_100a", "kernel/decode_sm100/128heads"),
    ("sm_100a", "block/decode_sm100_joint/128heads"),
    ("sm_100a", "kernel/decode_sm100_joint/128heads"),
    ("sm_100a", "block/sparse_forward_sm100_joint/bfloat16-128heads"),
    ("sm_100a", "block/decode_sm100_records/v4-float16-32rows"),
    ("sm_100a", "kernel/decode_sm100_records/fp8-bfloat16-64rows"),
    ("sm_100a", "block/decode_sm100_fp8/float16-32rows"),
    ("sm_100a", "kernel/decode_sm100_fp8/bfloat16-32rows"),
    ("sm_100a", "block/indexer_logits_sm100/64codes-72heads"),
    ("sm_100a", "block/indexer_logits_sm100/32codes-20heads"),
    ("sm_103a", "kernel/indexer_logits_sm100/128codes-64heads"),
    ("sm_100a", "block/indexer_logits_sm100/4tokens-20heads"),
    ("sm_100a", "kernel/indexer_logits_sm100/2tokens-64heads"),
    ("sm_89", "block/decode_mma_records/fp8-bfloat16-32rows"),
    ("sm_89", "kernel/decode_mma_records/v32-bfloat16-16rows"),
    ("sm_80", "block/sparse_decode_mma/float16-16heads"),
    ("sm_120", "block/dense_mma/float16-128"),
    ("sm_80", "block/attention_mma/float16-64heads"),
    ("sm_80", "block/sparse_backward_mma/float16"),
    ("sm_120", "kernel/sparse_backward_mma/64heads"),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is not test_passes:
        return
    chosen = [
        ((arch, mode), probe.name, takes_turns(arch, mode, i, every(probe.name)))
        for arch, mode, with_calls in RUNS
        for i, probe in enumerate(catalog.probes(arch))
        if (with_calls and not isinstance(probe, MmaProbe) and "_mma" not in probe.name)
        or catalog.stage(probe.name) not in CALLS
        or (arch, probe.name) == ONE_CALL
    ]
    chosen += [((arch, "late"), name, i % every(name) == 0) for i, (arch, name) in enumerate(MMA_CALLS)]
    metafunc.parametrize(
        ("machine", "name"),
        [
            pytest.param(place, name, id="-".join((*place, name)), marks=[] if runs else [pytest.mark.slow])
            for place, name, runs in chosen
        ],
        indirect=["machine"],
    )


def every(name: str) -> int:
    """Number of probes of a kind per probe in an ordinary run.

    Those that call a kernel reach what its own tests reach: each sixth runs.
    """
    return 6 if catalog.stage(name) in CALLS else 1


def takes_turns(arch: str, mode: str, index: int, one_of: int) -> bool:
    """True if an ordinary run has a probe here: probes take turns over the runs of a generation of GPUs."""
    hopper = arch in HOPPER
    alike = [run[:2] for run in RUNS if (run[0] in HOPPER) == hopper]
    turn, place = divmod(index, len(alike))
    return place == alike.index((arch, mode)) and turn % one_of == 0


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    arch, mode = request.param
    here = mock.patch.object(worker, "can_spawn", return_value=False)  # a process takes longer
    with here, opened(Place(arch, "", "none", "a test", mode)) as found:
        yield found


@pytest.mark.one_in(2)
def test_passes(machine: Machine, name: str) -> None:
    (probe,) = (probe for probe in catalog.probes(machine.arch) if probe.name == name)
    result = trial.attempt(probe, machine)
    expected = (trial.PASSED, trial.UNFIT) if name.startswith("kernel/") else (trial.PASSED,)
    assert result.status in expected, result.message
    assert result.compared or result.status == trial.UNFIT


@pytest.mark.parametrize("arch", ARCHS)
def test_names(arch: str) -> None:
    """Unique, the stage first, one line about each; what a probe needs comes before it."""
    names = [probe.name for probe in catalog.probes(arch)]
    assert len(set(names)) == len(names)
    order = list(dict.fromkeys(map(catalog.stage, names)))
    assert order[-2:] == ["block", "kernel"]
    for probe in catalog.probes(arch):
        assert probe.about
        assert "\n" not in probe.about
        assert probe.seconds > 0


def test_what_there_must_be() -> None:
    """The shapes, majors and lanes of the sparse backward on Blackwell; loads, stores, gathers, additions."""
    about = {probe.name: probe.about for probe in catalog.probes("sm_100a")}
    for dtype in ("bfloat16", "float16"):
        for text in (
            "M 64 N 32 K 64, A K-major, B K-major, lane 0",
            "M 64 N 64 K 64, A K-major, B K-major, lane 16",
            "M 128 N 32 K 64, A MN-major, B K-major, lane 0",
            "M 128 N 64 K 64, A MN-major, B K-major, lane 0",
            "M 128 N 64 K 32, A MN-major, B MN-major, lane 0",
            "M 64 N 64 K 32, A MN-major, B MN-major, lane 0",
            "M 64 N 32 K 64, A MN-major, B K-major, lane 16",
            "M 64 N 64 K 64, A MN-major, B K-major, lane 16",
        ):
            for more in ("", ", accumulated"):
                assert [x for x in about if dtype in x and about[x] == f"tcgen05.mma: {text}{more}"], (dtype, text)
        for m, n in ((32, 64), (32, 256), (64, 64), (64, 256)):
            assert [x for x in about if dtype in x and f"mma.ws: M {m} N {n} " in about[x]], (dtype, m, n)
        for n, major in ((128, "K"), (256, "MN")):
            text = f"tcgen05.mma of a pair: M 128 N {n} K 64, A K-major, B {major}-major"
            assert [x for x in about if dtype in x and about[x] == text], (dtype, n)
    for n, k in ((16, 128), (48, 128), (112, 128), (128, 128), (64, 64), (128, 32)):
        text = f"tcgen05.mma of e4m3: M 128 N {n} K {k}, A K-major, B K-major, lane 0"
        assert text in about.values(), (n, k)
    for op in ("ld", "st"):
        for shape in ("16x256b.x1", "16x256b.x2", "16x256b.x4", "16x256b.x8"):
            assert {f"tmem/{op}/{shape}-lane0", f"tmem/{op}/{shape}-lane16"} <= about.keys()
        assert {f"tmem/{op}/32x32b.x16-lane0", f"tmem/{op}/32x32b.x32-lane0"} <= about.keys()
    assert sum(name.startswith("copy/gather4/") for name in about) >= 5


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"])
def test_every_kernel_with_mma_sync(arch: str) -> None:
    """One block of it, and a whole call."""
    names = {tuple(probe.name.split("/")[:2]) for probe in catalog.probes(arch)}
    kernels = [name for name, kernel in KERNELS.items() if "_mma" in name and arch in kernel.archs]
    assert len(kernels) >= 6
    for kernel in kernels:
        assert {("block", kernel), ("kernel", kernel)} <= names


def test_hopper_has_no_probe_of_blackwell() -> None:
    names = [probe.name for probe in catalog.probes(HOPPER[0])]
    assert not [name for name in names if "gather4" in name or catalog.stage(name).startswith(("tmem", "mma"))]
    assert {catalog.stage(name) for name in names} == {"copy", "reduce", "stmatrix", "block", "kernel"}
    assert not [name for name in names if "sm100" in name]


def test_calls_take_whatever_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_cupy.kernels.sparse_backward import sm90
    from mla_cupy.selftest import calls

    monkeypatch.setattr(calls, "_MAIN", {})
    others = [probe.name for probe in catalog.probes("sm_100a") if not isinstance(probe, MmaProbe)]
    assert {catalog.stage(name) for name in others}.isdisjoint(CALLS)
    monkeypatch.setattr(calls, "_MAIN", {"sparse_backward_sm100_new": sm90.KERNEL})
    names = [probe.name for probe in catalog.probes("sm_100a") if catalog.stage(probe.name) in CALLS]
    assert "block/sparse_backward_sm100_new/bfloat16" in names
    assert "kernel/sparse_backward_sm100_new/deterministic" in names
