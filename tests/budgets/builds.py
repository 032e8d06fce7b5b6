"""Every kernel, variant and target, compiled once for each line of NVRTC; shared by the processes of a test run."""

from __future__ import annotations

import configparser
import functools
import hashlib
import importlib.metadata
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_cupy.cache_formats import FORMATS
from mla_cupy.kernels import KERNELS
from mla_cupy.kernels.spec import KernelSpec, Variant
from mla_cupy.runtime import cache, nvrtc, sources, worker
from mla_cupy.runtime.build import Build, options

ARCHS = ("sm_75", "sm_80", "sm_90a", "sm_100a", "sm_103a")
#: Of each the PTX is the other's but for its target; where only one is built, so are the golden figures, which a test
#: demands.
TWINS = {"sm_103a": "sm_100a"}
#: Kernels whose builds take other numbers of registers for the twin, which is then made like any other target.
UNLIKE_TWINS = {"decode_sm100", "decode_sm100_fp8", "decode_sm100_joint"}
#: What the tests in the simulator run, where they name no other: they share its builds.
SIMULATED = "sm_90a"
#: Which stand for the other targets while a kernel is as it was.
MAIN = ("sm_75", "sm_90a", "sm_100a")
#: Of so many kernels that have not changed, a run builds one.
UNCHANGED = 6
#: Of kernels for all GPUs from one on, those that stand for GPUs with little shared memory.
CONSUMER = ("sm_89", "sm_120")
LINES = (12, 13)
PACKAGES = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}
SETUP = Path(__file__).resolve().parents[2] / "setup.cfg"
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "budgets.json"
#: Kernel -> `fingerprint` when all of its builds were made and the golden file written.
VERIFIED = GOLDEN.with_name("verified.json")

