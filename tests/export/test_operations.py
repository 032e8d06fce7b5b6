"""Every other operation in C: the same launches as the package's, byte for byte, and the same refusals."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest

from mla_cupy.export import explore
from mla_cupy.export.operations import OPERATIONS
from tests.export import compare, contents, modules, package
from tests.export.library import Library, filled

GPUS = [package.device("sm_90a", 132), package.device("sm_90a", 78, l2_bytes=4 << 20)]
LIMITS = {"b": 2000, "num_pages": 5000, "max_pages": 3000, "n": 64}
PAGES: dict[str, Any] = {"kv_format": "fp8", "page_size": 64}
FP8 = {**PAGES, "math": "fp8"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "decode-v32": ("decode", {"h_q": 16, "page_size": 64, "kv_format": "v32", "s_q": 2}),
    "decode-fp8": ("decode", {"h_q": 128, "page_size": 64, "kv_format": "fp8", "out_dtype": "float32"}),
    "decode-nope": ("decode", {"h_q": 16, "page_size": 64, "kv_format": "v32-nope"}),
    "decode-512": ("decode", {"h_q": 32, "page_size": 48, "d_qk": 512, "dtype": "float16"}),
    "decode-tree": ("decode", {"h_q": 16, "s_q": 4, "page_size": 64, "arrays": ("tree_mask",)}),
    "decode_fp8": ("decode", {**FP8, "h_q": 128}),
    "decode_fp8-codes": (
        "decode",
        {**FP8, "h_q": 16, "dtype": "float8_e4m3fn", "arrays": ("attn_sink", "q_scales", "kv_scales")},
    ),
    "decode-packed": ("decode", {"h_q": 16, "s_q": 2, "page_size": 64, "arrays": ("cu_seqlens_q", "q_rope")}),
    "decode-window": ("decode", {"h_q": 16, "page_size": 64, "window": 500, "arrays": ("attn_sink",)}),
    "decode-projected": ("decode", {"h_q": 16, "page_size": 64, "arrays": ("w_uv",)}),
    "decode-gated": (
        "decode",
        {"h_q": 64, "page_size": 64, "dtype": "float16", "d_head": 192, "arrays": ("w_uv", "gate", "q_rope")},
    ),
    "decode-codes": ("decode", {"h_q": 16, "s_q": 2, "page_size": 64, "out_dtype": "float8_e4m3fn"}),
    "decode-packed-codes": (
        "decode",
        {"h_q": 16, "s_q": 2, "page_size": 64, "out_dtype": "float8_e4m3fn", "arrays": ("cu_seqlens_q",)},
    ),
    "mla_prepare": (
        "mla_prepare",
        {"h_q": 16, "kv_format": "v32", "page_size": 64, "arrays": ("cos", "sin", "positions")},
    ),
    "mla_prepare-codes": (
        "mla_prepare",
        {**PAGES, "h_q": 128, "theta": 10000, "out_dtype": "float8_e4m3fn", "arrays": ("q_rope",)},
    ),
    "mla_prepare-queries": ("mla_prepare", {"h_q": 64, "d_qk": 192, "dtype": "float16"}),
    "absorb": ("absorb", {"h_q": 16, "arrays": ("q_rope",)}),
    "absorb-192": ("absorb", {"h_q": 128, "d_head": 192, "dtype": "float16"}),
    "merge_project": ("merge_project", {"h_q": 16, "arrays": ("gate",)}),
    "merge_project-16": ("merge_project", {"h_q": 128, "d_head": 256, "dtype": "float16", "out_dtype": "float32"}),
    "indexer_prepare": ("indexer_prepare", {"h_q": 64, "arrays": ("norm_weight", "norm_bias")}),
    "indexer_prepare-paged": ("indexer_prepare", {"h_q": 64, "page_size": 64}),
    "merge_states": ("merge_states", {"h_q": 16, "dtype": "bfloat16"}),
    "cache_append": ("cache_append", {"kv_format": "v32", "page_size": 64}),
    "cache_append-nope": ("cache_append", {"kv_format": "v32-nope", "page_size": 64}),
    "cache_append-fp8": ("cache_append", {"kv_format": "fp8", "page_size": 16, "dtype": "float16"}),
    "sparse_forward": ("sparse_forward", {"h_q": 64, "topk": 2048}),
    "sparse_forward-all": (
        "sparse_forward",
        {"h_q": 16, "topk": 512, "arrays": ("topk_length", "attn_sink", "cu_seqlens_q", "cu_seqlens_kv")},
    ),
    "sparse_decode-all": (
        "sparse_decode",
        {
            "h_q": 16,
            "kv_format": "v4",
            "page_size": 64,
            "topk": 512,
            "arrays": ("attn_sink", "extra_kv_cache", "extra_indices", "extra_topk_length"),
        },
    ),
    "sparse_decode-nope": ("sparse_decode", {"h_q": 64, "kv_format": "v32-nope", "page_size": 64, "topk": 2048}),
    "sparse_decode-codes": (
        "sparse_decode",
        {"h_q": 16, "kv_format": "v32", "page_size": 64, "topk": 512, "out_dtype": "float8_e4m3fn"},
    ),
    "sparse_decode": ("sparse_decode", {"h_q": 16, "kv_format": "v32", "page_size": 64, "topk": 2048}),
    "indexer_logits_paged": ("indexer_logits_paged", {"h_q": 64, "page_size": 64}),
    "indexer_topk": ("indexer_topk", {"topk": 2048}),
    "indexer_topk-paged": ("indexer_topk", {"topk": 2048, "arrays": ("block_table", "ks")}),
    "cache_append-rope": (
        "cache_append",
        {"kv_format": "v32", "page_size": 64, "arrays": ("cos", "sin", "positions")},
    ),
    "prefill-state": ("prefill", {"h_q": 16, "arrays": ("state_out", "state_lse", "mask")}),
    "prefill": ("prefill", {"h_q": 16}),
    "prefill-256": ("prefill", {"h_q": 16, "h_kv": 4, "d_qk": 256, "dtype": "float16", "out_dtype": "float32"}),
}
SELDOM = tuple(case for case in CASES if "-" in case and case != "decode-v32")
"""Cases of `-m slow` alone."""


@functools.cache
def library(case: str, folder: Path) -> Library:
    operation, options = CASES[case]
    return Library(modules.made(operation, ("sm_90a",), **options), folder / case)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operations")


def cases(**marked: Any) -> Any:
    slow = pytest.mark.slow
    return pytest.mark.parametrize("case", [pytest.param(c, marks=[slow] * (c in SELDOM)) for c in CASES], **marked)


def test_every_operation_has_a_case() -> None:
    assert {operation for operation, _ in CASES.values()} == OPERATIONS.keys()


@pytest.mark.one_in(2)
@cases()
def test_calls(case: str, folder: Path) -> None:
    assert compare.calls(library(case, folder), GPUS, LIMITS, 150) > 45


@cases()
def test_what_the_package_takes_is_taken(case: str, folder: Path) -> None:
    """The calls that a GPU's test makes: each has something to compute, or nothing, and none is refused."""
    module, rng = library(case, folder), random.Random(38)
    handle = module.open(GPUS[0])
    for _ in range(100):
        call = contents.call_of(module.module.subject, rng)
        args = filled(module.Args, {**call.values, "workspace": 1 << 39, "workspace_bytes": 64 << 20})
        assert module.call("call", handle, args) == 0, (call.values, module.why())
    module.log()


@cases()
@pytest.mark.slow
def test_many_calls(case: str, folder: Path) -> None:
    assert compare.calls(library(case, folder), GPUS, LIMITS, 10_000) > 3000


@pytest.mark.one_in(2)
@cases()
def test_wrong_calls(case: str, folder: Path) -> None:
    compare.wrong_calls(library(case, folder), GPUS[0], LIMITS, 1000)


@cases()
def test_every_kernel_that_a_call_may_launch_is_there(case: str, folder: Path) -> None:
    """Every outcome of the recorded choice is exported, also those that random calls may not meet."""
    module = library(case, folder).module
    (target,) = module.targets
    for procedure in target.procedures.values():
        for steps in explore.outcomes(procedure.steps):
            for step in steps:
                if hasattr(step, "build"):
                    assert module.kernels[module.index(0, step.build)].spec.supports_arch("sm_90a")
