"""The driver's rules for tensor maps, checked without a driver."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mla_cupy.errors import ArgumentError
from mla_cupy.runtime.tensormap import TensorMapSpec
from tests.support.flat import mla_decode
from tests.support.recorder import Recorder

GOOD = TensorMapSpec("bfloat16", 0x7000, (576, 64, 9), (1152, 73728), (64, 64, 1))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dims": (576,), "strides_bytes": (), "box": (64,)},
        {"dims": (1 << 32, 64, 9), "strides_bytes": ((1 << 40) - 16, 16)},
        {"box": (256, 256, 256), "swizzle": "none", "l2": "none"},
        {"dtype": "uint8", "box": (128, 1, 1)},
        {"dtype": "float32", "box": (32, 1, 1)},
        {"swizzle": "32B", "box": (16, 1, 1)},
    ],
)
def test_good(change: dict[str, object]) -> None:
    replace(GOOD, **change).validate()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dtype": "bf16"}, "dtype"),
        ({"swizzle": "256B"}, "swizzle"),
        ({"l2": "512B"}, "l2"),
        ({"dims": (), "strides_bytes": (), "box": ()}, "dims"),
        ({"dims": (1,) * 6, "strides_bytes": (16,) * 5, "box": (8, 1, 1, 1, 1, 1)}, "dims"),
        ({"dims": (576, 0, 9)}, "dims"),
        ({"dims": ((1 << 32) + 1, 64, 9)}, "dims"),
        ({"box": (64, 64)}, "box"),
        ({"box": (64, 257, 1)}, "box"),
        ({"box": (64, 0, 1)}, "box"),
        ({"box": (4, 1, 1)}, "box"),
        ({"box": (72, 1, 1)}, "box"),
        ({"swizzle": "64B"}, "box"),
        ({"strides_bytes": (1152,)}, "strides_bytes"),
        ({"strides_bytes": (1150, 73728)}, "strides_bytes"),
        ({"strides_bytes": (0, 73728)}, "strides_bytes"),
        ({"strides_bytes": (1152, 1 << 40)}, "strides_bytes"),
        ({"base": 0x7008}, "base"),
        ({"base": 0}, "base"),
    ],
)
def test_bad_names_the_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^TensorMapSpec\.{field}: got "):
        replace(GOOD, **change).validate()  # type: ignore[arg-type]


def test_an_error_in_a_call_names_the_array(recorder: Recorder) -> None:
    q, cache = np.ones((1, 1, 16, 576), np.float16), np.ones((4, 64, 576), np.float16)
    mla_decode(q, cache, np.zeros((1, 2), np.int32), np.array([100], np.int32))
    made = recorder.maps[0]
    assert made.array == "kv_cache"
    words = r"^the tensor map of kv_cache, strides_bytes: got .*, expected multiples of 16 below 2\^40; copy kv_cache$"
    with pytest.raises(ArgumentError, match=words):
        replace(made, strides_bytes=(1 << 40,) * (len(made.dims) - 1)).validate()
