"""Dense paged decode: `mla_decode` with a plan made before and results written in place.

The oracle over a whole large case would take minutes, so it computes a few (sequence, head) pairs: the first, the
middle and the last of each. All other rows are only checked to be finite (the buffers start as NaN). The tolerance is
the same as in the tests: at most twice the error that the oracle makes with the kernels' own roundings, plus one
unit in the last place of the largest value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import mla_cupy
from mla_cupy import reference
from mla_cupy.shapes import D_ROPE

from ..core.cost import D_QK, D_V
from ..core.device import Device
from ..core.implementation import OWN, Choices, Known, Own, Prepared, own_kernels, with_kernel
from ..core.operation import BenchOperation
from ..core.recorders import Call
from ..core.tolerance import LSE_RELATIVE, distance, epsilon, spaced
from .decode_cases import PATTERN, SUITES, DecodeCase, fields_of

Array = npt.NDArray[Any]

# ---- Inputs and outputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeInputs:
    """One set of inputs: arrays of the device's library, shared by all implementations and never written.

    `host_table` and `host_seqlens` are the same values in NumPy.
    """

    q: Any  # (b, s_q, h_q, d_qk)
    kv_cache: Any  # (num_pages, page_size, 1, d_qk)
    block_table: Any  # (b, max_pages) int32
    seqlens: Any  # (b,) int32
    host_table: npt.NDArray[np.int32]
    host_seqlens: npt.NDArray[np.int32]


@dataclass(frozen=True)
class DecodeOutputs:
    """Results of a call: out (b, s_q, h_q, d_v), and lse (b, h_q, s_q) in natural log where it is returned."""

    out: Any
    lse: Any | None


def make_inputs(case: DecodeCase, dtype: str, seed: int, device: Device) -> DecodeInputs:
    """Random queries and latents; the keys are in shuffled pages."""
    return inputs_of(case, dtype, seed, device, shuffled_table(case, seed))


def inputs_of(case: DecodeCase, dtype: str, seed: int, device: Device, table: npt.NDArray[np.int32]) -> DecodeInputs:
    """Random queries, and random latents in the pages of this block table."""
    seqlens = case.lengths()
    return DecodeInputs(
        q=device.normal((case.b, case.s_q, case.h_q, case.d_qk), dtype, 2 * seed + 1),
        kv_cache=device.normal((case.num_pages, case.page_size, 1, case.d_qk), dtype, 2 * seed + 2),
        block_table=device.upload(table),
        seqlens=device.upload(seqlens),
        host_table=table,
        host_seqlens=seqlens,
    )


def make_outputs(case: DecodeCase, dtype: str, device: Device) -> DecodeOutputs:
    """Arrays for the results, full of NaN."""
    out = device.empty(out_shape(case), dtype)
    return DecodeOutputs(out, device.empty((case.b, case.h_q, case.s_q), "float32"))


def out_shape(case: DecodeCase) -> tuple[int, ...]:
    return case.b, case.s_q, case.h_q, case.d_v


def shuffled_table(case: DecodeCase, seed: int) -> npt.NDArray[np.int32]:
    """Every page of the cache once, in random order: what a serving engine's tables look like after a while."""
    order = np.random.default_rng(seed).permutation(case.num_pages)
    return order.astype(np.int32).reshape(case.b, case.max_pages)


# ---- What is timed ---------------------------------------------------------------------------------------------------

LAYERS = (1, 61)
"""Layers that share an update of the plan: the worst case, and DeepSeek-V3's."""
GENERIC = "attention_generic"  # without tensor cores
#: Kernels to compare with the chosen one: alternatives by the size of a batch or of pages, and
#: kernels of GPUs without WGMMA.
NAMED = (
    *("decode_sm90_seesaw", "decode_sm90_small", "decode_sm90_small_cluster8"),
    *("attention_mma", "attention_mma_small"),
)
#: Batch-invariant plans, and the `split_tokens` of each.
INVARIANT = {"batch_invariant": 4096, "batch_invariant_512": 512}
TREE = "tree_mask"
#: Optional inputs of a call: see `kernels/decode/problem.py`.
IN_PARTS, SINK, TURNED, PACKED, VARYING = "q_rope", "attn_sink", "out_rope", "packed", "varying"


