"""Description of an operation for `core`: one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from .cost import Cost
from .device import Device
from .implementation import Choices, Known
from .recorders import GRAPH


class Case(Protocol):
    """One shape of one operation."""

    @property
    def op(self) -> str:
        """The public function."""

    @property
    def name(self) -> str:
        """The canonical name, without spaces."""

    @property
    def cost(self) -> Cost: ...

    @property
    def seen(self) -> dict[str, float | None]:
        """Microseconds for orientation, by source."""

    def shape(self) -> dict[str, Any]:
        """The sizes as plain data, for the records."""


class Verdict(Protocol):
    """The result of a check: a dataclass whose other fields go into the records."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def ok(self) -> bool: ...

    @property
    def reason(self) -> str: ...


class Ratio(NamedTuple):
    """A ratio of two times of one case; `aim` is the largest acceptable value, if there is one."""

    text: str
    value: float
    aim: float | None = None


@dataclass(frozen=True)
class CaseOption:
    """An option of the command line that changes every case of a run; `rename` takes a case's name and the value."""

    choices: tuple[str, ...]
    help: str
    rename: Callable[[str, str], str]


@dataclass(frozen=True, eq=False)
class BenchOperation:
    """One operation. `Any` is the operation's own type of case, input set, expectation or outputs.

    Attributes
    ----------
    name : str
        On the command line.
    title, examples, peers : str
        Help texts; `peers` lists the names that `--peers` takes, and the default.
    suites : mapping
        Cases by suite; "targets" has all of them, "quick" the main ones.
    case_form : str
        How the name of a case is written.
    parse : callable
        The case of a name.
    inputs : callable
        An input set from case, dtype, seed and device.
    expect : callable
        What the oracle expects of some rows, from case, dtype, input set and device.
    judge : callable
        The verdict on outputs, from expectation, outputs, dtype and device.
    results : tuple of str
        Fields of the outputs that every call writes as a whole.
    implementations : callable
        Ours and the peers', by name.
    default_peers : callable
        Names of the peers that run if none are named.
    method : str
        The default of `--method`: one of `recorders.METHODS`.
    single_calls : bool
        Whether single calls between two events are timed, too, beside replays.
    peers_dir, deterministic : bool
        Whether `run` takes `--peers-dir` and `--deterministic`.
    case_options : mapping
        Further options that replace each case by another, by name.
    ratios : callable
        Ratios to print, of the rows of one case.
    """

    name: str
    title: str
    examples: str
    peers: str
    suites: Mapping[str, Sequence[Any]]
    case_form: str
    parse: Callable[[str], Any]
    inputs: Callable[[Any, str, int, Device], Any]
    expect: Callable[[Any, str, Any, Device], Sequence[Any]]
    judge: Callable[[Sequence[Any], Any, str, Device], Verdict]
    results: tuple[str, ...]
    implementations: Callable[[Choices], Known]
    default_peers: Callable[[Choices], list[str]]
    method: str = GRAPH
    single_calls: bool = False
    peers_dir: bool = False
    deterministic: bool = False
    case_options: Mapping[str, CaseOption] = field(default_factory=dict)
    ratios: Callable[[Sequence[Mapping[str, Any]]], Sequence[Ratio]] = lambda rows: ()

    def select(self, names: Sequence[str], suite: str) -> tuple[Case, ...]:
        """The named cases, or the suite if no name is given; duplicates are dropped."""
        return tuple(dict.fromkeys([self.parse(name) for name in names] if names else self.suites[suite]))
