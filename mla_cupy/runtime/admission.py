"""Records of the kernels that the self-test has admitted: written by it, read once for each GPU of a process.

A kernel that has never run on hardware (`KernelSpec.unproven`) is chosen by default only where a record of a self-test
admits it. A record is valid under its conditions alone: the model of GPU, its driver, the version of the package and
the compiler; and for each kernel as long as it would be built from the same sources with the same options. Each set of
conditions has a separate file, so that machines that share a cache directory do not overwrite each other's.

A record decides which code runs, so one that another user could have written is not read (see `trust`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mla_cupy._version import __version__
from mla_cupy.errors import ArgumentError, KernelCompileError
from mla_cupy.runtime import cache, env, lock, nvrtc, trust
from mla_cupy.runtime.build import BuildRequest, options
from mla_cupy.runtime.device import EVERY_KERNEL, nvml_driver

logger = logging.getLogger("mla_cupy")

LAYOUT = "admitted-v1"
"""The directory of records inside a cache directory; its number changes when the meaning of a record does."""

IN_FORCE = "in force"
"""The state of a record that holds."""
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Conditions:
    """Conditions under which a record holds.

    Attributes
    ----------
    gpu, target : str
        The model, by its name in CUDA, and its compilation target.
    driver, mla_cupy : str
        Versions.
    compiler : str
        The identity of NVRTC, or the directory of prebuilt kernels; empty if there is neither.
    """

    gpu: str
    target: str
    driver: str
    mla_cupy: str
    compiler: str

    @classmethod
    def here(cls, gpu: str, target: str) -> Conditions:
        """Make this process's conditions, for a GPU of this machine."""
        return cls(gpu, target, nvml_driver(), __version__, _compiler())

    @property
    def file_name(self) -> str:
        """Name of the file with their record."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()
        return f"{self.target}-{digest[:24]}.json"


@dataclass(frozen=True)
class _Admitted:
    """A kernel in a record: one of its builds, and that build's inputs."""

    request: BuildRequest
    made_of: str

    @classmethod
    def now(cls, request: BuildRequest) -> _Admitted:
        parts = [cache.image_key(request), options(request), env.nvrtc_flags()]
        return cls(request, hashlib.sha256(json.dumps(parts).encode()).hexdigest())

    def is_current(self) -> bool:
        """True if the build would be made of the same today."""
        try:
            return self.now(self.request) == self
        except (ArgumentError, KernelCompileError):  # a wrong environment variable, a source that is missing
            return False


@dataclass(frozen=True)
class _Record:
    conditions: Conditions
    kernels: Mapping[str, _Admitted]


def admitted(gpu: str, target: str) -> frozenset[str]:
    """The kernels that are admitted on a GPU of this machine, by its name in CUDA and its target.

    `MLA_CUPY_ADMISSION` may admit all of them, or none.
    """
    said = env.get("ADMISSION")
    if said != "record":
        return EVERY_KERNEL if said == "all" else frozenset()
    directories = [path for path in _directories() if path.is_dir()]
    if not directories:  # as on all GPUs without such kernels: neither NVML nor NVRTC is looked for
        return frozenset()
    wanted = Conditions.here(gpu, target)
    found = (_read(directory / wanted.file_name) for directory in directories)
    return frozenset(
        name
        for record in found
        if record is not None and record.conditions == wanted
        for name, kernel in record.kernels.items()
        if kernel.is_current()
    )


def write(conditions: Conditions, passed: Mapping[str, BuildRequest], failed: Collection[str]) -> None:
    """Admit kernels, and withdraw others; the rest of the record stays.

    Parameters
    ----------
    conditions : Conditions
        Under which they ran.
    passed : mapping
        Name -> one of its builds.
    failed : collection of str
        Names.

    Raises
    ------
    OSError
        If nothing can be written, or the record is another user's.
    """
    entries = cache.places().write
    if entries is None:
        raise OSError(errno.EROFS, "no cache directory can be written")
    directory = entries.parent / LAYOUT
    trust.make_private(directory)
    trust.check_directory(directory, trust.trusted_owners())
    path = directory / conditions.file_name
    with lock.building(path):
        before = _read(path)
        kernels = dict(before.kernels) if before is not None and before.conditions == conditions else {}
        kernels.update({name: _Admitted.now(request) for name, request in passed.items()})
        _replace(path, _Record(conditions, {name: kernels[name] for name in kernels if name not in failed}))


def records() -> list[dict[str, Any]]:
    """Every record that can be read, as data, with its `state`: `IN_FORCE`, or why it is not."""
    driver, compiler = nvml_driver(), _compiler()
    return [
        {
            "gpu": record.conditions.gpu,
            "target": record.conditions.target,
            "driver": record.conditions.driver,
            "mla_cupy": record.conditions.mla_cupy,
            "kernels": sorted(record.kernels),
            "state": "; ".join(_differences(record, driver, compiler)) or IN_FORCE,
        }
        for directory in dict.fromkeys(_directories())
        for path in sorted(directory.glob("*.json"))
        if (record := _read(path)) is not None
    ]


def _differences(record: _Record, driver: str, compiler: str) -> Iterator[str]:
    """Differences between the conditions of a record and the present ones, as far as they are known without CUDA."""
    for what, then, now in (
        ("driver", record.conditions.driver, driver),
        ("mla_cupy", record.conditions.mla_cupy, __version__),
    ):
        if then != now:
            yield f"{what} {then}, here {now or 'none'}"
    if record.conditions.compiler != compiler:
        yield "another compiler"
    changed = sorted(name for name, kernel in record.kernels.items() if not kernel.is_current())
    if changed:
        yield "sources or options changed: " + ", ".join(changed)


def _directories() -> tuple[Path, ...]:
    return tuple(entries.parent / LAYOUT for entries in cache.find_places().read)


def _compiler() -> str:
    if given := env.get("CUBIN_DIR"):
        return os.path.realpath(given)
    try:
        return nvrtc.identity(nvrtc.find_nvrtc())
    except KernelCompileError:
        return ""


def _read(path: Path) -> _Record | None:
    """A record; None if it is missing, damaged or untrusted."""
    owners = trust.trusted_owners()
    try:
        trust.check_directory(path.parent, owners)
        found = json.loads(trust.read_file(path, owners, _MAX_BYTES))
        conditions = Conditions(**{name: str(value) for name, value in found["conditions"].items()})
        kernels = {name: _kernel(**kernel) for name, kernel in found["kernels"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.info("the record %s of admitted kernels is ignored: %s: %s", path, type(error).__name__, error)
        return None
    return _Record(conditions, kernels)


def _kernel(request: Mapping[str, Any], made_of: str) -> _Admitted:
    defines = tuple((str(name), str(value)) for name, value in request["defines"])
    texts = {name: str(request[name]) for name in ("entry", "source", "arch", "label")}
    return _Admitted(BuildRequest(**texts, defines=defines, spill_bytes=int(request["spill_bytes"])), str(made_of))


def _replace(path: Path, record: _Record) -> None:
    """Replace a record atomically; no other user can write it, whatever the umask."""
    fresh = path.with_name(f".new-{uuid.uuid4().hex}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(record), file, indent=1)
        os.replace(fresh, path)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
