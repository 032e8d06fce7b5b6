"""`mla-cupy demo`: kernels checked against the oracle, and timed on a GPU or simulated without one."""

from __future__ import annotations

import argparse
import os

from mla_cupy.demo import measured, simulated
from mla_cupy.errors import ArgumentError, explain
from mla_cupy.runtime import device
from mla_cupy.terminal import Help, path

_EPILOG = """\
Without a GPU, decode's kernels for Hopper are compiled and run in the simulator of PTX on a small batch; that takes
seconds, and `mla-cupy compile` compiles all others. With a GPU, the kernels that are called most are compiled for it;
then a decode, a sparse forward and a sparse backward are checked, and timed beside the limits of the machine. The exit
status is 1 if a result is wrong or a kernel does not compile.

examples:
  mla-cupy demo                      on the GPU, or in the simulator
  mla-cupy demo --simulate           in the simulator, even if there is a GPU
  mla-cupy demo --html decode.html   write the simulated timeline as a page: who ran, who waited
  mla-cupy demo --png decode.png     draw the timeline of one block or, with a GPU, the roofline (needs matplotlib)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mla-cupy demo`."""
    jobs = os.cpu_count() or 1
    parser.epilog = _EPILOG
    parser.formatter_class = Help
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed of the simulated inputs (default: %(default)s)")
    parser.add_argument("--simulate", action="store_true", help="use the simulator even if there is a GPU")
    parser.add_argument("--png", type=path, metavar="FILE", help="draw the timeline or, with a GPU, the roofline")
    parser.add_argument("--html", type=path, metavar="FILE", help="write the timeline as a page; simulator only")
    parser.add_argument(
        "-j", "--jobs", type=int, default=jobs, metavar="N", help=f"compilations at a time (default: {jobs})"
    )


def run(options: argparse.Namespace) -> int:
    """Run the demo on the GPU if there is one, else in the simulator.

    Returns
    -------
    int
        0, or 1 if a result is wrong or a kernel does not compile.
    """
    on_gpu = device.gpu_count() > 0 and not options.simulate
    if options.html and on_gpu:
        raise ArgumentError(explain("--html", "a GPU", "the simulator: the timeline is simulated", "add --simulate"))
    if options.png:
        _import_matplotlib()
    options.jobs = max(1, options.jobs)
    return measured.run(options) if on_gpu else simulated.run(options)


def _import_matplotlib() -> None:
    """Check before the work that a picture can be drawn after it."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError(explain("--png", "no matplotlib", "it installed", "pip install matplotlib, or use --html"))
