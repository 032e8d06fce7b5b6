"""The losses that train the indexer, over all keys or selected ones, and their gradients; causal queries.

The check compares a few queries with the float64 oracle, and all keys by an identity: the rows of queries do not
interact, and what a key's gradient is made of takes all queries after it, but

    sum_s d_index_k[s] . index_k[s] = sum_tj d_index_q[t, j] . index_q[t, j]

as both are the sum of G W max(a, 0) over all pairs. Cases of few tokens are compared with the oracle as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import mla_cupy
from mla_cupy import reference

from ..core.cost import ELEMENT_BYTES, SINGLE_BYTES, Cost
from ..core.device import Device
from ..core.implementation import DETERMINISTIC, OWN, Choices, Known, Own, Prepared, own_kernels, with_kernel
from ..core.operation import BenchOperation, Case, Ratio
from ..core.recorders import EVENTS, Call
from ..core.report import microseconds
from ..core.tolerance import SampledVerdict, spaced

Array = npt.NDArray[Any]

# ---- Cases -----------------------------------------------------------------------------------------------------------

INDEX_DIMS = (32, 64, 128)
D_ROPE = 64
"""Last columns of keys per head, which all heads share."""


@dataclass(frozen=True)
class LossCase(Case):
    """The microseconds are the best peer's on one H200 on one day, and our target there, for orientation."""

    b: int
    s: int
    h: int
    d: int
    h_i: int
    d_i: int
    per_head: bool = False
    topk: int = 0
    mha: bool = False
    fp8: bool = False
    peer_us: float | None = field(default=None, compare=False)
    target_us: float | None = field(default=None, compare=False)

    @property
    def op(self) -> str:
        return "indexer_sparse_loss" if self.topk else "indexer_warmup_loss"

    @property
    def seen(self) -> dict[str, float | None]:
        return {"cudnn-frontend": self.peer_us, "target": self.target_us}

    @property
    def name(self) -> str:
        more = "-perhead" if self.per_head else f"-k{self.topk}" if self.topk else ""
        more += ("-mha" if self.mha else "") + ("-fp8" if self.fp8 else "")
        return f"b{self.b}-s{self.s}-h{self.h}x{self.d}-i{self.h_i}x{self.d_i}{more}"

    @property
    def tokens(self) -> int:
        """The tokens of all sequences."""
        return self.b * self.s

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that counts for it."""
        short = min(self.s, self.topk or self.s)  # queries that see no more than they may select
        return self.b * (short * (short + 1) // 2 + (self.s - short) * short)

    @property
    def cost(self) -> Cost:
        """The scores of attention and indexer once, and four products of the indexer's size for gradients; per head the
        attention's output, too, of the same width.
        """
        attention = (2 if self.per_head else 1) * self.h * self.d
        own = self.h * (self.d - D_ROPE) + D_ROPE if self.mha else self.d
        vectors = (self.h_i + 1) * self.d_i  # of the indexer, and their gradients
        elements = self.h * self.d + own + vectors
        numbers = self.h + 2 * self.h_i + 3 + self.topk
        scored = vectors * (1 if self.fp8 else ELEMENT_BYTES)
        nbytes = self.tokens * (ELEMENT_BYTES * elements + scored + SINGLE_BYTES * numbers)
        return Cost(2 * self.pairs * (attention + 5 * self.h_i * self.d_i), nbytes)


DENSE = (
    LossCase(4, 2048, 64, 128, 64, 64, peer_us=2670, target_us=2200),
    LossCase(1, 8192, 128, 576, 64, 128, peer_us=20000, target_us=16000),
    LossCase(1, 4096, 128, 576, 64, 128),
    LossCase(16, 2048, 64, 128, 64, 64),
    LossCase(1, 32768, 64, 128, 32, 128),
)
# The attention of 128 x 576, un-absorbed; and training in FP8.
UNABSORBED = (
    LossCase(1, 8192, 128, 192, 64, 128, mha=True, target_us=8500),
    LossCase(1, 8192, 128, 192, 64, 128, mha=True, fp8=True),
)
SPARSE = (
    LossCase(1, 4096, 128, 576, 64, 128, topk=2048),
    LossCase(1, 16384, 128, 576, 64, 128, topk=2048),
)
# The table of the operator that had a target per head first (lemyx/tilelang-dsa). The larger cases have arrays of
# gigabytes: they have a suite, and run only there.
PER_HEAD = tuple(LossCase(b, 2048, 64, 128, 64, 64, per_head=True) for b in (4, 8, 16, 32, 64))
CASES = (*DENSE, *UNABSORBED, *SPARSE, PER_HEAD[0])


def case_of(
    b: str,
    s: str,
    h: str,
    d: str,
    h_i: str,
    d_i: str,
    per_head: str | None,
    topk: str | None,
    mha: str | None,
    fp8: str | None,
) -> LossCase:
    sizes = (int(b), int(s), int(h), int(d), int(h_i), int(d_i))
    case = LossCase(*sizes, bool(per_head), int(topk or 0), bool(mha), bool(fp8))
    if min(sizes) < 1 or case.d > 576 or case.d_i not in INDEX_DIMS:
        raise ValueError(f"every size must be at least 1, d at most 576, d_i one of {INDEX_DIMS}")
    if case.per_head and (case.topk or case.h != case.h_i):
        raise ValueError("per head needs one index head per head, and all keys")
    if case.mha and (case.topk or case.d <= D_ROPE):
        raise ValueError(f"keys per head are all keys, of more than {D_ROPE} columns")
    return case


# ---- Inputs and outputs ----------------------------------------------------------------------------------------------

POOL = 8192  # vectors that are drawn; more than these repeat them in random order


@dataclass(frozen=True)
class LossInputs:
    """One set of inputs: the arrays of the oracle's call by name, on the device and in NumPy."""

    arguments: dict[str, Any]
    host: dict[str, Array]

    @property
    def call(self) -> dict[str, Any]:
        """The arguments of the public call."""
        starts = ("cu_seqlens_q", "cu_seqlens_kv")
        others = {name: x for name, x in self.arguments.items() if name not in starts}
        return {**others, "packed": mla_cupy.Packed(*(self.arguments[name] for name in starts))}


