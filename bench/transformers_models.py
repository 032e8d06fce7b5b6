"""Hugging Face transformers with its own attention and with these kernels: modules, and whole decode steps."""

from __future__ import annotations

import argparse
import copy
import gc
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mla_cupy.terminal import show, table

from .core.errors import BenchError

DESCRIPTION = """Times of transformers' attention, stock ("sdpa") and by these kernels, in one process on equal weights.

Modules have random weights in bfloat16 and the sizes of DeepSeek-V3 (128 heads) or DeepSeek-V2-Lite (16 heads).
"""
EPILOG = """examples:
  python -m bench transformers                           all groups, some 8 minutes on an H200
  python -m bench transformers --only decode,prefill     two of them
"""
_MIB = 2**20
_LAYERS = 8
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, by commas (default: %(default)s)")
    parser.add_argument("--match", default="", metavar="TEXT", help="only rows whose name contains the text")
    parser.add_argument(
        "--draw", type=Path, metavar="FILE", help="measure nothing: draw the rows of --json (matplotlib)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows as JSON lines, too")


def run(args: argparse.Namespace, console: Any) -> int:
    """Measures, prints a table, and writes rows as they come."""
    if args.draw:
        if not args.json:
            raise BenchError("--draw: got no --json, expected the file with the rows")
        _draw([json.loads(line) for line in args.json.read_text().splitlines()], args.draw)
        return 0
    import torch

    if not torch.cuda.is_available():
        raise BenchError("transformers: no GPU; expected one that PyTorch can use")
    rows: list[Row] = []
    for name in args.only.split(","):
        if name not in GROUPS:
            raise BenchError(f"--only: got {name!r}, expected some of {', '.join(GROUPS)}")
        for row in GROUPS[name](args.match):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            gc.collect()
            torch.cuda.empty_cache()
    names = ("case", "stock_us", "ours_us", "graph_us", "stock_mib", "ours_mib", "difference")
    heads = ("case", "stock us", "ours us", "graph us", "stock MiB", "ours MiB", "difference")
    show(table("transformers", heads, [[row.get(name, "") for name in names] for row in rows]))
    return 0


# ---- Attention modules


def decode(match: str) -> Iterator[Row]:
    """One new token a sequence."""
    sizes = [(128, 1, 2048), (128, 1, 8192), (128, 1, 32768), (128, 1, 131072), (128, 8, 8192), (16, 1, 1024)]
    for heads, b, cached in [*sizes, (16, 1, 8192), (16, 16, 8192)]:
        name = f"decode, {heads} heads, b {b}, {cached} cached"
        if match in name:
            yield _decode(name, heads, b, cached)


def _decode(name: str, heads: int, b: int, cached: int) -> Row:
    """Time of one of several equal layers: what a step does once for all of them is shared out."""
    import torch
    from transformers import DynamicCache

    module, rotary, config = _module(heads)
    modules = [_at(module, i) for i in range(_LAYERS)]
    parts = [torch.randn(b, 1, cached, d, device="cuda").bfloat16() for d in (512, 64)]
    x = torch.randn(b, 1, config.hidden_size, device="cuda").bfloat16() / 2
    embeddings = rotary(x, torch.full((b, 1), cached, device="cuda"))

    def cache() -> Any:
        made = DynamicCache(config=config)
        for i in range(_LAYERS):
            made.update(*(part.clone() for part in parts), i)
        return made

    def step(past: Any) -> Any:
        for each in modules:
            out = each(x, embeddings, None, past)[0]
        past.crop(-1)
        return out

    with torch.no_grad():
        past = cache()
        expected, stock_us, stock_mib = _timed(partial(step, past), 10)
        del past
        for each in modules:
            _serve(each)
        past = cache()
        step(past)  # moves the latents
        out, ours_us, ours_mib = _timed(partial(step, past), 30)
        graph_us = _timed(_captured(modules, x, embeddings, past), 50)[1]
    times = {"stock_us": stock_us, "ours_us": ours_us, "graph_us": graph_us}
    found = {key: round(value / _LAYERS, 1) for key, value in times.items()}
    memory = {"stock_mib": stock_mib, "ours_mib": ours_mib}
    return {"case": name, **found, **memory, "difference": _difference(out, expected)}


def _at(module: Any, layer: int) -> Any:
    """Copy a module as another layer, with its weights."""
    made = copy.copy(module)
    made.layer_idx = layer
    return made


