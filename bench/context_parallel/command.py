"""`run context-parallel`: its options, its table, its JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mla_cupy.terminal import Table

from ..core import environment
from ..core.errors import BenchError
from . import prediction
from .ranks import Problem

NAME = "context-parallel"
TITLE = "decode with the tokens of a sequence shared out over GPUs of one host"
DESCRIPTION = """Decode with the tokens of each sequence shared out over several GPUs of one host.

Times are medians of replays of CUDA graphs of eight steps, in turns, of the slowest rank; q is on every rank, each ends
with the output of its own heads. Efficiency is the time on one GPU (of all, one after the other, the slowest) over N
times the time on N. For more GPUs than there are, the local decode is measured on one GPU with its share of the tokens,
and the exchange is predicted from its time alone and the bytes of more ranks: those rows say "predicted".
"""
EPILOG = """examples:
  run context-parallel --gpus 2 --json cp.jsonl
  run context-parallel --gpus 2 --case b1-sk1048576-h128 --transports peer
"""
TRANSPORTS = ("peer", "nccl")
PREDICTED_WORLDS = (4, 8, 16)
CASES = tuple(Problem(b, s_k) for s_k in (131072, 262144, 1048576) for b in (1, 4))
ROW_BYTES = 512 * 4 + 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="ranks, one per GPU")
    parser.add_argument(
        "--case", action="append", default=[], metavar="NAME", help="a case by name, repeatable (default: all)"
    )
    parser.add_argument(
        "--transports",
        type=lambda text: text.split(","),
        default=list(TRANSPORTS),
        metavar="NAMES",
        help=f"comma-separated: {', '.join(TRANSPORTS)} (default: both)",
    )
    parser.add_argument("--replays", type=int, default=50, metavar="N", help="timed replays (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE.jsonl", help="append one JSON object per row")
    parser.add_argument("--tag", default="", help="a text to store in every row")


def check(args: argparse.Namespace) -> list[Problem]:
    """The cases that are meant.

    Raises
    ------
    BenchError
        If an option has no sense.
    """
    known = {case.name: case for case in CASES}
    for name in args.case:
        if name not in known:
            raise BenchError(f"--case: got {name!r}, expected one of {', '.join(known)}")
    for name in args.transports:
        if name not in TRANSPORTS:
            raise BenchError(f"--transports: got {name!r}, expected {' or '.join(TRANSPORTS)}")
    if args.gpus < 2:
        raise BenchError(f"--gpus: got {args.gpus}, expected at least 2")
    if args.replays < 1:
        raise BenchError(f"--replays: got {args.replays}, expected at least 1")
    return [known[name] for name in args.case] or list(CASES)


def run(args: argparse.Namespace, console: Any) -> int:
    """Measure all cases; see `DESCRIPTION`."""
    cases = check(args)
    import cupy

    there = cupy.cuda.runtime.getDeviceCount()
    if there < args.gpus:
        raise BenchError(f"--gpus: got {args.gpus}, expected at most {there}, the GPUs of this machine")
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    common = {"op": NAME, "env": environment.describe(name, f"sm_{cupy.cuda.Device(0).compute_capability}", args.tag)}
    for case in cases:
        rows = list(measure(case, args.gpus, args.transports, args.replays))
        _show(console, case, rows)
        if args.json:
            with args.json.open("a") as file:
                file.writelines(json.dumps({**common, "case": case.name, **row}) + "\n" for row in rows)
    return 0


def measure(case: Problem, world: int, transports: list[str], replays: int) -> Iterator[dict[str, Any]]:
    """The rows of a case: one GPU, `world` of them by each transport, and predictions for more."""
    from . import ranks

    everyone, more = range(world), [n for n in PREDICTED_WORLDS if n > world]
    whole = ranks.on_each(everyone, lambda _: ranks.Rank(case, 1, 0))
    shards = ranks.on_each(everyone, lambda rank: ranks.Rank(case, world, rank))
    shares = {n: ranks.on_each([0], partial(ranks.Rank, case, n))[0] for n in more}
    contexts = {kind: ranks.contexts(kind, world) for kind in transports}
    steps = {
        "single": ranks.Step([x.local for x in whole], [[rank] for rank in everyone]),
        "local": ranks.Step([x.local for x in shards], [everyone]),
        **{f"1/{n}": ranks.Step([x.local], [[0]]) for n, x in shares.items()},
    }
    for kind, members in contexts.items():
        pairs = list(zip(shards, members, strict=True))
        steps[kind] = ranks.Step([partial(x.whole, member) for x, member in pairs], [everyone])
        steps[f"{kind} exchange"] = ranks.Step([partial(x.exchange, member) for x, member in pairs], [everyone])
    us = ranks.times_us(steps, replays)
    single, local = us["single"], us["local"]
    yield _row(1, "", single, single, 0.0, single)
    for kind in transports:
        yield _row(world, kind, us[kind], local, us[f"{kind} exchange"], single)
        measured = prediction.Exchange(world, us[f"{kind} exchange"], ROW_BYTES, case.b * case.h_q)
        for n in more:
            share, exchange_us = us[f"1/{n}"], measured.predicted_us(n)
            yield {**_row(n, kind, share + exchange_us, share, exchange_us, single), "predicted": True}
        for context in contexts[kind]:
            context.transport.check()


def _row(gpus: int, transport: str, us: float, local_us: float, exchange_us: float, single_us: float) -> dict[str, Any]:
    times = {"us": us, "local_us": local_us, "exchange_us": exchange_us}
    return {"gpus": gpus, "transport": transport, **times, "efficiency": prediction.efficiency(single_us, gpus, us)}


def _show(console: Any, case: Problem, rows: list[dict[str, Any]]) -> None:
    heads = ("GPUs", "transport", "us", "local us", "exchange us", "efficiency", "")
    table = Table(*heads, title=f"{NAME} {case.name} bfloat16", left=2)
    for row in rows:
        figures = [f"{row[name]:.1f}" for name in ("us", "local_us", "exchange_us")]
        note = "predicted" if row.get("predicted") else ""
        table.add_row(str(row["gpus"]), row["transport"], *figures, f"{row['efficiency']:.2f}", note)
    console.print(table)