class Decode(Own):
    """The call of a serving loop; updating the plan and calling without a plan are further figures."""

    def plan_options(self, case: DecodeCase) -> dict[str, Any]:
        """Further arguments of the plan."""
        return case.options | ({} if case.d_qk == D_QK else {"d_qk": case.d_qk})  # older trees know one width

    def call_options(self, case: DecodeCase, device: Device) -> dict[str, Any]:
        """Further arguments of the call."""
        return case.options

    def queries(self, case: DecodeCase, q: Any) -> dict[str, Any]:
        """The queries as the call gets them, by their arguments' names."""
        return {"q": q}

    def update_options(self, case: DecodeCase, device: Device) -> dict[str, Any]:
        """Further arguments of an update of the plan."""
        return {}

    def results(
        self, case: DecodeCase, dtype: str, device: Device
    ) -> tuple[DecodeOutputs, Callable[[], DecodeOutputs]]:
        """Arrays for the results, and the same arrays viewed as results of queries of one length."""
        made = make_outputs(case, dtype, device)
        return made, lambda: made

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[DecodeInputs], device: Device) -> Prepared:
        plan = with_kernel(mla_cupy.plan_decode, self._kernel)(
            max_b=case.b,
            h_q=case.h_q,
            max_pages=case.max_pages,
            page_size=case.page_size,
            **{"dtype": dtype, "s_q": case.s_q, **self.plan_options(case)},
        )
        update: Callable[..., None] = partial(plan.update, **self.update_options(case, device))
        update(sets[0].seqlens)  # all sets have the same lengths
        results = [self.results(case, dtype, device) for _ in sets]
        decode = partial(with_kernel(mla_cupy.mla_decode, self._kernel), **self.call_options(case, device))
        queries = [self.queries(case, inputs.q) for inputs in sets]

        def calls(plan: mla_cupy.DecodePlan | None) -> list[Call]:
            return [
                partial(
                    decode,
                    **given,
                    kv_cache=inputs.kv_cache,
                    block_table=inputs.block_table,
                    seqlens=inputs.seqlens,
                    scale=case.scale,
                    plan=plan,
                    out=result.out,
                    lse=result.lse,
                )
                for inputs, given, (result, _) in zip(sets, queries, results, strict=True)
            ]

        updates: list[Call] = [partial(update, inputs.seqlens) for inputs in sets]
        planned = calls(plan)
        figures = {
            "no_plan": calls(None),
            "plan_update": updates,
            **{f"update_and_{layers}_layers": _steps(updates, planned, layers) for layers in LAYERS},
        }
        return Prepared(
            calls=planned,
            outputs=lambda index: results[index][1](),
            recorder=device.recorder(),
            includes="attention and merge; the plan is updated before",
            kernel=kernel_of(plan),
            figures=figures if self.name in (OWN, *NAMED) else {},
        )


class BatchInvariant(Decode):
    """Decode with a batch-invariant plan: the cost of its reproducible bits."""

    def __init__(self, name: str, split_tokens: int) -> None:
        super().__init__(name=name)
        self._split_tokens = split_tokens

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        return None if case.d_v == D_V else f"takes values of {D_V} columns only"

    def plan_options(self, case: DecodeCase) -> dict[str, Any]:
        return {**super().plan_options(case), "batch_invariant": True, "split_tokens": self._split_tokens}


