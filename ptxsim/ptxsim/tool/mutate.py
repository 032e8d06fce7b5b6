"""Plants bugs in a kernel, one at a time, and tells which bugs the simulator (or the result) catches.

A bug is a fence, barrier, wait, commit or arrival that is missing, or a count that is off by one. A test that launches
the kernel and compares its results is run on each: one that nothing notices is a hole in the test, in the simulator, or
a step that the kernel does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import SimError
from ..memory.spaces import Memory
from ..module import Module
from ..parsing.ir import Imm, Instr
from ..state.report import Report
from .survey import nothing

_DROPPED = {
    "fence": ((),),
    "membar": ((),),
    "bar": (("sync",), ("arrive",)),
    "barrier": (("sync",), ("arrive",), ("cluster", "arrive"), ("cluster", "wait")),
    "mbarrier": (("arrive",), ("arrive_drop",)),
    "wgmma": (("fence",), ("commit_group",), ("wait_group",)),
    "cp": (("async", "wait_group"), ("async", "wait_all"), ("async", "commit_group"), ("async", "mbarrier"),
           ("async", "bulk", "commit_group"), ("async", "bulk", "wait_group")),
    "tcgen05": (("wait::ld",), ("wait::st",), ("commit",), ("fence::before_thread_sync",),
                ("fence::after_thread_sync",)),
}  # fmt: skip
"""Instructions that are left out, by opcode and first modifiers."""


@dataclass(frozen=True)
class Mutation:
    """One bug: which instruction of a kernel is changed, and how."""

    kernel: str
    position: int
    line: int
    text: str
    change: str
    by: Instr

    def __str__(self) -> str:
        return f"line {self.line}: {self.change}: {self.text}"

    def apply(self, module: Module) -> Module:
        """Return a module with the bug."""
        return module.variant(self.kernel, {module.ir.functions[self.kernel].instrs[self.position]: self.by})


@dataclass(frozen=True)
class Outcome:
    """Outcome of a planted bug: the error or mismatch that caught it, or '' when it survived.

    ``reached`` is False where no test executes the step that is changed.
    """

    mutation: Mutation
    caught: str
    reached: bool = True

    def __str__(self) -> str:
        return f"{self.caught or ('SURVIVES' if self.reached else 'NOT REACHED'):16} {self.mutation}"


def tally(outcomes: Sequence[Outcome]) -> str:
    """Say how many bugs were caught."""
    reached = [each for each in outcomes if each.reached]
    text = f"{sum(bool(each.caught) for each in reached)} of {len(reached)} caught"
    return text + (f", {len(outcomes) - len(reached)} not reached" if len(reached) < len(outcomes) else "")


def mutations(module: Module, kernel: str) -> Iterator[Mutation]:
    """Yield the bugs that can be planted in a kernel."""
    for position, ins in enumerate(module.ir.functions[kernel].instrs):
        for change, by in _changes(ins):
            yield Mutation(kernel, position, ins.line, ins.text, change, by)


def _changes(ins: Instr) -> Iterator[tuple[str, Instr]]:
    starts = _DROPPED.get(ins.op, ())
    if any(tuple(ins.mods[: len(start)]) == start for start in starts):
        yield "left out", nothing(ins)
    if ins.op == "mbarrier" and ins.mods[0] in ("try_wait", "test_wait"):
        yield "not waited for", replace(ins, op="setp", mods=["eq", "u32"], args=[ins.args[0], Imm(0), Imm(0)])
    counted = {"init": 1, "arrive": -1, "expect_tx": 1}.get(ins.mods[0] if ins.op == "mbarrier" and ins.mods else "", 0)
    if "wait_group" in ins.mods:
        counted = -1
    number = ins.args[counted] if counted and ins.args else None
    if isinstance(number, Imm) and number.kind == "int":
        changed = [number.value + 1, *([number.value - 1] if number.value > 1 and "wait_group" not in ins.mods else [])]
        for value in changed:
            args = [*ins.args]
            args[counted] = Imm(value)
            yield f"{number.value} made {value}", replace(ins, args=args)


def steps(module: Module, kernel: str, kind: str) -> list[Instr]:
    """Return the instructions of a kernel that :func:`plant` can leave out, of one kind, in the text's order.

    Parameters
    ----------
    kind : str
        How their opcodes begin, such as ``"bar.sync"`` or ``"mbarrier.try_wait"``.

    Raises
    ------
    SimError
        The module has no such kernel.
    """
    found = module.program(kernel).function.instrs
    return [ins for ins in found if f"{ins.opcode}.".startswith(f"{kind}.") and _left_out(ins) is not None]


def plant(module: Module, kernel: str, kind: str, places: Sequence[int], memory: Memory | None = None) -> Module:
    """Return a module with some steps of synchronisation left out.

    Parameters
    ----------
    module : Module
        The module without bugs; what it has compiled is shared.
    kernel : str
        Which kernel is changed.
    kind : str
        How the opcodes of the steps begin, such as ``"bar.sync"``; a wait on an mbarrier is ``"mbarrier.try_wait"``.
    places : sequence of int
        Which steps of this kind, counted from 0 in the text's order.
    memory : Memory, optional
        Global memory of the new module; by default it has its own.

    Raises
    ------
    SimError
        The module has no such kernel.
    ValueError
        There is no such step.
    """
    found = steps(module, kernel, kind)
    if wrong := [place for place in places if not 0 <= place < len(found)]:
        raise ValueError(f"kernel {kernel}: step {wrong[0]} of kind {kind!r}, but there are {len(found)}")
    changes = {found[place]: by for place in places if (by := _left_out(found[place])) is not None}
    return module.variant(kernel, changes, memory)


def _left_out(ins: Instr) -> Instr | None:
    return next((by for change, by in _changes(ins) if change in ("left out", "not waited for")), None)


def mutate(module: Module, kernel: str, tests: Sequence[Callable[[Module], Report | None]]) -> Iterator[Outcome]:
    """Run tests on a kernel with each bug in turn.

    Parameters
    ----------
    module : Module
        The module without bugs.
    kernel : str
        Which kernel is changed.
    tests : sequence of callable
        Each launches the kernel of the module that it is given, and raises an ``AssertionError`` for a wrong result.
        The kernel without bugs must pass them. If all return reports of it, steps that none has executed are skipped.

    Yields
    ------
    Outcome
        One per bug, in the text's order. Where rules may be broken, a test has to look at its report's findings itself.
    """
    missed = _missed([test(module) for test in tests])
    for mutation in mutations(module, kernel):
        if mutation.line in missed:
            yield Outcome(mutation, "", reached=False)
            continue
        caught = ""
        for test in tests:
            try:
                test(mutation.apply(module))
            except SimError as error:
                caught = type(error).__name__
            except AssertionError:
                caught = "wrong result"
            if caught:
                break
        yield Outcome(mutation, caught)


def _missed(reports: Sequence[Report | None]) -> set[int]:
    """Return the lines that no report counts as executed (none if a report is missing)."""
    if not reports or any(report is None for report in reports):
        return set()
    return set.intersection(*({place.line for place in report.missed} for report in reports))
