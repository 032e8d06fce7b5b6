"""Host side of `sparse_backward/sm100_ws.cu`."""

from __future__ import annotations

from dataclasses import replace

from mla_cupy.kernels.sparse_backward import sm100
from mla_cupy.kernels.sparse_backward.problem import DkvOrder

KERNEL = replace(
    sm100.KERNEL,
    name="sparse_backward_sm100_ws",
    about="the same with weight-stationary products, in 464 columns of tensor memory, for comparison",
    source="sparse_backward/sm100_ws.cu",
    core=(),
    on_request=True,
    dkv_order=DkvOrder.SM90,  # rows of keys come out of tensor memory in Hopper's fragments
)
