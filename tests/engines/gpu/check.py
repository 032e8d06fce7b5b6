"""Tokens and step times of attention backends in the real vLLM on a GPU.

    python -m tests.engines.gpu.check tokens --backends TRITON_MLA,CUSTOM,FLASHMLA,FLASH_ATTN_MLA [--graphs]
    python -m tests.engines.gpu.check tokens --kv fp8 --backends TRITON_MLA,CUSTOM
    python -m tests.engines.gpu.check tokens --drafts 3 --graphs --backends FLASHMLA,CUSTOM
    python -m tests.engines.gpu.check tokens --no-prefix-cache --step-tokens 16384 --backends FLASHMLA,FLASHMLA
    python -m tests.engines.gpu.check tokens --backends TRITON_MLA,CUSTOM,CUSTOM:engine-prefill
    python -m tests.engines.gpu.check tokens --sparse --kv fp8_ds_mla --backends FLASHMLA_SPARSE,FLASHMLA_SPARSE:ours
    python -m tests.engines.gpu.check speed --graphs --heads 16,128 --backends FLASH_ATTN_MLA,FLASHMLA,CUSTOM
    python -m tests.engines.gpu.check speed --graphs --batch 1,4 --context 4096,16384 --cache 4 --at-once 3

A backend's name may be followed by variants, each after a colon: of ours `engine-prefill`, `fp8-math`, `ours`, which
puts ours in the place of FLASHMLA_SPARSE, and `indexer`, which selects by ours; of any backend `alone`, which gives it
one request at a time: other shapes, other roundings, and nothing else. With --sparse, `dense` is of a dense backend,
for the same weights without the indexer's: where --topk is no less than the longest prompt, both attend to all tokens.

With `indexer` each decode step that selects in one call selects by two calls, too: `selections` counts the rows of all
layers and the rows that differ, replayed graphs included.

With --by-position what a query of a sparse model attends to is chosen by its position, not by the indexer's scores:
near scores fall either way from run to run, and selections would be compared, not what is made of them.

With vLLM before 0.28 take --older-runner, or --no-prefix-cache with --step-tokens that no prompt is cut by: its second
runner loses cached prefixes and the first parts of prompts that are prefilled in parts, wherever prefill is vLLM's.

Each backend runs in a process of its own, one after another, or several --at-once; the first of the list is the
reference, which is named twice to see whether it agrees with itself. Results and logs are in --out. Processes with the
same --out, whoever starts them, get ready at once, and `speed` then times them one by one, with nothing else running.
With --cpu it is rehearsed without a GPU, on CUTLASS_MLA,CUSTOM.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.engines.cpu.cases import NEAR, between_rounds, compared
from tests.engines.cpu.run import count_our_calls, stand_in, told
from tests.engines.gpu.timing import builders_in_turn, per_step, traced, watched
from tests.engines.model import PLAIN, build

VOCABULARY = PLAIN["vocab_size"]
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 100, 257, 500, 777, 1024, 1500, 2048, 3000)
"""Lengths of prompts: around the pages' sizes, and longer than a chunk."""
MEMORY = 0.6
"""Share of the GPU's: room for the allocator of a process that ends while the next one starts."""
GIB = 1 << 30
VARIANTS = {
    "engine-prefill": {"MLA_CUPY_ENGINE_PREFILL": "engine"},
    "fp8-math": {"MLA_CUPY_ENGINE_MATH": "fp8"},
    "ours": {"MLA_CUPY_VLLM": "sparse"},
    "indexer": {"MLA_CUPY_ENGINE_INDEXER": "mla_cupy"},
    "alone": {},
    "dense": {},
}
"""Suffixes of a backend's name, with the environment variables that each stands for."""
PATIENCE = 180.0
"""Seconds for which a process that is ready waits for those that are not."""
SEQUENCES = 64
"""Sequences that the engine of `speed` has plans and graphs for, however few are timed."""
PREFILLED = 65536
"""Tokens of the prompts whose prefill is timed, together."""
SHORT, LONG = 32, 160
"""Tokens that are generated, less and more: a step's time is the difference of two generations."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Arguments of the script."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.gpu.check", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("tokens", "speed"))
    parser.add_argument("--backends", default="TRITON_MLA,CUSTOM,FLASHMLA,FLASH_ATTN_MLA")
    parser.add_argument("--one", metavar="BACKEND", help=argparse.SUPPRESS)
    parser.add_argument("--kv", default="auto", help="dtype of the cache")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--graphs", action="store_true", help="full CUDA graphs of decode, nothing compiled")
    parser.add_argument("--compiled", action="store_true", help="vLLM's own default: compiled, both kinds of graphs")
    parser.add_argument("--block", type=int, default=0, help="page size (default: what vLLM asks the backend for)")
    parser.add_argument("--sparse", action="store_true", help="a model with an indexer and sparse attention (DSA)")
    parser.add_argument("--by-position", action="store_true", help="the indexer's selection is put aside")
    parser.add_argument("--topk", type=int, default=0, help="tokens that the indexer selects (default: 512)")
    parser.add_argument("--drafts", type=int, default=0, help="tokens that the model drafts")
    parser.add_argument("--older-runner", action="store_true", help="vLLM's first model runner")
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--step-tokens", type=int, default=0, help="of all requests (default: 1024, of `speed` 8192)")
    parser.add_argument("--heads", default="16")
    parser.add_argument("--batch", default="64", help="requests of `speed`, or several numbers of them")
    parser.add_argument("--context", default="64,8192", help="tokens of each of them, or several numbers")
    parser.add_argument("--layers", type=int, default=0, help="of the model (default: 2, of `speed` 24)")
    parser.add_argument("--trace", action="store_true", help="the kernels of a step with the last context")
    parser.add_argument("--new", type=int, default=48, help="tokens that `tokens` generates")
    parser.add_argument("--prompts", type=int, default=len(LENGTHS), help="of `tokens`, all at once")
    parser.add_argument("--longest", type=int, default=max(LENGTHS), help="tokens of the longest prompt")
    parser.add_argument("--cache", type=int, default=0, metavar="GIB", help="of cache (default: what is free)")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="backends (default 1)")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal without a GPU")
    parser.add_argument("--timeout", type=int, default=280, metavar="SECONDS")
    parser.add_argument("--out", type=Path, default=Path("engines-out"))
    return parser.parse_args(given)


def label(options: argparse.Namespace, backend: str, heads: int) -> str:
    """A name for a run's files that says what is special about it."""
    flags = ("sparse", "by_position", "graphs", "compiled", "older_runner", "no_prefix_cache")
    parts = [options.what, backend.replace(":", "-"), f"h{heads}", options.kv, options.dtype]
    parts += ["b" + options.batch.replace(",", "-")] * (options.what == "speed") + [f"l{options.layers}"] * bool(
        options.layers
    )
    parts += [f"topk{options.topk}"] * bool(options.topk) + [f"step{options.step_tokens}"] * bool(options.step_tokens)
    parts += [f"p{options.prompts}"] * (options.prompts != len(LENGTHS))
    parts += [f"block{options.block}"] * bool(options.block) + [f"drafts{options.drafts}"] * bool(options.drafts)
    return "-".join(parts + [flag for flag in flags if getattr(options, flag)])


