"""The C interface: what the header declares, which functions a procedure becomes, and where its numbers come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_cupy.export.subject import DEVICE_ARGUMENTS, PLAN_ARGUMENTS, Argument, Array

if TYPE_CHECKING:
    from mla_cupy.export.module import Module

STATUSES = {
    "ArgumentError": -1,
    "ShapeError": -2,
    "DTypeError": -3,
    "DeviceError": -4,
    "PlanError": -5,
    "UnsupportedDeviceError": -6,
}
"""The statuses of refused calls: below 0, one for each exception; errors of the driver are above."""
_DEVICE = {argument.name for argument in DEVICE_ARGUMENTS}
_POINTERS = {
    "bfloat16": "uint16_t",
    "float16": "uint16_t",
    "float32": "float",
    "float8_e4m3fn": "uint8_t",
    "uint8": "uint8_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "uint64": "uint64_t",
}
"""Types of elements in C, which has no floating-point type of 16 bits: their bits are passed."""


def status_name(kind: str) -> str:
    """The name of an exception as a status: "SHAPE_ERROR"."""
    assert kind in STATUSES, kind
    words = "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in kind)
    return words.lstrip("_").replace("D_TYPE", "DTYPE")


@dataclass(frozen=True)
class Signature:
    """The parameters of a procedure in C.

    Attributes
    ----------
    structs : tuple of str
        The kinds of structs that it gets, each by a pointer of that name.
    changed : str
        The one that it writes to.
    """

    structs: tuple[str, ...]
    changed: str = ""

    def declared(self, name: str, *, changing: bool = False) -> str:
        """The parameters in C."""
        return ", ".join(
            f"{'' if changing and struct == self.changed else 'const '}{name}_{struct}* {struct}"
            for struct in self.structs
        )

    def value_of(self, variable: str) -> str:
        """Place of the value of a recorded variable, in C."""
        if variable in _DEVICE:
            return f"module->{variable}"
        if variable.startswith("plan."):
            return f"plan->{variable.removeprefix('plan.')}"
        if variable.startswith("workspace"):
            place = f"{'plan' if 'plan' in self.structs else 'args'}->{variable}"
        else:
            place = f"{next(struct for struct in self.structs if struct != 'plan')}->{variable}"
        return place if variable.endswith(("]", "_bytes")) else f"NUMBER({place})"


PROCEDURES = {
    "call": Signature(("args",)),
    "plan_make": Signature(("plan",), changed="plan"),
    "plan_update": Signature(("plan", "lengths"), changed="plan"),
    "call_planned": Signature(("args", "plan")),
}
"""The procedures that a module may have."""
_AFTER = {"plan_make": "plan->scheduled_b = -1;", "plan_update": "plan->scheduled_b = lengths->b;"}
_SAYS = {
    "call": "Enqueue the operation on a stream of the context. Allocates nothing, never waits, can be captured.",
    "plan_make": "Look whether a plan can be, and make it wait for an update. Its sizes and workspace are set before.",
    "plan_update": "Enqueue the schedule for the lengths of a step; the plan's calls are for this batch from then on.",
    "call_planned": "Enqueue the operation with a plan that has been updated for the batch; it has the workspace.",
}
ALONE = ("plan_make",)
"""Procedures that enqueue nothing."""
SIZED = ("call", "plan_make")
"""Procedures that tell the workspace."""


def structs(module: Module) -> list[str]:
    """The structs of a module's arguments."""
    planned = ["plan", "lengths"] if module.is_planned else []
    return ["args", *planned]


# ---- Header --------------------------------------------------------------------------------------------------------


