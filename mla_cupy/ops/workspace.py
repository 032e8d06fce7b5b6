"""Workspaces that the caller lends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mla_cupy.arrays import Native, View
from mla_cupy.errors import ArgumentError, DeviceError, ShapeError, explain
from mla_cupy.kernels.pipeline import ALIGNMENT
from mla_cupy.ops import overlap
from mla_cupy.ops.entry import Plan


def check_workspace(
    native: Native, lent: Mapping[str, Any], device: int, workspace: Any, plan: Plan | None, nbytes: int
) -> None:
    """Check the workspace of a call that needs `nbytes` on `device`; it must not overlap the other arrays, `lent`.

    Raises
    ------
    ShapeError, DeviceError, ArgumentError
    """
    if plan is not None:
        raise ArgumentError(explain("workspace", "an array, with a plan", "None: the plan has its own"))
    view = native.view(workspace, "workspace")
    check_memory(view, nbytes, device)
    present = {name: native.view(x, name) for name, x in lent.items() if x is not None}
    overlap.check_apart({"workspace": view, **present}, ["workspace"])


def check_memory(view: View, nbytes: int, device: int) -> None:
    """Check a workspace: a contiguous, aligned vector of at least `nbytes` bytes on `device`.

    Raises
    ------
    ShapeError, DeviceError, ArgumentError
    """
    if view.device != device:
        raise DeviceError(explain("workspace's device", view.device, str(device), "move it"))
    if view.dtype != "uint8" or len(view.shape) != 1 or (view.strides != (1,) and view.shape[0] > 1):
        raise ShapeError(explain("workspace", f"{view.dtype} {view.shape}", "a contiguous vector of uint8"))
    if view.shape[0] < nbytes:
        remedy = "`mla_cupy.workspace_bytes` tells how many"
        raise ShapeError(explain("workspace.shape[0]", view.shape[0], f"at least {nbytes} bytes", remedy))
    if view.ptr % ALIGNMENT:
        raise ShapeError(explain("workspace's address", hex(view.ptr), f"a multiple of {ALIGNMENT}"))
