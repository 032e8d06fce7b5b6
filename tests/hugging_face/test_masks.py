"""Small masks mean what the masks of transformers mean."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hypothesis import given
from hypothesis import strategies as st
from transformers.masking_utils import create_causal_mask

from mla_cupy.transformers import masks
from mla_cupy.transformers.families import FAMILIES
from mla_cupy.transformers.group import Group
from mla_cupy.transformers.ragged import Ragged

from . import models


def _masks(name: str, s: int, **options: Any) -> tuple[Any, Any]:
    """Our mask and the mask of "sdpa" for the same call."""
    found = []
    config = models.config_of(name)
    Group(FAMILIES[name], True).register(config)
    for implementation in ("mla_cupy", "sdpa"):
        config._attn_implementation = implementation
        b = next((len(x) for x in options.values() if x is not None), 2)
        embeds = torch.zeros(b, s, 8)
        cache = {models_cache_name(): None}
        call = {"config": config, "inputs_embeds": embeds, **cache, **options}
        found.append(create_causal_mask(**call, allow_is_causal_skip=implementation == "mla_cupy"))
    return found[0], found[1]


def models_cache_name() -> str:
    """The argument that newer versions have renamed."""
    import inspect

    return "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


@given(st.integers(2, 12).flatmap(lambda s: st.lists(st.lists(st.booleans(), min_size=s, max_size=s), min_size=1)))
def test_padding(rows: list[list[bool]]) -> None:
    """Padding on either side of a row, or in the middle."""
    mask = torch.tensor(rows).long()
    mask[:, -1] = 1
    s = mask.shape[1]
    for name in ("deepseek_v3", "glm_moe_dsa"):
        small, full = _masks(name, s, attention_mask=mask)
        meant = masks.dense(masks.lean(small), s, s, mask.device).expand(full.shape)
        real = mask[:, None, :, None].bool().expand(full.shape)
        assert torch.equal(meant[real], full[real])
        assert small is None or small.untyped_storage().nbytes() <= mask.numel()
        ragged = Ragged.of(masks.lean(small), len(rows), s, mask.device)
        assert list(ragged.counts) == mask.sum(1).tolist()
        x = torch.randn(len(rows), s, 3)
        assert torch.equal(ragged.put(ragged.take(x)), x * mask[..., None])


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3))
def test_packed(rows: list[list[int]]) -> None:
    s = max(sum(row) for row in rows)
    rows = [[*row, s - sum(row)] if sum(row) < s else row for row in rows]
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    small, full = _masks("deepseek_v3", s, position_ids=places, attention_mask=None)
    mask = masks.lean(small)
    assert torch.equal(masks.dense(mask, s, s, places.device).expand(full.shape), full)
    assert list(Ragged.of(mask, len(rows), s, places.device).counts) == [n for row in rows for n in row]


def test_a_window_is_no_packing() -> None:
    def window(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key > query - 3)

    assert masks._segments(window, 2, 9, "cpu") is None
