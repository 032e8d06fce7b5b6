"""Compile one kernel with NVRTC, read ptxas' report, and refuse builds with register spills or serialised WGMMA.

NVRTC reports success for a kernel that spills, or with serialised WGMMAs. Here both are errors.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypedDict, cast

from mla_cupy.errors import KernelCompileError, explain
from mla_cupy.runtime import elf, env, sources
from mla_cupy.runtime.nvrtc import Nvrtc, exact_version, find_nvrtc, load

FACT_PREFIX = "mla_fact_"
"""Prefix of a kernel's facts for the host. Each is a constant `extern "C" __constant__ const int mla_fact_<name>`."""

VIRTUAL = "compute_"
"""Prefix of the names of virtual targets, for which only PTX is made."""

_RESOURCES = {
    "registers": r"Used (\d+) registers",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
    "stack": r"(\d+) bytes stack frame",
    "static_smem": r"(\d+) bytes smem",
    "barriers": r"used (\d+) barriers",
}
_NOISE = re.compile(
    r"ptxas +(info +: (\d+ bytes gmem|Compiling entry|Function properties|Used \d+|Compile time)|\.  )|\s*$"
)
_TMEM_CHECK = "--ptxas-options=--g-tensor-memory-access-check"
_PTX_FACT = re.compile(rb"\.(?:u32|b8) mla_fact_(\w+)(?:\[(\d+)\])?(?: = \{?([-\d, ]+)\}?)?;")
_PTX_ENTRY = re.compile(rb"^\.visible \.entry (\w+)", re.MULTILINE)
_FATAL = re.compile(r"Potential Performance Loss|\(C7517\)")


@dataclass(frozen=True)
class BuildRequest:
    """One kernel to compile: an entry point of a source file, for one target, with its macros.

    `label` is the variant's canonical name; `arch` a target such as "sm_90a", or "compute_90a" for the PTX alone that a
    simulator runs. `spill_bytes` is the allowed size of spill stores, as counted by ptxas. `prelude` is a header that
    is compiled before the source, which does not include it; `opening` a statement that is put first in the entry, on
    the line of its brace.
    """

    entry: str
    source: str
    arch: str
    defines: tuple[tuple[str, str], ...]
    label: str
    spill_bytes: int = 0
    prelude: str = ""
    opening: str = ""

    @property
    def name(self) -> str:
        after = f"-{self.prelude.removesuffix('.cuh').replace('/', '-')}" if self.prelude else ""
        return f"{self.entry}-{self.label}-{self.arch}{after}"

    def as_virtual(self) -> BuildRequest:
        """Request only the kernel's PTX, which takes less than half the time."""
        return replace(self, arch=self.arch.replace("sm_", VIRTUAL))

    def files(self) -> dict[str, bytes]:
        """Name and text of every source file; the first one is compiled, and includes the others."""
        own = sources.gather(self.source)
        if self.opening:
            own[self.source] = _opened(own[self.source], self.entry, self.opening)
        if not self.prelude:
            return own
        both = "".join(f'#include "{name}"\n' for name in (self.prelude, self.source))
        return {"with_prelude.cu": both.encode(), **sources.gather(self.prelude), **own}


def _opened(text: bytes, entry: str, statement: str) -> bytes:
    opened, count = re.subn(rb"\b%s\([^{]*\{" % entry.encode(), rb"\g<0> %s" % statement.encode(), text)
    if count != 1:
        raise KernelCompileError(explain(f"places where {entry} opens", count, "1"))
    return opened


class Resources(TypedDict):
    """Resources that a kernel needs of an SM, and its spills, as ptxas reports them."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_smem: int
    barriers: int


class BuildInfo(Resources):
    """Facts about a compiled kernel, as the disk cache keeps them.

    `seconds` is the compilation time; `facts` are the kernel's own constants, `notes` the compiler's further output.
    `image_key` and `sha256` belong to the disk cache, and are empty until it has the kernel.
    """

    name: str
    entry: str
    source: str
    arch: str
    label: str
    defines: list[list[str]]
    source_digest: str
    nvrtc: str
    options: list[str]
    seconds: float
    facts: dict[str, Any]
    notes: list[str]
    image_key: str
    sha256: dict[str, str]


@dataclass(frozen=True)
class Build:
    """A compiled kernel: the image for the driver, its PTX, and its information.

    Of a virtual target there is no image, and nothing is known of its resources: they are zeros.
    """

    cubin: bytes
    ptx: bytes
    info: BuildInfo

    @property
    def entry(self) -> str:
        """Name of its one entry point."""
        return self.info["entry"]

    @property
    def dynamic_smem(self) -> int:
        """Bytes of dynamic shared memory that it must be launched with: its fact `smem_bytes`."""
        return int(self.facts.get("smem_bytes", 0))

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of a block, static and dynamic."""
        return self.info["static_smem"] + self.dynamic_smem

    @property
    def facts(self) -> dict[str, Any]:
        """Constants that the kernel tells the host: name -> int, or list of ints."""
        return self.info["facts"]


def _checks_tensor_memory(arch: str) -> bool:
    return env.get("TMEM_CHECK") == "1" and arch.startswith("sm_10")


