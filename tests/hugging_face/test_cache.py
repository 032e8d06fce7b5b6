"""`LatentCache` beside `DynamicCache`, as the stock code uses them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hypothesis import given, settings
from hypothesis import strategies as st

import mla_cupy.torch as mla
from mla_cupy.errors import ArgumentError
from mla_cupy.transformers import LatentCache, StepGraph, patch
from mla_cupy.transformers.cache import LatentLayer

from . import models

_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from([1, 2, 5, 64, 70])),
        st.tuples(st.just("crop"), st.integers(0, 6)),
        st.tuples(st.just("rows"), st.lists(st.integers(0, 2), min_size=3, max_size=3)),
        st.tuples(st.just("repeat"), st.just(2)),
        st.tuples(st.just("first"), st.just(3)),
        st.tuples(st.just("reset"), st.none()),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=12, deadline=None)
@given(_STEPS, st.integers(0, 2**20), st.sampled_from(["deepseek_v3", "mistral4"]))
def test_is_a_dynamic_cache(actions: list[tuple[str, Any]], seed: int, name: str) -> None:
    """Whatever is done to both, `update` returns the same latents, at the same places of the batch."""
    made = torch.Generator().manual_seed(seed)
    mine, stock = _pair(name)
    b = 3
    for action, value in [("add", 3), *actions, ("add", 1)]:
        match action:
            case "add":
                for layer in range(2):
                    new = [torch.randn(b, 1, value, d, generator=made).bfloat16() for d in _widths(name)]
                    for ours, theirs in zip(mine.update(*new, layer), stock.update(*new, layer), strict=True):
                        assert torch.equal(ours, theirs)
            case "crop" if value <= stock.get_seq_length():
                for cache in (mine, stock):
                    cache.crop(-value)
            case "rows" if b == 3:
                for cache in (mine, stock):
                    cache.reorder_cache(torch.tensor(value))
            case "repeat" if b <= 6 and stock.get_seq_length():
                b *= value
                for cache in (mine, stock):
                    cache.batch_repeat_interleave(value)
            case "first" if stock.get_seq_length():
                b = value
                for cache in (mine, stock):
                    cache.batch_select_indices(torch.arange(value))
            case "reset":
                for cache in (mine, stock):
                    cache.reset()
        assert mine.get_seq_length() == stock.get_seq_length()
        assert mine.get_mask_sizes(4, 0) == stock.get_mask_sizes(4, 0)
    store = mine.layers[0].store
    store.cache.verify()


def _widths(name: str) -> tuple[int, int]:
    return (512, 64) if name == "deepseek_v3" else (256, 64)


def _pair(name: str) -> tuple[Any, Any]:
    """An empty cache of latents, and a stock one."""
    config = models.config_of(name)
    model = patch(models.causal_model(config).bfloat16(), reference=True)
    mine = LatentCache(config)
    with torch.no_grad():
        model(models.tokens(3, 2), **{models.cache_argument(model): mine})
    mine.reset()
    return mine, transformers.DynamicCache(config=config)


@pytest.mark.parametrize("place", models.PLACES)
def test_quantised_tokens(place: str) -> None:
    three = models.make("deepseek_v3", place)
    ids = models.tokens(2, 40, place)
    argument = models.cache_argument(three.served)
    found = []
    for kv_format in ("auto", "v32"):
        cache = LatentCache(three.served.config, kv_format=kv_format)
        with torch.no_grad():
            three.served(ids[:, :-1], **{argument: cache})
            found.append(three.served(ids[:, -1:], **{argument: cache}).logits)
        pages = cache.layers[0].store.pages(0)
        assert (pages.dtype, pages.shape[-1]) == ((torch.bfloat16, 576), (torch.uint8, 656))[kv_format == "v32"]
    assert 0 < models.error(found[1], found[0]) < 0.02


def test_beams_share_pages() -> None:
    mine, _ = _pair("deepseek_v3")
    new = [torch.ones(1, 1, 128, d).bfloat16() for d in (512, 64)]
    for layer in range(2):
        mine.update(*new, layer)
    mine.batch_repeat_interleave(4)
    stats = mine.layers[0].store.cache.stats()
    assert (stats.sequences, stats.pages_used, stats.pages_shared) == (4, 2, 2)


def test_padding_takes_no_memory() -> None:
    three = models.make("deepseek_v3")
    mask = torch.ones(2, 100, dtype=torch.long)
    mask[0, :90] = 0
    with torch.no_grad():
        cache = three.served(models.tokens(2, 100), attention_mask=mask).past_key_values
    assert cache.layers[0].store.cache.stats().tokens == 110
    assert cache.get_seq_length() == 100


def test_an_unpatched_model_goes_on_with_the_cache() -> None:
    three = models.make("deepseek_v3")
    ids, mask = models.tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :7] = 0
    expected = models.steps(three.stock, ids, mask, [50, 10])[1]
    found = models.steps(three.stock, ids, mask, [50, 10], three.served)[1]
    assert models.error(found, expected) < 0.01


def test_other_caches_stay_with_the_stock_code() -> None:
    three = models.make("deepseek_v3")
    cache = transformers.StaticCache(config=three.served.config, max_cache_len=64)
    with torch.no_grad():
        output = three.served(models.tokens(1, 20), **{models.cache_argument(three.served): cache})
        expected = three.stock(models.tokens(1, 20)).logits
    assert models.error(output.logits, expected) < 0.01
    assert models.reasons(three.served) == {"a cache of StaticLayer"}


def test_mistakes() -> None:
    three = models.make("deepseek_v3")
    with pytest.raises(ArgumentError, match='kv_format: got \'int4\', expected "auto" or "v32"'):
        LatentCache(three.served.config, kv_format="int4")
    with pytest.raises(ArgumentError, match=r"kv_format: got 'v32' for latents of 256 \+ 64 columns"):
        LatentCache(models.config_of("mistral4"), kv_format="v32")
    with pytest.raises(ArgumentError, match="model: got DeepseekV3ForCausalLM, expected a patched model"):
        StepGraph(three.stock, LatentCache(three.stock.config, max_length=8))
    with pytest.raises(ArgumentError, match="cache: got DynamicCache, expected a LatentCache"):
        StepGraph(three.served, transformers.DynamicCache(config=three.served.config))
    cache = LatentCache(three.served.config)
    with torch.no_grad():
        three.served(models.tokens(2, 5), **{models.cache_argument(three.served): cache})
        with pytest.raises(ArgumentError, match=r"hidden_states.shape\[0\]: got 3, expected 2, as cached"):
            three.served(models.tokens(3, 1), **{models.cache_argument(three.served): cache})
    with pytest.raises(ArgumentError, match="cache: got max_length=None"):
        StepGraph(three.served, cache)
    assert all(isinstance(layer, LatentLayer) for layer in cache.layers)


@pytest.mark.parametrize("place", models.PLACES)
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2", "glm_moe_dsa", "hy_v4", "mistral4"])
def test_steps_in_a_graph(name: str, place: str) -> None:
    """Prompts, steps, a second prompt and a crop: all as by calls of the model."""
    three = models.make(name, place)
    ids = models.tokens(3, 30, place)
    argument = models.cache_argument(three.served)
    caches = [LatentCache(three.served.config, max_length=64) for _ in range(2)]
    step = StepGraph(three.served, caches[0])
    for part in (ids[:, :20], *ids[:, 20:30].split(1, 1), ids[:, 10:17], *ids[:, :6].split(1, 1)):
        logits = step(part)
        with torch.no_grad():
            expected = three.served(part, **{argument: caches[1]}).logits
        assert models.error(logits, expected) < 1e-3
        if caches[0].get_seq_length() == 28:
            for cache in caches:
                cache.crop(-3)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 40
    assert (step._graph is not None) == (place == "cuda")


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_plan_is_updated_before_tokens_are_stored(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It promises so: attention may read lengths and old tokens while the call before it stores new ones."""
    three, order = models.make("deepseek_v3"), list[str]()
    make, prepare = mla.plan_decode, mla.mla_prepare

    def plan_decode(**options: Any) -> Any:
        assert options["after_prepare"]
        plan = make(**options)
        update = plan.update
        monkeypatch.setattr(plan, "update", lambda *lengths: [order.append("update"), update(*lengths)])
        return plan

    monkeypatch.setattr(mla, "plan_decode", plan_decode)
    monkeypatch.setattr(mla, "mla_prepare", lambda *given, **to: [order.append("prepare"), prepare(*given, **to)][1])
    ids, cache = models.tokens(2, 20 + 2 * tokens), LatentCache(three.served.config)
    with torch.no_grad():
        for part in ids.split([20, tokens, tokens], 1):
            three.served(part, **{models.cache_argument(three.served): cache})
    assert order == ["update", "prepare", "prepare"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("b", [1, 3])
def test_attention_that_starts_early(b: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan's promise changes no bit, eagerly or in replays beside a busy stream."""
    three, make = models.make("deepseek_v3", "cuda"), mla.plan_decode
    ids, found, other = models.tokens(b, 450, "cuda"), [], torch.cuda.Stream()
    load = torch.ones(1 << 22, device="cuda")
    for promise in (False, True):
        monkeypatch.setattr(mla, "plan_decode", lambda p=promise, **of: make(**{**of, "after_prepare": p}))
        step = StepGraph(three.served, LatentCache(three.served.config, max_length=512))
        logits = []
        for number, part in enumerate(ids.split([150, *[1] * 300], 1)):
            if number % 2:
                with torch.cuda.stream(other):
                    load *= 1
            logits.append(step(part)[:, -1].clone())
        (store,) = step._stores
        assert all(plan.kernel.startswith("decode_sm90_small") for plan, _ in store.plans.values())
        found.append(torch.stack(logits))
    assert torch.equal(*found)


def test_growth_beyond_max_length() -> None:
    """A cache that is full grows by more than a page, because it copies all pages each time."""
    three = models.make("deepseek_v3")
    cache = LatentCache(three.served.config, max_length=64)
    argument, room = models.cache_argument(three.served), []
    for tokens in (64, 1):
        with torch.no_grad():
            three.served(models.tokens(1, tokens), **{argument: cache})
        (store,) = cache.latent_stores.values()
        room.append(64 * store.cache.block_table.shape[1])
    assert room == [64, 384], "one page, then 65 tokens and 256 more"


def test_a_full_graph_cache() -> None:
    three = models.make("deepseek_v3")
    step = StepGraph(three.served, LatentCache(three.served.config, max_length=8))
    step(models.tokens(1, 8))
    with pytest.raises(ArgumentError, match="cache: got 8 tokens, expected less than max_length"):
        step(models.tokens(1, 1))
    hybrid = models.make("kimi_linear")
    step = StepGraph(hybrid.served, LatentCache(hybrid.served.config, max_length=8))
    step(models.tokens(1, 4))
    with pytest.raises(ArgumentError, match="cache: got layers of LatentLayer, LinearAttentionLayer"):
        step._prepare(models.tokens(1, 1), None)
