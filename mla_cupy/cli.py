"""The command line: `mla-cupy info | compile | export | list | formats | clear-cache | demo | selftest | ...`.

`bench`, `trace`, `which` and `sim` are commands of other parts of the package.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_cupy._version import __version__
from mla_cupy.cache_formats import FORMATS, describe
from mla_cupy.compiling import compile_all, outcome_row
from mla_cupy.errors import ArgumentError, KernelCompileError, MlaError, explain
from mla_cupy.parts import part as _part
from mla_cupy.runtime import admission, cache, device, loader, nvrtc, report, worker
from mla_cupy.runtime.build import BuildRequest
from mla_cupy.selftest import command as selftest
from mla_cupy.terminal import Help, path, say, show, table

if TYPE_CHECKING:
    from mla_cupy.kernels.spec import KernelSpec, Variant

_DEFAULT_ARCH = "sm_90a"
_EPILOG = """\
examples:
  mla-cupy info                               what is installed, which GPUs there are, where kernels are kept
  mla-cupy info --check                       whether all of it works, and what to do where it does not
  mla-cupy compile --arch sm_90a              compile what Hopper runs into the cache; needs no GPU
  mla-cupy compile --arch sm_90a --out DIR    the same into DIR, for MLA_CUPY_CUBIN_DIR in a container image
  mla-cupy export --op decode --h-q 16 --page-size 64 --arch sm_90a --out DIR
                                              kernels and what launches them as C sources, for programs without Python
  mla-cupy demo                               run some kernels and check them; simulated without a GPU
  mla-cupy which decode b128-sq1-hq128-skv4096
                                              the kernel that a call gets on this GPU or another, and why
  mla-cupy selftest --arch sm_100a            try every instruction and kernel for Blackwell, there or in the simulator
"""
Planned = tuple["KernelSpec[Any]", "Variant", BuildRequest]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 well, 1 something failed, 2 wrong usage."""
    with _ended_by_sigterm():
        return _main(list(sys.argv[1:] if argv is None else argv))


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the command as an exception does, so that it ends its compilers first."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not in the main thread: leave signals alone
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _main(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may contain characters that its encoding lacks
    try:
        if arguments[:1] == ["bench"]:
            return int(_part("bench", "cli").main(arguments[1:]))
        if arguments[:1] in (["trace"], ["which"]):
            return int(_part("bench", "cli").main(arguments))
        if arguments[:1] == ["sim"]:
            return int(_part("ptxsim", "__main__").main(arguments[1:], "mla-cupy sim"))
        options, unknown = _parser(arguments).parse_known_args(arguments)
        if unknown:  # said by the command, with its own usage
            options.command.error(f"unrecognized arguments: {' '.join(unknown)}")
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
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"mla-cupy {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add = functools.partial(_add_command, commands)

    info = add("info", _info, "show versions, NVRTC, GPUs, the cache and the environment variables")
    info.add_argument("--check", action="store_true", help="check each of them and a small kernel: say what to do")
    command = add("compile", _compile, "compile kernels into the cache or a directory; needs no GPU")
    _add_selection(command)
    _add_jobs(command)
    command.add_argument("--out", type=path, metavar="DIR", help="also write them to DIR, for MLA_CUPY_CUBIN_DIR")
    command = add("export", _export, "write an operation as C sources, kernels included; needs no GPU")
    if arguments[:1] == ["export"]:
        _export_module().add_arguments(command)
    _add_archs(command)
    _add_jobs(command)
    _add_selection(add("list", _list, "list the kernels, their variants, and which of them are built"))
    add("formats", _formats, "describe the formats of paged caches, byte by byte")
    add("clear-cache", _clear_cache, "delete the compiled kernels of the cache")
    demo = add("demo", _demo, "run kernels on the GPU, or simulated without one, and check them")
    if arguments[:1] == ["demo"]:
        _demo_module().add_arguments(demo)
    selftest.add_arguments(
        add("selftest", selftest.run, "try instructions, then kernels, on a GPU or simulated", json_too=False)
    )
    engines = add("engines", _engines, "check whether the plugins support the installed vLLM and SGLang")
    if arguments[:1] == ["engines"]:
        _engines_module().add_arguments(engines)
    transformers = add("transformers", _transformers, "show which calls of a transformers model the kernels support")
    if arguments[:1] == ["transformers"]:
        _transformers_module().add_arguments(transformers)
    add("sim", _demo, "run PTX in the simulator: see `mla-cupy sim --help`", json_too=False)
    add("bench", _demo, "measure kernels and compare them with others: see `mla-cupy bench --help`", json_too=False)
    add("which", _demo, "tell which kernel a call gets, and why: see `mla-cupy which --help`", json_too=False)
    add("trace", _demo, "show what each warp of a kernel waits for: see `mla-cupy trace --help`", json_too=False)
    return parser


def _add_command(commands: Any, name: str, run: Any, summary: str, *, json_too: bool = True) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + "."
    )
    command.set_defaults(run=run, command=command)
    if json_too:
        command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return command


