"""Calls of `mla_prepare` with W_UK against the oracle: for the simulator and for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import mla_cupy
from mla_cupy import reference
from mla_cupy.cache_formats import FORMATS
from mla_cupy.dtypes import TABLE, numpy_dtype
from tests.cache.inputs import Array, empty_cache, tokens
from tests.cache.runs import HOSTILE_64, assert_same_pages
from tests.projection.inputs import kv_b_proj

MARK = 7
"""Value in the gaps between rows."""


@dataclass(frozen=True)
class AbsorbedCase:
    """A call; `record` is "" without a cache, `angles` "tables", "theta" or "" for none.

    Without `has_rope` the model has none: queries have d_nope columns, and there are no angles.
    """

    n: int = 5
    h: int = 2
    d_nope: int = 128
    dtype: str = "bfloat16"
    record: str = "bf16"
    angles: str = "tables"
    interleaved: bool = True
    q_rope: bool = False
    return_rope: bool = False
    has_rope: bool = True

    @property
    def d_qk(self) -> int:
        """Width of the result."""
        return 512 + 64 * self.has_rope

    def __str__(self) -> str:
        """Id of the test: what differs from the defaults."""
        return "-".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(AbsorbedCase(), k)) or "default"


K3 = AbsorbedCase(record="bf16-nope", angles="", has_rope=False)
CASES = (
    AbsorbedCase(return_rope=True),
    AbsorbedCase(n=1, h=3, record="v32", interleaved=False),
    AbsorbedCase(n=19, h=1, d_nope=64, dtype="float16", record="v32", q_rope=True),
    AbsorbedCase(n=37, h=1, d_nope=192, record="fp8", angles="theta"),
    AbsorbedCase(n=3, d_nope=256, dtype="float16", record="", interleaved=False),
    AbsorbedCase(n=70, h=1, d_nope=64, record="bf16-nope", angles="", q_rope=True),
    K3,
    replace(K3, n=19, h=1, d_nope=192, dtype="float16", record="v32-nope"),  # 192 columns, none of RoPE
    replace(K3, n=70, h=1, d_nope=256, record=""),
)


def make(case: AbsorbedCase) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays by name, and the options. Last columns and slots are hostile; queries have gaps of marks."""
    rng, kind = np.random.default_rng(case.n), numpy_dtype(case.dtype)
    w_uk, _ = kv_b_proj(rng, case.h, case.d_nope, 64, case.dtype)
    d = case.d_nope + 64 * case.has_rope
    q = np.full((case.n, case.h, d + 8), MARK, kind)[..., :d]
    q[...] = rng.standard_normal(q.shape, np.float32) + 0.1
    q[0, 0, : case.d_nope] = 0
    q[-1, -1, 0] *= 1000
    q[0, -1, -1], q[-1, 0, -64], q[-1, 0, -7] = np.nan, np.inf, -np.inf
    arrays: dict[str, Array] = {"q": q, "w_uk": w_uk}
    if case.q_rope:
        arrays |= {"q": q[..., : case.d_nope], "q_rope": q[..., case.d_nope :]}
    record = FORMATS[case.record] if case.record else FORMATS["bf16"]
    latent, rope = tokens(record, case.n, case.dtype)
    if rope is not None and (case.record or case.return_rope):
        arrays["rope"] = rope
    options: dict[str, Any] = {"interleaved": case.interleaved, "return_rope": case.return_rope}
    if case.record:
        options["kv_format"] = case.record if case.record == "v32-nope" else None  # the others follow from the cache
        slots = rng.permutation(4 * max(6, case.n // 2))[: case.n].astype(np.int64)
        count = min(case.n - 1, len(HOSTILE_64))
        slots[case.n - count :] = HOSTILE_64[:count]
        arrays |= {"latent": latent, "cache": empty_cache(record, max(6, case.n // 2), 4, gap=1), "slots": slots}
    if case.angles == "tables":
        angles = rng.random((9, 32), np.float32) * 6
        arrays |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    elif case.angles:
        options["theta"] = 10000.0
    if case.angles:
        arrays["positions"] = rng.integers(-3, 12, case.n)
    return arrays, options


def check_absorbed(case: AbsorbedCase, to: Callable[[Any], Any], back: Callable[[Any], Array]) -> None:
    """The call on arrays that `to` makes and `back` reads: products to a rounding, all else byte by byte."""
    (arrays, options), (clean, _) = make(case), make(case)
    exact, _, exact_rope = reference.mla_prepare(**clean, **options)
    given = {name: to(x) for name, x in arrays.items()}
    memory = to(np.full((case.n, case.h, case.d_qk + 8), MARK, arrays["q"].dtype))
    out = memory[..., : case.d_qk]
    got, q_scales, rope_out = mla_cupy.mla_prepare(**given, **options, out=out)
    assert got is out
    assert q_scales is None
    assert (back(memory)[..., case.d_qk :] == MARK).all()
    found = back(out)
    step = TABLE[case.dtype].unit_roundoff
    np.testing.assert_allclose(found[..., :512].astype(float), exact[..., :512], rtol=1.01 * step, atol=1e-4)
    _assert_turned(case, found[..., 512:], exact[..., 512:])
    if case.return_rope:
        _assert_turned(case, back(rope_out), exact_rope)
    if case.record and case.angles == "theta":
        differ = np.ascontiguousarray(back(given["cache"])) != np.ascontiguousarray(clean["cache"])
        assert differ.mean() < 0.01
    elif case.record:
        assert_same_pages(back(given["cache"]), clean["cache"], case.record)


def _assert_turned(case: AbsorbedCase, got: Array, exact: Any) -> None:
    """Check turned columns: equal to the oracle's rounding; with a GPU's angles within one rounding."""
    wanted = exact.astype(got.dtype).astype(float)
    if case.angles == "theta":
        np.testing.assert_allclose(got.astype(float), wanted, rtol=2.0**-7, atol=2.0**-17)
    else:
        np.testing.assert_array_equal(got.astype(float), wanted)
