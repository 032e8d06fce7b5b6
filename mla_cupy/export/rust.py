"""Bindings for Rust, written from a manifest: structs as C has them, the functions, and a module that closes itself.

It is one file that needs the standard library alone. Addresses of the GPU are plain numbers in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_KINDS = {"size": "i64", "integer": "i32", "real": "f64", "address": "DevicePtr", "plan": "i64"}
_BYTES = {"i64": 8, "i32": 4, "f64": 8, "usize": 8, "DevicePtr": 8}
_KEYWORDS = {"in", "loop", "match", "move", "mod", "ref", "type", "use", "where"}

_PRELUDE = """
use std::ffi::{c_char, c_int, c_void, CStr};
use std::fmt;

/// An address of the GPU's memory, CUdeviceptr of the driver.
pub type DevicePtr = u64;
/// A stream of the driver, CUstream; null is the default one.
pub type Stream = *mut c_void;

/// A refused call: `status` is below 0 for what the operation's rules forbid, else an error of the driver (CUresult).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub status: i32,
    pub why: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl std::error::Error for Error {}

fn checked(status: c_int) -> Result<(), Error> {
    if status == 0 {
        return Ok(());
    }
    let why = unsafe { CStr::from_ptr(ffi::why()) };
    Err(Error { status, why: why.to_string_lossy().into_owned() })
}

/// Kernels that are loaded for a context of the driver, which must be current in every call.
#[derive(Debug)]
pub struct Module {
    raw: *mut ffi::RawModule,
}

// A module changes only when it is opened and closed.
unsafe impl Send for Module {}
unsafe impl Sync for Module {}

impl Drop for Module {
    fn drop(&mut self) {
        unsafe { ffi::close(self.raw) }
    }
}
"""


def bindings(told: Mapping[str, Any]) -> str:
    """The text of the bindings of a manifest's module."""
    procedures = list(next(iter(told["targets"].values()))["procedures"])
    name, planned = told["name"], "plan_make" in procedures
    sizes = ", ".join(f"{axis} = {size}" for axis, size in told["sizes"].items())
    lines = [
        f"// Bindings: {told['operation']} of {told['package']} for {', '.join(told['targets'])}.",
        f"// {sizes}.",
        "// Written by `mla-cupy export`: to be exported again, not edited. Needs Rust 1.82 or newer.",
        f"// SPDX-License-Identifier: {told['licence']}",
        "// SPDX-FileCopyrightText: The mla_cupy authors",
        *_PRELUDE.splitlines(),
        "",
        "// What the export fixed.",
        *(f"pub const {axis.upper()}: i64 = {size};" for axis, size in told["sizes"].items() if axis.isidentifier()),
        "",
        *_struct("Args", "The arguments of a call. Strides are in elements.", _call_members(told)),
    ]
    if planned:
        lines += _struct("Plan", "Sizes and memory for steps; in flight on one stream at a time.", _plan_members(told))
        lines += _struct("Lengths", "The lengths of a step.", _lengths_members(told))
    lines += [*_default("Args", "defaults"), *(_default("Plan", "plan_defaults") if planned else ())]
    lines += ["impl Args {"]
    lines += ["    /// Sets all strides for contiguous arrays, from the sizes."]
    lines += ["    pub fn contiguous(&mut self) {", "        unsafe { ffi::contiguous(self) }", "    }", "}", ""]
    lines += [*_methods(procedures), "", *_declarations(name, procedures)]
    return "\n".join(lines) + "\n"


Member = tuple[str, str, str]
"""Name, type and what is said of it."""


def _call_members(told: Mapping[str, Any]) -> list[Member]:
    arrays = {array["name"]: array for array in told["arrays"]}
    found: list[Member] = []
    for argument in told["arguments"]:
        name, kind = argument["name"], argument["kind"]
        if name.startswith(("plan.", "device.", "workspace")) or (name.endswith("]") and not name.endswith("[0]")):
            continue
        if kind == "stride":
            base = name.removesuffix("_strides[0]")
            found.append((f"{base}_strides", f"[i64; {arrays[base]['strides']}]", ""))
            continue
        says = _says(arrays[name], told["sizes"]) if kind == "address" else ""
        found.append((name, _KINDS[kind], says))
    return [*found, *_workspace("Module::workspace")]


