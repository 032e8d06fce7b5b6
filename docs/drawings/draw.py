"""Draws the schedules and maps of the documentation: `python3 docs/drawings/draw.py` writes the SVG files beside it.

Widths are what the kernel pages say: cycles and columns where the note says so, and otherwise only an order.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from svg import Arrow, Bars, Chart, Flow, Node, Region, Span, bars, chart, flow, tensor_memory

FOLDER = Path(__file__).resolve().parent
DECODE_RESULTS = FOLDER.parents[1] / "bench" / "results" / "decode-h200-2026-11-23.jsonl"

SEESAW = Chart(
    "The seesaw schedule of dense decode: a pair of tiles",
    {
        "left": (
            Span(0, 3, "S0 = Q K0ᵀ", "mma"),
            Span(3, 5, "max, softmax 0", "softmax"),
            Span(5, 7, "O_L += P0 V0_L", "mma"),
            Span(7, 7.7, "wait", "wait"),
            Span(7.7, 9.7, "O_L += P1 V1_L", "mma"),
            Span(9.7, 12.7, "S0' = Q K0'ᵀ", "mma"),
        ),
        "right": (
            Span(0, 3.4, "S1 = Q K1ᵀ", "mma"),
            Span(3.4, 4.6, "wait max", "wait"),
            Span(4.6, 6.4, "max, softmax 1", "softmax"),
            Span(6.4, 8.4, "O_R += P0 V0_R", "mma"),
            Span(8.4, 10.4, "O_R += P1 V1_R", "mma"),
            Span(10.4, 12.7, "S1' = Q K1'ᵀ", "mma"),
        ),
        "load": (
            Span(0, 7, "waits for a free half of a stage", "wait"),
            Span(7, 8.4, "kv[0].left|← K0'", "copy"),
            Span(8.4, 9.7, "kv[0].right|← K0'", "copy"),
            Span(9.7, 10.4, "kv[1].l|← K1'", "copy"),
            Span(10.4, 12.7, "kv[1].right|← K1'", "copy"),
        ),
    },
    (
        Arrow(0, 3.8, 1, 4.6, "MaxReady"),
        Arrow(0, 5, 1, 6.4, "P0Ready"),
        Arrow(1, 6.4, 0, 7.7, "P1Ready"),
        Arrow(1, 8.4, 2, 8.4),
        Arrow(1, 10.4, 2, 10.4),
    ),
    note="Not to scale. Blue: tensor cores; orange: softmax; green: TMA; grey: waiting. Prime: the next pair of tiles.",
)


def _half(side: str) -> tuple[Span, ...]:
    """Steps of the warpgroup of one half of the columns."""
    return (
        Span(0, 2, f"S_{side} = K_{side} Q_{side}ᵀ", "mma"),
        Span(2, 3, "swap|shares", "wait"),
        Span(3, 4.6, "max, P", "softmax"),
        Span(4.6, 6.6, f"O_{side}ᵀ += V_{side}ᵀ Pᵀ", "mma"),
        Span(6.6, 8.6, f"S_{side}'", "mma"),
        Span(8.6, 9.6, "swap|shares", "wait"),
    )


SMALL = Chart(
    "The sparse forward for few heads: a tile, and the next one",
    {
        "left": _half("L"),
        "right": _half("R"),
        "gather": (
            Span(0, 6.6, "rows of the next tile, into the other stage (cp.async)", "copy"),
            Span(6.6, 9.6, "the tile after it, into this one, half by half", "copy"),
        ),
    },
    (Arrow(0, 2.2, 1, 2.8), Arrow(1, 2.2, 0, 2.8)),
    note="Not to scale. Each warpgroup has half of the columns; they meet once per tile, to add their shares of S.",
)

DENSE = Chart(
    "Dense attention on Hopper: three tiles of keys, the last one first",
    {
        "math_0": (
            Span(0, 2, "S = Q K2ᵀ", "mma"),
            Span(2, 4, "softmax 2", "softmax"),
            Span(4, 8, "Q K1ᵀ, O += P2 V2", "mma"),
            Span(8, 10, "softmax 1", "softmax"),
            Span(10, 14, "Q K0ᵀ, O += P1 V1", "mma"),
            Span(14, 16, "softmax 0", "softmax"),
            Span(16, 18, "O += P0 V0", "mma"),
        ),
        "math_1": (
            Span(0, 2, "wait turn", "wait"),
            Span(2, 4, "S = Q K2ᵀ", "mma"),
            Span(4, 6, "softmax 2", "softmax"),
            Span(6, 8, "wait turn", "wait"),
            Span(8, 10, "Q K1ᵀ", "mma"),
            Span(10, 12, "O += P2 V2", "mma"),
            Span(12, 14, "softmax 1", "softmax"),
            Span(14, 18, "Q K0ᵀ, O += P1 V1", "mma"),
        ),
        "load": (
            Span(0, 4, "K1, V1", "copy"),
            Span(4, 8, "K0", "copy"),
            Span(8, 14, "V0", "copy"),
            Span(14, 18, "next item: K, V, Q", "copy"),
        ),
        "clean": (
            Span(0, 4, "V2: what the mask hides", "add"),
            Span(4, 18, "nothing to do: no mask in the other tiles", "wait"),
        ),
    },
    (Arrow(0, 2, 1, 2), Arrow(1, 4, 0, 4), Arrow(0, 8, 1, 8)),
    note="Not to scale. Blue: tensor cores; orange: softmax; green: TMA; purple: what the mask hides; grey: waiting.",
)

BACKWARD_SM90 = Chart(
    "The sparse backward on Hopper, 64 heads: one tile of 64 keys",
    {
        "scores": (
            Span(0, 0.8, "wait K", "wait"),
            Span(0.8, 2.8, "S = Q Kᵀ", "mma"),
            Span(2.8, 3.8, "P", "softmax"),
            Span(3.8, 5.4, "wait dS", "wait"),
            Span(5.4, 7.4, "dQ[:, :256] += dS K", "mma"),
            Span(7.4, 10, "gather the next tile", "copy"),
        ),
        "values": (
            Span(0, 0.8, "wait K", "wait"),
            Span(0.8, 2.8, "dP = dO Vᵀ", "mma"),
            Span(2.8, 4, "wait P", "wait"),
            Span(4, 5.2, "dS", "softmax"),
            Span(5.4, 7.4, "dQ[:, 256:512] += dS K", "mma"),
            Span(7.4, 10, "gather the next tile", "copy"),
        ),
        "reduce": (
            Span(0, 3.8, "dKV of the previous tile: 64 dims multiplied, added to memory, 64 more", "add"),
            Span(3.8, 4.8, "Pᵀ to registers", "softmax"),
            Span(4.8, 5.4, "wait", "wait"),
            Span(5.4, 6.6, "dQ[:, 512:]", "mma"),
            Span(6.6, 10, "dKV of this tile: 64 dims multiplied, added, 64 more", "add"),
        ),
    },
    (Arrow(0, 3.6, 1, 4), Arrow(1, 5.2, 2, 5.4), Arrow(1, 5.2, 0, 5.4)),
    note="Not to scale. dS overwrites P in shared memory once the reduce role has Pᵀ in registers.",
)


def _products(first: float) -> list[Span]:
    """The products of the sm100 kernel from dV of tile j to dQ of tile j + 1, with their cycles."""
    order = (
        ("dV j", 640),
        ("dQ j", 448),
        ("dK j", 640),
        ("", 96),
        ("S j+1", 864),
        ("dP j+1", 768),
        ("dV j+1", 640),
        ("dQ j+1", 448),
    )
    spans, start = [], first
    for label, cycles in order:
        spans.append(Span(start, start + cycles, label, "mma"))
        start += cycles
    return spans


PRODUCTS = _products(0)
BACKWARD_SM100 = Chart(
    "The sparse backward on Blackwell: products of a tile of 32 keys, in cycles",
    {
        "gather": (
            Span(0, 640, "K j+1", "copy"),
            Span(
                640,
                4544,
                "K j+2, into j's buffer, 128 columns at a time, each freed by the last product that reads it",
                "copy",
            ),
        ),
        "mma": PRODUCTS,
        "softmax": (
            Span(0, 560, "dS j", "softmax"),
            Span(2688, 3400, "P j+1", "softmax"),
            Span(3456, 4050, "dS j+1", "softmax"),
        ),
        "epilogue": (Span(1250, 3300, "dKV j: 128 dims at a time, once their dK is done; added by red.v4", "add"),),
    },
    (Arrow(1, 2688, 2, 2700), Arrow(1, 3456, 2, 3470), Arrow(2, 3400, 1, 3456), Arrow(2, 4050, 1, 4096)),
    tuple((span.start, f"{span.start:.0f}") for span in PRODUCTS if span.label),
    "Products to scale, in predicted cycles; other lanes show order only. Unlabelled: the RoPE dims of dKV, 96 cycles.",
)

TENSOR_MEMORY = (
    (
        "sparse_backward_sm100, 32 keys per tile",
        480,
        (
            Region(0, 32, "lower", "S", "mma"),
            Region(0, 32, "upper", "dP", "mma"),
            *(Region(64 + 32 * t, 96 + 32 * t, "all", f"dKV|{t}", "add") for t in range(4)),
            *(Region(192 + 64 * t, 256 + 64 * t, "all", f"dQ {t}", "softmax") for t in range(4)),
            Region(448, 512, "lower", "dQ RoPE", "softmax"),
            Region(448, 480, "upper", "dKV RoPE", "add"),
        ),
    ),
    (
        "sparse_backward_sm100_ws, weight-stationary",
        464,
        (
            Region(0, 16, "all", "P", "mma"),
            Region(16, 32, "all", "dP", "mma"),
            *(Region(32 + 64 * t, 96 + 64 * t, "all", f"dKV {t}", "add") for t in range(2)),
            Region(160, 176, "all", "dKV|RoPE", "add"),
            *(Region(176 + 128 * t, 304 + 128 * t, "all", f"dQ {t}", "softmax") for t in range(2)),
            Region(432, 464, "all", "dQ|RoPE", "softmax"),
        ),
    ),
)

CALL = Chart(
    "The path of a call, from the public function to the driver",
    {
        "first call": (
            Span(0, 2, "ops/decode.py|options", "free"),
            Span(2, 4, "ops/call.py, schema|every check", "softmax"),
            Span(4, 6, "Pipeline.configure|choose a kernel", "mma"),
            Span(6, 8, "Pipeline.steps|launches as data", "mma"),
            Span(8, 10, "runtime/loader|build and load", "copy"),
            Span(10, 12, "Prepared.enqueue|pack addresses", "add"),
            Span(12, 14, "runtime/cuda_driver|launch", "add"),
        ),
        "later calls": (
            Span(0, 2, "ops/decode.py|options", "free"),
            Span(2, 4, "ops/call.py|look up", "softmax"),
            Span(4, 10, "checks, configuration, kernels, parameter blocks: as they were", "wait"),
            Span(10, 12, "Prepared.enqueue|pack addresses", "add"),
            Span(12, 14, "runtime/cuda_driver|launch", "add"),
        ),
    },
)

MLA = Flow(
    "Multi-head latent attention: one cache, two orders of the same products",
    (
        Node(20, 40, 140, "hidden state|of a token", "free"),
        Node(20, 130, 140, "cached: latent c, 512,|and RoPE key r, 64", "add"),
        Node(200, 40, 340, "un-absorbed: keys and values of each head", "free"),
        Node(200, 130, 150, "keys: W_UK c and r|128 + 64, per head", "mma"),
        Node(390, 130, 150, "values: W_UV c|128, per head", "mma"),
        Node(200, 220, 150, "scores|q . k, 192 wide", "mma"),
        Node(390, 220, 150, "output of a head|sum of p W_UV c", "mma"),
        Node(590, 40, 350, "absorbed: all heads read the cache as it lies", "free"),
        Node(590, 130, 160, "queries: W_UKᵀ q|512 + 64, per head", "softmax"),
        Node(780, 130, 160, "W_UV times the sum|128, per head", "softmax"),
        Node(590, 220, 160, "scores|q' . (c, r), 576 wide", "mma"),
        Node(780, 220, 160, "sum of p c|512 wide", "mma"),
    ),
    ((0, 1), (1, 3), (3, 5), (4, 6), (5, 6), (8, 10), (10, 11), (11, 9)),
    note="Purple: what is cached, 576 numbers per token. Orange: weights moved to the queries and to the output.",
)

PEERS = {"flashmla": "FlashMLA", "fa3": "FlashAttention-3"}


def _sizes(case: str) -> str:
    """A benchmark's case in words."""
    b, s_q, h_q, s_kv = (int(number) for number in re.findall(r"[a-z](\d+)", case))
    queries = f", {s_q} queries" if s_q > 1 else ""
    return f"{b} x {s_kv:,} tokens, {h_q} heads{queries}"


