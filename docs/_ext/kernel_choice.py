"""Typical calls and GPUs, and the kernel that each call gets on each GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mla_cupy.errors import MlaError
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import Batch, DecodeProblem, Forms
from mla_cupy.kernels.dense import DENSE, DENSE_BACKWARD
from mla_cupy.kernels.dense.problem import DenseBackwardProblem, DenseProblem
from mla_cupy.kernels.gpus import gpu_of
from mla_cupy.kernels.indexer.logits import LOGITS, LOGITS_PAGED
from mla_cupy.kernels.indexer.logits.problem import LogitsProblem
from mla_cupy.kernels.indexer.loss import HEAD_SUMS, LOSS, SPARSE_LOSS
from mla_cupy.kernels.indexer.loss.problem import LossProblem
from mla_cupy.kernels.indexer.topk import TOPK
from mla_cupy.kernels.indexer.topk.problem import TopkProblem
from mla_cupy.kernels.projection import MERGE_PROJECT
from mla_cupy.kernels.projection.pipeline import ProjectProblem
from mla_cupy.kernels.sparse_backward import SPARSE_BACKWARD
from mla_cupy.kernels.sparse_backward.problem import SparseBackwardProblem
from mla_cupy.kernels.sparse_decode import SPARSE_DECODE
from mla_cupy.kernels.sparse_decode.problem import SparseDecodeProblem
from mla_cupy.kernels.sparse_forward import SPARSE_FORWARD
from mla_cupy.kernels.sparse_forward.problem import SparseForwardProblem
from mla_cupy.runtime.device import EVERY_KERNEL, DeviceInfo


def _gpu(name: str, arch: str, **changes: Any) -> DeviceInfo:
    return replace(gpu_of(arch).info, name=name, **changes)


GPUS = (
    _gpu("H100, H200", "sm_90a"),
    _gpu("B200, B300", "sm_100a"),
    _gpu("B200, B300 after `mla-cupy selftest`", "sm_100a", admitted=EVERY_KERNEL),
    _gpu("A100", "sm_80"),
    _gpu("RTX 4090", "sm_89"),
    _gpu("T4", "sm_75"),
)


def _single(tokens: int) -> DecodeProblem:
    return DecodeProblem(1, 128, "bfloat16", batch=Batch(1, tokens))


def _fp8_math() -> DecodeProblem:
    return DecodeProblem(1, 128, "bfloat16", record="fp8", math="fp8")


def _in_parts() -> DecodeProblem:
    return DecodeProblem(1, 16, "bfloat16", forms=Forms(q_rope=True))


def _forward(h_q: int, **changes: Any) -> SparseForwardProblem:
    sizes = {"s_q": 4096, "s_kv": 8192, "topk": 2048, **changes}
    return SparseForwardProblem(h_q=h_q, d_qk=576, dtype="bfloat16", **sizes)


def _backward(h_q: int, **changes: Any) -> SparseBackwardProblem:
    return SparseBackwardProblem(s_q=4096, s_kv=8192, h_q=h_q, topk=2048, d_qk=576, dtype="bfloat16", **changes)


def _dense_backward(d_qk: int, d_v: int) -> DenseBackwardProblem:
    return DenseBackwardProblem(8192, 8192, 128, 128, d_qk, d_v, "bfloat16", shared_rope=True)


def _logits(dtype: str, heads: int, **changes: Any) -> LogitsProblem:
    return LogitsProblem(4096, 32768, heads, 128, dtype, **changes)


SITUATIONS = (
    ("`mla_decode`, 16 heads", DECODE, DecodeProblem(1, 16, "bfloat16")),
    ("`mla_decode`, 2 queries, 16 heads: 32 rows", DECODE, DecodeProblem(2, 16, "bfloat16")),
    ("`mla_decode`, 4 queries, 16 heads: 64 rows", DECODE, DecodeProblem(4, 16, "bfloat16")),
    ("`mla_decode`, 128 heads", DECODE, DecodeProblem(1, 128, "bfloat16")),
    ("`mla_decode`, 128 heads, 1 sequence of up to 8,192", DECODE, _single(8192)),
    ("`mla_decode`, 128 heads, 1 sequence of up to 1,024", DECODE, _single(1024)),
    ("`mla_decode`, 16 heads, v32 cache", DECODE, DecodeProblem(1, 16, "bfloat16", record="v32")),
    ("`mla_decode`, 128 heads, v32 cache", DECODE, DecodeProblem(1, 128, "bfloat16", record="v32")),
    ("`mla_decode`, 4 queries, 16 heads, v32 cache", DECODE, DecodeProblem(4, 16, "bfloat16", record="v32")),
    ('`mla_decode`, "fp8" cache, math="fp8"', DECODE, _fp8_math()),
    ("`mla_decode`, 16 heads, a tree of 4 drafts", DECODE, DecodeProblem(4, 16, "bfloat16", tree_mask=True)),
    (
        "`mla_decode`, 16 heads, `q_rope`",
        DECODE,
        DecodeProblem(1, 16, "bfloat16", forms=Forms(q_rope=True)),
    ),
    ("`mla_decode`, 128 heads, a window", DECODE, DecodeProblem(1, 128, "bfloat16", forms=Forms(window=4096))),
    *(
        (
            f"`mla_decode`, {h_q} heads, a window, v32 cache",
            DECODE,
            DecodeProblem(1, h_q, "bfloat16", record="v32", forms=Forms(window=4096)),
        )
        for h_q in (16, 128)
    ),
    ("`mla_decode`, 32 heads, keys of 320", DECODE, DecodeProblem(1, 32, "bfloat16", d_qk=320)),
    ("`mla_decode`, 40 heads, keys of 288", DECODE, DecodeProblem(1, 40, "bfloat16", d_qk=288)),
    ("`mla_decode`, strides not of 16 bytes", DECODE, DecodeProblem(1, 128, "bfloat16", aligned=False)),
    ("`merge_project`", MERGE_PROJECT, ProjectProblem(128, 128, "bfloat16", 1)),
    ("`sparse_mla_decode`, 16 heads", SPARSE_DECODE, SparseDecodeProblem(64, 16, 2048, "bfloat16", "v32")),
    ("`sparse_mla_decode`, 128 heads", SPARSE_DECODE, SparseDecodeProblem(64, 128, 2048, "bfloat16", "v32")),
    (
        'the same, "fp8" cache, math="fp8"',
        SPARSE_DECODE,
        SparseDecodeProblem(64, 128, 2048, "bfloat16", "fp8", math="fp8"),
    ),
    ("the same, v41 cache", SPARSE_DECODE, SparseDecodeProblem(64, 128, 2048, "bfloat16", "v41", compact=True)),
    ("`sparse_mla_forward`, 16 heads", SPARSE_FORWARD, _forward(16)),
    ("`sparse_mla_forward`, 32 heads", SPARSE_FORWARD, _forward(32)),
    ("`sparse_mla_forward`, 64 heads", SPARSE_FORWARD, _forward(64)),
    ("`sparse_mla_forward`, 128 heads", SPARSE_FORWARD, _forward(128)),
    ("`sparse_mla_forward`, 16 heads, v32 cache, converted first", SPARSE_FORWARD, _forward(16, record="v32")),
    ("`sparse_mla_forward`, 16 heads, 8 queries, v32 cache", SPARSE_FORWARD, _forward(16, s_q=8, record="v32")),
    ('`sparse_mla_forward`, "fp8" cache, math="fp8"', SPARSE_FORWARD, _forward(128, record="fp8", math="fp8")),
    ("`sparse_mla_backward`, 64 heads", SPARSE_BACKWARD, _backward(64)),
    ("`sparse_mla_backward`, 128 heads", SPARSE_BACKWARD, _backward(128)),
    ("`sparse_mla_backward`, 256 heads", SPARSE_BACKWARD, _backward(256)),
    ("`sparse_mla_backward`, strides not of 16 bytes", SPARSE_BACKWARD, _backward(128, aligned=False)),
    ("`mla_prefill`, 128 heads, keys of 192", DENSE, DenseProblem(8192, 8192, 128, 128, 192, 128, "bfloat16")),
    ("`mla_prefill` in e4m3, 128 heads", DENSE, DenseProblem(8192, 8192, 128, 128, 192, 128, "float8_e4m3fn")),
    ("`mla_prefill`, 64 heads, keys of 256", DENSE, DenseProblem(8192, 8192, 64, 64, 256, 256, "bfloat16")),
    ("`mla_prefill_backward`, keys of 192", DENSE_BACKWARD, _dense_backward(192, 128)),
    ("`mla_prefill_backward`, keys of 256", DENSE_BACKWARD, _dense_backward(256, 256)),
    ("`indexer_logits`, e4m3, 64 heads of 128", LOGITS, _logits("float8_e4m3fn", 64)),
    ('the same, accumulate="float16"', LOGITS, _logits("float8_e4m3fn", 64, accumulate="float16")),
    ("`indexer_logits`, bfloat16, 128 heads of 128", LOGITS, _logits("bfloat16", 128)),
    ("`indexer_logits_paged`, pages of 64", LOGITS_PAGED, _logits("float8_e4m3fn", 64, page_size=64, num_pages=9)),
    ("the same, keys in e2m1", LOGITS_PAGED, _logits("float8_e4m3fn", 64, page_size=64, num_pages=9, e2m1=True)),
    ("`indexer_logits_paged`, pages of 16", LOGITS_PAGED, _logits("float8_e4m3fn", 64, page_size=16, num_pages=9)),
    ("the same, 16 tokens", LOGITS_PAGED, _logits("float8_e4m3fn", 64, page_size=16, num_pages=9, block_tokens=16)),
    ("`indexer_topk`, 4,096 rows of 32,768", TOPK, TopkProblem(4096, 32768, 2048)),
    ("`indexer_topk`, 64 rows of 32,768", TOPK, TopkProblem(64, 32768, 2048)),
    ("`indexer_topk`, 4,096 rows of 131,072", TOPK, TopkProblem(4096, 131072, 2048)),
    ("`indexer_warmup_loss`, sums over heads", LOSS, LossProblem(8192, 8192, 128, 64, 576, 128)),
    ("`indexer_head_sums`, all keys", HEAD_SUMS, LossProblem(8192, 8192, 16, 0, 576, 0)),
    ("`indexer_head_sums`, with indices", HEAD_SUMS, LossProblem(8192, 8192, 16, 0, 576, 0, topk=2048)),
    ("`indexer_warmup_loss`, per head", LOSS, LossProblem(8192, 8192, 64, 64, 128, 64, per_head=True)),
    ("`indexer_sparse_loss`", SPARSE_LOSS, LossProblem(4096, 4096, 128, 64, 576, 128, topk=2048)),
    ("`indexer_sparse_loss`, 256 heads", SPARSE_LOSS, LossProblem(4096, 4096, 256, 64, 576, 128, topk=2048)),
)


def chosen(pipeline: Any, problem: Any, gpu: DeviceInfo) -> str:
    """Name of the kernel that a call of this kind gets, or "none"."""
    try:
        return f"`{pipeline.configure(problem, gpu).kernel.name}`"
    except MlaError:
        return "none"
