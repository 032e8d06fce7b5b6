"""`run claims`: what is said of paged caches, computed from their bookkeeping, and of training the indexer.

Pages are counted in `Book`, the bookkeeping of `PagedKVCache`, without a GPU. Lengths are drawn, not recorded:
log-normal prompts and answers of a mean that is stated, and no longer than the model allows. Sequences grow by a token
a step, and when one ends another begins, so the averages describe a server that is never idle.

What was said of the warm-up operator with a target per head first (lemyx/tilelang-dsa, 128K tokens and fewer, in
sequences of 2,048, on an H800): its forward, which also gives the attention's output, takes 2.2 to 2.3 times as long as
FlashAttention-2's, and its backward 5.0 to 5.2 times as long.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache.book import Book

from .core.device import Device
from .core.errors import BenchError
from .core.implementation import Implementation
from .ops.indexer_loss import FORWARD, INDEXER_LOSS, IndexerLoss, LossCase

Array = npt.NDArray[np.int64]
Timed = tuple[Callable[[], AbstractContextManager[object]], Callable[[], object]]
Choose = Callable[[Book, list[int], np.random.Generator], list[int]]

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
_SUCH_AS = {"--page-sizes": "16,64", "--operator": "8192,32768"}

PAGE_SIZES = (16, 64, 128)
WIDTHS = (2, 4, 6)  # samples, or beams
PROMPT, ANSWER = 256, 256
_SPREAD = 1.0  # of the logarithm of lengths
SEQUENCE = 2048
CALLS = 5
DTYPE = "bfloat16"

# ---- The command -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    sizes = ",".join(map(str, PAGE_SIZES))
    parser.add_argument("--page-sizes", default=sizes, metavar="LIST", help="tokens of a page (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (default %(default)s)")
    parser.add_argument(
        "--operator", default="", metavar="LIST", help="tokens: also the warm-up operator beside FlashAttention-2"
    )
    parser.add_argument("--calls", type=int, default=CALLS, metavar="N", help="of each (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE.jsonl", help="append one JSON object per row")


def run(args: argparse.Namespace, console: Any) -> int:
    """Compute and print the tables."""
    from mla_cupy.terminal import show, table

    lengths = _numbers("--operator", args.operator, 1 << 20) if args.operator else []
    timed = operator_cases(lengths)
    sizes = _numbers("--page-sizes", args.page_sizes, 1024)
    wasted, saved = list(waste_rows(sizes, args.seed)), list(saving_rows(sizes, args.seed))
    first = table("places without a token", tuple(wasted[0]), (row.values() for row in wasted))
    second = table("pages that sharing saves", tuple(saved[0]), (row.values() for row in saved))
    show(first, second)
    tables: list[tuple[str, Iterable[dict[str, Any]]]] = [("waste", wasted), ("saving", saved)]
    if timed:
        tables.append(("operator", _timed_on_gpu(timed, args, console)))
    if args.json:
        with args.json.open("a") as file:
            for kind, rows in tables:
                for row in rows:
                    file.write(json.dumps({"claim": kind, "seed": args.seed, **row}) + "\n")
    return 0


def _timed_on_gpu(cases: list[LossCase], args: argparse.Namespace, console: Any) -> list[dict[str, Any]]:
    """Time the operator, print each row when it is there, and say on which machine that was."""
    from .core import environment
    from .core.device import CudaDevice
    from .core.recorders import EVENTS
    from .peers.torch_flash import FlashAttention

    device = CudaDevice(EVENTS)
    env = environment.describe(device.name, device.arch, "")
    console.print(f"milliseconds on one {device.name}, CUDA {env['cuda_runtime']}, git {env['git']}")
    found = []
    for row in operator_rows(cases, IndexerLoss(), FlashAttention(), device, args.calls):
        console.print(", ".join(f"{name} {value}" for name, value in row.items()))
        found.append({**row, "env": env})
    return found


def waste_rows(sizes: list[int], seed: int) -> Iterator[dict[str, Any]]:
    """Rows of the first table."""
    for mean in (256, 1024):
        traffic = Traffic(prompt=mean, answer=mean)
        for size in sizes:
            found = asdict(waste(traffic, size, seed))
            shares = {name: _percent(value) for name, value in found.items()}
            yield {"mean prompt, answer": mean, "page": size, **shares}


def saving_rows(sizes: list[int], seed: int) -> Iterator[dict[str, Any]]:
    """Rows of the second table."""
    for size in sizes:
        found = {f"{n} samples": parallel_samples(size, PROMPT, ANSWER, n, seed) for n in WIDTHS}
        found |= {f"{n} beams": beams(size, PROMPT, ANSWER, n, seed) for n in WIDTHS}
        found["64 requests, 2048 tokens in common"] = system_prompt(size, 2048, 512, 64, seed)
        for what, saving in found.items():
            yield {"what": what, "page": size, "saved": _percent(saving.saved), "times": f"{saving.times:.2f}"}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _numbers(name: str, text: str, most: int) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= most for part in parts):
        raise BenchError(f"{name}: got {text!r}, expected numbers from 1 to {most}, such as {_SUCH_AS[name]}")
    return [int(part) for part in parts]


# ---- Pages -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """Requests that are served side by side.

    Attributes
    ----------
    batch, steps : int
        Sequences at a time; counted steps, after the same number of warm-up steps.
    prompt, answer, longest : int
        Mean tokens of each, and the most that a sequence may have.
    """

    batch: int = 64
    steps: int = 2048
    prompt: int = 512
    answer: int = 512
    longest: int = 8192

    def lengths(self, rng: np.random.Generator, mean: int) -> int:
        """A length of this mean, but for the limit of a half of the longest."""
        drawn = rng.lognormal(np.log(mean) - _SPREAD**2 / 2, _SPREAD)
        return int(np.clip(drawn, 1, self.longest // 2))


@dataclass(frozen=True)
class Waste:
    """Shares of the allocated places that hold no token, averaged over steps.

    Attributes
    ----------
    paged : float
        Pages of the cache.
    whole, doubled : float
        A contiguous piece for each sequence: of the longest that it may have, or of a power of two, moved when full.
    """

    paged: float
    whole: float
    doubled: float


def waste(traffic: Traffic, page_size: int, seed: int = 0) -> Waste:
    """Serve requests, and count after each step what is allocated and what of it holds tokens."""
    rng = np.random.default_rng(seed)
    pages = -(-traffic.longest // page_size)
    book = Book(traffic.batch * pages, page_size, traffic.batch, pages)
    rows = [_begin(book, traffic.lengths(rng, traffic.prompt)) for _ in range(traffic.batch)]
    left = np.array([traffic.lengths(rng, traffic.answer) for _ in rows])
    held = np.zeros((4, traffic.steps))  # tokens, and places of the three kinds
    for step in range(-traffic.steps, traffic.steps):
        for i in np.flatnonzero(left == 0):
            book.close(rows[i])
            rows[i], left[i] = _begin(book, traffic.lengths(rng, traffic.prompt)), traffic.lengths(rng, traffic.answer)
        _extend(book, rows, 1)
        left -= 1
        if step >= 0:
            tokens = book.length[rows]
            used = book.num_pages - sum(book.available)
            doubled = (2 ** np.ceil(np.log2(tokens))).sum()
            held[:, step] = tokens.sum(), used * page_size, traffic.batch * traffic.longest, doubled
    tokens, *places = held.mean(axis=1)
    return Waste(*(1 - float(tokens / of) for of in places))


@dataclass(frozen=True)
class Saving:
    """Savings by sharing: pages with it, and pages if each sequence had its own, averaged over steps."""

    shared: float
    alone: float

    @property
    def saved(self) -> float:
        """The share of pages that are saved."""
        return 1 - self.shared / self.alone

    @property
    def times(self) -> float:
        """The factor by which more sequences fit."""
        return self.alone / self.shared


def parallel_samples(page_size: int, prompt: int, answer: int, samples: int, seed: int = 0) -> Saving:
    """Several answers to one prompt: the prompt's pages are shared, but for a last one that is not full."""
    return _grow(page_size, prompt, answer, samples, lambda book, rows, rng: rows, seed)


