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

NAME = "context-parallel-prefill"
TITLE = "context-parallel prefill and its gradient: one rank's work, without the exchanges"
DESCRIPTION = """Time what one rank of a group computes, on one GPU, with copies in place of the exchanges.

The ranks that are timed are the first and the last one. Efficiency is the time of the whole sequence on one GPU (the
product with W_UK and W_UV, mla_prefill, and their gradients) over N times the time of the slower rank. It leaves out
what the exchanges add: `model context-parallel` predicts it.
"""
EPILOG = """examples:
  run context-parallel-prefill --tokens 131072 --worlds 2,8
"""
LATENT, NOPE, ROPE, VALUES = 512, 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5
FORWARD, TRAINING = "forward", "forward and backward"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
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
        rows = list(measure(tokens, args.worlds, args.heads, args.chunk_tokens, args.replays))
        _show(console, tokens, args.heads, rows)
        if args.json:
            common = {"op": NAME, "tokens": tokens, "heads": args.heads, "env": env}
            with args.json.open("a") as file:
                file.writelines(json.dumps({**common, **row}) + "\n" for row in rows)
    return 0


def measure(
    tokens: int, worlds: Sequence[int], heads: int, chunk_tokens: int, replays: int, place: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """Times of one GPU, then of the first and the last rank of each world."""
    single = _times(_whole(tokens, heads, place), replays)
    yield {"world": 1, "rank": 0, "ms": single, "efficiency": dict.fromkeys(single, 1.0)}
    for world in worlds:
        ranks = (0, world - 1)
        found = [_times(_share(Zigzag((tokens,), world), rank, heads, chunk_tokens, place), replays) for rank in ranks]
        slowest = {what: max(ms[what] for ms in found) for what in single}
        efficiency = {what: single[what] / (world * slowest[what]) for what in single}
        for rank, ms in zip(ranks, found, strict=True):
            yield {"world": world, "rank": rank, "ms": ms, "efficiency": efficiency}


Step = Callable[[], Any]


def _whole(tokens: int, heads: int, place: str) -> tuple[Step, Sequence[Any]]:
    """Attention of a whole sequence, and the arrays that have gradients."""
    import mla_cupy.torch as mla

    x = _inputs(tokens, heads, place)

    def step() -> Any:
        k, v = _expand(x["latents"], x["w"])
        return mla.mla_prefill(x["q"], k, v, q_rope=x["q_rope"], k_rope=x["k_rope"], scale=SCALE)[0]

    return step, list(x.values())


def _share(zigzag: Zigzag, rank: int, heads: int, chunk_tokens: int, place: str) -> tuple[Step, Sequence[Any]]:
    """A rank's part of it."""
    import torch

    from mla_cupy.torch.parallel.attention import Attention, Prefill
    from mla_cupy.torch.parallel.links import Links, Pending, schedule

    class Alone(Links):
        """Every rank sends what this one sends."""

        def begin(self, collective: Any, sent: Any, rows: int) -> Pending:
            return Pending(sent.repeat(rows // max(1, len(sent)), 1), sent, None, sent.device)

    x = _inputs(len(zigzag.rows(rank)), heads, place)
    calls = schedule(zigzag, rank, chunk_tokens, x["q"].device)
    attention = Attention(Alone(None, zigzag.world, rank), *calls, _expand, LATENT, SCALE, False)

    def step() -> Any:
        rows = torch.cat([x["latents"], x["k_rope"]], -1)
        return Prefill.apply(attention, x["q"], x["q_rope"], rows, x["w"])[0]

    return step, list(x.values())


def _inputs(tokens: int, heads: int, place: str) -> dict[str, Any]:
    import torch

    shapes = {"q": (tokens, heads, NOPE), "q_rope": (tokens, heads, ROPE), "latents": (tokens, LATENT)}
    shapes |= {"k_rope": (tokens, ROPE), "w": (heads * (NOPE + VALUES), LATENT)}
    made = {name: torch.randn(shape, device=place, dtype=torch.bfloat16) for name, shape in shapes.items()}
    made["w"] *= LATENT**-0.5
    return {name: x.requires_grad_() for name, x in made.items()}


def _expand(latents: Any, w: Any) -> tuple[Any, Any]:
    kv = (latents @ w.T).unflatten(-1, (-1, NOPE + VALUES))
    k, v = kv.split([NOPE, VALUES], -1)
    return k, v


def _times(given: tuple[Step, Sequence[Any]], replays: int) -> dict[str, float]:
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


def _show(console: Any, tokens: int, heads: int, rows: Sequence[dict[str, Any]]) -> None:
    heads_of = ("ranks", "rank", f"{FORWARD} ms", "efficiency", f"{TRAINING} ms", "efficiency")
    table = Table(*heads_of, title=f"{NAME} {tokens} tokens, {heads} heads, bfloat16; exchanges left out", left=2)
    for row in rows:
        figures = [f"{row[of][what]:.{n}f}" for what in (FORWARD, TRAINING) for of, n in (("ms", 2), ("efficiency", 3))]
        table.add_row(str(row["world"]), str(row["rank"]), *figures)
    console.print(table)
