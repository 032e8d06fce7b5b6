"""``ptxsim run-host`` and ``ptxsim replay``: host programs on the simulator, and their launches again."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SimError, StrictWarning
from ..module import Module
from ..rules import RULES
from ..state.report import Report
from ..tool.mutate import mutate, tally
from ..tool.options import HelpFormatter, at_least
from .builder import stub_directory
from .record import Recording, Replay
from .session import Session, Settings

_MODES = (("early", 0), ("late", 0), ("random", 1), ("random", 2))


def run_program(command: Sequence[str], settings: Settings | None = None) -> int:
    """Run a host program whose CUDA calls go to the simulator.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments. It links the CUDA runtime dynamically or uses the driver interface, and carries
        PTX (or loads it).
    settings : Settings, optional
        The device that it sees, and how its kernels are run.

    Returns
    -------
    int
        The program's exit status; 98 if that is 0 and a kernel broke a rule, or a call is not modelled.

    Raises
    ------
    SimError
        The stub libraries cannot be built, or there is no such program.
    """
    libraries = str(stub_directory())
    program = shutil.which(command[0]) if command else None
    if program is None:
        raise SimError(f"{command[0]} is no program" if command else "no program is given")
    paths = [libraries, os.environ.get("LD_LIBRARY_PATH")]
    with tempfile.TemporaryDirectory(prefix="ptxsim-") as work, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{work}/socket")
        listener.listen()
        environment = {
            **os.environ,
            "PTXSIM_SOCKET": f"{work}/socket",
            "LD_LIBRARY_PATH": ":".join(filter(None, paths)),
        }
        sys.stdout.flush()
        child = subprocess.Popen([program, *command[1:]], env=environment)
        failures = _serve(listener, child, settings or Settings())
    if child.returncode < 0:
        print(f"ptxsim: the program was ended by {signal.Signals(-child.returncode).name}", file=sys.stderr)
        return 128 - child.returncode
    return child.returncode or (98 if failures else 0)


def _serve(listener: socket.socket, child: subprocess.Popen, settings: Settings) -> int:
    """Answer the program's processes, one after another, until it ends; return how many failed."""
    ended = threading.Event()

    def watch() -> None:
        child.wait()
        ended.set()
        with socket.socket(socket.AF_UNIX) as wake, contextlib.suppress(OSError):
            wake.connect(listener.getsockname())

    threading.Thread(target=watch, daemon=True).start()
    failures = 0
    while True:
        connection, _ = listener.accept()
        with connection:
            if ended.is_set():
                return failures
            failures += _converse(connection, listener, settings)


def _converse(connection: socket.socket, listener: socket.socket, settings: Settings) -> bool:
    """Answer one process until it closes the connection; tell whether something failed."""
    session = Session(settings)
    with connection.makefile("rwb", buffering=1 << 16) as stream, contextlib.suppress(ConnectionError):
        while head := _next(stream, connection, listener, session):
            op, _, size = struct.unpack("<IIQ", head)
            code, result = session.answer(op, stream.read(size))
            stream.write(struct.pack("<IIQ", code, 0, len(result)) + result)
            stream.flush()
    session.tell(session.summary())
    return session.failed


