"""`mla-cupy selftest`: its options and output."""

from __future__ import annotations

import argparse
import json
import os
import sys

from mla_cupy.compiling import compile_all
from mla_cupy.runtime import nvrtc
from mla_cupy.terminal import Help, path, progress, show, table

_EPILOG = """\
Single instructions first (loads and stores of tensor memory, matrix products, TMA, reductions), then one block of each
kernel of the sparse backward and of those with mma.sync, then the kernels, each compared with NumPy. What needs a probe
that failed is skipped. On a GPU probes run in child processes, so that one that hangs or kills its context is reported,
and the next one runs. Kernels that no hardware has run are run by default only where all of their probes have passed: a
run on a GPU records that in the cache directory; `mla-cupy info` shows it. The exit status is 0 if nothing went wrong,
else 1. Paste the report into an issue, whatever it says.

examples:
  mla-cupy selftest                           on this machine's GPU, or for sm_100a in the simulator
  mla-cupy selftest --arch sm_90a --simulate  Hopper's instructions and kernels, in the simulator
  mla-cupy selftest --probes 'mma/*-rope-*'   some of them
  mla-cupy selftest --list                    their names, and what each tries
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `mla-cupy selftest`."""
    command.epilog = _EPILOG
    command.formatter_class = Help
    command.add_argument(
        "--arch", metavar="ARCH", help="such as sm_80, sm_89 or sm_100a (default: this machine's GPU, or sm_100a)"
    )
    command.add_argument("--probes", default="*", metavar="GLOB", help="only probes with such names, as 'mma/*'")
    command.add_argument("--list", action="store_true", help="show the probes, run none")
    command.add_argument("--json", type=path, metavar="FILE", help="also write the report to FILE, as JSON")
    command.add_argument("--simulate", action="store_true", help="use the simulator even if there is such a GPU")
    command.add_argument("--keep-going", action="store_true", help="run also what needs a probe that has failed")


def run(options: argparse.Namespace) -> int:
    """Run the selected probes; returns 0, or 1 if something went wrong."""
    from mla_cupy.selftest import catalog, place, runner, summary, verdict

    arch = options.arch or place.default_arch()
    probes = catalog.probes(arch, options.probes)
    if options.list:
        show(table(f"probes for {arch}", ("name", "tries"), ((probe.name, probe.about) for probe in probes)))
        return 0
    nvrtc.load(nvrtc.find_nvrtc())  # without it every probe would fail, for this one cause
    here = place.find(arch, options.simulate)
    if here.simulated:
        print(f"Not on a GPU but in the simulator: {here.reason}.", file=sys.stderr)
    requests = list(dict.fromkeys(request for probe in probes for request in probe.requests(arch)))
    compile_all(requests, os.cpu_count() or 1)  # what does not compile says so when it runs
    with progress("running", len(probes)) as advance:
        results = runner.run(probes, here, options.keep_going, lambda name, result: advance(name, result is not None))
    known = {**summary.facts(here, options.keep_going), "admission": verdict.settle(here, results)}
    if options.json:
        options.json.write_text(json.dumps(summary.as_json(known, probes, results), indent=1) + "\n")
    heads = ("stage", "passed", "failed", "skipped", "n/a", "seconds")
    show(table(f"self-test for {arch}", heads, summary.stages(results)))
    print(f"\nThe report, for an issue:\n\n```\n{summary.text(known, probes, results)}\n```")
    return 0 if summary.succeeded(results) else 1
