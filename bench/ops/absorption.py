"""Attention to a paged cache, absorbed and un-absorbed: queries at the end of one sequence, from decode to prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import reference
from mla_cupy.dtypes import round_to

from ..core.cost import D_QK, D_V, ELEMENT_BYTES, SINGLE_BYTES, Cost
from ..core.device import Device
from ..core.implementation import OWN, Choices, Known, Prepared
from ..core.operation import BenchOperation
from ..core.samples import OutSample, judge_out
from ..core.tolerance import SampledVerdict, distance, spaced
from .decode import Decode, DecodeInputs, inputs_of, shuffled_table
from .decode_cases import DecodeCase

Array = npt.NDArray[Any]
D_NOPE, D_ROPE, D_HEAD = 128, 64, 128
"""Widths of a head: columns of queries and keys without and with position, and columns of values."""
D_EXPANDED = D_NOPE + D_HEAD
"""Width of what kv_b_proj makes of a latent, for each head."""

# ---- Cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AbsorptionCase(DecodeCase):
    """One sequence, whose last `s_q` of `s_kv` tokens are the queries."""

    @property
    def name(self) -> str:
        return f"sq{self.s_q}-skv{self.s_kv}-hq{self.h_q}"

    @property
    def scale(self) -> float:
        return float((D_NOPE + D_ROPE) ** -0.5)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of a head."""
        return self.s_q * self.s_kv - self.s_q * (self.s_q - 1) // 2

    @property
    def weights(self) -> int:
        """Elements of kv_b_proj."""
        return D_V * self.h_q * D_EXPANDED

    @property
    def absorbed(self) -> Cost:
        """Both products of the queries and results with kv_b_proj, and attention to the cache as it lies."""
        rows = self.s_q * self.h_q
        flops = 2 * self.pairs * self.h_q * (D_QK + D_V) + 2 * rows * D_V * D_EXPANDED
        elements = self.s_kv * D_QK + self.weights
        elements += rows * (D_NOPE + 2 * D_QK + 2 * D_V + D_HEAD)  # each intermediate is written and read
        return Cost(flops, ELEMENT_BYTES * elements)

    @property
    def unabsorbed(self) -> Cost:
        """Reading the cache, the product of all tokens with kv_b_proj, and attention to keys and values per head."""
        rows, expanded = self.s_q * self.h_q, self.s_kv * self.h_q * D_EXPANDED
        flops = 2 * self.pairs * self.h_q * (D_NOPE + D_ROPE + D_HEAD) + 2 * self.s_kv * self.weights
        elements = 3 * self.s_kv * D_QK + self.weights + 2 * expanded + rows * (D_NOPE + D_ROPE + D_HEAD)
        return Cost(flops, ELEMENT_BYTES * elements + 2 * SINGLE_BYTES * self.s_kv)

    @property
    def cost(self) -> Cost:
        """Cost of absorbed attention alone, which is what ours in a row is."""
        flops = 2 * self.pairs * self.h_q * (D_QK + D_V)
        return Cost(flops, ELEMENT_BYTES * (self.s_kv * D_QK + self.s_q * self.h_q * (D_QK + D_V)))

    def shape(self) -> dict[str, Any]:
        forms = {"absorbed": self.absorbed, "unabsorbed": self.unabsorbed}
        counts = {f"{form}_flops": cost.flops for form, cost in forms.items()}
        return {**super().shape(), **counts, **{f"{form}_bytes": cost.nbytes for form, cost in forms.items()}}


CASES = tuple(AbsorptionCase(1, s_q, h_q, 8192) for h_q in (16, 128) for s_q in (16, 64, 128, 256, 512, 1024, 2048))


def case_of(s_q: str, s_kv: str, h_q: str) -> AbsorptionCase:
    case = AbsorptionCase(1, int(s_q), int(h_q), int(s_kv))
    if min(case.s_q, case.h_q) < 1 or case.s_q > case.s_kv:
        raise ValueError("every size must be at least 1, and sq at most skv")
    return case


# ---- Inputs and outputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AbsorptionInputs(DecodeInputs):
    """One set of inputs. `q` is drawn for attention alone; the whole forms absorb `queries`."""

    queries: Any  # (s_q, h_q, 192)
    weights: Any  # (512, h_q, 128 + 128): kv_b_proj


@dataclass(frozen=True)
class AbsorptionOutputs:
    """Results of a call: `out` (1, s_q, h_q, 512) of attention alone, else (s_q, h_q, 128)."""

    out: Any


def make_inputs(case: AbsorptionCase, dtype: str, seed: int, device: Device) -> AbsorptionInputs:
    """Random queries, latents and weights; the keys are in shuffled pages."""
    common = inputs_of(case, dtype, seed, device, shuffled_table(case, seed))
    queries = device.normal((case.s_q, case.h_q, D_NOPE + D_ROPE), dtype, 4 * seed + 3)
    weights = device.normal((D_V, case.h_q, D_EXPANDED), dtype, 4 * seed + 4, scale=D_V**-0.5)
    return AbsorptionInputs(**vars(common), queries=queries, weights=weights)


