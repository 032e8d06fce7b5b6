"""Groups of arguments: how they travel, and the mistakes in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, Fp8, Packed
from mla_cupy.ops import OPERATIONS
from mla_cupy.ops.operation import Operation
from tests.support.operations import each

STARTS = np.array([0, 1], np.int32)
GROUPED = [pytest.param(operation, id=operation.name) for operation in each() if operation.groups]


def attend(**options: Any) -> Any:
    """A call over the pages of "fp8", or over rows."""
    kv = np.zeros((4, 576), np.uint8 if "fp8" in options else np.float16)
    q, indices = np.ones((1, 2, 576), np.float16), np.zeros((1, 3), np.int32)
    return mla_cupy.sparse_mla_forward(q, kv, indices, **{"scale": 0.1, **options})


@pytest.mark.parametrize("operation", GROUPED)
def test_flat_and_grouped_are_inverses(operation: Operation) -> None:
    flat = {name: object() for group in operation.groups for name in operation.members(group)}
    flat |= {"kv_scale": 0.5, "q_scale": 2.0} if "fp8" in operation.groups else {}
    flat = {name: x for name, x in flat.items() if name in operation.parameters and not name.endswith("_scales")}
    assert {name: operation.flattened(operation.grouped(flat))[name] for name in flat} == flat
    absent = {name: operation.defaults[name] for name in flat}
    assert operation.grouped(absent) == {}


@pytest.mark.parametrize("number", [0.5, 1, np.float32(0.5), np.float64(0.5), np.int64(2)], ids=repr)
def test_numbers_of_a_group(number: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    assert np.isfinite(attend(fp8=Fp8("fp8", kv_scale=number))[0]).all()


@pytest.mark.parametrize(("library", "make"), [("numpy", "array"), ("torch", "tensor"), ("jax.numpy", "array")])
def test_an_array_of_no_axes_is_no_number(library: str, make: str) -> None:
    array = getattr(pytest.importorskip(library), make)
    with pytest.raises(
        ArgumentError, match=r"^fp8\.kv_scale: got .*0\.5.*, expected a finite number.*; pass a Python number"
    ):
        attend(fp8=Fp8("fp8", kv_scale=array(0.5)))
    with pytest.raises(ArgumentError, match=r"^fp8\.kv_scale: got an array, expected a number$"):
        attend(fp8=Fp8("fp8", kv_scale=array([0.5])))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"packed": (STARTS, STARTS)}, r"packed: got a tuple, expected mla_cupy\.Packed or None; pass Packed\(cu_"),
        (
            {"packed": Packed(STARTS)},
            r"packed\.cu_seqlens_kv: got None, .*; give both, or none, as packed=Packed\(cu_seqlens_q",
        ),
        ({"packed": Packed(STARTS, STARTS, 2)}, r"packed\.max_seqlen_q: got a value, expected none"),
        ({"fp8": Fp8(q_scale=2.0)}, r"fp8\.q_scale: got a value, expected none: the operation has no such member"),
        ({"scale": None}, r"scale: got None, expected the model's softmax scale: 192\*\*-0\.5 for DeepSeek.*; pass sc"),
    ],
)
def test_mistakes(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{match}"):
        attend(**options)


def test_a_group_at_its_defaults_is_none() -> None:
    operation = OPERATIONS["sparse_mla_forward"]
    assert operation.flattened({"fp8": Fp8(q_scale=1)}) == {"math": "exact", "kv_scale": 1.0, "kv_format": None}
    assert operation.grouped({"math": "exact", "kv_scale": True})["fp8"].kv_scale is True
