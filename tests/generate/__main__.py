"""Write the lists that repeat names: `__init__` files, registries, setup.cfg's packages.

Run it after a file was added, renamed or removed, or a name in its `__all__`. With `--check` nothing is written, and
the command fails where a file is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.generate import MAKERS
from tests.generate.files import outdated

ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which files are out of date")
    check = parser.parse_args(argv).check
    found = outdated(ROOT, MAKERS)
    for path, text in found.items():
        print(f"{'out of date' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(text)
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())
