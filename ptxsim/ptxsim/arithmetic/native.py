"""Hot arithmetic in C: ``native.c`` as universal functions of NumPy, with no more overhead than NumPy's own.

The machine's C compiler builds it at the first use, once for each version of the source. Where there is no compiler, or
``PTXSIM_NATIVE=0`` says so, the functions of :mod:`~.numeric` and :mod:`~.formats` do the same, slower; they are also
what tests compare with.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import formats, numeric

_SOURCE = Path(__file__).with_name("native.c")
#: Positions in NumPy's table of C functions, which are part of its binary interface.
_FROM_LOOPS, _FROM_LOOPS_AND_SIGNATURE = 1, 31
_FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-lm")
_kept: list[Any] = []
"""Objects that NumPy's functions refer to and do not own."""


def _built() -> Path | None:
    """Return the library, built on first use; None if it cannot be built."""
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if os.environ.get("PTXSIM_NATIVE") == "0" or platform.system() != "Linux" or compiler is None:
        return None
    known = repr((_SOURCE.read_text(), _FLAGS, platform.machine()))
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptxsim"
    final = root / f"native-{hashlib.sha256(known.encode()).hexdigest()[:16]}.so"
    if final.is_file():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:
            made = Path(folder, "native.so")
            subprocess.run([*compiler.split(), str(_SOURCE), *_FLAGS, "-o", str(made)], check=True, capture_output=True)
            os.replace(made, final)
    except (OSError, subprocess.CalledProcessError):
        return None
    return final


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(path)) if (path := _built()) else None
    except OSError:
        return None


def available() -> bool:
    """Tell whether there is a library."""
    return _library() is not None


def _core() -> Any:
    """Return the module of NumPy that has the table of C functions."""
    try:
        return importlib.import_module("numpy._core._multiarray_umath")
    except ImportError:  # NumPy 1.x
        return importlib.import_module("numpy.core._multiarray_umath")


def _maker(index: int, *arguments: Any) -> Callable:
    """Return a function of NumPy's table that makes universal functions."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(pointer(_core()._UFUNC_API, None), ctypes.POINTER(ctypes.c_void_p))
    number, text, void = ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, void, void, void, *[number] * 4, text, text, number, *arguments)
    return kind(table[index])


def _universal(loops: dict[str, str], name: str, signature: str = "", data: int | None = None) -> Callable:
    """Return the universal function of some loops.

    Parameters
    ----------
    loops : dict
        Types of the operands, such as "f4 f4 f4" with the result last, and the loop of the library for them.
    signature : str, optional
        Core dimensions of a function of whole vectors.
    data : int, optional
        Address that the loop is given.
    """
    library = _library()
    addresses = [ctypes.cast(getattr(library, loop), ctypes.c_void_p).value for loop in loops.values()]
    functions = (ctypes.c_void_p * len(loops))(*addresses)
    given = (ctypes.c_void_p * len(loops))(*[data] * len(loops))
    codes = [np.dtype(each).num for types in loops for each in types.split()]
    kinds = (ctypes.c_char * len(codes)).from_buffer_copy(bytes(codes))
    label = ctypes.create_string_buffer(name.encode())
    form = ctypes.create_string_buffer(signature.encode())
    _kept.extend((functions, given, kinds, label, form))
    outputs = signature.partition("->")[2].count("(") or 1
    counts = len(loops), len(codes) // len(loops) - outputs, outputs, -1
    first = ctypes.addressof(functions), ctypes.addressof(given), ctypes.addressof(kinds), *counts, label, label, 0
    if signature:
        return _maker(_FROM_LOOPS_AND_SIGNATURE, ctypes.c_char_p)(*first, form)
    return _maker(_FROM_LOOPS)(*first)


def _of_widths(name: str) -> dict[str, str]:
    """Return the loops of a function of two integers of one type; a shift's second operand is u32."""
    kinds = [(letter, size) for size in (2, 4, 8) for letter in "ui"]
    second = "u4" if name in ("left", "right") else ""
    return {f"{k}{n} {second or f'{k}{n}'} {k}{n}": f"{name}_{'s' if k == 'i' else 'u'}{8 * n}" for k, n in kinds}


_LOOPS = {
    "fma32": {"f4 f4 f4 f4": "fma32"},
    "flush": {"f4 f4": "flush"},
    "fmin32": {"f4 f4 f4": "fmin32"},
    "fmax32": {"f4 f4 f4": "fmax32"},
    "to_bf16": {"f4 u2": "to_bf16"},
    "int_div": _of_widths("div"),
    "int_rem": _of_widths("rem"),
    "shift_left": _of_widths("left"),
    "shift_right": _of_widths("right"),
}
ORACLES: dict[str, Callable] = {
    "fmin32": numeric.fmin,
    "fmax32": numeric.fmax,
    "to_bf16": formats.to_bf16,
    **{name: getattr(numeric, name) for name in _LOOPS if hasattr(numeric, name)},
}
"""Functions of NumPy that compute the same."""
FUNCTIONS = {name: _universal(loops, name) for name, loops in _LOOPS.items()} if available() else ORACLES
"""The functions in C, or in NumPy where there is no library."""


class MmaForm(ctypes.Structure):
    """Arguments of the loop of mma.sync, as ``native.c`` has them."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "depth", "bits", "whole", "clamp", "nan")),
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
    ]


def mma(form: MmaForm, tables: Sequence[np.ndarray], inputs: int, outputs: int) -> Callable:
    """Return the universal function of an mma.sync: words of 32 lanes of all operand registers to the words of D.

    Parameters
    ----------
    form : MmaForm
        Shape and types; ``nan`` tells of the last call.
    tables : sequence of ndarray
        Values of all elements of A and of B by their bits, float32; none for tf32.
    inputs, outputs : int
        Numbers of registers.
    """
    form.a, form.b = (table.ctypes.data for table in tables) if tables else (None, None)
    _kept.extend((form, *tables))
    signature = ",".join(["(l)"] * inputs) + "->" + ",".join(["(l)"] * outputs)
    return _universal({" ".join(["u4"] * (inputs + outputs)): "mma"}, "mma", signature, ctypes.addressof(form))