@dataclass(frozen=True)
class LossOutputs:
    """Results of a call. `kl` is None for implementations that only have gradients; what is no loss at all has but one
    array, for its time to be compared.
    """

    kl: Any
    d_index_q: Any
    d_index_k: Any
    d_weights: Any


def make_inputs(case: LossCase, dtype: str, seed: int, device: Device) -> LossInputs:
    """Normal numbers in bfloat16, whatever `dtype` is. The log-sum-exps approximate the attention, which would
    take as long as the loss; targets are normalised anyway.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        vectors = math.prod(shape[:-1])
        pool = rng.standard_normal((min(POOL, vectors), shape[-1]), np.float32).astype(ml_dtypes.bfloat16)
        made: Array = pool.reshape(shape) if vectors <= POOL else pool[rng.integers(0, POOL, shape[:-1])]
        return made

    starts = (case.s * np.arange(case.b + 1)).astype(np.int32)
    position = np.arange(case.tokens) % case.s
    counts = np.minimum(position + 1, case.topk or case.s)
    lse = np.log(counts)[:, None] + rng.uniform(0.4, 0.6, (case.tokens, case.h))
    host = {
        "q": normal(case.tokens, case.h, case.d),
        **_keys(case, normal),
        "index_q": normal(case.tokens, case.h_i, case.d_i),
        "index_k": normal(case.tokens, case.d_i),
        "weights": rng.standard_normal((case.tokens, case.h_i), np.float32),
        **({} if case.per_head else {"lse": lse.astype(np.float32)}),
        "cu_seqlens_q": starts,
        "cu_seqlens_kv": starts,
    }
    if case.fp8:
        host |= _codes(host)
    if case.per_head:
        host["v"] = normal(case.tokens, case.d)
    if case.topk:
        host["indices"] = np.full((case.tokens, case.topk), -1, np.int32)
        for row, last, count in zip(host["indices"], position, counts, strict=True):
            row[:count] = np.sort(rng.choice(last + 1, count, replace=False, shuffle=False))
    arguments = {name: device.upload(x) for name, x in host.items()}
    if case.mha:
        for arrays in (arguments, host):
            arrays["k"] = arrays["k"][..., : case.d - D_ROPE]
    return LossInputs(arguments, host)


def _keys(case: LossCase, normal: Callable[..., Array]) -> dict[str, Array]:
    """Keys of all heads, or of each: half of a projection's output, beside the values, and the last columns."""
    if not case.mha:
        return {"k": normal(case.tokens, case.d)}
    return {"k": normal(case.tokens, case.h, 2 * (case.d - D_ROPE)), "k_rope": normal(case.tokens, D_ROPE)}


