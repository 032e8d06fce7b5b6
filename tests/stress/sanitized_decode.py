"""Small hostile calls of every build of dense decode on a GPU, for compute-sanitizer:

compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 python -m tests.stress.sanitized_decode
compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.stress.sanitized_decode --one-item

racecheck does not know mbarriers on which one lane arrives for its warp, so that it reports hazards where a block has
several work items: `--one-item` leaves out the cases in which one has. Results are compared with the oracle.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import mla_cupy
from mla_cupy import reference
from tests.support.calls import plan_of
from tests.support.cases import DecodeCase, make
from tests.support.gpu import upload, uploaded
from tests.support.kernels import DECODE_KERNELS, RECORD_KERNELS, takes
from tests.support.tolerance import check

#: One sequence, whose tiles are splits of one work item each; and so many that a block has several.
ONE = DecodeCase(b=1, seqlens=(400,))
SEVERAL = DecodeCase(b=140, seqlens=(130, 0, 65, 70), page_size=16, missing_pages=1)
#: A build for each number of rows; what lies between takes the next larger one.
ROWS = ({"h_q": 7}, {"h_q": 16}, {"h_q": 12, "s_q": 2}, {"h_q": 16, "s_q": 2}, {"h_q": 70})


def cases(shape: DecodeCase) -> Iterator[tuple[str, DecodeCase]]:
    """Every kernel with every number of rows, dtype and width of keys that it takes."""
    for rows in ROWS:
        for width in (576, 512):
            dtype = "float16" if width == 512 else "bfloat16"
            case = replace(shape, **rows, d_qk=width, dtype=dtype)
            yield from ((name, case) for name in DECODE_KERNELS)
        for record in ("v32", "fp8"):
            case = replace(shape, **rows, record=record, kv_scale=0.5 if record == "fp8" else 1.0)
            yield from ((name, case) for name in RECORD_KERNELS)


def call(kernel: str, case: DecodeCase, tree: bool = False, **planned: Any) -> None:
    """One call, compared with the oracle."""
    import cupy

    inputs = make(case)
    options: dict[str, Any] = dict(case.options)
    exact, rounded = inputs.exact, inputs.rounded
    if tree:
        words = np.random.default_rng(0).integers(0, 2**case.s_q, (case.b, case.s_q), dtype=np.uint64)
        exact = reference.mla_decode(*inputs.arguments, **options, tree_mask=words)
        rounded = reference.mla_decode(*inputs.arguments, **options, tree_mask=words, rounding=case.dtype)
        options["tree_mask"] = upload(words)
    if planned:
        plan = plan_of(inputs, kernel=kernel, **planned)
        plan.update(upload(inputs.seqlens))
        options["plan"] = plan
    else:
        options["kernel"] = kernel
    out, lse = mla_cupy.mla_decode(*uploaded(inputs), **options)
    check((cupy.asnumpy(out), cupy.asnumpy(lse)), exact, rounded, case.dtype)


def main() -> None:
    """Call everything once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one-item", action="store_true", help="only where a block has one work item")
    shapes = (ONE,) if parser.parse_args().one_item else (ONE, SEVERAL)
    calls = 0
    for shape in shapes:
        for name, case in cases(shape):
            if takes(name, case):
                call(name, case)
                calls += 1
        for name in ("decode_sm90_small", "decode_sm90_seesaw", "decode_generic"):
            drafts = replace(shape, h_q=8 if name == "decode_sm90_small" else 40, s_q=2)
            call(name, drafts, tree=True)
            call(name, replace(drafts, s_q=1), batch_invariant=True, split_tokens=128)
            calls += 2
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
