"""The first token after a prompt, from the small model's weights in float32 on a CPU, apart from any engine.

    python -m tests.engines.forward --prompts 12,14
    python -m tests.engines.forward --prompts 12 --lost 131
    python -m tests.engines.forward --prompts 40 --no-drafts --after 1269,858,2373

Where two backends part in a prompt's first token, or after tokens that both have, this says which of them is right.
Prompts are those of `tests.engines.gpu.check`, by number. With --lost the tokens from that one on attend to none before
it, in any layer: what a runner computes that loses the first part of a prompt that it prefills in parts.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from tests.engines.gpu.check import LENGTHS, prompts
from tests.engines.model import configuration, weights

SHOWN = 4
"""Tokens whose logprobs are printed, the most probable first: as many as the engines are asked for."""


def logprobs(config: dict[str, Any], tensors: dict[str, Any], tokens: list[int], lost: int = 0) -> Any:
    """Logprobs of the token after a prompt.

    Parameters
    ----------
    config : dict
        Of `tests.engines.model.configuration`, without an indexer and without experts.
    tensors : dict of tensors
        Its weights.
    tokens : list of int
    lost : int
        Tokens from this one on attend to none before it.

    Returns
    -------
    tensor, (vocab_size,), float32
    """
    import torch

    def of(name: str) -> Any:
        return tensors[f"model.{name}.weight"].float()

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]) * of(name)

    n = len(tokens)
    sees = torch.ones(n, n, dtype=torch.bool).tril()
    sees[lost:, :lost] = False
    x = of("embed_tokens")[torch.tensor(tokens)]
    for number in range(config["num_hidden_layers"]):
        layer = f"layers.{number}"
        x = x + _attention(config, norm(x, f"{layer}.input_layernorm"), of, norm, f"{layer}.self_attn", sees)
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate, up, down = (of(f"{layer}.mlp.{part}_proj") for part in ("gate", "up", "down"))
        x = x + (torch.nn.functional.silu(h @ gate.T) * (h @ up.T)) @ down.T
    return (norm(x[-1], "norm") @ tensors["lm_head.weight"].float().T).log_softmax(-1)


def _attention(config: dict[str, Any], h: Any, of: Any, norm: Any, name: str, sees: Any) -> Any:
    """One layer's, in the form that is not absorbed: keys and values of every head."""
    import torch

    heads, latent = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, width = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    n = len(h)
    if config["q_lora_rank"]:
        q = norm(h @ of(f"{name}.q_a_proj").T, f"{name}.q_a_layernorm") @ of(f"{name}.q_b_proj").T
    else:
        q = h @ of(f"{name}.q_proj").T
    q_nope, q_rope = q.view(n, heads, nope + rope).split([nope, rope], -1)
    row, k_rope = (h @ of(f"{name}.kv_a_proj_with_mqa").T).split([latent, rope], -1)
    k_nope, v = (
        (norm(row, f"{name}.kv_a_layernorm") @ of(f"{name}.kv_b_proj").T)
        .view(n, heads, nope + width)
        .split([nope, width], -1)
    )
    theta = config["rope_theta"]
    scores = torch.einsum("qhd,khd->hqk", q_nope, k_nope)
    scores = scores + torch.einsum("qhd,kd->hqk", _rotated(q_rope, theta), _rotated(k_rope, theta))
    scores = (scores * (nope + rope) ** -0.5).masked_fill(~sees, -math.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out.reshape(n, heads * width) @ of(f"{name}.o_proj").T


def _rotated(x: Any, theta: float) -> Any:
    """RoPE of pairs that lie side by side, of row i by position i."""
    import torch

    size = x.shape[-1]
    angles = torch.arange(len(x))[:, None] / theta ** (torch.arange(0, size, 2) / size)
    cos, sin = (y.view(len(x), *[1] * (x.dim() - 2), size // 2) for y in (angles.cos(), angles.sin()))
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def main(given: list[str]) -> int:
    """Print the first tokens of some prompts."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.forward", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", default="12", help="numbers")
    parser.add_argument("--after", default="", metavar="TOKENS", help="tokens that follow the prompt, of one prompt")
    parser.add_argument("--lost", type=int, default=0, help="tokens from this one on attend to none before it")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--no-drafts", action="store_true", help="of the model that drafts no tokens")
    options = parser.parse_args(given)
    config = configuration(drafting=not options.no_drafts, num_attention_heads=options.heads)
    numbers = [int(number) for number in options.prompts.split(",")]
    after = [int(token) for token in options.after.split(",") if token]
    if after and len(numbers) > 1:
        parser.error(f"--after: got {len(numbers)} prompts, expected one")
    tensors, known = weights(config), prompts(max(LENGTHS), max(numbers) + 1)
    for number in numbers:
        tokens = known[number] + after
        best = logprobs(config, tensors, tokens, options.lost).topk(SHOWN)
        shown = ", ".join(f"{token} {value:.3f}" for value, token in zip(*(x.tolist() for x in best), strict=True))
        print(f"prompt {number}, {len(tokens)} tokens: {shown}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
