"""A small checkpoint of DeepSeek's shape with random weights, made on the spot.

An engine's own dummy weights are too small to test attention: it is uniform then, and greedy tokens do not depend on
the context. Here attention is peaked and logits are spread, so that a wrong row of the cache changes tokens.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

QUERY_GAIN = 3.0
"""Makes attention peaked: scores have this deviation instead of 1."""
LOGIT_GAIN = 4.0
"""Spreads the logits: two tokens are seldom as near as one step of bfloat16."""
PLAIN: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 99,  # no layer has experts
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
}
DRAFTING: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 768,
    "num_nextn_predict_layers": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""Settings of a model that also drafts tokens (multi-token prediction)."""


SPARSE: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "q_lora_rank": 768,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "index_topk": 512,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
"""Settings of a model with indexer and sparse attention (DSA): it selects fewer tokens than most prompts have."""


TWIN: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    **{name: SPARSE[name] for name in ("q_lora_rank", "topk_method", "scoring_func")},
}
"""Settings of the model that attends to all tokens, with the sparse model's weights except the indexer's."""


def configuration(*, drafting: bool = False, sparse: bool = False, twin: bool = False, **sizes: Any) -> dict[str, Any]:
    """The model's config.json; `sizes` are of its fields."""
    kinds = (DRAFTING, drafting), (SPARSE, sparse), (TWIN, twin)
    made = {**PLAIN, **{name: value for kind, asked in kinds if asked for name, value in kind.items()}, **sizes}
    made["num_key_value_heads"] = made["num_attention_heads"]
    return made


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """Its tensors."""
    import torch

    generator, dtype = torch.Generator().manual_seed(seed), getattr(torch, config["torch_dtype"])
    of_indexer = torch.Generator().manual_seed(seed + 1)  # of its own: others are the same without it

    def matrix(rows: int, columns: int, gain: float = 1.0, draw: Any = generator) -> Any:
        return (torch.randn(rows, columns, generator=draw) * (gain * columns**-0.5)).to(dtype)

    def ones(size: int) -> Any:
        return torch.ones(size, dtype=dtype)

    hidden, vocabulary, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    made = {
        "model.embed_tokens.weight": torch.randn(vocabulary, hidden, generator=generator).to(dtype),
        "model.norm.weight": ones(hidden),
        "lm_head.weight": matrix(vocabulary, hidden, LOGIT_GAIN),
    }
    for number in range(layers + (config.get("num_nextn_predict_layers") or 0)):
        layer = {**_attention(config, matrix, ones), **_rest(config, matrix, ones)}
        if "index_topk" in config:
            layer |= _indexer(config, partial(matrix, draw=of_indexer), ones)
        if number >= layers:
            layer |= {f"{name}.weight": ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
            layer["eh_proj.weight"] = matrix(hidden, 2 * hidden)
            layer["embed_tokens.weight"] = made["model.embed_tokens.weight"].clone()
            layer["shared_head.head.weight"] = made["lm_head.weight"].clone()
        made |= {f"model.layers.{number}.{name}": tensor for name, tensor in layer.items()}
    return made


def _attention(config: dict[str, Any], matrix: Any, ones: Any) -> dict[str, Any]:
    heads, hidden, latent = config["num_attention_heads"], config["hidden_size"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    made = {}
    if rank := config["q_lora_rank"]:
        made["q_a_proj"], made["q_a_layernorm"] = matrix(rank, hidden), ones(rank)
        made["q_b_proj"] = matrix(heads * (nope + rope), rank, QUERY_GAIN)
    else:
        made["q_proj"] = matrix(heads * (nope + rope), hidden, QUERY_GAIN)
    made["kv_a_proj_with_mqa"], made["kv_a_layernorm"] = matrix(latent + rope, hidden), ones(latent)
    made["kv_b_proj"] = matrix(heads * (nope + value), latent)
    made["o_proj"] = matrix(hidden, heads * value, 2.0)
    return {f"self_attn.{name}.weight": tensor for name, tensor in made.items()}


def _indexer(config: dict[str, Any], matrix: Any, ones: Any) -> dict[str, Any]:
    heads, width, hidden = config["index_n_heads"], config["index_head_dim"], config["hidden_size"]
    return {
        "self_attn.indexer.wq_b.weight": matrix(heads * width, config["q_lora_rank"]),
        "self_attn.indexer.wk.weight": matrix(width, hidden),
        "self_attn.indexer.weights_proj.weight": matrix(heads, hidden),
        "self_attn.indexer.k_norm.weight": ones(width),
        "self_attn.indexer.k_norm.bias": 0 * ones(width),
    }


def _rest(config: dict[str, Any], matrix: Any, ones: Any) -> dict[str, Any]:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    return {
        "mlp.gate_proj.weight": matrix(wide, hidden),
        "mlp.up_proj.weight": matrix(wide, hidden),
        "mlp.down_proj.weight": matrix(hidden, wide),
        "input_layernorm.weight": ones(hidden),
        "post_attention_layernorm.weight": ones(hidden),
    }


def build(folder: Path, *, empty: bool = False, **options: Any) -> Path:
    """The checkpoint's folder; made only once.

    Parameters
    ----------
    folder : Path
    empty : bool
        Without weights, where only times count: an engine fills them in itself (`load_format="dummy"`).
    **options
        Of `configuration`.
    """
    config = configuration(**options)
    folder.mkdir(parents=True, exist_ok=True)
    described = folder / f"config-{os.getpid()}"  # others may be at the same
    described.write_text(json.dumps(config, indent=1))
    described.replace(folder / "config.json")
    if not empty and not (folder / "model.safetensors").exists():
        from safetensors.torch import save_file

        written = folder / f"weights-{os.getpid()}"
        save_file(weights(config), written, metadata={"format": "pt"})
        written.replace(folder / "model.safetensors")
    return folder