def header(module: Module, banner: list[str]) -> str:
    """The header, for C11 and C++."""
    name, guard = module.name, f"{module.name.upper()}_INCLUDED"
    lines = [
        *banner,
        "//",
        "// Every function returns 0, or what went wrong: a status below 0 for what the operation's rules forbid, and",
        "// then nothing has been enqueued; an error of the driver (CUresult) above 0. The last failure of the calling",
        f"// thread in words: {name}_why(). All may be called from several threads at once, with one module.",
        f"#ifndef {guard}",
        f"#define {guard}",
        "",
        "#include <stddef.h>",
        "#include <stdint.h>",
        "",
        "#ifdef __cplusplus",
        'extern "C" {',
        "#endif",
        "",
        "typedef struct CUstream_st* CUstream;  // as cuda.h has it",
        f"typedef struct {name}_module {name}_module;",
        "",
        "enum {",
        *(f"    {name.upper()}_{status_name(kind)} = {code}," for kind, code in STATUSES.items()),
        "};",
        "",
        *_sizes(module),
        *_args_struct(module),
        *(_plan_structs(name) if module.is_planned else ()),
        "// Load the kernels for the current context, which must be current in later calls, too; not during a capture.",
        f"int {name}_open({name}_module** module);",
        f"void {name}_close({name}_module* module);",
        "",
        "// What the last refused call of this thread was refused for: argument, got, expected, remedy.",
        f"const char* {name}_why(void);",
        "// Version of the package that wrote the module.",
        f"const char* {name}_version(void);",
        "",
        "// Set the size of the struct, and the options to their defaults; everything else to zero.",
        f"void {name}_defaults({name}_args* args);",
        "// Set all strides for contiguous arrays, from the sizes.",
        f"void {name}_contiguous({name}_args* args);",
        *([f"void {name}_plan_defaults({name}_plan* plan);"] if module.is_planned else []),
        "",
    ]
    for procedure in module.targets[0].procedures:
        lines += _declarations(name, procedure)
    return "\n".join([*lines, "#ifdef __cplusplus", "}", "#endif", f"#endif  // {guard}"]) + "\n"


def _sizes(module: Module) -> Iterator[str]:
    """The sizes that are fixed, as constants."""
    yield "// What the export fixed."
    yield "enum {"
    for axis, size in module.subject.sizes.items():
        if axis.isidentifier():
            yield f"    {module.name.upper()}_{axis.upper()} = {size},"
    yield "};"
    yield ""


def _args_struct(module: Module) -> Iterator[str]:
    subject = module.subject
    yield "// Strides are in elements. Where an array has one fewer than axes, its last axis is contiguous."
    yield f"typedef struct {module.name}_args {{"
    yield "    size_t struct_bytes;  // sizeof of this struct"
    for size in subject.free_sizes:
        yield f"    int64_t {size.name};"
    for array in subject.arrays:
        yield from _array(array, ", ".join(map(str, map(_spelled_axis(module), array.axes))))
    for option in subject.free_options:
        yield f"    {'double' if option.kind == 'real' else 'int32_t'} {option.name};"
    yield f"    void* workspace;  // 256-byte aligned, of at least the bytes that {module.name}_workspace tells"
    yield "    size_t workspace_bytes;"
    yield f"}} {module.name}_args;"
    yield ""


def _spelled_axis(module: Module):  # type: ignore[no-untyped-def]
    sizes = module.subject.sizes
    return lambda axis: sizes.get(axis.removesuffix("?"), axis.removesuffix("?"))


def _array(array: Array, shape: str) -> Iterator[str]:
    const = "" if array.written else "const "
    yield f"    {const}{_POINTERS[array.dtype]}* {array.name};  // ({shape}), {array.dtype}"
    yield f"    int64_t {array.name}_strides[{array.num_strides}];"


def _plan_structs(name: str) -> Iterator[str]:
    yield "// A plan: sizes and memory for steps with up to max_b sequences; in flight on one stream at a time."
    yield f"typedef struct {name}_plan {{"
    yield "    size_t struct_bytes;"
    for argument in PLAN_ARGUMENTS:
        if argument.kind != "plan":
            kind = "int64_t" if argument.kind == "size" else "int32_t"
            yield f"    {kind} {argument.name.removeprefix('plan.')};"
    yield f"    void* workspace;  // 256-byte aligned, of at least the bytes that {name}_plan_workspace tells"
    yield "    size_t workspace_bytes;"
    yield "    int64_t scheduled_b;  // the module's: the batch of the last update"
    yield f"}} {name}_plan;"
    yield ""
    yield "// The lengths of a step, as in the calls that follow."
    yield f"typedef struct {name}_lengths {{"
    yield "    size_t struct_bytes;"
    yield "    int64_t b;"
    yield "    const int32_t* seqlens;"
    yield "    int64_t seqlens_strides[1];"
    yield f"}} {name}_lengths;"
    yield ""


