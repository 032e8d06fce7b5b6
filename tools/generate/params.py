"""Classes for the kernels' parameter structs, read from the CUDA sources: nothing is compiled.

After a struct has changed, mypy names every fill that lacks a member without a default.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from mla_cupy.runtime import sources

#: Codes of a struct's members, by their types in CUDA.
KINDS = {"i64": "I64", "i32": "I32", "float": "F32"}
#: In the sources, but no member for the host: it makes a struct as long in CUDA as it is aligned.
PADDING = "padding"
PROBES = "probes/"

SCHEDULE = "attention/split_schedule.cuh"
SCHEDULE_CONSTANTS = ("kMaxSplits", "kItemCost", "kPriceScale", "kShortSplit")
CONSTANTS_HEADER = '''\
"""Constants of `{header}` and its headers, which explain the numbers.

Written by `python -m tools.generate`.
"""

from __future__ import annotations

'''
HEADER = '''\
"""Parameter structs of the {kernels}, as the host fills them.

Written by `python -m tools.generate` from the CUDA sources, which say what each member means.
"""

from __future__ import annotations

from mla_cupy.kernels.param_layout import {names}
'''


@dataclass(frozen=True)
class Member:
    """A member as it is declared; `count` is the length of an array, 0 of anything else.

    `default` is its initialiser in Python, "" of a member that has none.
    """

    name: str
    kind: str
    count: int = 0
    default: str = ""


@dataclass(frozen=True)
class Struct:
    """A struct, and the file that declares it."""

    name: str
    file: str
    bases: tuple[str, ...]
    members: tuple[Member, ...]


def make(root: Path) -> dict[Path, str]:
    """The files that this command writes -> what they should hold."""
    folder = root / "cuda_src"
    kernels: dict[str, Struct] = {}
    probes: dict[str, Struct] = {}
    for path in sorted(folder.rglob("*.cu")):
        source = path.relative_to(folder).as_posix()
        for struct in structs_of(source, folder):
            known = (probes if source.startswith(PROBES) else kernels).setdefault(struct.name, struct)
            if known != struct:
                raise ValueError(f"{known.file} and {struct.file} declare a {struct.name} each")
    package = root / "mla_cupy"
    return {
        package / "kernels" / "params.py": text_of(kernels, "kernels"),
        package / "selftest" / "params.py": text_of(probes, "probes' kernels"),
    }


def constants(root: Path) -> dict[Path, str]:
    """The constants of the device's schedule that the host's arithmetic shares."""
    cuda = root / "cuda_src"
    text = "".join(_read(cuda, name) for name in sources.gather(SCHEDULE, cuda))
    values = "".join(f"{_snake(name[1:]).upper()} = {_constant(name, text)}\n" for name in SCHEDULE_CONSTANTS)
    folder, _, name = SCHEDULE.removesuffix(".cuh").rpartition("/")
    return {root / "mla_cupy" / "kernels" / folder / f"{name}.py": CONSTANTS_HEADER.format(header=SCHEDULE) + values}


def parameter_structs(source: str, folder: Path) -> list[str]:
    """The names of the parameter structs of a source's kernel: one, or one per variant."""
    text = _read(folder, source)
    (name,) = re.findall(r"__grid_constant__ (\w*Params) p\b", text)
    return [name] if name != "Params" else re.findall(r"using Params = (\w+);", text)


def structs_of(source: str, folder: Path) -> list[Struct]:
    """The parameter structs of a kernel, after those that they are made of."""
    files = {name: _read(folder, name) for name in sources.gather(source, folder)}
    found: dict[str, Struct] = {}

    def add(name: str) -> None:
        struct = _struct(name, files)
        for part in (*struct.bases, *(member.kind for member in struct.members)):
            if part not in {*KINDS.values(), "Address", *found}:
                add(part)
        found[name] = struct

    for name in parameter_structs(source, folder):
        add(name)
    return list(found.values())


def _read(folder: Path, name: str) -> str:
    """A file without its comments."""
    return re.sub(r"//.*", "", (folder / name).read_text())


def _struct(name: str, files: dict[str, str]) -> Struct:
    pattern = rf"struct {name}(?: : ([\w, ]+))? \{{(.*?)\n\}};"
    matches = [(file, *match) for file, text in files.items() for match in re.findall(pattern, text, re.DOTALL)]
    ((file, bases, body),) = matches
    text = "".join(files.values())
    members = tuple(member for member in _members(body, text) if member.name != PADDING)
    return Struct(name, file, tuple(filter(None, bases.split(", "))), members)


def _members(body: str, text: str) -> Iterator[Member]:
    """Members of a struct's body; `text` has the constants that are lengths of arrays."""
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        if "*" in declaration:
            kind, names = "Address", declaration.rpartition("*")[2]
        else:
            declared, _, names = declaration.partition(" ")
            kind = KINDS.get(declared, declared)
        for name in names.split(","):
            name, _, value = name.strip().partition(" = ")
            name, _, length = name.rstrip("]").partition("[")
            yield Member(name, kind, _constant(length, text) if length else 0, _default(value))


def _default(value: str) -> str:
    """The initialiser of a member, a number or nullptr, in Python."""
    number = value.removesuffix("f")
    return "NULL" if value == "nullptr" else f"{number}0" if number.endswith(".") else number


def _constant(name: str, text: str) -> int:
    ((value, shift),) = re.findall(rf"constexpr i32 {name} = (\d+)(?: << (\d+))?;", text)
    return int(value) << int(shift or 0)


def text_of(structs: dict[str, Struct], kernels: str) -> str:
    """A module with a class for each struct, as ruff formats it."""
    ordered = sorted(structs.values(), key=lambda struct: struct.file)
    classes = [_class(struct) for struct in ordered]
    names = ("F32", "I32", "I64", "NULL")
    used = {name for name in names if any(re.search(rf"\b{name}\b", text) for text in classes)}
    imported = ", ".join((*sorted(used), "Address", "Params"))
    return "\n\n".join((HEADER.format(kernels=kernels, names=imported), *classes))


def _class(struct: Struct) -> str:
    fields = [f"{_snake(base)}: {base}" for base in struct.bases]
    for group, members in groupby(struct.members, key=_array_of_strides):
        fields += _fields(group, list(members))
    body = "".join(f"    {field}\n" for field in fields)
    return f'class {struct.name}(Params):\n    """Struct of `{struct.file}`."""\n\n{body}'


def _fields(group: tuple[str, str] | None, members: list[Member]) -> Iterator[str]:
    """The fields for neighbours. Strides of several axes of one array are one field, whose name has all axes."""
    if group and len(members) > 1:
        array, unit = group
        axes = [member.name.removeprefix(f"{array}_stride_").removesuffix(f"_{unit}") for member in members]
        kinds = ", ".join(member.kind for member in members)
        values = [member.default for member in members if member.default]
        default = f" = ({', '.join(values)})" if len(values) == len(members) else ""
        yield f"{array}_stride_{'_'.join(axes)}_{unit}: tuple[{kinds}]{default}"
        return
    for member in members:
        name = member.name + "_" * keyword.iskeyword(member.name)
        kind = f"tuple[{', '.join([member.kind] * member.count)}]" if member.count else member.kind
        yield f"{name}: {kind}" + f" = {member.default}" * bool(member.default)


def _array_of_strides(member: Member) -> tuple[str, str] | None:
    """(array, unit) of `<array>_stride_<axis>_<unit>`."""
    match = re.fullmatch(r"(\w+)_stride_[a-z]+_(elems|bytes)", member.name)
    return match and (match[1], match[2])


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
