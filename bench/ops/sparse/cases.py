"""A sparse case: each query attends to the `topk` rows of kv that its indices select."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...core.cost import D_QK, D_V, Cost
from ...core.errors import BenchError
from ...core.operation import CaseOption

INDICES = ("random", "clustered")
FORM = "sq<N>-skv<N>-hq<N>-topk<N>[-dqk512][-clustered]"


@dataclass(frozen=True)
class SparseCase:
    """One sequence whose last `s_q` tokens are the queries. `indices` says how rows are selected: see `inputs`.

    The microseconds are those of the best peer on one H200 on one day with random indices, and our target there; for
    orientation only.
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
        """Microseconds for orientation, by source."""
        return {"best peer": self.peer_us, "target": self.target_us}

    @property
    def name(self) -> str:
        """The canonical name, which `parse` reads; fields at their default are left out, except topk."""
        name = f"sq{self.s_q}-skv{self.s_kv}-hq{self.h_q}-topk{self.topk}"
        if self.d_qk != D_QK:
            name += f"-dqk{self.d_qk}"
        return name if self.indices == "random" else f"{name}-{self.indices}"

    @property
    def scale(self) -> float:
        return float(self.d_qk**-0.5)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a selected row."""
        return self.s_q * self.topk

    def shape(self) -> dict[str, Any]:
        """The sizes as plain data, for the records."""
        names = ("s_q", "s_kv", "h_q", "topk", "d_qk", "indices")
        return {**{name: getattr(self, name) for name in names}, "d_v": D_V}


AnySparseCase = TypeVar("AnySparseCase", bound=SparseCase)

_PATTERN = re.compile(r"sq(\d+)-skv(\d+)-hq(\d+)-topk(\d+)(?:-dqk(\d+))?(-clustered)?")


def parse(name: str, kind: type[AnySparseCase], built_in: Sequence[AnySparseCase]) -> AnySparseCase:
    """The case of that name: a built-in one, or any other shape written in the same form."""
    match = _PATTERN.fullmatch(name.strip())
    if not match:
        raise BenchError(f"case {name!r}: expected {FORM}; `list` prints the built-in ones")
    *texts, clustered = match.groups()
    s_q, s_kv, h_q, topk, d_qk = (int(text) if text else D_QK for text in texts)
    if min(s_q, s_kv, h_q, topk) < 1 or d_qk not in (D_QK, D_V):
        raise BenchError(f"case {name!r}: every size must be at least 1, and dqk {D_QK} or {D_V}")
    case = kind(s_q, s_kv, h_q, topk, d_qk, "clustered" if clustered else "random")
    return next((known for known in built_in if known == case), case)


def with_indices(name: str, indices: str) -> str:
    """The name of the same case with other indices."""
    return name.removesuffix("-clustered") + ("-clustered" if indices == "clustered" else "")


CASE_OPTIONS = {
    "indices": CaseOption(
        choices=INDICES,
        help="how the rows of each query are selected, in every case: uniformly from the visible ones, or sinks, "
        "recent tokens and blocks that neighbouring queries share (default: as the case's name says, random)",
        rename=with_indices,
    )
}
