"""Times two source trees in turn on one GPU: the same inputs, two processes that are asked alternately."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ..core.errors import BenchError
from ..core.implementation import OWN
from ..core.operation import BenchOperation, Case
from ..core.recorders import EVENTS, GRAPH
from ..core.timer import summarise
from .process import Child

SCHEMA_VERSION = 1
HOST_BATCH = 10  # calls: of at most ten launches each, far below the depth of the launch queue


class CaseError(Exception):
    """A tree could not run this case."""


@dataclass(frozen=True)
class Options:
    """Options of timing."""

    dtype: str = "bfloat16"
    rounds: int = 8
    replays: int = 8


@dataclass(frozen=True)
class Side:
    """Times of one tree: microseconds per call."""

    kernel: str
    us_median: float
    us_p20: float
    us_p80: float
    spread: float
    replays: int
    host_us: float
    empty_launch_us: float


@dataclass(frozen=True)
class Comparison:
    """One row of both trees. Ratios are new over old: above 1 the new tree is slower."""

    op: str
    case: str
    dtype: str
    implementation: str
    reason: str = ""  # why there are no figures
    method: str = ""
    old: Side | None = None
    new: Side | None = None
    round_ratios: Sequence[float] = field(default_factory=tuple)
    same_results: bool | None = None  # bit by bit, of the first input set

    @property
    def ratio(self) -> float | None:
        """Ratio of the medians over all samples."""
        return self.new.us_median / self.old.us_median if self.old and self.new else None

    @property
    def spread(self) -> float | None:
        """The larger of the two trees' own spreads, as a share of their medians."""
        return max(self.old.spread, self.new.spread) if self.old and self.new else None

    def fails(self, percent: float) -> bool:
        """True if the new tree is slower by more than `percent` and by more than the spread, or has no figure."""
        if self.ratio is None or self.spread is None:
            return True
        return self.ratio - 1 > max(percent / 100, self.spread)

    def record(self) -> dict[str, Any]:
        """Plain data."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self), "ratio": self.ratio, "spread": self.spread}


def implementations(operation: BenchOperation) -> list[str]:
    """Our own calls of an operation."""
    return [OWN, *(["deterministic"] if operation.deterministic else [])]


def compare_case(
    operation: BenchOperation, case: Case, implementation: str, old: Child, new: Child, options: Options
) -> Comparison:
    """One case in both trees; an error of either is the comparison's reason."""
    names = case.op, case.name, options.dtype, implementation
    children = old, new
    try:
        ask = {"operation": operation.name, "case": case.name, "dtype": options.dtype, "implementation": implementation}
        prepared = _both(children, {"do": "prepare", **ask})
        method = _record(children)
        samples, round_ratios = _rounds(children, options)
        host = [_one(child, {"do": "host", "per_batch": HOST_BATCH}) for child in children]
    except CaseError as error:
        return Comparison(*names, reason=str(error))
    sides = [_side(*figures) for figures in zip(prepared, samples, host, strict=True)]
    same = prepared[0]["digest"] == prepared[1]["digest"]
    return Comparison(*names, method=method, old=sides[0], new=sides[1], round_ratios=round_ratios, same_results=same)


def _record(children: Sequence[Child]) -> str:
    """Method of timing, the same for both trees: a graph, or events if either cannot be captured."""
    try:
        _both(children, {"do": "record", "method": GRAPH})
    except CaseError:
        _both(children, {"do": "record", "method": EVENTS})
        return EVENTS
    return GRAPH


def _rounds(children: Sequence[Child], options: Options) -> tuple[list[list[float]], list[float]]:
    """The samples of each tree, and for each round the ratio of the medians; who begins changes every round."""
    samples: list[list[float]] = [[], []]
    ratios = []
    for turn in range(options.rounds):
        found: dict[int, list[float]] = {}
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            found[which] = _one(children[which], {"do": "sample", "replays": options.replays})["us"]
            samples[which] += found[which]
        ratios.append(median(found[1]) / median(found[0]))
    return samples, ratios


def _side(prepared: Mapping[str, Any], samples: Sequence[float], host: Mapping[str, Any]) -> Side:
    timing = summarise(samples, 1)
    return Side(
        kernel=prepared["kernel"],
        us_median=timing.us_median,
        us_p20=timing.us_p20,
        us_p80=timing.us_p80,
        spread=timing.spread,
        replays=timing.replays,
        host_us=host["us"],
        empty_launch_us=host["empty_us"],
    )


def _both(children: Sequence[Child], request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The replies of both, which work at the same time. Both are read even if one is an error."""
    for child in children:
        child.send(request)
    replies = [child.receive() for child in children]
    return [_checked(child, reply) for child, reply in zip(children, replies, strict=True)]


def _one(child: Child, request: Mapping[str, Any]) -> dict[str, Any]:
    child.send(request)
    return _checked(child, child.receive())


def _checked(child: Child, reply: dict[str, Any]) -> dict[str, Any]:
    if "error" in reply:
        raise CaseError(f"{child.tree.name}: {reply['error']}")
    return reply


def describe(children: Iterable[Child]) -> list[dict[str, Any]]:
    """Description of each process by itself; raises BenchError unless it uses its own tree's package."""
    found = []
    for child in children:
        try:
            described = _one(child, {"do": "describe"})
        except CaseError as error:
            raise BenchError(str(error)) from error
        package = Path(described["package"])
        if package.parents[1] != child.tree:
            raise BenchError(f"{child.tree}: its process imports {package}")
        found.append(described)
    return found


def compare_all(
    work: Iterable[tuple[BenchOperation, Case]],
    old: Child,
    new: Child,
    options: Options,
    report: Callable[[Comparison], None],
) -> list[Comparison]:
    """Every implementation of every case, reported as soon as it is done."""
    rows = []
    for operation, case in work:
        for implementation in implementations(operation):
            rows.append(compare_case(operation, case, implementation, old, new, options))
            report(rows[-1])
    return rows