def options(request: BuildRequest) -> tuple[str, ...]:
    """NVRTC's options for `request`. One `-arch` only, and full optimisation always.

    `--no-cache` keeps out NVRTC's own cache, which would hide the log of ptxas.
    """
    lineinfo = ("-lineinfo",) if env.get("LINEINFO") == "1" else ()
    return (
        f"-arch={request.arch}",
        "-std=c++17",
        "-default-device",
        "--no-cache",
        "--ptxas-options=-v",
        *lineinfo,
        *((_TMEM_CHECK,) if _checks_tensor_memory(request.arch) else ()),
        *(("-DMLA_DEBUG",) if env.get("DEBUG") == "1" else ()),
        *(f"-D{name}={value}" for name, value in request.defines),
    )


def compile_kernel(request: BuildRequest, nvrtc: Nvrtc | None = None) -> Build:
    """Compile `request` in this thread.

    Parameters
    ----------
    request : BuildRequest
    nvrtc : Nvrtc, optional
        Default: the one that `find_nvrtc` finds.

    Raises
    ------
    KernelCompileError
        If NVRTC is missing, too old or refuses the source, or if the code spills, is serialised, mixes kinds of
        `cta_group`, or is not exactly one entry point.
    """
    nvrtc = load(find_nvrtc()) if nvrtc is None else nvrtc
    files = request.files()
    main, *headers = files
    flags = options(request)
    start = time.perf_counter()
    output = nvrtc.compile(main, files[main], {name: files[name] for name in headers}, flags)
    seconds = time.perf_counter() - start
    if not output.ok:
        raise KernelCompileError(f"{request.name} does not compile:\n{output.log}")
    info: BuildInfo = {
        "name": request.name,
        "entry": request.entry,
        "source": request.source,
        "arch": request.arch,
        "label": request.label,
        "defines": [list(define) for define in request.defines],
        "source_digest": sources.digest(files),
        "nvrtc": exact_version(output.ptx),
        "options": list(flags),
        "seconds": round(seconds, 3),
        **resources(output.log),
        "facts": facts(output.cubin, output.ptx),
        "notes": notes(output.log),
        "image_key": "",
        "sha256": {},
    }
    _gate(request, info, output.cubin, output.ptx)
    return Build(output.cubin, output.ptx, info)


def resources(log: str) -> Resources:
    """Registers, spills, stack, static shared memory and barriers, from the log of ptxas; sums over functions."""
    found = {name: sum(int(count) for count in re.findall(pattern, log)) for name, pattern in _RESOURCES.items()}
    return cast(Resources, found)


def notes(log: str) -> list[str]:
    """Messages of the compiler beyond the figures: warnings and ptxas notes, each line once."""
    lines = (line.strip() for line in log.splitlines() if not _NOISE.match(line))
    return list(dict.fromkeys(lines))


def facts(cubin: bytes, ptx: bytes) -> dict[str, int | list[int]]:
    """The constants `mla_fact_*` of the cubin, or of the PTX without a cubin.

    A scalar (or array of one) is an int, an array a list.
    """
    found: dict[str, int | list[int]] = {}
    for name, data in _constants(cubin) if cubin else _constants_of_ptx(ptx):
        values = [value for (value,) in struct.iter_unpack("<i", data)]
        found[name] = values if len(values) > 1 else values[0]
    return dict(sorted(found.items()))


def _constants(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    for symbol in elf.symbols(cubin):
        if symbol.name.startswith(FACT_PREFIX) and symbol.data:
            yield symbol.name[len(FACT_PREFIX) :], symbol.data


def _constants_of_ptx(ptx: bytes) -> Iterator[tuple[str, bytes]]:
    """A number is written as it is, an array byte by byte, both without zeros at the end."""
    for name, nbytes, text in _PTX_FACT.findall(ptx):
        numbers = [int(number) for number in text.split(b",")] if text else [0]
        yield name.decode(), bytes(numbers).ljust(int(nbytes), b"\0") if nbytes else struct.pack("<i", *numbers)


def entries(cubin: bytes, ptx: bytes) -> list[str]:
    """Names of the entry points of the cubin, or of the PTX without a cubin."""
    if not cubin:
        return [name.decode() for name in _PTX_ENTRY.findall(ptx)]
    return [symbol.name for symbol in elf.symbols(cubin) if symbol.is_entry]


def _gate(request: BuildRequest, info: BuildInfo, cubin: bytes, ptx: bytes) -> None:
    found = entries(cubin, ptx)
    if found != [request.entry]:
        raise KernelCompileError(
            explain(f"entries of {request.source}", ", ".join(found) or "none", f"{request.entry} and no other")
        )
    groups = sorted(set(re.findall(rb"\.cta_group::\d", ptx)))
    if len(groups) > 1:  # some lines of ptxas take it, and no GPU does
        got = " and ".join(group.decode() for group in groups)
        raise KernelCompileError(explain(f"tcgen05 instructions of {request.source}", got, "one of them"))
    faults = [note for note in info["notes"] if _FATAL.search(note)]
    wanted_slow = _TMEM_CHECK in info["options"]
    if info["spill_stores"] > request.spill_bytes and not wanted_slow:
        spills = f"spills {info['spill_stores']} bytes of stores, {info['spill_loads']} bytes of loads"
        faults.insert(0, f"{spills}; {request.spill_bytes} of stores are allowed")
    if faults:
        raise KernelCompileError(f"{request.name} is refused, its code would be slow:\n" + "\n".join(faults))
