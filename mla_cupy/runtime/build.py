"""Placeholder replaced by the runtime."""
from dataclasses import dataclass
@dataclass(frozen=True)
class BuildRequest:
    entry: str
    source: str
    arch: str
    defines: tuple[tuple[str, str], ...]
    label: str
