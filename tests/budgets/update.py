"""Write tests/golden/budgets.json anew, and note the kernels whose builds have all been made in verified.json.

The difference is for a reviewer to see.

Both lines of NVRTC must be installed, in the versions that the extra `test` pins. All builds take minutes; with
`--only REGEX` those that match, and those that the file lacks, are made, and the others keep their figures.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence

from mla_cupy.errors import KernelCompileError
from tests.budgets import builds

Lines = dict[str, dict[str, builds.Figures]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.budgets.update", description=__doc__)
    parser.add_argument("--only", type=re.compile, metavar="REGEX", help="names of builds, such as mla_merge.*sm_90a")
    only = parser.parse_args(argv).only
    missing = [line for line in builds.LINES if not builds.library(line)]
    if missing:
        print(f"no NVRTC wheel of CUDA {missing}: pip install -e '.[test]'", file=sys.stderr)
        return 1
    known = builds.golden() if only else {}
    partial: set[str] = set()
    lines: Lines = {builds.version(line): {} for line in builds.LINES}
    refused = 0
    for target in builds.TARGETS:
        version = builds.version(target.line)
        kept = known.get(version, {}).get(target.name)
        try:
            fresh = kept is None or only is None or only.search(target.name)
            if not fresh:
                partial.add(target.kernel)
            lines[version][target.name] = builds.figures(builds.build(target)) if fresh else kept
        except KernelCompileError as error:
            refused += 1
            partial.add(target.kernel)
            print(f"{target}: {error}", file=sys.stderr)
    write(lines)
    verify(partial)
    print(f"{builds.GOLDEN}: {sum(map(len, lines.values()))} kernels")
    return 1 if refused else 0


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
    known = builds.verified() if builds.VERIFIED.exists() else {}
    fresh = {kernel: builds.fingerprint(kernel) for kernel in builds.KERNELS if kernel not in partial}
    found = {kernel: known_as for kernel, known_as in {**known, **fresh}.items() if kernel in builds.KERNELS}
    builds.VERIFIED.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
