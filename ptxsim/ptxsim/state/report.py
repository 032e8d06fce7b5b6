"""Report of a launch: instruction counts, FLOPs, bytes, bank conflicts, barrier waits."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cached_property
from typing import Any

import numpy as np

from .findings import Finding, Place, place_of

_TRAFFIC = ("shared read", "shared written", "global read", "global written", "global atomic", "bulk read",
            "bulk written", "tensor memory")  # fmt: skip


class BankCounter:
    """Counts shared-memory wavefronts per access site (32 banks of 4 bytes)."""

    def __init__(self) -> None:
        self.sites: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])

    def access(self, ins: Any, offset: np.ndarray, size: int) -> None:
        """Record one access of ``size`` bytes per lane at byte offsets."""
        lanes = len(offset)
        per_phase = max(1, 128 // max(size, 4))
        wavefronts = ideal = 0
        for start in range(0, lanes, per_phase):
            part = offset[start : start + per_phase].astype("i8") // 4
            words = np.unique((part[:, None] + np.arange(max(1, size // 4))).reshape(-1))
            wavefronts += int(np.bincount(words % 32).max())
            ideal += -(-len(words) // 32)
        site = self.sites[f"line {ins.line}: {ins.text}"]
        site[0] += 1
        site[1] += wavefronts
        site[2] += ideal


_PER_CYCLE = {"sm_90": 4096, "sm_100": 8192}
"""FLOPs of 16-bit types that an SM's tensor cores perform in a cycle, from the published peaks of H100 and B200."""

_RATE = {"tf32": 0.5, "f16": 1, "bf16": 1, "e4m3": 2, "e5m2": 2, "e2m3": 2, "e3m2": 2, "e2m1": 2, "s8": 2, "u8": 2,
         "e2m1x2": 4}  # fmt: skip
"""Rates of all types, relative to 16-bit types."""

_SCHEDULERS = 4
"""Warp-instructions that an SM issues in a cycle, at most."""


def tensor_cycles(flops: dict[str, int], target: str) -> float | None:
    """Return for how many cycles matrix operations keep an SM's tensor cores busy (None: a kind without a rate)."""
    peak = next((rate for arch, rate in _PER_CYCLE.items() if target.startswith(arch)), None)
    rates = [_RATE.get(kind.split()[-1]) for kind in flops]
    if peak is None or None in rates:
        return None
    return sum(count / (peak * rate) for count, rate in zip(flops.values(), rates, strict=True))


class Report:
    """Statistics of one launch.

    Attributes
    ----------
    instructions : dict of str to int
        Executed warp-instructions per opcode.
    classes : dict of str to int
        The same per first part of the opcode.
    flops : dict of str to int
        Matrix floating-point operations per kind.
    tensor_share : float or None
        How busy the tensor cores can be at most, going by counts: the cycles that the matrix FLOPs take at peak, over
        those or the cycles that issuing all warp-instructions takes, whichever is more. Nothing waits in this figure,
        so a kernel on hardware stays below it. None where there are no matrix FLOPs, or no peak is known.
    bytes : dict of str to int
        Bytes moved per space.
    counters : dict of str to int
        Barrier arrivals and finished asynchronous operations.
    waits : dict of str to (int, int)
        Per barrier (or what else warps waited for), over all blocks: how often a warp had to wait, and how many basic
        blocks others executed meanwhile.
    notes : list of str
        Oddities that are legal, such as arrivals left over at a named barrier.
    missed : list of Place
        The instructions that no warp has executed.
    findings : list of Finding
        Broken rules that the launch allows and, with ``keep_going``, races.
    banks : dict
        Per site: accesses, wavefronts, and wavefronts without conflicts.
    """

    def __init__(self, launch: Any) -> None:
        program = launch.program
        self.kernel = program.name
        self.steps = launch.steps
        opcodes: Counter = Counter()
        for block, count in zip(program.blocks, launch.counts, strict=True):
            if count:
                for ins in block.instrs:
                    opcodes[ins.opcode] += int(count)
        self.instructions = dict(opcodes)
        classes: Counter = Counter()
        for name, count in opcodes.items():
            classes[name.split(".")[0]] += count
        self.classes = dict(classes)
        self.total = sum(classes.values())
        counters = {k: v for k, v in launch.counters.items() if k != "tcgen05 cta_group"}
        self.flops = {k[6:]: v for k, v in counters.items() if k.startswith("flops ")}
        self.counters = {k: v for k, v in counters.items() if not k.startswith("flops ")}
        cycles = tensor_cycles(self.flops, launch.module.ir.target)
        issue = self.total / _SCHEDULERS
        self.tensor_share = cycles / max(cycles, issue) if self.flops and cycles else None
        self.bytes = dict(zip(_TRAFFIC, launch.traffic, strict=False))
        self.waits = {name: tuple(pair) for name, pair in launch.waits.items()}
        self.notes = list(launch.notes)
        self._ran = program, launch.counts
        self.findings = list(launch.found.values())
        self.banks = dict(launch.banks.sites) if launch.banks else {}

    @cached_property
    def missed(self) -> list[Place]:
        """The instructions that no warp has executed, computed on demand because few callers need them."""
        program, counts = self._ran
        return [
            place_of(program, ins)
            for block, count in zip(program.blocks, counts, strict=True)
            for ins in block.instrs
            if not count and ins.line != program.function.line  # the end of a kernel is placed there
        ]

    @property
    def errors(self) -> list[Finding]:
        """The findings that are errors."""
        return [each for each in self.findings if each.severity == "error"]

    def as_dict(self) -> dict:
        """Return the statistics and findings as plain values, for JSON."""
        plain = (
            "kernel",
            "steps",
            "total",
            "instructions",
            "flops",
            "tensor_share",
            "bytes",
            "counters",
            "waits",
            "banks",
            "notes",
        )
        return {name: getattr(self, name) for name in plain} | {"findings": [each.as_dict() for each in self.findings]}

    def __str__(self) -> str:
        lines = [f"kernel {self.kernel}: {self.total} warp-instructions in {self.steps} basic blocks"]
        for title, table in (
            ("instructions", self.classes),
            ("matrix FLOPs", self.flops),
            ("bytes", self.bytes),
            ("events", self.counters),
        ):
            lines.append(f"{title}:")
            lines += [f"  {value:>14,}  {key}" for key, value in sorted(table.items(), key=lambda kv: -kv[1]) if value]
        if self.tensor_share is not None:
            lines.append(f"tensor cores: busy at most {self.tensor_share:.0%} of the time, by instruction counts")
        if self.waits:
            lines.append("waits (times, and basic blocks executed meanwhile):")
            ordered = sorted(self.waits.items(), key=lambda item: -item[1][1])
            lines += [f"  {times:>8,} {steps:>14,}  {name}" for name, (times, steps) in ordered]
        for site, (accesses, waves, ideal) in sorted(self.banks.items(), key=lambda kv: kv[1][2] - kv[1][1]):
            if waves > ideal:
                lines.append(f"  bank conflicts: {waves} wavefronts for {ideal} in {accesses} accesses, {site[:100]}")
        lines += [f"{each.severity}: {each}" for each in self.findings]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])
