"""One run of the real vLLM on a CPU: `python -m tests.engines.cpu.run BACKEND RESULT CASE`, a case being JSON.

It is a process of its own, since vLLM keeps for its whole life what it is told: `python -m tests.engines cpu` starts
it.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "MLA_CUPY_BACKEND": "numpy",
}
"""Environment of this process only: a test run that imports the module must not lose its GPU."""
VOCABULARY = 4096
SHARED = ((0, 5), (64, 40), (100, 1), (0, 150), (37, 0), (130, 3))
"""Prompts: tokens that they share from their start on, and tokens of their own."""


def main(backend: str, result: str, case: dict[str, Any]) -> None:
    """Generate, and write down tokens, logprobs, and what has run."""
    from tests.engines.cpu import operators

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    stand_in()
    from vllm import LLM, SamplingParams

    shapes = count_our_calls() if backend == "CUSTOM" else Counter()
    made = LLM(
        model=case["model"],
        skip_tokenizer_init=True,
        attention_backend=backend,
        max_model_len=512,
        enforce_eager=True,
        max_num_seqs=8,
        enable_prefix_caching=True,
        seed=0,
        **case["options"],
    )
    config = made.llm_engine.vllm_config
    wanted = SamplingParams(temperature=0, max_tokens=case["new"], ignore_eos=True, logprobs=4, detokenize=False)
    rounds = []
    for _ in range(2):  # the second round finds its prompts in the prefix cache
        outputs = made.generate([{"prompt_token_ids": x} for x in prompts()], wanted, use_tqdm=False)
        rounds.append([told(x) for x in outputs])
    layers = config.compilation_config.static_forward_context.values()
    kinds = {f"{type(x.impl).__module__}.{type(x.impl).__name__}" for x in layers if hasattr(x, "impl")}
    facts = {
        "implementation": sorted(kinds),
        "page_size": config.cache_config.block_size,
        "second_runner": bool(config.use_v2_model_runner),
        "called": dict(operators.CALLS),
        "shapes": dict(shapes),
    }
    Path(result).write_text(json.dumps({"facts": facts, "rounds": rounds}))
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads have nothing to put away


def stand_in() -> None:
    """Put everything that a CPU lacks in its place: before anything else of vLLM is imported."""
    from tests.engines.cpu import attention, operators, platform, smaller

    operators.install()
    platform.without_pinned_memory()
    platform.install()
    attention.install()
    smaller.install()


def prompts() -> list[list[int]]:
    """Tokens, the same in every run."""
    draw = random.Random(1)
    shared = [draw.randrange(VOCABULARY) for _ in range(max(x for x, _ in SHARED))]
    return [shared[:n] + [draw.randrange(VOCABULARY) for _ in range(own)] for n, own in SHARED]


def told(output: Any) -> dict[str, Any]:
    """Tokens and logprobs of one of vLLM's outputs."""
    first = output.outputs[0]
    steps = [{str(token): x.logprob for token, x in step.items()} for step in first.logprobs]
    return {"tokens": list(first.token_ids), "cached": output.num_cached_tokens, "logprobs": steps}


def count_our_calls() -> Counter[str]:
    """Count the calls of our decode and of our prefill by what they are given."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    import mla_cupy.integrations.vllm_backend as ours
    from mla_cupy.integrations import vllm_prefill
    from mla_cupy.runtime import env

    shapes: Counter[str] = Counter()
    inner, prefill = ours.mla_decode, vllm_prefill.mla_prefill

    def counted(q: Any, cache: Any, table: Any, lengths: Any, **options: Any) -> Any:
        planned = "planned" if options.get("plan") is not None else "unplanned"
        shapes[f"q {tuple(q.shape)}, pages of {cache.shape[1]}, {str(cache.dtype)[6:]}, {planned}"] += 1
        return inner(q, cache, table, lengths, **options)

    def counted_prefill(*arrays: Any, **options: Any) -> Any:
        merged = ", merged" if options.get("state_out") is not None else ""
        shapes["prefill: new tokens" + merged if options.get("causal", True) else "prefill: cached tokens"] += 1
        return prefill(*arrays, **options)

    ours.mla_decode, vllm_prefill.mla_prefill = counted, counted_prefill
    if env.get("VLLM") == "sparse":
        _count_sparse_calls(shapes)
    if env.get("ENGINE_INDEXER") == "mla_cupy":
        _count_selections(shapes)
    return shapes


def _count_selections(shapes: Counter[str]) -> None:
    """Count the calls of our indexer."""
    import mla_cupy.integrations.vllm_indexer as ours

    inner = ours._keep

    def counted(indices: Any, logits: Any, count: int, **ranges: Any) -> None:
        shapes["selection: " + ("prompts" if ranges.get("relative") else f"decode of {len(indices)} queries")] += 1
        inner(indices, logits, count, **ranges)

    ours._keep = counted


def _count_sparse_calls(shapes: Counter[str]) -> None:
    import mla_cupy.integrations.vllm_sparse_backend as sparse

    def counting(name: str) -> Any:
        inner = getattr(sparse, name)

        def counted(q: Any, cache: Any, *arrays: Any, **options: Any) -> Any:
            shapes[f"{name}: q {tuple(q.shape)}, {str(cache.dtype)[6:]}"] += 1
            return inner(q, cache, *arrays, **options)

        return counted

    for name in ("sparse_mla_decode", "sparse_mla_forward"):
        setattr(sparse, name, counting(name))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
