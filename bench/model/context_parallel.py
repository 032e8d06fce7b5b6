"""`bench model context-parallel`: times and bytes of context-parallel prefill on 2 to 64 GPUs, predicted from one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_cupy.errors import explain
from mla_cupy.parallel.zigzag import CHUNK_TOKENS
from mla_cupy.terminal import Table

from ..core.errors import BenchError
from . import tables
from .machine import CONTEXT_RATES, ContextRates

if TYPE_CHECKING:
    from rich.console import Console

OPERATION = "context-parallel"
SCHEMA_VERSION = 1
LABEL = "predicted, not measured"
HEADS, LATENT, NOPE, ROPE, VALUES = 128, 512, 128, 64, 128
WORLDS = (2, 4, 8, 16, 32, 64)
TOKENS = (32768, 131072, 1048576)
HOST_GPUS = 8
"""GPUs of a host, joined by NVLink; each has an InfiniBand adapter of its own."""
_MS, _HALF, _FLOAT = 1e3, 2, 4
_EXPANSIONS = {False: 1, True: 3}
"""Products with W_UK and W_UV: once; in the backward once again, and for the gradients of latents and weights."""
_EXCHANGES = {False: 1, True: 2}
"""Latents are gathered; in the backward gathered again, and their gradients sent back."""
NOT_COUNTED = (
    "what a rank waits for another one, and clocks that fall with the power of eight busy GPUs",
    "what an exchange takes from attention beside it: multiprocessors of NCCL's kernels, and bandwidth",
    "projections, RoPE, experts and everything else of a layer",
)


@dataclass(frozen=True)
class Share:
    """Work and exchanges of a rank in the forward, or in the backward.

    Attributes
    ----------
    world, tokens : int
        Ranks, and tokens of one sequence.
    backward : bool
    chunks : int
        Parts of the keys and values, which exist one after another.
    compute_ms, exchange_ms : float
        All calls; all exchanges.
    exposed_ms : float
        What no attention hides of the exchanges.
    received_bytes : float
        By each rank.
    """

    world: int
    tokens: int
    backward: bool
    chunks: int
    compute_ms: float
    exchange_ms: float
    exposed_ms: float
    received_bytes: float

    @property
    def ms(self) -> float:
        """Time of the step."""
        return self.compute_ms + self.exposed_ms


def share(tokens: int, world: int, backward: bool, rates: ContextRates, chunk_tokens: int = CHUNK_TOKENS) -> Share:
    """One rank's step; on one rank, plain attention."""
    compute = attention_ms(tokens, backward, rates) / world
    alone = expansion_ms(tokens, rates)
    if world == 1:
        return Share(1, tokens, backward, 0, compute + (2 if backward else 1) * alone, 0.0, 0.0, 0.0)
    chunks = 2 * max(1, -(-tokens // (2 * chunk_tokens)))
    compute += _EXPANSIONS[backward] * alone * (1 + 1 / world) + calls_ms(tokens / world, chunks, backward, rates)
    received = tokens * (LATENT + ROPE) * _HALF * (world - 1) / world
    each = exchange_ms(received, world, rates) + rates.exchange_start_us / _MS
    own = compute / (2 * world)  # attention of a rank's pieces to themselves hides the gather; gradients travel last
    exposed = max(0.0, each - own) + (each if backward else 0.0)
    received, exchange = received * _EXCHANGES[backward], each * _EXCHANGES[backward]
    return Share(world, tokens, backward, chunks, compute, exchange, exposed, received)


def attention_ms(tokens: int, backward: bool, rates: ContextRates) -> float:
    """Causal attention of a whole sequence."""
    d_qk = NOPE + ROPE
    widths = 3 * d_qk + 2 * VALUES if backward else d_qk + VALUES
    tflops = rates.backward_tflops if backward else rates.forward_tflops
    return HEADS * widths * tokens**2 / (tflops * 1e12) * _MS


def expansion_ms(tokens: int, rates: ContextRates) -> float:
    """One product of all latents with W_UK and W_UV."""
    return 2 * tokens * LATENT * HEADS * (NOPE + VALUES) / (rates.product_tflops * 1e12) * _MS


def calls_ms(rows: float, chunks: int, backward: bool, rates: ContextRates) -> float:
    """Cost of three calls for each two chunks: ends, and the merged output or sums of the queries' gradients."""
    calls = 3 * chunks / 2
    columns = NOPE + ROPE if backward else VALUES
    each = HEADS * columns * (rates.backward_row_bytes if backward else rates.forward_row_bytes)
    return calls * (rates.call_us / _MS + rows / 2 * each / (rates.memory_tbps * 1e12) * _MS)


def exchange_ms(received: float, world: int, rates: ContextRates) -> float:
    """Time for the bytes that a rank receives: by NVLink within a host, and by its own adapter from other hosts."""
    far = max(0, world - HOST_GPUS) / (world - 1)
    by_link, by_adapter = (1 - far) / rates.nvlink_gbs, far / rates.infiniband_gbs
    return received * max(by_link, by_adapter) / 1e9 * _MS


def efficiency(parts: list[Share], single: list[Share]) -> float:
    """Time on one GPU over `world` times the time on each of `world`."""
    return sum(one.ms for one in single) / (parts[0].world * sum(one.ms for one in parts))


# ---- Measured parts --------------------------------------------------------------------------------------------------

MEASURED: tuple[tuple[int, int, int, float, float], ...] = (
    (32768, 1, 0, 64.4, 262.2),
    (32768, 2, 16384, 39.1, 152.3),
    (32768, 8, 16384, 11.5, 46.9),
    (131072, 1, 0, 1034.2, 4124.9),
    (131072, 2, 16384, 556.0, 2220.6),
    (131072, 8, 16384, 150.3, 586.8),
    (32768, 1, 0, 65.1, 270.2),
    (32768, 2, 32768, 39.8, 154.7),
    (32768, 8, 32768, 11.4, 47.7),
    (131072, 1, 0, 1046.0, 4163.1),
    (131072, 2, 32768, 548.8, 2210.6),
    (131072, 8, 32768, 148.5, 583.5),
)
"""Tokens, ranks, tokens of a chunk, ms of the forward, and of forward and backward, of the slower rank without
exchanges: one H200."""


def compute_only(tokens: int, world: int, chunk_tokens: int, rates: ContextRates) -> tuple[float, float]:
    """Predict the same."""
    forward, backward = (share(tokens, world, way, rates, chunk_tokens).compute_ms for way in (False, True))
    return forward, forward + backward


# ---- Tables and JSON -------------------------------------------------------------------------------------------------


def run(json_file: Path | None, console: Console) -> int:
    """Print the tables, and write them where that is asked for."""
    rates = CONTEXT_RATES
    if json_file:
        try:
            json_file.write_text(json.dumps(document(rates), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise BenchError(explain("--json", json_file, "a file that can be written", str(error.strerror))) from error
    title = f"{LABEL.upper()}: context-parallel prefill on H200s, {HEADS} heads, bfloat16"
    console.print(title, markup=False)
    console.print(tables.assumptions(rates), "", measured_table(rates), "", prediction_table(rates), "")
    console.print("Not counted:")
    for one in NOT_COUNTED:
        console.print(f"  {one}")
    return 0


def measured_table(rates: ContextRates) -> Table:
    """Measured times of a rank's calls on one GPU, and the model's."""
    title = "measured on one H200, exchanges left out, against the model"
    table = tables.titled(title, "tokens", "GPUs", "chunk", "forward ms", "model", "forward and backward ms", "model")
    for tokens, world, chunk, forward, training in MEASURED:
        found = compute_only(tokens, world, chunk, rates)
        figures = (f"{x:,.1f}" for x in (forward, found[0], training, found[1]))
        table.add_row(f"{tokens:,}", str(world), f"{chunk:,}" if chunk else "", *figures)
    return table


def predictions(rates: ContextRates) -> Iterator[tuple[Share, Share, float, float]]:
    """Forward and backward of every case, the efficiency of the forward, and the efficiency of both."""
    for tokens in TOKENS:
        single = [share(tokens, 1, way, rates) for way in (False, True)]
        for world in WORLDS:
            parts = [share(tokens, world, way, rates) for way in (False, True)]
            yield parts[0], parts[1], efficiency(parts[:1], single[:1]), efficiency(parts, single)


def prediction_table(rates: ContextRates) -> Table:
    """Times, bytes and efficiencies for more GPUs."""
    columns = ("tokens", "GPUs", "received MB", "forward ms", "exposed", "efficiency")
    title = f"{LABEL}: up to {HOST_GPUS} GPUs by NVLink, more with InfiniBand between hosts"
    table = tables.titled(title, *columns, "backward ms", "exposed", "efficiency of both")
    for forward, backward, of_forward, of_both in predictions(rates):
        megabytes = (forward.received_bytes + backward.received_bytes) / 1e6
        cells = [f"{forward.tokens:,}", str(forward.world), f"{megabytes:,.0f}"]
        for one, ratio in ((forward, of_forward), (backward, of_both)):
            cells += [f"{one.ms:,.1f}", f"{one.exposed_ms:,.2f}", f"{ratio:.2f}"]
        table.add_row(*cells)
    return table


def document(rates: ContextRates) -> dict[str, Any]:
    """All of it as plain data."""
    rows = [
        {"forward": asdict(forward), "backward": asdict(backward), "efficiency": {"forward": one, "both": both}}
        for forward, backward, one, both in predictions(rates)
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "label": LABEL,
        "operation": OPERATION,
        "assumptions": rates.record(),
        "not_counted": list(NOT_COUNTED),
        "predictions": rows,
    }
