"""The cases of the indexer's logits: queries of one sequence, or the next tokens of sequences in pages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.cost import ELEMENT_BYTES, SINGLE_BYTES, Cost
from ...core.errors import BenchError

FORM = "sq<N>-skv<N>-h<N>[-d<N>][-full][-bf16|-float16], or paged b<N>-sq<N>-skv<N>-h<N>[-e2m1]"
PAGE_SIZE = 64
HEAD_DIMS = (32, 64, 128)


@dataclass(frozen=True)
class LogitsCase:
    """`b` is 0 for queries of one sequence, the last of whose `s_kv` tokens they are; `full`: each sees all keys.

    `float16`: our kernel adds up products in float16; a peer does what it does. `e2m1`: the keys of pages are, in
    records of 68 bytes.

    The microseconds are those of the best peer on one H200 on one day, and our target there; for orientation only.
    """

    s_q: int
    s_kv: int
    h: int = 64
    d: int = 128
    full: bool = False
    bf16: bool = False
    b: int = 0
    float16: bool = False
    e2m1: bool = False
    peer_us: float | None = field(default=None, compare=False)
    target_us: float | None = field(default=None, compare=False)

    @property
    def op(self) -> str:
        return "indexer_logits_paged" if self.b else "indexer_logits"

    @property
    def seen(self) -> dict[str, float | None]:
        """Microseconds for orientation, by source."""
        return {"DeepGEMM": self.peer_us, "target": self.target_us}

    @property
    def name(self) -> str:
        """The canonical name, which `parse` reads; fields at their default are left out."""
        name = f"sq{self.s_q}-skv{self.s_kv}-h{self.h}"
        if self.b:
            return f"b{self.b}-{name}" + "-e2m1" * self.e2m1
        if self.d != 128:
            name += f"-d{self.d}"
        flags = {"-full": self.full, "-bf16": self.bf16, "-float16": self.float16}
        return name + "".join(text for text, there in flags.items() if there)

    @property
    def keys_of_first(self) -> int:
        """Number of keys that the first query sees; each one after it sees one more, unless `full`."""
        return self.s_kv if self.full else max(0, self.s_kv - self.s_q + 1)

    @property
    def key_bytes(self) -> int:
        """Bytes of a key's record in pages: its codes, and a scale or four exponents."""
        return (self.d // 2 if self.e2m1 else self.d) + SINGLE_BYTES

    @property
    def num_keys(self) -> int:
        """Columns of the result."""
        return -(-self.s_kv // PAGE_SIZE) * PAGE_SIZE if self.b else self.s_kv

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        sequences = max(1, self.b)
        if self.full:
            return sequences * self.s_q * self.s_kv
        return sequences * sum(max(0, self.s_kv - i) for i in range(self.s_q))

    @property
    def cost(self) -> Cost:
        """A product and an addition per pair, head and element; every array moves once, the result as a whole."""
        sequences = max(1, self.b)
        rows, element = sequences * self.s_q, ELEMENT_BYTES if self.bf16 else 1
        keys = sequences * self.s_kv * (self.d * element if self.bf16 else self.key_bytes)
        queries = rows * self.h * (self.d * element + SINGLE_BYTES)
        return Cost(2 * self.pairs * self.h * self.d, keys + queries + SINGLE_BYTES * rows * self.num_keys)

    def shape(self) -> dict[str, Any]:
        """The sizes as plain data, for the records."""
        shape = {name: getattr(self, name) for name in ("b", "s_q", "s_kv", "h", "d", "full", "bf16", "float16")}
        return {**shape, "e2m1": True} if self.e2m1 else shape


CASES: tuple[LogitsCase, ...] = (
    LogitsCase(4096, 4096, peer_us=167, target_us=155),
    LogitsCase(4096, 32768, peer_us=1850, target_us=1710),
    LogitsCase(1, 32768, b=64),
    LogitsCase(1, 131072, b=1),
    LogitsCase(4096, 32768, full=True),
    LogitsCase(4096, 32768, 32),
    LogitsCase(4096, 32768, 128),
    LogitsCase(4096, 32768, bf16=True),
    LogitsCase(64, 131072),
    LogitsCase(2, 32768, b=64),
    LogitsCase(4, 8192, b=128),
    LogitsCase(1, 32768, 32, b=64),
    LogitsCase(4096, 4096, float16=True),
    LogitsCase(4096, 32768, float16=True),
)
# Keys in e2m1 beside the same ones in e4m3.
E2M1 = tuple(
    LogitsCase(s_q, s_kv, h, b=b, e2m1=e2m1)
    for b, s_q, s_kv, h in (
        (64, 1, 32768, 64),
        (64, 2, 32768, 64),
        (64, 1, 32768, 32),
        (64, 1, 4096, 64),
        (1, 1, 131072, 64),
    )
    for e2m1 in (False, True)
)
SUITES: Mapping[str, tuple[LogitsCase, ...]] = {"targets": CASES, "quick": CASES[:4], "e2m1": E2M1}

_PATTERN = re.compile(r"(?:b(\d+)-)?sq(\d+)-skv(\d+)-h(\d+)(?:-d(\d+))?(-full)?(-bf16|-float16|-e2m1)?")


def parse(name: str) -> LogitsCase:
    """The case of that name: one of `CASES`, or any other shape written in the same form."""
    match = _PATTERN.fullmatch(name.strip())
    if not match:
        raise BenchError(f"case {name!r}: expected {FORM}; `list` prints the built-in ones")
    *texts, full, kind = match.groups()
    b, s_q, s_kv, h, d = (
        int(text) if text else default for text, default in zip(texts, (0, 1, 1, 1, 128), strict=True)
    )
    if (
        min(s_q, s_kv, h) < 1
        or d not in HEAD_DIMS
        or (texts[0] and b < 1)
        or (b and (full or kind not in (None, "-e2m1") or d != 128))
    ):
        raise BenchError(f"case {name!r}: every size must be at least 1, d one of {HEAD_DIMS}; paged only e4m3 of 128")
    if kind == "-e2m1" and not b:
        raise BenchError(f"case {name!r}: keys in e2m1 are those of pages, expected {FORM}")
    case = LogitsCase(s_q, s_kv, h, d, bool(full), kind == "-bf16", b, kind == "-float16", kind == "-e2m1")
    return next((known for known in CASES if known == case), case)
