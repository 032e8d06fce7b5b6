"""A lower bound of a kernel's time, from its counts and a GPU's assumed rates: predictions, not measurements."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.cost import ELEMENT_BYTES
from ..ops.sparse_backward import SparseBackwardCase
from .counts import OPERAND_ROW_BYTES, Kernel, Product, block_counts, query_counts, tile_counts
from .machine import Machine


def pipe_cycles(product: Product, weight_stationary: bool, machine: Machine) -> float:
    """Cycles of one K = 16 product if its operands are available at once."""
    if not weight_stationary:
        return product.n / machine.columns_per_cycle
    if product.m >= 128:
        return product.n / machine.ws_wide_columns_per_cycle + machine.ws_wide_overhead_cycles
    return product.n / machine.ws_columns_per_cycle + machine.ws_overhead_cycles


def operand_cycles(product: Product, machine: Machine) -> float:
    """Cycles that shared memory needs for the operands of one K = 16 product."""
    return OPERAND_ROW_BYTES * (product.m + product.n) / machine.smem_bytes_per_cycle


def product_cycles(product: Product, weight_stationary: bool, machine: Machine) -> float:
    """Cycles from one K = 16 product to the next of its shape."""
    return max(pipe_cycles(product, weight_stationary, machine), operand_cycles(product, machine))


@dataclass(frozen=True)
class Cycles:
    """Cycles per tile of keys in a full block, on its SM.

    peak
        Its FLOPs at the rate of the largest products.
    pipe, operands
        The products in the tensor cores alone, and their operands in shared memory alone.
    products
        Each product at the slower of the two.
    other
        Shared memory traffic of K, P and dS, assumed not to overlap with the products.
    tmem
        Reads of tensor memory, which overlap with all of that.
    """

    peak: float
    pipe: float
    operands: float
    products: float
    other: float
    tmem: float

    @property
    def total(self) -> float:
        """The minimum for a tile."""
        return max(self.products + self.other, self.tmem)

    @property
    def bound(self) -> str:
        """Limit of the products, which dominate."""
        return "tensor cores" if self.pipe > self.operands else "shared memory"


def tile_cycles(kernel: Kernel, heads: int, machine: Machine) -> Cycles:
    """The cycles of a tile in a block of `heads` heads."""
    counts, issued, ws = tile_counts(kernel, heads, kernel.tile_keys), kernel.issued(heads), kernel.weight_stationary
    return Cycles(
        peak=counts.flops / machine.peak_flops_per_cycle,
        pipe=sum(one.count * pipe_cycles(one, bool(ws), machine) for one in issued),
        operands=counts.operands / machine.smem_bytes_per_cycle,
        products=sum(one.count * product_cycles(one, bool(ws), machine) for one in issued),
        other=(counts.loaded + counts.written) / machine.smem_bytes_per_cycle,
        tmem=counts.tmem / machine.tmem_bytes_per_cycle,
    )


def block_cycles(kernel: Kernel, machine: Machine) -> float:
    """Shared memory traffic of Q, dO and dQ, which nothing hides: there is one block per SM."""
    counts = block_counts(kernel)
    return (counts.loaded + counts.written + counts.stored) / machine.smem_bytes_per_cycle


@dataclass(frozen=True)
class Prediction:
    """The main kernel's time for a case, at one rate of additions: the larger of its two parts."""

    kernel: str
    h_q: int
    addition_tbps: float
    sm_us: float
    l2_us: float
    us: float
    tflops: float
    bound: str
    added_bytes: int
    gathered_bytes: int
    added_tbps: float
    gathered_tbps: float


def predict(kernel: Kernel, case: SparseBackwardCase, machine: Machine, addition_tbps: float) -> Prediction:
    """Every query selects `topk` rows; FLOPs come from `SparseBackwardCase.cost`."""
    heads = kernel.blocks(case.h_q)
    tile = tile_cycles(kernel, max(heads), machine)
    cycles = -(-case.topk // kernel.tile_keys) * tile.total + block_cycles(kernel, machine)
    turns = -(-case.s_q * len(heads) // machine.multiprocessors)  # full blocks, where some have fewer heads
    sm_us = turns * cycles / machine.clock_ghz / 1e3
    added = query_counts(kernel, case.h_q, case.topk).added * case.s_q
    gathered = len(heads) * case.s_q * case.topk * case.d_qk * ELEMENT_BYTES
    l2_us = added / addition_tbps / 1e6
    us = max(sm_us, l2_us)
    return Prediction(
        kernel=kernel.name,
        h_q=case.h_q,
        addition_tbps=addition_tbps,
        sm_us=sm_us,
        l2_us=l2_us,
        us=us,
        tflops=case.cost.tflops(us),
        bound=tile.bound if sm_us > l2_us else "additions in the L2",
        added_bytes=added,
        gathered_bytes=gathered,
        added_tbps=added / us / 1e6,
        gathered_tbps=gathered / us / 1e6,
    )
