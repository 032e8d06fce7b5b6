"""The environment variables of mla_cupy: the only file that reads them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from mla_cupy.errors import ArgumentError, explain

_PREFIX = "MLA_CUPY_"


@dataclass(frozen=True)
class Variable:
    """One variable, without its prefix `MLA_CUPY_`; `choices` is empty where any text is good.

    In front of a path "~" is the home directory: not every shell expands it in an assignment, and no other caller does.
    """

    name: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()
    is_path: bool = False

    @property
    def full_name(self) -> str:
        return _PREFIX + self.name


VARIABLES: Mapping[str, Variable] = {
    variable.name: variable
    for variable in (
        Variable(
            "CACHE_DIR", "", "where compiled kernels are kept (default: the user's cache directory)", is_path=True
        ),
        Variable(
            "CUBIN_DIR",
            "",
            "read-only directory of prebuilt kernels, made by `mla-cupy compile --out DIR`; its owner is trusted",
            is_path=True,
        ),
        Variable(
            "JIT",
            "import",
            "import: compile the core kernels from import on, in a child process; lazy: compile at the first call; "
            "off: never compile",
            ("import", "lazy", "off"),
        ),
        Variable(
            "NVRTC",
            "",
            "path of the libnvrtc to compile with (default: the installed wheel, then the system)",
            is_path=True,
        ),
        Variable("CUDA_SRC", "", "directory of the CUDA sources (default: the package's)", is_path=True),
        Variable("LINEINFO", "0", "1: kernels carry source lines for profilers", ("0", "1")),
        Variable(
            "TMEM_CHECK", "0", "1: Blackwell kernels stop at wrong accesses to tensor memory, and are slow", ("0", "1")
        ),
        Variable(
            "SMEM_KB",
            "all",
            "shared memory that a block may have: all: what the GPU has; 99: at most 99 KB, to test and measure the "
            "builds for GPUs with no more",
            ("all", "99"),
        ),
        Variable(
            "ADMISSION",
            "record",
            "where kernels that have never run on hardware run by default: record: where `mla-cupy selftest` has "
            "passed; all: everywhere; none: nowhere",
            ("record", "all", "none"),
        ),
        Variable("DEBUG", "0", "1: a kernel whose bounded wait for another GPU has timed out traps", ("0", "1")),
        Variable(
            "CHECK",
            "0",
            "1: calls look at the values of their arrays, as in `mla_cupy.checking`; read at each kind's first call",
            ("0", "1"),
        ),
        Variable(
            "BACKEND",
            "auto",
            "where NumPy arrays are computed: cuda, numpy, or auto (the GPU if there is one)",
            ("auto", "cuda", "numpy"),
        ),
        Variable(
            "ENGINE_INDEXER",
            "engine",
            "indexer of sparse attention in vLLM: engine: its own, or mla_cupy: ours, where it has a place for it",
            ("engine", "mla_cupy"),
        ),
        Variable(
            "ENGINE_MATH",
            "exact",
            "products of the engines' plugins over caches in FP8: exact, in 16 bits, or fp8, see `mla_decode`",
            ("exact", "fp8"),
        ),
        Variable(
            "ENGINE_PREFILL",
            "mla_cupy",
            "prefill of dense attention in vLLM: by `mla_prefill` where it can, or engine: by vLLM's own",
            ("mla_cupy", "engine"),
        ),
        Variable(
            "VLLM",
            "dense",
            "what vLLM is offered: dense is CUSTOM, sparse also takes the place of FLASHMLA_SPARSE",
            ("dense", "sparse"),
        ),
    )
}


def get(name: str) -> str:
    """The value of `MLA_CUPY_<name>`, or its default where it is unset or empty.

    Raises
    ------
    ArgumentError
        If the variable has a fixed set of values and holds another one.
    """
    variable = VARIABLES[name]
    value = os.environ.get(variable.full_name, "").strip() or variable.default
    if variable.choices and value not in variable.choices:
        expected = "one of " + ", ".join(variable.choices)
        raise ArgumentError(explain(f"environment variable {variable.full_name}", repr(value), expected))
    return os.path.expanduser(value) if variable.is_path else value


def problems() -> list[str]:
    """Mistakes in the variables: values that `get` refuses, and names with our prefix that nothing reads."""
    found = []
    for name in VARIABLES:
        try:
            get(name)
        except ArgumentError as error:
            found.append(str(error))
    names = [variable.full_name for variable in VARIABLES.values()]
    for unknown in sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in names):
        near = difflib.get_close_matches(unknown, names, 1)
        expected = near[0] if near else "one of " + ", ".join(names)
        found.append(explain("environment variable", unknown, expected, "it is ignored"))
    return found


def table() -> list[dict[str, str]]:
    """Every variable with its value now, its default and its meaning."""
    return [
        {
            "name": variable.full_name,
            "value": os.environ.get(variable.full_name, ""),
            "default": variable.default,
            "meaning": variable.meaning,
        }
        for variable in VARIABLES.values()
    ]


def nvrtc_flags() -> tuple[str, str]:
    """Flags that NVRTC itself adds to every compilation, from its own variables: they belong in the cache key."""
    return os.environ.get("NVRTC_PREPEND_FLAGS", ""), os.environ.get("NVRTC_APPEND_FLAGS", "")


def cuda_roots() -> tuple[str, ...]:
    """Directories of CUDA toolkits that the user has named."""
    return tuple(value for name in ("CUDA_HOME", "CUDA_PATH") if (value := os.environ.get(name, "")))


def child_environment() -> dict[str, str]:
    """The environment for a compiling process: ours, except that it must not start further compilers."""
    return {**os.environ, VARIABLES["JIT"].full_name: "lazy"}


def gpus_hidden() -> bool:
    """True if CUDA_VISIBLE_DEVICES hides every GPU from this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.strip() in ("", "-1")


def user_cache_home() -> str:
    """Directory of the user's caches, by the XDG rules."""
    return os.environ.get("XDG_CACHE_HOME", "") or os.path.expanduser("~/.cache")
