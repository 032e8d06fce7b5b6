"""Logits of every family, beside the stock model's."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mla_cupy.errors import ArgumentError
from mla_cupy.transformers import patch
from mla_cupy.transformers.families import DECLINED, FAMILIES

from . import models

_WITHOUT_PREFILL = {"minicpm3": {"prefill with heads of 96 and 64 columns"}}
_SPARSE = [name for name in FAMILIES if FAMILIES[name].indexer]


@pytest.mark.parametrize("place", models.PLACES)
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_and_steps(name: str, place: str) -> None:
    three = models.make(name, place)
    ids, mask = models.tokens(2, 80, place), torch.ones(2, 80, dtype=torch.long, device=place)
    mask[1, :9] = 0
    counts = [20, 1, 3] if name == "kimi_linear" else [70, 1, 1, 3, 5]  # its stock code takes a second a token
    judge, stock, served = (models.steps(model, ids, mask, counts) for model in three)
    at = 0
    for n, expected, theirs, ours in zip(counts, judge, stock, served, strict=True):
        models.check(ours, theirs, expected, mask[:, at : at + n].bool(), selects=name in _SPARSE)
        at += n
    assert models.reasons(three.served) == _WITHOUT_PREFILL.get(name, set())


@pytest.mark.parametrize("place", models.PLACES)
@pytest.mark.parametrize("cached", [1, 63, 64, 65])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "mistral4", "glm_moe_dsa"])
def test_cached_tokens(name: str, cached: int, place: str) -> None:
    _check_step(name, cached, place)


@pytest.mark.parametrize("place", models.PLACES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.one_in(4)) for name in ("deepseek_v2", "deepseek_v3", "glm_moe_dsa")]
)
def test_long_contexts(name: str, place: str) -> None:
    _check_step(name, 4097, place)


def test_a_long_context_of_the_stock_code() -> None:
    """Latents that the stock code has cached are copied to pages."""
    _check_step("mistral4", 4097, "cpu")


def _check_step(name: str, cached: int, place: str) -> None:
    three = models.make(name, place)
    ids, mask = models.tokens(1, cached + 1, place), torch.ones(1, cached + 1, dtype=torch.long, device=place)
    judge, stock = (models.steps(model, ids, mask, [cached, 1])[1] for model in three[:2])
    adopts = place == "cpu" and cached > 100  # the oracle would take minutes for the prompt
    served = models.steps(three.served, ids, mask, [cached, 1], three.stock if adopts else None)[1]
    models.check(served, stock, judge, selects=name in _SPARSE)
    assert not models.reasons(three.served)


@pytest.mark.parametrize("place", models.PLACES)
@pytest.mark.parametrize("name", ["deepseek_v3", "mistral4", "hy_v4"])
def test_right_padding_and_chunks(name: str, place: str) -> None:
    """A second chunk of a prompt, longer than queries that attend to latents; padding behind and before."""
    three = models.make(name, place)
    ids, mask = models.tokens(3, 210, place), torch.ones(3, 210, dtype=torch.long, device=place)
    mask[0, 40:60] = 0
    mask[1, :30] = 0
    mask[2, 202:206] = 0
    counts = [60, 140, 10]
    judge, stock, served = (torch.cat(models.steps(model, ids, mask, counts), 1) for model in three)
    models.check(served, stock, judge, mask.bool(), selects=name in _SPARSE)


@pytest.mark.parametrize("name", DECLINED)
def test_others_decline(name: str) -> None:
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")

    class Model:
        config = transformers.CONFIG_MAPPING[name]()

    with pytest.raises(
        ArgumentError,
        match=re.escape(f"model_type: got {name}, which is not served because {DECLINED[name]}, expected one of axk1"),
    ):
        patch(Model())


@pytest.mark.parametrize("name", _SPARSE)
def test_selections_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The indexer's sets of tokens are the stock indexer's, but for near ties."""
    three = models.make(name)
    found: list[torch.Tensor] = []
    module = next(m for m in three.stock.modules() if type(m).__name__.endswith("Indexer"))
    module.register_forward_hook(lambda _, __, out: found.append(out))
    ids = models.tokens(1, 90)
    with torch.no_grad():
        three.stock(ids, use_cache=False)
        mine = _selected_by(three.served, ids, monkeypatch)
    causal = torch.arange(90)[:, None]
    stock = torch.zeros(90, 90, dtype=torch.bool).scatter(1, found[0][0].long(), True) & (causal >= causal.T)
    ours = torch.zeros(90, 91, dtype=torch.bool).scatter(1, mine.long() % 91, True)[:, :90]
    assert (stock & ours).sum() >= 0.99 * stock.sum()
    assert (stock.sum(1) == ours.sum(1)).all()


def _selected_by(model: object, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    from mla_cupy.transformers import attention

    found: list[torch.Tensor] = []
    select = attention.select
    monkeypatch.setattr(attention, "select", lambda *args: found.append(select(*args)) or found[-1])
    model(ids, use_cache=False)  # type: ignore[operator]
    return found[0]
