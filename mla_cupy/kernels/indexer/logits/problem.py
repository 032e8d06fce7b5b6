"""Problem and options of the logits, which their kernels share on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import KernelSpec, Reason, Variant
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3
from mla_cupy.runtime.tensormap import TensorMapSpec

CODES = ("float8_e4m3fn", "uint8")
"""The dtypes of e4m3: not every library has one."""
DTYPES = ("float8_e4m3fn", "bfloat16")
"""The dtypes that the kernels compute in."""
HEAD_DIMS = (128, 64, 32)
MAX_HEADS = 128
NO_E2M1 = Reason("takes keys in e4m3, not in e2m1")
BLOCK_TOKENS = 8
"""Query tokens that share the tiles of keys; more are not next tokens of one sequence."""


@dataclass(frozen=True)
class LogitsProblem:
    """Sizes and dtypes that decide which kernels run and how: no pointers, no device.

    `block_tokens` consecutive tokens form a block: eight of a prefill, or all of one sequence. `page_size` is 0 for
    contiguous keys; `aligned`: queries and keys start at, and step by, multiples of 16 bytes; `accumulate` is the
    allowed accumulator; `e2m1`: cached keys are in e2m1, with a scale per 32 elements.
    """

    num_tokens: int
    num_keys: int
    heads: int
    head_dim: int
    dtype: str
    block_tokens: int = BLOCK_TOKENS
    page_size: int = 0
    num_pages: int = 0
    aligned: bool = True
    accumulate: str = "float32"
    e2m1: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks of tokens."""
        return -(-self.num_tokens // self.block_tokens)

    def countable(self, tile_keys: int) -> Reason | None:
        """The schedule numbers the tiles of all blocks in int32."""
        tiles = self.num_blocks * -(-self.num_keys // tile_keys)
        return Reason(f"counts at most 2^31 - 1 tiles, not {tiles}") if tiles >= 2**31 else None


class LogitsOptions(NamedTuple):
    """A call's arguments other than arrays: as passed, then as resolved by the checks."""

    accumulate: str
    clean: bool
    out_dtype: str | None
    kernel: str | None


class PagedLogitsOptions(NamedTuple):
    """Options of `indexer_logits_paged`."""

    clean: bool
    out_dtype: str | None
    kernel: str | None


def no_maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """No maps: for kernels that do not fetch by TMA."""
    return ()


@dataclass(frozen=True)
class LogitsKernel(KernelSpec[LogitsProblem]):
    """A kernel that computes logits.

    Attributes
    ----------
    variant : callable
        `variant(problem)`: the build for a problem.
    grid : callable
        `grid(problem, device)`.
    tile_keys : callable
        `tile_keys(problem)`: keys of the tiles that the schedule cuts into shares, one for each block of the grid; 0:
        it needs none.
    short_line : int
        Up to this many blocks of tokens the kernel needs no schedule: it cuts their tiles into shares itself.
    maps : callable
        `maps(call)`: its tensor maps, by the names of the arrays.
    """

    variant: Callable[[LogitsProblem], Variant] = lambda problem: Variant(dtype=problem.dtype)
    grid: Callable[[LogitsProblem, DeviceInfo], Dim3] = lambda problem, device: (device.sm_count, 1, 1)
    tile_keys: Callable[[LogitsProblem], int] = lambda problem: 0
    short_line: int = 0
    maps: Callable[[Call], tuple[tuple[str, TensorMapSpec], ...]] = no_maps