def _codes(host: dict[str, Array]) -> dict[str, Array]:
    """Index queries and keys as e4m3, times 64 before they are rounded; weights with all factors."""
    _, h_i, d_i = host["index_q"].shape
    codes = {
        name: (host[name].astype(np.float32) * 64).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        for name in ("index_q", "index_k")
    }
    folded = host["weights"] * np.float32((h_i * d_i) ** -0.5 / 64)
    scales = {
        "q_scale": np.full(folded.shape, 1 / 64, np.float32),
        "k_scale": np.full(len(codes["index_k"]), 1 / 64, np.float32),
    }
    return {**codes, "weights": folded, **scales}


# ---- What is timed ---------------------------------------------------------------------------------------------------

GENERIC = "indexer_loss_generic_scores"  # without tensor cores
FORWARD = "forward"
"""The figure of the loss alone; per head, with the attention's output."""


class IndexerLoss(Own):
    """The call of a training step; the loss alone is a further figure."""

    def unsupported(self, case: LossCase, dtype: str) -> str | None:
        if self._deterministic and not case.topk:
            return "the warm-up loss is deterministic anyway"
        return None

    def prepare(self, case: LossCase, dtype: str, sets: Sequence[LossInputs], device: Device) -> Prepared:
        function = with_kernel(getattr(mla_cupy, case.op), self._kernel)
        options: dict[str, Any] = {"scale": case.d**-0.5}
        if case.topk:
            options["deterministic"] = self._deterministic
        if case.per_head:
            options["target"] = "per_head"
        shape = (case.tokens, case.h) if case.per_head else (case.tokens,)
        rows = [{name: device.empty(shape, "float32") for name in ("kl", "mass", "index_lse")} for _ in sets]
        if case.per_head:
            for row in rows:
                row["out"] = device.empty((case.tokens, case.h, case.d), "bfloat16")
                row["attention_lse"] = device.empty((case.tokens, case.h), "float32")
        gradients = [
            {
                "d_index_q": device.empty((case.tokens, case.h_i, case.d_i), "bfloat16"),
                "d_index_k": device.empty((case.tokens, case.d_i), "bfloat16"),
                "d_weights": device.empty((case.tokens, case.h_i), "float32"),
            }
            for _ in sets
        ]
        calls: list[Call] = [
            partial(function, **inputs.call, **options, results=mla_cupy.LossResults(**row, **gradient))
            for inputs, row, gradient in zip(sets, rows, gradients, strict=True)
        ]
        alone: list[Call] = [
            partial(function, **inputs.call, **options, results=mla_cupy.LossResults(**row), gradients=False)
            for inputs, row in zip(sets, rows, strict=True)
        ]
        includes = "loss, gradients, the attention's output and log-sum-exps" if case.per_head else "loss and gradients"
        return self.prepared(
            calls,
            [LossOutputs(row["kl"], **gradient) for row, gradient in zip(rows, gradients, strict=True)],
            device,
            includes=includes if case.per_head else f"{includes}; the log-sum-exps are given",
            figures={FORWARD: alone} if self.name == OWN else {},
        )


Rows = Sequence[Mapping[str, Any]]


def ratios(rows: Rows) -> list[Ratio]:
    """Ratios whose rows were both timed. An aim is the largest ratio that is wanted."""
    shape = rows[0]["shape"]
    wanted: list[tuple[str, str, str, str, str, float | None]]
    steps = "cudnn-frontend's scores of the attention, scores of the indexer, and gradients"
    if shape["topk"]:
        wanted = [
            (OWN, "", "cudnn", "", f"loss and gradients / {steps}, over the selected keys", 1.0),
            (DETERMINISTIC, "", OWN, "", "deterministic / not deterministic", 1.5),
        ]
    elif shape["per_head"]:
        wanted = [
            (OWN, FORWARD, "flash", FORWARD, "loss and output / FlashAttention-2's forward", 1.3),
            (OWN, "", "flash", "", "loss, output and gradients / FlashAttention-2's forward and backward", 0.95),
        ]
    else:
        most = 0.65 if shape["d"] <= 128 else 0.70
        wanted = [
            (OWN, "", "cudnn", "", f"loss and gradients / {steps}", most),
            (OWN, FORWARD, OWN, "", "the loss alone / loss and gradients", None),
            (OWN, "", "flash", "", "loss and gradients / FlashAttention-2's forward and backward", None),
        ]
    found = []
    for name, figure, other, other_figure, text, aim in wanted:
        us, other_us = _us(rows, name, figure), _us(rows, other, other_figure)
        if us and other_us:
            found.append(Ratio(text, us / other_us, aim))
    return found


