"""The parts of PyTorch and CuPy that the peers' adapters use, made of NumPy."""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np


class Tensor(np.ndarray):
    """NumPy's array with methods of PyTorch's; "float8" is its dtype of that name."""

    device = "cpu"

    def unsqueeze(self, axis):
        return np.expand_dims(self, axis).view(Tensor)

    def expand(self, *sizes):
        shape = [size if size > 0 else own for size, own in zip(sizes, self.shape, strict=True)]
        return np.broadcast_to(self, shape).view(Tensor)

    def transpose(self, *axes):
        return np.swapaxes(self, *axes).view(Tensor) if len(axes) == 2 else super().transpose(*axes)

    def contiguous(self):
        return np.ascontiguousarray(self).view(Tensor)

    def requires_grad_(self):
        return self

    def reshape(self, *shape):
        return np.asarray(self).reshape(*shape).view(Tensor)

    def view(self, kind=None, *more):
        return super().view(ml_dtypes.float8_e4m3fn if isinstance(kind, str) and kind == "float8" else kind or Tensor)

    def to(self, dtype):
        return self.astype(dtype)

    def float(self):
        return self.astype(np.float32)

    def sum(self, *axes, dim=None, **options):
        return super().sum(*axes, **options if dim is None else {"axis": dim})

    def numel(self):
        return self.size

    def element_size(self):
        return self.itemsize


def tensor(array: Any) -> Tensor:
    """An array as a tensor."""
    return np.asarray(array).view(Tensor)


def pad(array: Any, widths: Any) -> Tensor:
    """Pad the last two axes, the last one first."""
    rest = [(0, 0)] * (array.ndim - len(widths) // 2)
    return tensor(np.pad(array, [*rest, *zip(widths[-2::-2], widths[-1::-2], strict=True)]))


def install(monkeypatch, **modules):
    """Put PyTorch, CuPy and further modules, "." in their names as "__", where they are imported; PyTorch."""
    torch, cupy = types.ModuleType("torch"), types.ModuleType("cupy")
    torch.__version__, torch.float8_e4m3fn = "0", "float8"
    torch.from_dlpack, cupy.from_dlpack = tensor, np.asarray
    torch.cuda = SimpleNamespace(ExternalStream=int, stream=lambda stream: nullcontext())
    torch.nn = SimpleNamespace(functional=SimpleNamespace(pad=pad))
    torch.ops = SimpleNamespace(load_library=lambda path: None)
    for name, module in {"torch": torch, "cupy": cupy, **modules}.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)
    return torch
