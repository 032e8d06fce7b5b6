"""Random calls: valid ones with sizes and strides of every kind, and the same with a mistake."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from mla_cupy.dtypes import TABLE
from mla_cupy.export.subject import Array, Subject
from tests.export.package import Call

_REGION = 1 << 52
"""Address space of each array: none reaches the next one's."""
_SMALL = (0, 1, 1, 2, 3, 5, 8, 17, 64, 127, 200, 1000, 5000)
Values = dict[str, Any]


def values(subject: Subject, rng: random.Random, limits: dict[str, int]) -> Values:
    """The arguments of a call; `limits` are of sizes."""
    drawn: Values = {}
    for size in subject.free_sizes:
        most = limits.get(size.name, _SMALL[-1])
        drawn[size.name] = max(size.low, min(most, rng.choice(_SMALL)))
    drawn |= _fitting(subject, drawn, rng) if rng.random() < 0.9 else {}
    for option in subject.free_options:
        drawn[option.name] = _option(option.name, subject, rng, drawn)
    call = Call(subject, drawn)
    for at, array in enumerate(subject.arrays):
        aligned = rng.random() < 0.8 or array.written
        nbytes = TABLE[array.dtype].nbytes
        drawn[array.name] = (at + 2) * _REGION + (16 * rng.randrange(1000) if aligned else nbytes * rng.randrange(1000))
        drawn |= _strides(call, array, rng, aligned)
    drawn["workspace"] = (len(subject.arrays) + 2) * _REGION + 256 * rng.randrange(1000)
    drawn["workspace_bytes"] = 1 << 40
    return drawn


def _fitting(subject: Subject, drawn: Values, rng: random.Random) -> Values:
    """Sizes that fit others, which few random ones would."""
    found: Values = {}
    if "ends" in drawn:  # of the top-k: one per row, or one for several rows
        found["ends"] = drawn["s_q"] if rng.random() < 0.5 else max(1, drawn["s_q"] // 4)
    if "tables" in drawn:
        found["tables"] = drawn["s_q"] if rng.random() < 0.5 else 1
    if "extra_width" in drawn:
        found |= {"extra_width": subject.sizes["width"], "extra_page_size": max(1, drawn["extra_page_size"])}
    if "rope_pairs" in drawn:
        found["rope_pairs"] = rng.choice((0, 16, 32, 32, 64))
    if "mask_bytes" in drawn:
        found["mask_bytes"] = 16 * (-(-max(1, drawn["s_kv"]) // 128) + rng.randrange(2))
    return found


def _option(name: str, subject: Subject, rng: random.Random, drawn: Values) -> Any:
    windowed = bool(subject.fixed.get("window"))
    grouped = windowed or "cu_seqlens_q" in subject.dtypes
    choices: dict[str, Callable[[], Any]] = {
        "scale": lambda: math.exp(rng.uniform(-9, 4)),
        "causal": lambda: 1 if "tree_mask" in subject.dtypes or windowed else rng.randrange(2),
        "relative": lambda: rng.randrange(2),
        "cp_world": lambda: rng.choice((1, 1, 2, 8, 65536)) if not grouped or rng.random() < 0.05 else 1,
        "cp_rank": lambda: rng.randrange(drawn["cp_world"]),
        "kv_scale": lambda: math.exp(rng.uniform(-5, 5)) if subject.notes.get("record") == "fp8" else 1.0,
        "q_scale": lambda: math.exp(rng.uniform(-5, 5)),
        "eps": lambda: rng.choice((0.0, 1e-6, 1.0)),
        "clean": lambda: rng.randrange(2),
        "independent": lambda: rng.randrange(2),
        "empty_lse": lambda: rng.choice((-math.inf, math.inf, 0.0, -1e30, 3.25)),
    }
    return choices[name]()


def _strides(call: Call, array: Array, rng: random.Random, aligned: bool) -> Values:
    """Strides from the last axis to the first, each past what the further ones reach, or a bit more."""
    step = 16 // TABLE[array.dtype].nbytes if aligned else 1
    reach, strides = 1, []
    shape = [call.size(axis) for axis in array.axes]
    for axis in reversed(range(len(shape))):
        if axis >= array.num_strides:
            reach = max(1, shape[axis])
            continue
        stride = -(-reach // step) * step + step * rng.choice((0, 0, 0, 1, 7, 1000))
        if ("d+4" in array.axes or (axis and shape[-1] % step)) and rng.random() < 0.95:  # no gaps within pages
            stride = reach
        strides.insert(0, stride)
        reach = stride * max(1, shape[axis])
    return {f"{array.name}_strides[{axis}]": stride for axis, stride in enumerate(strides)}


def spoil(subject: Subject, values: Values, rng: random.Random) -> None:
    """Put a mistake into the arguments of a call that has an element to compute."""
    for size in subject.free_sizes:
        values[size.name] = max(values[size.name], 2)
    values |= respaced(subject, values)
    array = rng.choice(subject.arrays)
    written = rng.choice([each for each in subject.arrays if each.written])
    stride = rng.randrange(max(1, array.num_strides))
    mistakes: list[Values] = [
        {array.name: 0},
        {array.name: values[array.name] - (1 << 63)},
        {rng.choice(subject.free_sizes).name: rng.choice((-1, 1 << 31, 1 << 62))},
        {f"{array.name}_strides[{stride}]": rng.choice((1, -1)) << rng.randrange(49, 63)},
        {array.name: values[array.name] | 1} if TABLE[array.dtype].nbytes > 1 else {array.name: 0},
        {f"{written.name}_strides[0]": 0},
    ]
    place = subject.operation.in_place.get(written.name)
    others = [each.name for each in subject.arrays if each is not written and each.name != place]
    mistakes += [{written.name: values[name]} for name in others]
    for option in subject.free_options:
        bad = {"real": (math.nan,), "integer": (-1, 1 << 30)}[option.kind] if option.name != "empty_lse" else (1e39,)
        mistakes.append({option.name: rng.choice(bad)})
    values |= rng.choice(mistakes)


def respaced(subject: Subject, values: Values) -> Values:
    """Contiguous strides for the sizes."""
    call, found = Call(subject, values), dict[str, Any]()
    for array in subject.arrays:
        shape, stride = [call.size(axis) for axis in array.axes], 1
        for axis in reversed(range(len(shape))):
            if axis < array.num_strides:
                found[f"{array.name}_strides[{axis}]"] = stride
            stride *= shape[axis]
    return found
