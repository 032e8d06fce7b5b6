"""Dense decode over FP8 records: every kernel with every number of rows and record that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.stress.sanitized import Call
from tests.stress.sanitized.decode import ROWS, SHAPES, calls_of
from tests.support.kernels import FP8_KERNELS, RECORD_KERNELS


def calls() -> Iterator[Call]:
    """Both shapes."""
    for shape, one_item in SHAPES:
        for rows in ROWS:
            for record, width, kv_scale in (("v32", 576, 1.0), ("v4", 512, 1.0), ("fp8", 576, 0.5)):
                case = replace(shape, **rows, record=record, d_qk=width, kv_scale=kv_scale)
                yield from calls_of(case, RECORD_KERNELS, one_item)
            case = replace(shape, **rows, record="fp8", math="fp8", kv_scale=0.5)
            yield from calls_of(case, FP8_KERNELS, one_item)
