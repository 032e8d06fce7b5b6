"""The engine versions that the plugins were checked against; the newest are as of `DATE`."""

from __future__ import annotations

DATE = "2026-11-27"
VERSIONS = {
    "vllm": ("0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    "sglang": (
        *("0.5.13.post1", "0.5.14", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18"),
        *("0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
    ),
}


def known(engine: str, version: str) -> str:
    """Say whether a version is one of these."""
    tried = VERSIONS[engine]
    return "yes" if version in tried else f"no: {tried[0]} to {tried[-1]} have been tried, by {DATE}"
