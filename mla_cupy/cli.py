"""The command line: `mla-cupy info | compile | list | clear-cache | demo | selftest | bench | sim`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_cupy._version import __version__
from mla_cupy.errors import ArgumentError, KernelCompileError, MlaError, explain
from mla_cupy.parts import part as _part
from mla_cupy.runtime import cache, device, kernels, report, worker
from mla_cupy.runtime.build import BuildRequest

if TYPE_CHECKING:
    from rich.table import Table

    from mla_cupy.launchers.spec import KernelSpec, Variant

_DEFAULT_ARCH = "sm_90a"
_EPILOG = """\
examples:
  mla-cupy info                               what is installed, which GPUs there are, where kernels are kept
  mla-cupy compile --arch sm_90a              compile every kernel for Hopper into the cache; needs no GPU
  mla-cupy compile --arch sm_90a --out DIR    the same into DIR, for MLA_CUPY_CUBIN_DIR in a container image
  mla-cupy demo                               decode a ragged batch and check it
  mla-cupy selftest --arch sm_100a            try every instruction and kernel for Blackwell, there or in the simulator
"""
_SELFTEST_EPILOG = """\
Single instructions first (loads and stores of tensor memory, matrix products, TMA, reductions), then one block of each
kernel of the sparse backward, then the kernels, each compared with NumPy. What needs a probe that failed is skipped. On
a GPU probes run in child processes, so that one that hangs or kills its context is reported, and the next one runs. The
exit status is 0 if nothing went wrong, else 1. Paste the report into an issue, whatever it says.

examples:
  mla-cupy selftest                           on this machine's GPU, or for sm_100a in the simulator
  mla-cupy selftest --arch sm_90a --simulate  Hopper's instructions and kernels, in the simulator
  mla-cupy selftest --probes 'mma/*-rope-*'   some of them
  mla-cupy selftest --list                    their names, and what each tries
