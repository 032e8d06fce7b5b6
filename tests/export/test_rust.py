"""Bindings for Rust: their structs are those of the C header."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mla_cupy.export import c_module, command, rust
from mla_cupy.export.manifest import manifest
from mla_cupy.export.module import Module
from tests.export import modules
from tests.export.library import compiler


@pytest.mark.parametrize("make", [modules.decode, modules.merge])
def test_layouts(make: Callable[[], Module], tmp_path: Path) -> None:
    """A C compiler finds every member where the bindings have it, and the same sizes."""
    made = make()
    told = manifest(made, c_module.image_names(made))
    command.write(made, tmp_path)
    lines = [f'#include "{made.name}.h"']
    for struct, (offsets, size) in rust.layouts(told).items():
        kind = f"{made.name}_{struct}"
        lines.append(f'_Static_assert(sizeof({kind}) == {size}, "size");')
        lines += [f'_Static_assert(offsetof({kind}, {name}) == {at}, "{name}");' for name, at in offsets.items()]
    assert len(lines) > 15
    (tmp_path / "check.c").write_text("\n".join(lines))
    subprocess.run([compiler(), "-std=c11", "-fsyntax-only", str(tmp_path / "check.c")], check=True)


@pytest.mark.parametrize("make", [modules.decode, modules.merge])
def test_functions(make: Callable[[], Module]) -> None:
    """The bindings have all functions of the header but the package's version."""
    made = make()
    header = command.texts(made)[f"{made.name}.h"]
    bindings = command.texts(made, rust_too=True)[f"{made.name}.rs"]
    declared = set(re.findall(rf"\b{made.name}_(\w+)\(", header))
    linked = re.findall(rf'link_name = "{made.name}_(\w+)"\]\n        pub fn (\w+)\(', bindings)
    assert {name for name, _ in linked} == declared - {"version"}
    assert all(name == own for name, own in linked)