def _functions(name: str, procedure: str) -> dict[str, str]:
    """The heads of the functions of a procedure, by what they do."""
    signature = PROCEDURES[procedure]
    first = f"const {name}_module* module, "
    given = first + signature.declared(name)
    tail = {"call_planned": "_planned", "plan_make": "_plan"}.get(procedure, "")
    stream = "" if procedure in ALONE else ", CUstream stream"
    changing = first + signature.declared(name, changing=True)
    found = {"run": f"int {name}_{procedure}({changing}{stream})"}
    if procedure.startswith("call"):
        found["check"] = f"int {name}_check{tail}({given})"
    if procedure in SIZED:
        found["workspace"] = f"int {name}{tail}_workspace({given}, size_t* bytes)"
    return found


def _declarations(name: str, procedure: str) -> Iterator[str]:
    says = {
        "run": _SAYS[procedure],
        "check": "The same rules, and nothing is enqueued.",
        "workspace": "The bytes of workspace that are needed; what says where it is may be left out.",
    }
    for what, head in _functions(name, procedure).items():
        yield f"// {says[what]}"
        yield f"{head};"
    yield ""


# ---- Definitions ---------------------------------------------------------------------------------------------------


def definitions(module: Module, procedure: str) -> Iterator[str]:
    """The functions of a procedure: which target's they call."""
    signature, name = PROCEDURES[procedure], module.name
    archs = [target.arch for target in module.targets]
    given = f"const struct module* module, {signature.declared(name)}"
    tables = {"rules": ("int", ""), "workspace": ("int64_t", ""), "steps": ("int", ", void* stream")}
    for what, (kind, more) in tables.items():
        if (what == "steps" and procedure in ALONE) or (what == "workspace" and procedure not in SIZED):
            continue
        table = ", ".join(f"{what}_{procedure}_{arch}" for arch in archs)
        yield f"typedef {kind} {what}_of_{procedure}({given}{more});"
        yield f"static {what}_of_{procedure}* const {what.upper()}_{procedure}[TARGET_COUNT] = {{{table}}};"
    yield ""
    names = ", ".join(signature.structs)
    yield f"static int check_{procedure}({given}) {{"
    yield '    if (module == NULL) return refuse(ARGUMENT_ERROR, "module: got NULL, expected one that is open");'
    for struct in signature.structs:
        yield f"    if ({struct} == NULL || {struct}->struct_bytes != sizeof *{struct}) {{"
        got = f"{struct} == NULL ? -1LL : (long long){struct}->struct_bytes"
        text = f"{struct}->struct_bytes: got %lld, expected %d; fill in the struct of this version"
        yield f'        return refuse(ARGUMENT_ERROR, "{text}", {got}, (int)sizeof *{struct});'
        yield "    }"
    yield f"    return RULES_{procedure}[module->target](module, {names});"
    yield "}"
    yield ""
    heads = _functions(name, procedure)
    opened = "const struct module* opened = (const struct module*)module;"
    yield f"{heads['run']} {{"
    yield f"    {opened}"
    yield f"    int status = check_{procedure}(opened, {names});"
    if procedure not in ALONE:
        yield "    if (status == 0) status = check_context(opened);"
        yield f"    if (status == 0) status = STEPS_{procedure}[opened->target](opened, {names}, stream);"
    if procedure in _AFTER:
        yield f"    if (status == 0) {_AFTER[procedure]}"
    yield "    return status;"
    yield "}"
    yield ""
    if "check" in heads:
        yield f"{heads['check']} {{ return check_{procedure}((const struct module*)module, {names}); }}"
        yield ""
    if "workspace" in heads:
        yield from _workspace_definition(name, procedure, heads["workspace"], opened)


def _workspace_definition(name: str, procedure: str, head: str, opened: str) -> Iterator[str]:
    """Every rule except the workspace's: the caller has none yet, so a valid address is used."""
    (struct,) = PROCEDURES[procedure].structs
    yield f"{head} {{"
    yield f"    {opened}"
    yield f"    {name}_{struct} probe;"
    yield f"    if ({struct} == NULL || {struct}->struct_bytes != sizeof probe) {{"
    yield f"        return check_{procedure}(opened, {struct});"
    yield "    }"
    yield f"    probe = *{struct};"
    yield "    probe.workspace = (void*)ELSEWHERE;"
    yield "    probe.workspace_bytes = ELSEWHERE_BYTES;"
    yield f"    int status = check_{procedure}(opened, &probe);"
    yield f"    if (status == 0) *bytes = (size_t)WORKSPACE_{procedure}[opened->target](opened, &probe);"
    yield "    return status;"
    yield "}"
    yield ""


__all__ = ["PROCEDURES", "STATUSES", "Argument", "Signature", "definitions", "header", "status_name", "structs"]
