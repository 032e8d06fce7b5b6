"""An indexer for a dense model, and the two stages that train it, beside deepseek_v32 and plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import mla_cupy.torch as mla
from mla_cupy.errors import ArgumentError
from mla_cupy.transformers import (
    LatentCache,
    add_indexer,
    indexer_parameters,
    indexer_warmup,
    patch,
    sparse_training,
)

from . import models

_FAMILIES = ["deepseek_v2", "deepseek_v3", "youtu", "longcat_flash", "axk1", "glm4_moe_lite"]
_SIZES = {"index_n_heads": 4, "index_head_dim": 64, "index_topk": 16}
_PLACES = models.PLACES


def _model(place: str = "cpu", name: str = "deepseek_v3", sparse: bool = False, **sizes: Any) -> Any:
    """A served model with an indexer whose scores are far from ties."""
    model = add_indexer(models.make(name, place, **sizes).stock, **_SIZES)
    with torch.no_grad():
        for p in indexer_parameters(model):
            p.mul_(3 if p.ndim == 2 else 1)
    return patch(model, sparse=sparse, reference=True).train()


def _freeze(model: Any) -> None:
    model.requires_grad_(False)
    for p in indexer_parameters(model):
        p.requires_grad_(True)


def _gradients(model: Any, loss: Any) -> dict[str, Any]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _is_close(found: dict[str, Any], expected: dict[str, Any], most: float) -> bool:
    assert found.keys() == expected.keys()
    return all(models.error(found[name], expected[name]) < most for name in found)


# ---- The indexer


def test_names_and_shapes_are_those_of_deepseek_v32() -> None:
    """Only the expert layers' gates may differ, and there are none."""
    mine = _model().state_dict()
    theirs = models.make("deepseek_v32", **_SIZES).stock.state_dict()
    assert {name: x.shape for name, x in mine.items()} == {name: x.shape for name, x in theirs.items()}
    assert {x.dtype for name, x in mine.items() if "weights_proj" in name} == {torch.float32}


@pytest.mark.parametrize("place", _PLACES)
def test_logits_are_those_of_deepseek_v32(place: str) -> None:
    """Both classes with equal weights, in a prompt and in steps."""
    mine = _model(place, sparse=True).eval()
    stock = models.causal_model(models.config_of("deepseek_v32", **_SIZES)).bfloat16().eval().to(place)
    stock.load_state_dict(mine.state_dict())
    judge = copy.deepcopy(stock).float()
    ids, mask = models.tokens(2, 60, place), torch.ones(2, 60, dtype=torch.long, device=place)
    mask[1, :9] = 0
    found = (models.steps(model, ids, mask, [50, 1, 3]) for model in (judge, stock, mine))
    for right, theirs, ours in zip(*found, strict=True):
        real = mask[:, : right.shape[1]].bool() if right.shape[1] == 50 else None
        models.check(ours, theirs, right, real, selects=True)


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("name", _FAMILIES)
def test_families(name: str, place: str) -> None:
    """Each learns in both stages, and generates."""
    model, ids = _model(place, name), models.tokens(1, 40, place)
    warm = indexer_warmup(model, input_ids=ids)
    assert set(_gradients(model, warm.loss)) == {n for n, _ in model.named_parameters() if ".indexer." in n}
    patch(model, sparse=True, reference=True)
    found = sparse_training(model, input_ids=ids, labels=ids)
    assert all(torch.isfinite(x).all() for x in _gradients(model, found.loss).values())
    assert model.eval().generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 43)


def test_without_low_rank_queries() -> None:
    model = _model(name="deepseek_v2", q_lora_rank=None)
    assert model.model.layers[0].self_attn.indexer.wq_b.in_features == model.config.hidden_size
    ids = models.tokens(1, 30)
    assert indexer_warmup(model, input_ids=ids).loss.requires_grad
    patch(model, sparse=True, reference=True)
    assert sparse_training(model, input_ids=ids, labels=ids).loss.requires_grad