# ---- What is timed ---------------------------------------------------------------------------------------------------


class AbsorbedAttention(Decode):
    """Attention of queries that are absorbed already; what it returns is not projected yet."""

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[DecodeInputs], device: Device) -> Prepared:
        prepared = super().prepare(case, dtype, sets, device)
        return replace(
            prepared,
            outputs=lambda index: AbsorptionOutputs(prepared.outputs(index).out),
            includes="absorbed attention and merge; the plan is updated before, kv_b_proj is left out",
            figures={},
        )


# ---- Check -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """The correct values of one query and head: (512,) of attention alone, and (128,) of both whole forms."""

    alone: OutSample
    whole: OutSample


def expect(case: AbsorptionCase, dtype: str, inputs: AbsorptionInputs, device: Device) -> list[Expected]:
    """The oracle's values for a few queries and heads."""
    pages = device.take(inputs.kv_cache, inputs.host_table[0])
    rows = pages.reshape(-1, D_QK)[: case.s_kv]
    found = []
    for head in spaced(case.h_q).tolist():
        weights = device.to_host(inputs.weights[:, head])
        for i in spaced(case.s_q).tolist():
            seen = rows[: case.s_kv - case.s_q + i + 1]
            alone = _alone(case, dtype, device.to_host(inputs.q[0, i, head]), seen)
            whole = _whole(case, dtype, device.to_host(inputs.queries[i, head]), seen, weights)
            found.append(Expected(OutSample((0, i, head), *alone), OutSample((i, head), *whole)))
    return found


def _attend(case: AbsorptionCase, query: Array, keys: Array, values: Array, rounding: str | None = None) -> Array:
    operands = query[None, None], keys[:, None], values[:, None]
    out: Array = reference.mla_prefill(*operands, causal=False, scale=case.scale, rounding=rounding)[0]
    found: Array = out[0, 0]
    return found


def _alone(case: AbsorptionCase, dtype: str, query: Array, rows: Array) -> tuple[Array, float]:
    exact = _attend(case, query, rows, rows[:, :D_V])
    return exact, distance(_attend(case, query, rows, rows[:, :D_V], dtype), exact)


def _whole(case: AbsorptionCase, dtype: str, query: Array, rows: Array, weights: Array) -> tuple[Array, float]:
    """Un-absorbed without roundings; its distance from both forms with 16-bit roundings in between."""
    expanded = rows[:, :D_V].astype(np.float64) @ weights.astype(np.float64)

    def per_head(expanded: Array, rounding: str | None = None) -> Array:
        keys = np.concatenate([expanded[:, :D_NOPE], rows[:, D_V:]], axis=1)
        return _attend(case, query, keys, expanded[:, D_NOPE:], rounding)

    exact = per_head(expanded)
    unabsorbed = per_head(round_to(expanded, dtype), dtype)
    latent = round_to(weights[:, :D_NOPE].astype(np.float64) @ query[:D_NOPE].astype(np.float64), dtype)
    attended = _attend(case, np.concatenate([latent, query[D_NOPE:]]), rows, rows[:, :D_V], dtype)
    absorbed = round_to(round_to(attended, dtype) @ weights[:, D_NOPE:].astype(np.float64), dtype)
    return exact, max(distance(unabsorbed, exact), distance(absorbed, exact))


def judge(expected: Sequence[Expected], outputs: AbsorptionOutputs, dtype: str, device: Device) -> SampledVerdict:
    """Compares what was written with the samples of its kind."""
    alone = outputs.out.ndim == 4
    return judge_out([one.alone if alone else one.whole for one in expected], outputs, dtype, device)


# ---- The operation ---------------------------------------------------------------------------------------------------


def implementations(choices: Choices) -> Known:
    """Absorbed attention alone, and both forms with what the weights of kv_b_proj take."""
    from ..peers.torch_absorption import AbsorbedForm, UnabsorbedForm

    return {OWN: lambda: AbsorbedAttention(choices.kernel), "absorbed": AbsorbedForm, "unabsorbed": UnabsorbedForm}


ABSORPTION = BenchOperation(
    name="absorption",
    title="attention to a paged cache, absorbed and un-absorbed, from queries to values per head",
    examples="""examples:
  run absorption                                       both forms with PyTorch's products, from 16 to 2048 queries
  run absorption --case sq512-skv32768-hq16            any other shape, named in the same form
""",
    peers="absorbed (kv_b_proj's halves before and after mla_decode), unabsorbed (the cache gathered, kv_b_proj, "
    "mla_prefill), both with PyTorch's products; or none. Default: both",
    suites={"targets": CASES, "quick": (CASES[3], CASES[10])},
    case_form="sq<N>-skv<N>-hq<N>",
    pattern=r"sq(\d+)-skv(\d+)-hq(\d+)",
    case_of=case_of,
    inputs=make_inputs,
    expect=expect,
    judge=judge,
    implementations=implementations,
    default_peers=("absorbed", "unabsorbed"),
)