"""

Planned = tuple["KernelSpec", "Variant", BuildRequest]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 well, 1 something failed, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["bench"]:
            return int(_part("bench", "bench", "cli").main(arguments[1:]))
        if arguments[:1] == ["sim"]:
            return int(_part("ptxsim", "tests/ptxsim", "__main__").main(arguments[1:]))
        options = _parser(arguments).parse_args(arguments)
        return int(options.run(options))
    except MlaError as error:
        print(f"mla-cupy: {error}", file=sys.stderr)
        return 2 if isinstance(error, ArgumentError) else 1
    except KeyboardInterrupt:
        print("mla-cupy: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"mla-cupy: {error}", file=sys.stderr)
        return 1


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mla-cupy",
        description="Kernels for Multi-head Latent Attention: look at the installation, compile, try, measure.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mla-cupy {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add = functools.partial(_add_command, commands)

    add("info", _info, "versions, NVRTC, GPUs, the cache and the environment variables")
    command = add("compile", _compile, "compile kernels into the cache or a directory; needs no GPU")
    _add_selection(command)
    jobs = min(8, os.cpu_count() or 1)
    command.add_argument("-j", "--jobs", type=_positive, default=jobs, metavar="N", help=f"at a time (default: {jobs})")
    command.add_argument("--out", type=Path, metavar="DIR", help="also write them to DIR, for MLA_CUPY_CUBIN_DIR")
    _add_selection(add("list", _list, "the kernels, their variants, and which of them are built"))
    add("clear-cache", _clear_cache, "delete the compiled kernels of the cache")
    demo = add("demo", _demo, "decode a ragged batch and check it against the oracle", json_too=False)
    if arguments[:1] == ["demo"]:
        _demo_module().add_arguments(demo)
    _add_selftest(add("selftest", _selftest, "try instructions, then kernels, on a GPU or simulated", json_too=False))
    add("sim", _demo, "run PTX in the simulator: see `mla-cupy sim --help`", json_too=False)
    add("bench", _demo, "measure kernels and compare them with others: see `mla-cupy bench --help`", json_too=False)
    return parser


def _add_command(commands: Any, name: str, run: Any, summary: str, *, json_too: bool = True) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + "."
    )
    command.set_defaults(run=run)
    if json_too:
        command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return command


def _add_selection(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--arch",
        type=_names,
        metavar="ARCH[,ARCH...]",
        help=f"targets, such as sm_90a,sm_100a (default: the GPUs of this machine, or {_DEFAULT_ARCH})",
    )
    command.add_argument(
        "--kernels", type=_names, default=("all",), metavar="NAME[,NAME...]", help="kernels by name, or all (default)"
    )


def _add_selftest(command: argparse.ArgumentParser) -> None:
    command.epilog = _SELFTEST_EPILOG
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument(
        "--arch", metavar="ARCH", help="sm_90a, sm_100a or sm_103a (default: this machine's GPU, or sm_100a)"
    )
    command.add_argument("--probes", default="*", metavar="GLOB", help="only probes with such names, as 'mma/*'")
    command.add_argument("--list", action="store_true", help="show the probes, run none")
    command.add_argument("--json", type=Path, metavar="FILE", help="also write the report to FILE, as JSON")
    command.add_argument("--simulate", action="store_true", help="in the simulator even if there is such a GPU")
    command.add_argument("--keep-going", action="store_true", help="run also what needs a probe that has failed")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


# -- info ------------------------------------------------------------------------------------------------------------


def _info(options: argparse.Namespace) -> int:
    facts = report.report()
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    tables = [
        _table("mla_cupy", ("what", "value"), facts["versions"].items()),
        _table("NVRTC", ("what", "value"), facts["nvrtc"].items()),
        _table("GPUs", ("name", "compute capability", "target", "memory", "driver"), map(_gpu_row, facts["gpus"])),
        _table("cache", ("what", "value"), facts["cache"].items()),
        _table(
            "environment variables", ("name", "value", "default", "meaning"), map(dict.values, facts["environment"])
        ),
    ]
    _show(*tables)
    if not facts["gpus"]:
        print("No GPU: NumPy arrays are computed by the NumPy backend; kernels can be compiled.")
    return 0


def _gpu_row(gpu: dict[str, Any]) -> tuple[str, ...]:
    memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
    return gpu["name"], gpu["compute_capability"], gpu["target"], memory, gpu["driver"]


# -- compile, list, clear-cache --------------------------------------------------------------------------------------


def _compile(options: argparse.Namespace) -> int:
    planned = _plan(options)
    outcomes = _build_with_progress([request for _, _, request in planned], options.jobs, quiet=options.json)
    if options.out:
        for outcome in outcomes:
            if outcome.build:
                entry = options.out / outcome.request.name
                cache.write(entry, outcome.build, cache.image_key(outcome.request))
    rows = [_outcome_row(plan, outcome) for plan, outcome in zip(planned, outcomes, strict=True)]
    failed = [outcome for outcome in outcomes if outcome.build is None]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        keys = ("kernel", "variant", "target", "registers", "smem", "spills", "seconds", "state")
        heads = ["regs" if key == "registers" else key for key in keys]
        _show(_table("kernels", heads, ([row[key] for key in keys] for row in rows)))
        if options.out:
            print(f"Written to {options.out}: use them with MLA_CUPY_CUBIN_DIR={options.out.resolve()}")
    for outcome in failed:
        print(f"\nmla-cupy: {outcome.error}", file=sys.stderr)
    return 1 if failed else 0


def _list(options: argparse.Namespace) -> int:
    rows = [
        {
            "kernel": spec.name,
            "variant": str(variant),
            "target": request.arch,
            "source": spec.source,
            "core": variant in spec.core,
            "built": _built(request),
        }
        for spec, variant, request in _plan(options)
    ]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    cells = (
        [("yes" if value else "no") if isinstance(value, bool) else value for value in row.values()] for row in rows
    )
    _show(_table("kernels", ("kernel", "variant", "target", "source", "on import", "built"), cells))
    return 0


def _clear_cache(options: argparse.Namespace) -> int:
    count, size = cache.clear()
    if options.json:
        print(json.dumps({"kernels": count, "bytes": size}))
    else:
        print(f"Deleted {count} kernels, {size / 2**20:.1f} MiB, from {cache.cache_dir() or 'no directory'}.")
    return 0


def _plan(options: argparse.Namespace) -> list[Planned]:
    """Every kernel, variant and target that the options ask for."""
    from mla_cupy.launchers import SPECS

    archs = options.arch or tuple(device.nvml_archs()) or (_DEFAULT_ARCH,)
    named = options.kernels != ("all",)
    if unknown := [name for name in options.kernels if named and name not in SPECS]:
        raise ArgumentError(explain("--kernels", ", ".join(unknown), "all, or some of " + ", ".join(SPECS)))
    planned = [
        (spec, variant, spec.request(variant, arch))
        for arch in archs
        for spec in SPECS.values()
        if (not named or spec.name in options.kernels) and spec.supports_arch(arch)
        for variant in spec.variants
    ]
    if not planned:
        raise ArgumentError(explain("--arch", ", ".join(archs), "a target that one of the kernels supports"))
    return planned


def _build_with_progress(requests: list[BuildRequest], jobs: int, *, quiet: bool) -> list[kernels.Outcome]:
    with _progress("compiling", len(requests), quiet=quiet) as advance:
        return kernels.build_all(requests, jobs, lambda request, outcome: advance(request.name, outcome is not None))


@contextlib.contextmanager
def _progress(what: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[str, bool], None]]:
    """A bar on standard error; the function says what is at work, and whether it is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda name, done: progress.update(bar, description=name, advance=1 if done else 0)


