"""Shared by the tests of callers' mistakes: spoiled calls, and their errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import mla_cupy
from mla_cupy import DTypeError, MlaError
from mla_cupy.arrays import NumpyFamily
from tests.support.gpu import upload

Call = dict[str, Any]
#: Arguments that results are written to.
RESULTS = ("out", "lse", "max_logits", "dq", "dkv", "d_sink", "indices", "counts", "values")


_MAX_COMPARED_BYTES = 1 << 28
"""Limit of what is compared; a larger input was made by broadcasting, and its bytes would not fit in memory."""


class Foreign:
    """An array of an unknown library, on a GPU."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("the memory of an array that does not fit must not be asked for")


class HostForeign(Foreign):
    """A foreign array on a CPU."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class Bad(NamedTuple):
    """One mistake: what it does to a good call, and what the error must say."""

    id: str
    change: Callable[[Call], object]
    error: type[Exception]
    words: tuple[str, ...]


def swap(name: str, make: Callable[[Any], Any]) -> Callable[[Call], object]:
    """Replace an argument by what `make` makes of it."""

    def change(call: Call) -> None:
        call[name] = make(call.get(name))

    return change


def option(name: str, value: Any) -> Callable[[Call], object]:
    return lambda call: call.update({name: value})


def gapped(x: Any) -> Any:
    """Equal values, the last axis in steps of 2 elements."""
    return np.repeat(x, 2, axis=-1)[..., ::2]


def shifted(x: Any) -> Any:
    """An equal shape, one element past a multiple of 16 bytes."""
    whole = np.zeros(x.size + 16, x.dtype)
    return whole[1 : 1 + x.size].reshape(x.shape)


def raises(bad: Bad, function: Callable[..., Any], call: Call, place: str) -> None:
    """The error is the expected one, and the arrays for the results are unchanged."""
    bad.change(call)
    if place == "cupy":
        call = {name: upload(x) if isinstance(x, np.ndarray) and name != "scale" else x for name, x in call.items()}
    results = [name for name in RESULTS if getattr(call.get(name), "nbytes", 1 << 62) <= _MAX_COMPARED_BYTES]
    before = {name: bytes(call[name].tobytes()) for name in results}
    with pytest.raises(bad.error) as caught:
        function(**call)
    assert isinstance(caught.value, MlaError)
    message = str(caught.value)
    for word in ("got", "expected", *bad.words):
        assert word in message, f"{word!r} is not in {message!r}"
    prints_no_record(message)
    for name, content in before.items():
        assert bytes(call[name].tobytes()) == content, f"{name} was written"


@cache
def _records() -> re.Pattern[str]:
    """A record of the package, as Python prints it; those that callers make themselves are none of its affair."""
    sources = Path(mla_cupy.__file__).parent.rglob("*.py")
    names = {name for path in sources for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)}
    return re.compile(rf"\b({'|'.join(sorted(names - set(mla_cupy.__all__)))})\(")


def prints_no_record(message: str) -> None:
    """An error speaks of arguments, not of the package's records of them."""
    assert not _records().search(message), message


def refuses_what_it_cannot_write(
    function: Callable[..., Any], call: Call, results: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the results is refused from a library with immutable arrays, which NumPy's stand in for."""
    monkeypatch.setattr(NumpyFamily, "mutable", False)
    for name in results:
        given = {argument: x for argument, x in call.items() if argument == name or argument not in results}
        with pytest.raises(
            DTypeError, match=rf"^(\w+\.)?{name}: got an array of numpy.*, expected None; .* are immutable"
        ):
            function(**given)