def beams(page_size: int, prompt: int, answer: int, width: int, seed: int = 0) -> Saving:
    """Beam search: at each step the best beams go on, some of them twice, and others end.

    Which one a beam goes on from is drawn, better ones more often: with weights 1, 1/2, 1/4 ...
    """
    weights = 0.5 ** np.arange(width)

    def choose(book: Book, rows: list[int], rng: np.random.Generator) -> list[int]:
        parents = sorted(rng.choice(width, width, p=weights / weights.sum()).tolist())
        first = [i == 0 or parents[i] != parents[i - 1] for i in range(width)]
        gone = [row for i, row in enumerate(rows) if i not in parents]
        for row in gone:
            book.close(row)
        return [rows[p] if is_first else book.fork(rows[p]) for p, is_first in zip(parents, first, strict=True)]

    return _grow(page_size, prompt, answer, width, choose, seed)


def system_prompt(page_size: int, common: int, own: int, requests: int, seed: int = 0) -> Saving:
    """Requests that begin with the same tokens, which are found by their hashes."""
    rng = np.random.default_rng(seed)
    pages = -(-(common + 4 * own) // page_size) + 1
    book = Book(requests * pages, page_size, requests, pages)
    prefix = rng.integers(0, 1 << 17, common)
    alone = 0
    for _ in range(requests):
        tokens = np.concatenate([prefix, rng.integers(0, 1 << 17, int(rng.integers(1, 2 * own)))])
        found, chain = book.prefixes.match(tokens, b"")
        row = book.open(found, len(found) * page_size, chain, b"")
        _extend(book, [row], len(tokens) - len(found) * page_size)
        book.commit(row, tokens)
        alone += book.pages_for(len(tokens))
    return Saving(book.num_pages - sum(book.available), alone)


def _begin(book: Book, tokens: int) -> int:
    row = book.open([], 0, [], b"")
    _extend(book, [row], tokens)
    return row


def _extend(book: Book, rows: list[int], tokens: int) -> None:
    book.extend(book.plan_extend(np.array(rows), tokens))


def _grow(page_size: int, prompt: int, answer: int, count: int, choose: Choose, seed: int) -> Saving:
    """Sequences from one prompt on, a token a step, after `choose` said which of them go on."""
    rng = np.random.default_rng(seed)
    pages = -(-(prompt + answer) // page_size)
    book = Book((2 * count + 1) * pages, page_size, 2 * count, pages)
    first = _begin(book, prompt)
    rows = [first, *(book.fork(first) for _ in range(count - 1))]
    shared = alone = 0
    for _ in range(answer):
        rows = choose(book, rows, rng)
        _extend(book, rows, 1)
        shared += book.num_pages - sum(book.available)
        alone += sum(book.pages_for(int(book.length[row])) for row in rows)
    return Saving(shared / answer, alone / answer)


# ---- The operator ----------------------------------------------------------------------------------------------------


def operator_cases(tokens: Sequence[int]) -> list[LossCase]:
    """Cases of each number of tokens: sequences of 2,048 as in the claim, and one sequence."""
    found = []
    for number in tokens:
        if number < SEQUENCE or number % SEQUENCE:
            raise BenchError(f"--operator: got {number} tokens, expected multiples of {SEQUENCE}, such as 8192")
        shapes = dict.fromkeys([(number // SEQUENCE, SEQUENCE), (1, number)])
        found += [LossCase(b, s, 64, 128, 64, 64, per_head=True) for b, s in shapes]
    return found


def operator_rows(
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
