"""Write what repeats other files: `__init__` files, registries; the functions of the bindings.

Run it after a file was added, renamed or removed, or a name in its `__all__`, and after an operation's record, its
signature or its docstring was changed. With `--check` nothing is written, and the command fails where a file is out of
date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.generate import LISTS, MADE_OF_RECORDS
from tools.generate.files import RuffError, outdated, write

ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which files are out of date")
    check = parser.parse_args(argv).check
    clean = True
    for makers in (LISTS, MADE_OF_RECORDS):
        try:
            found = outdated(ROOT, makers)
        except RuffError as error:
            print(error, file=sys.stderr)
            return 2
        clean = clean and not found
        for path in found:
            print(f"{'out of date' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            write(found)
    return 0 if clean or not check else 1


if __name__ == "__main__":
    sys.exit(main())
