"""Handlers of XLA's foreign function interface, written from a manifest: programs of XLA call a module by a name.

It is one C file, compiled with the single header of XLA that jaxlib ships.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

VERSION = 1
"""Version of what operands, results and attributes mean; the end of a target's name."""
ALIGNMENT = 256
"""Bytes: of a workspace. XLA may align less, so that a workspace has that many bytes more than are needed."""
_FIXED = Path(__file__).with_name("xla.c")
_DTYPES = {
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float32": ("F32", 4),
    "float8_e4m3fn": ("F8E4M3FN", 1),
    "uint8": ("U8", 1),
    "int32": ("S32", 4),
    "int64": ("S64", 8),
    "uint64": ("U64", 8),
}
_INCLUDES = ("dlfcn", "pthread", "stdarg", "stddef", "stdint", "stdio", "stdlib", "string")


def target(name: str) -> str:
    """The name by which programs call the module of that name: "mla_cupy.decode.v1"."""
    return f"mla_cupy.{name.removeprefix('mla_')}.v{VERSION}"


def operands(told: Mapping[str, Any]) -> list[str]:
    """The arrays that a call is given, in order."""
    return [array["name"] for array in told["arrays"] if array["input"]]


def results(told: Mapping[str, Any]) -> list[str]:
    """The arrays that a call returns, in order, but for the workspace; operands among them give their memory."""
    return [array["name"] for array in told["arrays"] if array["written"]]


def options(told: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The options that a call may have as attributes; XLA, which orders the calls, makes no promise about them."""
    own = (each for each in told["arguments"] if "default" in each or "required" in each)
    return [each for each in own if each["name"] != "independent"]


def sizes(told: Mapping[str, Any]) -> list[str]:
    """The sizes that a call's shapes say."""
    own = (each for each in told["arguments"] if each["kind"] == "size")
    return [each["name"] for each in own if not each["name"].startswith("plan.")]


def axis(told: Mapping[str, Any], name: str) -> tuple[int, list[str], int]:
    """An axis as `times * product(sizes) + plus`."""
    if name in told["sizes"]:
        return told["sizes"][name], [], 0
    product, _, plus = name.partition("+")
    times, factors = 1, []
    for factor in product.split("*"):
        if factor in told["sizes"]:
            times *= told["sizes"][factor]
        else:
            factors.append(factor)
    return times, factors, int(plus or 0)


def source(told: Mapping[str, Any]) -> str:
    """The text of the C file."""
    name = told["name"]
    lines = [
        f"// XLA's handler: {told['operation']} of {told['package']} for {', '.join(told['targets'])}.",
        f'// Programs call it "{target(name)}":',
        f"//   operands: {', '.join(operands(told))}",
        f"//   results: {', '.join(results(told))}, workspace",
        f"//     (a vector of uint8, {ALIGNMENT} bytes longer than {name}_workspace tells)",
        f"//   attributes: {', '.join(each['name'] for each in options(told)) or 'none'}",
        "// Written by `mla-cupy export`: to be exported again, not edited.",
        f"// SPDX-License-Identifier: {told['licence']}",
        "// SPDX-FileCopyrightText: The mla_cupy authors",
        f'#include "{name}.h"',
        "",
        *(f"#include <{each}.h>" for each in _INCLUDES),
        "",
        "#include <xla/ffi/api/c_api.h>",
        "",
        "// The handler, of all stages: for jax.ffi.register_ffi_target, or XLA's macro.",
        f"XLA_FFI_Error* {name}_xla(XLA_FFI_CallFrame* frame);",
        '// Registers it for a platform, "CUDA", with an interface that XLA gives. Returns NULL if all is well.',
        f"XLA_FFI_Error* {name}_xla_register(const XLA_FFI_Api* api, const char* platform);",
        "",
        f"typedef {name}_args arguments;",
        f"typedef {name}_module module;",
        *(f"#define {each}_module {name}_{each}" for each in ("open", "call")),
        *(f"#define {each} {name}_{each}" for each in ("why", "defaults", "contiguous")),
        f'#define TARGET_NAME "{target(name)}"',
        f'#define OPTION_NAMES "{", ".join(each["name"] for each in options(told)) or "none"}"',
        "",
        *_tables(told),
        *_FIXED.read_text().splitlines(),
        "",
        f"XLA_FFI_Error* {name}_xla(XLA_FFI_CallFrame* frame) {{ return handle(frame); }}",
        f"XLA_FFI_Error* {name}_xla_register(const XLA_FFI_Api* api, const char* platform) {{",
        f"    return register_handler(api, {name}_xla, platform);",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _tables(told: Mapping[str, Any]) -> Iterator[str]:
    """Tables that the fixed part reads."""
    own, free, given, made = options(told), sizes(told), operands(told), results(told)
    counts = {"SIZE": free, "ARRAY": told["arrays"], "OPTION": own, "OPERAND": given, "RESULT": made}
    yield f"enum {{ {', '.join(f'{what}_COUNT = {len(items)}' for what, items in counts.items())} }};"
    yield from ("", "struct size {", "    const char* name;", "    size_t offset;", "};", "")
    yield "static const struct size SIZES[SIZE_COUNT] = {"
    yield from (f'    {{"{size}", offsetof(arguments, {size})}},' for size in free)
    yield from ("};", "", "// An axis: times * sizes + plus; -1 is no size.", "struct axis {", "    const char* name;")
    yield from ("    int64_t times;", "    int sizes[2];", "    int64_t plus;", "};", "")
    for array in told["arrays"]:
        yield f"static const struct axis AXES_{array['name']}[] = {{"
        for each in array["axes"]:
            times, factors, plus = axis(told, each)
            places = [*(free.index(factor) for factor in factors), -1, -1][:2]
            says = f"{each} = {times}" if each in told["sizes"] else each
            yield f'    {{"{says}", {times}, {{{places[0]}, {places[1]}}}, {plus}}},'
        yield "};"
    yield from ("", "struct array {", "    const char* name;", "    XLA_FFI_DataType dtype;")
    yield from ("    const char *dtype_name, *shape;", "    int item_bytes, rank;", "    const struct axis* axes;")
    yield from ("    size_t offset;", "    int operand, result;", "};", "")
    yield "static const struct array ARRAYS[ARRAY_COUNT] = {"
    for array in told["arrays"]:
        name, dtype = array["name"], array["dtype"]
        code, item = _DTYPES[dtype]
        shape = ", ".join(str(told["sizes"].get(each, each)) for each in array["axes"])
        places = [names.index(name) if name in names else -1 for names in (given, made)]
        yield f'    {{"{name}", XLA_FFI_DataType_{code}, "{dtype}", "({shape})", {item}, {len(array["axes"])},'
        yield f"     AXES_{name}, offsetof(arguments, {name}), {places[0]}, {places[1]}}},"
    yield from (
        "};",
        "",
        "struct option {",
        "    const char* name;",
        "    size_t offset;",
        "    int is_real;",
        "};",
        "",
    )
    yield "static const struct option OPTIONS[OPTION_COUNT + 1] = {"
    for each in own:
        yield f'    {{"{each["name"]}", offsetof(arguments, {each["name"]}), {int(each["kind"] == "real")}}},'
    yield from ("    {NULL, 0, 0},", "};", "")