def test_a_cache_belongs_to_one_attention() -> None:
    model, ids = _model().eval(), models.tokens(1, 20)
    cache = LatentCache(model.config)
    of = {models.cache_argument(model): cache}
    with torch.no_grad():
        model(ids, **of)
        patch(model, sparse=True, reference=True)
        with pytest.raises(ArgumentError, match="a cache with tokens of dense attention"):
            model(ids[:, :1], **of)


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("kv_format", ["auto", "v32"])
def test_steps_equal_whole_prompts(kv_format: str, place: str) -> None:
    model, ids = _model(place, sparse=True).eval(), models.tokens(1, 40, place)
    cache = LatentCache(model.config, kv_format=kv_format)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        model(ids[:, :-1], **{models.cache_argument(model): cache})
        last = model(ids[:, -1:], **{models.cache_argument(model): cache}).logits
    assert models.error(last[0, -1], whole[0, -1]) < (0.02 if kv_format == "auto" else 0.1)


# ---- The warm-up


def _plain_scores(indexer: Any, x: Any, read: Any, cos: Any, sin: Any) -> Any:
    """Scores [s, s] of deepseek_v32's formula, in float32, with gradients."""
    d, heads, half = indexer.head_dim, indexer.n_heads, 32

    def turned(y: Any) -> Any:
        a, b, rest = y.split([half, half, d - 2 * half], -1)
        c, s = cos[:, None, :half], sin[:, None, :half]
        return torch.cat([a * c - b * s, b * c + a * s, rest], -1)

    q = turned((read @ indexer.wq_b.weight.T).view(-1, heads, d))
    k = torch.nn.functional.layer_norm(x @ indexer.wk.weight.T, (d,), indexer.k_norm.weight, indexer.k_norm.bias, 1e-6)
    products = torch.einsum("qhd,kd->qhk", q, turned(k[:, None])[:, 0]).relu()
    return torch.einsum("qh,qhk->qk", x @ indexer.weights_proj.weight.T, products) * (heads * d) ** -0.5


def _plain_warmup(judge: Any, ids: Any) -> Any:
    """The loss of the warm-up by autograd, of a float32 model: targets are transformers' attention weights."""
    seen: dict[int, tuple[Any, ...]] = {}
    for i, layer in enumerate(judge.model.layers):
        layer.self_attn.register_forward_hook(
            lambda m, args, kwargs, out, i=i: seen.update(
                {i: (m, kwargs["hidden_states"], kwargs["position_embeddings"])}
            ),
            with_kwargs=True,
        )
    weights = judge(ids, use_cache=False, output_attentions=True).attentions
    total = 0.0
    hidden = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
    for i, (module, x, (cos, sin)) in seen.items():
        x = x[0].detach()
        read = module.q_a_layernorm(module.q_a_proj(x)).detach()
        scores = _plain_scores(module.indexer, x, read, cos[0], sin[0]).masked_fill(hidden, -torch.inf)
        p = weights[i][0].detach().mean(0)
        divergence = p * (p.clamp(min=1e-30).log() - scores.log_softmax(-1))
        total = total + divergence.masked_fill(hidden, 0).sum(1).mean()
    return total


def test_warmup_gradients() -> None:
    """Beside autograd of a float32 model whose attention and indexer are plain PyTorch."""
    model, ids = _model(), models.tokens(1, 50)
    judge = copy.deepcopy(model).float()
    patch(judge, reference=True)
    judge.set_attn_implementation("eager")
    for layer in judge.model.layers:
        layer.self_attn.forward = type(layer.self_attn).forward.__get__(layer.self_attn)
    expected = _plain_warmup(judge, ids)
    found = indexer_warmup(model, input_ids=ids)
    assert models.error(found.loss, expected) < 0.01
    assert torch.allclose(found.loss, found.kl.sum())
    mine, right = _gradients(model, found.loss), _gradients(judge, expected)
    assert _is_close(mine, right, 0.1)  # products near 0 have the other sign in bfloat16


