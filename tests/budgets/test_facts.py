"""Facts in a cubin match the launcher's expectations."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mla_cupy.cache_formats import FORMATS
from mla_cupy.kernels import KERNELS
from mla_cupy.kernels.attention import schedule
from mla_cupy.kernels.spec import KernelSpec
from mla_cupy.runtime import sources
from mla_cupy.runtime.build import facts as facts_of
from mla_cupy.selftest import catalog
from tests.budgets.test_budgets import built, to_build
from tools.budgets import TARGETS, Target
from tools.generate import params

#: Facts that launches read from the cubin itself.
READ = {"threads", "smem_bytes"}
#: Facts for the golden file and for `bench model`.
COUNTED = {"tmem_columns", "tmem_columns_used", "mbarriers", "products", "weight_stationary"}


@pytest.mark.parametrize("target", to_build(TARGETS))
def test_facts_are_the_launchers(target: Target) -> None:
    facts = built(target).facts
    constants = {**target.spec.facts, **target.spec.facts_of(target.variant)}
    assert facts["params_layout"] == target.spec.layout(target.variant).offsets()
    assert {name: facts.get(name) for name in constants} == constants
    of_variant = {"tile_keys", "block_rows", "block_heads", "max_heads", "max_d_nope"} & facts.keys() - constants.keys()
    known = {"params_layout", *constants, *([] if "record" not in facts else ["record"])}
    assert facts.keys() - READ - COUNTED - of_variant == known - READ, "a fact that nobody compares"
    assert all(facts[name] == getattr(target.variant, name) for name in of_variant)
    assert facts["threads"] % 32 == 0
    assert facts_of(b"", built(target).ptx) == facts, "the simulator reads them off the PTX"
    assert 32 <= facts["threads"] <= 1024


@pytest.mark.parametrize("target", to_build(t for t in TARGETS if hasattr(t.variant, "record")))
def test_records_of_kernels_are_those_of_the_package(target: Target) -> None:
    """Kernels that are compiled per record say it again."""
    record = FORMATS[target.variant.record]
    expected = [record.d_qk, record.d_latent, record.group, record.field("rope").offset]
    assert built(target).facts["record"] == expected


@pytest.mark.parametrize("spec", [*KERNELS.values(), *catalog.KERNELS.values()], ids=lambda spec: spec.name)
def test_a_kernel_has_the_class_of_its_struct(spec: KernelSpec[Any]) -> None:
    structs = {spec.params_of(variant).__name__ for variant in spec.variants}
    assert structs <= {*params.parameter_structs(spec.source, sources.source_root())}


def test_a_point_of_the_schedule_is_two_ints() -> None:
    text = sources.gather("attention/decode_params.cuh")["attention/decode_params.cuh"].decode()
    (body,) = re.findall(r"struct SchedulePoint \{(.*?)\};", text, re.DOTALL)
    assert 4 * body.count("i32 ") == schedule.POINT_BYTES
    assert body.count(";") == 2
