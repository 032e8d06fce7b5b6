"""The plugins against the real engines: `python -m tests.engines --help` lists the commands."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mla_cupy.terminal import Help, show, table
from tests.engines import packages, records
from tests.engines.compare import compare
from tests.engines.versions import DATE, VERSIONS, pinned

_EPILOG = f"""\
The packages come from pip, one after the other (vLLM's wheels have some 450 MB); only their Python files are kept,
in {packages.folder()}
or in MLA_CUPY_ENGINES. Nothing of them is committed.

examples:
  python -m tests.engines fetch                    the oldest, the one for PyTorch 2.11 and the newest of both engines
  python -m tests.engines compare                  hold the plugins against every version that is there
  python -m tests.engines fetch --versions all && python -m tests.engines record
                                                   after a release, with its number in tests/engines/versions.py
  python -m tests.engines cpu --versions 0.26.0    generate through the real vLLM on this machine's CPU
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.engines", epilog=_EPILOG, formatter_class=Help)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    said = {
        "fetch": (_fetch, "download versions of the engines and keep their Python files"),
        "compare": (_compare, "hold the plugins against the source of fetched versions"),
        "record": (_record, "write down the interfaces of all versions, for the ordinary tests"),
        "cpu": (_cpu, "run the real vLLM on the CPU with the NumPy kernels, beside the definition of decode"),
    }
    _add_parcel(commands)
    for name, (run, summary) in said.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        command.set_defaults(run=run)
        if name != "cpu":
            command.add_argument("--engine", choices=VERSIONS, action="append", help="default: both")
        if name != "record":
            command.add_argument("--versions", nargs="+", metavar="VERSION", help=_defaults(name))
        if name == "cpu":
            _add_cases(command)
    return parser


def _add_parcel(commands: Any) -> None:
    command = commands.add_parser(
        "parcel", help="build a parcel of an engine for a machine with an H200 and no network"
    )
    command.set_defaults(run=_parcel)
    command.add_argument("out", type=Path, help="folder to make: part1, part2, ...")
    command.add_argument("--work", type=Path, default=packages.folder() / "parcel", help="wheels and unpacked files")
    command.add_argument("--engine", choices=VERSIONS, default="vllm", help="default: vllm")
    command.add_argument("--whole", action="store_true", help="the extensions with the code for other GPUs, too")
    command.add_argument("--mixture", action="store_true", help="also what models with experts need")


def _parcel(options: argparse.Namespace) -> int:
    from tests.engines.gpu import parcel

    if options.engine == "sglang":
        parcel.build_sglang(options.work, options.out)
        return 0
    parcel.build(options.work, options.out, whole=options.whole, mixture=options.mixture)
    return 0


def _defaults(name: str) -> str:
    fetched = "those that have been fetched"
    return "all, or some; default: " + (fetched if name == "compare" else "oldest, for PyTorch 2.11, newest")


def _add_cases(command: argparse.ArgumentParser) -> None:
    from tests.engines.cpu.cases import CASES

    command.add_argument("--cases", nargs="+", choices=CASES, default=["plain"], help="default: plain")
    command.add_argument("--out", type=Path, default=packages.folder() / "out", help="folder of results and logs")
    command.add_argument("--timeout", type=int, default=600, metavar="SECONDS", help="of each run (default: 600)")


def _chosen(options: argparse.Namespace, engine: str, default: Sequence[str]) -> list[str]:
    given = options.versions or default
    return list(VERSIONS[engine]) if "all" in given else [x for x in given if x in VERSIONS[engine]]


def _fetch(options: argparse.Namespace) -> int:
    for engine in options.engine or VERSIONS:
        for version in _chosen(options, engine, pinned(engine)):
            print(packages.fetch(engine, version), flush=True)
    return 0


def _compare(options: argparse.Namespace) -> int:
    rows, problems = [], 0
    for engine in options.engine or VERSIONS:
        for version in _chosen(options, engine, packages.there(engine)):
            found = compare(engine, packages.package(engine, version))
            problems += len(found)
            rows += [(engine, version, problem) for problem in found or ["fits"]]
    show(table(f"the plugins against the engines' sources (versions of {DATE})", ("engine", "version", "found"), rows))
    if not rows:
        print("No version has been fetched: python -m tests.engines fetch")
    return 1 if problems or not rows else 0


def _record(options: argparse.Namespace) -> int:
    for engine in options.engine or VERSIONS:
        missing = [x for x in VERSIONS[engine] if x not in packages.there(engine)]
        if missing:
            print(f"{engine}: {', '.join(missing)} not fetched: python -m tests.engines fetch --versions all")
            return 1
        print(records.write(engine))
    return 0


def _cpu(options: argparse.Namespace) -> int:
    from tests.engines.cpu.cases import run

    failed = 0
    for version in _chosen(options, "vllm", pinned("vllm")):
        for case in options.cases:
            told = run(version, case, options.out, options.timeout)
            failed += not told["passed"]
            print(f"vllm {version} {case}: {json.dumps(told)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
