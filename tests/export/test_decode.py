"""Dense decode in C: the same launches as the package's, byte for byte, and the same refusals."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_cupy.errors import MlaError
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.pipeline import Prepared
from mla_cupy.ops.decode_plan import DecodePlan, examine_plan
from mla_cupy.runtime.device import DeviceInfo
from tests.export import compare, draws, modules, package, test_operations
from tests.export.library import Library, filled
from tests.export.package import Call, Writer

GPUS = [package.device(arch, sms) for arch, sms in (("sm_90a", 132), ("sm_90a", 78), ("sm_80", 108), ("sm_90a", 2))]
LIMITS = {"b": 5000, "num_pages": 5000, "max_pages": 5000}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(modules.decode(), tmp_path_factory.mktemp("export") / "decode")


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_calls(library: Library, count: int) -> None:
    assert compare.calls(library, GPUS, LIMITS, count) > 0.8 * count


def test_wrong_calls(library: Library) -> None:
    compare.wrong_calls(library, GPUS[0], LIMITS, 1000)


# ---- Plans ---------------------------------------------------------------------------------------------------------


class Step:
    """A plan, an update and a call with it, on plain numbers."""

    def __init__(self, library: Library, rng: random.Random) -> None:
        self.subject = library.module.subject
        self.values = draws.values(self.subject, rng, LIMITS)
        values = self.values
        self.own = {
            "max_b": max(1, values["b"] + rng.choice((0, 0, 1, 100, -1))),
            "max_pages": max(1, values["max_pages"] + (rng.random() < 0.05)),
            "cp_world": values["cp_world"],
            "cp_rank": values["cp_rank"] + (rng.random() < 0.05),
            "workspace": values["workspace"],
            "workspace_bytes": values["workspace_bytes"],
        }
        self.plan = filled(library.Plan, {**self.own, "scheduled_b": -1})
        self.args = filled(library.Args, values)
        self.lengths = filled(library.Lengths, values)

    def package_plan(self, gpu: DeviceInfo) -> tuple[DecodePlan, Any]:
        """The package's plan, and its configuration."""
        sizes, own, dtypes = self.subject.sizes, self.own, self.subject.dtypes
        problem, limits, _ = examine_plan(
            **{name: sizes[name] for name in ("s_q", "h_q", "page_size")},
            **{name: own[name] for name in ("max_b", "max_pages")},
            d_qk=sizes["d_qk"] + 64 * ("q_rope" in dtypes),
            kv_format=self.subject.notes["record"] or None,
            dtype=dtypes["q"],
            shard=(own["cp_world"], own["cp_rank"]),
            forms={name: True for name in ("q_rope", "attn_sink") if name in dtypes}
            | {"window": self.subject.fixed["window"] or 0},
            tree_mask="tree_mask" in dtypes,
            d_head=sizes["d_head"] if "w_uv" in dtypes else 0,
            batch_invariant=False,
            split_tokens=4096,
            math=self.subject.fixed["math"],
            kernel=None,
        )
        config = DECODE.configure(problem, gpu)
        return DecodePlan(problem, limits, 0, config, (None, own["workspace"])), config

    def run(self, gpu: DeviceInfo, plan: DecodePlan, config: Any) -> None:
        """Update the package's plan and call."""
        values, layout = self.values, DECODE.workspace(config)
        b = plan.check_lengths(Call(self.subject, values).view("seqlens"))
        if b:
            steps = plan.steps(config, values["seqlens_strides[0]"], b)
            prepared = Prepared(steps, ("seqlens",), layout, gpu, package.STREAM)
            prepared.enqueue([0, values["seqlens"]], values["workspace"], package.STREAM)
        plan.mark_scheduled(b)

    def call(self, gpu: DeviceInfo, plan: DecodePlan) -> None:
        """Call with the package's plan."""
        call = Call(self.subject, self.values)
        request = call.request()
        found: Any = plan.configuration(request)
        names = self.subject.operation.names
        prepared = DECODE.prepare(found, replace(request, planned=True), names, gpu, package.STREAM)
        prepared.enqueue(call.addresses(), self.values["workspace"], package.STREAM)


def agrees(library: Library, writer: Writer, status: int, package_does: Callable[[], Any]) -> bool:
    """The package does what C has done, or refuses for the same reason; True if it does."""
    refused = ""
    try:
        package_does()
    except MlaError as error:
        refused = str(error)
    if refused:
        assert (status < 0, library.why(), library.log()) == (True, refused, b"")
        return False
    assert status == 0, library.why()
    assert library.log() == writer.take()
    return True


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_plans(library: Library, count: int) -> None:
    assert compare_plans(library, GPUS, count) > 0.5 * count  # others are refused: no update, other sizes


@pytest.mark.slow
@pytest.mark.parametrize("case", ["decode_fp8", "decode-tree", "decode-window", "decode-projected", "decode-gated"])
def test_plans_of_other_exports(case: str, tmp_path: Path) -> None:
    operation, options = test_operations.CASES[case]
    made = modules.made(operation, ("sm_90a",), **options)
    assert compare_plans(Library(made, tmp_path / "decode"), test_operations.GPUS, 1000) > 300


def test_queries_whose_number_varies_have_no_plan() -> None:
    """The update of a plan has no starts: see `record`."""
    options = {"h_q": 16, "page_size": 64, "arrays": ("cu_seqlens_q",)}
    assert not modules.made("decode", ("sm_90a",), **options).is_planned


def compare_plans(library: Library, gpus: Sequence[DeviceInfo], count: int) -> int:
    """Make plans, update them and call with them, in C and in Python; returns how many calls both served."""
    handles = compare.opened(library, gpus)
    rng = random.Random(35)
    served = 0
    with package.writing(library.parameters) as writer:
        for _ in range(count):
            gpu, step = rng.choice(gpus), Step(library, rng)
            handle = handles[gpu]
            made: list[Any] = []
            status = library.call("plan_make", handle, step.plan, stream=None)
            if not agrees(library, writer, status, lambda s=step, g=gpu, m=made: m.extend(s.package_plan(g))):
                continue
            plan, config = made
            assert library.size("plan_workspace", handle, step.plan) == plan.workspace_bytes
            if rng.random() < 0.9:  # else the call comes without an update
                status = library.call("plan_update", handle, step.plan, step.lengths)
                if not agrees(library, writer, status, lambda s=step, a=(gpu, plan, config): s.run(*a)):
                    continue
            for _ in range(2):
                status = library.call("call_planned", handle, step.args, step.plan)
                served += agrees(library, writer, status, lambda s=step, a=(gpu, plan): s.call(*a))
    return served
