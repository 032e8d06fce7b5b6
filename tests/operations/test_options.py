"""Options of the wrong kind, which once ended in other libraries' exceptions, and dtypes in every form."""

from __future__ import annotations

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, reference
from mla_cupy.ops import COMPOSITE_OPERATIONS, OPERATIONS, POOL_OPERATIONS
from mla_cupy.ops.operation import Operation
from tests.support.mistakes import Bad, option, raises
from tests.support.operations import each, function_of, good_call, output_names

ALL = ({**OPERATIONS, **POOL_OPERATIONS, **COMPOSITE_OPERATIONS}).values()
#: For flags; 0 and 1, and NumPy's truth values, are fine.
NO_FLAGS = (
    "True",
    "False",
    "",
    2,
    -1,
    0.0,
    None,
    [],
    [True],
    np.ones(2),
    np.array([True]),
    object(),
    np.timedelta64(1, "D"),
)
NO_NUMBERS = (
    *("0.5", True, [], [1.0], np.ones(2), np.array([1.0]), 1j, object(), float),
    *(np.timedelta64(1, "D"), np.timedelta64(1, "s"), np.timedelta64("NaT", "s")),
)
NO_KERNELS = (
    "fastest",
    "",
    3,
    True,
    [],
    ["attention_generic"],
    {},
    np.zeros(3),
    np.array("attention_generic"),
    object(),
)
NO_DTYPES = ("float", "fp32", "", 3, True, [], ["float32"], {}, np.zeros(3, np.float32), object(), Ellipsis)
NO_BASES = ("10", "E", "", 2, 2.718281828, None, [], ["e"], np.array("e"), np.zeros(2), object())
NO_COUNTS = ("3", "", 1.0, -1, 2**31, None, [], True, 1j, np.ones(2), object(), int, np.timedelta64(1, "s"))
WRONG: dict[str, tuple[tuple[Any, ...], type[Exception]]] = {
    "accumulate": (
        ("", "fp16", "bfloat16", np.float16, 2, None, [], True, np.array("float16"), object()),
        ArgumentError,
    ),
    "batch_invariant": (NO_FLAGS, ArgumentError),
    "split_tokens": ((*NO_COUNTS, 0, 63, 100), ArgumentError),
    "causal": (NO_FLAGS, ArgumentError),
    "clean": (NO_FLAGS, ArgumentError),
    "deterministic": (NO_FLAGS, ArgumentError),
    "independent": (NO_FLAGS, ArgumentError),
    "scale": ((*NO_NUMBERS, None), ArgumentError),
    "empty_lse": ((*NO_NUMBERS, None), ArgumentError),
    "kernel": (NO_KERNELS, ArgumentError),
    "out_dtype": (NO_DTYPES, DTypeError),
    "dkv_dtype": (NO_DTYPES, DTypeError),
    "lse_base": (NO_BASES, ArgumentError),
    "cp_world": ((None, 0, -1, "2", 2.0, True, [], 1 << 17), ArgumentError),
    "cp_rank": ((None, 1, -1, "0", 0.0, False, []), ArgumentError),
    "k": ((*NO_COUNTS, 0, 8193), ArgumentError),
    "max_keys": ((*NO_COUNTS, 0), ArgumentError),
    "max_segments": ((*NO_COUNTS, 0, (1 << 14) + 1), ArgumentError),
    "order": (("", "values", 2, None, [], True, np.array("index"), object()), ArgumentError),
    "relative": (NO_FLAGS, ArgumentError),
    "interleaved": (NO_FLAGS, ArgumentError),
    "hadamard": (NO_FLAGS, ArgumentError),
    "reference_rounding": (NO_FLAGS, ArgumentError),
    "eps": ((*NO_NUMBERS, None, -1e-6, float("inf"), float("nan"), 1e39), ArgumentError),
    "scales": (("", "power_of_two", 2, None, [], True, np.array("plain"), object()), ArgumentError),
    "kv_format": (("", "v31", "V32", 2, True, [], ["v32"], np.array("v32"), object()), ArgumentError),
    "kv_scale": ((*NO_NUMBERS, None, 0.0, -1.0), ArgumentError),
    "q_scale": ((*NO_NUMBERS, None, 0.0, -1.0), ArgumentError),
    "math": (("FP8", "", 3, True, None, [], ["fp8"], np.array("fp8"), object()), ArgumentError),
    "page_size": ((*NO_COUNTS, 0), ArgumentError),
    "keep_first": (NO_COUNTS, ArgumentError),
    "keep_last": (NO_COUNTS, ArgumentError),
    "target": (("", "head", 2, None, [], True, np.array("per_head"), object()), ArgumentError),
    "target_scale": ((*NO_NUMBERS, None, 0.0, -1.0), ArgumentError),
    "gradients": (NO_FLAGS, ArgumentError),
    "buffer_bytes": (("3", "", 1.0, -1, 0, 2**41, None, [], True, 1j, np.ones(2), object()), ArgumentError),
    "topk": ((*NO_COUNTS, 0, 8193), ArgumentError),
    "slots": (NO_FLAGS, ArgumentError),
    "groups": (
        (
            None,
            3,
            "x",
            "abc",
            {},
            object(),
            np.zeros((1, 3)),
            [3],
            [None],
            ["abc"],
            [(0, 2)],
            [(0, 2, 1.0)],
            [(0, 2, True)],
        ),
        ArgumentError,
    ),
    "return_values": (NO_FLAGS, ArgumentError),
    "window": ((*NO_COUNTS, 0), ArgumentError),
    "d": ((*(count for count in NO_COUNTS if count is not None), 0, 129), ArgumentError),
    "max_seqlen_q": ((*NO_COUNTS, 0), ArgumentError),
}


