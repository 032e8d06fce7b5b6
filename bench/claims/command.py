"""`run claims`: its options, its tables, its JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.errors import BenchError
from ..ops.indexer_loss.cases import LossCase
from ..ops.indexer_loss.own import IndexerLoss
from . import memory, operator

NAME = "claims"
TITLE = "what is said of paged caches, computed from the cache's bookkeeping, and of training the indexer"
DESCRIPTION = """What is said of paged caches, computed from the bookkeeping of PagedKVCache: needs no GPU.

"Paging wastes less than 4 %" of the places that it allocates, where contiguous pieces waste most of theirs; "sharing
saves up to 55 % of the memory, so that 2.2 times as many sequences fit", in beam search. Lengths are drawn, and the
same in every run of a seed.

With --operator also what is said of training the indexer, "2.2 and 5.1 times" of FlashAttention's forward and backward:
on a GPU, with PyTorch.
"""
EPILOG = """examples:
  run claims
  run claims --operator 8192,16384,32768
  run claims --page-sizes 16,64 --seed 1 --json claims.jsonl
"""
PAGE_SIZES = (16, 64, 128)
WIDTHS = (2, 4, 6)
PROMPT, ANSWER = 256, 256
_SUCH_AS = {"--page-sizes": "16,64", "--operator": "8192,32768"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    sizes = ",".join(map(str, PAGE_SIZES))
    parser.add_argument("--page-sizes", default=sizes, metavar="LIST", help="tokens of a page (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (default %(default)s)")
    parser.add_argument(
        "--operator", default="", metavar="LIST", help="tokens: also the warm-up operator beside FlashAttention-2"
    )
    parser.add_argument("--calls", type=int, default=operator.CALLS, metavar="N", help="of each (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE.jsonl", help="append one JSON object per row")


def run(args: argparse.Namespace, console: Any) -> int:
    """Compute and print the tables."""
    from mla_cupy.terminal import show, table

    lengths = _numbers("--operator", args.operator, 1 << 20) if args.operator else []
    timed = operator.cases(lengths)
    sizes = _numbers("--page-sizes", args.page_sizes, 1024)
    wasted, saved = list(waste_rows(sizes, args.seed)), list(saving_rows(sizes, args.seed))
    first = table("places without a token", tuple(wasted[0]), (row.values() for row in wasted))
    second = table("pages that sharing saves", tuple(saved[0]), (row.values() for row in saved))
    show(first, second)
    tables: list[tuple[str, Iterable[dict[str, Any]]]] = [("waste", wasted), ("saving", saved)]
    if timed:
        tables.append(("operator", _operator_rows(timed, args, console)))
    if args.json:
        with args.json.open("a") as file:
            for kind, rows in tables:
                for row in rows:
                    file.write(json.dumps({"claim": kind, "seed": args.seed, **row}) + "\n")
    return 0


def _operator_rows(cases: list[LossCase], args: argparse.Namespace, console: Any) -> list[dict[str, Any]]:
    """Time the operator, print each row when it is there, and say on which machine that was."""
    from ..core import environment
    from ..core.device import CudaDevice
    from ..core.recorders import EVENTS
    from ..peers.torch_flash import FlashAttention

    device = CudaDevice(EVENTS)
    env = environment.describe(device.name, device.arch, "")
    console.print(f"milliseconds on one {device.name}, CUDA {env['cuda_runtime']}, git {env['git']}")
    found = []
    for row in operator.rows(cases, IndexerLoss(), FlashAttention(), device, args.calls):
        console.print(", ".join(f"{name} {value}" for name, value in row.items()))
        found.append({**row, "env": env})
    return found


def waste_rows(sizes: list[int], seed: int) -> Iterator[dict[str, Any]]:
    """Rows of the first table."""
    for mean in (256, 1024):
        traffic = memory.Traffic(prompt=mean, answer=mean)
        for size in sizes:
            found = asdict(memory.waste(traffic, size, seed))
            shares = {name: _percent(value) for name, value in found.items()}
            yield {"mean prompt, answer": mean, "page": size, **shares}


def saving_rows(sizes: list[int], seed: int) -> Iterator[dict[str, Any]]:
    """Rows of the second table."""
    for size in sizes:
        found = {f"{n} samples": memory.parallel_samples(size, PROMPT, ANSWER, n, seed) for n in WIDTHS}
        found |= {f"{n} beams": memory.beams(size, PROMPT, ANSWER, n, seed) for n in WIDTHS}
        found["64 requests, 2048 tokens in common"] = memory.system_prompt(size, 2048, 512, 64, seed)
        for what, saving in found.items():
            yield {"what": what, "page": size, "saved": _percent(saving.saved), "times": f"{saving.times:.2f}"}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _numbers(name: str, text: str, most: int) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= most for part in parts):
        raise BenchError(f"{name}: got {text!r}, expected numbers from 1 to {most}, such as {_SUCH_AS[name]}")
    return [int(part) for part in parts]
