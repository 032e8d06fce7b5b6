"""The files of a module: header, source and images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mla_cupy._version import __version__
from mla_cupy.errors import explain
from mla_cupy.export import c_expressions as ce
from mla_cupy.export.c_expressions import Statements, c, indented, local
from mla_cupy.export.expressions import Expression
from mla_cupy.export.interface import ALONE, PROCEDURES, SIZED, STATUSES, definitions, status_name
from mla_cupy.export.module import Kernel, Module, expressions_of
from mla_cupy.export.numbers import expression_of, pieces
from mla_cupy.export.record import Procedure, RecordedArgs, RecordedFill, RecordedLaunch, RecordedMap, Refusal
from mla_cupy.export.subject import SM_COUNT, Argument
from mla_cupy.kernels import params
from mla_cupy.kernels.param_layout import ParamLayout, layout_of
from mla_cupy.runtime import tensormap
from mla_cupy.runtime.device import number_of, smem_per_block

_DRIVER = Path(__file__).with_name("driver.c")
_MEMBERS = {"uint64": "uint64_t", "int64": "int64_t", "int32": "int32_t", "float32": "float"}
_WORDS_PER_LINE = 6


def banner(module: Module, what: str) -> list[str]:
    """The comment that a file begins with."""
    return [
        f"// {what}: {module.subject.operation.name} of mla_cupy {__version__} for "
        f"{', '.join(target.arch for target in module.targets)}.",
        f"// {', '.join(f'{name} = {size}' for name, size in module.subject.sizes.items())}.",
        "// Written by `mla-cupy export`: to be exported again, not edited.",
        "// SPDX-License-Identifier: MIT",
        "// SPDX-FileCopyrightText: The mla_cupy authors",
    ]


# ---- Source --------------------------------------------------------------------------------------------------------


def source(module: Module) -> str:
    """The C file, but for the images."""
    lines = [
        *banner(module, "Checks and launches"),
        f'#include "{module.name}.h"',
        "",
        *(f"#include <{name}.h>" for name in ("dlfcn", "math", "stdarg", "stddef", "stdio", "stdlib", "string")),
        "",
        *_names(module),
        *_tables(module),
        *fixed_part().splitlines(),
        "",
        "// ---- Parameters of the kernels " + "-" * 86,
    ]
    for name, layout in module.structs.items():
        lines += _struct(name, layout)
    for at, target in enumerate(module.targets):
        for procedure in target.procedures.values():
            lines += ["", f"// ---- {procedure.name} on {target.arch} ".ljust(119, "-")]
            lines += _Functions(module, at, procedure).lines()
    lines += ["", "// ---- Interface ".ljust(119, "-"), *_interface(module)]
    return "\n".join(lines) + "\n"


def fixed_part() -> str:
    """The part that is the same in every module: the driver's interface, and the arithmetic."""
    return _DRIVER.read_text()


def _names(module: Module) -> Iterator[str]:
    """Names of the fixed part that have the prefix outside of it, and numbers of the interface."""
    yield "enum {"
    for kind in STATUSES:
        yield f"    {status_name(kind)} = {module.name.upper()}_{status_name(kind)},"
    yield "};"
    yield ""
    yield "// An address or a number of a struct as the number that the rules are about."
    yield "#define NUMBER(x) _Generic((x), double : (x), int32_t : (x), int64_t : (x), default : (intptr_t)(x))"
    yield "// Memory that nobody has, to ask about everything else."
    yield f"#define ELSEWHERE ((uintptr_t)INT64_C({1 << 62}))"
    yield f"#define ELSEWHERE_BYTES ((size_t)INT64_C({1 << 61}))"
    yield ""


