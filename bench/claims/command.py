"""`run claims`: its options, its tables, its JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.errors import BenchError
from . import memory

NAME = "claims"
TITLE = "what is said of paged caches, computed from the cache's bookkeeping; needs no GPU"
DESCRIPTION = """What is said of paged caches, computed from the bookkeeping of PagedKVCache; needs no GPU.

"Paging wastes less than 4 %" of the places that it allocates, where contiguous pieces waste most of theirs; "sharing
saves up to 55 % of the memory, so that 2.2 times as many sequences fit", in beam search. Lengths are drawn, and the
same in every run of a seed.
"""
EPILOG = """examples:
  run claims
  run claims --page-sizes 16,64 --seed 1 --json claims.jsonl
"""
PAGE_SIZES = (16, 64, 128)
WIDTHS = (2, 4, 6)
PROMPT, ANSWER = 256, 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    sizes = ",".join(map(str, PAGE_SIZES))
    parser.add_argument("--page-sizes", default=sizes, metavar="LIST", help="tokens of a page (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE.jsonl", help="append one JSON object per row")


def run(args: argparse.Namespace, console: Any) -> int:
    """Compute and print both tables."""
    from mla_cupy.terminal import show, table

    sizes = _page_sizes(args.page_sizes)
    wasted, saved = list(waste_rows(sizes, args.seed)), list(saving_rows(sizes, args.seed))
    first = table("places without a token", tuple(wasted[0]), (row.values() for row in wasted))
    second = table("pages that sharing saves", tuple(saved[0]), (row.values() for row in saved))
    show(first, second)
    if args.json:
        with args.json.open("a") as file:
            for kind, rows in (("waste", wasted), ("saving", saved)):
                for row in rows:
                    file.write(json.dumps({"claim": kind, "seed": args.seed, **row}) + "\n")
    return 0


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


def _page_sizes(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= 1024 for part in parts):
        raise BenchError(f"--page-sizes: got {text!r}, expected numbers from 1 to 1024, such as 16,64")
    return [int(part) for part in parts]
