"""Published times of others' forwards on a B200, which the model must reproduce before it predicts anything."""

from __future__ import annotations

from dataclasses import dataclass

from .forward import Plan, Work
from .plans import PAIR_ROWS, pair_plan

_FP8_ROW_BYTES = 576
_HEADS = 128


@dataclass(frozen=True)
class Published:
    """One time: whose, of what, and by which plan the kernel works as far as its source or a thread tells.

    us
        As published, or from published TFLOP/s, whose sizes are assumed: the ratio hardly depends on them.
    fitted
        Whether a constant of the model was chosen by it, so that it confirms nothing.
    """

    source: str
    plan: Plan
    work: Work
    us: float
    fitted: bool = False


def _from_tflops(work: Work, tflops: float) -> float:
    return work.flops / tflops / 1e6


_FP8 = pair_plan("pair, FP8", 1)
_HALF = pair_plan("pair", 2)
_HALF_Q_IN_TMEM = pair_plan("pair, 384 of Q's columns in tensor memory", 2, tmem_dims=384)
_SPARSE = Work("sparse, 4,096 queries of 2,048 keys", 4096, _HEADS, 2048, 0)
_DENSE = Work("dense 64/512, 4,096 queries of 2,048 keys", 4096, _HEADS, 2048, 0)


def _decode(batch: int, keys: int, rows: int = _HEADS) -> Work:
    heads = f"{rows // 4} heads, 4 queries" if rows != _HEADS else f"{rows} heads"
    return Work(f"FP8 decode, {heads}, {batch} of {keys:,}", batch, rows, keys, _FP8_ROW_BYTES)


CASES = (
    Published("flashinfer#2805", _FP8, _decode(1, 8192), 15.7, fitted=True),
    Published("flashinfer#2805", _FP8, _decode(32, 8192), 52.4, fitted=True),
    Published("flashinfer#2805", _FP8, _decode(64, 8192), 78.2, fitted=True),
    Published("flashinfer#2805", _FP8, _decode(128, 8192), 145.0, fitted=True),
    Published("flashinfer#2805", _FP8, _decode(256, 8192), 285.2, fitted=True),
    Published("flashinfer#2805", _FP8, _decode(128, 8192, 4 * PAIR_ROWS), 478.8),
    Published("vllm#41778, FlashInfer", _FP8, _decode(128, 4096), 69.3, fitted=True),
    Published("vllm#41778, tokenspeed", _FP8, _decode(128, 4096), 65.6, fitted=True),
    Published("vllm#41778, FlashInfer", _FP8, _decode(128, 16384), 222.0, fitted=True),
    Published("vllm#41778, tokenspeed", _FP8, _decode(128, 16384), 201.0, fitted=True),
    Published("vllm#41778, tokenspeed", _FP8, _decode(64, 81920, 64), 610.0, fitted=True),
    Published("FlashMLA, 1,450 TFLOP/s", _HALF_Q_IN_TMEM, _SPARSE, _from_tflops(_SPARSE, 1450)),
    Published("flash-attention#2621, 1,180 TFLOP/s", _HALF, _SPARSE, _from_tflops(_SPARSE, 1180)),
    Published("flash-attention#2621, 820 TFLOP/s", _HALF, _DENSE, _from_tflops(_DENSE, 820)),
)
