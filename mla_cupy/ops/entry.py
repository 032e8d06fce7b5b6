"""Requests that have passed all checks, and the entries by which later calls like them run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mla_cupy.arrays import HOST, Counter, Matcher, Native, Signature
from mla_cupy.kernels.pipeline import Call, Prepared
from mla_cupy.ops.overlap import Beside, Span


class Plan:
    """A configuration and a workspace, made before the calls that use them.

    Attributes
    ----------
    address : int
        Address of the workspace.
    device : int
        Its CUDA ordinal, or HOST.
    state : hashable
        Changes whenever the plan must no longer serve cached calls.
    operation : str
        Name of the operation that it serves.
    """

    operation: str
    address: int
    device: int
    state: Hashable

    def configuration(self, request: Request) -> Any:
        """Configuration for the pipeline; raises PlanError unless the plan serves such a call."""
        raise NotImplementedError


@dataclass(frozen=True)
class Request(Call):
    """A call that has passed all checks, for the pipeline.

    Attributes
    ----------
    views : dict
        All arrays, with the operation's axes; missing outputs are contiguous and at address 0.
    options : named tuple
        Every default is resolved.
    planned : bool
    problem : hashable
        For the pipeline's `configure`.
    kernel : str or None
        The caller's choice.
    device : int
    sizes : dict
        Of the axes, by name.
    missing : dict
        The outputs to allocate: name -> (shape, dtype).
    """

    problem: Any = None
    kernel: Any = None
    device: int = HOST
    sizes: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Entry:
    """A kind of call: everything that its calls share, checked and prepared once.

    Attributes
    ----------
    options, kinds, state
        The options of its calls, their types, and the state of their plan, or else whether a workspace is passed. Types
        are compared, too, since True == 1 == 1.0.
    native : Native
        The library of the arrays.
    changed : callable
        Selects the written arrays among the call's arrays and the workspace.
    count_writes : callable or None
        Counts writes to them, if there are any, and if their library counts.
    signature : tuple or None
        Everything about the arrays, and a caller's workspace, except their addresses.
    match : callable or None
        A faster test that arrays have this signature.
    device : int
    prepared : Prepared
    nbytes : int
        Size of the required workspace.
    given : slice
        The outputs among the arrays.
    missing : tuple
        (index, shape, dtype) of the outputs to allocate.
    reach : tuple
        The bytes that each array spans from its address, after a leading None; None for arrays to allocate.
    written : tuple of int
        Indices of the written arrays' addresses.
    beside : frozenset
        Pairs of addresses that may be close at a certain distance: 0 for a result that overwrites an input with the
        same layout, others for rows that lie between the other's rows.
    apart : list of int
        Addresses at which the arrays do not overlap, from the last call.
    known : set
        Further such addresses, such as one set per layer of a model.
    """

    options: tuple[Any, ...]
    kinds: list[type]
    state: Hashable
    native: Native
    device: int
    prepared: Prepared
    nbytes: int
    given: slice
    missing: tuple[tuple[int, tuple[int, ...], str], ...]
    reach: tuple[Span | None, ...]
    written: tuple[int, ...]
    beside: frozenset[Beside]
    apart: list[int]
    changed: Callable[[Sequence[Any]], tuple[Any, ...]]
    count_writes: Counter | None
    known: set[tuple[int, ...]] = field(default_factory=set)
    signature: Signature | None = None
    match: Matcher | None = None
