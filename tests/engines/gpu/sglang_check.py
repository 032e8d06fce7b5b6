"""Tokens and step times of attention backends in the real SGLang on a GPU.

    python -m tests.engines.gpu.sglang_check --backends triton,mla_cupy,flashmla [--graphs]
    python -m tests.engines.gpu.sglang_check --kv fp8_e4m3 --backends triton,mla_cupy
    python -m tests.engines.gpu.sglang_check --graphs --drafts 3 --backends triton,mla_cupy --at-once 2
    python -m tests.engines.gpu.sglang_check --chunk 512 --prefill mla_cupy --backends mla_cupy,flashmla
    python -m tests.engines.gpu.sglang_check --graphs --speed --heads 128 --backends mla_cupy,flashmla

Each backend decodes in a process of its own, one after another, or several --at-once where only tokens count; Triton's
prefills: FlashAttention is not in the parcel, and FlashInfer compiles itself for minutes. Triton's kernels of prefill
take a minute at the first request. The first of the list is the reference. Two rounds: the second finds its prompts in
the prefix cache. With --drafts the model's first layer drafts, on Triton's backend, or with `mla_cupy:registered` on
the one that the plugin registers for drafts, and the backend verifies. A backend's name may also be followed by
`:fp8-math`. Results and logs are in --out. With --speed and --graphs also what the graph of a step takes on the GPU,
and its kernels (`tests.engines.gpu.replays`), after the times on a clock, which are kept if --timeout ends the process
before.

A process takes its time before it decodes: 25 s of imports, 20 until the model is there, on a machine that has not run
SGLang before 75 in which SGLang compiles kernels of its own, and 23 for the prompts of 64 requests of 8,192 tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.engines.cpu.cases import NEAR, between_rounds, compared
from tests.engines.gpu import replays
from tests.engines.gpu.check import LENGTHS, LONG, SHORT, VARIANTS, VOCABULARY, prompts, several, step_times
from tests.engines.model import build

MANY = 8
FEW, MORE = 3, 15
"""Readings of steps of more requests than `MANY`, each of which prefills for seconds, and of others."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Arguments of the script."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.engines.gpu.sglang_check", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--backends", default="triton,mla_cupy,flashmla")
    parser.add_argument("--one", metavar="BACKEND", help=argparse.SUPPRESS)
    parser.add_argument("--prefill", default="triton", help="backend that prefills")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs of decode")
    parser.add_argument("--kv", default="auto", help="dtype of the cache")
    parser.add_argument("--drafts", type=int, default=0, help="tokens that a model of one layer drafts")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a chunk of prefill (default: SGLang's)")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="backends (default 1)")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--speed", action="store_true", help="times of steps instead of tokens")
    parser.add_argument("--batch", default="64", help="requests of --speed, or several numbers of them")
    parser.add_argument("--context", type=int, default=8192, help="tokens of each of them")
    parser.add_argument("--layers", type=int, default=0, help="of the model (default: 2, of --speed 24)")
    parser.add_argument("--new", type=int, default=48, help="tokens that are generated")
    parser.add_argument("--timeout", type=int, default=200, metavar="SECONDS")
    parser.add_argument("--out", type=Path, default=Path("engines-out"))
    return parser.parse_args(given)


def engine_options(options: argparse.Namespace, backend: str) -> dict[str, Any]:
    """Options of SGLang's engine that depend on the arguments."""
    longest = options.context + LONG + SHORT if options.speed else max(LENGTHS) + options.new
    made = {
        "decode_attention_backend": backend.partition(":")[0],
        "prefill_attention_backend": options.prefill,
        "kv_cache_dtype": options.kv,
        "context_length": longest + 8,
        "max_running_requests": max(several(options.batch)) if options.speed else 32,
        "page_size": 64,
    }
    if options.chunk:
        made["chunked_prefill_size"] = options.chunk
    if options.at_once > 1:
        made |= {"mem_fraction_static": 0.9, "max_total_tokens": 1 << 17}  # each believes that it is alone
    if options.drafts:
        made |= {
            "speculative_algorithm": "STANDALONE",
            "speculative_num_steps": options.drafts,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": options.drafts + 1,
            "speculative_attention_mode": "decode",  # who decodes verifies, too
        }
        if not backend.endswith(":registered"):
            made["speculative_draft_attention_backend"] = "triton"
    if options.graphs:
        return {**made, "disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": made["max_running_requests"]}
    return {**made, "disable_cuda_graph": True}


def told(output: dict[str, Any]) -> dict[str, Any]:
    """Tokens and logprobs of one of SGLang's outputs, in the form of vLLM's."""
    meta = output["meta_info"]
    steps = [{str(token): value for value, token, *_ in top} for top in meta["output_top_logprobs"]]
    tokens = [token for _, token, *_ in meta["output_token_logprobs"]]
    for step, (value, token, *_) in zip(steps, meta["output_token_logprobs"], strict=True):
        step[str(token)] = value
    return {"tokens": tokens, "cached": meta.get("cached_tokens", 0), "logprobs": steps}


def tokens(options: argparse.Namespace, engine: Any) -> dict[str, Any]:
    """Greedy tokens in two rounds."""
    wanted = {"temperature": 0, "max_new_tokens": options.new, "ignore_eos": True}
    given = prompts(max(LENGTHS))
    asked = {"sampling_params": wanted, "return_logprob": True, "top_logprobs_num": 4}
    return {"rounds": [[told(x) for x in engine.generate(input_ids=given, **asked)] for _ in range(2)]}


def speed(options: argparse.Namespace, engine: Any, keep: Callable[[dict[str, Any]], None]) -> None:
    """Milliseconds of a decode step; then, with graphs, of its graph."""
    draw, batches = random.Random(2), several(options.batch)
    given = [[draw.randrange(VOCABULARY) for _ in range(options.context)] for _ in range(max(batches))]

    def seconds(count: int, batch: int) -> float:
        begun = time.perf_counter()
        wanted = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        engine.generate(input_ids=given[:batch], sampling_params=wanted)
        return time.perf_counter() - begun

    seconds(1, max(batches))  # fills the prefix cache: what follows is decode
    steps = {}
    for batch in batches:
        seconds(SHORT, batch)
        pairs = FEW if batch > MANY else MORE
        times = step_times([(seconds(SHORT, batch), seconds(LONG, batch)) for _ in range(pairs)])
        steps[f"b{batch} {options.context}"] = times
    keep({"steps": steps})
    if not os.environ.get(replays.SWITCH):
        return
    switch = Path(os.environ[replays.SWITCH])
    for name, ask in (
        ("apart", lambda run: replays.graph_times(switch, run)),
        ("kernels", lambda run: replays.readings_while(replays.trace_switch(switch), run)),
    ):
        for batch in batches:
            steps[f"b{batch} {options.context}"][name] = ask(lambda batch=batch: seconds(LONG, batch))
            keep({"steps": steps})


def one(options: argparse.Namespace) -> None:
    """Run one backend, in this process and its children."""
    import sglang

    layers = options.layers or (24 if options.speed else 2)
    model = build(
        options.out.parent / "models" / f"h{options.heads}-l{layers}",
        empty=options.speed,
        num_attention_heads=options.heads,
        num_hidden_layers=layers,
    )
    asked = engine_options(options, options.one)
    if options.drafts:
        sizes = {"num_attention_heads": options.heads, "num_hidden_layers": 1}
        drafter = build(options.out.parent / "models" / f"h{options.heads}-l1", **sizes)
        asked["speculative_draft_model_path"] = str(drafter)
    engine = sglang.Engine(
        model_path=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        load_format="dummy" if options.speed else "auto",
        random_seed=0,
        log_level="info",
        sampling_backend="pytorch",
        **{"mem_fraction_static": 0.5, **asked},
    )
    info = engine.get_server_info()
    names = (
        "page_size",
        "decode_attention_backend",
        "prefill_attention_backend",
        "kv_cache_dtype",
        "attention_backend",
        "speculative_algorithm",
    )

    def keep(found: dict[str, Any]) -> None:
        replays.write(options.out, {"facts": {x: info.get(x) for x in names}, **found})

    if options.speed:
        speed(options, engine, keep)
    else:
        keep(tokens(options, engine))
    sys.stdout.flush()
    os._exit(0)  # its processes are ended by who has started this one: they take their time otherwise


def watched(options: argparse.Namespace, result: Path) -> dict[str, str]:
    """Environment of a process whose graphs are timed: its children find the folder `watch` first."""
    if not (options.speed and options.graphs):
        return {}
    path = [str(Path(__file__).with_name("watch")), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {replays.SWITCH: str(result.with_suffix(".timed").absolute()), "PYTHONPATH": os.pathsep.join(path)}


def process(options: argparse.Namespace, given: list[str], backend: str, number: int) -> Any:
    """Run one backend in a process of its own; its result, or None."""
    flags = [x for x in ("graphs", "speed") if getattr(options, x)]
    flags += [f"{x}{getattr(options, x)}" for x in ("drafts", "chunk") if getattr(options, x)]
    flags += ["b" + options.batch.replace(",", "-")] * options.speed + [f"by-{options.prefill}"] * (
        options.prefill != "triton"
    )
    name = "-".join(["sglang", backend.replace(":", "-"), f"h{options.heads}", options.kv, *flags, str(number)])
    result, log = options.out / f"{name}.json", options.out / f"{name}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.engines.gpu.sglang_check", *given, "--one", backend, "--out", str(result)]
    with log.open("w") as file:
        # A session of its own: SGLang's processes go with it, whatever becomes of the first.
        environment = {**os.environ, **VARIANTS.get(backend.partition(":")[2], {}), **watched(options, result)}
        where: Any = {"stdout": file, "stderr": subprocess.STDOUT, "env": environment, "start_new_session": True}
        with subprocess.Popen(command, **where) as child:
            try:
                child.wait(options.timeout)
            except subprocess.TimeoutExpired:
                print(f"{name}: more than {options.timeout} s")
            finally:  # also when this process is interrupted
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
    if not result.exists():
        lines = [x for x in log.read_text().splitlines() if x.strip()]
        errors = [x for x in lines if "Error" in x or "error:" in x]
        print(f"{name}: FAILED", *errors[-4:], *lines[-6:], sep="\n    ", flush=True)
        return None
    found = json.loads(result.read_text())
    print(f"{name}: {json.dumps(found['facts'])}", flush=True)
    return found


def main(given: list[str]) -> int:
    """Run all backends and compare; returns 1 if one failed or parts far from the reference."""
    options = arguments(given)
    if options.one:
        one(options)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.backends.split(",")
    with ThreadPoolExecutor(options.at_once) as pool:
        runs = [pool.submit(process, options, given, name, number) for number, name in enumerate(names)]
    results = [run.result() for run in runs]
    status = any(x is None for x in results)
    for name, found in zip(names, results, strict=True):
        if found and options.speed:
            for case, step in found["steps"].items():
                on_a_clock = f"{step['ms']:.3f} ms ({min(step['all_ms']):.3f})"
                print(f"h{options.heads} {name} {case} tokens: {on_a_clock} {json.dumps(step.get('apart'))}")
                for row in step.get("kernels") or ():
                    print(f"    {row['runs']:7.2f} {row['us']:9.2f} {row['added_us']:9.2f} us  {row['kernel'][:90]}")
        elif found:
            print(f"h{options.heads} {name}, from cached prefixes against not: {json.dumps(between_rounds(found))}")
    for name, found in zip(names[1:], results[1:], strict=True):
        if found and results[0] and not options.speed:
            said = compared(results[0], found)
            status |= any(x["gap"] > NEAR for x in said["partings"])
            print(f"h{options.heads} {name} against {names[0]}: {json.dumps(said)}", flush=True)
    return int(status)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))