def _captured(modules: Any, x: Any, embeddings: Any, cache: Any) -> Callable[[], Any]:
    """A replay of one step, which writes the same token each time."""
    import torch

    from mla_cupy.transformers.ragged import Ragged

    cache.layers[0].store.extend(Ragged.of(None, len(x), 1, x.device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in modules:
            each(x, embeddings, None, cache)
    replay: Callable[[], Any] = graph.replay
    return replay


def prefill(match: str) -> Iterator[Row]:
    """Prompts, and training."""
    for heads, tokens, train in [
        (128, 2048, False),
        (128, 8192, False),
        (16, 8192, False),
        (128, 4096, True),
        (16, 8192, True),
    ]:
        name = f"{'forward and backward' if train else 'prefill'}, {heads} heads, {tokens} tokens"
        if match in name:
            yield _prefill(name, heads, tokens, train)


def _prefill(name: str, heads: int, tokens: int, train: bool) -> Row:
    import torch

    module, rotary, config = _module(heads)
    module.train(train)
    x = (torch.randn(1, tokens, config.hidden_size, device="cuda").bfloat16() / 2).requires_grad_(train)
    embeddings = rotary(x, torch.arange(tokens, device="cuda")[None])

    def call() -> Any:
        with torch.set_grad_enabled(train):
            out = module(x, embeddings, None)[0]
            if train:
                x.grad = None
                module.zero_grad()
                out.backward(torch.ones_like(out))
            return x.grad if train else out

    expected, stock_us, stock_mib = _timed(call, 10)
    _serve(module)
    out, ours_us, ours_mib = _timed(call, 10)
    found = {"stock_us": stock_us, "ours_us": ours_us, "stock_mib": stock_mib, "ours_mib": ours_mib}
    return {"case": name, **found, "difference": _difference(out, expected)}


def sparse(match: str) -> Iterator[Row]:
    """DeepSeek-V3.2's module: indexer and attention to 2,048 tokens."""
    for tokens, with_stock in ((4096, True), (8192, True), (16384, True), (65536, False)):
        name = f"DeepSeek-V3.2 prefill, {tokens} tokens"
        if match in name:
            yield _sparse(name, tokens, with_stock)


def _sparse(name: str, tokens: int, with_stock: bool) -> Row:
    import torch

    module, rotary, config = _module(128, "deepseek_v32", "DeepseekV32")
    x = torch.randn(1, tokens, config.hidden_size, device="cuda").bfloat16() / 2
    places = torch.arange(tokens, device="cuda")[None]
    call = {"hidden_states": x, "position_embeddings": rotary(x, places), "position_ids": places}
    row: Row = {"case": name}
    expected = None
    with torch.no_grad():
        if with_stock:
            mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device="cuda").tril()
            expected, row["stock_us"], row["stock_mib"] = _timed(lambda: module(**call, attention_mask=mask)[0], 2)
            del mask
        _serve(module)
        lean = torch.ones((), dtype=torch.bool, device="cuda").expand(1, 1, tokens, tokens)
        out, row["ours_us"], row["ours_mib"] = _timed(lambda: module(**call, attention_mask=lean)[0], 3)
    return row if expected is None else row | {"difference": _difference(out, expected)}


# ---- Whole models


def steps(match: str) -> Iterator[Row]:
    """Decode steps of DeepSeek-V2-Lite's sizes, 15.7 billion random parameters."""
    cases = [(1, 1024), (1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768), (8, 131072)]
    wanted = [(b, n) for b, n in cases if match in _step_name(b, n)]
    if wanted:
        model = _lite()
        for b, cached in wanted:
            yield _whole_step(_step_name(b, cached), model, b, cached)


def _step_name(b: int, cached: int) -> str:
    return f"DeepSeek-V2-Lite step, b {b}, {cached} cached"


def v3(match: str) -> Iterator[Row]:
    """Decode steps of four dense layers of DeepSeek-V3's sizes."""
    name = "DeepSeek-V3, 4 dense layers, step, b 1, 131072 cached"
    if match in name:
        yield _whole_step(name, _dense_v3(), 1, 131072)


def _whole_step(name: str, model: Any, b: int, cached: int) -> Row:
    import torch

    from mla_cupy.transformers import LatentCache, StepGraph, patch, unpatch

    ids = torch.randint(0, 1000, (b, 1), device="cuda")
    places = torch.full((b, 1), cached, device="cuda")
    row: Row = {"case": name}

    def step(cache: Any) -> Any:
        with torch.no_grad():
            found = model(input_ids=ids, position_ids=places, past_key_values=cache, use_cache=True).logits
        cache.crop(-1)
        return found

    unpatch(model)
    try:
        stock = _filled(model.config, b, cached, torch.device("cuda"))
        expected, row["stock_us"], row["stock_mib"] = _timed(partial(step, stock), 4)
    except torch.OutOfMemoryError:
        expected, row["stock_us"] = None, "out of memory"
    stock = None
    gc.collect()
    torch.cuda.empty_cache()
    patch(model)
    mine = LatentCache(model.config, max_length=cached + 64)
    _fill(mine, b, cached)
    step(mine)
    out, row["ours_us"], row["ours_mib"] = _timed(partial(step, mine), 4)
    if expected is not None:
        row["difference"] = _difference(out, expected)
    try:
        graph = StepGraph(model, mine)
        graph(ids)
        row["graph_us"] = _timed(partial(graph, ids), 8)[1]
    except (RuntimeError, AssertionError) as error:
        row["graph_us"] = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return row


def _filled(config: Any, b: int, cached: int, device: Any) -> Any:
    from transformers import DynamicCache

    made = DynamicCache(config=config)
    _fill(made, b, cached)
    return made


def _fill(cache: Any, b: int, cached: int) -> None:
    """Fill a cache with random latents, equal each time."""
    import torch

    made = torch.Generator("cuda").manual_seed(cached)
    for layer in cache.layers:
        parts = (torch.randn(b, 1, cached, d, device="cuda", dtype=torch.bfloat16, generator=made) for d in (512, 64))
        layer.update(*parts)


def _lite() -> Any:
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV2Config

    sizes: Row = {"hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16}
    experts = {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1408, "num_experts_per_tok": 6}
    groups = {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "first_k_dense_replace": 1}
    rest: Row = {
        "q_lora_rank": None,
        "intermediate_size": 10944,
        "vocab_size": 102400,
        "max_position_embeddings": 163840,
    }
    config = DeepseekV2Config(**sizes, **experts, **groups, **rest)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).eval()


def _dense_v3() -> Any:
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    config = DeepseekV3Config(
        num_hidden_layers=4, first_k_dense_replace=4, vocab_size=1024, max_position_embeddings=163840
    )
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).eval()


