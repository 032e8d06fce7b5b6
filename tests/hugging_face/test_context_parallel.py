"""Patched models whose rows are shared out over ranks: losses and gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mla_cupy import ArgumentError
from mla_cupy.transformers import (
    add_indexer,
    context_parallel_inputs,
    indexer_parameters,
    indexer_warmup,
    patch,
    sparse_training,
)
from mla_cupy.transformers.families import FAMILIES
from tests.parallel.ranks import on_all_ranks

from . import models

_WORLD, _SHAPE = 2, (2, 32)
_CASES = ("deepseek_v3", "deepseek_v32", "warm-up", "sparse training")


def _model(case: str, group: Any) -> Any:
    torch.manual_seed(7)
    name = case if case in FAMILIES else "deepseek_v3"
    model = models.causal_model(models.config_of(name, index_topk=64, num_hidden_layers=1)).bfloat16()
    if name != case:
        add_indexer(model, index_n_heads=4, index_head_dim=64, index_topk=64)
    sparse = case == "sparse training" or None
    return patch(model, sparse=sparse, context_parallel=group, reference=True)


def _loss(case: str, model: Any, inputs: dict[str, Any]) -> Any:
    if case == "warm-up":
        model.requires_grad_(False)
        for parameter in indexer_parameters(model):
            parameter.requires_grad_(True)
        return indexer_warmup(model, **inputs).loss
    if case == "sparse training":
        return sparse_training(model, **inputs).loss
    return model(**inputs, use_cache=False).loss


def _run(case: str, group: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    model = _model(case, group).train()
    loss = _loss(case, model, inputs)
    loss.backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    assert not models.reasons(model)
    return {"loss": loss.detach().float(), **gradients}


def _batch() -> tuple[Any, Any]:
    ids = models.tokens(*_SHAPE)
    labels = ids.clone()
    labels[1, -5:] = -100  # padding at the end
    return ids, labels


def _on_rank(rank: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Sums over the ranks, of all cases, and errors: in one start, as each process imports transformers."""
    group = torch.distributed.group.WORLD
    found = []
    for case in _CASES:
        found.append(_run(case, group, context_parallel_inputs(*_batch())))
        for x in found[-1].values():
            torch.distributed.all_reduce(x)
    return found, _refused(group)


def _refused(group: Any) -> list[str]:
    """What a rank says of calls that it cannot compute."""
    model, ids = _model("deepseek_v3", group), models.tokens(1, 8)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    calls: list[Any] = [lambda: model(ids, use_cache=True), lambda: model(ids, attention_mask=mask, use_cache=False)]
    calls.append(lambda: context_parallel_inputs(ids[:, :6]))
    found = []
    for call in calls:
        with pytest.raises(ArgumentError) as error:
            call()
        found.append(str(error.value))
    return found


def test_ranks_agree_with_one_process() -> None:
    """Dense and sparse models, both stages of an indexer's training, and calls that do not fit."""
    ranks = on_all_ranks(_WORLD, _on_rank)
    assert all(isinstance(x, tuple) for x in ranks), ranks
    ids, labels = _batch()
    for case, found in zip(_CASES, ranks[0][0], strict=True):
        expected = _run(case, None, {"input_ids": ids, "labels": labels})
        assert set(found) == set(expected)
        for name, x in expected.items():
            assert models.error(found[name], x) < (2e-3 if name == "loss" else 2e-2), (case, name)
    cached, padded, uneven = ranks[1][1]
    assert "a cache under context parallelism (pass use_cache=False)" in cached
    assert "padding under context parallelism (pad at the end, without a mask)" in padded
    assert uneven.startswith("input_ids.shape[1]: got 6, expected a multiple of 2 * world = 4; pad the rows")
