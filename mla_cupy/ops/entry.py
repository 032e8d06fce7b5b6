"""A kind of calls: what they have in common, checked and prepared once, and how the next one runs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mla_cupy import arrays as families
from mla_cupy.arrays import Matcher, Native, View
from mla_cupy.kernels.pipeline import ALIGNMENT, Prepared
from mla_cupy.ops import overlap
from mla_cupy.ops.operation import Examined


class Plan(Protocol):
    """A configuration and a workspace, made before the calls that use them."""

    @property
    def address(self) -> int:
        """Where the workspace begins."""

    @property
    def device(self) -> int:
        """Where it is, or HOST."""

    @property
    def state(self) -> Hashable:
        """Changes whenever calls that the plan served may no longer be served."""

    def configuration(self, request: Request) -> Any:
        """For the pipeline; raises PlanError unless the plan serves such a call."""


class Request(NamedTuple):
    """A call that has passed all checks.

    Attributes
    ----------
    views : dict
        All arrays, with the axes of the record; outputs that were not given are contiguous and at address 0.
    sizes : dict
        Of the axes, by name.
    missing : dict
        The outputs to allocate: name -> (shape, dtype).
    device : int
    examined : Examined
    """

    views: dict[str, View | None]
    sizes: dict[str, int]
    missing: dict[str, tuple[tuple[int, ...], str]]
    device: int
    examined: Examined


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a kind of calls writes: the outputs' place among the arrays, (index, shape, dtype) of those to make, and the
    indices of inputs that are changed in place.
    """

    begin: int
    end: int
    missing: tuple[tuple[int, tuple[int, ...], str], ...]
    changed: tuple[int, ...] = ()


class Entry:
    """A kind of calls: everything that they have in common."""

    __slots__ = (
        "_apart",
        "_device",
        "_given",
        "_native",
        "_nbytes",
        "_outputs",
        "_reach",
        "_written",
        "match",
        "prepared",
    )

    match: Matcher

    def __init__(
        self, native: Native, request: Request, prepared: Prepared, nbytes: tuple[int, int], outputs: Outputs
    ) -> None:
        """`nbytes` are the sizes of the workspace that is needed, and of the one that is given."""
        needed, lent = nbytes
        self.prepared = prepared
        self._native, self._device, self._nbytes, self._outputs = native, request.device, needed, outputs
        self._given = slice(outputs.begin, outputs.end)
        made = {index for index, _, _ in outputs.missing}
        reach = [None if at in made else span for at, span in enumerate(overlap.spans(tuple(request.views.values())))]
        self._reach = (None, *reach, (0, lent) if lent else None)
        changed = (index + 1 for index in outputs.changed)
        written = (*changed, *range(outputs.begin + 1, outputs.end + 1), outputs.end + 1)
        self._written = tuple(index for index in written if self._reach[index] is not None)
        self._apart: list[int] | None = None

    def trust(self, addresses: list[int]) -> None:
        """Arrays at these addresses have been found not to overlap."""
        self._apart = addresses.copy()

    def run(
        self, arrays: tuple[Any, ...], addresses: list[int], stream: Any, plan: Plan | None
    ) -> tuple[Any, ...] | None:
        """Run a call of this kind; None if its arrays may overlap or its workspace is not aligned."""
        if addresses != self._apart:
            if addresses[-1] % ALIGNMENT or not overlap.clearly_apart(addresses, self._reach, self._written):
                return None
            self._apart = addresses.copy()
        native, device, outputs = self._native, self._device, self._outputs
        handle = native.current_stream(device) if stream is None else families.stream_handle(stream)
        results = arrays[self._given]
        if outputs.missing:
            results = self._complete(results, addresses, handle)
        memory = addresses.pop()
        scratch = None
        if plan is not None:
            memory = plan.address
        elif not memory and self._nbytes:
            scratch, memory = native.scratch(self._nbytes, device, handle)
        self.prepared.enqueue(addresses, memory, handle)
        del scratch  # held until everything is enqueued: the stream orders its next use
        return results

    def _complete(self, results: tuple[Any, ...], addresses: list[int], stream: int) -> tuple[Any, ...]:
        """Allocate the outputs that were not given, and write down their addresses."""
        native, completed = self._native, list(results)
        for index, shape, dtype in self._outputs.missing:
            made = completed[index - self._outputs.begin] = native.empty(shape, dtype, self._device, stream)
            addresses[index + 1] = native.address(made)
        return tuple(completed)
