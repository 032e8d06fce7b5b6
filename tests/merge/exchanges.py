"""Context-parallel ranks that share one memory: their partial results, mailboxes and states, and what must come out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mla_cupy import reference
from mla_cupy.arrays import NUMPY, View
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels.merge import exchange
from mla_cupy.kernels.merge.exchange import MAILBOX, REPORT, STATE, Exchange
from mla_cupy.kernels.merge.pipeline import MergeOptions
from mla_cupy.kernels.pipeline import Layout, Prepared
from mla_cupy.reference.lse import log_of_base
from mla_cupy.runtime.device import DeviceInfo

Array = np.ndarray[Any, Any]
NAN_BYTE = 0xFF


@dataclass
class Ranks:
    """All ranks of a group, on one GPU or none."""

    call: Exchange
    out_dtype: str = "float32"
    options: MergeOptions = field(default_factory=lambda: MergeOptions("e", float("-inf")))
    timeout_ns: int = 10**10

    def __post_init__(self) -> None:
        call, world = self.call, self.call.world
        self.slab = exchange.slab_bytes(call.rows, call.d, call.partial_dtype)
        self.slabs = np.full((world, exchange.slabs_bytes(world, self.slab)), NAN_BYTE, np.uint8)
        self.flags = np.zeros((world, exchange.flags_bytes(world) // 8), np.uint64)
        self.mailboxes = np.zeros(world, MAILBOX)
        self.states = np.zeros(world, STATE)
        self.reports = np.zeros(world, REPORT)
        heads = world * call.heads
        self.outs = np.zeros((world, call.b, call.s_q, heads, call.d), TABLE[call.partial_dtype].numpy)
        self.lses = np.zeros((world, call.b, heads, call.s_q), np.float32)
        self.out = np.zeros((world, call.b, call.s_q, call.heads, call.d), TABLE[self.out_dtype].numpy)
        self.lse = np.zeros((world, call.b, call.heads, call.s_q), np.float32)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """In the order of the kernel's addresses."""
        return (self.outs, self.lses, self.out, self.lse, self.mailboxes, self.states, self.reports)

    @property
    def views(self) -> tuple[View, View, View, View]:
        outs, lses, out, lse = (NUMPY.view(x) for x in self.arrays[:4])
        return outs, lses, out, lse

    def fill(self, seed: int) -> None:
        """Random partial results; one in four rows of a rank is empty, and then its output is NaN."""
        rng = np.random.default_rng(seed)
        self.outs[:] = rng.standard_normal(self.outs.shape).astype(np.float32)
        self.lses[:] = 20 * rng.standard_normal(self.lses.shape)
        empty = rng.random(self.lses.shape) < 0.25
        self.lses[empty] = rng.choice([np.inf, -np.inf], int(empty.sum()))
        self.outs[np.swapaxes(empty, 2, 3)] = np.nan
        self.out.reshape(-1).view(np.uint8)[:] = NAN_BYTE
        self.lse[:] = np.nan

    def prepared(self, gpu: DeviceInfo, stream: int, rank: int = 0, ranks: int | None = None) -> Prepared:
        launch = exchange.launch(
            self.call,
            self.views,
            self.options,
            slab=self.slab,
            timeout_ns=self.timeout_ns,
            rank=rank,
            ranks=self.call.world if ranks is None else ranks,
        )
        return Prepared([launch], exchange.ADDRESSES, Layout({}), gpu, stream)

    def check(self) -> None:
        """Every rank has the merged result of its heads."""
        heads, rounding = self.call.heads, TABLE[self.out_dtype].unit_roundoff
        for rank in range(self.call.world):
            mine = slice(rank * heads, (rank + 1) * heads)
            outs, lses = self.outs[:, :, :, mine].astype(np.float64), self.lses[:, :, mine]
            out, lse = reference.merge_states(outs, lses, lse_base=self.call.lse_base)
            natural = lse * log_of_base(self.call.lse_base) / log_of_base(self.options.lse_base)
            natural = np.where(lse == -np.inf, self.options.empty_lse, natural)
            np.testing.assert_allclose(self.lse[rank], natural, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(self.out[rank].astype(np.float64), out, rtol=2 * rounding, atol=1e-5)
