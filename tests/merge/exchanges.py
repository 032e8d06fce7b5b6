"""Context-parallel ranks that share one memory: their partial results, mailboxes and states, and what must come out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mla_cupy import reference
from mla_cupy.arrays import NUMPY, View
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels.lse import LseOptions
from mla_cupy.kernels.merge import exchange
from mla_cupy.kernels.merge.exchange import MAILBOX, REPORT, STATE, Exchange, Splits
from mla_cupy.kernels.pipeline import Layout, Prepared
from mla_cupy.reference.lse import log_of_base
from mla_cupy.runtime.device import DeviceInfo

Array = np.ndarray[Any, Any]
NAN_BYTE = 0xFF


@dataclass
class Ranks:
    """All ranks of a group, on one GPU or none.

    With `num_splits` each rank's decode has cut its batch into so many splits, elsewhere than the others', and has left
    the pieces of split requests unmerged.
    """

    call: Exchange
    out_dtype: str = "float32"
    options: LseOptions = field(default_factory=LseOptions)
    timeout_ns: int = 2 * 10**9
    num_splits: int = 0

    def __post_init__(self) -> None:
        call, world = self.call, self.call.world
        self.slab = call.slab_bytes
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
        self.schedules = np.zeros((world, self.num_splits + 1, 2), np.int32)
        rows = (world, 2 * self.num_splits, call.s_q * heads)
        self.partial_outs, self.partial_lses = np.zeros((*rows, call.d), np.float32), np.zeros(rows, np.float32)
        self.found = self.outs, self.lses

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Arrays in the order of the kernel's addresses."""
        pieces = (self.schedules, self.partial_outs, self.partial_lses)
        return (self.outs, self.lses, self.out, self.lse, *pieces, self.mailboxes, self.states, self.reports)

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
        self.found = self.outs.astype(np.float64), self.lses.copy()
        if self.num_splits:
            self.partial_outs[:], self.partial_lses[:] = np.nan, np.nan
            for rank in range(self.call.world):
                self._split(rank, rng)

    def _split(self, rank: int, rng: np.random.Generator) -> None:
        """Cut a rank's batch anywhere, and keep of split requests the pieces alone."""
        b, count = self.call.b, self.num_splits
        tiles = [2 * count, *rng.choice([1, 3, 2 * count], b - 1)]
        line = [(request, tile) for request in range(b) for tile in range(tiles[request])]
        cuts = sorted(rng.choice(len(line), count - 1, replace=False).tolist())
        schedule = self.schedules[rank]
        schedule[1:-1], schedule[-1] = [line[i] for i in cuts], (b, 0)
        for request in range(b):
            inside = [i for i in range(1, count) if schedule[i, 0] == request and schedule[i, 1] > 0]
            if inside:
                self._fill_pieces(rank, request, [count + inside[0] - 1, *inside], rng)

    def _fill_pieces(self, rank: int, request: int, at: list[int], rng: np.random.Generator) -> None:
        """Random pieces at these places; what they amount to is what the rank has found."""
        s_q, heads, d = self.call.s_q, self.call.world * self.call.heads, self.call.d
        outs = rng.standard_normal((len(at), s_q * heads, d)).astype(np.float32)
        lses = (20 * rng.standard_normal(outs.shape[:2])).astype(np.float32)
        lses[rng.random(lses.shape) < 0.25] = -np.inf  # a piece in which the row sees no token
        outs[lses == -np.inf] = 0
        self.partial_outs[rank, at], self.partial_lses[rank, at] = outs, lses
        outs, lses = outs.reshape(len(at), 1, s_q, heads, d), lses.reshape(len(at), 1, s_q, heads).swapaxes(2, 3)
        out, lse = reference.merge_states(outs.astype(np.float64), lses, lse_base="2")
        self.found[0][rank, request], self.found[1][rank, request] = out[0], lse[0] * log_of_base("2")
        self.found[1][rank, request] /= log_of_base(self.call.lse_base)
        self.outs[rank, request], self.lses[rank, request] = np.nan, np.nan

    def prepared(self, gpu: DeviceInfo, stream: int, rank: int = 0, ranks: int | None = None) -> Prepared:
        launch = exchange.launch(
            self.call,
            self.views,
            self.options,
            slab=self.slab,
            timeout_ns=self.timeout_ns,
            rank=rank,
            ranks=self.call.world if ranks is None else ranks,
            splits=Splits(0, 0, 0, self.num_splits, self.num_splits),
            split_strides=(self.num_splits + 1, math.prod(self.partial_lses.shape[1:])),
        )
        return Prepared([launch], exchange.ADDRESSES, Layout({}), gpu, stream)

    def check(self) -> None:
        """Every rank has the merged result of its heads."""
        heads, rounding = self.call.heads, TABLE[self.out_dtype].unit_roundoff
        sent = TABLE[self.call.partial_dtype].unit_roundoff if self.num_splits else 0.0  # pieces are merged in float32
        for rank in range(self.call.world):
            mine = slice(rank * heads, (rank + 1) * heads)
            outs, lses = self.found[0][:, :, :, mine], self.found[1][:, :, mine]
            out, lse = reference.merge_states(outs, lses, lse_base=self.call.lse_base)
            natural = lse * log_of_base(self.call.lse_base) / log_of_base(self.options.lse_base)
            natural = np.where(lse == -np.inf, self.options.empty_lse, natural)
            np.testing.assert_allclose(self.lse[rank], natural, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(self.out[rank].astype(np.float64), out, rtol=2 * rounding, atol=1e-5 + 4 * sent)
