"""A warp: its register file, and the fragments into which divergence splits it."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np

from ..arithmetic.numeric import LaneSet, count_nonzero, distinct
from ..arithmetic.undefined import UNWRITTEN
from ..errors import MemoryFault, SimError
from ..memory.spaces import RANK_SHIFT, SHARED_RESERVED, Local
from ..parsing.ir import Imm, Instr
from ..translation.codegen import EXIT, Park
from ..translation.registry import OPS
from .accesses import Accesses
from .faults import Faults
from .special import special_register

_SPIN_LIMIT = 64


class Fragment:
    """Lanes of a warp at one place; ``lanes`` is None when all 32 are together."""

    __slots__ = ("block", "deferred", "lanes", "last_wait", "park", "spins", "waiting")

    def __init__(self, block: int, lanes: LaneSet) -> None:
        self.block, self.lanes = block, lanes
        self.park: Park | None = None
        self.waiting = False
        self.deferred = False
        self.spins = 0
        self.last_wait: tuple | None = None

    def lane_list(self) -> np.ndarray:
        """Return the lanes as an index array."""
        return np.arange(32) if self.lanes is None else self.lanes


class Doubt:
    """Lanes between an undefined branch and the place where its ways meet, and the registers it then decides."""

    __slots__ = ("lanes", "registers")

    def __init__(self) -> None:
        self.lanes = np.zeros(32, bool)
        self.registers: set[int] = set()


class Warp(Faults, Accesses):
    """32 lanes in execution. Generated code reaches everything through this object."""

    def __init__(self, cta: Any, index: int, lanes: int) -> None:
        self.cta, self.index = cta, index
        self.home = cta
        self.program = cta.program
        self.launch = cta.launch
        self.memory = cta.launch.memory
        self.params, self.constants = cta.launch.params, cta.launch.constants
        self.R = self.program.initial_registers()
        self.Q: list[np.ndarray | None] = [UNWRITTEN] * len(self.R)
        self.local = Local(self.program.local_size)
        self.traffic = cta.launch.traffic
        self.banks = cta.launch.banks
        self.shadows = cta.launch.shadows
        live = None if lanes == 32 else np.arange(lanes)
        self.fragments = [Fragment(0, live)]
        self.live = lanes
        self.current: Fragment | None = None
        detector = cta.cluster.detector
        self.agent = detector.new_agent(self.name, True, cta, self) if detector else 0
        self._special: dict[str, np.ndarray] = {}
        self.state: dict = {}
        self.synchronisations: list[int] = []
        self.epoch = next(cta.launch.epochs)
        self.doubts: dict[int, Doubt] = {}

    @property
    def name(self) -> str:
        """Block and warp, for messages."""
        return f"block {self.cta.ctaid} warp {self.index}"

    @property
    def waits(self) -> bool:
        """Tell whether any lane waits for something."""
        return any(f.park is not None for f in self.fragments)

    # ---- scheduling --------------------------------------------------------------------------------------------
    def run(self, quota: int) -> int:
        """Run up to ``quota`` blocks; return how many ran (0: every fragment waits)."""
        done = 0
        while done < quota:
            fragment = self._choose()
            if fragment is None:
                break
            self.current = fragment
            ran = self._step(fragment, quota - done)
            if not ran:
                break
            done += ran
        self.current = None
        return done

    def _choose(self) -> Fragment | None:
        """Pick the runnable fragment at the lowest block, and merge into it all others there."""
        fragments = self.fragments
        if len(fragments) == 1:
            only = fragments[0]
            if only.park is not None and not self._wake(only):
                return None
            if only.waiting and not self._gathered(only):
                return None
            return only
        runnable = [f for f in fragments if (f.park is None or self._wake(f)) and not f.waiting]
        while runnable:
            ready = [f for f in runnable if not f.deferred]
            if not ready:
                for f in runnable:
                    f.deferred = False
                ready = runnable
            chosen = min(ready, key=lambda f: f.block)
            chosen = self._merge(chosen)
            block = self.program.blocks[chosen.block]
            if block.gather is None or self._gathered(chosen):
                chosen.waiting = False
                return chosen
            chosen.waiting = True
            runnable = [f for f in self.fragments if f.park is None and not f.waiting]
        for f in fragments:
            if f.waiting and self._gathered(f):
                f.waiting = False
                return f
        return None

    def _wake(self, fragment: Fragment) -> bool:
        """Resume a parked fragment if what it waits for has happened."""
        if not fragment.park.ready():
            return False
        if not fragment.park.redo:
            fragment.block += 1
        park, fragment.park = fragment.park, None
        self.launch.note_wake(self, park)
        return True

    def _merge(self, chosen: Fragment) -> Fragment:
        same = [f for f in self.fragments if f.block == chosen.block and f.park is None]
        if len(same) > 1:
            lanes = np.sort(np.concatenate([f.lane_list() for f in same]))
            merged = Fragment(chosen.block, None if len(lanes) == 32 else lanes)
            self.fragments = [f for f in self.fragments if f not in same]
            self.fragments.append(merged)
            return merged
        return chosen

    def _gathered(self, fragment: Fragment) -> bool:
        """Tell whether all members of the collective at the fragment's block are in the fragment."""
        block = self.program.blocks[fragment.block]
        if block.gather is None or fragment.lanes is None or len(fragment.lanes) == self.live:
            return True
        members = self._members(block.gather, fragment)
        if members is None:
            return False
        alive = set(np.concatenate([f.lane_list() for f in self.fragments]).tolist())
        return not ((members & alive) - set(fragment.lanes.tolist()))

    def _members(self, ins: Instr, fragment: Fragment) -> set[int] | None:
        """Return the member lanes named by a collective's mask operand (None: all live lanes)."""
        spec = OPS[ins.op]
        position = spec.members(ins) if spec.members else None
        if position is None:
            return None
        operand = ins.args[position]
        if isinstance(operand, Imm):
            mask = operand.value & 0xFFFFFFFF
        else:
            mask = int(self.R[operand.index][fragment.lanes].view("u4")[0])
        return {i for i in range(32) if mask >> i & 1}

    def _step(self, fragment: Fragment, quota: int) -> int:
        """Run a fragment for up to ``quota`` blocks, until it splits, parks or joins others."""
        program, ran = self.program, 0
        R, Q = self.R, self.Q
        counts, runs, full = self.launch.counts, self.launch.runs, program.full
        alone = len(self.fragments) == 1
        index, lanes = fragment.block, fragment.lanes
        while ran < quota:
            if self.doubts:
                lanes = self._settle(fragment, index)
            if lanes is None:
                function, _ = full.get(index) or program.superblock(index)
                runs[index] += 1
            else:
                if program.blocks[index].gather is not None and not self._gathered(fragment):
                    fragment.waiting = True
                    return max(ran, 1)
                function = program.partial[index] or program.block(index)
                counts[index] += 1
            try:
                following = function(self, R, Q, lanes)
            except (SimError, AssertionError):
                raise
            except Exception as error:
                self._broken(index, error)
            ran += 1
            if program.blocks[index].synchronises:
                self.epoch = next(self.launch.epochs)
                if self.synchronisations[-1:] != [index]:
                    self.synchronisations = [*self.synchronisations[-2:], index]
            if following.__class__ is int:
                if following == EXIT:
                    self._exit(fragment)
                    return ran
                if following <= index:
                    fragment.spins += 1
                    if not alone and fragment.spins > _SPIN_LIMIT:
                        fragment.spins, fragment.deferred = 0, True
                        fragment.block = following
                        return ran
                fragment.block = index = following
                if not alone:
                    return ran
            elif following.__class__ is Park:
                fragment.park = following
                self.launch.note_park(following)
                return ran
            elif following.__class__ is np.ndarray:
                self._scatter(fragment, following)
                return ran
            else:
                self._split(fragment, *following)
                return ran
        return ran

    def doubt(self, mask: np.ndarray, ins: Instr, index: int, L: LaneSet) -> None:
        """Go on after a branch on an undefined value where both ways only write registers; else report it.

        What they write is undefined from where the ways meet. Until then the warp runs block by block.
        """
        if not count_nonzero(mask):
            return
        decided = self.program.decided(index)
        if decided is None:
            self.poisoned(mask, ins, "a predicate", L)
            return
        join, registers = decided
        doubt = self.doubts.setdefault(join, Doubt())
        doubt.lanes[self._lanes(L, mask)] = True
        doubt.registers.update(registers)

    def _settle(self, fragment: Fragment, index: int) -> LaneSet:
        """Mark the registers that an undefined branch decided, where its ways meet; return the lanes to run."""
        lanes = fragment.lane_list()
        doubt = self.doubts.get(index)
        if doubt is not None:
            here = np.zeros(32, bool)
            here[lanes] = True
            here &= doubt.lanes
            doubt.lanes &= ~here
            for number in doubt.registers if here.any() else ():
                mask = self.Q[number]
                self.Q[number] = here if mask is None else np.asarray(mask) | here
            if not doubt.lanes.any():
                del self.doubts[index]
        fragment.lanes = None if len(lanes) == 32 and not self.doubts else lanes
        return fragment.lanes

    def _broken(self, index: int, error: Exception) -> None:
        """Raise for a block whose code cannot be run, because its instructions do not accept their operands."""
        ins = self.program.blocks[index].instrs[0]
        self.fail(SimError, ins, f"this block cannot be executed ({type(error).__name__}: {error})")

    def _scatter(self, fragment: Fragment, targets: np.ndarray) -> None:
        """Split a fragment whose lanes go to several blocks."""
        lanes = fragment.lane_list()
        self.fragments.remove(fragment)
        for target in distinct(targets):
            part = Fragment(target, lanes[targets == target])
            part.spins = fragment.spins + (target <= fragment.block)
            if part.spins > _SPIN_LIMIT:
                part.spins, part.deferred = 0, True
            self.fragments.append(part)

    def _split(self, fragment: Fragment, pred: np.ndarray, taken: int, fall: int) -> None:
        lanes = fragment.lane_list()
        self.fragments.remove(fragment)
        for target, subset in ((taken, lanes[pred]), (fall, lanes[~pred])):
            part = Fragment(target, subset)
            if target == EXIT:
                self.fragments.append(part)
                self._exit(part)
            else:
                part.spins = fragment.spins + (target <= fragment.block)
                if part.spins > _SPIN_LIMIT:
                    part.spins, part.deferred = 0, True
                part.last_wait = fragment.last_wait
                self.fragments.append(part)

    def _exit(self, fragment: Fragment) -> None:
        self.fragments.remove(fragment)
        self.live -= 32 if fragment.lanes is None else len(fragment.lanes)
        if not self.live:
            self.cta.warp_exited(self)

    # ---- values ------------------------------------------------------------------------------------------------
    def special(self, name: str) -> np.ndarray:
        """Return a special register for all 32 lanes."""
        value = self._special.get(name)
        if value is None:
            value, fixed = special_register(self.cta, self, name)
            if fixed:
                self._special[name] = value
        return value

    def symbol(self, name: str, offset: int) -> int:
        """Return the address of a variable as the kernel's instructions see it."""
        return self.cta.symbol(name) + offset

    def lane_bits(self, L: LaneSet) -> int:
        """Return the active lanes as a bit mask."""
        return 0xFFFFFFFF if L is None else sum(1 << int(lane) for lane in L)

    def live_bits(self) -> int:
        """Return the lanes that have not exited, as a bit mask."""
        return functools.reduce(operator.or_, (self.lane_bits(f.lanes) for f in self.fragments), 0)

    def width(self, L: LaneSet) -> int:
        """Return the number of active lanes."""
        return 32 if L is None else len(L)

    def remote_shared(
        self, ins: Instr, a: np.ndarray, L: LaneSet, function: Any, extra: tuple, outputs: int
    ) -> tuple | None:
        """Run a shared access whose lanes address other blocks of the cluster."""
        ranks = (a - np.uint32(SHARED_RESERVED)) >> np.uint32(RANK_SHIFT)
        own = self.cta
        lanes = np.arange(32) if L is None else L
        results: list = [None] * outputs
        for rank in distinct(ranks):
            pick = ranks == rank
            target = own.cluster.member(self, ins, rank)
            local = a[pick]
            if int((local - target.shared_base).max()) >= target.shared.size:
                self.fail(MemoryFault, ins, f"shared address {int(local.max()):#x} is outside block {rank}'s window")
            self.cta = target
            try:
                part = function(self, lanes[pick], local, None, *(None if x is None else x[pick] for x in extra))
            finally:
                self.cta = own
            for k in range(outputs):
                if results[k] is None:
                    results[k] = np.zeros(len(a), bool if k % 2 else part[k].dtype)
                results[k][pick] = False if part[k] is None else part[k]
        return tuple(results) if outputs else None
