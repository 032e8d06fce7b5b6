"""`bench compare-code`: the machine code of two folders of builds, compared build by build."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mla_cupy.runtime import elf

from ..core.errors import BenchError

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = """Compare the machine code of two folders of builds, build by build.

A change that only moves or renames source text leaves every instruction as it was; a build whose code differs is to be
timed again. A build under a new name counts as renamed if its code equals a build whose name is gone. Facts
that a kernel exports are not code.
"""
EPILOG = """example:
  (cd ../old && mla-cupy compile --arch sm_90a,sm_100a --out /tmp/old)
  mla-cupy compile --arch sm_90a,sm_100a --out /tmp/new
  compare-code /tmp/old /tmp/new

exit status: 0 no build differs, 1 some do or are only in one folder, 2 cannot run
"""

INSTRUCTION_BYTES = 16


@dataclass(frozen=True)
class Code:
    """The machine code of a build, and what is said of it where it differs."""

    parts: tuple[bytes, ...]
    registers: int

    @property
    def instructions(self) -> int:
        """The padding after the end counts, too."""
        return sum(map(len, self.parts)) // INSTRUCTION_BYTES

    def __str__(self) -> str:
        return f"{self.registers} registers, {self.instructions} instructions"


Builds = dict[str, Code]


@dataclass(frozen=True)
class Comparison:
    """The names of the builds of two folders by what became of them; a renamed one has its old and its new name."""

    identical: list[str]
    renamed: list[tuple[str, str]]
    different: list[str]
    only_old: list[str]
    only_new: list[str]

    @property
    def same(self) -> bool:
        """True if no build differs, is gone or is new."""
        return not (self.different or self.only_old or self.only_new)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `compare-code`."""
    parser.add_argument("old", type=Path, metavar="OLD_DIR", help="folder that `mla-cupy compile --out` has written")
    parser.add_argument("new", type=Path, metavar="NEW_DIR", help="another")


def run(args: argparse.Namespace, console: Console) -> int:
    """`compare-code`."""
    old, new = read(args.old), read(args.new)
    found = compare(old, new)
    for name in found.different:
        console.print(f"differs  {name}: {old[name]} -> {new[name]}")
    for before, after in found.renamed:
        console.print(f"renamed  {before} -> {after}")
    for folder, names in (("old", found.only_old), ("new", found.only_new)):
        for name in names:
            console.print(f"only in {folder}  {name}")
    console.print(
        f"{len(found.identical)} identical, {len(found.renamed)} renamed, {len(found.different)} different, "
        f"{len(found.only_old)} only in old, {len(found.only_new)} only in new"
    )
    return int(not found.same)


def read(folder: Path) -> Builds:
    """The code of each build of a folder, which has a folder of its own in it."""
    cubins = sorted(folder.glob("*/*.cubin"))
    if not cubins:
        raise BenchError(f"{folder}: no build in it; expected what `mla-cupy compile --out {folder}` writes")
    return {path.parent.name: _code(path) for path in cubins}


def _code(path: Path) -> Code:
    try:
        entries = elf.entries(path.read_bytes())
    except ValueError as error:
        raise BenchError(f"{path}: {error}; expected a cubin") from error
    return Code(tuple(entry.code for entry in entries), max(entry.registers for entry in entries))


def compare(old: Builds, new: Builds) -> Comparison:
    """Compare builds of the same name; then find the code of those that are gone under the names that are new."""
    both = sorted(old.keys() & new.keys())
    identical = [name for name in both if old[name] == new[name]]
    only_old, only_new = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    renamed = []
    for before in only_old:
        after = next((name for name in only_new if new[name] == old[before]), None)
        if after is not None:
            renamed.append((before, after))
            only_new.remove(after)
    gone = {before for before, _ in renamed}
    return Comparison(
        identical,
        renamed,
        [name for name in both if old[name] != new[name]],
        [name for name in only_old if name not in gone],
        only_new,
    )
