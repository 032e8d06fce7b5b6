"""Hold the plugins against an engine's source: names, overridden methods, abstract methods, attributes, call sites."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_cupy.integrations.probe import misfit
from tests.engines.source import Call, Class, Package, callable_of, calls, decorators, signature

REPOSITORY = Path(__file__).resolve().parents[2]
OURS = Package(REPOSITORY)


@dataclass(frozen=True)
class Reliance:
    """Parts of an engine that a plugin relies on, beyond its overrides.

    Attributes
    ----------
    modules : tuple of str
        Those of the plugin that subclass the engine's classes.
    callers : tuple of str
        Packages of the engine in which calls of overridden methods are looked for.
    attributes : dict
        (module, class) of the engine -> attributes of its objects that the plugin reads.
    """

    modules: tuple[str, ...]
    callers: tuple[str, ...]
    attributes: dict[tuple[str, str], tuple[str, ...]]


RELIANCE = {
    "vllm": Reliance(
        (
            *("mla_cupy.integrations.vllm_backend", "mla_cupy.integrations.vllm_prefill"),
            "mla_cupy.integrations.vllm_sparse_backend",
        ),
        ("vllm.v1", "vllm.model_executor.layers", "vllm.platforms"),
        {
            ("vllm.model_executor.layers.attention.mla_attention", "MLACommonMetadata"): (
                *("num_decodes", "decode", "prefill"),
            ),
            ("vllm.model_executor.layers.attention.mla_attention", "MLACommonPrefillMetadata"): (
                *("block_table", "query_start_loc", "chunked_context", "q_data_type"),
            ),
            ("vllm.model_executor.layers.attention.mla_attention", "MLACommonImpl"): (
                *("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_heads"),
                *("dcp_world_size", "kv_cache_dtype", "scale"),
            ),
            ("vllm.model_executor.layers.attention.mla_attention", "MLACommonDecodeMetadata"): (
                *("block_table", "seq_lens", "dcp_tot_seq_lens"),
            ),
            ("vllm.v1.kv_cache_interface", "MLAAttentionSpec"): ("block_size", "head_size", "dtype"),
            ("vllm.v1.attention.backends.registry", "AttentionBackendEnum"): ("CUSTOM", "FLASHMLA_SPARSE"),
            ("vllm.config.parallel", "ParallelConfig"): ("decode_context_parallel_size",),
            ("vllm.config.scheduler", "SchedulerConfig"): ("max_num_seqs",),
        },
    ),
    "sglang": Reliance(
        ("mla_cupy.integrations.sglang_backend",),
        ("sglang.srt.layers", "sglang.srt.model_executor", "sglang.srt.speculative", "sglang.srt.managers"),
        {
            ("sglang.srt.model_executor.forward_batch_info", "ForwardBatch"): (
                *("forward_mode", "batch_size", "seq_lens", "req_pool_indices", "out_cache_loc"),
            ),
            ("sglang.srt.model_executor.forward_batch_info", "ForwardMode"): (
                *("is_decode_or_idle", "is_target_verify"),
            ),
            ("sglang.srt.layers.radix_attention", "RadixAttention"): (
                *("tp_q_head_num", "head_dim", "v_head_dim", "scaling", "layer_id"),
            ),
            ("sglang.srt.mem_cache.memory_pool", "MLATokenToKVPool"): ("set_kv_buffer", "get_key_buffer"),
            ("sglang.srt.plugins.hook_registry", "HookRegistry"): ("register", "apply_hooks"),
        },
    ),
}


@dataclass(frozen=True)
class Override:
    """A method of ours, and what it overrides.

    Attributes
    ----------
    ours, theirs : Class
    name : str
    method : ast.FunctionDef
        The engine's.
    """

    ours: Class
    theirs: Class
    name: str
    method: ast.FunctionDef

    @property
    def label(self) -> str:
        """Label for messages and records."""
        return f"{self.ours.node.name}.{self.name}"


def bases(engine: str, package: Package) -> Iterator[tuple[Class, list[Class], str]]:
    """Each class of a plugin, the engine's classes that it descends from, and what is missing for that."""
    for module in RELIANCE[engine].modules:
        tree = OURS.tree(module)
        assert tree is not None, module
        for node in tree.body:
            if not isinstance(node, ast.ClassDef):
                continue
            for base in node.bases:
                home = _home(tree, ast.unparse(base))
                if home.partition(".")[0] == engine:
                    lineage = package.lineage(home, ast.unparse(base))
                    missing = "" if lineage else f"{home} has no class {ast.unparse(base)}"
                    yield Class(module, node), lineage, missing