def _plain_objective(q: Any, k: Any, iq: Any, ik: Any, w: Any, **of: Any) -> tuple[Any, Any]:
    """The warm-up's objective of one sequence, in plain PyTorch."""
    q, k = torch.cat([q, of["q_rope"]], -1), torch.cat([k, of["k_rope"][:, None].expand(-1, q.shape[1], -1)], -1)
    hidden = torch.ones(len(q), len(k), device=q.device).triu(1).bool()
    p = torch.einsum("qhd,khd->qhk", q.detach().float(), k.detach().float()) * of["scale"]
    p = p.masked_fill(hidden[:, None], -torch.inf).softmax(-1).mean(1)
    products = torch.einsum("qhd,kd->qhk", iq.float(), ik.float()).relu()
    scores = torch.einsum("qh,qhk->qk", w.float(), products) * (iq.shape[1] * iq.shape[2]) ** -0.5
    log = scores.masked_fill(hidden, -torch.inf).log_softmax(-1)
    kl = (p * (p.clamp(min=1e-30).log() - log)).masked_fill(hidden, 0).sum(1)
    return (kl * of["row_weights"]).sum(), kl.detach()


@pytest.mark.parametrize("place", _PLACES)
def test_warmup_gradients_of_the_same_states(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = _model(place), models.tokens(1, 50, place)
    mine = indexer_warmup(model, input_ids=ids)
    found = _gradients(model, mine.loss)
    monkeypatch.setattr(mla, "indexer_warmup_objective", _plain_objective)
    plain = indexer_warmup(model, input_ids=ids)
    assert models.error(mine.kl, plain.kl) < 0.01
    assert _is_close(found, _gradients(model, plain.loss), 0.02)


@pytest.mark.parametrize("place", _PLACES)
def test_coverage(place: str) -> None:
    """Coverage of the last query alone, which selects all of its keys but one."""
    model, ids = _model(place), models.tokens(1, 17, place)
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = 16
    found = indexer_warmup(model, input_ids=ids, coverage=True).coverage
    assert found.shape == (2,)
    assert ((found > 0.5) & (found < 1)).all()


@pytest.mark.parametrize("place", _PLACES)
def test_warmup_of_packed_sequences_is_that_of_each(place: str) -> None:
    _check_packed(indexer_warmup, place, sparse=False)


@pytest.mark.parametrize("place", _PLACES)
def test_sparse_training_of_packed_sequences_is_that_of_each(place: str) -> None:
    def run(model: Any, **call: Any) -> Any:
        ids = call["input_ids"]
        return sparse_training(model, labels=torch.full_like(ids, 5), **call)

    _check_packed(run, place, sparse=True)


def _check_packed(run: Any, place: str, *, sparse: bool) -> None:
    model, ids = _model(place, sparse=sparse), models.tokens(1, 60, place)
    lengths = (25, 1, 34)
    places = torch.cat([torch.arange(n, device=place) for n in lengths])[None]
    packed = _gradients(model, run(model, input_ids=ids, position_ids=places).loss)
    parts = ids.split(lengths, 1)
    alone = _gradients(model, sum(run(model, input_ids=part, tokens=60).loss for part in parts))
    packed, alone = ({n: x for n, x in found.items() if ".indexer." in n} for found in (packed, alone))
    assert _is_close(packed, alone, 0.02)


def test_padding_does_not_count() -> None:
    model, ids = _model(), models.tokens(2, 30)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :10] = 0
    whole = indexer_warmup(model, input_ids=ids, attention_mask=mask)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    parts = [
        indexer_warmup(model, input_ids=ids[:1], tokens=50).loss,
        indexer_warmup(model, input_ids=ids[1:, 10:], position_ids=places[1:, 10:], tokens=50).loss,
    ]
    assert models.error(whole.loss, sum(parts)) < 0.01


def test_accumulation() -> None:
    """Micro-batches with `tokens` add up to the whole batch."""
    model, ids = _model(), models.tokens(4, 30)
    whole = _gradients(model, indexer_warmup(model, input_ids=ids).loss)
    parts = _gradients(model, sum(indexer_warmup(model, input_ids=part, tokens=120).loss for part in ids.split(2)))
    assert _is_close(parts, whole, 0.02)


def test_the_warmup_reaches_the_indexers_alone() -> None:
    model = _model()
    found = _gradients(model, indexer_warmup(model, input_ids=models.tokens(1, 30)).loss)
    assert {name.split(".indexer.")[1] for name in found} == {name for name, _ in _first(model).named_parameters()}


