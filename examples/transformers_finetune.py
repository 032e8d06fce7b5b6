"""Fine-tune a DeepSeek-shaped model of Hugging Face transformers, with the attention of mla_cupy.

    python examples/transformers_finetune.py --model deepseek-ai/DeepSeek-V2-Lite --text my.txt --lora
    python examples/transformers_finetune.py --random

With --random a small model of random weights learns a text of random tokens, twice from the same weights: with the
attention of transformers and with ours. The two curves of losses stay together. On a CPU the attention is NumPy's.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV2Config

from mla_cupy.transformers import patch

_LORA = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


def main() -> int:
    """Load or make a model, and train it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", metavar="NAME", help="a model on the Hub, or in a directory")
    parser.add_argument("--text", type=Path, metavar="FILE", help="what to learn")
    parser.add_argument(
        "--random", action="store_true", help="a small model of random weights, and random tokens (the default)"
    )
    parser.add_argument(
        "--lora", action="store_true", help="train adapters of the attention's projections (needs PEFT)"
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--length", type=int, default=0, metavar="N", help="tokens of a sequence (2048, on a CPU 48)")
    options = parser.parse_args()
    if bool(options.model) != bool(options.text) or (options.model and options.random):
        parser.error("--model: expected --model with --text, or neither of them")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    length = options.length or (2048 if device == "cuda" else 48)
    if not options.model:
        return compare(device, options.steps, length, options.lora)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokens = tokenizer(options.text.read_text(), return_tensors="pt")["input_ids"][0].to(device)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, device_map=device)
    patch(model, reference=device == "cpu")
    for step, loss in enumerate(losses(adapted(model) if options.lora else model, tokens, options.steps, length)):
        print(f"step {step:4d}: loss {loss:.4f}")
    return 0


def adapted(model: Any) -> Any:
    """The model with LoRA adapters of its attention's projections."""
    from peft import LoraConfig, get_peft_model

    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=8, target_modules=[name for name in _LORA if name in names]))


def losses(model: Any, tokens: torch.Tensor, steps: int, length: int) -> Iterator[float]:
    """Train on pieces of a text, one after the other."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-3)
    for step in range(steps):
        at = step * length % max(1, len(tokens) - length)
        piece = tokens[None, at : at + length]
        loss = model(input_ids=piece, labels=piece, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        yield float(loss.detach())


def compare(device: str, steps: int, length: int, lora: bool) -> int:
    """Train twice from the same weights."""
    torch.manual_seed(0)
    size = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
    if device == "cuda":
        size = {"num_hidden_layers": 4, "num_attention_heads": 16, "hidden_size": 2048}
    config = DeepseekV2Config(
        **size,
        num_key_value_heads=size["num_attention_heads"],
        vocab_size=500,
        intermediate_size=512,
        q_lora_rank=None,
        first_k_dense_replace=size["num_hidden_layers"],
    )
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
    served = patch(copy.deepcopy(stock), reference=device == "cpu")
    tokens = torch.randint(0, 500, (length + 1,), device=device)
    curves = [losses(adapted(m) if lora else m, tokens, steps, length) for m in (stock, served)]
    worst = 0.0
    print("step  transformers  mla_cupy")
    for step, (theirs, mine) in enumerate(zip(*curves, strict=True)):
        print(f"{step:4d}  {theirs:12.4f}  {mine:8.4f}")
        worst = max(worst, abs(theirs - mine) / theirs)
    print(f"the losses differ by at most {100 * worst:.2f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
