"""Write tests/golden/budgets.json anew, and note the kernels whose builds have all been made in verified.json.

The difference is for a reviewer to see.

Both lines of NVRTC must be installed, in the versions that the extra `test` pins. All builds take an hour of a core.
With `--only REGEX` those that match are made, with `--changed` those of the kernels that have changed since all their
builds were made, and always those that the file lacks. The others keep their figures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

from mla_cupy.errors import KernelCompileError, explain
from tests.budgets import builds
from tests.budgets.builds import Target

Lines = dict[str, dict[str, builds.Figures]]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    missing = [line for line in builds.LINES if not builds.library(line)]
    if missing:
        print(f"no NVRTC wheel of CUDA {missing}: pip install -e '.[test]'", file=sys.stderr)
        return 1
    others = [line for line in builds.LINES if builds.version(line) != builds.pinned(line)]
    for line in others:
        got, pin = builds.version(line), builds.pinned(line)
        remedy = f"pip install {builds.PACKAGES[line]}=={pin}"
        print(explain(f"NVRTC of CUDA {line}", got, pin, remedy), file=sys.stderr)
    if others:
        return 1
    changed = {name for name in builds.KERNELS if builds.fingerprint(name) != builds.verified().get(name)}

    def is_chosen(target: Target) -> bool:
        if options.changed:
            return target.kernel in changed
        return options.only is None or options.only.search(target.name) is not None

    lines, partial, refused = make(is_chosen, options.jobs)
    write(lines)
    verify(partial)
    print(f"{builds.GOLDEN}: {sum(map(len, lines.values()))} kernels")
    return 1 if refused else 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m tests.budgets.update", description=__doc__)
    chosen = found.add_mutually_exclusive_group()
    chosen.add_argument("--only", type=re.compile, metavar="REGEX", help="names of builds, such as mla_merge.*sm_90a")
    chosen.add_argument("--changed", action="store_true", help="the builds of all kernels that have changed")
    found.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="compilers at once")
    return found


def make(is_chosen: Callable[[Target], bool], jobs: int) -> tuple[Lines, set[str], int]:
    """The figures of all builds; the kernels of which some were not made; the number that did not compile."""
    known = {target: builds.golden().get(builds.version(target.line), {}).get(target.name) for target in builds.TARGETS}
    fresh = [target for target in builds.TARGETS if known[target] is None or is_chosen(target)]
    refused = 0
    # Not forked: NVRTC is loaded here, and has threads.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        results = pool.map(figures_or_error, map(builds.TARGETS.index, fresh))
        for count, (target, found) in enumerate(zip(fresh, results, strict=True), 1):
            if isinstance(found, str):
                refused += 1
                print(f"{target}: {found}", file=sys.stderr)
            known[target] = None if isinstance(found, str) else found
            if count % 50 == 0:
                print(f"{count} of {len(fresh)} builds", file=sys.stderr)
    made = {target for target in fresh if known[target] is not None}
    lines: Lines = {builds.version(line): {} for line in builds.LINES}
    for target, figures in known.items():
        if figures is not None:
            lines[builds.version(target.line)][target.name] = figures
    return lines, {target.kernel for target in builds.TARGETS if target not in made}, refused


def figures_or_error(index: int) -> builds.Figures | str:
    """The figures of one of the targets, or why it does not compile."""
    try:
        return builds.figures(builds.build(builds.TARGETS[index]))
    except KernelCompileError as error:
        return str(error)


def write(lines: Lines) -> None:
    """One kernel a line, so that a change of one is one line of a diff."""
    blocks = (
        f'  "{version}": {{\n'
        + ",\n".join(f'    "{name}": {json.dumps(figures)}' for name, figures in sorted(kernels.items()))
        + "\n  }"
        for version, kernels in lines.items()
    )
    builds.GOLDEN.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def verify(partial: set[str]) -> None:
    """Note the kernels whose builds have all been made now; `partial` keep what is known of them."""
    builds.golden.cache_clear()
    builds.fingerprint.cache_clear()  # those of before have the figures of before
    known = builds.verified() if builds.VERIFIED.exists() else {}
    fresh = {kernel: builds.fingerprint(kernel) for kernel in builds.KERNELS if kernel not in partial}
    found = {kernel: known_as for kernel, known_as in {**known, **fresh}.items() if kernel in builds.KERNELS}
    builds.VERIFIED.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