def _first(model: Any) -> Any:
    return model.model.layers[0].self_attn.indexer


def test_the_warmup_learns() -> None:
    model, ids = _model(), models.tokens(2, 60)
    _freeze(model)
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        found = indexer_warmup(model, input_ids=ids)
        found.loss.backward()
        optimiser.step()
        losses.append(float(found.loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


# ---- Sparse training


def _plain_sparse(q: Any, k: Any, iq: Any, ik: Any, w: Any, indices: Any, **of: Any) -> tuple[Any, Any]:
    """The sparse objective of one sequence, in plain PyTorch."""
    found = indices.clamp(min=0).long()
    hidden = indices < 0
    p = torch.einsum("thd,tkd->thk", q.detach().float(), k.detach().float()[found]) * of["scale"]
    p = p.masked_fill(hidden[:, None], -torch.inf).softmax(-1).mean(1)
    scores = torch.einsum("thd,tkd->thk", iq.float(), ik.float()[found]).relu()
    scores = torch.einsum("th,thk->tk", w.float(), scores) * (iq.shape[1] * iq.shape[2]) ** -0.5
    log = scores.masked_fill(hidden, -torch.inf).log_softmax(-1)
    kl = (p * (p.clamp(min=1e-30).log() - log)).masked_fill(hidden, 0).sum(1)
    return (kl * of["row_weights"]).sum(), kl.detach()


@pytest.mark.parametrize("place", _PLACES)
def test_sparse_gradients_of_indexers(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = _model(place, sparse=True), models.tokens(1, 50, place)
    mine = sparse_training(model, input_ids=ids, labels=ids)
    found = _gradients(model, mine.loss)
    monkeypatch.setattr(mla, "indexer_sparse_objective", _plain_sparse)
    plain = sparse_training(model, input_ids=ids, labels=ids)
    assert models.error(mine.kl, plain.kl) < 0.01
    assert _is_close(found, _gradients(model, plain.loss), 0.02)


@pytest.mark.parametrize("place", _PLACES)
def test_sparse_gradients_of_the_model(place: str) -> None:
    """Beside the stock deepseek_v32, where all tokens are selected: near ties cannot differ."""
    mine = _model(place, sparse=True)
    stock = models.causal_model(models.config_of("deepseek_v32", **{**_SIZES, "index_topk": 64})).bfloat16().to(place)
    stock.load_state_dict(mine.state_dict())
    judge = copy.deepcopy(stock).float()
    for layer in mine.model.layers:
        layer.self_attn.indexer.index_topk = 64
    ids = models.tokens(1, 40, place)
    found = _gradients(mine, sparse_training(mine, input_ids=ids, labels=ids).loss)
    theirs, right = (_gradients(m, m(input_ids=ids, labels=ids, use_cache=False).loss) for m in (stock, judge))
    for name in (name for name in right if "self_attn" in name and ".indexer." not in name):
        yardstick = models.error(theirs[name], right[name])
        assert models.error(found[name], right[name]) <= 1.4 * yardstick + 4e-3, name


def test_the_losses_do_not_mix() -> None:
    """The model's loss changes everything but the indexers; theirs changes the indexers alone."""
    model, ids = _model(sparse=True), models.tokens(1, 40)
    both, main = (
        _gradients(model, sparse_training(model, input_ids=ids, labels=ids, indexer_weight=weight).loss)
        for weight in (1, 0)
    )
    assert all(torch.equal(both[name], main[name]) for name in both if ".indexer." not in name)
    assert not any(x.any() for name, x in main.items() if ".indexer." in name)
    other = _gradients(model, sparse_training(model, input_ids=ids, labels=ids.roll(3, 1)).loss)
    assert all(torch.equal(both[name], other[name]) for name in both if ".indexer." in name)


@pytest.mark.parametrize("place", _PLACES)
def test_checkpointing_changes_no_gradient(place: str) -> None:
    """Gradients are equal to the bit on a CPU; a GPU adds them up in any order."""
    model, ids = _model(place, sparse=True), models.tokens(1, 40, place)
    plain = _gradients(model, sparse_training(model, input_ids=ids, labels=ids).loss)
    enable = getattr(model, "activation_checkpointing_enable", None)
    enable() if enable else model.gradient_checkpointing_enable({"use_reentrant": False})
    again = _gradients(model, sparse_training(model, input_ids=ids, labels=ids).loss)
    assert _is_close(plain, again, 1e-9 if place == "cpu" else 0.01)
    assert not model.eval()(ids).logits.isnan().any()


def test_save_and_resume(tmp_path: Any) -> None:
    model, ids = _model(sparse=True), models.tokens(1, 40)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = models.causal_model(type(model.config).from_dict(model.config.to_dict())).bfloat16()
    add_indexer(other, **{name: getattr(other.config, name) for name in _SIZES})
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    patch(other, sparse=True, reference=True).train()
    found, expected = (sparse_training(m, input_ids=ids, labels=ids).loss for m in (other, model))
    assert torch.equal(found, expected)


def test_families_with_an_indexer_learn_too() -> None:
    """Layers that share a selection have no loss."""
    model, ids = models.make("glm_moe_dsa").served.train(), models.tokens(1, 40)
    found = sparse_training(model, input_ids=ids, labels=ids)
    assert len(found.kl) == 1
    assert any(".indexer." in name for name in _gradients(model, found.loss))


# ---- Wrappers and errors


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("sparse", [False, True], ids=["warm-up", "sparse"])
def test_wrapped_models(way: str, sparse: bool, process_group: None) -> None:
    model, ids = _model(sparse=sparse), models.tokens(1, 30)
    if not sparse:
        _freeze(model)

    def gradients(model: Any, called: Any) -> dict[str, torch.Tensor]:
        step = sparse_training(called, input_ids=ids, labels=ids) if sparse else indexer_warmup(called, input_ids=ids)
        found = _gradients(model, step.loss)
        return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in found.items()}

    plain = gradients(model, model)
    if way == "ddp":
        called = torch.nn.parallel.DistributedDataParallel(model)
    else:
        called, mesh = model, torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            torch.distributed.fsdp.fully_shard(layer.self_attn.indexer.weights_proj, mesh=mesh)  # float32
            torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
    again = gradients(model, called)
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_what_cannot_have_an_indexer() -> None:
    for name, sizes, match in (
        ("mistral4", {}, "latents of 512"),
        ("kimi_linear", {}, "RoPE"),
        ("deepseek_v32", {}, "an indexer in it"),
        ("deepseek_v3", {"index_n_heads": 129}, "index_n_heads"),
        ("deepseek_v3", {"index_head_dim": 32}, "index_head_dim"),
        ("deepseek_v3", {"index_topk": 0}, "index_topk"),
    ):
        with pytest.raises(ArgumentError, match=match):
            add_indexer(models.make(name).stock, **sizes)
    with pytest.raises(ArgumentError, match="an indexer in it"):
        add_indexer(_model())


def test_calls_that_fit_no_stage() -> None:
    ids = models.tokens(1, 20)
    dense = models.make("deepseek_v3").served
    with pytest.raises(ArgumentError, match="add_indexer"):
        indexer_warmup(dense, input_ids=ids)
    with pytest.raises(ArgumentError, match="add_indexer"):
        patch(dense, sparse=True, reference=True)
    with pytest.raises(ArgumentError, match="sparse"):
        patch(models.make("deepseek_v32").stock, sparse=False)
    with pytest.raises(ArgumentError, match="attention to selected tokens"):
        indexer_warmup(_model(sparse=True), input_ids=ids)
    with pytest.raises(ArgumentError, match="attention to all tokens"):
        sparse_training(_model(), input_ids=ids, labels=ids)
    with pytest.raises(ArgumentError, match="labels"):
        sparse_training(_model(sparse=True), input_ids=ids)
    with pytest.raises(ArgumentError, match="output_attentions"):
        indexer_warmup(_model(), input_ids=ids, output_attentions=True)
    with pytest.raises(ArgumentError, match="float32"):
        _model(sparse=True).float()(ids)
