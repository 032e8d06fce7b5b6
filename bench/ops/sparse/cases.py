"""The sparse cases: each query attends to `topk` rows that indices choose."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .costs import D_QK, D_V, Cost, sparse_backward_cost, sparse_forward_cost
from .errors import BenchError

INDICES = ("random", "clustered")
FORM = "sq<N>-skv<N>-hq<N>-topk<N>[-dqk512][-clustered]"


@dataclass(frozen=True)
class SparseCase:
    """One sequence whose last `s_q` tokens ask. `indices` says how the rows are chosen: see `sparse_inputs`.

    The microseconds are those of the best peer on one H200 on one day with random indices, and what we aim at there;
    for orientation only.
    """

    s_q: int
    s_kv: int
    h_q: int
    topk: int = 2048
    d_qk: int = D_QK
    indices: str = "random"
    peer_us: float | None = field(default=None, compare=False)
    target_us: float | None = field(default=None, compare=False)

    @property
    def op(self) -> str:
        raise NotImplementedError

    @property
    def cost(self) -> Cost:
        raise NotImplementedError

    @property
    def seen(self) -> dict[str, float | None]:
        """Microseconds for orientation, by whose they are."""
        return {"best peer": self.peer_us, "target": self.target_us}

    @property
    def name(self) -> str:
        """The canonical name, which `parse` takes back; fields at their default are left out, except topk."""
        name = f"sq{self.s_q}-skv{self.s_kv}-hq{self.h_q}-topk{self.topk}"
        if self.d_qk != D_QK:
            name += f"-dqk{self.d_qk}"
        return name if self.indices == "random" else f"{name}-{self.indices}"

    @property
    def scale(self) -> float:
        return float(self.d_qk**-0.5)

    def shape(self) -> dict[str, Any]:
        """The sizes as plain data, for the records."""
        names = ("s_q", "s_kv", "h_q", "topk", "d_qk", "indices")
        return {**{name: getattr(self, name) for name in names}, "d_v": D_V}


class SparseForwardCase(SparseCase):
    """A case of `sparse_mla_forward`."""

    @property
    def op(self) -> str:
        return "sparse_mla_forward"

    @property
    def cost(self) -> Cost:
        return sparse_forward_cost(self)


class SparseBackwardCase(SparseCase):
    """A case of `sparse_mla_backward`."""

    @property
    def op(self) -> str:
        return "sparse_mla_backward"

    @property
    def cost(self) -> Cost:
        return sparse_backward_cost(self)


def with_indices(name: str, indices: str) -> str:
    """The name of the same case with other indices."""
    return name.removesuffix("-clustered") + ("-clustered" if indices == "clustered" else "")


AnySparseCase = TypeVar("AnySparseCase", bound=SparseCase)

FORWARD: tuple[SparseForwardCase, ...] = (
    # s_q, s_kv, h_q; the peer is FlashMLA, which takes 64 or 128 heads
    SparseForwardCase(4096, 8192, 128, peer_us=3990, target_us=3700),
    SparseForwardCase(4096, 32768, 128, peer_us=4160, target_us=3800),
    SparseForwardCase(4096, 32768, 64, peer_us=2120, target_us=1950),
    SparseForwardCase(4096, 32768, 16),
)
BACKWARD: tuple[SparseBackwardCase, ...] = (
    # s_q, s_kv, h_q; the peer is cudnn-frontend
    SparseBackwardCase(4096, 8192, 64, peer_us=6690, target_us=5900),
    SparseBackwardCase(4096, 8192, 128, peer_us=13900, target_us=11600),
    SparseBackwardCase(4096, 32768, 128, peer_us=17700, target_us=12500),
    SparseBackwardCase(4096, 32768, 64, peer_us=12000, target_us=7500),
    SparseBackwardCase(4096, 8192, 16, peer_us=6490, target_us=5600),
)
# Of each operation: compute-bound, and with more rows than the L2 holds comfortably.
FORWARD_SUITES: Mapping[str, tuple[SparseForwardCase, ...]] = {"targets": FORWARD, "quick": FORWARD[:2]}
BACKWARD_SUITES: Mapping[str, tuple[SparseBackwardCase, ...]] = {"targets": BACKWARD, "quick": BACKWARD[1:3]}

_PATTERN = re.compile(r"sq(\d+)-skv(\d+)-hq(\d+)-topk(\d+)(?:-dqk(\d+))?(-clustered)?")


def parse_forward(name: str) -> SparseForwardCase:
    """The forward case of that name: one of `FORWARD`, or any other shape written in the same way."""
    return _parse(name, SparseForwardCase, FORWARD)


def parse_backward(name: str) -> SparseBackwardCase:
    """The backward case of that name."""
    return _parse(name, SparseBackwardCase, BACKWARD)


def _parse(name: str, kind: type[AnySparseCase], built_in: tuple[AnySparseCase, ...]) -> AnySparseCase:
    match = _PATTERN.fullmatch(name.strip())
    if not match:
        raise BenchError(f"case {name!r}: expected {FORM}; `list` prints the built-in ones")
    *texts, clustered = match.groups()
    s_q, s_kv, h_q, topk, d_qk = (int(text) if text else D_QK for text in texts)
    if min(s_q, s_kv, h_q, topk) < 1 or d_qk not in (D_QK, D_V):
        raise BenchError(f"case {name!r}: every size must be at least 1, and dqk {D_QK} or {D_V}")
    case = kind(s_q, s_kv, h_q, topk, d_qk, "clustered" if clustered else "random")
    return next((known for known in built_in if known == case), case)
