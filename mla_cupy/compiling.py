"""Compilation of several kernels with progress, and a table row for each, shared by all commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mla_cupy.runtime import loader
from mla_cupy.runtime.build import BuildRequest
from mla_cupy.terminal import progress


def compile_all(requests: Sequence[BuildRequest], jobs: int, *, quiet: bool = False) -> list[loader.Outcome]:
    """Build `requests`, up to `jobs` at a time, and show on standard error how far it is; see `loader.build_all`."""
    with progress("compiling", len(requests), quiet=quiet) as advance:
        return loader.build_all(requests, jobs, lambda request, outcome: advance(request.name, outcome is not None))


def outcome_row(outcome: loader.Outcome) -> dict[str, Any]:
    """Registers, shared memory in bytes, spills, seconds and state of one build, as plain data."""
    request = outcome.request
    row = {"kernel": request.entry.removeprefix("mla_"), "variant": request.label, "target": request.arch}
    if outcome.build is None:
        return {**row, **dict.fromkeys(("registers", "smem", "spills", "stack", "seconds"), "-"), "state": "failed"}
    info = outcome.build.info
    return {
        **row,
        "registers": info["registers"],
        "smem": outcome.build.smem_bytes,
        "spills": info["spill_stores"] + info["spill_loads"],
        "stack": info["stack"],
        "seconds": info["seconds"],
        "state": "cached" if outcome.was_cached else "not kept" if outcome.cache_error else "compiled",
    }
