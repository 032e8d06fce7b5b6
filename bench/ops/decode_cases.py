"""The cases of dense decode, each with what peers reached and what we aim at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.shapes import VALUE_WIDTHS

from ..core.cost import D_QK, D_V, ELEMENT_BYTES, Cost
from ..core.operation import Case


@dataclass(frozen=True)
class DecodeCase(Case):
    """One dense paged decode: every sequence has `s_kv` keys, or with a `mix` a random number of up to `s_kv`.

    With a `window` each query sees the last `window` of them; 0 is no window.

    The microseconds are what the peers took on one H200 on one day, and our target there. They are for orientation:
    a claim is always a ratio of two figures of one run.
    """

    b: int
    s_q: int
    h_q: int
    s_kv: int
    page_size: int = 64
    d_qk: int = D_QK
    mix: int = 0
    window: int = 0
    flashmla_us: float | None = field(default=None, compare=False)
    fa3_us: float | None = field(default=None, compare=False)
    target_us: float | None = field(default=None, compare=False)

    op = "mla_decode"

    @property
    def math(self) -> str:
        """Arithmetic of our own call, and of the oracle."""
        return "exact"

    @property
    def expected_math(self) -> str:
        """Arithmetic of the results that errors are beside."""
        return self.math

    @property
    def name(self) -> str:
        name = f"b{self.b}-sq{self.s_q}-hq{self.h_q}-skv{self.s_kv}"
        if self.page_size != 64:
            name += f"-page{self.page_size}"
        if self.d_qk != D_QK:
            name += f"-dqk{self.d_qk}"
        if self.mix:
            name += f"-mix{self.mix}"
        if self.window:
            name += f"-win{self.window}"
        return name

    @property
    def d_v(self) -> int:
        """Width of the values."""
        return VALUE_WIDTHS[self.d_qk]

    @property
    def cost(self) -> Cost:
        """The cost in the absorbed form.

        Two products per key: d_qk wide for the score, d_v for the value, a multiply and an add each. The causal
        corner of s_q > 1 counts as full, as in the peers' own benchmarks. Every key and q are read once, out is
        written once; partial results of splits are internal to a kernel and not counted.
        """
        lengths = self.lengths()
        tokens = int((np.minimum(lengths, self.window + self.s_q - 1) if self.window else lengths).sum())
        flops = 2 * tokens * self.s_q * self.h_q * (self.d_qk + self.d_v)
        cache = tokens * self.d_qk * ELEMENT_BYTES
        queries_and_out = self.b * self.s_q * self.h_q * (self.d_qk + self.d_v) * ELEMENT_BYTES
        return Cost(flops, cache + queries_and_out)

    @property
    def seen(self) -> dict[str, float | None]:
        return {"FlashMLA": self.flashmla_us, "FA3": self.fa3_us, "target": self.target_us}

    @property
    def scale(self) -> float:
        return float(self.d_qk**-0.5)

    def lengths(self) -> npt.NDArray[np.int32]:
        """Keys of each sequence, (b,). Odd mixes are uniform, even ones log-uniform: most sequences are short."""
        if not self.mix:
            return np.full(self.b, self.s_kv, np.int32)
        draw = np.random.default_rng(self.mix).random(self.b)
        lengths = draw * self.s_kv if self.mix % 2 else float(self.s_kv) ** draw
        return np.clip(np.ceil(lengths), 1, self.s_kv).astype(np.int32)

    @property
    def max_pages(self) -> int:
        """Pages of one sequence."""
        return -(-self.s_kv // self.page_size)

    @property
    def num_pages(self) -> int:
        """Pages of the whole cache."""
        return self.b * self.max_pages

    def shape(self) -> dict[str, Any]:
        names = ("b", "s_q", "h_q", "s_kv", "page_size")
        shape = {**{name: getattr(self, name) for name in names}, "d_qk": self.d_qk, "d_v": self.d_v}
        return shape | {name: value for name in ("mix", "window") if (value := getattr(self, name))}

    @property
    def options(self) -> dict[str, Any]:
        """Options of the call."""
        return {"window": self.window} if self.window else {}


CASES = (
    # b, s_q, h_q, s_kv
    DecodeCase(128, 1, 128, 4096, flashmla_us=254, fa3_us=269, target_us=235),
    DecodeCase(128, 2, 128, 4096, flashmla_us=494, fa3_us=502, target_us=460),
    DecodeCase(64, 1, 128, 16384, flashmla_us=512, fa3_us=502, target_us=460),
    DecodeCase(128, 1, 64, 4096, flashmla_us=164, fa3_us=170, target_us=148),
    DecodeCase(128, 1, 32, 8192, flashmla_us=300, fa3_us=299, target_us=286),
    DecodeCase(128, 1, 16, 8192, flashmla_us=302, fa3_us=297, target_us=286),
    DecodeCase(128, 4, 16, 8192, flashmla_us=303, fa3_us=302, target_us=288),
    DecodeCase(128, 1, 8, 8192, flashmla_us=297, fa3_us=294, target_us=285),
    DecodeCase(32, 1, 16, 8192, flashmla_us=100, fa3_us=89, target_us=76),
    DecodeCase(16, 1, 128, 8192, flashmla_us=82, fa3_us=80, target_us=66),
    DecodeCase(4, 1, 128, 8192, flashmla_us=48, fa3_us=37, target_us=26),
    DecodeCase(1, 1, 128, 1024, flashmla_us=18.6, fa3_us=16.4, target_us=8),
    DecodeCase(1, 1, 128, 8192, flashmla_us=31.7, fa3_us=24.4, target_us=14),
    DecodeCase(1, 1, 128, 131072, flashmla_us=98.9, fa3_us=92.6, target_us=74),
    DecodeCase(1, 1, 16, 1024, flashmla_us=15.8, fa3_us=13.7, target_us=7),
    DecodeCase(1, 1, 16, 8192, flashmla_us=29.5, fa3_us=19.7, target_us=8),
    DecodeCase(1, 1, 16, 131072, flashmla_us=80.7, fa3_us=60.6, target_us=40),
)

# Numbers of heads that no model above has, and keys without RoPE columns.
HEADS = tuple(DecodeCase(b, 1, h_q, 8192) for h_q in (8, 12, 16, 96) for b in (128, 8))
NOPE = tuple(DecodeCase(b, 1, h_q, 8192, d_qk=D_V) for h_q in (16, 64, 128) for b in (128, 1))
# Smaller latents: the heads of Mistral Small 4 and of MiniCPM3, whole and on two GPUs, and two queries of each.
NARROW = tuple(
    DecodeCase(b, s_q, h_q, s_kv, d_qk=d_qk)
    for d_qk, heads in ((320, 32), (288, 40))
    for h_q, s_q in ((heads, 1), (heads // 2, 1), (heads, 2))
    for b, s_kv in ((128, 8192), (1, 8192))
)
# Launches and the merge of partial results are a large part of the time.
SMALL_BATCHES = tuple(
    DecodeCase(b, 1, h_q, s_kv) for h_q in (16, 32, 128) for b in (1, 2, 4, 8) for s_kv in (1024, 8192, 32768)
)
# Engines use pages of 16 tokens; the same keys in larger pages for comparison.
PAGES = tuple(
    DecodeCase(b, 1, h_q, s_kv, page_size=page_size)
    for b, h_q, s_kv in ((64, 128, 8192), (128, 128, 4096), (128, 16, 8192), (1, 128, 8192), (1, 16, 8192))
    for page_size in (16, 32, 64, 128)
)


def _mix(number: int) -> DecodeCase:
    rng = np.random.default_rng([7, number])
    b, h_q, s_kv = (int(rng.choice(values)) for values in ((8, 32, 64, 128), (16, 32, 64, 128), (2048, 8192, 16384)))
    return DecodeCase(b, 1, h_q, s_kv, mix=number)


MIXES = tuple(_mix(number) for number in range(1, 41))

# The cost of queries in two arrays, varying lengths, a sink and inverse RoPE, by `--peers`; and windows, next to
# plain calls that read equally many keys.
FORMS = (
    *(DecodeCase(128, s_q, h_q, s_kv) for h_q, s_q, s_kv in ((128, 1, 4096), (128, 2, 4096), (64, 1, 4096))),
    *(DecodeCase(b, s_q, 16, 8192) for s_q in (1, 2, 4) for b in (128, 32)),
    *(DecodeCase(128, 1, h_q, s_kv, d_qk=D_V) for h_q, s_kv in ((128, 4096), (16, 8192))),
)
WINDOWS = tuple(
    DecodeCase(128, 1, h_q, s_kv, window=window)
    for h_q, kept in ((128, 4096), (16, 8192))
    for s_kv, window in ((kept, 0), (4 * kept, kept), (kept, kept))
)

# One of each kind: large and compute-bound, long, memory-bound, and a single sequence.
QUICK_NAMES = (
    "b128-sq1-hq128-skv4096",
    "b64-sq1-hq128-skv16384",
    "b128-sq1-hq16-skv8192",
    "b1-sq1-hq128-skv8192",
)

SUITES = {
    "targets": CASES,
    "quick": tuple(case for case in CASES if case.name in QUICK_NAMES),
    "heads": HEADS,
    "nope": NOPE,
    "narrow": NARROW,
    "small-batches": SMALL_BATCHES,
    "pages": PAGES,
    "mixes": MIXES,
    "forms": FORMS,
    "windows": WINDOWS,
    "table": tuple(dict.fromkeys((*CASES, *HEADS, *NOPE, *MIXES))),
}

PATTERN = r"b(\d+)-sq(\d+)-hq(\d+)-skv(\d+)(?:-page(\d+))?(?:-dqk(\d+))?(?:-mix(\d+))?(?:-win(\d+))?"


def fields_of(
    b: str,
    s_q: str,
    h_q: str,
    s_kv: str,
    page_size: str | None,
    d_qk: str | None,
    mix: str | None,
    window: str | None,
) -> dict[str, int]:
    """The fields of a case from the groups of `PATTERN`."""
    sizes = {"b": int(b), "s_q": int(s_q), "h_q": int(h_q), "s_kv": int(s_kv)}
    if min(sizes.values()) < 1:
        raise ValueError("every size must be at least 1")
    more = {
        "page_size": int(page_size or 64),
        "d_qk": int(d_qk or D_QK),
        "mix": int(mix or 0),
        "window": int(window or 0),
    }
    if more["d_qk"] not in VALUE_WIDTHS:
        raise ValueError(f"d_qk must be one of {', '.join(map(str, VALUE_WIDTHS))}")
    return sizes | more