def _outcome_row(plan: Planned, outcome: kernels.Outcome) -> dict[str, Any]:
    spec, variant, request = plan
    row: dict[str, Any] = {"kernel": spec.name, "variant": str(variant), "target": request.arch}
    if outcome.build is None:
        return {**row, **dict.fromkeys(("registers", "smem", "spills", "stack", "seconds"), "-"), "state": "failed"}
    record = outcome.build.record
    return {
        **row,
        "registers": record["registers"],
        "smem": record["static_smem"] + record["facts"].get("smem_bytes", 0),
        "spills": record["spill_stores"] + record["spill_loads"],
        "stack": record["stack"],
        "seconds": record["seconds"],
        "state": "cached" if outcome.was_cached else "compiled",
    }


def _built(request: BuildRequest) -> bool | str:
    try:
        return worker.cached(request) is not None
    except KernelCompileError:
        return "unknown: no NVRTC"


# -- demo, bench -----------------------------------------------------------------------------------------------------


def _demo(options: argparse.Namespace) -> int:
    return int(_demo_module().run(options))


def _demo_module() -> Any:
    return importlib.import_module("mla_cupy.demo")


# -- selftest --------------------------------------------------------------------------------------------------------


def _selftest(options: argparse.Namespace) -> int:
    from mla_cupy.selftest import catalog, place, runner, summary

    arch = options.arch or place.default_arch()
    probes = catalog.probes(arch, options.probes)
    if options.list:
        _show(_table(f"probes for {arch}", ("name", "tries"), ((probe.name, probe.about) for probe in probes)))
        return 0
    here = place.find(arch, options.simulate)
    if here.simulated:
        print(f"Not on a GPU but in the simulator: {here.reason}.", file=sys.stderr)
    requests = list(dict.fromkeys(request for probe in probes for request in probe.requests(arch)))
    _build_with_progress(requests, os.cpu_count() or 1, quiet=False)  # what does not compile says so when it runs
    with _progress("running", len(probes)) as advance:
        results = runner.run(probes, here, options.keep_going, lambda name, result: advance(name, result is not None))
    known = summary.facts(here, options.keep_going)
    if options.json:
        options.json.write_text(json.dumps(summary.as_json(known, probes, results), indent=1) + "\n")
    heads = ("stage", "passed", "failed", "skipped", "n/a", "seconds")
    _show(_table(f"self-test for {arch}", heads, summary.stages(results)))
    print(f"\nThe report, for an issue:\n\n```\n{summary.text(known, probes, results)}\n```")
    return 0 if summary.succeeded(results) else 1


# -- tables ----------------------------------------------------------------------------------------------------------


def _table(title: str, heads: Sequence[str], rows: Iterable[Iterable[object]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for index, head in enumerate(heads):
        table.add_column(head, overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    return table


def _show(*tables: Table) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width: do not fold for one
        console = Console(width=160)
    for index, table in enumerate(tables):
        console.print(*([""] if index else []), table)
