"""Gradients and losses beside the stock model's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mla_cupy.transformers import patch
from mla_cupy.transformers.cache import LatentLayer
from mla_cupy.transformers.families import FAMILIES

from . import models

_TRAINED = [name for name in FAMILIES if name not in ("minicpm3", "kimi_linear")]


def _loss(model: Any, ids: Any, **call: Any) -> Any:
    return model(input_ids=ids, labels=ids, use_cache=False, **call).loss


@pytest.mark.parametrize("place", models.PLACES)
@pytest.mark.parametrize("name", _TRAINED)
def test_gradients(name: str, place: str) -> None:
    """Gradients of all attention weights, with a padded row."""
    three = models.make(name, place, index_topk=64) if FAMILIES[name].indexer else models.make(name, place)
    ids, mask = models.tokens(2, 48, place), torch.ones(2, 48, dtype=torch.long, device=place)
    mask[1, :11] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 11] = -100  # the padding before it predicts it
    for model in three:
        model.train()
        model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    named = [dict(model.named_parameters()) for model in three]
    for key, judge in named[0].items():
        if "self_attn" in key and judge.grad is not None and judge.grad.norm() > 0:
            stock, served = named[1][key].grad, named[2][key].grad
            assert models.error(served, judge.grad) <= 1.4 * models.error(stock, judge.grad) + 4e-3, key
    assert not models.reasons(three.served)


@pytest.mark.parametrize("place", models.PLACES)
@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("glm_moe_dsa", marks=pytest.mark.slow)])
def test_loss_curves_coincide(name: str, place: str) -> None:
    """200 steps of Adam: our curve is as near to the stock curve as rounding lets two runs be."""
    three = models.make(name, place, num_hidden_layers=2 if name == "glm_moe_dsa" else 1)
    curves = [_curve(model, place) for model in (three.served, three.stock)]
    mine, stock = (torch.tensor(curve) for curve in curves)
    assert stock[-20:].mean() < 0.7 * stock[:5].mean()
    smooth = [curve.unfold(0, 20, 20).mean(1) for curve in (mine, stock)]
    assert ((smooth[0] - smooth[1]).abs() < 0.05 * smooth[1]).all(), smooth


def _curve(model: Any, place: str) -> list[float]:
    model.train()
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    ids = models.tokens(2, 32, place, seed=5)
    losses = []
    for step in range(200):
        optimiser.zero_grad()
        loss = _loss(model, ids.roll(step % 3, 1))
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("place", models.PLACES)
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_packed_sequences(name: str, place: str) -> None:
    """Positions that begin anew separate sequences of one row: each sees itself alone."""
    three = models.make(name, place)
    ids = models.tokens(1, 60, place)
    places = torch.cat([torch.arange(n, device=place) for n in (25, 1, 34)])[None]
    judge, stock, served = (model(input_ids=ids, position_ids=places, use_cache=False).logits for model in three)
    models.check(served, stock, judge, selects=name == "deepseek_v32")
    alone = three.judge(input_ids=ids[:, 26:], use_cache=False).logits
    assert models.error(judge[:, 26:], alone) < 1e-4
    assert not models.reasons(three.served)


@pytest.mark.parametrize("place", models.PLACES)
def test_checkpointing_changes_no_gradient(place: str) -> None:
    served = models.make("deepseek_v3", place).served.train()
    ids, found = models.tokens(2, 40, place), []
    for way in (False, True):
        if way:
            _checkpoint(served)
        served.zero_grad()
        _loss(served, ids).backward()
        found.append([p.grad.clone() for p in served.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _checkpoint(model: Any) -> None:
    newer = getattr(model, "activation_checkpointing_enable", None)
    if newer:
        newer()
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's, of transformers' newer names
@pytest.mark.parametrize("place", models.PLACES)
@pytest.mark.parametrize("target", ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"])
def test_adapters(target: str, place: str) -> None:
    """LoRA on any projection is computed, in training, prefill and decode, and when it is switched off."""
    peft = pytest.importorskip("peft")
    three = models.make("deepseek_v3", place)
    config = peft.LoraConfig(r=4, target_modules=[target], lora_dropout=0.0, init_lora_weights=False)
    adapted = []
    for model in three:
        torch.manual_seed(11)
        adapted.append(peft.get_peft_model(model, config))
    state = {k: v.bfloat16() for k, v in adapted[1].state_dict().items() if "lora" in k}
    for model in adapted:
        model.load_state_dict({k: v.to(next(model.parameters()).dtype) for k, v in state.items()}, strict=False)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.data = parameter.data.to(next(model.base_model.model.lm_head.parameters()).dtype)
    ids, mask = models.tokens(1, 30, place), torch.ones(1, 30, dtype=torch.long, device=place)

    def compare() -> list[Any]:
        judge, stock, served = (models.steps(m.base_model.model, ids, mask, [25, 1, 4]) for m in adapted)
        for mine, theirs, right in zip(served, stock, judge, strict=True):
            models.check(mine, theirs, right)
        return served

    on = compare()
    for model in adapted:
        model.base_model.disable_adapter_layers()
    off = compare()
    assert models.error(on[1], off[1]) > 0.02
    assert not models.reasons(adapted[2])


class _Half(torch.nn.Module):
    """A projection whose weights are codes of 8 bits, as of a quantised checkpoint."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True).float() / 127
        self.scale = torch.nn.Parameter(scale, requires_grad=False)
        self.codes = torch.nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Any) -> Any:
        """Dequantise and multiply."""
        return torch.nn.functional.linear(x, (self.codes * self.scale).to(x.dtype))


