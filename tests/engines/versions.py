"""The versions of the engines that are downloaded unless others are asked for."""

from __future__ import annotations

from mla_cupy.integrations.versions import DATE, VERSIONS

__all__ = ["DATE", "FOR_TORCH_2_11", "VERSIONS", "pinned"]

FOR_TORCH_2_11 = {"vllm": "0.26.0", "sglang": "0.5.17"}
"""The newest of each whose own pin is PyTorch 2.11."""


def pinned(engine: str) -> tuple[str, ...]:
    """The oldest, the one for PyTorch 2.11, and the newest."""
    versions = VERSIONS[engine]
    return versions[0], FOR_TORCH_2_11[engine], versions[-1]
