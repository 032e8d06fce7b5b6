"""Places in CUDA sources, by the numbers that traced kernels give them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_WORD = 0xFFFFFFFF
_BASIS, _PRIME = 2166136261, 16777619
"""Constants of FNV-1a."""
_CALL = re.compile(r"\b(?P<name>\w*(?:wait|sync)\w*)(?P<template>(?:<[^<>()]*>)?)\((?P<arguments>.*)")
_FUNCTION = re.compile(
    r"^\s*(?:template.*>\s*)?(?:MLA_DEVICE|extern \"C\" __global__)\b.*?(\w+(?:\(\))?)\(|^\s+(mla_\w+)\("
)


@dataclass(frozen=True)
class Site:
    """A call that waits: its file, its line, its text, and the function that it is in."""

    file: str
    line: int
    text: str
    function: str

    def __str__(self) -> str:
        return f"{self.text} ({self.file.rpartition('/')[2]}:{self.line})"


UNKNOWN = Site("?", 0, "unknown", "")


def number(file: str, line: int) -> int:
    """Return the number of a line, as `Site` in `trace/waits.cuh` computes it."""
    value = _BASIS
    for byte in file.encode():
        value = (value ^ byte) * _PRIME & _WORD
    return (value ^ line) * _PRIME & _WORD


def sites(files: Mapping[str, bytes]) -> dict[int, Site]:
    """Return every line of the sources by its number.

    Parameters
    ----------
    files : mapping
        Texts by name, as a build request has them.
    """
    return {number(site.file, site.line): site for name, text in files.items() for site in _of_file(name, text)}


def _of_file(name: str, text: bytes) -> Iterable[Site]:
    function = ""
    for line, code in enumerate(text.decode().splitlines(), 1):
        if match := _FUNCTION.match(code):
            function = match[1] or match[2]
        yield Site(name, line, _call(code), function)


def _call(code: str) -> str:
    """Return the call that waits, with its arguments but the parity of a phase; a line without one as it is."""
    match = _CALL.search(code)
    if match is None:
        return code.strip()
    inside = _up_to_end(match["arguments"])
    if match["name"] == "mbarrier_wait":
        inside = inside.rpartition(", ")[0] or inside
    return f"{match['name']}{match['template']}({inside})"


def _up_to_end(text: str) -> str:
    """Return the text up to the parenthesis that closes a call."""
    depth = 0
    for at, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            return text[:at]
    return text
