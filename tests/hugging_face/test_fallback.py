"""Calls that no kernel serves run the stock code, and one line of the log says why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mla_cupy.errors import ArgumentError
from mla_cupy.transformers import patch, patching, unpatch
from mla_cupy.transformers.attention import Served

from . import models


def _dropout(model: Any) -> None:
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 1e-9


_CHANGES: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "dropout": (_dropout, {}, "attention dropout of 1e-09"),
    "float32": (lambda model: model.float(), {}, "hidden states of torch.float32, not bfloat16 or float16"),
    "custom mask": (lambda _: None, {"attention_mask": "window"}, "a mask of (2, 1, 40, 40) and torch.bfloat16"),
    "weights": (lambda _: None, {"output_attentions": True}, "output_attentions"),
}


@pytest.mark.filterwarnings("ignore:.*output_attentions")
@pytest.mark.parametrize("name", ["deepseek_v3", "glm_moe_dsa", "hy_v4"])
@pytest.mark.parametrize("change", _CHANGES)
def test_stock_results(change: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    three = models.make(name)
    alter, call, reason = _CHANGES[change]
    ids = models.tokens(2, 40)
    if "attention_mask" in call:
        call = {"attention_mask": _window()}
    found = []
    for model in three[1:]:
        alter(model)
        with torch.no_grad(), caplog.at_level(logging.WARNING, "mla_cupy.transformers"):
            found.append(model(input_ids=ids, **call))
            model(input_ids=ids, **call)
    assert models.error(found[1].logits, found[0].logits) < 0.02
    if change == "weights":
        assert found[1].attentions[0].shape == (2, 4, 40, 40)
    said = [record.message for record in caplog.records if record.name == "mla_cupy.transformers"]
    assert len(said) == 1
    assert reason in said[0]
    assert said[0].endswith("; the stock code computes such calls")


def _window() -> Any:
    """The mask of a window of 7 tokens."""
    places = torch.arange(40)
    seen = (places[None] <= places[:, None]) & (places[None] > places[:, None] - 7)
    added = torch.zeros(2, 1, 40, 40, dtype=torch.bfloat16)
    return added.masked_fill(~seen, torch.finfo(torch.bfloat16).min)


def test_a_mask_that_changes() -> None:
    """Tokens that an earlier mask showed and a later one hides are hidden by the stock code."""
    three = models.make("deepseek_v3")
    ids, mask = models.tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    found = []
    for model in three[1:]:
        with torch.no_grad():
            cache = model(input_ids=ids[:, :20], attention_mask=mask[:, :20]).past_key_values
            mask[0, 5:9] = 0
            call = {"input_ids": ids[:, 20:], "attention_mask": mask, models.cache_argument(model): cache}
            found.append(model(**call).logits)
            mask[0, 5:9] = 1
    assert models.error(found[1], found[0]) < 0.01
    assert models.reasons(three.served) == {"a mask that hides other cached tokens than before"}


def test_the_cpu_is_left_to_the_stock_code(caplog: pytest.LogCaptureFixture) -> None:
    model = patch(models.causal_model(models.config_of("deepseek_v3")).bfloat16())
    with torch.no_grad(), caplog.at_level(logging.WARNING, "mla_cupy.transformers"):
        model(models.tokens(1, 8))
    assert "hidden states on cpu, not on a GPU" in caplog.text


def test_unpatch_gives_everything_back() -> None:
    three = models.make("deepseek_v3")
    model = unpatch(three.served)
    assert model.config._attn_implementation == "sdpa"
    assert not any(isinstance(value, Served) for m in model.modules() for value in vars(m).values())
    with torch.no_grad():
        ids = models.tokens(2, 20)
        assert torch.equal(model(ids).logits, three.stock(ids).logits)


def test_hooks_of_accelerate_stay() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = models.causal_model(models.config_of("deepseek_v3")).bfloat16().eval()
    calls = []

    class Hook(hooks.ModelHook):  # type: ignore[misc]
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(module)
            return args, kwargs

    attention = model.model.layers[0].self_attn
    hooks.add_hook_to_module(attention, Hook())
    patch(model, reference=True)
    with torch.no_grad():
        model(models.tokens(1, 8))
    assert calls == [attention]
    assert isinstance(attention._old_forward, Served)
    unpatch(model)
    assert not isinstance(attention._old_forward, Served)


def _renamed(module: Any) -> None:
    module.forward = lambda x, position_embeddings=None, attention_mask=None, cache=None: None


def _without_cache(module: Any) -> None:
    module.forward = lambda hidden_states, position_embeddings=None, attention_mask=None: None


def _without_projection(module: Any) -> None:
    del module.kv_b_proj


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_renamed, "DeepseekV3Attention.forward has no hidden_states"),
        (_without_cache, "DeepseekV3Attention.forward has no cache"),
        (_without_projection, "DeepseekV3Attention has no kv_b_proj"),
    ],
)
def test_other_versions_decline(change: Callable[[Any], None], problem: str, caplog: pytest.LogCaptureFixture) -> None:
    model = models.causal_model(models.config_of("deepseek_v3"))
    attention = model.model.layers[1].self_attn
    change(attention)
    before = model.config._attn_implementation
    with pytest.raises(ArgumentError, match=problem) as caught:
        patch(model)
    assert "\n" not in str(caught.value)
    assert model.config._attn_implementation == before
    assert not any(patching._is_served(layer.self_attn) for layer in model.model.layers)
    with caplog.at_level(logging.WARNING, "mla_cupy.transformers"):
        patching.attach(attention)
    assert caplog.messages == [f"mla_cupy: {problem}; the stock code computes the attention"]


def test_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching.transformers, "__version__", "5.16.1")
    with pytest.raises(ArgumentError, match=r"transformers: got 5\.16\.1: it is too old, expected 5\.17 or newer"):
        patch(models.causal_model(models.config_of("deepseek_v3")))


def test_models_without_latents() -> None:
    class Model:
        config = transformers.CONFIG_MAPPING["llama"]()

    with pytest.raises(ArgumentError, match="model_type: got 'llama', expected one of axk1, deepseek_v2"):
        patch(Model())


def test_sizes_without_a_kernel() -> None:
    config = models.config_of("deepseek_v3", kv_lora_rank=384, qk_nope_head_dim=96)
    with pytest.raises(ArgumentError, match="head sizes: got Sizes"):
        patch(models.causal_model(config))
