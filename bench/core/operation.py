"""Description of an operation for `core`: one record."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Protocol

from .cost import Cost
from .device import Device
from .errors import BenchError
from .implementation import Choices, Known
from .recorders import GRAPH


class Case:
    """One shape of one operation: base of frozen dataclasses, whose compared fields are the sizes."""

    @property
    def op(self) -> str:
        """The public function."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The canonical name, without spaces, which `BenchOperation.parse` reads."""
        raise NotImplementedError

    @property
    def cost(self) -> Cost:
        raise NotImplementedError

    @property
    def seen(self) -> dict[str, float | None]:
        """Microseconds on one H200 on one day by source, for orientation."""
        return {}

    def shape(self) -> dict[str, Any]:
        """The sizes as plain data, for the records."""
        sizes: Any = self
        return {size.name: getattr(self, size.name) for size in fields(sizes) if size.compare}


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
    pattern : str
        Regular expression of the name of a case.
    case_of : callable
        The case from the groups of `pattern`; raises ValueError if there is no such case.
    inputs : callable
        An input set from case, dtype, seed and device.
    expect : callable
        What the oracle expects of some rows, from case, dtype, input set and device.
    judge : callable
        The verdict on outputs, from expectation, outputs, dtype and device.
    implementations : callable
        Ours and the peers', by name. Modules of peers are imported when it is called.
    results : tuple of str
        Fields of the outputs that every call writes as a whole.
    default_peers, peers_from_dir : tuple of str
        Names of the peers that run if none are named; the second ones only with `--peers-dir`.
    method : str
        The default of `--method`: one of `recorders.METHODS`.
    single_calls : bool
        Whether single calls between two events are timed, too, beside replays.
    deterministic : bool
        Whether `run` takes `--deterministic`.
    case_options : mapping
        Further options that replace each case by another, by name.
    ratios : callable
        Ratios to print, of the rows of one case.
    """

    name: str
    title: str
    examples: str
    suites: Mapping[str, Sequence[Any]]
    case_form: str
    pattern: str
    case_of: Callable[..., Any]
    inputs: Callable[[Any, str, int, Device], Any]
    expect: Callable[[Any, str, Any, Device], Sequence[Any]]
    judge: Callable[[Sequence[Any], Any, str, Device], Verdict]
    implementations: Callable[[Choices], Known]
    results: tuple[str, ...] = ("out",)
    peers: str = "none"
    default_peers: tuple[str, ...] = ()
    peers_from_dir: tuple[str, ...] = ()
    method: str = GRAPH
    single_calls: bool = False
    deterministic: bool = False
    case_options: Mapping[str, CaseOption] = field(default_factory=dict)
    ratios: Callable[[Sequence[Mapping[str, Any]]], Sequence[Ratio]] = lambda rows: ()

    def parse(self, name: str) -> Any:
        """The case of that name: a built-in one, or any other shape written in the same form."""
        match = re.fullmatch(self.pattern, name.strip())
        if not match:
            raise BenchError(f"case {name!r}: expected {self.case_form}; `list` prints the built-in ones")
        try:
            case = self.case_of(*match.groups())
        except ValueError as error:
            raise BenchError(f"case {name!r}: {error}") from error
        return next((known for known in self.suites["targets"] if known == case), case)

    def select(self, names: Sequence[str], suite: str) -> tuple[Case, ...]:
        """The named cases, or the suite if no name is given; duplicates are dropped."""
        return tuple(dict.fromkeys([self.parse(name) for name in names] if names else self.suites[suite]))

    def peers_of(self, choices: Choices) -> list[str]:
        """Names of the peers that run if none are named."""
        return [*self.default_peers, *(self.peers_from_dir if choices.peers_dir else ())]