def _tables(module: Module) -> list[str]:
    """Tables that the fixed part reads."""
    archs = [target.arch for target in module.targets]
    lines = [f"enum {{ TARGET_COUNT = {len(archs)}, KERNEL_COUNT = {len(module.kernels)} }};"]
    lines += [f'static const char TARGET_NAMES[] = "{", ".join(archs)}";', ""]
    lines += ["struct target {", "    int major, minor, max_sms, shared_bytes;", "};", ""]
    lines += ["static const struct target TARGETS[TARGET_COUNT] = {"]
    for arch in archs:
        major, minor = divmod(number_of(arch), 10)
        shared = smem_per_block((major, minor))
        lines.append(f"    {{{major}, {minor}, {SM_COUNT.high}, {shared}}},  // {arch}")
    lines += ["};", "", "struct kernel {", "    const char* entry;", "    const void* image;"]
    lines += ["    int target, threads, cluster, shared_bytes;", "};", ""]
    images = image_names(module)
    lines += [f"extern const uint64_t {name}[];" for name in dict.fromkeys(images)]
    lines += ["", "static const struct kernel KERNELS[KERNEL_COUNT] = {"]
    for kernel, image in zip(module.kernels, images, strict=True):
        figures = f"{kernel.target}, {kernel.threads}, {kernel.cluster}, {kernel.shared_bytes}"
        lines.append(f'    {{"{kernel.spec.entry}", {image}, {figures}}},  // {kernel.spec.name}, {kernel.variant}')
    return [*lines, "};", ""]


def _struct(name: str, layout: ParamLayout) -> list[str]:
    fields: Any = layout.dtype.fields
    lines, end = ["", f"struct {name} {{"], 0
    for member, (kind, at, *_) in fields.items():
        lines += _padding(end, at)
        lines.append(f"    {_MEMBERS[str(kind)]} {member};")
        end = at + kind.itemsize
    lines += _padding(end, layout.size)
    last, (_, at, *_) = list(fields.items())[-1]
    return [
        *lines,
        "};",
        f'_Static_assert(sizeof(struct {name}) == {layout.size}, "as the kernels have it");',
        f'_Static_assert(offsetof(struct {name}, {last}) == {at}, "as the kernels have it");',
    ]


def _padding(start: int, end: int) -> list[str]:
    """Bytes between members, as a member: what is not named would not be set to zero."""
    return [f"    char padding_{start}[{end - start}];"] if end > start else []