class TreeMasked(Decode):
    """The causal mask as a tree, a chain of drafts: the same results, with the tree's kernels."""

    def plan_options(self, case: DecodeCase) -> dict[str, Any]:
        return {**super().plan_options(case), "tree_mask": True}

    def call_options(self, case: DecodeCase, device: Device) -> dict[str, Any]:
        chain = [(2 << draft) - 1 for draft in range(case.s_q)]  # itself, and those before it
        return {"tree_mask": device.upload(np.tile(np.array(chain, np.uint64), (case.b, 1)))}


class InParts(Decode):
    """Queries with a separate RoPE part, as projections leave them."""

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        return None if case.d_qk == D_QK else "there is no RoPE part"

    def plan_options(self, case: DecodeCase) -> dict[str, Any]:
        return {**super().plan_options(case), "q_rope": True}

    def queries(self, case: DecodeCase, q: Any) -> dict[str, Any]:
        return {"q": q[..., :D_V].copy(), "q_rope": q[..., D_V:].copy()}


class WithSink(Decode):
    """A sink without effect, so that results equal a call's without one."""

    def plan_options(self, case: DecodeCase) -> dict[str, Any]:
        return {**super().plan_options(case), "attn_sink": True}

    def call_options(self, case: DecodeCase, device: Device) -> dict[str, Any]:
        return {
            **super().call_options(case, device),
            "attn_sink": device.upload(np.full(case.h_q, -np.inf, np.float32)),
        }


