"""`generate`, judged token by token by the stock model in float32."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mla_cupy.transformers import LatentCache, patch, patching

from . import models

_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams and several results": {"num_beams": 4, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
}


@pytest.mark.parametrize("place", models.PLACES)
@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2", "glm_moe_dsa"])
def test_tokens(name: str, way: str, place: str) -> None:
    three = models.make(name, place)
    b = 1 if "lookup" in way else 2
    ids, mask = models.tokens(b, 12, place).repeat(1, 2), torch.ones(b, 24, dtype=torch.long, device=place)
    mask[0, : 0 if b == 1 else 5] = 0
    found = [_generate(model, ids, mask, **_WAYS[way]) for model in (three.served, three.stock)]
    best = [_score(three.judge, out, mask) for out in found]
    # Near ties fall either way in bfloat16; a wrong key would cost more.
    assert (best[0] > best[1] - 0.02).all(), best
    assert not models.reasons(three.served)


def _generate(model: Any, ids: Any, mask: Any, **options: Any) -> Any:
    fixed = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    return model.generate(ids, attention_mask=mask, **fixed, **options)


def _score(judge: Any, sequences: Any, mask: Any) -> Any:
    """Mean log-probability of the new tokens of each sequence."""
    rows = mask.repeat_interleave(len(sequences) // len(mask), 0)
    seen = torch.cat([rows, rows.new_ones(len(rows), sequences.shape[1] - rows.shape[1])], 1)
    with torch.no_grad():
        places = (seen.cumsum(1) - 1).clamp(min=0)
        logits = judge(sequences, attention_mask=seen, position_ids=places, use_cache=False).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, sequences[:, 1:, None])[..., 0]
    return chosen[:, mask.shape[1] - 1 :].mean(1)


@pytest.mark.parametrize("place", models.PLACES)
def test_sampling(place: str) -> None:
    """Equal random numbers choose equal tokens, except for near ties."""
    three = models.make("deepseek_v3", place)
    ids, found = models.tokens(4, 20, place), []
    for model in (three.served, three.stock):
        torch.manual_seed(3)
        found.append(model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=True, top_k=20))
    assert (found[0] == found[1]).float().mean() > 0.9


@pytest.mark.parametrize("place", models.PLACES)
def test_a_cache_of_ones_own(place: str) -> None:
    three = models.make("deepseek_v3", place)
    ids = models.tokens(2, 20, place)
    argument = models.cache_argument(three.served)
    found = []
    for cache in (LatentCache(three.served.config, max_length=64), LatentCache(three.served.config)):
        found.append(three.served.generate(ids, max_new_tokens=50, min_new_tokens=50, **{argument: cache}))
        assert cache.get_seq_length() == 69
    assert (found[0] == found[1]).float().mean() > 0.8


def test_attn_implementation_alone() -> None:
    """Without `patch`: the first forward pass is the stock code's, and attaches the modules."""
    three = models.make("deepseek_v3", "cpu")
    config = models.config_of("deepseek_v3")
    model = models.causal_model(config).bfloat16().eval()
    model.load_state_dict(three.stock.state_dict())
    model.set_attn_implementation("mla_cupy")
    ids, mask = models.tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :7] = 0
    with torch.no_grad():
        model(ids[:, :3])
    patching.group_of(model.config).reference = True  # type: ignore[union-attr]
    expected = models.steps(three.judge, ids, mask, [50, 1, 9])
    stock = models.steps(three.stock, ids, mask, [50, 1, 9])
    found = models.steps(model, ids, mask, [50, 1, 9])
    at = 0
    for mine, theirs, right in zip(found, stock, expected, strict=True):
        models.check(mine, theirs, right, mask[:, at : at + mine.shape[1]].bool())
        at += mine.shape[1]
    assert not models.reasons(model)


@pytest.mark.parametrize("place", models.PLACES)
def test_a_compiled_model(place: str) -> None:
    """torch.compile compiles what is around attention."""
    three = models.make("deepseek_v3", place)
    ids, mask = models.tokens(2, 30, place), torch.ones(2, 30, dtype=torch.long, device=place)
    expected = models.steps(three.served, ids, mask, [24, 1, 1, 4])
    three.served.model.forward = torch.compile(three.served.model.forward, backend="eager")
    found = models.steps(three.served, ids, mask, [24, 1, 1, 4])
    for mine, right in zip(found, expected, strict=True):
        assert models.error(mine, right) < 1e-3


@pytest.mark.parametrize("place", models.PLACES)
def test_a_needle(place: str) -> None:
    """A head that looks for one token finds it wherever it stands among 700, in every way of attending."""
    torch.manual_seed(1)
    config = models.config_of("deepseek_v3", num_hidden_layers=1)
    model = models.causal_model(config).bfloat16().eval().to(place)
    _plant(model)
    patch(model, reference=True)
    for at in (3, 64, 500, 690):
        ids = torch.full((1, 700), 5, device=place)
        ids[0, at] = 40
        with torch.no_grad():
            whole = model(ids).logits[0, -1].argmax()
            output = model(ids[:, :-1])
            step = model(ids[:, -1:], **{models.cache_argument(model): output.past_key_values}).logits[0, -1].argmax()
        assert (int(whole), int(step)) == (41, 41)


def _plant(model: Any) -> None:
    """Attention to token 40, whose value makes the model say 41."""
    with torch.no_grad():
        embed, head, layer = model.model.embed_tokens.weight, model.lm_head.weight, model.model.layers[0]
        for weight in (embed, head):
            weight.zero_()
        embed[5, 0] = embed[40, 1] = 1
        head[41, 2] = 1
        attention = layer.self_attn
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
            getattr(attention, name).weight.zero_()
        attention.q_a_proj.weight[0, 0] = 1  # token 5 asks
        attention.q_b_proj.weight[0, 0] = 30
        attention.kv_a_proj_with_mqa.weight[7, 1] = 1  # token 40 answers
        attention.kv_b_proj.weight[0, 7] = 1
        attention.kv_b_proj.weight[128, 7] = 1
        attention.o_proj.weight[2, 0] = 1
        for parameter in layer.mlp.parameters():
            parameter.zero_()