def _next(stream: Any, connection: socket.socket, listener: socket.socket, session: Session) -> bytes:
    """Return the head of the next request, empty at the end; turn other processes away meanwhile."""
    while connection not in select.select([connection, listener], [], [])[0]:
        other, _ = listener.accept()
        other.close()
        session.tell("a second process that uses CUDA at the same time is not modelled")
        session.failed = True
    return stream.read(16)


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Add ``run-host`` and ``replay`` to the command line."""
    host = commands.add_parser(
        "run-host",
        help="run an unmodified host program with its kernels simulated",
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    mode_help = "when asynchronous work completes (default early)"
    host.add_argument("--mode", choices=("early", "late", "random"), default="early", help=mode_help)
    host.add_argument("--sms", type=at_least(1), default=132, help="multiprocessors that the program is told of")
    host.add_argument("--device", choices=("sm_90a", "sm_100a"), help="default: the newest that it carries PTX for")
    host.add_argument("--record", type=Path, metavar="DIR", help="record all launches, for ptxsim replay")
    host.add_argument("--kernel", default="", metavar="TEXT", help="record only kernels whose name contains this")
    host.add_argument("--seed", type=at_least(0), default=0, help="seed of every random choice (default 0)")
    host.add_argument("--no-check", action="store_true", help="no race detection")
    host.add_argument("--keep-going", action="store_true", help="report all distinct races of a launch")
    host.add_argument("--quiet", action="store_true", help="no line per launch")
    host.add_argument("program", nargs=argparse.REMAINDER, help="the program and its arguments")
    replay = commands.add_parser(
        "replay",
        help="run recorded launches again in every mode, or with bugs planted",
        formatter_class=HelpFormatter,
    )
    replay.add_argument("launches", type=Path, nargs="+", help="directories that run-host --record has written")
    replay.add_argument("--mutate", action="store_true", help="plant bugs, and say which go unnoticed")
    replay.add_argument(
        "--close", type=_tolerance, default="u1:0:0", metavar="DTYPE:RTOL:ATOL", help="how results are compared"
    )
    for each in (host, replay):
        each.add_argument(
            "--resident", type=at_least(1), help="clusters that run interleaved (default 1; cooperative: all)"
        )
        each.add_argument("--race-global", action="store_true", help="look for races in global memory too")
        each.add_argument("--race-lanes", action="store_true", help="look for races between lanes of a warp too")
        each.add_argument("--tma-outside", action="store_true", help="report TMA boxes wholly outside their tensor")
        each.add_argument(
            "--max-steps", type=at_least(1), default=50_000_000, help="basic blocks after which a launch hangs"
        )
        each.add_argument("--lenient", action="store_true", help="warn where production kernels bend the rules")
        each.add_argument(
            "--allow", action="append", default=[], metavar="RULE", choices=sorted(RULES), help="warn here"
        )


def _tolerance(text: str) -> tuple[str, float, float]:
    """Parse a comparison of results: a dtype, a relative and an absolute tolerance."""
    try:
        dtype, rtol, atol = text.split(":")
        np.dtype(dtype)
        return dtype, float(rtol), float(atol)
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a dtype and two tolerances, as f4:1e-3:0") from None


def _options(options: argparse.Namespace) -> dict:
    """Return the options that both commands pass to every launch."""
    names = ("race_global", "race_lanes", "tma_outside", "max_steps")
    given = {name: getattr(options, name) for name in names}
    return {**given, **({"resident": options.resident} if options.resident else {})}


def run_host(options: argparse.Namespace) -> int:
    """Run a host program."""
    recording = Recording(options.record, options.kernel) if options.record else None
    more = {"mode": options.mode, "seed": options.seed, "check": not options.no_check, "keep_going": options.keep_going}
    launch = {**_options(options), **more, "allow": options.allow}
    arch = {None: 0, "sm_90a": 90, "sm_100a": 100}[options.device]
    settings = Settings(options.sms, arch, not options.lenient, launch, recording, options.quiet)
    return run_program(options.program, settings)


def replay_launches(options: argparse.Namespace) -> int:
    """Run recorded launches; return 1 if one is not as recorded (surviving bugs are no error)."""
    status = 0
    for path in options.launches:
        found = [path] if (path / "launch.json").exists() else sorted(path.glob("launch-*"))
        if not found:
            raise SimError(f"{path} holds no launch that run-host --record has written")
        for each in found:
            replay = Replay(each, not options.lenient, tuple(options.allow))
            print(f"{each}: {replay.kernel}")
            try:
                status |= (_mutants if options.mutate else _modes)(replay, options)
            except AssertionError as error:
                print(f"  not as recorded: {error}")
                status = 1
    return status


def _modes(replay: Replay, options: argparse.Namespace) -> int:
    """Run a launch in every mode and print each mode's findings."""
    status = 0
    for mode, seed in _MODES:
        try:
            rules = _rules(_run(replay, options, replay.module, mode, seed))
            said = "right" + "".join(f", {rule}" for rule in sorted({rule for rule, _ in rules}))
        except (SimError, AssertionError) as error:
            said, status = f"{type(error).__name__}: {error}", 1
        print(f"  {mode} {seed}: {said}", flush=True)
    return status


def _run(replay: Replay, options: argparse.Namespace, module: Module, mode: str, seed: int, **more: Any) -> Report:
    """Run once and return the report. Raises AssertionError for a result that is not as recorded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StrictWarning)
        report = replay.run(module, mode=mode, seed=seed, **{**_options(options), **more})
    wrong = replay.differences(*options.close)
    if wrong:
        raise AssertionError(", ".join(f"{count} wrong elements at {at:#x}" for at, count in wrong.items()))
    replay.steps = report.steps
    return report


def _rules(report: Report) -> set[tuple[str, int]]:
    """Return the broken rules, with their places."""
    return {(each.rule, each.at.line) for each in report.findings}


def _mutants(replay: Replay, options: argparse.Namespace) -> int:
    """Plant bugs in a launch and print which the modes early and late notice."""
    known: set = set()
    limit = options.max_steps

    def test(module: Module, mode: str) -> Report:
        nonlocal limit
        report = _run(replay, options, module, mode, 0, max_steps=limit)
        rules = _rules(report)
        if module is replay.module:
            known.update(rules)
            limit = min(limit, 20 * replay.steps + 100_000)
        if not rules <= known:
            raise AssertionError("a rule is broken where it was not before")
        return report

    outcomes = []
    for outcome in mutate(replay.module, replay.kernel, [partial(test, mode=mode) for mode in ("early", "late")]):
        outcomes.append(outcome)
        print(f"  {outcome}", flush=True)
    print(f"  {tally(outcomes)}")
    return 0
