"""Plant bugs in the PTX of other projects' kernels, and tell which ones the simulator finds and what it says.

The kernels are run.py's, which says where their sources come from, and one that Triton has compiled (in the
tests of this distribution)::

    python foreign/planted.py --sources . --build /tmp/foreign

Each bug edits the text of one kernel. Its launch runs in the modes early, late and random until one of them stops with
a report. A bug that none reports may still change the result: then only a comparison finds it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import run

import ptxsim
from ptxsim import triton
from ptxsim.host.command import run_program
from ptxsim.host.record import Recording, Replay
from ptxsim.host.session import Settings

ACROSS = {"race_global": True, "resident": 4}
"""Options of launches whose blocks exchange data."""

MODES = (("early", 0), ("late", 0), ("random", 1))
TRITON = run.HERE.parent / "tests/simtest/triton"
TOLERANCE = ("f4", 1e-3, 1e-3)
"""How memory is compared: sums that atomics add differ in their last bits."""

Launch = Callable[..., None]
"""Runs a PTX text and raises what is found; AssertionError for a wrong result."""


@dataclass(frozen=True)
class Bug:
    """One edit of a kernel's text.

    Attributes
    ----------
    kernel : str
        Which launch it is planted in (``KERNELS``).
    kind : str
        What a programmer would have done wrong.
    pattern, by : str
        What is replaced, as for :func:`re.sub`.
    places : tuple of int
        Which matches, counted from 0; all where there are none.
    options : dict
        Passed to the launch.
    """

    kernel: str
    kind: str
    pattern: str
    by: str = ""
    places: tuple[int, ...] = ()
    options: dict = field(default_factory=dict)

    def plant(self, text: str) -> str:
        """Return the text with the bug."""
        matches = [*re.finditer(self.pattern, text)]
        if not matches or max(self.places, default=0) >= len(matches):
            raise SystemExit(f"{self.kernel}: {self.kind}: {self.pattern!r} matches {len(matches)} times")
        chosen = {matches[place].start() for place in self.places or range(len(matches))}
        return re.sub(self.pattern, lambda m: m.expand(self.by) if m.start() in chosen else m.group(), text)


_WAIT = r"mbarrier\.try_wait\.parity\.shared::cta\.b64 (\w+), [^;]*;"
_NOT_WAITED = r"setp.eq.u32 \1, 0, 0;"
_EXPECT = r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, (\[[^]]*\]), ([^;]*);"
_FEWER_BYTES = r"{ .reg .u32 bytes; sub.u32 bytes, \2, 16; mbarrier.arrive.expect_tx.shared::cta.b64 _, \1, bytes; }"
_WAIT_TRITON = r"(mbarrier\.try_wait\.parity\.shared::cta\.b64 \w+, \[\S+\]), (\S+);"
_OTHER_PARITY = r"{ .reg .u32 other; xor.b32 other, \2, 1; \1, other; }"
_ATOMIC = r"atom\.global\.add\.u32\s+(\S+), (\[[^]]*\]), (\S+);"
_NOT_ATOMIC = r"{ .reg .u32 sum; ld.global.u32 \1, \2; add.u32 sum, \1, \3; st.global.u32 \2, sum; }"
_COPY = (
    r"(cp\.async\.bulk\.tensor\.4d\.shared::cluster\S+ \[%r\w+)"
    r"(\], \[%rd\w+, \{%\w+), (%\w+), (%\w+), (%\w+\}\], \[%r\w+)\]"
)

BUGS = (
    Bug("flash_2", "no barrier after cp.async", r"bar\.sync\s+0;", places=(1,)),
    Bug("flashinfer", "one group more in flight", r"cp\.async\.wait_group\s+1;", "cp.async.wait_group 2;"),
    Bug("flash_2", "wrong swizzle", r"xor\.b32 (\S+), (\S+), (\S+);", r"mov.b32 \1, \2;", (1,)),
    Bug("flash_3", "copy into the next stage", _COPY, r"\1+32768\2, \3, \4, \5]", (2,)),
    Bug("flash_2", "registers of A swapped", r"(mma\.sync\S+\s+\{[^}]*\},\s*)\{(\S+), (\S+), ", r"\1{\3, \2, ", (0,)),
    Bug("flash_2", "rows out of bounds", r"(cp\.async\.cg\S+ \[\S+\], \[%rd\w+)\]", r"\1+65536]", (8,)),
    Bug("flash_3", "stage not waited for before it is filled", _WAIT, _NOT_WAITED, (21,)),
    Bug("flash_3", "one wgmma group more in flight", r"(wgmma\.wait_group\S+)\s+0;", r"\1 1;", (0,)),
    Bug("flash_3", "copy arrives at the next stage", _COPY, r"\1\2, \3, \4, \5+8]", (4,)),
    Bug("flash_3", "too few bytes expected", _EXPECT, _FEWER_BYTES, (2,)),
    Bug("flash_3", "coordinates of a copy swapped", _COPY, r"\1\2, \4, \3, \5]", (0,)),
    Bug("cluster", "no cluster barrier", r"barrier\.cluster\.\w+[^;]*;"),
    Bug("cluster", "no wait at the cluster barrier", r"barrier\.cluster\.wait[^;]*;"),
    Bug("flash_2_ragged", "shared memory not zeroed", r"st\.shared\.v4\.u32 [^;]*;", places=(1,)),
    Bug("cluster", "rank of no block", r"(mapa\.shared::cluster\.u32 \w+, \S+), \S+;", r"\1, 2;", (0,)),
    Bug("flash_3", "addition not atomic", _ATOMIC, _NOT_ATOMIC, options=ACROSS),
    Bug("flashinfer", "shared index out of bounds", r"(stmatrix\S+ \[\S+)\]", r"\1+262144]", (0,)),
    Bug("backward", "one bulk group more in flight", r"(cp\.async\.bulk\.wait_group\.read)\s+0;", r"\1 1;", (2,)),
    Bug("backward", "no barrier before the reduction reads", r"bar\.sync\s+%\w+, %\w+;", places=(7,)),
    Bug("backward", "no barrier before wgmma reads", r"bar\.sync\s+%\w+, %\w+;", places=(0,)),
    Bug("scan", "flag without acquire", r"membar\.gl;", options=ACROSS),
    Bug("scan", "flag without release", r"st\.release\.gpu", "st.relaxed.gpu", options=ACROSS),
    Bug("flash_2", "accumulators not zeroed", r"mov\.f32\s+%f\d+, 0f00000000;"),
    Bug("scan", "no __syncwarp", r"bar\.warp\.sync[^;]*;", options={"race_lanes": True}),
    Bug("triton", "no wait for tcgen05.st", r"tcgen05\.wait::st\.sync\.aligned;"),
    Bug("triton", "no barrier after tcgen05.alloc", r"bar\.sync\s+0;", places=(0,)),
    Bug("triton", "no bytes expected", r"@\S+ mbarrier\.arrive\.expect_tx[^;]*;", places=(0,)),
    Bug("triton", "no proxy fence before a bulk store", r"fence\.proxy\.async\S+;"),
    Bug("triton", "no tcgen05.commit", r"@\S+ tcgen05\.commit[^;]*;", places=(0,)),
    Bug("triton", "wrong parity", _WAIT_TRITON, _OTHER_PARITY, (0,)),
    Bug("triton", "no wait for tcgen05.ld", r"tcgen05\.wait::ld\.sync\.aligned;"),
)
"""One bug of each kind that a trial on other kernels planted."""


def recorded(program: run.Program, lengths: tuple[str, ...], part: str, sources: Path, build: Path) -> Path:
    """Run a program once, and return the directory of the launch of the kernel whose name contains a text."""
    path = build / f"recorded_{program.name}_{'_'.join(lengths)}"
    if not path.exists():
        settings = Settings(2, 90, True, {"allow": program.allow}, Recording(path, part), True)
        if run_program([str(program.compile(sources, build)), *lengths], settings):
            shutil.rmtree(path)
            raise SystemExit(f"{program.name} fails without bugs")
    return next(path.glob("launch-*"))


def replayed(path: Path, allow: tuple[str, ...]) -> tuple[str, Launch]:
    """Return the text of a recorded kernel, and what runs another text in its place."""
    replay = Replay(path, allow=allow)
    ptx = (path.parent / json.loads((path / "launch.json").read_text())["ptx"]).read_text()
    start = ptx.index(f".entry {replay.kernel}(")
    end = ptx.find(".visible .entry", start)
    head, body, tail = ptx[:start], ptx[start:end], ptx[end:] if end > 0 else ""

    def launch(text: str, **options: object) -> None:
        module = ptxsim.Module(head + text + tail, allow=allow, memory=replay.module.memory.fresh())
        replay.run(module, **options)
        assert not replay.differences(*TOLERANCE)

    return body, launch


def blackwell() -> tuple[str, Launch]:
    """Return the text of Triton's product for sm_100, and what runs another text in its place."""
    facts = json.loads((TRITON / "matmul_sm100.json").read_text())
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((128, 192)).astype("f2"), rng.standard_normal((192, 128)).astype("f2")

    def launch(text: str, **options: object) -> None:
        described = SimpleNamespace(metadata=SimpleNamespace(_asdict=lambda: facts), asm={"ptx": text})
        out = np.full((128, 128), np.nan, "f2")
        triton.Kernel(described).launch((2, 2), [a, b, out, 192], **options)
        assert np.allclose(out.astype("f4"), a.astype("f4") @ b.astype("f4"), rtol=2e-3, atol=2e-2)

    return (TRITON / "matmul_sm100.ptx").read_text(), launch


