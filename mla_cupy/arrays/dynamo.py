"""Exclusion of functions that launch kernels from tracing by `torch.compile`.

A marked function breaks the graph of its caller. Its callees also run uncompiled, once PyTorch has been imported:
PyTorch is never imported here, and may be imported after a function is marked.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

_REASON = (
    "it launches kernels itself; the function of that name of mla_cupy.torch is an operator, which a graph can hold"
)
_waiting: list[CodeType] = []
_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


def breaks_graphs(function: _F) -> _F:
    """Mark a function, as `torch.compiler.disable` does, but without a wrapper that every call would go through."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    runs_as_it_is(function)
    return function


def methods_break_graphs(kind: type[_T]) -> type[_T]:
    """Mark all methods of a class."""
    for member in vars(kind).values():
        if inspect.isfunction(member):
            breaks_graphs(member)
    return kind


def runs_as_it_is(function: _F) -> _F:
    """Mark a function: the frames of its calls, and of all that these call, are not compiled either."""
    _waiting.append(function.__code__)
    if "torch" in sys.modules:
        leave_alone()
    return function


def leave_alone() -> None:
    """Tell PyTorch about the marked functions; other versions may try to compile their callees."""
    frames: Any = sys.modules["torch"]
    for name in ("_C", "_dynamo", "eval_frame"):
        frames = getattr(frames, name, None)
    tell = getattr(frames, "set_code_exec_strategy", None)
    while _waiting and tell is not None:
        skip = frames._FrameAction.SKIP
        tell(_waiting.pop(), frames._FrameExecStrategy(skip, skip))


#: A compiler that traces a call calls it, too.
leave_alone._dynamo_marked_constant = True  # type: ignore[attr-defined]
