"""What a cubin says of its kernel is what the kernel's launcher believes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mla_cupy.cache_formats import FORMATS
from mla_cupy.kernels import KERNELS
from mla_cupy.kernels.attention import schedule
from mla_cupy.kernels.spec import KernelSpec
from mla_cupy.runtime import sources
from tests.budgets.builds import TARGETS, Target
from tests.budgets.test_budgets import built, to_build

#: Facts that launches read from the cubin itself.
READ = {"threads", "smem_bytes"}
#: Facts for the golden file and for `bench model`.
COUNTED = {"tmem_columns", "tmem_columns_used", "mbarriers", "products", "weight_stationary"}

KINDS = {"i64": "i8", "i32": "i4", "float": "f4"}


@pytest.mark.parametrize("target", to_build(TARGETS))
def test_facts_are_the_launchers(target: Target) -> None:
    facts = built(target).facts
    constants = target.spec.facts
    assert facts["params_layout"] == target.spec.params.layout()
    assert {name: facts.get(name) for name in constants} == constants
    of_variant = {"tile_keys", "block_rows", "max_heads"} & facts.keys()
    known = {"params_layout", *constants, *([] if "record" not in facts else ["record"])}
    assert facts.keys() - READ - COUNTED - of_variant == known, "a fact that nobody compares"
    assert all(facts[name] == getattr(target.variant, name) for name in of_variant)
    assert facts["threads"] % 32 == 0
    assert 32 <= facts["threads"] <= 1024


@pytest.mark.parametrize("target", to_build(t for t in TARGETS if hasattr(t.variant, "record")))
def test_records_of_kernels_are_those_of_the_package(target: Target) -> None:
    """Kernels that are compiled per record say it again."""
    record = FORMATS[target.variant.record]  # type: ignore[attr-defined]
    expected = [record.d_qk, record.d_latent, record.group, record.field("rope").offset]
    assert built(target).facts["record"] == expected


def parameter_struct(spec: KernelSpec[Any]) -> list[tuple[str, str]]:
    """(name, kind) of each member of the struct that the kernel takes, as the source has them."""
    text = b"\n".join(sources.gather(spec.source).values()).decode()
    text = re.sub(r"//.*", "", text)
    (name,) = set(re.findall(r"__grid_constant__ (\w+Params) p\b", text))
    return [member for member in members_of(name, text) if member[0] != "padding"]


def members_of(name: str, text: str) -> list[tuple[str, str]]:
    """Those of its bases come first."""
    ((bases, body),) = re.findall(rf"struct {name}(?: : ([\w, ]+))? \{{(.*?)\n\}};", text, re.DOTALL)
    members = [member for base in filter(None, bases.split(", ")) for member in members_of(base, text)]
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        if "*" in declaration:
            members.append((declaration.rpartition("*")[2].strip(), "u8"))
        else:
            kind, _, names = declaration.partition(" ")
            members.extend((member.strip(), KINDS[kind]) for member in names.split(","))
    return members


@pytest.mark.parametrize("spec", KERNELS.values(), ids=lambda spec: spec.name)
def test_record_has_the_members_of_the_struct(spec: KernelSpec[Any]) -> None:
    """The fact `params_layout` sees sizes only: two members of one kind in another order would pass it."""
    record = spec.params.dtype
    names = [name for name in record.names or () if name != "padding"]
    assert parameter_struct(spec) == [(name, record[name].str[1:]) for name in names]


def test_a_point_of_the_schedule_is_two_ints() -> None:
    text = sources.gather("attention/decode_params.cuh")["attention/decode_params.cuh"].decode()
    (body,) = re.findall(r"struct SchedulePoint \{(.*?)\};", text, re.DOTALL)
    assert 4 * body.count("i32 ") == schedule.POINT_BYTES
    assert body.count(";") == 2
