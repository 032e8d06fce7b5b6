"""The exceptions of mla_cupy.

Every error about a call names the argument, the value, the expected values and the remedy, and is raised before any
kernel is launched. Each kind is also the built-in exception that a caller would expect.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

_MOST_LETTERS = 400
"""Letters of a value that a message prints."""


class MlaError(Exception):
    """Base of every exception that mla_cupy raises on purpose."""


class ArgumentError(MlaError, ValueError):
    """An argument has a value that the call does not support."""


class ShapeError(ArgumentError):
    """An array has the wrong rank, shape or strides."""


class DTypeError(MlaError, TypeError):
    """An array has the wrong dtype, or comes from a library that the call does not support."""


class DeviceError(ArgumentError):
    """An array or a stream is on the wrong device, or arrays of different libraries are mixed."""


class PlanError(ArgumentError):
    """A plan does not fit the call."""


class CacheFullError(MlaError, RuntimeError):
    """A paged cache has no free page."""


class KernelNotBuiltError(MlaError, RuntimeError):
    """A kernel is not in the cache and may not be compiled now."""


class KernelCompileError(MlaError, RuntimeError):
    """NVRTC is missing or too old, refused a kernel, or produced code that the build does not accept."""


class UnsupportedDeviceError(MlaError, RuntimeError):
    """There is no GPU, or no kernel supports it."""


class ParallelError(MlaError, RuntimeError):
    """Another rank of a group is gone, has made another call, or an exchange with it has failed."""


def kind_of(value: object) -> str:
    """Name a value's type, with its article: "a list", "an int", "None"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def either(choices: Sequence[object]) -> str:
    """List the allowed values, each once: "1", "1 or 2", "1, 2 or 3"."""
    *others, last = dict.fromkeys(map(str, choices))
    return f"{', '.join(others)} or {last}" if others else last


def nearest(name: str, known: Iterable[str], remedy: str) -> str:
    """Return the remedy for a name that is not known: the one that was probably meant, or else `remedy`."""
    found = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {found[0]!r}?" if found else remedy


def explain(argument: str, got: object, expected: str, remedy: str = "") -> str:
    """The one form of message: argument, got, expected, remedy."""
    message = f"{argument}: got {_in_short(got)}, expected {expected}"
    return f"{message}; {remedy}" if remedy else message


def _in_short(got: object) -> str:
    """Print a value on one line; only the beginning of a long one, such as an array instead of a number."""
    text = str(got)
    if "\n" in text or len(text) > _MOST_LETTERS:
        text = " ".join(text.split())
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


def renamed(error: MlaError, names: Mapping[str, str]) -> MlaError:
    """Return the same error with the caller's names; a name may have parts, as in "fp8.q_scale"."""

    def known(found: re.Match[str]) -> str:
        parts = found[0].split(".")
        for count in range(len(parts), 0, -1):
            if (name := ".".join(parts[:count])) in names:
                return names[name] + found[0][len(name) :]
        return found[0]

    subject, colon, rest = str(error).partition(": ")
    return type(error)(re.sub(r"\w+(?:\.\w+)*", known, subject) + colon + rest)
