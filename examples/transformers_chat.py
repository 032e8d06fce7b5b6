"""Chat with a DeepSeek-shaped model of Hugging Face transformers, with the attention of mla_cupy.

    python examples/transformers_chat.py --model deepseek-ai/DeepSeek-V2-Lite-Chat "What is attention?"
    python examples/transformers_chat.py --random

With --random no weights are loaded: a small model of random weights continues random tokens, first with the attention
of transformers, then with ours, and the two are compared. On a CPU the attention is NumPy's.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV2Config

from mla_cupy.transformers import LatentCache, StepGraph, patch, unpatch


def main() -> int:
    """Load a model, patch it, and generate."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompt", nargs="?", default="Explain multi-head latent attention.", help="what to ask")
    parser.add_argument("--model", metavar="NAME", help="a model on the Hub, or in a directory")
    parser.add_argument("--random", action="store_true", help="a small model of random weights (the default)")
    parser.add_argument("--max-new-tokens", type=int, default=24, metavar="N", help="default: %(default)s")
    parser.add_argument("--kv-format", choices=["auto", "v32"], default="auto", help="how the cache stores tokens")
    options = parser.parse_args()
    if options.model and options.random:
        parser.error("--random: got a --model, too, expected one of them")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not options.model:
        return compare(device, options.max_new_tokens, options.kv_format)
    return chat(options.model, options.prompt, device, options.max_new_tokens, options.kv_format)


def chat(name: str, prompt: str, device: str, count: int, kv_format: str) -> int:
    """Print a model's answer as it comes."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, device_map=device)
    patch(model, reference=device == "cpu")
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = ids["input_ids"].to(device)
    for token in continued(model, ids, count, kv_format):
        if int(token) == tokenizer.eos_token_id:
            break
        print(tokenizer.decode(token[0]), end="", flush=True)
    print()
    return 0


def continued(model: Any, ids: torch.Tensor, count: int, kv_format: str) -> Any:
    """The most likely next tokens, one after the other; on a GPU each step is one CUDA graph."""
    step = StepGraph(model, LatentCache(model.config, kv_format=kv_format, max_length=ids.shape[1] + count))
    token = ids
    for _ in range(count):
        token = step(token)[:, -1:].argmax(-1)
        yield token


def compare(device: str, count: int, kv_format: str) -> int:
    """Generate with both attentions, from one model of random weights."""
    torch.manual_seed(0)
    size = {"num_hidden_layers": 12, "num_attention_heads": 16, "hidden_size": 2048}
    if device == "cpu":
        size = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
    config = DeepseekV2Config(
        **size,
        num_key_value_heads=size["num_attention_heads"],
        vocab_size=1000,
        intermediate_size=512,
        q_lora_rank=None,
        first_k_dense_replace=size["num_hidden_layers"],
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().to(device)
    ids = torch.randint(3, 1000, (1, 2000 if device == "cuda" else 60), device=device)
    expected, seconds = timed(lambda: model.generate(ids, max_new_tokens=count, do_sample=False)[:, ids.shape[1] :])
    print(f"transformers: {count / seconds:.1f} tokens a second")
    patch(model, reference=device == "cpu")
    found, seconds = timed(lambda: torch.cat(list(continued(model, ids, count, kv_format)), 1))
    print(f"mla_cupy:     {count / seconds:.1f} tokens a second")
    with torch.no_grad():
        mine = model(torch.cat([ids, found], 1)).logits.float()
        stock = unpatch(model)(torch.cat([ids, found], 1)).logits.float()
    same = int((expected == found).int().cumprod(1).sum())
    difference = float((mine - stock).norm() / stock.norm())
    print(f"the first {same} of {count} tokens are equal; logits of a prefill differ by {difference:.4f}")
    return 0


def timed(run: Any) -> tuple[Any, float]:
    """A result, and the seconds of a second run."""
    run()
    start = time.perf_counter()
    found = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