_FUNCTION = re.compile(
    rb"^(?:template <[^\n]*>\n)?MLA_DEVICE [^\n({]*?\b(?!operator\b)(\w+)\([^{;]*?\{(?:[^\n]*\}$|.*?^\}$)\n?",
    re.DOTALL | re.MULTILINE,
)
_WORD = re.compile(rb"\w+")
_COMMENT = re.compile(rb'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)

Figures = dict[str, int]


@dataclass(frozen=True)
class Target:
    """One kernel to compile, and the line of NVRTC to do it with."""

    line: int
    kernel: str
    variant: Variant
    arch: str

    @property
    def spec(self) -> KernelSpec[Any]:
        return KERNELS[self.kernel]

    @property
    def name(self) -> str:
        """Name of the cubin, the same for both lines of NVRTC."""
        return self.spec.request(self.variant, self.arch).name

    @property
    def runs_on_many(self) -> bool:
        """Whether it is a kernel for more GPUs than one architecture and its twin."""
        return not self.spec.archs or len(self.spec.archs) > len(TWINS) + 1

    @property
    def is_only_one(self) -> bool:
        """Whether its kernel has no other build: then there are no turns for the lines to take."""
        return len(self.spec.variants) == 1 and len(archs_of(self.spec)) == 1

    @property
    def is_long_form(self) -> bool:
        """Whether a run without long forms leaves it out."""
        return not self.is_made(changed=fingerprint(self.kernel) != verified().get(self.kernel))

    def is_made(self, changed: bool) -> bool:
        """Whether a run without long forms makes it, of a kernel that has changed since all its builds were made.

        Such a run makes each build with one line of NVRTC. The lines take turns over a kernel's variants and over the
        architectures, so that every kernel meets both. Of a twin, unless it is an unlike one, and of a kernel for many
        GPUs on a GPU that the simulated one is not, it makes a kernel's first variant alone: what spills are kernels of
        one architecture.

        Of the kernels that have not changed it makes one build of each sixth one, of its first variant: the compilers
        are the same, so what the golden file says of the other builds still holds. The main targets, and with them the
        lines, take turns over these kernels.
        """
        index = self.spec.variants.index(self.variant)
        turn = LINES[(index + (*ARCHS, *CONSUMER).index(self.arch)) % len(LINES)]
        twin = self.arch in TWINS and self.kernel not in UNLIKE_TWINS
        elsewhere = twin or (self.runs_on_many and self.arch != SIMULATED)
        if not changed:
            turns, left_out = divmod([*KERNELS].index(self.kernel), UNCHANGED)
            archs = [arch for arch in MAIN if self.spec.supports_arch(arch)]
            return not left_out and index == 0 and self.arch == archs[turns % len(archs)] and self.line == turn
        return (self.line == turn or self.is_only_one) and not (elsewhere and index > 0)

    def __str__(self) -> str:
        return f"nvrtc{self.line}-{self.name}"


def archs_of(spec: KernelSpec[Any]) -> tuple[str, ...]:
    """The targets that a kernel is made for."""
    candidates = (*ARCHS, *CONSUMER) if spec.archs else ARCHS
    return tuple(arch for arch in candidates if spec.supports_arch(arch))


TARGETS = tuple(
    Target(line, spec.name, variant, arch)
    for line in LINES
    for spec in KERNELS.values()
    for arch in archs_of(spec)
    for variant in spec.variants
)


@functools.cache
def library(line: int) -> str:
    """The wheel's library of a line; "" where it is not installed."""
    return next(nvrtc._wheels((line,)), "")


@functools.cache
def version(line: int) -> str:
    """Such as "12.9.86"."""
    return nvrtc.load(library(line)).exact_version()


def pinned(line: int) -> str:
    """The version that the extra `test` pins, of which the golden file is."""
    config = configparser.ConfigParser()
    config.read(SETUP)
    (pin,) = re.findall(rf"^{PACKAGES[line]}==([\d.]+)$", config["options.extras_require"]["test"], re.MULTILINE)
    return str(pin)


@functools.cache
def build(target: Target) -> Build:
    """From the ordinary cache, whose key holds every byte and option, or compiled in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nothing is writable: then nothing is shared
        places = cache.places()
    request = target.spec.request(target.variant, target.arch)
    return worker.build_here(request, library(target.line), places.read, places.write)[0]


def figures(made: Build) -> Figures:
    """What the golden file holds of a build; spills are not in it, they are refused."""
    info, facts = made.info, made.facts
    of_tensor_cores: dict[str, Any] = {
        name: facts[name] for name in ("tmem_columns", "tmem_columns_used", "mbarriers") if name in facts
    }
    if "products" in facts:  # (M, N, number) of each kind
        of_tensor_cores["mmas_per_tile"] = sum(facts["products"][2::3])
    return {
        "registers": info["registers"],
        "stack": info["stack"],
        "smem": info["static_smem"] + facts.get("smem_bytes", 0),
        "barriers": info["barriers"],
        **of_tensor_cores,
    }


@functools.cache
def golden() -> dict[str, dict[str, Figures]]:
    """Exact version of NVRTC -> name of the cubin -> figures."""
    found: dict[str, dict[str, Figures]] = json.loads(GOLDEN.read_text())
    return found


@functools.cache
def verified() -> dict[str, str]:
    """The fingerprints of kernels when all of their builds were made."""
    found: dict[str, str] = json.loads(VERIFIED.read_text())
    return found


@functools.cache
def fingerprint(kernel: str) -> str:
    """All that decides what the tests find in a kernel's builds.

    Not the comments and the spacing of its sources, nor functions of headers that it does not use.
    """
    spec = KERNELS[kernel]
    total = hashlib.sha256()
    for name, text in sorted(used({name: code(text) for name, text in sources.gather(spec.source).items()}).items()):
        total.update(f"{name}\n".encode() + text)
    targets = [target for target in TARGETS if target.kernel == kernel]
    for target in targets:
        figures = [lines.get(target.name) for lines in golden().values()]
        request = spec.request(target.variant, target.arch)
        record = FORMATS[target.variant.record] if hasattr(target.variant, "record") else None
        total.update(repr((target.name, options(request), target.variant, spec.facts_of(target.variant))).encode())
        total.update(repr((record, figures)).encode())
    installed = [_installed(line) for line in LINES]
    total.update(repr((spec.entry, sorted(spec.facts.items()), spec.layout.offsets(), installed)).encode())
    return total.hexdigest()[:16]


@functools.cache
def code(text: bytes) -> bytes:
    """A source without comments and empty lines, and each line without superfluous blanks but the first one."""
    lines = _COMMENT.sub(lambda match: match[1] or b" ", text).splitlines()
    return b"\n".join(line[:1].replace(b"\t", b" ") + b" ".join(line[1:].split()) for line in lines if line.strip())


def used(texts: Mapping[str, bytes]) -> dict[str, bytes]:
    """Sources without the device functions whose names nothing else has that is used.

    A function is told by its form: from the beginning of a line to the end of that line, or to the next "}" that
    begins one. Whatever looks otherwise counts as used.
    """
    functions = [match for text in texts.values() for match in _FUNCTION.finditer(text)]
    known = set(_WORD.findall(b"\n".join(_FUNCTION.sub(b"", text) for text in texts.values())))
    size = 0
    while size != len(known):
        size = len(known)
        known.update(*(_WORD.findall(match[0]) for match in functions if match[1] in known))
    kept = {
        name: _FUNCTION.sub(lambda match: match[0] if match[1] in known else b"", text) for name, text in texts.items()
    }
    return {name: text.rstrip() for name, text in kept.items()}


@functools.cache
def _installed(line: int) -> str:
    try:
        return importlib.metadata.version(PACKAGES[line])
    except importlib.metadata.PackageNotFoundError:
        return ""