class _Functions:
    """The C functions of a procedure on one target: its rules, its workspace, its steps."""

    def __init__(self, module: Module, target: int, procedure: Procedure) -> None:
        self._module, self._target, self._procedure = module, target, procedure
        self._arch = module.targets[target].arch
        self._signature = PROCEDURES[procedure.name]

    def lines(self) -> list[str]:
        """Their definitions."""
        steps = [] if self._procedure.name in ALONE else self._steps()
        return [*self._rules(), *(self._workspace() if self._procedure.name in SIZED else ()), *steps]

    def _head(self, what: str, diagrams: list[Any], more: str = "", bounded: tuple[Argument, ...] = ()) -> list[str]:
        """The beginning of a function: what it reads becomes local variables."""
        given, read = self._signature.declared(self._module.name), self._signature
        lines = [f"static {what}_{self._procedure.name}_{self._arch}(const struct module* module, {given}{more}) {{"]
        used = {argument.name: argument.expression for argument in bounded} | ce.variables(diagrams, expressions_of)
        for name, variable in used.items():
            kind = "double" if variable.is_real else "int64_t"
            lines.append(f"    const {kind} {local(name)} = {read.value_of(name)};")
        unused = [name for name in ("module", *self._signature.structs) if not self._reads(name, used)]
        return [*lines, *(f"    (void){name};" for name in unused)]

    def _reads(self, parameter: str, used: dict[str, Expression]) -> bool:
        return any(f"{parameter}->" in self._signature.value_of(name) for name in used)

    def _rules(self) -> list[str]:
        bounds = self._procedure.bounds
        lines = ["", *self._head("int rules", self._procedure.rules, bounded=bounds)]
        lines += [f"    {_bound(argument)}" for argument in bounds]
        for at, rule in enumerate(self._procedure.rules):
            code = Statements(_refused, f"rule_{at}").lines(rule)
            if code[-1] == "break;" and all(_is_refusal(line) for line in code[:-1]):
                lines += indented(code[:-1])
            else:
                lines += ["    do {", *indented(indented(code)), "    } while (0);"]
        return [*lines, "    return 0;", "}"]

    def _workspace(self) -> list[str]:
        diagram = self._procedure.workspace
        code = Statements(lambda nbytes: [f"return {c(nbytes)};"]).lines(diagram)
        return ["", *self._head("int64_t workspace", [diagram]), *indented(code), "}"]

    def _steps(self) -> list[str]:
        diagram = self._procedure.steps
        code = Statements(self._launched).lines(diagram)
        head = self._head("int steps", [diagram], ", void* stream")
        return ["", *head, "    (void)module, (void)stream;", *indented(code), "}"]

    def _launched(self, steps: tuple[RecordedLaunch | RecordedFill, ...]) -> list[str]:
        """The launches of one outcome, in a block of its own."""
        if not steps:
            return ["return 0;"]
        lines, names = ["int status = 0;"], dict[RecordedArgs, list[str]]()
        for step in steps:
            if isinstance(step, RecordedLaunch) and step.args not in names:
                lines += _arguments(step.args, len(names))
                names[step.args] = [f"params_{len(names)}", *_map_names(step.args, len(names))]
        for step in steps:
            if isinstance(step, RecordedFill):
                lines.append(f"if (status == 0) status = fill(module, {c(step.address)}, {c(step.nbytes)}, stream);")
                continue
            index = self._module.index(self._target, step.build)
            at = [*names].index(step.args)
            grid = ", ".join(map(c, step.grid))
            lines.append(f"// {step.build[0]}, {step.build[1]}")
            lines.append(
                f"if (status == 0) status = launch(module, {index}, {grid}, arguments_{at}, "
                f"{int(step.dependent)}, stream);"
            )
        for at, found in enumerate(names.values()):
            first = next(i for i, line in enumerate(lines) if line.startswith(("//", "if (status == 0) status = fill")))
            lines.insert(first, f"void* arguments_{at}[] = {{{', '.join(f'(void*)&{name}' for name in found)}}};")
        return ["{", *indented([*lines, "return status;"]), "}"]


def _bound(argument: Argument) -> str:
    """The check that an argument lies in its span."""
    name, low, high = (c(expression_of(x)) for x in (argument.number, argument.low, argument.high))
    where = f"{argument.low} to {argument.high}"
    if argument.kind == "address":
        condition, where = f"{name} < {low}", "an address below 2^63"
    else:
        condition = f"{name} < {low} || {name} > {high}"
    text = explain(argument.name, argument.number, where)
    return f"if ({condition}) return refuse({status_name('ShapeError')}, {ce.printed(pieces(text))});"


def _refused(outcome: Refusal | None) -> list[str]:
    if outcome is None:
        return ["break;"]
    return [f"return refuse({status_name(outcome.kind)}, {ce.printed(outcome.text)});"]


def _is_refusal(line: str) -> bool:
    return line.startswith("if ") and " return refuse(" in line


def _map_names(args: RecordedArgs, at: int) -> list[str]:
    return [f"map_{at}_{i}" for i in range(len(args.maps))]


def _arguments(args: RecordedArgs, at: int) -> Iterator[str]:
    """The parameter struct of launches, and their tensor maps."""
    layout = layout_of(getattr(params, args.struct))
    yield f"const struct {args.struct} params_{at} = {{"
    for (member, (kind, *_)), value in zip((layout.dtype.fields or {}).items(), args.values, strict=True):
        kind_name = _MEMBERS[str(kind)]
        text = c(value)
        yield f"    .{member} = {text if kind_name == 'int64_t' else f'({kind_name}){text}'},"
    yield "};"
    for name, each in zip(_map_names(args, at), args.maps, strict=True):
        yield from _encoded(name, each)