class Turned(Decode):
    """Results turned back by an angle of 0, so that they equal a call's without turning."""

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        return None if case.d_qk == D_V else "turns values with RoPE columns: keys of 512"

    def plan_options(self, case: DecodeCase) -> dict[str, Any]:
        return {**super().plan_options(case), "out_rope": True}

    def call_options(self, case: DecodeCase, device: Device) -> dict[str, Any]:
        ones = np.ones((case.s_kv, D_ROPE // 2), np.float32)
        positions = case.lengths()[:, None] + np.arange(-case.s_q, 0, dtype=np.int32)
        tables = (ones, np.zeros_like(ones), np.maximum(positions, 0))
        return {**super().call_options(case, device), "out_rope": mla_cupy.OutRope(*map(device.upload, tables))}


class Packed(Decode):
    """Queries packed one sequence after another, of one length, or of lengths that vary: the same work.

    With varying lengths, every second sequence has 1 query, and the others have the rest of the total. A
    sequence's last queries are the case's, so their results are, too.
    """

    def __init__(self, name: str, *, varying: bool) -> None:
        super().__init__(name=name)
        self._varying = varying

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        if case.d_v != D_V:
            return f"takes values of {D_V} columns"
        return "nothing varies" if self._varying and (case.s_q == 1 or case.b < 8 or case.b % 4) else None

    def counts(self, case: DecodeCase) -> npt.NDArray[np.int32]:
        """Queries of each sequence; the first, the middle and the last one, which are checked, have many."""
        counts = np.full(case.b, case.s_q, np.int32)
        if self._varying:
            counts[::2], counts[1::2] = 2 * case.s_q - 1, 1
            counts[-2:] = counts[-2:][::-1].copy()
        return counts

    def plan_options(self, case: DecodeCase) -> dict[str, Any]:
        return {**super().plan_options(case), "packed": True, "s_q": int(self.counts(case).max())}

    def _starts(self, case: DecodeCase) -> npt.NDArray[np.int32]:
        return np.concatenate([[0], np.cumsum(self.counts(case))]).astype(np.int32)

    def update_options(self, case: DecodeCase, device: Device) -> dict[str, Any]:
        return {"cu_seqlens_q": device.upload(self._starts(case)), "total_q": case.b * case.s_q}

    def call_options(self, case: DecodeCase, device: Device) -> dict[str, Any]:
        starts, most = device.upload(self._starts(case)), int(self.counts(case).max())
        return {**super().call_options(case, device), "packed": mla_cupy.Packed(starts, max_seqlen_q=most)}

    def _places(self, case: DecodeCase) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Places of the case's queries among the packed ones, or -1, and among themselves; (b, s_q) each."""
        ends, counts = self._starts(case)[1:].astype(np.int64), self.counts(case)
        before_end = case.s_q - np.arange(case.s_q)
        places = np.where(before_end[None] <= counts[:, None], ends[:, None] - before_end[None], -1)
        return places, np.arange(case.b * case.s_q).reshape(places.shape)

    def queries(self, case: DecodeCase, q: Any) -> dict[str, Any]:
        places, own = self._places(case)
        packed = q.reshape(case.b * case.s_q, case.h_q, case.d_qk).copy()
        here = places >= 0
        packed[places[here]] = q.reshape(packed.shape)[own[here]]
        return {"q": packed}

    def results(
        self, case: DecodeCase, dtype: str, device: Device
    ) -> tuple[DecodeOutputs, Callable[[], DecodeOutputs]]:
        whole = make_outputs(case, dtype, device)
        out = whole.out.reshape(case.b * case.s_q, case.h_q, D_V)
        lse = device.empty((case.h_q, case.b * case.s_q), "float32")
        places, _ = self._places(case)

        def as_uniform() -> DecodeOutputs:
            at = np.maximum(places, 0)
            return DecodeOutputs(out[at], lse[:, at].transpose(1, 0, 2))

        return DecodeOutputs(out, lse), as_uniform


def _steps(updates: Sequence[Call], planned: Sequence[Call], layers: int) -> list[Call]:
    """Steps of a serving loop: one update of the plan, then a call per layer; each step begins with another set."""

    def step(first: int) -> None:
        updates[first]()
        for layer in range(layers):
            planned[(first + layer) % len(planned)]()

    return [partial(step, first) for first in range(len(planned))]


def kernel_of(plan: mla_cupy.DecodePlan) -> str:
    """The kernel that a plan chose. `compare-trees` also meets older trees, where the attribute is `variant`."""
    return str(getattr(plan, "kernel", None) or getattr(plan, "variant", ""))


# ---- Check -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """The correct values of some heads of one sequence."""

    batch: int
    heads: Array
    out: Array  # (s_q, heads, d_v), float64
    lse: Array  # (heads, s_q), float64
    out_error: float  # of the oracle with the kernels' roundings
    lse_error: float


@dataclass(frozen=True)
class DecodeVerdict:
    """The errors, and the tolerances they were compared with."""

    ok: bool
    reason: str
    out_max: float
    out_tolerance: float
    lse_max: float | None
    lse_tolerance: float
    sampled_rows: int


def expect(case: DecodeCase, dtype: str, inputs: DecodeInputs, device: Device) -> list[Expected]:
    """The oracle's values for the sampled sequences and heads."""
    heads, expected = spaced(case.h_q), []
    for batch in spaced(case.b).tolist():
        q = device.to_host(inputs.q[batch : batch + 1])
        length = inputs.host_seqlens[batch : batch + 1]
        pages = device.take(inputs.kv_cache, inputs.host_table[batch])
        table = np.arange(len(pages), dtype=np.int32)[None]
        arguments = q[:, :, heads], pages, table, length
        options = {"scale": case.scale, "d_v": case.d_v, **case.options}
        out, lse = reference.mla_decode(*arguments, math=case.expected_math, **options)
        rounded_out, rounded_lse = reference.mla_decode(*arguments, math=case.math, **options, rounding=dtype)
        errors = distance(rounded_out, out), distance(rounded_lse, lse)
        expected.append(Expected(batch, heads, out[0], lse[0], *errors))
    return expected


def judge(expected: Sequence[Expected], outputs: DecodeOutputs, dtype: str, device: Device) -> DecodeVerdict:
    """Compares the outputs with the expected values."""
    unit = epsilon(dtype)
    out_tolerance = 2 * max(e.out_error for e in expected) + unit * max(float(np.abs(e.out).max()) for e in expected)
    lse_scale = max(1.0, *(float(np.abs(e.lse[np.isfinite(e.lse)]).max(initial=0)) for e in expected))
    lse_tolerance = 2 * max(e.lse_error for e in expected) + LSE_RELATIVE * lse_scale

    out_max = max(distance(device.to_host(outputs.out[e.batch])[:, e.heads], e.out) for e in expected)
    lse_max = None
    if outputs.lse is not None:
        lse_max = max(distance(device.to_host(outputs.lse[e.batch])[e.heads], e.lse) for e in expected)
    not_finite = device.count_not_finite(outputs.out)

    reasons = []
    if not out_max <= out_tolerance:  # also where out_max is NaN
        reasons.append(f"out differs by {out_max:.3g}, more than {out_tolerance:.3g}")
    if lse_max is not None and not lse_max <= lse_tolerance:
        reasons.append(f"lse differs by {lse_max:.3g}, more than {lse_tolerance:.3g}")
    if not_finite:
        reasons.append(f"{not_finite} values of out are not finite or were never written")
    rows = sum(e.out.shape[0] * e.out.shape[1] for e in expected)
    return DecodeVerdict(not reasons, "; ".join(reasons), out_max, out_tolerance, lse_max, lse_tolerance, rows)


# ---- The operation ---------------------------------------------------------------------------------------------------


def implementations(choices: Choices) -> Known:
    """Everything that computes `mla_decode`."""
    from ..peers.cupy_unfused import CupyUnfused
    from ..peers.fa3 import FlashAttention3
    from ..peers.flashmla import FlashMla
    from ..peers.triton_mla import TritonMla

    return {
        **own_kernels(Decode, choices, GENERIC, NAMED),
        **{name: partial(BatchInvariant, name, split) for name, split in INVARIANT.items()},
        TREE: lambda: TreeMasked(name=TREE),
        IN_PARTS: lambda: InParts(name=IN_PARTS),
        SINK: lambda: WithSink(name=SINK),
        TURNED: lambda: Turned(name=TURNED),
        PACKED: lambda: Packed(PACKED, varying=False),
        VARYING: lambda: Packed(VARYING, varying=True),
        "cupy": CupyUnfused,
        "flashmla": choices.from_dir(FlashMla, "flashmla"),
        "fa3": choices.from_dir(FlashAttention3, "fa3"),
        "triton": choices.from_dir(TritonMla, "triton"),
    }


DECODE = BenchOperation(
    name="decode",
    title="dense paged decode",
    examples="""examples:
  run decode --quick                                   the four main cases, with the built-in baselines
  run decode --peers-dir peers --json h200.jsonl       all cases, FlashMLA and FlashAttention-3 beside us
  run decode --case b128-sq1-hq128-skv4096 --peers generic
  run decode --suite small-batches --peers decode_sm90_small,decode_sm90_small_cluster8
  run decode --suite pages                             pages of 16 to 128 tokens
  run decode --suite forms --peers q_rope,attn_sink,out_rope,packed,varying
  run decode --suite narrow --peers generic,attention_mma_small
  run decode --suite windows --peers none              windows, with plain calls over the same number of keys
  run decode --case b3-sq2-hq16-skv1000-page16         any other shape, named in the same form
""",
    peers="flashmla, fa3, triton (they import torch and need --peers-dir), cupy, generic, "
    f"{', '.join(NAMED)}, batch_invariant, batch_invariant_512, "
    "tree_mask, q_rope, attn_sink, out_rope, packed, varying; or none. "
    "Default: generic,cupy, and flashmla,fa3 where --peers-dir is given",
    suites=SUITES,
    case_form="b<N>-sq<N>-hq<N>-skv<N>[-page<N>][-dqk<N>][-mix<N>][-win<N>]",
    pattern=PATTERN,
    case_of=lambda *groups: DecodeCase(**fields_of(*groups)),
    inputs=make_inputs,
    expect=expect,
    judge=judge,
    implementations=implementations,
    default_peers=("generic", "cupy"),
    peers_from_dir=("flashmla", "fa3"),
)
