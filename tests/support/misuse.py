"""Values that callers pass by mistake, and the allowed reactions: for all misuse fuzzers.

Fuzzers of operations and plans are in `tests/operations`, of the paged cache in `tests/cache`, of the bindings in
`tests/bindings`; ptxsim, a package of its own, has one for its command line. Seeds are fixed: every run makes the same
calls. Ordinary runs make some 5,000 together, `-m slow` more than 50,000.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest

from mla_cupy import MlaError, UnsupportedDeviceError, dtypes
from tests.support.mistakes import Call, Foreign, HostForeign, prints_no_record
from tests.support.operations import off_by_a_byte, stepped_by_bytes
from tests.support.recorder import Elsewhere

SECONDS = 20.0
"""Time limit of a call, far more than any needs."""


# ---- Kinds of values ------------------------------------------------------------------------------------------------


class Unequal:
    """Cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    __hash__ = None  # type: ignore[assignment]


class Lazy:
    """Has every attribute, as a mock has."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


NONSENSE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 3, 512, 2**31, 2**63, 2**70, -(2**70), 0.5, -0.5, 1e300, 1e-300, float("nan")),
    *(float("inf"), -float("inf"), 1j, "", "e", "2", "10", "float32", "bfloat16", "float16", "True", b"e", "q"),
    *([], [1], {}, (), set(), (1, 2), [[1.0]], range(3), slice(None), len, object(), object, type, Ellipsis),
    *(np.float32(0.5), np.float64(2), np.uint8(2), np.uint64(5), np.int32(1), np.int64(512), np.int8(100)),
    *(np.bool_(True), np.str_("e"), np.dtype("float32"), np.timedelta64(1, "D"), np.timedelta64(1, "s")),
    *(np.ctypeslib.as_ctypes(np.ones(3)), ctypes.c_int(3)),
    *(np.float32, np.float16, np.dtype("float64"), np.void, np.zeros(3), np.zeros(()), np.ones(1), np.zeros((2, 2))),
    *(np.zeros(0, np.uint8), np.zeros(3, object), np.zeros(3, "U3"), np.zeros(3, "M8[s]"), np.zeros(2, complex)),
    *(np.zeros(2, [("a", "i4")]), np.ma.zeros(3), np.array("e"), np.array([True]), np.zeros(3, "V0")),
    *(Foreign(), HostForeign(), Foreign, Unequal(), Lazy()),
    *({"topk": 3}, {"logits": None, "merge": "merge_states"}, {3: "q"}, (("topk", []),), ((),), {"prefix": []}),
    *([(0, 2, 1)], [[0, 1, 1]], ((0, 2, 2**63),), ((0, True, 1),), ([0, 2, 1],), np.array([[0, 2, 1]]), [(0, 2)]),
)


def spoil_array(rng: np.random.Generator, x: Any) -> Any:
    """Another array in its place, which may or may not do."""
    ways: tuple[Callable[[Any], Any], ...] = (
        lambda x: x[..., ::-1],
        lambda x: x[::-1],
        lambda x: x[::2],
        lambda x: x[..., ::2],
        lambda x: x.T,
        lambda x: x[None],
        lambda x: x[0],
        lambda x: x[:0],
        lambda x: x[..., :0],
        lambda x: x.reshape(-1),
        lambda x: x.reshape(-1)[0],
        lambda x: x.real.astype(rng.choice(["float64", "float32", "float16", "int64", "int32", "int8", "complex64"])),
        lambda x: x.astype(object),
        lambda x: x.astype(dtypes.numpy_dtype("float8_e4m3fn")),
        lambda x: x.view(np.uint8),
        lambda x: x.view([("a", x.dtype)]),
        lambda x: x.byteswap().view(x.dtype.newbyteorder()) if x.dtype.kind in "if" else x.view("V2"),
        lambda x: x.view(Elsewhere),
        lambda x: np.ma.masked_array(x),
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: np.lib.stride_tricks.as_strided(x, x.shape, (0,) * x.ndim),
        lambda x: np.lib.stride_tricks.as_strided(x, x.shape, tuple(max(1, s // 2) for s in x.strides)),
        off_by_a_byte,
        stepped_by_bytes,
        lambda x: np.resize(x, (*x.shape[:-1], x.shape[-1] + 1)),
        lambda x: np.resize(x, (x.shape[0] + 1, *x.shape[1:])),
        lambda x: np.asfortranarray(x),
        lambda x: x.tolist(),
        lambda x: memoryview(x.tobytes()),
        frozen,
        hostile,
    )
    if x.dtype.hasobject:
        return x  # what is no object must not become one
    while True:
        # Not everything can be done to every array.
        with contextlib.suppress(IndexError, ValueError, TypeError, StopIteration), np.errstate(all="ignore"):
            return ways[rng.integers(len(ways))](x)


def frozen(x: Any) -> Any:
    x = x.copy()
    x.flags.writeable = False
    return x


def hostile(x: Any) -> Any:
    """Values that nothing may trust."""
    wild = [-(2**31), 2**31 - 1, -1, 1 << 30] if x.dtype.kind == "i" else [np.nan, np.inf, -np.inf, 0.0]
    x = x.copy()
    places = x.reshape(-1)[:: max(1, x.size // 4)]
    places[...] = np.resize(wild, len(places))
    return x


def misused(
    rng: np.random.Generator, good: Call, results: Sequence[str], optional: Sequence[str], options: Sequence[str]
) -> Call:
    """A good call with up to three things changed.

    Parameters
    ----------
    rng : numpy.random.Generator
    good : dict
        Arrays by name, changed in place, and maybe options.
    results, optional : sequence of str
        Arrays that may be left out: results, and inputs.
    options : sequence of str
        The arguments beside the arrays.
    """
    call = good
    for name in results:
        if rng.random() < 0.5:
            call[name] = None
    absent = 0.3 * rng.integers(2)  # in every other call none: some arrays are good only with another
    for name in optional:
        if rng.random() < absent:
            call[name] = None
    for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 2, 2, 3, 3])):
        what = rng.random()
        arrays = [name for name, x in call.items() if type(x) is np.ndarray and name not in options]
        if what < 0.4 and arrays:
            name = str(rng.choice(arrays))
            call[name] = spoil_array(rng, call[name])
        elif what < 0.6 and arrays:
            call[str(rng.choice(arrays))] = nonsense(rng)
        elif what < 0.7 and len(arrays) > 1:
            one, other = rng.choice(arrays, 2, replace=False)
            call[str(one)] = call[str(other)]
        elif options:
            call[str(rng.choice(options))] = nonsense(rng)
    return call


def nonsense(rng: np.random.Generator) -> Any:
    """Any of the values."""
    return NONSENSE[rng.integers(len(NONSENSE))]


# ---- The judge ------------------------------------------------------------------------------------------------------


class Refused(NamedTuple):
    """A call that ended in an error that says what is wrong."""

    error: MlaError


class HangError(BaseException):
    """A call that did not end: no `except Exception` catches it."""


@contextlib.contextmanager
def within(seconds: float = SECONDS) -> Iterator[None]:
    """End what takes longer; in the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise HangError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(call: Callable[[], Any], names: Collection[str], kept: Iterable[Any] = (), about: object = "") -> Any:
    """Result of a call, or `Refused`.

    Parameters
    ----------
    call : callable
    names : collection of str
        Of its arguments: an error begins with one of them.
    kept : iterable
        Arrays that an error must leave as they were; what is no array of NumPy's is passed over.
    about : object
        For messages: the seed, say.

    Raises
    ------
    AssertionError
        If it fails in any other way than by an error of the package that names an argument.
    """
    arrays = [x for x in kept if type(x) is np.ndarray and x.dtype != object]
    before = [x.tobytes() for x in arrays]
    outcome = _outcome(call, about)
    if isinstance(outcome, Refused):
        says_what_is_wrong(outcome.error, names, about)
        for x, content in zip(arrays, before, strict=True):
            assert x.tobytes() == content, f"{about}: an array was written before the error: {outcome.error}"
    return outcome