def _says(array: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    shape = ", ".join(str(sizes.get(axis, axis)) for axis in array["axes"])
    return f"({shape}), {array['dtype']}{', written' if array['written'] else ''}"


def _workspace(asked: str) -> list[Member]:
    where = f"256-byte aligned, of at least the bytes that `{asked}` tells"
    return [("workspace", "DevicePtr", where), ("workspace_bytes", "usize", "")]


def _plan_members(told: Mapping[str, Any]) -> list[Member]:
    own = [each for each in told["arguments"] if each["name"].startswith("plan.")]
    members = [(each["name"].removeprefix("plan."), _KINDS[each["kind"]], "") for each in own]
    kept = [(name, kind, "the module's") for name, kind, _ in members if name == "scheduled_b"]
    return [*(member for member in members if member[0] != "scheduled_b"), *_workspace("Module::plan_workspace"), *kept]


def _lengths_members(told: Mapping[str, Any]) -> list[Member]:
    (lengths,) = [array for array in told["arrays"] if array["name"] == "seqlens"]
    says = _says(lengths, told["sizes"])
    return [("b", "i64", ""), ("seqlens", "DevicePtr", says), ("seqlens_strides", "[i64; 1]", "")]


def _bytes_of(kind: str) -> tuple[int, int]:
    """Size and alignment of a type."""
    if kind.startswith("["):
        element, _, count = kind.strip("[]").partition("; ")
        return _BYTES[element] * int(count), _BYTES[element]
    return _BYTES[kind], _BYTES[kind]


def layout(members: Sequence[Member]) -> tuple[dict[str, int], int]:
    """The offsets that C gives the members of a struct, and its size, on 64-bit machines."""
    offsets, end = {}, 0
    for name, kind, _ in members:
        size, alignment = _bytes_of(kind)
        offsets[name] = end = -(-end // alignment) * alignment
        end += size
    return offsets, -(-end // 8) * 8


def layouts(told: Mapping[str, Any]) -> dict[str, tuple[dict[str, int], int]]:
    """Offsets and sizes of the structs of a module, by their names in C."""
    first = ("struct_bytes", "usize", "")
    found = {"args": layout([first, *_call_members(told)])}
    if "plan.max_b" in {each["name"] for each in told["arguments"]}:
        found |= {"plan": layout([first, *_plan_members(told)]), "lengths": layout([first, *_lengths_members(told)])}
    return found


def _struct(name: str, says: str, members: Sequence[Member]) -> Iterator[str]:
    """A struct; Rust's compiler compares its layout with C's."""
    whole = [("struct_bytes", "usize", "size of this struct"), *members]
    offsets, size = layout(whole)
    yield from (f"/// {says}", "#[repr(C)]", "#[derive(Clone, Copy, Debug)]", f"pub struct {name} {{")
    for member, kind, what in whole:
        if what:
            yield f"    /// {what}"
        yield f"    pub {_spelled(member)}: {kind},"
    last = whole[-1][0]
    yield from ("}", "", f"const _: () = assert!(std::mem::size_of::<{name}>() == {size});")
    yield f"const _: () = assert!(std::mem::offset_of!({name}, {_spelled(last)}) == {offsets[last]});"
    yield ""


def _spelled(name: str) -> str:
    return f"r#{name}" if name in _KEYWORDS else name


def _default(struct: str, function: str) -> list[str]:
    return [
        f"impl Default for {struct} {{",
        "    /// Its size and the defaults of the options; everything else is zero.",
        "    fn default() -> Self {",
        "        let mut made = std::mem::MaybeUninit::zeroed();",
        "        unsafe {",
        f"            ffi::{function}(made.as_mut_ptr());",
        "            made.assume_init()",
        "        }",
        "    }",
        "}",
        "",
    ]


_STRUCTS = {
    "call": "args: &Args",
    "plan_make": "plan: &mut Plan",
    "plan_update": "plan: &mut Plan, lengths: &Lengths",
    "call_planned": "args: &Args, plan: &Plan",
}
"""The structs that the function of a procedure takes."""
_SAYS = {
    "call": "Enqueues the operation. Allocates nothing, never waits, can be captured.",
    "plan_make": "Looks whether a plan can be, and makes it wait for an update. Enqueues nothing.",
    "plan_update": "Enqueues the schedule for the lengths of a step; the plan's calls are for this batch from then on.",
    "call_planned": "Enqueues the operation with a plan that has been updated for the batch.",
}
_SAFETY = (
    "Until the stream has done what is enqueued, the addresses must be memory of the GPU, of the shapes and",
    "dtypes that the structs name; the stream must be one of the module's context.",
)


def _functions(procedures: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    """Name, structs, what else is given, and what is said of each function."""
    for procedure in procedures:
        stream = "" if procedure == "plan_make" else "stream: Stream"
        yield procedure, _STRUCTS[procedure], stream, _SAYS[procedure]
        if procedure.startswith("call"):
            name = "check" + procedure.removeprefix("call")
            yield name, _STRUCTS[procedure], "", "Checks the same rules, and enqueues nothing."
        if procedure in ("call", "plan_make"):
            name = "workspace" if procedure == "call" else "plan_workspace"
            asked = _STRUCTS[procedure].replace("&mut ", "&")
            yield name, asked, "bytes: &mut usize", "Tells the bytes of workspace that are needed."


def _methods(procedures: Sequence[str]) -> Iterator[str]:
    yield from ("impl Module {", "    /// Loads the kernels for the current context; not during a capture.")
    yield from ("    pub fn open() -> Result<Self, Error> {", "        let mut raw = std::ptr::null_mut();")
    yield from ("        checked(unsafe { ffi::open(&mut raw) })?;", "        Ok(Self { raw })", "    }")
    for name, structs, more, says in _functions(procedures):
        given = ", ".join(part.partition(":")[0] for part in structs.split(", "))
        yield from ("", f"    /// {says}")
        if more.startswith("bytes"):
            yield f"    pub fn {name}(&self, {structs}) -> Result<usize, Error> {{"
            yield "        let mut bytes = 0;"
            yield f"        checked(unsafe {{ ffi::{name}(self.raw, {given}, &mut bytes) }})?;"
            yield from ("        Ok(bytes)", "    }")
        elif more:
            yield from ("    ///", "    /// # Safety", "    ///")
            yield from (f"    /// {line}" for line in _SAFETY)
            yield f"    pub unsafe fn {name}(&self, {structs}, {more}) -> Result<(), Error> {{"
            yield f"        checked(unsafe {{ ffi::{name}(self.raw, {given}, stream) }})"
            yield "    }"
        else:
            yield f"    pub fn {name}(&self, {structs}) -> Result<(), Error> {{"
            yield f"        checked(unsafe {{ ffi::{name}(self.raw, {given}) }})"
            yield "    }"
    yield "}"


def _declarations(name: str, procedures: Sequence[str]) -> Iterator[str]:
    """The functions of C, by their names without the module's."""
    yield from ("mod ffi {", "    use super::*;", "", "    #[repr(C)]", "    #[derive(Debug)]")
    yield from ("    pub struct RawModule {", "        _private: [u8; 0],", "    }", "", '    unsafe extern "C" {')
    fixed = {
        "open": "(module: *mut *mut RawModule) -> c_int",
        "close": "(module: *mut RawModule)",
        "why": "() -> *const c_char",
        "defaults": "(args: *mut Args)",
        "contiguous": "(args: &mut Args)",
    }
    fixed |= {"plan_defaults": "(plan: *mut Plan)"} if "plan_make" in procedures else {}
    for function, signature in fixed.items():
        yield f'        #[link_name = "{name}_{function}"]'
        yield f"        pub fn {function}{signature};"
    for function, structs, more, _ in _functions(procedures):
        given = ", ".join(filter(None, ("module: *const RawModule", structs, more)))
        yield f'        #[link_name = "{name}_{function}"]'
        yield f"        pub fn {function}({given}) -> c_int;"
    yield from ("    }", "}")
