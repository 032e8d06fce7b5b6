"""A model of attention forwards on Blackwell: what a tile of keys costs a block, and how long a call takes at least.

The same laws and constants serve the kernels of others, whose times are published, and ours, which no GPU has run.
`published.py` has the cases of others, `plans.py` the plans; this file only computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.cost import D_QK, D_V
from .machine import ForwardRates, Machine

OPERAND_ROW_BYTES = 32
"""Bytes of a row of A or B that one product reads: K = 16 of 16-bit numbers, 32 of 8-bit ones."""


@dataclass(frozen=True)
class Product:
    """Products of M x N that a group of blocks issues for a tile of keys; a pair shares M, and each brings half of N.

    a_in_tmem
        Whether A is read from tensor memory, and only B from shared memory.
    """

    m: int
    n: int
    count: int
    pair: bool = False
    a_in_tmem: bool = False

    def pipe(self, machine: Machine) -> float:
        """Cycles of the tensor cores of each block."""
        if self.pair:
            return self.count * self.n * min(1.0, self.m / 256) / machine.columns_per_cycle
        return self.count * self.n / machine.columns_per_cycle

    def smem(self, machine: Machine) -> float:
        """Cycles in which shared memory of each block delivers the operands."""
        share = 2 if self.pair else 1
        rows = (0 if self.a_in_tmem else self.m / share) + self.n / share
        return self.count * OPERAND_ROW_BYTES * rows / machine.smem_bytes_per_cycle

    def cycles(self, machine: Machine) -> float:
        """Cycles from the first to the end of the last: each at the slower of the two."""
        return max(self.pipe(machine), self.smem(machine))


@dataclass(frozen=True)
class Plan:
    """Way of a kernel through the keys, per tile of `keys` keys, for each block of a group.

    Attributes
    ----------
    blocks : int
        Blocks that share a tile of keys, one per SM.
    rows : int
        Query rows that the group computes, whether they are used or not.
    scores, values : tuple of Product
    filled : int
        Bytes of keys that arrive in shared memory.
    element_bytes : int
        Of keys, and of P.
    messages, issuers : int
        `tile::gather4` instructions, and the threads that share in issuing them.
    """

    name: str
    blocks: int
    rows: int
    keys: int
    scores: tuple[Product, ...]
    values: tuple[Product, ...]
    filled: int
    element_bytes: int = 2
    messages: int = 0
    issuers: int = 1

    @property
    def flops(self) -> int:
        """FLOPs that a group issues for a tile."""
        return 2 * self.rows * self.keys * (D_QK + D_V)

    @property
    def exponentials(self) -> int:
        """Elements of P that each block computes."""
        return self.rows * self.keys // self.blocks


@dataclass(frozen=True)
class Tile:
    """Cycles of a tile on each SM of its group, by what they would be if nothing else took time.

    products
        One after another, each at the rate of its shape.
    smem
        Operands, arriving keys and P: all pass through shared memory.
    chain
        The values' products after the slower of the next scores and the softmax: what order alone allows.
    gather
        Issue of the gather's instructions.
    """

    products: float
    smem: float
    chain: float
    gather: float

    @property
    def total(self) -> float:
        """The longest of them."""
        return max(self.products, self.smem, self.chain, self.gather)

    @property
    def bound(self) -> str:
        """Name of the longest."""
        names = {
            "products": self.products,
            "shared memory": self.smem,
            "softmax": self.chain,
            "gather": self.gather,
        }
        return max(names, key=lambda name: names[name])


def tile(plan: Plan, machine: Machine, rates: ForwardRates) -> Tile:
    """The cycles of a tile."""
    scores = sum(one.cycles(machine) for one in plan.scores)
    values = sum(one.cycles(machine) for one in plan.values)
    operands = sum(one.smem(machine) for one in (*plan.scores, *plan.values))
    written = plan.filled + plan.exponentials * plan.element_bytes
    softmax = plan.exponentials / rates.exponentials_per_cycle + rates.handoff_cycles
    return Tile(
        products=scores + values,
        smem=operands + written / machine.smem_bytes_per_cycle,
        chain=values + max(scores, softmax),
        gather=plan.messages * rates.gather_issue_cycles / plan.issuers,
    )


@dataclass(frozen=True)
class Work:
    """Work of a call: `items` of `keys` keys each; every key needs `rows` query rows computed.

    Attributes
    ----------
    row_bytes : int
        Bytes of a key in memory; 0 where keys are taken to come from the L2.
    balanced : bool
        Whether a schedule gives every group the same number of tiles, cutting items; else items are cut evenly, and
        only if there are fewer than groups.
    """

    name: str
    items: int
    rows: int
    keys: int
    row_bytes: int
    balanced: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of keys, each once."""
        return self.items * self.keys * self.row_bytes

    @property
    def flops(self) -> int:
        """FLOPs of the rows that are asked for."""
        return 2 * self.items * self.rows * self.keys * (D_QK + D_V)


@dataclass(frozen=True)
class Forecast:
    """A predicted time, and its parts: on the SMs, of memory, of power, and of launches."""

    plan: str
    work: str
    us: float
    sm_us: float
    memory_us: float
    power_us: float
    start_us: float
    tflops: float
    bound: str


def forecast(plan: Plan, work: Work, machine: Machine, rates: ForwardRates) -> Forecast:
    """The time of a call: the longest of SMs, memory and power, and what each of its kernels costs to start and end."""
    groups = machine.multiprocessors // plan.blocks
    passes = -(-work.rows // plan.rows)  # groups of rows; each goes through all keys
    items, tiles = work.items * passes, -(-work.keys // plan.keys)
    cut = work.balanced and items % groups != 0
    if work.balanced:
        turns = -(-items * tiles // groups)
    else:
        splits = max(1, min(groups // items, tiles))
        cut = splits > 1
        turns = -(-items * splits // groups) * -(-tiles // splits)
    cost = tile(plan, machine, rates)
    sm_us = turns * cost.total / machine.clock_ghz / 1e3
    memory_us = work.nbytes / rates.memory_tbps / 1e6
    power_us = items * tiles * plan.flops / rates.sustained_tflops(plan.element_bytes) / 1e6
    start_us = rates.start_us * (2 if cut else 1)
    parts = {"memory": memory_us, "power": power_us, cost.bound: sm_us}
    us = max(parts.values()) + start_us
    return Forecast(
        plan=plan.name,
        work=work.name,
        us=us,
        sm_us=sm_us,
        memory_us=memory_us,
        power_us=power_us,
        start_us=start_us,
        tflops=work.flops / us / 1e6,
        bound=max(parts, key=lambda name: parts[name]),
    )


def at_clock(machine: Machine, ghz: float) -> Machine:
    """The machine at another clock."""
    return replace(machine, clock_ghz=ghz)
