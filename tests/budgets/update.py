"""Write tests/golden/budgets.json anew: `python -m tests.budgets.update`. The difference is for a reviewer to see.

Both lines of NVRTC must be installed, in the versions that the extra `test` pins.
"""

from __future__ import annotations

import json
import sys

from mla_cupy.errors import KernelCompileError
from tests.budgets import builds


def main() -> int:
    missing = [line for line in builds.LINES if not builds.library(line)]
    if missing:
        print(f"no NVRTC wheel of CUDA {missing}: pip install -e '.[test]'", file=sys.stderr)
        return 1
    lines: dict[str, dict[str, builds.Figures]] = {builds.version(line): {} for line in builds.LINES}
    refused = 0
    for target in builds.TARGETS:
        try:
            lines[builds.version(target.line)][target.name] = builds.figures(builds.build(target))
        except KernelCompileError as error:
            refused += 1
            print(f"{target}: {error}", file=sys.stderr)
    # One kernel a line, so that a change of one is one line of a diff.
    blocks = (
        f'  "{version}": {{\n'
        + ",\n".join(f'    "{name}": {json.dumps(figures)}' for name, figures in sorted(kernels.items()))
        + "\n  }"
        for version, kernels in lines.items()
    )
    builds.GOLDEN.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
    print(f"{builds.GOLDEN}: {sum(map(len, lines.values()))} kernels")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
