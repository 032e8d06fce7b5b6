"""`run context-parallel-prefill`: ranks on GPUs of one host, or one rank on one GPU with copies for exchanges."""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mla_cupy.parallel import Zigzag
from mla_cupy.parallel.zigzag import CHUNK_TOKENS
from mla_cupy.terminal import Table

from ..core import environment
from ..core.errors import BenchError
from .steps import KINDS, alone

NAME = "context-parallel-prefill"
TITLE = "context-parallel prefill and its gradient, on several GPUs or one rank's work on one"
DESCRIPTION = """Time the ranks of a group: with --gpus on GPUs of one host with exchanges, else one rank on one GPU.

On one GPU, copies take the place of the exchanges, and the ranks that are timed are the first and the last one; `model
context-parallel` predicts what the exchanges add. With --gpus N, N processes exchange through NCCL, and are timed with
copies as well, all at once. Efficiency is the time of the whole sequence on one GPU over N times the time of the
slowest rank. Dense attention is the product with W_UK and W_UV, mla_prefill, and their gradients; sparse attention is
the indexer's selection of 2048 tokens, sparse_mla_forward and its gradients.
"""
EPILOG = """examples:
  run context-parallel-prefill --tokens 131072 --worlds 2,8
  run context-parallel-prefill --gpus 2 --kind sparse --tokens 131072
"""
FORWARD, TRAINING = "forward", "forward and backward"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--kind", choices=tuple(KINDS), default="dense", help="attention (default %(default)s)")
    parser.add_argument("--tokens", type=_counts, default=(32768, 131072), metavar="N[,N...]", help="sequence lengths")
    parser.add_argument("--worlds", type=_counts, default=(2, 8), metavar="N[,N...]", help="ranks, without --gpus")
    parser.add_argument("--gpus", type=int, metavar="N", help="ranks, one per GPU, with their exchanges")
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


class Case(NamedTuple):
    """Attention of one sequence, and the number of timed calls."""

    kind: str
    tokens: int
    heads: int
    chunk_tokens: int
    replays: int

    def zigzag(self, world: int) -> Zigzag:
        """The sequence over some ranks."""
        return Zigzag((self.tokens,), world)

    def times(self, links: Any, place: str, together: Callable[[], Any] = lambda: None) -> dict[str, float]:
        """Milliseconds of a rank's forward without gradients, and of its forward and backward: medians.

        `together` lets all ranks begin at once.
        """
        import torch

        zigzag = self.zigzag(links.world)
        step, leaves = KINDS[self.kind](zigzag, links, self.heads, self.chunk_tokens, place)

        def forward() -> None:
            with torch.no_grad():
                step()

        def training() -> None:
            out = step()
            torch.autograd.grad(out, leaves, torch.ones_like(out))

        tasks = {FORWARD: forward, TRAINING: training}
        return {what: _median_ms(task, self.replays, together) for what, task in tasks.items()}


def run(args: argparse.Namespace, console: Any) -> int:
    """Measure all cases; see `DESCRIPTION`."""
    import torch

    if not torch.cuda.is_available():
        raise BenchError("run context-parallel-prefill: no GPU; expected one")
    there = torch.cuda.device_count()
    if args.gpus is not None and not 2 <= args.gpus <= there:
        raise BenchError(f"--gpus: got {args.gpus}, expected 2 up to the GPUs of this host ({there})")
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability())
    env = environment.describe(torch.cuda.get_device_name(), capability, args.tag)
    for tokens in args.tokens:
        case = Case(args.kind, tokens, args.heads, args.chunk_tokens, args.replays)
        rows = list(on_gpus(args.gpus, case) if args.gpus else measure(case, args.worlds))
        _show(console, f"{args.kind}, {tokens} tokens, {args.heads} heads", rows)
        if args.json:
            of = {"kind": args.kind, "tokens": tokens, "heads": args.heads, "chunk_tokens": args.chunk_tokens}
            common = {"op": NAME, **of, "env": env}
            with args.json.open("a") as file:
                file.writelines(json.dumps({**common, **row}) + "\n" for row in rows)
    return 0


def measure(case: Case, worlds: Sequence[int], place: str = "cuda") -> Iterator[dict[str, Any]]:
    """Times of one GPU, then of the first and the last rank of each world, with copies in place of exchanges."""
    single = case.times(alone(case.zigzag(1), 0), place)
    yield from _rows(1, [0], [single], single, "none")
    for world in worlds:
        ranks = (0, world - 1)
        found = [case.times(alone(case.zigzag(world), rank), place) for rank in ranks]
        yield from _rows(world, ranks, found, single, "copies")


def on_gpus(gpus: int, case: Case) -> list[dict[str, Any]]:
    """Times of one GPU, then of `gpus` ranks with copies, and with exchanges, each rank in a process of its own."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_on_gpu, (gpus, case, folder), nprocs=gpus)
        rows: list[dict[str, Any]] = pickle.loads(Path(folder, "rows").read_bytes())
    return rows


def _on_gpu(rank: int, world: int, case: Case, folder: str) -> None:
    """One rank of `on_gpus`; the first one writes the rows of all."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    gpu = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/group", rank=rank, world_size=world, device_id=gpu)
    try:
        rows = together(world, rank, case, str(gpu))
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(folder, "rows").write_bytes(pickle.dumps(rows))


def together(world: int, rank: int, case: Case, place: str) -> list[dict[str, Any]]:
    """Rows of all ranks, on each of them: the whole sequence by rank 0, then ranks with copies, and with exchanges."""
    import torch.distributed as dist

    from mla_cupy.torch.parallel.links import Links

    def of_all(mine: Any) -> list[Any]:
        found: list[Any] = [None] * world
        dist.all_gather_object(found, mine)
        return found

    single = of_all(case.times(alone(case.zigzag(1), 0), place) if rank == 0 else None)[0]
    rows = list(_rows(1, [0], [single], single, "none"))
    zigzag = case.zigzag(world)
    for exchanges, links in (("copies", alone(zigzag, rank)), ("NCCL", Links.of(zigzag, None))):
        rows += _rows(world, range(world), of_all(case.times(links, place, dist.barrier)), single, exchanges)
    return rows


def _rows(
    world: int, ranks: Sequence[int], found: Sequence[dict[str, float]], single: dict[str, float], exchanges: str
) -> Iterator[dict[str, Any]]:
    """A row for each rank, with the efficiency of the slowest one."""
    slowest = {what: max(ms[what] for ms in found) for what in single}
    efficiency = {what: single[what] / (world * slowest[what]) for what in single}
    for rank, ms in zip(ranks, found, strict=True):
        yield {"world": world, "rank": rank, "exchanges": exchanges, "ms": ms, "efficiency": efficiency}


def _median_ms(task: Callable[[], None], replays: int, together: Callable[[], Any]) -> float:
    """Median of the calls after a first one."""
    import torch

    task()
    found: list[float] = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        together()
        begin.record()
        task()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def _show(console: Any, case: str, rows: Sequence[dict[str, Any]]) -> None:
    columns = ("ranks", "rank", "exchanges", f"{FORWARD} ms", "efficiency", f"{TRAINING} ms", "efficiency")
    table = Table(*columns, title=f"{NAME} {case}, bfloat16", left=3)
    for row in rows:
        figures = [f"{row[of][what]:.{n}f}" for what in (FORWARD, TRAINING) for of, n in (("ms", 2), ("efficiency", 3))]
        table.add_row(str(row["world"]), str(row["rank"]), row["exchanges"], *figures)
    console.print(table)
