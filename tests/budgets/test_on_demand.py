"""Builds that no image contains fit as those of the golden file do: a call must not fail when it compiles one."""

from __future__ import annotations

import pytest

from mla_cupy.cache_formats import FORMATS
from mla_cupy.kernels.attention.kernel import ON_DEMAND_RECORDS, identifier
from tests.budgets import test_budgets
from tools.budgets import KERNELS, LINES, Target

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120")
RARE = {identifier(record): record for record in ON_DEMAND_RECORDS}
BUILDS = tuple(
    Target(line, spec.name, variant, arch)
    for line in LINES
    for arch in ARCHS
    for spec in KERNELS.values()
    for variant in spec.variants_on(arch)
    if getattr(variant, "record", "") in RARE
)


@pytest.mark.one_in(64)
@pytest.mark.parametrize("target", BUILDS, ids=str)
def test_fits(target: Target) -> None:
    test_budgets.test_compiles_and_fits(target)
    record = FORMATS[RARE[target.variant.record]]
    assert test_budgets.built(target).facts["record"][:3] == [record.d_qk, record.d_latent, record.group]


def test_no_default_is_one_of_them() -> None:
    assert BUILDS
    for target in BUILDS:
        assert target.variant not in target.spec.defaults_on(target.arch)
