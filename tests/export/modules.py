"""The modules that several tests share, recorded once in a process; their builds are fake."""

from __future__ import annotations

import functools

from mla_cupy.export import module
from mla_cupy.export.module import Module
from mla_cupy.export.operations import exported, subject_of
from tests.export import package


@functools.cache
def made(operation: str, archs: tuple[str, ...], arrays: tuple[str, ...] = (), **options: int | str) -> Module:
    """A module of an operation, by the options of the command line."""
    subject = subject_of(operation, options, arrays)
    targets = tuple(exported(operation).record(subject, arch).target for arch in archs)
    return module.built("mla_", subject, targets, package.fake_build)


def decode() -> Module:
    """Dense decode of 16 heads, for Hopper and for the A100."""
    return made("decode", ("sm_90a", "sm_80"), h_q=16, page_size=64)


def merge() -> Module:
    """The smallest module."""
    return made("merge_states", ("sm_90a",), h_q=16)