def _add_jobs(command: argparse.ArgumentParser) -> None:
    jobs = min(8, os.cpu_count() or 1)
    command.add_argument("-j", "--jobs", type=_positive, default=jobs, metavar="N", help=f"jobs (default: {jobs})")


def _add_archs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--arch",
        type=_names,
        metavar="ARCH[,ARCH...]",
        help=f"targets, such as sm_90a,sm_100a (default: the GPUs of this machine, or {_DEFAULT_ARCH})",
    )


def _add_selection(command: argparse.ArgumentParser) -> None:
    _add_archs(command)
    command.add_argument(
        "--kernels",
        type=_names,
        default=("all",),
        metavar="NAME[,NAME...]",
        help="kernels by name; or all (default): what GPUs of the targets run where no kernel is named",
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    return int(text)


# -- info ------------------------------------------------------------------------------------------------------------


def _info(options: argparse.Namespace) -> int:
    if options.check:
        return _check(options)
    facts = report.report()
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    show(
        table("mla_cupy", ("what", "value"), facts["versions"].items()),
        table("NVRTC", ("what", "value"), facts["nvrtc"].items()),
        table("GPUs", ("name", "compute capability", "target", "memory", "driver"), map(_gpu_row, facts["gpus"])),
        table("cache", ("what", "value"), facts["cache"].items()),
        *_admitted_tables(facts["admitted"]),
        table("environment variables", ("name", "value", "default", "meaning"), map(dict.values, facts["environment"])),
    )
    if not facts["gpus"]:
        compiler = (
            "no kernel can be compiled: see NVRTC above" if "error" in facts["nvrtc"] else "kernels can be compiled"
        )
        say(f"No GPU: NumPy arrays are computed by the NumPy backend; {compiler}.")
    for line in _waiting(facts):
        say(line)
    for problem in facts["problems"]:
        say(f"Problem: {problem}")
    return 0


def _check(options: argparse.Namespace) -> int:
    """`info --check`: 1 if anything is wrong."""
    from mla_cupy import checkup

    found = list(checkup.checks())
    if options.json:
        facts = {**report.report(), "checks": [check.as_dict() for check in found]}
        print(json.dumps(facts, indent=1))
    else:
        show(table("checks", ("part", "state", "found"), ((check.name, check.state, check.found) for check in found)))
        for check in found:
            if check.fix:
                say(f"{check.name}: {check.fix}")
    return int(checkup.failed(found))


def _admitted_tables(records: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """The table of the self-test's records, where there are any."""
    if records:
        rows = ({**record, "kernels": ", ".join(record["kernels"]) or "none"} for record in records)
        heads = ("GPU", "target", "driver", "mla_cupy", "kernels", "state")
        yield table("kernels admitted by the self-test", heads, map(dict.values, rows))


def _waiting(facts: dict[str, Any]) -> Iterator[str]:
    """A line for each kind of GPU of this machine with kernels that the self-test has not admitted yet."""
    from mla_cupy.kernels import KERNELS

    admitted = {
        (record["gpu"], kernel)
        for record in facts["admitted"]
        if record["state"] == admission.IN_FORCE
        for kernel in record["kernels"]
    }
    for name, target in dict.fromkeys((gpu["name"], gpu["target"]) for gpu in facts["gpus"]):
        waiting = [
            kernel.name
            for kernel in KERNELS.values()
            if kernel.unproven and not kernel.on_request and kernel.supports_arch(target)
            if (name, kernel.name) not in admitted
        ]
        if waiting:
            yield f"{name}: `mla-cupy selftest` has not admitted {', '.join(waiting)}."


def _gpu_row(gpu: dict[str, Any]) -> tuple[str, ...]:
    memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
    return gpu["name"], gpu["compute_capability"], gpu["target"], memory, gpu["driver"]


# -- compile, list, clear-cache --------------------------------------------------------------------------------------


def _compile(options: argparse.Namespace) -> int:
    planned = _plan(options)
    if options.out:
        with _writing(options.out):  # what cannot be made is said before the work
            options.out.mkdir(parents=True, exist_ok=True)
    outcomes = compile_all([request for _, _, request in planned], options.jobs, quiet=options.json)
    if options.out:
        for outcome in outcomes:
            if outcome.build:
                entry = options.out / outcome.request.name
                with _writing(options.out):
                    cache.write(entry, outcome.build, cache.image_key(outcome.request))
    if options.json:
        print(json.dumps([outcome_row(outcome) for outcome in outcomes], indent=1))
    else:
        _show_outcomes(outcomes)
        if options.out:
            print(f"Written to {options.out}: use them with MLA_CUPY_CUBIN_DIR={options.out.resolve()}")
    _print_causes(outcomes)
    return 0 if all(outcome.build and (options.out or not outcome.cache_error) for outcome in outcomes) else 1


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """An error of the system's while the directory of `--out` is written, with its name."""
    try:
        yield
    except OSError as error:
        got = error.strerror or str(error)
        raise MlaError(explain(f"--out {directory}", got, "a writable directory with free space")) from error


def _show_outcomes(outcomes: Sequence[loader.Outcome]) -> None:
    keys = ("kernel", "variant", "target", "registers", "smem", "spills", "seconds", "state")
    heads = ["regs" if key == "registers" else key for key in keys]
    rows = map(outcome_row, outcomes)
    show(table("kernels", heads, ([row[key] for key in keys] for row in rows)))


def _print_causes(outcomes: Sequence[loader.Outcome]) -> None:
    """Print each cause of failure once, with its kernels."""
    names: dict[str, list[str]] = {}
    for outcome in outcomes:
        if cause := outcome.error or outcome.cache_error:
            # A header that does not compile says the same of each kernel.
            names.setdefault(cause.removeprefix(outcome.request.name), []).append(outcome.request.name)
    for cause, affected in names.items():
        subject = affected[0] if cause.startswith((" ", ":")) else ""
        others = f"\n{len(affected)} kernels: {', '.join(affected)}" if len(affected) > 1 else ""
        print(f"\nmla-cupy: {subject}{cause}{others}", file=sys.stderr)


def _list(options: argparse.Namespace) -> int:
    rows = [
        {
            "kernel": spec.name,
            "variant": str(variant),
            "target": request.arch,
            "source": spec.source,
            "core": variant in spec.core_on(request.arch),
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
    show(table("kernels", ("kernel", "variant", "target", "source", "on import", "built"), cells))
    return 0


def _formats(options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps({record.name: describe(record) for record in FORMATS.values()}, indent=1))
        return 0
    heads = ("record", "bytes", "planes", "dtype", "scales", "group", "page of 64", "used by")
    rows = (
        (
            *(r.name, r.token_bytes, " + ".join(map(str, r.planes)), r.dtype, ", ".join(r.scales), r.group or "-"),
            *(r.page_bytes(64), r.about),
        )
        for r in FORMATS.values()
    )
    fields = (
        (r.name, f.name, f.kind, f.count, f.plane, f.offset, f.offset + f.nbytes)
        for r in FORMATS.values()
        for f in r.fields
    )
    show(
        table("records: one token of a paged cache", heads, rows),
        table("fields", ("record", "field", "kind", "count", "plane", "first byte", "end"), fields),
    )
    return 0


def _clear_cache(options: argparse.Namespace) -> int:
    count, size = cache.clear()
    if options.json:
        print(json.dumps({"kernels": count, "bytes": size}))
    else:
        print(f"Deleted {count} kernels, {size / 2**20:.1f} MiB, from {cache.cache_dir() or 'no directory'}.")
    return 0


def _plan(options: argparse.Namespace) -> list[Planned]:
    """Every kernel, variant and target that the options select."""
    from mla_cupy.kernels import KERNELS

    archs, named = _archs(options.arch), options.kernels != ("all",)
    if named:
        _check_names("--kernels", options.kernels, KERNELS, "all, or some of ")
    planned = [
        (spec, variant, spec.request(variant, arch))
        for arch in archs
        for name, spec in KERNELS.items()
        if not named or name in options.kernels
        for variant in (spec.variants_on(arch) if named else spec.defaults_on(arch))
    ]
    if not planned:
        raise ArgumentError(explain("--arch", ", ".join(archs), "a target that one of the kernels supports"))
    return planned


def _archs(given: Sequence[str] | None) -> tuple[str, ...]:
    """The requested targets, each once; by default the targets of this machine's GPUs."""
    archs = device.nvml_archs() or [_DEFAULT_ARCH] if given is None else given
    possible: tuple[str, ...] = device.TARGETS
    with contextlib.suppress(KernelCompileError):  # without NVRTC nothing is compiled, but prebuilt kernels are listed
        known = nvrtc.load(nvrtc.find_nvrtc()).compute_capabilities()
        possible = tuple(arch for arch in possible if device.number_of(arch) in known)
    _check_names("--arch", archs, possible, "some of ")
    return tuple(dict.fromkeys(archs))


def _check_names(option: str, given: Sequence[str], possible: Collection[str], which: str) -> None:
    unknown = [name for name in given if name not in possible]
    if unknown or not given:
        raise ArgumentError(explain(option, ", ".join(unknown) or "nothing", which + ", ".join(possible)))


def _built(request: BuildRequest) -> bool | str:
    try:
        return worker.cached(request) is not None
    except KernelCompileError:
        return "unknown: no NVRTC"


# -- export ----------------------------------------------------------------------------------------------------------


def _export(options: argparse.Namespace) -> int:
    with _writing(options.out):
        return int(_export_module().run(options, _archs(options.arch), options.jobs))


def _export_module() -> Any:
    return importlib.import_module("mla_cupy.export.command")


# -- engines ---------------------------------------------------------------------------------------------------------


def _engines(options: argparse.Namespace) -> int:
    return int(_engines_module().run(options))


def _engines_module() -> Any:
    return importlib.import_module("mla_cupy.integrations.check")


def _transformers(options: argparse.Namespace) -> int:
    return int(_transformers_module().run(options))


def _transformers_module() -> Any:
    return importlib.import_module("mla_cupy.integrations.transformers")


# -- demo, bench -----------------------------------------------------------------------------------------------------


def _demo(options: argparse.Namespace) -> int:
    return int(_demo_module().run(options))


def _demo_module() -> Any:
    return importlib.import_module("mla_cupy.demo")
