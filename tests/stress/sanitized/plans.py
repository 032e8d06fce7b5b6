"""Dense decode with a plan: batch-invariant, of a tree of drafts, of one rank of several; shared prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mla_cupy import PrefixGroup, reference
from tests.stress.sanitized import Call
from tests.stress.sanitized.decode import SHAPES, compare
from tests.support.calls import on_host, plan_of
from tests.support.cases import DecodeCase, make
from tests.support.flat import cascade_decode, mla_decode
from tests.support.gpu import upload, uploaded
from tests.support.tolerance import check

KERNELS = {"decode_sm90_small": 8, "decode_sm90_seesaw": 40, "attention_generic": 40}
"""And how many heads they get."""


def calls() -> Iterator[Call]:
    """Every kernel that takes plans."""
    for shape, one_item in SHAPES:
        for kernel, h_q in KERNELS.items():
            case = replace(shape, h_q=h_q)
            yield Call(f"{kernel} tree", partial(tree, kernel, replace(case, s_q=2)), one_item)
            yield Call(f"{kernel} batch-invariant", partial(batch_invariant, kernel, case), one_item)
            rank = replace(case, s_q=2, cp_world=3, cp_rank=1)
            yield Call(f"{kernel} one rank of three", partial(planned, kernel, rank), one_item)
    for h_q, record in ((8, ""), (8, "v32"), (64, "")):
        yield Call(f"cascade of {h_q} heads {record}", partial(cascade, h_q, record), one_item=False)


def tree(kernel: str, case: DecodeCase) -> None:
    """Random masks."""
    inputs = make(case)
    words = np.random.default_rng(0).integers(0, 2**case.s_q, (case.b, case.s_q), dtype=np.uint64)
    exact, rounded = (
        reference.mla_decode(*inputs.arguments, **case.options, tree_mask=words, rounding=rounding)
        for rounding in (None, case.dtype)
    )
    got = mla_decode(*uploaded(inputs), **case.options, tree_mask=upload(words), kernel=kernel)
    check(on_host(got), exact, rounded, case.dtype)


def planned(kernel: str, case: DecodeCase, **options: Any) -> None:
    """Run with a plan, which is updated twice."""
    inputs = make(case)
    sizes = {name: x for name, x in case.options.items() if name.startswith("cp_")}
    plan = plan_of(inputs, kernel=kernel, **sizes, **options)
    for lengths in (inputs.seqlens // 2, inputs.seqlens):
        plan.update(upload(lengths))
    compare(inputs, plan=plan)


def batch_invariant(kernel: str, case: DecodeCase) -> None:
    """Run with short splits, so that there are some to merge."""
    planned(kernel, case, batch_invariant=True, split_tokens=128)


def cascade(h_q: int, record: str) -> None:
    """Two groups within a batch, the longer one of nothing but its prefix and a few tokens."""
    case = DecodeCase(b=6, seqlens=(90, 140, 175, 164, 150, 149), h_q=h_q, page_size=16, record=record)
    inputs, groups = make(case), (PrefixGroup(1, 3, 2), PrefixGroup(4, 2, 9))
    table = inputs.block_table.copy()
    for first, count, pages in groups:
        table[first : first + count, :pages] = table[first, :pages]
    arguments = inputs.q, inputs.kv_cache, table, inputs.seqlens
    rounding = "float16" if record else case.dtype
    exact, rounded = (reference.mla_decode(*arguments, rounding=kind) for kind in (None, rounding))
    got = cascade_decode(*(upload(x) for x in arguments), groups)
    check(on_host(got), exact, rounded, case.dtype)
