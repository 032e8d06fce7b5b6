"""Command line: ``ptxsim run|check FILE ...``, also ``python -m ptxsim`` and ``mla-cupy sim``."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._version import __version__
from .errors import SimError
from .host.command import add_commands, replay_launches, run_host
from .module import Module
from .rules import RULES
from .state.report import Report
from .state.watch import Watch
from .tool.arguments import HELP, build_arguments
from .tool.cuda_file import compile_cuda
from .tool.mutate import mutate, tally
from .tool.options import HelpFormatter, Parser, at_least, check_writable, dims, fitted, rules_help, written
from .tool.progress import ProgressLine
from .tool.survey import survey
from .tool.timeline import Timeline, drawing

_OUTPUTS = ("json", "trace", "html", "png", "save")
"""Options that name a file to write."""


def load_module(options: argparse.Namespace, strict: bool) -> Module:
    """Load PTX, or compile CUDA."""
    if options.file.suffix == ".ptx":
        return Module(options.file.read_text(), strict=strict)
    return Module(compile_cuda(options.file, options.arch, options.include, options.define), strict=strict)


def parser(name: str) -> argparse.ArgumentParser:
    """Return the command-line parser of a command with this name."""
    main = Parser(prog=name, description="Run compiled CUDA kernels without a GPU.", formatter_class=HelpFormatter)
    main.add_argument("--version", action="version", version=f"ptxsim {__version__}", help="print the version")
    commands = main.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check", help="list kernels, and instructions that are not modelled", formatter_class=HelpFormatter
    )
    texts: dict[str, Any] = {"epilog": f"{HELP}\n{rules_help()}", "formatter_class": HelpFormatter, "intermixed": True}
    run = commands.add_parser("run", help="run a kernel", **texts)
    mutant = commands.add_parser("mutate", help="plant bugs in a kernel and say which survive", **texts)
    modes = ("early", "late", "random")
    mode_help = "when asynchronous work completes: early as it is issued (default), late when it must, or at random"
    run.add_argument("--mode", choices=modes, default="early", help=mode_help)
    mutant.add_argument("--mode", choices=modes, help="one mode (default: early and late)")
    for each in (check, run, mutant):
        each.add_argument("file", type=Path, help="a .ptx file, or a .cu file (compiled with NVRTC)")
        each.add_argument("--arch", default="sm_90a", help="architecture for .cu files")
        each.add_argument("-I", "--include", type=Path, action="append", default=[], help="header directory (.cu)")
        each.add_argument("-D", "--define", action="append", default=[], help="macro for .cu files, as NAME=VALUE")
    for each in (run, mutant):
        _add_launch(each)
    add_commands(commands)
    run.add_argument("--no-check", action="store_true", help="no race detection")
    run.add_argument("--keep-going", action="store_true", help="report all distinct races, not only the first")
    run.add_argument("--watch", type=at_least(0), metavar="BYTE", help="list accesses to a word of shared memory")
    run.add_argument("--coverage", action="store_true", help="list the instructions that were never executed")
    run.add_argument("--banks", action="store_true", help="count shared-memory bank conflicts")
    run.add_argument("--trace", type=Path, help="write a Chrome trace")
    run.add_argument("--html", type=Path, metavar="FILE", help="write the timeline as an HTML page")
    run.add_argument("--png", type=Path, help="draw the timeline")
    run.add_argument("--json", type=Path, metavar="FILE", help="write statistics and findings as JSON")
    run.add_argument("--save", type=Path, help="write all arrays to an .npz file")
    return main


def _add_launch(command: argparse.ArgumentParser) -> None:
    """Add the options that every launch needs."""
    command.add_argument("args", nargs="*", help="arguments of the kernel")
    command.add_argument("--kernel", help="entry function (default: the only one)")
    command.add_argument("--grid", type=dims, default=(1,), help="blocks, as 8 or 4x2 (default 1)")
    command.add_argument("--block", type=dims, default=(32,), help="threads of a block (default 32)")
    command.add_argument("--cluster", type=dims, help="default: what the kernel declares, else one block")
    command.add_argument("--smem", type=at_least(0), default=0, help="dynamic shared memory in bytes")
    command.add_argument("--seed", type=at_least(0), default=0, help="seed of every random choice (default 0)")
    command.add_argument("--elect", choices=("lowest", "random"), default="lowest", help="which lane elect.sync elects")
    command.add_argument("--resident", type=at_least(1), default=1, help="clusters that run interleaved")
    command.add_argument(
        "--jobs", type=at_least(1), default=1, metavar="N", help="processes that share the clusters out"
    )
    command.add_argument(
        "--max-steps", type=at_least(1), default=50_000_000, help="basic blocks after which a launch is a hang"
    )
    command.add_argument("--race-global", action="store_true", help="look for races in global memory too")
    command.add_argument("--race-lanes", action="store_true", help="look for races between lanes of a warp too")
    command.add_argument("--tma-outside", action="store_true", help="report TMA boxes wholly outside their tensor")
    command.add_argument("--lenient", action="store_true", help="warn where production kernels bend the rules")
    allow_help = "warn where this rule of those below is broken; repeatable"
    command.add_argument("--allow", action="append", default=[], metavar="RULE", choices=sorted(RULES), help=allow_help)


def first_kernel(module: Module) -> str:
    """Return the default kernel if none is named."""
    if not module.kernels:
        raise SimError("the file has no kernel")
    return module.kernels[0]


def check_file(options: argparse.Namespace) -> int:
    """List kernels, and the unknown forms that they need."""
    module = load_module(options, False)
    status = 0
    for name in module.kernels:
        try:
            count, unknown = survey(module.ir, module.ir.functions[name])
        except SimError as error:
            status = 1
            print(f"{name}: {error}")
            continue
        print(f"{name}: {count} instructions, {f'{len(unknown)} forms not modelled' if unknown else 'all modelled'}")
        for each in unknown:
            print(f"  {each.count} x {each.form}, first in line {each.line}: {each.why}")
        status = 1 if unknown else status
    return status


def mutate_file(options: argparse.Namespace) -> int:
    """Plant bugs in a kernel one at a time and print which survive; their number is not an error."""
    plain = load_module(options, not options.lenient)
    name = options.kernel or first_kernel(plain)
    steps, expected, known = options.max_steps, None, set()

    def test(module: Module, mode: str) -> Report:
        nonlocal steps, expected
        args, arrays = build_arguments(module, options.args, options.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = launch(options, module, name, args, mode=mode, max_steps=steps)
        rules = {(each.rule, each.at.line) for each in report.findings}
        if expected is None:  # the kernel without bugs, which comes first
            expected, steps = [array.copy() for array in arrays], min(steps, 20 * report.steps + 100_000)
        if module is plain:
            known.update(rules)
        if not rules <= known or not all(map(close, arrays, expected)):
            raise AssertionError
        return report

    modes = (options.mode,) if options.mode else ("early", "late")
    outcomes = []
    for outcome in mutate(plain, name, [functools.partial(test, mode=mode) for mode in modes]):
        outcomes.append(outcome)
        print(outcome, flush=True)
    print(tally(outcomes))
    return 0


def close(got: np.ndarray, want: np.ndarray) -> bool:
    """Tell whether two results agree: integers exactly, floats to 1e-3."""
    if got.dtype.kind in "iu":
        return bool(np.array_equal(got, want))
    got, want = (each.astype("f8") for each in (got, want))
    return bool(np.allclose(got, want, rtol=1e-3, atol=1e-3, equal_nan=True))


def launch(options: argparse.Namespace, module: Module, name: str, args: list, **more: Any) -> Report:
    """Launch a kernel as the command line asks."""
    shape = (options.grid, options.block, args, options.smem, options.cluster)
    common = ("seed", "resident", "race_global", "race_lanes", "tma_outside", "elect", "allow", "jobs")
    given = {key: getattr(options, key) for key in common}
    line = ProgressLine(sys.stderr) if sys.stderr.isatty() else None
    try:
        return module.launch(
            name, *shape, **{"mode": options.mode, "max_steps": options.max_steps, "progress": line, **given, **more}
        )
    finally:
        if line:
            line.clear()


def run_file(options: argparse.Namespace) -> int:
    """Run one kernel and print its report."""
    for output in _OUTPUTS:
        check_writable(f"--{output}", getattr(options, output))
    if options.png:
        drawing()
    if options.watch is not None and options.no_check:
        raise SimError("--watch needs the race detection that --no-check turns off")
    module = load_module(options, not options.lenient)
    name = options.kernel or first_kernel(module)
    args, arrays = build_arguments(module, options.args, options.seed)
    timeline = Timeline() if options.trace or options.html or options.png else None
    watch = None if options.watch is None else Watch(options.watch)
    more = {"banks": options.banks, "timeline": timeline, "keep_going": options.keep_going, "watch": watch}
    report = launch(options, module, name, args, check=not options.no_check, **more)
    print(fitted(str(report), sys.stdout))
    if options.coverage:
        print(f"never executed: {len(report.missed)} instructions")
        print("".join(f"  {place}\n" for place in report.missed), end="")
    for access in watch.accesses if watch else ():
        print(f"watched: {access}")
    plain = [a if a.dtype.kind != "V" else a.astype("f4") for a in arrays]
    writers = {
        "json": lambda path: path.write_text(json.dumps(report.as_dict(), indent=1) + "\n"),
        "trace": lambda path: timeline.save(path),
        "html": lambda path: timeline.save_page(path, name),
        "png": lambda path: timeline.draw(path),
        "save": lambda path: np.savez(path, *plain),
    }
    for output in _OUTPUTS:
        if path := getattr(options, output):
            written(f"--{output}", path, functools.partial(writers[output], path))
    return 1 if report.errors else 0


_PIPE_CLOSED = 128 + 13
"""Exit status of a program that SIGPIPE has ended."""

_COMMANDS = {
    "check": check_file,
    "run": run_file,
    "mutate": mutate_file,
    "run-host": run_host,
    "replay": replay_launches,
}


def main(argv: Sequence[str] | None = None, name: str = "ptxsim") -> int:
    """Run the command line; return the exit status."""
    options = parser(name).parse_args(argv)
    try:
        status = _COMMANDS[options.command](options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as `| head` leaves it; the interpreter must not flush it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except UnicodeDecodeError as error:
        print(f"error: {getattr(options, 'file', 'a file')} is no text: {error}", file=sys.stderr)
        return 1
    except (OSError, MemoryError) as error:
        print(f"error: {_reason(error)}", file=sys.stderr)
        return 1
    except SimError as error:
        print(fitted(f"error: {error}", sys.stderr), file=sys.stderr)
        if path := getattr(options, "json", None):
            text = json.dumps({"findings": [each.as_dict() for each in error.findings]}, indent=1) + "\n"
            with contextlib.suppress(SimError):  # that the file cannot be written is the error, or the lesser one
                written("--json", path, lambda: path.write_text(text))
        return 1


def _reason(error: Any) -> str:
    """Reason of a failure, beginning with the file."""
    if isinstance(error, MemoryError):
        return f"the memory of this machine does not suffice: {error}" if str(error) else "out of memory"
    return f"{error.filename}: {error.strerror}" if getattr(error, "filename", None) else str(error)


if __name__ == "__main__":
    raise SystemExit(main())