def _outcome(call: Callable[[], Any], about: object) -> Any:
    try:
        with within():
            return call()
    except MlaError as error:
        return Refused(error)
    except AssertionError:
        raise
    except (Exception, HangError) as error:
        raise AssertionError(f"{about}: {type(error).__name__}: {error}") from error


def says_what_is_wrong(error: MlaError, names: Collection[str], about: object = "") -> None:
    """The message begins with an argument's name, says what was given and expected, and prints no record."""
    message = str(error)
    prints_no_record(message)
    if isinstance(error, UnsupportedDeviceError) and _OF_THE_MACHINE.match(message):
        return
    subject, _, rest = message.partition(": ")
    assert set(names).intersection(re.findall(r"[A-Za-z_]\w*", subject)), f"{about}: no argument: {message}"
    assert re.match("got .*expected ", rest, re.DOTALL), f"{about}: {message}"


_OF_THE_MACHINE = re.compile(
    r"device \d+: (this process sees|CuPy cannot use it)|no kernel fits: |MLA_CUPY_BACKEND: got"
)
"""Other texts that an error may begin with."""


def numbers(quick: int, slow: int) -> list[Any]:
    """Number of calls of a test, as parameters."""
    return [quick, pytest.param(slow, marks=pytest.mark.slow)]