def outcome(text: str, launch: Launch, options: dict) -> tuple[str, str]:
    """Run a text in every mode; return what found something, and what it says."""
    wrong = False
    for mode, seed in MODES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ptxsim.StrictWarning)
                launch(text, mode=mode, seed=seed, max_steps=2_000_000, **options)
        except ptxsim.SimError as error:
            return type(error).__name__, str(error)
        except AssertionError:
            wrong = True
    return ("wrong result" if wrong else "NOTHING"), ""


def shortened(report: str) -> str:
    """Return the last file of a report's place, and what it says."""
    head, _, said = report.partition("\n")
    place = re.search(r"[\w.]+:\d+(?=[,)])", head)
    return f"{place[0] if place else ''} {' '.join(said.split())[:110]}".strip()


def kernels(sources: Path, build: Path) -> dict[str, Callable[[], tuple[str, Launch]]]:
    """Return what loads each kernel that bugs are planted in: its text, and what runs another text."""

    def of(source: str, macros: dict[str, int], lengths: str, part: str = "") -> Callable[[], tuple[str, Launch]]:
        program = next(each for each in run.PROGRAMS[source] if macros.items() <= each.macros.items())
        return lambda: replayed(recorded(program, tuple(lengths.split()), part, sources, build), program.allow)

    return {
        "flash_2": of("flash_attention_2", {"HEAD": 64}, "192 192 1"),
        "flash_2_ragged": of("flash_attention_2", {"HEAD": 64}, "100 150 1"),
        "flashinfer": of("flashinfer_prefill", {"HEAD": 64}, "192 192 1"),
        "flash_3": of("flash_attention_3", {"HEAD": 128, "CAUSAL": 1}, "200 300 1"),
        "cluster": of("flash_attention_3", {"HEAD": 128, "HEAD_V": 128, "CLUSTER": 2}, "192 192 1"),
        "backward": of("flash_attention_3_backward", {"CAUSAL": 1, "HEAD": 64}, "200 300 1", "FlashAttnBwdSm90"),
        "scan": of("cub_scan", {}, "5000", "DeviceScanKernel"),
        "triton": blackwell,
    }