def _encoded(name: str, each: RecordedMap) -> Iterator[str]:
    """A tensor map, encoded by the driver."""
    lists = {
        "dims": ("uint64_t", each.dims),
        "strides": ("uint64_t", each.strides_bytes or (expression_of(0),)),
        "box": ("unsigned", each.box),
    }
    yield f"struct tensor_map {name};"
    for what, (kind, values) in lists.items():
        items = ", ".join(f"({kind}){c(value)}" for value in values)
        yield f"const {kind} {name}_{what}[] = {{{items}}};"
    element, swizzle, l2 = tensormap.codes(each.dtype, each.swizzle, each.l2)
    arrays = ", ".join(f"{name}_{what}" for what in lists)
    yield f"status = encode(module, &{name}, {element}, {len(each.dims)}, {c(each.base)}, {arrays}, {swizzle}, {l2});"
    yield "if (status != 0) return status;"


# ---- Interface -----------------------------------------------------------------------------------------------------


def _interface(module: Module) -> Iterator[str]:
    """The functions that the header declares."""
    name = module.name
    yield f"int {name}_open({name}_module** module) {{ return open_module((struct module**)module); }}"
    yield f"void {name}_close({name}_module* module) {{ close_module((struct module*)module); }}"
    yield f"const char* {name}_why(void) {{ return reason; }}"
    yield f'const char* {name}_version(void) {{ return "{__version__}"; }}'
    yield ""
    yield from _initialiser(module)
    for procedure in module.targets[0].procedures:
        yield from definitions(module, procedure)


def _initialiser(module: Module) -> Iterator[str]:
    """Functions that set the options' defaults, and the strides of contiguous arrays."""
    name, subject = module.name, module.subject
    yield f"void {name}_defaults({name}_args* args) {{"
    yield "    memset(args, 0, sizeof *args);"
    yield "    args->struct_bytes = sizeof *args;"
    for option in (option for option in subject.free_options if option.name in subject.defaults):
        default = subject.defaults[option.name]
        yield f"    args->{option.name} = {c(expression_of(float(default) if option.kind == 'real' else default))};"
    yield "}"
    yield ""
    yield f"void {name}_contiguous({name}_args* args) {{"
    strides = [
        (stride.name, expression_of(value))
        for array in subject.arrays
        for stride, value in zip(array.strides, subject.contiguous_strides(array), strict=True)
    ]
    read = dict.fromkeys(each.args[0] for _, value in strides for each in value.walk() if each.op == "variable")
    for size in read:
        yield f"    const int64_t {local(size)} = args->{size};"
    for stride, value in strides:
        yield f"    args->{stride} = {c(value, bounded=False)};"  # no rule has looked at the sizes yet
    yield "}"
    yield ""
    if module.is_planned:
        yield f"void {name}_plan_defaults({name}_plan* plan) {{"
        yield f"    *plan = ({name}_plan){{.struct_bytes = sizeof *plan, .cp_world = 1, .scheduled_b = -1}};"
        yield "}"
        yield ""


# ---- Images --------------------------------------------------------------------------------------------------------


def image_names(module: Module) -> list[str]:
    """The names of the kernels' images; equal images are one."""
    first: dict[bytes, int] = {}
    return [f"{module.name}_image_{first.setdefault(kernel.image, at)}" for at, kernel in enumerate(module.kernels)]


def images(module: Module) -> str:
    """The C file of the images: words of 8 bytes, which a compiler reads faster than bytes."""
    lines = [*banner(module, "Images of the kernels"), "#include <stdint.h>"]
    named: dict[str, Kernel] = dict(zip(image_names(module), module.kernels, strict=True))
    for name, kernel in named.items():
        lines += [
            "",
            f"// {kernel.spec.name}, {kernel.variant}, {kernel.build.info['arch']}: {len(kernel.image)} bytes",
        ]
        data = kernel.image + bytes(-len(kernel.image) % 8)
        words = [f"0x{int.from_bytes(data[at : at + 8], 'little'):x}" for at in range(0, len(data), 8)]
        lines += [f"extern const uint64_t {name}[{len(words)}];", f"const uint64_t {name}[{len(words)}] = {{"]
        lines += [f"    {', '.join(words[at : at + _WORDS_PER_LINE])}," for at in range(0, len(words), _WORDS_PER_LINE)]
        lines.append("};")
    return "\n".join(lines) + "\n"
