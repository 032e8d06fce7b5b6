"""`run context-parallel-prefill`: one rank's work on one GPU, whose exchanges are replaced by copies."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mla_cupy.parallel import Zigzag
from mla_cupy.parallel.zigzag import CHUNK_TOKENS
from mla_cupy.terminal import Table

from ..core import environment
from ..core.errors import BenchError
from .steps import KINDS, Step

NAME = "context-parallel-prefill"
TITLE = "context-parallel prefill and its gradient: one rank's work, without the exchanges"
DESCRIPTION = """Time what one rank of a group computes, on one GPU, with copies in place of the exchanges.

The ranks that are timed are the first and the last one. Efficiency is the time of the whole sequence on one GPU over N
times the time of the slower rank. Dense attention is the product with W_UK and W_UV, mla_prefill, and their gradients;
sparse attention is the indexer's selection of 2048 tokens, sparse_mla_forward and its gradients. What the exchanges add
is left out: `model context-parallel` predicts it.
"""
EPILOG = """examples:
  run context-parallel-prefill --tokens 131072 --worlds 2,8
  run context-parallel-prefill --kind sparse --tokens 131072
"""
FORWARD, TRAINING = "forward", "forward and backward"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--kind", choices=tuple(KINDS), default="dense", help="attention (default %(default)s)")
    parser.add_argument("--tokens", type=_counts, default=(32768, 131072), metavar="N[,N...]", help="sequence lengths")
    parser.add_argument("--worlds", type=_counts, default=(2, 8), metavar="N[,N...]", help="ranks")
    parser.add_argument("--heads", type=int, default=128, metavar="N", help="query heads (default %(default)s)")
    parser.add_argument("--chunk-tokens", type=int, default=CHUNK_TOKENS, metavar="N", help="as for prefill()")
    parser.add_argument("--replays", type=int, default=3, metavar="N", help="timed calls (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE.jsonl", help="append one JSON object per row")
    parser.add_argument("--tag", default="", help="a text to store in every row")


def _counts(text: str) -> tuple[int, ...]:
    found = tuple(int(one) for one in text.split(","))
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected numbers of at least 1")
    return found


def run(args: argparse.Namespace, console: Any) -> int:
    """Measure all cases; see `DESCRIPTION`."""
    import torch

    if not torch.cuda.is_available():
        raise BenchError("run context-parallel-prefill: no GPU; expected one")
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability())
    env = environment.describe(torch.cuda.get_device_name(), capability, args.tag)
    for tokens in args.tokens:
        rows = list(measure(args.kind, tokens, args.worlds, args.heads, args.chunk_tokens, args.replays))
        _show(console, f"{args.kind}, {tokens} tokens, {args.heads} heads", rows)
        if args.json:
            of = {"kind": args.kind, "tokens": tokens, "heads": args.heads, "chunk_tokens": args.chunk_tokens}
            common = {"op": NAME, **of, "env": env}
            with args.json.open("a") as file:
                file.writelines(json.dumps({**common, **row}) + "\n" for row in rows)
    return 0


def measure(
    kind: str, tokens: int, worlds: Sequence[int], heads: int, chunk_tokens: int, replays: int, place: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """Times of one GPU, then of the first and the last rank of each world."""

    def times(world: int, rank: int) -> dict[str, float]:
        return _times(KINDS[kind](Zigzag((tokens,), world), rank, heads, chunk_tokens, place), replays)

    single = times(1, 0)
    yield {"world": 1, "rank": 0, "ms": single, "efficiency": dict.fromkeys(single, 1.0)}
    for world in worlds:
        ranks = (0, world - 1)
        found = [times(world, rank) for rank in ranks]
        slowest = {what: max(ms[what] for ms in found) for what in single}
        efficiency = {what: single[what] / (world * slowest[what]) for what in single}
        for rank, ms in zip(ranks, found, strict=True):
            yield {"world": world, "rank": rank, "ms": ms, "efficiency": efficiency}


def _times(given: Step, replays: int) -> dict[str, float]:
    """Milliseconds of the forward without gradients, and of the forward and backward: medians after a first call."""
    import torch

    step, leaves = given

    def forward() -> None:
        with torch.no_grad():
            step()

    def training() -> None:
        out = step()
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    return {what: _median_ms(task, replays) for what, task in ((FORWARD, forward), (TRAINING, training))}


def _median_ms(task: Callable[[], None], replays: int) -> float:
    import torch

    task()
    found: list[float] = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        task()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def _show(console: Any, case: str, rows: Sequence[dict[str, Any]]) -> None:
    columns = ("ranks", "rank", f"{FORWARD} ms", "efficiency", f"{TRAINING} ms", "efficiency")
    table = Table(*columns, title=f"{NAME} {case}, bfloat16; exchanges left out", left=2)
    for row in rows:
        figures = [f"{row[of][what]:.{n}f}" for what in (FORWARD, TRAINING) for of, n in (("ms", 2), ("efficiency", 3))]
        table.add_row(str(row["world"]), str(row["rank"]), *figures)
    console.print(table)