def decode_ratios() -> Bars:
    """Decode beside its peers, from the rows of a kept run."""
    rows = [json.loads(line) for line in DECODE_RESULTS.read_text().splitlines()]
    own = [row for row in rows if row["implementation"] == "mla_cupy" and row["timing"]]
    return Bars(
        "Dense decode: speed of mla_cupy divided by the speed of its peers",
        {PEERS["flashmla"]: "mma", PEERS["fa3"]: "softmax"},
        [(_sizes(row["case"]), [row["speed_vs"][peer] for peer in PEERS]) for row in own],
        note="Bars start at 1x: equal speed. One H200 run, bfloat16, pages of 64. Left: sequences x cached tokens.",
    )


DRAWINGS = {
    "decode-ratios": bars(decode_ratios()),
    "mla": flow(MLA),
    "seesaw": chart(SEESAW),
    "sparse-forward-small": chart(SMALL),
    "dense-sm90": chart(DENSE),
    "sparse-backward-sm90": chart(BACKWARD_SM90),
    "sparse-backward-sm100": chart(BACKWARD_SM100),
    "tensor-memory": tensor_memory("Tensor memory of the Blackwell kernels", TENSOR_MEMORY),
    "call": chart(CALL),
}


def main() -> None:
    """Write every drawing."""
    for name, svg in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(svg)


if __name__ == "__main__":
    main()
