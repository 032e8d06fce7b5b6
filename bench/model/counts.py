"""A model of the sparse backward on Blackwell: what its blocks compute and move.

All sizes are the kernel's own facts, read from its cubin; `tests/bench/test_model_counts.py` compares the counts with
the simulator's. `prediction.py` predicts times from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from mla_cupy.errors import MlaError, explain
from mla_cupy.kernels.sparse_backward import SPARSE_BACKWARD
from mla_cupy.kernels.sparse_backward.problem import SparseBackwardProblem
from mla_cupy.runtime import loader
from mla_cupy.runtime.device import SAMPLES

from ..core.cost import ELEMENT_BYTES, SINGLE_BYTES
from ..core.errors import BenchError
from .machine import MACHINES

MMA_K = 16  # of 16-bit operands, always
OPERAND_ROW_BYTES = MMA_K * ELEMENT_BYTES
#: In the order of the fact `products`.
PRODUCTS = ("S", "dP", "dKV", "dKV RoPE", "dQ", "dQ RoPE")
#: They sum over heads; steps without a head are not issued.
OVER_HEADS = ("dKV", "dKV RoPE")
HOPPER = "sm_90a"


@dataclass(frozen=True)
class Product:
    """Number of products of M x N x 16 that are issued per tile of keys."""

    name: str
    m: int
    n: int
    count: int

    @property
    def flops(self) -> int:
        """FLOPs of all of them."""
        return 2 * self.m * self.n * MMA_K * self.count

    @property
    def operand_bytes(self) -> int:
        """Bytes that all of them read from shared memory: both operands, each time."""
        return OPERAND_ROW_BYTES * (self.m + self.n) * self.count


@dataclass(frozen=True)
class Kernel:
    """A kernel's facts; a missing one is 0."""

    name: str
    threads: int
    smem_bytes: int
    block_heads: int
    tile_keys: int
    tmem_columns: int
    tmem_columns_used: int
    weight_stationary: int
    products: tuple[Product, ...]

    @classmethod
    def from_facts(cls, name: str, facts: Mapping[str, Any]) -> Kernel:
        """Make it from `Build.facts`."""
        numbers = list(facts.get("products", ()))
        if len(numbers) != 3 * len(PRODUCTS):
            triples = f"M, N and count of {len(PRODUCTS)} products"
            raise BenchError(explain(f"fact products of {name}", len(numbers), triples, "the model cannot take it"))
        products = [Product(one, *numbers[3 * i : 3 * i + 3]) for i, one in enumerate(PRODUCTS)]
        sizes = {one: int(facts.get(one, 0)) for one in cls.__dataclass_fields__ if one not in ("name", "products")}
        return cls(name=name, products=tuple(products), **sizes)

    @property
    def d_qk(self) -> int:
        """Dims that S sums over."""
        return MMA_K * self.products[0].count

    @property
    def d_v(self) -> int:
        """Dims that dP sums over."""
        return MMA_K * self.products[1].count

    def issued(self, heads: int) -> tuple[Product, ...]:
        """The products per tile in a block of `heads` heads."""
        steps, all_steps = -(-heads // MMA_K), self.block_heads // MMA_K
        return tuple(
            Product(one.name, one.m, one.n, one.count * steps // all_steps) if one.name in OVER_HEADS else one
            for one in self.products
        )

    def blocks(self, h_q: int) -> list[int]:
        """The heads of each block of a query."""
        return [min(self.block_heads, h_q - first) for first in range(0, h_q, self.block_heads)]


@dataclass(frozen=True)
class Counts:
    """Counts of operations and of bytes moved.

    loaded
        Bytes of bulk copies into shared memory: Q, dO, and whole tiles of gathered keys.
    written
        Bytes that threads write to shared memory: P, dS and dQ, in 16 bits.
    stored
        Bytes of bulk copies from shared memory to memory: dQ.
    tmem
        Bytes that threads read from tensor memory.
    added
        Bytes of float32 added to rows of dkv.
    """

    products: int = 0
    flops: int = 0
    operands: int = 0
    loaded: int = 0
    written: int = 0
    stored: int = 0
    tmem: int = 0
    added: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> Counts:
        return Counts(*(a * times for a in astuple(self)))


def tile_counts(kernel: Kernel, heads: int, keys: int) -> Counts:
    """One tile of `keys` valid keys, in a block of `heads` heads."""
    issued = kernel.issued(heads)
    scores = kernel.tile_keys * kernel.block_heads
    return Counts(
        products=sum(one.count for one in issued),
        flops=sum(one.flops for one in issued),
        operands=sum(one.operand_bytes for one in issued),
        loaded=kernel.tile_keys * kernel.d_qk * ELEMENT_BYTES,
        written=2 * scores * ELEMENT_BYTES,
        tmem=(2 * scores + kernel.tile_keys * kernel.d_qk) * SINGLE_BYTES,
        added=keys * kernel.d_qk * SINGLE_BYTES,
    )


def block_counts(kernel: Kernel) -> Counts:
    """Counts of what a block does once: Q and dO in, dQ out."""
    dq = kernel.block_heads * kernel.d_qk
    return Counts(
        loaded=kernel.block_heads * (kernel.d_qk + kernel.d_v) * ELEMENT_BYTES,
        written=dq * ELEMENT_BYTES,
        stored=dq * ELEMENT_BYTES,
        tmem=dq * SINGLE_BYTES,
    )


def query_counts(kernel: Kernel, h_q: int, keys: int) -> Counts:
    """All blocks of a query that selects `keys` rows; if there are none its blocks only write zeros."""
    total = Counts()
    for heads in kernel.blocks(h_q) if keys > 0 else ():
        full, rest = divmod(keys, kernel.tile_keys)
        total += block_counts(kernel) + tile_counts(kernel, heads, kernel.tile_keys) * full
        total += tile_counts(kernel, heads, rest) if rest else Counts()
    return total


def call_counts(kernel: Kernel, h_q: int, lengths: Iterable[int]) -> Counts:
    """A call whose queries select `lengths` rows each."""
    return sum((query_counts(kernel, h_q, keys) for keys in lengths), Counts())


# ---- Kernels -------------------------------------------------------------------------------------------------------


def names(arch: str) -> tuple[str, ...]:
    """The kernels of a target that the model covers: those for Blackwell only, not the generic ones."""
    if arch not in MACHINES:
        rates = "the rates of other GPUs are not known to the model"
        raise BenchError(explain("--arch", arch, " or ".join(MACHINES), rates))
    of_arch = [kernel for kernel in SPARSE_BACKWARD.kernels if kernel.supports_arch(arch)]
    return tuple(kernel.name for kernel in of_arch if not kernel.supports_arch(HOPPER))


def load(name: str, arch: str, d_qk: int, dtype: str = "bfloat16") -> Kernel:
    """The facts of the build that a call with these types would run; compiled if necessary."""
    known = names(arch)
    if name not in known:
        raise BenchError(explain("--kernel", name, "one of " + ", ".join(known), "leave it out for all of them"))
    (kernel,) = (kernel for kernel in SPARSE_BACKWARD.kernels if kernel.name == name)
    problem = SparseBackwardProblem(s_q=1, s_kv=1, h_q=1, topk=1, d_qk=d_qk, dtype=dtype)
    gpu = next(gpu for gpu in SAMPLES if gpu.arch == arch)
    try:
        build = loader.obtain(kernel.request(kernel.variant(problem, gpu), arch))
    except MlaError as error:
        raise BenchError(str(error)) from error
    return Kernel.from_facts(name, build.facts)