def _us(rows: Rows, name: str, figure: str) -> float | None:
    """The time of a row, or of one of its figures."""
    row = next((row for row in rows if row["implementation"] == name), None)
    if row is None or microseconds(row) is None:
        return None
    return row["figures_us"].get(figure) if figure else microseconds(row)


# ---- Check -----------------------------------------------------------------------------------------------------------

QUERIES = 4
FEW_TOKENS = 512
KL_ERROR = 1e-4  # of max(1, kl)
GRADIENT_ERROR = 2.0**-6  # of a row's largest element: bfloat16, of gradients by the scores and of results
#: The largest element is at least taken for this: a query that sees one key has a gradient of rounding errors, and
#: those are larger per head, of scores that are not scaled.
ROUNDED = (1e-4, 1e-2)
SUM_ERROR = 2.0**-8  # of the sum of the products' magnitudes


@dataclass(frozen=True)
class Sample:
    """Expected results of one query; and, in the last of them, a condition on all results together."""

    row: int
    kl: Array  # of each head, if the target is
    d_index_q: Array
    d_weights: Array


@dataclass(frozen=True)
class Whole:
    """The index arrays, and of a case of few tokens the gradient by keys."""

    index_q: Array
    index_k: Array
    d_index_k: Array | None


def expect(case: LossCase, dtype: str, inputs: LossInputs, device: Device) -> list[Any]:
    """The oracle's results of a few queries; then a `Whole`."""
    host = inputs.host
    arguments: dict[str, Any] = dict(host)
    d_index_k = _exact(case, arguments).d_index_k if case.tokens <= FEW_TOKENS else None
    whole = Whole(*_values(host), d_index_k)
    return [*(_sample(case, host, int(row)) for row in spaced(case.tokens, QUERIES)), whole]


def _values(host: dict[str, Array]) -> tuple[Array, Array]:
    """Index queries and keys as numbers."""
    index_q, index_k = host["index_q"], host["index_k"]
    if "q_scale" not in host:
        return index_q, index_k
    index_q, index_k = (x.view(ml_dtypes.float8_e4m3fn).astype(np.float32) for x in (index_q, index_k))
    return index_q * host["q_scale"][..., None], index_k * host["k_scale"][:, None]


def _sample(case: LossCase, host: dict[str, Array], row: int) -> Sample:
    first = row // case.s * case.s
    of_queries = ("q", "index_q", "weights", "q_scale", "lse", "indices")
    one = {name: host[name][row : row + 1] for name in of_queries if name in host}
    of_keys = ("k", "k_rope", "index_k", "k_scale")
    keys = {name: host[name][first : row + 1] for name in of_keys if name in host}
    exact = _exact(case, {**one, **keys})
    assert exact.d_index_q is not None
    assert exact.d_weights is not None
    return Sample(row, np.atleast_1d(exact.kl[0]), exact.d_index_q[0], exact.d_weights[0])


def _exact(case: LossCase, arguments: dict[str, Any]) -> reference.SparseLoss | reference.WarmupLoss:
    if case.topk:
        return reference.indexer_sparse_loss(**arguments)
    return reference.indexer_warmup_loss(**arguments, target="per_head" if case.per_head else "head_sum")