def main() -> int:
    """Plant all bugs, or those in the kernels that are named; return 1 if one is found by nothing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernels", nargs="*", help=f"of {', '.join(dict.fromkeys(bug.kernel for bug in BUGS))}")
    parser.add_argument("--sources", type=Path, required=True, help="directory of the projects' checkouts")
    parser.add_argument("--build", type=Path, required=True, help="directory for what nvcc writes")
    options = parser.parse_args()
    run.prepare(options.build)
    found = table(kernels(options.sources, options.build), options.kernels)
    print("\n" + ", ".join(f"{count} {name}" for name, count in found.most_common()))
    return int(found["NOTHING"] > 0)


def table(loaders: dict[str, Callable[[], tuple[str, Launch]]], chosen: Collection[str]) -> Counter[str]:
    """Plant the bugs in some kernels (all where there are none), and print what finds each; return the counts."""
    counts: Counter[str] = Counter()
    load = cache(lambda kernel: loaders[kernel]())
    passed = set[tuple[str, ...]]()
    print("| kernel | bug | found by | report |\n|---|---|---|---|")
    for bug in BUGS:
        if chosen and bug.kernel not in chosen:
            continue
        text, launch = load(bug.kernel)
        key = (bug.kernel, *bug.options)
        if key not in passed:
            control = outcome(text, launch, bug.options)
            assert control[0] == "NOTHING", f"{bug.kernel} without a bug: {control}"
            passed.add(key)
        found, report = outcome(bug.plant(text), launch, bug.options)
        counts[found] += 1
        print(f"| {bug.kernel} | {bug.kind} | {found} | {shortened(report)} |", flush=True)
    return counts


if __name__ == "__main__":
    sys.exit(main())