@pytest.mark.parametrize("place", models.PLACES)
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_quantised_projections(name: str, place: str) -> None:
    three = models.make(name, place)
    for i in range(2):
        quantised = _Half(three.stock.model.layers[i].self_attn.kv_b_proj).to(place)
        for model in three:
            model.model.layers[i].self_attn.kv_b_proj = quantised
    ids, mask = models.tokens(1, 30, place), torch.ones(1, 30, dtype=torch.long, device=place)
    for mine, theirs, right in zip(
        *(models.steps(model, ids, mask, [25, 1, 4]) for model in (three.served, three.stock, three.judge)), strict=True
    ):
        models.check(mine, theirs, right, selects=name == "deepseek_v32")


@pytest.mark.filterwarnings("ignore")  # torchao's
def test_torchao() -> None:
    """Its weights say that they are bfloat16, and cannot be viewed."""
    quantization = pytest.importorskip("torchao.quantization")
    three = models.make("deepseek_v3")
    chosen = lambda module, name: name.endswith("kv_b_proj")  # noqa: E731
    for model in three[1:]:
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), chosen)
    ids, mask = models.tokens(1, 30), torch.ones(1, 30, dtype=torch.long)
    stock, served = (models.steps(model, ids, mask, [25, 1, 4]) for model in three[1:])
    assert all(models.error(mine, theirs) < 0.01 for mine, theirs in zip(served, stock, strict=True))
    assert not models.reasons(three.served)


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_wrapped_models(way: str, process_group: None) -> None:
    served = models.make("deepseek_v3").served.train()
    ids = models.tokens(2, 20)
    expected = _loss(served, ids)
    expected.backward()
    plain = {name: p.grad.clone() for name, p in served.named_parameters() if p.grad is not None}
    served.zero_grad()
    if way == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(served)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in served.model.layers:
            fully_shard(layer, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
        wrapped = served
    loss = _loss(wrapped, ids)
    loss.backward()
    assert torch.equal(loss, expected)
    for name, parameter in served.named_parameters():
        if name in plain:
            grad = parameter.grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            assert torch.equal(grad, plain[name])


def test_a_copy_is_served_too() -> None:
    """A copy is served from its second forward pass on."""
    served = models.make("deepseek_v3").served
    twin = copy.deepcopy(served)
    with torch.no_grad():
        twin.model.layers[0].self_attn.o_proj.weight.zero_()
        ids = models.tokens(1, 20)
        twin(ids)
        output = twin(ids)
        assert models.error(output.logits, served(ids).logits) > 0.01
    assert all(isinstance(layer, LatentLayer) for layer in output.past_key_values.layers)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "minicpm3"])
def test_training_with_a_cache(name: str) -> None:
    """transformers fills a cache unless told not to; that takes no gradient away, in training or without no_grad."""
    three = models.make(name)
    ids = models.tokens(2, 30)
    found = []
    for model in three[1:]:
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        found.append([p.grad for n, p in model.named_parameters() if "kv_b_proj" in n])
        model.eval()
        output = model(input_ids=ids)
        again = model(input_ids=ids[:, :1], **{models.cache_argument(model): output.past_key_values})
        assert again.logits.requires_grad
    assert all(models.error(mine, stock) < 0.1 for stock, mine in zip(*found, strict=True))


def test_saving(tmp_path: Any) -> None:
    served = models.make("deepseek_v3").served
    served.save_pretrained(tmp_path)
    assert "mla_cupy" not in (tmp_path / "config.json").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    patch(loaded, reference=True)
    with torch.no_grad():
        ids = models.tokens(1, 20)
        assert models.error(loaded(ids).logits, served(ids).logits) < 0.01
