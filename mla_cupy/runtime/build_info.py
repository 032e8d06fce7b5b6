"""Check the information about a compiled kernel. It comes from a disk, so nothing is taken for granted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mla_cupy.runtime.build import VIRTUAL, entries, facts


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9


def _are_defines(value: object) -> bool:
    return isinstance(value, list) and all(_are_texts(define) and len(define) == 2 for define in value)


_FIELDS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("name", "entry", "source", "arch", "label", "source_digest", "nvrtc", "image_key"), _is_text),
    **dict.fromkeys(("registers", "spill_stores", "spill_loads", "stack", "static_smem", "barriers"), _is_count),
    **dict.fromkeys(("options", "notes"), _are_texts),
    "defines": _are_defines,
    "seconds": _are_seconds,
}


def problem(info: dict[str, Any], cubin: bytes, ptx: bytes) -> str:
    """Explain why `info` does not describe `cubin`, or `ptx` for a virtual target; "" if it does.

    A field is missing, has another type than `build` writes, or contradicts the cubin: a kernel that is launched with
    wrong facts computes wrong numbers.
    """
    for name, is_right in _FIELDS.items():
        if name not in info:
            return f"its build info has no {name}"
        if not is_right(info[name]):
            return f"its build info has a wrong {name}"
    try:
        if bool(cubin) == info["arch"].startswith(VIRTUAL):
            return "it has a cubin although its target is virtual" if cubin else "its cubin is empty"
        found, known = entries(cubin, ptx), facts(cubin, ptx)
    except ValueError as error:
        return f"its cubin is {error}"
    if found != [info["entry"]]:
        return "its cubin has other entries than its build info"
    return "" if info.get("facts") == known else "its cubin has other facts than its build info"
