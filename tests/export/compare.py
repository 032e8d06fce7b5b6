"""Comparison of an exported module with the package, on random calls."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from mla_cupy.errors import MlaError
from mla_cupy.runtime.device import DeviceInfo
from tests.export import draws, package
from tests.export.library import Library, filled
from tests.export.package import Call


def opened(library: Library, gpus: Sequence[DeviceInfo]) -> dict[DeviceInfo, Any]:
    """The module, opened on each GPU."""
    return {gpu: library.open(gpu) for gpu in gpus}


def calls(library: Library, gpus: Sequence[DeviceInfo], limits: dict[str, int], count: int) -> int:
    """Make calls in C and in Python: both launch the same bytes, or refuse with the same words.

    Returns how many launched something.
    """
    handles, subject, launched = opened(library, gpus), library.module.subject, 0
    rng = random.Random(34)
    with package.writing(library.parameters) as writer:
        for _ in range(count):
            gpu = rng.choice(gpus)
            values = draws.values(subject, rng, limits)
            call, args, refused = Call(subject, values), filled(library.Args, values), ""
            try:
                call.run(gpu)
            except MlaError as error:
                refused = str(error)
            status = library.call("call", handles[gpu], args)
            log = library.log()
            assert (status == 0) == (not refused), (values, refused, library.why())
            assert log == writer.take(), values
            launched += bool(log)
            if refused:
                assert library.why() == refused, values
            else:
                assert library.size("workspace", handles[gpu], args) == call.nbytes(gpu), values
    return launched


def wrong_calls(library: Library, gpu: DeviceInfo, limits: dict[str, int], count: int) -> None:
    """Make calls with a mistake each: none launches anything, and each is told why."""
    handle, subject = library.open(gpu), library.module.subject
    rng = random.Random(36)
    reasons = set()
    library.log()
    for _ in range(count):
        values = draws.values(subject, rng, limits)
        draws.spoil(subject, values, rng)
        args = filled(library.Args, values)
        status = library.call("call", handle, args)
        assert status < 0, values
        assert library.log() == b""
        why = library.why()
        assert ": got " in why or "memory" in why, why
        reasons.add(why.partition(":")[0])
    assert len(reasons) > len(subject.arrays)