def _home(tree: ast.Module, name: str) -> str:
    """The module that a name is imported from, "" if it is not."""
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and name in {x.name for x in statement.names}:
            return statement.module or ""
    return ""


def overrides(engine: str, package: Package) -> Iterator[Override]:
    """Every method of the plugin that the engine's classes have, too."""
    for ours, lineage, _ in bases(engine, package):
        for name in ours.methods:
            found = next((x for x in lineage if name in x.methods), None)
            if found is not None:
                yield Override(ours, found, name, found.methods[name])


def compare(engine: str, package: Package) -> list[str]:
    """Everything in which an engine's source is not what the plugin needs; nothing, if the plugin can serve it."""
    found = [*_imports(engine, package), *_attributes(engine, package)]
    for ours, lineage, missing in bases(engine, package):
        found += [missing] if missing else []
        found += _of_a_class(ours, lineage)
    for override in overrides(engine, package):
        method, ours = override.method, override.ours.methods[override.name]
        if "property" in decorators(method):
            continue
        both = (callable_of(signature(x, bound=True)) for x in (ours, method))
        problem = misfit(*both, shortest_only=override.name == "__init__")
        found += [f"{override.theirs.node.name}.{override.name} {problem}"] if problem else []
        for call in sites(engine, package, override):
            problem = unserved(call, ours)
            found += [f"{call.module}:{call.line} calls {override.label}: {problem}"] if problem else []
    return found


def _imports(engine: str, package: Package) -> Iterator[str]:
    for module in RELIANCE[engine].modules:
        for statement in ast.walk(OURS.tree(module) or ast.Module([], [])):
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").partition(".")[0] == engine:
                for alias in statement.names:
                    home = statement.module or ""
                    if package.find(home, alias.name) is None and package.tree(f"{home}.{alias.name}") is None:
                        yield f"{home} has no {alias.name}"


def _attributes(engine: str, package: Package) -> Iterator[str]:
    for (module, name), wanted in RELIANCE[engine].attributes.items():
        lineage = package.lineage(module, name)
        there = set().union(*(x.names for x in lineage))
        if not lineage:
            yield f"{module} has no class {name}"
        yield from (f"{name} has no {x}" for x in wanted if lineage and x not in there)


def _of_a_class(ours: Class, lineage: list[Class]) -> Iterator[str]:
    """Abstract methods that nobody implements, and attributes that nobody sets."""
    there: set[str] = set(ours.names)
    for theirs in lineage:
        for name, method in theirs.methods.items():
            if name not in there and "abstractmethod" in decorators(method):
                yield f"{theirs.node.name}.{name} is abstract, and {ours.node.name} has none"
        there |= theirs.names
    yield from (f"{ours.node.name} reads self.{x}, which nobody sets" for x in sorted(ours.read - there) if lineage)


def sites(engine: str, package: Package, override: Override) -> Iterator[Call]:
    """Places where the engine calls an overridden method; constructors have no name to search for."""
    if override.name.startswith("__"):
        return
    for above in RELIANCE[engine].callers:
        for call in calls(package, above, override.name):
            # Others have methods of the same name: what the engine's own could not be called with is not for ours.
            if not unserved(call, override.method):
                yield call


def unserved(call: Call, ours: ast.FunctionDef) -> str:
    """Say why our method cannot be called as the engine does; "" if it can."""
    try:
        signature(ours, bound=True).bind(*range(call.positional), **dict.fromkeys(call.named))
    except TypeError as error:
        return str(error)
    return ""


def facts(engine: str, package: Package) -> dict[str, Any]:
    """Recorded facts of a version: parameters of the methods that the plugin overrides, and their calls."""
    found: dict[str, Any] = {}
    for override in overrides(engine, package):
        shapes = {" ".join([str(x.positional), *x.named]) for x in sites(engine, package, override)}
        found[override.label] = {
            "of": f"{override.theirs.module}.{override.theirs.node.name}",
            "takes": spelled(override.method),
            "gives": ast.unparse(override.method.returns) if override.method.returns else "",
            "calls": sorted(shapes),
        }
    return found


def spelled(method: ast.FunctionDef) -> str:
    """The parameters of a method but its first, with `...` for defaults."""
    made = signature(method, bound=True)
    parts, keyword_only = [], False
    for x in made.parameters.values():
        if x.kind is x.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
        keyword_only |= x.kind in (x.KEYWORD_ONLY, x.VAR_POSITIONAL)
        star = {x.VAR_POSITIONAL: "*", x.VAR_KEYWORD: "**"}.get(x.kind, "")
        parts.append(star + x.name + ("" if x.default is x.empty else "=..."))
    return ", ".join(parts)