def _draw(rows: list[Row], path: Path) -> None:
    """Draw tokens per second and extra memory of whole steps over the number of cached tokens."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    series = (("stock_us", "stock_mib", "transformers", "0.55"), ("ours_us", "ours_mib", "patched", "C0"))
    for b, line in ((1, "-"), (8, "--")):
        chosen = [(n, row) for row in rows for n in [_cached(row["case"], b)] if n]
        for times, sizes, label, colour in (*series, ("graph_us", "", "StepGraph", "C2")):
            style = {"ls": line, "marker": "o", "ms": 3, "color": colour, "label": f"{label}, batch {b}"}
            speed.plot([n for n, _ in chosen], [b * 1e6 / row[times] for _, row in chosen], **style)
            if sizes:
                memory.plot([n for n, _ in chosen], [max(1, row[sizes]) for _, row in chosen], **style)
    for axes, title in ((speed, "tokens per second"), (memory, "memory of a step beyond weights and cache, MiB")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("cached tokens of each sequence")
        axes.grid(alpha=0.3)
    figure.legend(*speed.get_legend_handles_labels(), loc="outside right center", fontsize=7)
    figure.suptitle("Decode steps of DeepSeek-V2-Lite's sizes, random weights, one H200", fontsize=10)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "mla_cupy"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _cached(case: str, b: int) -> int | None:
    """Read the number of cached tokens off the name of a whole step's row."""
    start = f"DeepSeek-V2-Lite step, b {b}, "
    return int(case.removeprefix(start).removesuffix(" cached")) if case.startswith(start) else None


# ---- Helpers


def _module(heads: int, name: str = "deepseek_v3", prefix: str = "DeepseekV3") -> tuple[Any, Any, Any]:
    """An attention module with random weights, its rotary embedding, and its configuration."""
    import importlib

    import torch

    torch.manual_seed(0)
    file = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    options: Row = {"num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": _LAYERS}
    if heads == 16:
        options |= {"hidden_size": 2048, "q_lora_rank": None}
    config = getattr(file, f"{prefix}Config")(**options, max_position_embeddings=163840)
    config._attn_implementation = "sdpa"
    module = getattr(file, f"{prefix}Attention")(config, 0).to("cuda", torch.bfloat16).eval()
    return module, getattr(file, f"{prefix}RotaryEmbedding")(config).to("cuda"), config


def _serve(module: Any) -> None:
    """Serve a module as `patch` does."""
    from mla_cupy.transformers.masks import NAME
    from mla_cupy.transformers.patching import attach

    module.config._attn_implementation = NAME
    attach(module)


def _timed(call: Callable[[], Any], rounds: int) -> tuple[Any, float, int]:
    """Result of a call, its median time in us, and its peak memory beyond what was allocated, in MiB."""
    import torch

    result = call()
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    spans = [SimpleNamespace(a=torch.cuda.Event(True), b=torch.cuda.Event(True)) for _ in range(rounds)]
    for span in spans:
        span.a.record()
        call()
        span.b.record()
    torch.cuda.synchronize()
    times = sorted(span.a.elapsed_time(span.b) * 1000 for span in spans)
    return result, round(times[len(times) // 2], 1), round((torch.cuda.max_memory_allocated() - before) / _MIB)


def _difference(x: Any, y: Any) -> float:
    """Relative norm."""
    return float(round(float((x.float() - y.float()).norm() / y.float().norm()), 5))


GROUPS: dict[str, Callable[[str], Iterator[Row]]] = {
    "decode": decode,
    "prefill": prefill,
    "sparse": sparse,
    "steps": steps,
    "v3": v3,
}
