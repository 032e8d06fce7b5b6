"""What a cubin says of its kernel is what the kernel's launcher believes."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from mla_cupy.launchers import (
    SPECS,
    decode_block_sm90,
    decode_problem,
    decode_schedule,
    dense_decode_generic,
    merge_states,
    sparse_backward_generic,
    sparse_backward_sm90,
    sparse_backward_sm90_pair,
    sparse_backward_sm100,
    sparse_delta,
    sparse_dkv,
    sparse_forward_sm90,
    sparse_norms,
    sparse_rounders,
    sparse_rows,
    sparse_sink,
)
from mla_cupy.launchers.spec import KernelSpec
from mla_cupy.runtime import sources
from tests.budgets.builds import TARGETS, Target
from tests.budgets.test_budgets import built

#: The facts that a launcher repeats as a constant: kernel -> fact -> where the constant stands.
CONSTANTS: dict[str, dict[str, tuple[ModuleType, str]]] = {
    "dense_decode_sm90_delayed": {
        "block_m": (decode_block_sm90, "BLOCK_M"),
        "tile_tokens": (decode_block_sm90, "TILE_TOKENS"),
    },
    "dense_decode_sm90_seesaw": {
        "block_m": (decode_block_sm90, "BLOCK_M"),
        "tile_tokens": (decode_block_sm90, "TILE_TOKENS"),
    },
    "dense_decode_generic": {
        "block_m": (dense_decode_generic, "BLOCK_M"),
        "tile_tokens": (decode_block_sm90, "TILE_TOKENS"),
    },
    "decode_schedule": {},
    "split_combine": {
        "max_parts": (decode_problem, "MAX_PARTS"),
        "tile_tokens": (decode_block_sm90, "TILE_TOKENS"),
    },
    "sparse_forward_sm90": {
        "block_m": (sparse_forward_sm90, "BLOCK_M"),
        "tile_tokens": (decode_block_sm90, "TILE_TOKENS"),
    },
    "sparse_forward_small_sm90": {"tile_tokens": (decode_block_sm90, "TILE_TOKENS")},
    "merge_states": {"rows_per_block": (merge_states, "ROWS_PER_BLOCK")},
    "sparse_rows": {"rows_per_tile": (sparse_rows, "ROWS_PER_TILE")},
    "sparse_delta": {
        "units_per_block": (sparse_delta, "UNITS_PER_BLOCK"),
        "span_queries": (sparse_delta, "SPAN_QUERIES"),
    },
    "sparse_sink": {"heads_per_block": (sparse_sink, "HEADS_PER_BLOCK")},
    "sparse_norms": {"rows_per_block": (sparse_norms, "ROWS_PER_BLOCK")},
    "sparse_bounds": {},
    "sparse_rounders": {"rows_per_block": (sparse_rounders, "ROWS_PER_BLOCK"), "levels": (sparse_rounders, "LEVELS")},
    "sparse_backward_sm90": {"block_heads": (sparse_backward_sm90, "HEADS_PER_ADDITION")},
    "sparse_backward_sm90_pair": {
        "block_heads": (sparse_backward_sm90_pair, "HEADS_PER_ADDITION"),
        "cluster": (sparse_backward_sm90_pair, "CLUSTER"),
    },
    "sparse_backward_sm100": {"block_heads": (sparse_backward_sm100, "HEADS_PER_ADDITION")},
    "sparse_backward_sm100_ws": {"block_heads": (sparse_backward_sm100, "HEADS_PER_ADDITION")},
    "sparse_backward_generic": {"block_heads": (sparse_backward_generic, "HEADS_PER_ADDITION")},
    "sparse_dkv": {"rows_per_block": (sparse_dkv, "ROWS_PER_BLOCK")},
}
#: Facts that launches read from the cubin itself.
READ = {"threads", "smem_bytes"}
#: Facts for the golden file and for `bench model`.
COUNTED = {"tmem_columns", "tmem_columns_used", "mbarriers", "products", "weight_stationary"}

KINDS = {"i64": "i8", "i32": "i4", "float": "f4"}


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_facts_are_the_launchers(target: Target) -> None:
    facts = built(target).facts
    constants = CONSTANTS[target.kernel]
    assert facts["params_layout"] == target.spec.params.layout()
    assert {name: facts[name] for name in constants} == {
        name: getattr(module, constant) for name, (module, constant) in constants.items()
    }
    of_variant = {"tile_keys"} & facts.keys()
    assert facts.keys() - READ - COUNTED - of_variant == {"params_layout", *constants}, "a fact that nobody compares"
    assert all(facts[name] == getattr(target.variant, name) for name in of_variant)
    assert facts["threads"] % 32 == 0
    assert 32 <= facts["threads"] <= 1024


def parameter_struct(spec: KernelSpec) -> list[tuple[str, str]]:
    """(name, kind) of each member of the struct that the kernel takes, as the source has them."""
    text = b"\n".join(sources.gather(spec.source).values()).decode()
    text = re.sub(r"//.*", "", text)
    (name,) = set(re.findall(r"__grid_constant__ (\w+Params) p\b", text))
    (body,) = re.findall(rf"struct {name} \{{(.*?)\n\}};", text, re.DOTALL)
    members = []
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        if "*" in declaration:
            members.append((declaration.rpartition("*")[2].strip(), "u8"))
        else:
            kind, _, names = declaration.partition(" ")
            members.extend((member.strip(), KINDS[kind]) for member in names.split(","))
    return [member for member in members if member[0] != "padding"]


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_record_has_the_members_of_the_struct(spec: KernelSpec) -> None:
    """The fact `params_layout` sees sizes only: two members of one kind in another order would pass it."""
    record = spec.params.dtype
    names = [name for name in record.names or () if name != "padding"]
    assert parameter_struct(spec) == [(name, record[name].str[1:]) for name in names]


def test_a_point_of_the_schedule_is_two_ints() -> None:
    text = sources.gather("attention/decode_params.cuh")["attention/decode_params.cuh"].decode()
    (body,) = re.findall(r"struct SchedulePoint \{(.*?)\};", text, re.DOTALL)
    assert 4 * body.count("i32 ") == decode_schedule.POINT_BYTES
    assert body.count(";") == 2
