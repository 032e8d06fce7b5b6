"""Un-absorbed prefill: `mla_prefill` over keys and values per head, as projections leave them.

The check compares some queries of some heads with the float64 oracle; the rest must be finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import mla_cupy
from mla_cupy import reference

from ..core.cost import D_V, ELEMENT_BYTES, SINGLE_BYTES, Cost
from ..core.device import Device
from ..core.implementation import OWN, Choices, Known, Own, Prepared, own_kernels, with_kernel
from ..core.operation import BenchOperation, Case
from ..core.recorders import Call
from ..core.tolerance import LSE_RELATIVE, SampledVerdict, distance, epsilon, spaced

Array = npt.NDArray[Any]

# ---- Cases -----------------------------------------------------------------------------------------------------------

D_ROPE = 64
MLA = 192, 128


@dataclass(frozen=True)
class PrefillCase(Case):
    """`b` sequences of equal lengths; the keys' last 64 columns are shared by all heads.

    Attributes
    ----------
    h_kv : int
        0: one per query head.
    causal : bool
        Whether a query is blind to what comes after it.
    state : bool
        Whether an earlier state, in float32, is merged.
    topk : int
        If not 0, each query attends to that many of the keys that it sees, by a mask.
    fp8 : bool
        Whether queries, keys and values are e4m3 codes, without scales.
    peer_us : float, optional
        Of the best peer on one H200 on one day, for orientation only.
    """

    b: int
    s_q: int
    s_kv: int
    h_q: int
    h_kv: int = 0
    d_qk: int = MLA[0]
    d_v: int = MLA[1]
    causal: bool = True
    state: bool = False
    topk: int = 0
    fp8: bool = False
    peer_us: float | None = field(default=None, compare=False)

    op = "mla_prefill"

    @property
    def heads_kv(self) -> int:
        return self.h_kv or self.h_q

    @property
    def scale(self) -> float:
        return float(self.d_qk**-0.5)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of a head."""
        if not self.causal:
            return self.b * self.s_q * self.s_kv
        longest = self.s_kv
        shortest = longest - self.s_q + 1  # below 1: the first queries see nothing
        first = max(1, shortest)
        return self.b * (longest - first + 1) * (first + longest) // 2

    @property
    def cost(self) -> Cost:
        queries, keys = self.b * self.s_q * self.h_q, self.b * self.s_kv * self.heads_kv
        elements = queries * (self.d_qk + self.d_v) + keys * (self.d_qk - D_ROPE + self.d_v)
        elements += self.b * self.s_kv * D_ROPE
        codes = elements - queries * self.d_v if self.fp8 else 0  # of half the bytes: all but the results
        state = SINGLE_BYTES * queries * (self.d_v + 1) if self.state else 0
        selection = self.b * self.s_q * (SINGLE_BYTES * self.topk + self.s_kv // 8) if self.topk else 0
        return Cost(
            flops=2 * self.pairs * self.h_q * (self.d_qk + self.d_v),
            nbytes=ELEMENT_BYTES * (elements - codes // 2) + SINGLE_BYTES * queries + state + selection,
        )

    @property
    def seen(self) -> dict[str, float | None]:
        return {"best peer": self.peer_us}

    @property
    def name(self) -> str:
        name = f"b{self.b}-sq{self.s_q}-skv{self.s_kv}-hq{self.h_q}"
        if self.h_kv:
            name += f"-hkv{self.h_kv}"
        if (self.d_qk, self.d_v) != MLA:
            name += f"-d{self.d_qk}x{self.d_v}"
        name += ("" if self.causal else "-full") + ("-state" if self.state else "")
        return name + (f"-topk{self.topk}" if self.topk else "") + ("-fp8" if self.fp8 else "")

    def shape(self) -> dict[str, Any]:
        return {**super().shape(), "h_kv": self.heads_kv}


CASES = (
    PrefillCase(2, 4096, 4096, 128, peer_us=1960),
    PrefillCase(1, 8192, 8192, 128, peer_us=3666),
    PrefillCase(1, 16384, 16384, 128, peer_us=15764),
    PrefillCase(4, 2048, 2048, 128, peer_us=1177),
    PrefillCase(8, 4096, 4096, 16, peer_us=1199),
    PrefillCase(1, 16384, 16384, 16, peer_us=2020),
    PrefillCase(1, 8192, 8192, 128, causal=False, peer_us=8088),
    PrefillCase(1, 8192, 8192, 64, d_qk=256, d_v=256),
    PrefillCase(1, 8192, 8192, 32, d_qk=128, d_v=128),
    # A chunk of 2,048 queries: its own keys, and an earlier chunk's
    PrefillCase(1, 2048, 2048, 16),
    PrefillCase(1, 2048, 7680, 16, causal=False),
    PrefillCase(1, 2048, 7680, 16, causal=False, state=True),
)
# A prefill of 2,048 selected keys a query: from which lengths on is it faster than sparse attention?
_LENGTHS = {
    16: (16384, 4096, 8192, 32768),
    8: (4096, 8192, 16384, 32768),
    64: (4096, 8192, 16384),
    128: (4096, 8192, 16384),
}
MASKED = tuple(PrefillCase(1, s, s, h, topk=2048) for h, lengths in _LENGTHS.items() for s in lengths)
# Queries, keys and values in e4m3; `targets` has the same shapes in 16 bits.
CODED = (
    PrefillCase(1, 8192, 8192, 128, fp8=True),
    PrefillCase(1, 8192, 8192, 128, causal=False, fp8=True),
    PrefillCase(4, 2048, 2048, 128, fp8=True),
    PrefillCase(8, 4096, 4096, 16, fp8=True),
)

PATTERN = r"b(\d+)-sq(\d+)-skv(\d+)-hq(\d+)(?:-hkv(\d+))?(?:-d(\d+)x(\d+))?(-full)?(-state)?(?:-topk(\d+))?(-fp8)?"


def fields_of(
    b: str,
    s_q: str,
    s_kv: str,
    h_q: str,
    h_kv: str | None,
    d_qk: str | None,
    d_v: str | None,
    full: str | None,
    state: str | None,
    topk: str | None,
    fp8: str | None,
) -> dict[str, Any]:
    """The fields of a case from the groups of `PATTERN`."""
    sizes = {"b": int(b), "s_q": int(s_q), "s_kv": int(s_kv), "h_q": int(h_q)}
    if min(sizes.values()) < 1 or (h_kv and (int(h_kv) < 1 or int(h_q) % int(h_kv))):
        raise ValueError("every size must be at least 1, and hq a multiple of hkv")
    widths = {"h_kv": int(h_kv or 0), "d_qk": int(d_qk or MLA[0]), "d_v": int(d_v or MLA[1])}
    return {**sizes, **widths, "causal": not full, "state": bool(state), "topk": int(topk or 0), "fp8": bool(fp8)}


# ---- Inputs and outputs ----------------------------------------------------------------------------------------------

SELECTION_BYTES = 1 << 28
"""Bytes of random numbers from which a selection is made at once."""


@dataclass(frozen=True)
class PrefillInputs:
    """One set of inputs; `kv` holds keys, but for their last 64 columns, and values."""

    q: Any  # (b s_q, h_q, d_qk)
    kv: Any  # (b s_kv, h_kv, d_qk - 64 + d_v)
    k_rope: Any  # (b s_kv, 64)
    starts_q: Any  # (b + 1,) int32
    starts_kv: Any
    state_out: Any  # (b s_q, h_q, d_v) float32; None without a state
    state_lse: Any  # (b s_q, h_q)
    indices: Any  # (b s_q, topk) int32, ascending, of the query's sequence; None without a selection
    mask: Any  # (b s_q, mask_bytes) uint8, the mask made from indices


@dataclass(frozen=True)
class PrefillOutputs:
    """Results of a call; `lse` is (b s_q, h_q), natural, or None."""

    out: Any
    lse: Any


def make_inputs(case: PrefillCase, dtype: str, seed: int, device: Device) -> PrefillInputs:
    """Random operands."""
    queries, keys = case.b * case.s_q, case.b * case.s_kv
    state_out = state_lse = None
    if case.state:
        rng = np.random.default_rng(seed)
        state_out = device.upload(rng.standard_normal((queries, case.h_q, case.d_v), np.float32))
        state_lse = device.upload(rng.standard_normal((queries, case.h_q), np.float32) + np.float32(8))
    shapes = (
        (queries, case.h_q, case.d_qk),
        (keys, case.heads_kv, case.d_qk - D_ROPE + case.d_v),
        (keys, D_ROPE),
    )
    q, kv, k_rope = (
        _normal_codes(device, shape, 3 * seed + i) if case.fp8 else device.normal(shape, dtype, 3 * seed + i)
        for i, shape in enumerate(shapes, 1)
    )
    return PrefillInputs(
        q=q,
        kv=kv,
        k_rope=k_rope,
        starts_q=device.upload(np.arange(0, queries + 1, case.s_q, dtype=np.int32)),
        starts_kv=device.upload(np.arange(0, keys + 1, case.s_kv, dtype=np.int32)),
        state_out=state_out,
        state_lse=state_lse,
        indices=choose_indices(case, seed, device) if case.topk else None,
        mask=device.empty((queries, mask_bytes(case)), "uint8") if case.topk else None,
    )


def _normal_codes(device: Device, shape: tuple[int, ...], seed: int) -> Any:
    """Random e4m3 codes of deviation 1, as bytes: bfloat16 numbers rounded by a table."""
    all_bfloat16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        table = all_bfloat16.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return device.upload(table)[device.normal(shape, "bfloat16", seed).view(np.uint16)]


def mask_bytes(case: PrefillCase) -> int:
    """Bytes of a row of the mask."""
    return 16 * -(-case.s_kv // 128)


def choose_indices(case: PrefillCase, seed: int, device: Device) -> Any:
    """A random selection of what each query sees, as the indexer makes it: all, if that is fewer than topk."""
    queries = np.arange(case.s_q, dtype=np.int32)
    ends = (
        np.clip(case.s_kv - case.s_q + 1 + queries, 0, case.s_kv) if case.causal else np.full_like(queries, case.s_kv)
    )
    indices = device.empty((case.b * case.s_q, case.topk), "int32")
    rows = max(1, SELECTION_BYTES // (2 * case.s_kv))
    for begin in range(0, case.b * case.s_q, rows):
        some = np.arange(begin, min(begin + rows, case.b * case.s_q))
        logits = device.normal((len(some), case.s_kv), "bfloat16", 7 * seed + begin)
        ke = device.upload(ends[some % case.s_q].astype(np.int32))
        mla_cupy.indexer_topk(logits, case.topk, ke=ke, return_values=False, indices=indices[some[0] : some[-1] + 1])
    return indices


# ---- What is timed ---------------------------------------------------------------------------------------------------

D_QK = 576  # absorbed

GENERIC = "dense_generic"  # without tensor cores
NAMED = ("dense_mma",)  # of GPUs without WGMMA


MASK_GIVEN, WITHOUT_MASK, SPARSE = "mask_given", "without_mask", "sparse_forward"
"""Figures of a selection: the mask made before; no mask; `sparse_mla_forward` with equal heads and indices."""


class Prefill(Own):
    """The call of a layer: keys and values are views of one array, and nothing is concatenated."""

    def unsupported(self, case: PrefillCase, dtype: str) -> str | None:
        if case.fp8 and self.name in ("generic", *NAMED):
            return "e4m3 codes"
        return "values of 256 columns" if self.name in NAMED and case.d_v > 128 else None

    def prepare(self, case: PrefillCase, dtype: str, sets: Sequence[PrefillInputs], device: Device) -> Prepared:
        rows = case.b * case.s_q, case.h_q
        results = [PrefillOutputs(device.empty((*rows, case.d_v), dtype), device.empty(rows, "float32")) for _ in sets]
        both = list(zip(sets, results, strict=True))
        calls: list[Call]
        if case.topk:
            calls = [self._after_mask(case, of_set[0], self._call(case, *of_set, mask=True)) for of_set in both]
        else:
            calls = [self._call(case, *of_set) for of_set in both]
        figures: dict[str, list[Call]] = {}
        if case.topk and self.name == OWN:
            figures[MASK_GIVEN] = [self._call(case, *of_set, mask=True) for of_set in both]
            figures[WITHOUT_MASK] = [self._call(case, *of_set) for of_set in both]
            figures[SPARSE] = _sparse(case, dtype, sets, device)
        return self.prepared(
            calls,
            results,
            device,
            includes="the schedule; operands as projections leave them" + ("; the mask" if case.topk else ""),
            figures=figures,
        )

    def _call(self, case: PrefillCase, inputs: PrefillInputs, result: PrefillOutputs, mask: bool = False) -> Call:
        width = case.d_qk - D_ROPE
        return partial(
            with_kernel(mla_cupy.mla_prefill, self._kernel),
            inputs.q,
            inputs.kv[..., :width],
            inputs.kv[..., width:],
            k_rope=inputs.k_rope,
            packed=mla_cupy.Packed(inputs.starts_q, inputs.starts_kv),
            state_out=inputs.state_out,
            state_lse=inputs.state_lse,
            mask=inputs.mask if mask else None,
            causal=case.causal,
            scale=case.scale,
            out=result.out,
            lse=result.lse,
        )

    def _after_mask(self, case: PrefillCase, inputs: PrefillInputs, attend: Call) -> Call:
        packed = mla_cupy.Packed(inputs.starts_q, inputs.starts_kv)

        def call() -> None:
            mla_cupy.prefill_mask(inputs.indices, case.s_kv, relative=True, mask=inputs.mask, packed=packed)
            attend()

        return call


def _sparse(case: PrefillCase, dtype: str, sets: Sequence[PrefillInputs], device: Device) -> list[Call]:
    """Absorbed: the same queries and results for all sets, which a case is far too large to keep in a cache."""
    rows = case.b * case.s_q, case.h_q
    q, kv = device.normal((*rows, D_QK), dtype, 1), device.normal((case.b * case.s_kv, D_QK), dtype, 2)
    out, lse, top = device.empty((*rows, D_V), dtype), device.empty(rows, "float32"), device.empty(rows, "float32")
    return [
        partial(
            mla_cupy.sparse_mla_forward,
            *(q, kv, inputs.indices),
            packed=mla_cupy.Packed(inputs.starts_q, inputs.starts_kv),
            scale=case.scale,
            out=out,
            lse=lse,
            max_logits=top,
        )
        for inputs in sets
    ]


# ---- Check -----------------------------------------------------------------------------------------------------------

QUERIES = 4


@dataclass(frozen=True)
class Expected:
    """The correct values of one query and head."""

    query: int
    head: int
    out: Array  # (d_v,), float64
    lse: Array  # (), float64
    out_error: float  # of the oracle with the kernels' roundings
    lse_error: float


def expect(case: PrefillCase, dtype: str, inputs: PrefillInputs, device: Device) -> list[Expected]:
    """The oracle's values for a few queries of the first and the last sequence."""
    found = []
    for batch in spaced(case.b, 2).tolist():
        keys = slice(batch * case.s_kv, (batch + 1) * case.s_kv)
        k_rope = device.to_host(inputs.k_rope[keys])
        for head in spaced(case.h_q).tolist():
            kv = device.to_host(inputs.kv[keys, head * case.heads_kv // case.h_q])[:, None]
            for i in spaced(case.s_q, QUERIES).tolist():
                found.append(_expected(case, dtype, inputs, device, kv, k_rope, batch * case.s_q + i, head))
    return found


def _expected(
    case: PrefillCase,
    dtype: str,
    inputs: PrefillInputs,
    device: Device,
    kv: Array,
    k_rope: Array,
    query: int,
    head: int,
) -> Expected:
    """The values of one query; its keys are the visible keys of its sequence."""
    seen = case.s_kv - (case.s_q - 1 - query % case.s_q) if case.causal else case.s_kv
    seen, width = max(0, seen), case.d_qk - D_ROPE
    options: dict[str, Any] = {"k_rope": k_rope[:seen], "causal": False, "scale": case.scale}
    at = slice(query, query + 1), slice(head, head + 1)
    if case.state:
        options["state_out"] = device.to_host(inputs.state_out[at])
        options["state_lse"] = device.to_host(inputs.state_lse[at])
    keys = np.arange(seen)
    if case.topk:
        selected = device.to_host(inputs.indices[at[0]])[0]
        keys = selected[selected >= 0]
        options["k_rope"] = k_rope[keys]
    arguments = device.to_host(inputs.q[at]), kv[keys][..., :width], kv[keys][..., width:]
    out, lse = reference.mla_prefill(*arguments, **options)
    rounded_out, rounded_lse = reference.mla_prefill(*arguments, **options, rounding=dtype)
    return Expected(query, head, out[0, 0], lse[0, 0], distance(rounded_out, out), distance(rounded_lse, lse))


def judge(expected: Sequence[Expected], outputs: PrefillOutputs, dtype: str, device: Device) -> SampledVerdict:
    """Compares what was written with the samples; an lse that is None is skipped."""
    largest = max(float(np.abs(one.out).max()) for one in expected)
    tolerances = {"out": 2 * max(one.out_error for one in expected) + epsilon(dtype) * largest}
    errors = {"out": max(distance(_at(outputs.out, one, device), one.out) for one in expected)}
    if outputs.lse is not None:
        largest = max(1.0, *(abs(float(one.lse)) for one in expected if np.isfinite(one.lse)))
        tolerances["lse"] = 2 * max(one.lse_error for one in expected) + LSE_RELATIVE * largest
        errors["lse"] = max(distance(_at(outputs.lse, one, device), one.lse) for one in expected)
    reasons = [
        f"{name} differs by {error:.3g}, more than {tolerances[name]:.3g}"
        for name, error in errors.items()
        if not error <= tolerances[name]  # also where it is NaN
    ]
    if count := device.count_not_finite(outputs.out):
        reasons.append(f"{count} values of out are not finite or were never written")
    return SampledVerdict(
        ok=not reasons,
        reason="; ".join(reasons),
        errors=errors,
        tolerances=tolerances,
        samples=dict.fromkeys(errors, len(expected)),
    )


def _at(array: Any, one: Expected, device: Device) -> Array:
    """A sample's value."""
    value: Array = device.to_host(array[one.query : one.query + 1, one.head : one.head + 1])[0, 0]
    return value


# ---- The operation ---------------------------------------------------------------------------------------------------


def implementations(choices: Choices) -> Known:
    """Everything that computes `mla_prefill`."""
    from ..peers.dense import CudnnAttention, FlashAttention3Dense
    from ..peers.fa4 import FlashAttention4

    return {
        **own_kernels(Prefill, choices, GENERIC, NAMED),
        "fa3": choices.from_dir(FlashAttention3Dense, "fa3"),
        "fa4": FlashAttention4,
        "cudnn": CudnnAttention,
    }


PREFILL = BenchOperation(
    name="prefill",
    title="prefill, un-absorbed: keys and values per head",
    examples="""examples:
  run prefill --peers-dir peers --peers fa3,cudnn      all cases, FlashAttention-3 and cuDNN beside us
  run prefill --quick --method events                  single calls instead of graphs
  run prefill --peers dense_mma                        the kernel of other GPUs on this one
  run prefill --suite masked                           2,048 selected keys a query, by a mask
  run prefill --suite fp8                              queries, keys and values in e4m3
  run prefill --case b1-sq512-skv4096-hq16             any other shape, named in the same form
""",
    peers="fa3 (imports torch and needs --peers-dir), fa4 (flash-attn-4), cudnn (through torch), generic, "
    f"{', '.join(NAMED)}; or none. Default: fa3 where --peers-dir is given",
    suites={
        "targets": CASES,
        # Quick: long and short sequences, of many heads and of few.
        "quick": (CASES[1], CASES[3], CASES[4]),
        "masked": MASKED,
        "fp8": CODED,
    },
    case_form="b<N>-sq<N>-skv<N>-hq<N>[-hkv<N>][-d<N>x<N>][-full][-state][-topk<N>][-fp8]",
    pattern=PATTERN,
    case_of=lambda *groups: PrefillCase(**fields_of(*groups)),
    inputs=make_inputs,
    expect=expect,
    judge=judge,
    implementations=implementations,
    peers_from_dir=("fa3",),
    single_calls=True,
)
