"""Small models with random weights: stock in float32, stock in bfloat16, and served in bfloat16."""

from __future__ import annotations

import copy
import importlib
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mla_cupy.transformers import patch
from mla_cupy.transformers.graph import cache_argument
from mla_cupy.transformers.group import group_of

VOCABULARY = 97
_SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_OWN: dict[str, dict[str, Any]] = {
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "minicpm3": {"v_head_dim": 64},
    "deepseek_v32": {"index_topk": 24},
    "glm_moe_dsa": {"index_topk": 24, "indexer_types": ["full", "shared"]},
    "hy_v4": {"index_topk": 24, "indexer_types": ["full", "shared"]},
}
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Models(NamedTuple):
    """One model three times.

    Attributes
    ----------
    judge
        Stock, "eager", in float32, with the weights of the others.
    stock
        Stock in bfloat16, "sdpa" where the family has it: its error is the yardstick.
    served
        The same by our kernels.
    """

    judge: Any
    stock: Any
    served: Any


def make(model_type: str, place: str = "cpu", **sizes: Any) -> Models:
    """The models of a family, in eval mode."""
    torch.manual_seed(7)
    stock = causal_model(config_of(model_type, **sizes)).bfloat16().eval().to(place)
    judge = copy.deepcopy(stock).float()
    judge.set_attn_implementation("eager")
    served = patch(copy.deepcopy(stock), reference=True)
    return Models(judge, stock, served)


def config_of(model_type: str, **sizes: Any) -> Any:
    """A small configuration; the sizes of a head are the family's own."""
    return transformers.CONFIG_MAPPING[model_type](**{**_SIZES, **_OWN.get(model_type, {}), **sizes})


def causal_model(config: Any) -> Any:
    """A causal language model with random weights, also of types that AutoModelForCausalLM does not know."""
    name = config.model_type
    file = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    kind = next(getattr(file, each) for each in dir(file) if each.endswith("ForCausalLM"))
    config._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
    return kind(config)


def reasons(model: Any) -> set[str]:
    """Reasons why calls of a served model ran the stock code."""
    groups = [group_of(getattr(module, "config", None)) for module in model.modules()]
    return {reason for group in groups if group for reason in group._said}


def error(found: Any, expected: Any, real: Any = None) -> float:
    """Relative norm of the difference, where tokens are real."""
    x, y = found.detach().float(), expected.detach().float()
    if real is not None:
        x, y = x[real], y[real]
    assert torch.isfinite(x).all()
    return float((x - y).norm() / y.norm())


def check(found: Any, stock: Any, judge: Any, real: Any = None, *, selects: bool = False) -> None:
    """Our error is at most the stock code's in the same precision, or less than one rounding's.

    Where an indexer `selects`, a near tie that falls otherwise changes a row by more than roundings do.
    """
    mine, yardstick = error(found, judge, real), error(stock, judge, real)
    assert mine <= (5 if selects else 1.3) * yardstick + 1e-3, (mine, yardstick)


def tokens(b: int, s: int, place: str = "cpu", seed: int = 0) -> Any:
    """Random tokens, none of them special."""
    return torch.randint(3, VOCABULARY, (b, s), generator=torch.Generator().manual_seed(seed)).to(place)


def steps(model: Any, ids: Any, mask: Any, counts: list[int], prompt: Any = None) -> list[Any]:
    """Logits of a prompt and of further steps of tokens, with positions as `generate` counts them.

    Another model may read the `prompt`, whose cache the first one goes on with.
    """
    found, cache, at = [], None, 0
    with torch.no_grad():
        for n in counts:
            model, later = (model if prompt is None else prompt), model
            part, seen = ids[:, at : at + n], mask[:, : at + n]
            places = (seen.cumsum(1) - 1).clamp(min=0)[:, -n:]
            call = {"input_ids": part, "attention_mask": seen, "position_ids": places, "use_cache": True}
            output = model(**call, **{cache_argument(model): cache})
            cache, at, model, prompt = output.past_key_values, at + n, later, None
            found.append(output.logits)
    return found