def judge(expected: Sequence[Any], outputs: LossOutputs, dtype: str, device: Device) -> SampledVerdict:
    """Compares what was written with the samples. What is no loss is not judged."""
    if outputs.d_index_k is None:
        return SampledVerdict(True, "", {}, {}, {})
    *samples, whole = expected
    errors = {"d_index_q": 0.0, "d_weights": 0.0}
    for sample in samples:
        if outputs.kl is not None:
            got = np.atleast_1d(device.to_host(outputs.kl[sample.row]))
            error = np.abs(got - sample.kl) / (KL_ERROR * np.maximum(1.0, np.abs(sample.kl)))
            errors["kl"] = max(errors.get("kl", 0.0), float(error.max()))
        for name in ("d_index_q", "d_weights"):
            row = device.to_host(getattr(outputs, name)[sample.row])
            errors[name] = max(errors[name], _error(row, getattr(sample, name), ROUNDED[len(sample.kl) > 1]))
    errors["d_index_k"] = _keys_error(outputs, whole, device)
    errors = {name: np.inf if np.isnan(error) else error for name, error in errors.items()}
    reasons = [f"{name} differs by {error:.3g} times what is allowed" for name, error in errors.items() if error > 1]
    counts = {name: len(samples) for name in errors}
    return SampledVerdict(not reasons, "; ".join(reasons), errors, dict.fromkeys(errors, 1.0), counts)


def _error(got: Array, want: Array, rounded: float = ROUNDED[False]) -> float:
    """The error of one query, in units of the allowed one."""
    unit = max(float(np.abs(want).max()), rounded)
    return float(np.abs(got.astype(np.float64) - want).max()) / (GRADIENT_ERROR * unit)


def _keys_error(outputs: LossOutputs, whole: Whole, device: Device) -> float:
    d_index_k, d_index_q = (device.to_host(x).astype(np.float32) for x in (outputs.d_index_k, outputs.d_index_q))
    by_keys = d_index_k * whole.index_k.astype(np.float32)
    by_queries = d_index_q * whole.index_q.astype(np.float32)
    magnitudes = np.abs(by_keys).sum(dtype=np.float64) + np.abs(by_queries).sum(dtype=np.float64)
    difference = abs(by_keys.sum(dtype=np.float64) - by_queries.sum(dtype=np.float64))
    error = float(difference / (SUM_ERROR * max(magnitudes, 1e-6)))
    return error if whole.d_index_k is None else max(error, _error(d_index_k, whole.d_index_k))


# ---- The operation ---------------------------------------------------------------------------------------------------


def implementations(choices: Choices) -> Known:
    """Everything that computes the gradients of a loss, and attention for scale."""
    from ..peers.cudnn_loss import CudnnLoss
    from ..peers.torch_flash import FlashAttention

    return {
        **own_kernels(IndexerLoss, choices, GENERIC, deterministic=True),
        "cudnn": CudnnLoss,
        "flash": FlashAttention,
    }


INDEXER_LOSS = BenchOperation(
    name="indexer-loss",
    title="the indexer's losses, over all or selected keys: divergence from the main attention, and gradients",
    examples="""examples:
  run indexer-loss --quick                             two shapes, without peers
  run indexer-loss --suite aims --deterministic --peers cudnn,flash    the ratios that have an aim
  run indexer-loss --suite per-head --peers flash      the table of a target per head
  run indexer-loss --case b2-s1000-h16x128-i8x64       any other shape, named in the same form
""",
    peers="cudnn (cudnn-frontend: imports torch, compiles at its first call), flash (FlashAttention-2 of torch: a "
    "scale, no loss), generic; or none. Default: none",
    suites={
        "targets": CASES,
        "quick": DENSE[:2],
        "sparse": SPARSE,
        "unabsorbed": (DENSE[1], *UNABSORBED),
        "per-head": PER_HEAD,
        "aims": (*DENSE[:2], PER_HEAD[0], SPARSE[0]),
    },
    case_form=(
        "b<N>-s<N>-h<N>x<N>-i<N>x<N>: sequences, their length, heads x width, index heads x width; then -perhead "
        "for targets per head, or -k<N> for the sparse stage with N selected keys; -mha for keys per head, "
        "whose last 64 columns all heads share; -fp8 for index queries and keys in e4m3"
    ),
    pattern=r"b(\d+)-s(\d+)-h(\d+)x(\d+)-i(\d+)x(\d+)(-perhead)?(?:-k([1-9]\d*))?(-mha)?(-fp8)?",
    case_of=case_of,
    inputs=make_inputs,
    expect=expect,
    judge=judge,
    results=("d_index_q",),
    implementations=implementations,
    method=EVENTS,
    deterministic=True,
    ratios=ratios,
)