def engine_options(options: argparse.Namespace, sequences: int) -> dict[str, Any]:
    """Options of vLLM's `LLM` that depend on the arguments."""
    made: dict[str, Any] = {"enable_prefix_caching": not options.no_prefix_cache}
    if not options.cpu:
        made["gpu_memory_utilization"] = 0.01 if options.cache else MEMORY
    if options.cache:
        made["kv_cache_memory_bytes"] = options.cache * GIB
    if options.block:
        made["block_size"] = options.block
    if options.drafts:
        made["speculative_config"] = {"method": "mtp", "num_speculative_tokens": options.drafts}
    if options.graphs:
        sizes = [n * (1 + options.drafts) for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= sequences]
        made["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    elif not options.compiled:
        made["enforce_eager"] = True
    return made


def engine(options: argparse.Namespace, backend: str, heads: int, longest: int, sequences: int) -> Any:
    """The engine, with a model of that many heads."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0" if options.older_runner else "1"
    from vllm import LLM

    layers = options.layers or (2 if options.what == "tokens" else 24)
    twin = "dense" in variants_of(backend)
    name = f"h{heads}-l{layers}" + "-drafting" * bool(options.drafts) + "-sparse" * options.sparse
    name += f"-topk{options.topk}" * bool(options.topk) + "-twin" * twin
    if options.by_position:
        select_by_position()
    model = build(
        options.out / "models" / name,
        drafting=bool(options.drafts),
        sparse=options.sparse and not twin,
        twin=options.sparse and twin,
        empty=options.what == "speed",
        num_attention_heads=heads,
        num_hidden_layers=layers,
        torch_dtype=options.dtype,
        **({"index_topk": options.topk} if options.topk and not twin else {}),
    )
    return LLM(
        model=str(model),
        skip_tokenizer_init=True,
        attention_backend=backend.partition(":")[0],
        dtype=options.dtype,
        kv_cache_dtype=options.kv,
        max_model_len=longest,
        max_num_seqs=sequences,
        max_num_batched_tokens=options.step_tokens or (8192 if options.what == "speed" else 1024),
        load_format="dummy" if options.what == "speed" else "auto",
        seed=0,
        **engine_options(options, sequences),
    )


def select_by_position() -> None:
    """Have the indexer, after its own work, select tokens that are evenly spread from the query's own backwards."""
    import torch
    from vllm.model_executor.models.deepseek_v2 import Indexer

    scored = Indexer.forward

    def forward(self: Any, hidden_states: Any, qr: Any, positions: Any, rotary_emb: Any) -> Any:
        buffer = scored(self, hidden_states, qr, positions, rotary_emb)
        count, seen = self.topk_tokens, positions.to(torch.int64)[:, None] + 1
        number = torch.arange(count, device=positions.device)
        steps = torch.maximum(seen, torch.full_like(seen, count))
        chosen = seen - 1 - number * steps // count
        buffer[: len(positions), :count] = chosen.clamp(min=-1).to(buffer.dtype)
        return buffer

    Indexer.forward = forward


def compare_selections() -> dict[str, Any]:
    """Have decode steps that select in one call select by two, too; what differs is counted on the device."""
    import torch

    from mla_cupy.integrations import vllm_indexer as ours

    select, device = ours.indexer_select_paged, "cuda" if torch.cuda.is_available() else "cpu"
    counted = {name: torch.zeros((), dtype=torch.int64, device=device) for name in ("rows", "rows that differ")}

    def both(*scored: Any, topk: int, slots: bool, indices: Any) -> Any:
        found = select(*scored, topk=topk, slots=slots, indices=indices)
        again, rows = torch.empty_like(indices).flatten(0, 1), indices.flatten(0, 1)
        logits = ours.indexer_logits_paged(*scored, clean=False)
        ours._keep(again, logits.flatten(0, 1), topk, ke=scored[3].reshape(-1))
        counted["rows"] += len(rows)
        counted["rows that differ"] += (again != rows).any(dim=1).sum()
        return found

    ours.indexer_select_paged = both
    return counted


def facts(made: Any) -> dict[str, Any]:
    """The configuration that really runs, read from the engine."""
    config = made.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    kinds = {f"{type(x.impl).__module__}.{type(x.impl).__name__}" for x in layers if hasattr(x, "impl")}
    return {
        "implementation": sorted(kinds),
        "page_size": config.cache_config.block_size,
        "second_runner": bool(config.use_v2_model_runner),
        "graphs": str(config.compilation_config.cudagraph_mode),
    }


def prompts(longest: int, count: int = len(LENGTHS)) -> list[list[int]]:
    """`count` prompts with the lengths in turn; every other one shares its first two thirds with the others."""
    draw = random.Random(1)
    base = [draw.randrange(VOCABULARY) for _ in range(longest)]
    made = []
    for number in range(count):
        length = min(LENGTHS[number % len(LENGTHS)], longest)
        shared = 2 * length // 3 if number % 2 else 0
        made.append(base[:shared] + [draw.randrange(VOCABULARY) for _ in range(length - shared)])
    return made


def tokens(options: argparse.Namespace, backend: str, heads: int) -> dict[str, Any]:
    """Greedy tokens in two rounds: the second finds its prompts in the prefix cache."""
    from vllm import SamplingParams

    variants = variants_of(backend)
    shapes = count_our_calls() if backend.startswith("CUSTOM") or {"ours", "indexer"} & variants else {}
    selections = compare_selections() if "indexer" in variants else {}
    made = engine(options, backend, heads, options.longest + options.new + 8, max(32, options.prompts))
    wanted = SamplingParams(temperature=0, max_tokens=options.new, ignore_eos=True, logprobs=4, detokenize=False)
    given = [{"prompt_token_ids": x} for x in prompts(options.longest, options.prompts)]
    batches = [[x] for x in given] if "alone" in variants else [given]
    rounds = [[told(x) for batch in batches for x in made.generate(batch, wanted, use_tqdm=False)] for _ in range(2)]
    found = {name: int(count) for name, count in selections.items()}
    return {"facts": facts(made), "shapes": dict(shapes), "selections": found, "rounds": rounds}


def speed(options: argparse.Namespace, backend: str, heads: int) -> dict[str, Any]:
    """Milliseconds of a decode step, with a short context and with a long one."""
    from vllm import SamplingParams

    batches, contexts = several(options.batch), several(options.context)
    made = engine(options, backend, heads, max(contexts) + LONG + SHORT, max(SEQUENCES, *batches))
    options.turn = await_turn(options.starting)
    draw, steps = random.Random(2), {}
    for context in contexts:
        given = [
            {"prompt_token_ids": [draw.randrange(VOCABULARY) for _ in range(context)]} for _ in range(max(batches))
        ]

        def seconds(count: int, batch: int, given: Any = given) -> float:
            begun = time.perf_counter()
            wanted = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            made.generate(given[:batch], wanted, use_tqdm=False)
            return time.perf_counter() - begun

        seconds(1, max(batches))  # fills the prefix cache: what follows is decode
        for batch in batches:
            seconds(SHORT, batch)
            told = step_times([(seconds(SHORT, batch), seconds(LONG, batch)) for _ in range(3)])
            if not options.cpu:
                told |= apart(lambda n=SHORT, batch=batch: seconds(n, batch), options.trace and context == contexts[-1])
            steps[f"b{batch} {context}"] = told
    return {"facts": facts(made), "steps": steps, "prefill_ms": prefill_times(made, options)}


def apart(run: Any, trace: bool) -> dict[str, Any]:
    """The times of a step that `run` generates, on the GPU and on the host; with `trace` kernel by kernel.

    What fails is told in its place: the times on a clock are there already.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
    from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLAMetadataBuilder
    from vllm.v1.attention.backends.mla.flashmla import FlashMLAMetadataBuilder

    base, stock = MLACommonMetadataBuilder, (FlashMLAMetadataBuilder, FlashAttnMLAMetadataBuilder)
    asked: dict[str, Any] = {"apart": lambda: watched(run, [base])}
    if trace:
        asked["kernels"] = lambda: per_step(*(traced(lambda n=n: run(n)) for n in (8, 24)), 16)
        asked["builders_us"] = lambda: builders_in_turn(run, base, stock, set_current_vllm_config)
    told = {}
    for name, ask in asked.items():
        try:
            told[name] = ask()
        except Exception as error:
            traceback.print_exc()
            told[f"{name}_failed"] = repr(error)
    return told


def several(numbers: str) -> list[int]:
    """Numbers of an argument."""
    return [int(x) for x in numbers.split(",")]


def variants_of(backend: str) -> set[str]:
    """What is special about a backend, by its name."""
    return set(backend.split(":")[1:])


def get_ready(folder: Path) -> Any:
    """Say that this process is starting; the file that says so is locked until it is ready, or ends."""
    starting = (folder / "starting").open("w")
    fcntl.flock(starting, fcntl.LOCK_SH)
    return starting


def await_turn(starting: Any, patience: float = PATIENCE) -> Any:
    """Wait until every process of the folder is ready, or gone; then be the one that is timed.

    Who hangs does not hold up the others for longer than `patience` seconds. The turn lasts as long as the file that is
    returned.
    """
    fcntl.flock(starting, fcntl.LOCK_UN)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            fcntl.flock(starting, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.05)
    fcntl.flock(starting, fcntl.LOCK_UN)
    turn = Path(starting.name).with_name("turn").open("w")
    fcntl.flock(turn, fcntl.LOCK_EX)
    return turn


def prefill_times(made: Any, options: argparse.Namespace) -> list[float]:
    """Milliseconds of prompts that no cache has, with one token that is generated: shortest first."""
    from vllm import SamplingParams

    draw, found, context = random.Random(3), [], several(options.context)[-1]
    wanted = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    for _ in range(3):
        count = max(1, min(max(several(options.batch)), PREFILLED // context))
        given = [{"prompt_token_ids": [draw.randrange(VOCABULARY) for _ in range(context)]} for _ in range(count)]
        begun = time.perf_counter()
        made.generate(given, wanted, use_tqdm=False)
        found.append((time.perf_counter() - begun) * 1e3)
    return sorted(found)


def step_times(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Milliseconds of a step, from the seconds of a short and of a long generation: the median, and all."""
    found = sorted((long - short) / (LONG - SHORT) * 1e3 for short, long in pairs)
    return {"ms": found[len(found) // 2], "all_ms": found}


def tell_steps(name: str, found: dict[str, Any]) -> None:
    """Print the times of one backend."""
    for case, step in found["steps"].items():
        print(f"{name} {case} tokens: {step['ms']:.3f} ms ({min(step['all_ms']):.3f}) {json.dumps(step.get('apart'))}")
        for failed in (x for x in step if x.endswith("_failed")):
            print(f"    {failed}: {step[failed]}")
        if "builders_us" in step:
            print(f"    microseconds of builders: {json.dumps(step['builders_us'])}")
        for row in step.get("kernels", ()):
            print(f"    {row['runs']:7.2f} {row['us']:9.2f} {row['added_us']:9.2f} us  {row['kernel'][:90]}")
    print(f"{name} prefill: {found['prefill_ms'][0]:.1f} ms", flush=True)


def process(options: argparse.Namespace, given: list[str], backend: str, heads: int, number: int) -> Any:
    """Run one backend in a process of its own; its result, or None."""
    name = f"{label(options, backend, heads)}-{number}"
    result, log = options.out / f"{name}.json", options.out / f"{name}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.engines.gpu.check", *given, "--heads", str(heads)]
    command += ["--one", backend, "--out", str(result)]
    environment = dict(os.environ)
    for variant in variants_of(backend):
        environment |= VARIANTS[variant]
    with log.open("w") as file:
        try:
            where: Any = {"stdout": file, "stderr": subprocess.STDOUT, "env": environment}
            subprocess.run(command, timeout=options.timeout, check=False, **where)
        except subprocess.TimeoutExpired:
            print(f"{name}: more than {options.timeout} s")
    if not result.exists():
        print(f"{name}: FAILED", *log.read_text().splitlines()[-6:], sep="\n    ")
        return None
    found = json.loads(result.read_text())
    print(f"{name}: {json.dumps(found['facts'])}", flush=True)
    return found


def main(given: list[str]) -> int:
    """Run all backends and compare; returns 1 if one failed or parts far from the reference."""
    options = arguments(given)
    if options.one:
        result, options.out = options.out, options.out.parent
        options.starting = get_ready(options.out)
        if options.cpu:
            stand_in()
        found = {"tokens": tokens, "speed": speed}[options.what](options, options.one, int(options.heads))
        result.write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)  # vLLM's threads have nothing to put away
    options.out.mkdir(parents=True, exist_ok=True)
    status = 0
    for heads in map(int, options.heads.split(",")):
        names = options.backends.split(",")
        with ThreadPoolExecutor(options.at_once) as pool:
            runs = [pool.submit(process, options, given, name, heads, number) for number, name in enumerate(names)]
        results = [run.result() for run in runs]
        status |= any(x is None for x in results)
        for name, found in zip(names, results, strict=True):
            if found and options.what == "speed":
                tell_steps(f"h{heads} {name}", found)
        for name, found in zip(names, results, strict=True):
            if found and options.what == "tokens":
                print(f"h{heads} {name}, from cached prefixes against not: {json.dumps(between_rounds(found))}")
                print(f"h{heads} {name}, selections: {json.dumps(found['selections'])}")
                status |= bool(found["selections"].get("rows that differ"))
        for name, found in zip(names[1:], results[1:], strict=True):
            if found and results[0] and options.what == "tokens":
                said = compared(results[0], found)
                status |= any(x["gap"] > NEAR for x in said["partings"])
                print(f"h{heads} {name} against {names[0]}: {json.dumps(said)}", flush=True)
    return int(status)


if __name__ == "__main__":
    for name, value in (("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_NO_USAGE_STATS", "1"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    # vLLM's sampler imports FlashInfer even where it is missing.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    sys.exit(main(sys.argv[1:]))
