"""The warm-up operator with a target per head beside FlashAttention-2, on a GPU: how many times as long it takes.

What was said of the operator first (lemyx/tilelang-dsa, 128K tokens and fewer, in sequences of 2,048, on an H800): its
forward, which also gives the attention's output, takes 2.2 to 2.3 times as long as FlashAttention-2's, and its backward
5.0 to 5.2 times as long.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..core.device import Device
from ..core.errors import BenchError
from ..core.implementation import Implementation
from ..ops.indexer_loss.cases import LossCase
from ..ops.indexer_loss.operation import INDEXER_LOSS
from ..ops.indexer_loss.own import FORWARD

SEQUENCE = 2048
CALLS = 5
DTYPE = "bfloat16"

Timed = tuple[Callable[[], AbstractContextManager[object]], Callable[[], object]]


def cases(tokens: Sequence[int]) -> list[LossCase]:
    """Cases of each number of tokens: sequences of 2,048 as in the claim, and one sequence."""
    found = []
    for number in tokens:
        if number < SEQUENCE or number % SEQUENCE:
            raise BenchError(f"--operator: got {number} tokens, expected multiples of {SEQUENCE}, such as 8192")
        shapes = dict.fromkeys([(number // SEQUENCE, SEQUENCE), (1, number)])
        found += [LossCase(b, s, 64, 128, 64, 64, per_head=True) for b, s in shapes]
    return found


def rows(
    wanted: Sequence[LossCase], own: Implementation, flash: Implementation, device: Device, calls: int = CALLS
) -> Iterator[dict[str, Any]]:
    """A row per case: milliseconds of both, and ours over FlashAttention-2's; the backward is both passes less one."""
    for case in wanted:
        times = _times(case, own, flash, device, calls)
        device.release()
        (ours, ours_forward), (other, other_forward) = ((_median(both), _median(one)) for both, one in times)
        yield {
            "sequences": case.b,
            "tokens of each": case.s,
            "forward": f"{ours_forward:.2f}",
            "FlashAttention-2": f"{other_forward:.2f}",
            "ratio": f"{ours_forward / other_forward:.2f}",
            "backward": f"{ours - ours_forward:.2f}",
            "its backward": f"{other - other_forward:.2f}",
            "their ratio": f"{(ours - ours_forward) / (other - other_forward):.2f}",
        }


def _median(us: Sequence[float]) -> float:
    return statistics.median(us) / 1e3


def _times(
    case: LossCase, own: Implementation, flash: Implementation, device: Device, calls: int
) -> list[tuple[list[float], list[float]]]:
    """Microseconds of both passes and of the forward, of each implementation, all in turn; checked before."""
    with device.current():
        inputs = INDEXER_LOSS.inputs(case, DTYPE, 0, device)
        expected = INDEXER_LOSS.expect(case, DTYPE, inputs, device)
        timed: list[Timed] = []
        for implementation in (own, flash):
            if reason := implementation.unsupported(case, DTYPE):
                raise BenchError(f"{implementation.name}, case {case.name}: {reason}")
            prepared = implementation.prepare(case, DTYPE, [inputs], device)
            with prepared.recorder.current():
                prepared.calls[0]()
                device.synchronize()
                verdict = INDEXER_LOSS.judge(expected, prepared.outputs(0), DTYPE, device)
            if not verdict.ok:
                raise BenchError(f"{implementation.name}, case {case.name}: wrong, {verdict.reason}")
            context = prepared.recorder.current
            timed += [(context, call) for call in (prepared.calls[0], prepared.figures[FORWARD][0])]
        samples: list[list[float]] = [[] for _ in timed]
        clock = device.clock()
        for turn in range(calls + 1):
            for (context, call), found in zip(timed, samples, strict=True):
                with context():
                    clock.start()
                    call()
                    us = clock.stop_us()
                if turn:  # the first ones may compile
                    found.append(us)
    return [(samples[0], samples[1]), (samples[2], samples[3])]
