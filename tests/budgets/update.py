"""Write tests/golden/budgets.json anew. The difference is for a reviewer to see.

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
    lines: Lines = {builds.version(line): {} for line in builds.LINES}
    refused = 0
    for target in builds.TARGETS:
        version = builds.version(target.line)
        kept = known.get(version, {}).get(target.name)
        try:
            fresh = kept is None or only.search(target.name)
            lines[version][target.name] = builds.figures(builds.build(target)) if fresh else kept
        except KernelCompileError as error:
            refused += 1
            print(f"{target}: {error}", file=sys.stderr)
    write(lines)
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


if __name__ == "__main__":
    sys.exit(main())