def output_of(operation: Operation, option: str) -> str:
    """The output whose dtype the option chooses; "" if it chooses none."""
    return next((output.name for output in operation.outputs if output.dtype_option == option), "")


def options_of(operation: Operation) -> set[str]:
    return {*operation.options._fields}


def may_be_none(operation: Operation, name: str) -> bool:
    return operation.parameters[name].default is None


CASES = [
    pytest.param(operation, name, at, id=f"{operation.name}-{name}-{at}")
    for operation in each()
    for name in sorted(options_of(operation))
    for at, value in enumerate(WRONG[name][0])
    if not (value is None and may_be_none(operation, name))
    and not (isinstance(value, dict) and operation.name in COMPOSITE_OPERATIONS)  # an empty one chooses nothing
    and not (isinstance(value, np.ndarray) and f"{name}s" in operation.names)  # a group takes arrays in its place
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("operation", "name", "at"), CASES)
def test_wrong_options(operation: Operation, name: str, at: int, place: str) -> None:
    values, error = WRONG[name]
    bad = Bad("", option(name, values[at]), error, (operation.paths.get(name, name),))
    call = good_call(operation)
    if place == "cupy" and isinstance(values[at], np.ndarray):
        pytest.skip("uploading makes another kind of it")
    call.pop(output_of(operation, name), None)
    raises(bad, function_of(operation), call, place)


@pytest.mark.parametrize("operation", each(), ids=lambda operation: operation.name)
@pytest.mark.parametrize(
    "dtype", ["float32", np.float32, np.dtype("float32"), np.dtype("float32").newbyteorder("=")], ids=repr
)
def test_dtypes_in_every_form(operation: Operation, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    for output in operation.outputs:
        if output.dtype_option:
            call = good_call(operation)
            del call[output.name]
            results = function_of(operation)(**call, **{output.dtype_option: dtype})
            assert results[output_names(operation).index(output.name)].dtype == np.float32


def test_bfloat16_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    operation = next(operation for operation in each() if operation.name == "mla_decode")
    for dtype in ("bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        call = good_call(operation)
        del call["out"]
        assert function_of(operation)(**call, out_dtype=dtype)[0].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("flag", [True, False, 1, 0, np.True_, np.False_, np.int64(1)], ids=repr)
def test_flags_in_every_form(flag: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    for operation in each():
        for name in {"causal", "clean", "deterministic"} & set(operation.options._fields):
            calls = good_call(operation), good_call(operation)
            for call in calls:
                call.pop("tree_mask", None)  # takes the place of `causal`
            got = function_of(operation)(**calls[0], **{name: flag})
            wanted = function_of(operation)(**calls[1], **{name: bool(flag)})
            assert all(x.tobytes() == y.tobytes() for x, y in zip(got, wanted, strict=True))


@pytest.mark.parametrize("operation", ALL, ids=lambda operation: operation.name)
def test_the_oracle_names_what_it_takes(operation: Operation) -> None:
    """It gets the arrays, and the options whose names it has: one that it hides in `**` would be lost."""
    taken = inspect.signature(getattr(reference, operation.name)).parameters
    assert {array.name for array in operation.inputs if not array.scratch} <= set(taken)
    assert all(value.kind is not inspect.Parameter.VAR_KEYWORD for value in taken.values())
    required = {name for name, value in taken.items() if value.default is inspect.Parameter.empty}
    assert required <= {*operation.names, *operation.options._fields}


def test_a_message_does_not_print_a_whole_array() -> None:
    call = good_call(OPERATIONS["merge_states"])
    with pytest.raises(
        ArgumentError, match=r"^empty_lse: got array\(\[0\., 0\., .*\.\.\., expected a number"
    ) as caught:
        mla_cupy.merge_states(**call, empty_lse=np.zeros(900))
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)
