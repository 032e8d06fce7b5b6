"""The forward pass of one MLA module by these kernels."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

import mla_cupy.torch as mla
from mla_cupy.errors import ArgumentError, explain
from mla_cupy.ops.groups import Project
from mla_cupy.transformers.cache import LatentLayer
from mla_cupy.transformers.context import Context
from mla_cupy.transformers.families import ADDED, Family, Sizes
from mla_cupy.transformers.group import Group, group_of
from mla_cupy.transformers.indexer import IndexStates, index_states, select
from mla_cupy.transformers.masks import dense, lean
from mla_cupy.transformers.ragged import Ragged, starts_of
from mla_cupy.transformers.weights import Halves, has_dropout

#: Queries of a sequence that attend to latents; more of them attend to expanded keys, which costs a third per pair.
_MOST_ABSORBED = 128
#: Tokens of a step for which W_UK and W_UV are multiplied in the kernels; cuBLAS is faster for more.
_MOST_FUSED = 32
#: Queries of a call of sparse attention without gradients, which bounds the memory of absorbed queries.
_SPARSE_CHUNK = 4096


class UnfitError(Exception):
    """Reason why the stock code runs a call."""


class Served:
    """Replaces the forward method of one attention module.

    Parameters
    ----------
    module : nn.Module
    family : Family
    group : Group
        Attention modules of the same model.
    original : callable
        The stock forward method, for calls that do not fit.
    """

    def __init__(self, module: nn.Module, family: Family, group: Group, original: Callable[..., Any]) -> None:
        self.module, self.family, self.group, self.original = module, family, group, original
        self.sizes = Sizes.of(module)
        self.rope = family.rope_of(module.config)
        self.halves = Halves(self.sizes)
        names = inspect.signature(original).parameters
        self._names = [name for name in names if names[name].kind == inspect.Parameter.POSITIONAL_OR_KEYWORD]
        self._results = 3 if "prev_topk_indices" in names else 2

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if group_of(self.module.config) is None:  # a deep copy of a patched model
            self.group.register(self.module.config)
        call = dict(zip(self._names, arguments, strict=False)) | options
        try:
            return Call(self, call).run()
        except UnfitError as reason:
            alone = self.group.sparse and not self.family.indexer
            if self.group.learns_now or self.group.context or alone:
                missing = "context parallelism" if self.group.context else "such indexer"
                expected = f"a call that these kernels compute, as the stock code has no {missing}"
                raise ArgumentError(explain("model", str(reason), expected)) from None
            self.group.say(self.module.layer_idx, str(reason))
        return self._stock(call)

    def _stock(self, call: dict[str, Any]) -> Any:
        x, mask, cache = call["hidden_states"], call.get("attention_mask"), _cache_of(call)
        layer = _layer_of(cache, self.module.layer_idx)
        s = x.shape[1]
        try:
            small = lean(mask)
        except ValueError:
            return self.original(**call)
        if isinstance(layer, LatentLayer):
            layer.next_padding = small
        if self.family.indexer:
            keys = s + (0 if cache is None else cache.get_seq_length(self.module.layer_idx))
            call["attention_mask"] = dense(small, s, keys, x.device).expand(x.shape[0], 1, s, keys)
        return self.original(**call)


# torch.compile leaves attention out: the book of pages is Python. `StepGraph` captures whole steps.
Served.__call__ = torch.compiler.disable(Served.__call__)  # type: ignore[method-assign]


class Call:
    """One call of an attention module.

    Raises
    ------
    UnfitError
        If the kernels do not serve it; no token has been computed or stored.
    """

    def __init__(self, served: Served, call: dict[str, Any]) -> None:
        self.served, self.call, self.sizes, self.module = served, call, served.sizes, served.module
        self.x: torch.Tensor = call["hidden_states"]
        self.b, self.s, _ = self.x.shape
        self.cache = _cache_of(call)
        self.sparse, self.learning = served.group.sparse, served.group.learns_now
        self.context = Context.of(served.group.context, self.b, self.s)
        self._check()
        self.mask = self._mask()
        self.layer = self._adopt()
        self.past = 0 if self.layer is None else self.layer.store.length_before(self.layer.layer)
        self.new = Ragged.of(self.mask if self._reads_mask else None, self.b, self.s, self.x.device)
        self._check_sizes()

    # ---- What fits

    def _check(self) -> None:
        module, x = self.module, self.x
        if x.dtype not in (torch.bfloat16, torch.float16):
            raise UnfitError(f"hidden states of {x.dtype}, not bfloat16 or float16")
        if not (x.is_cuda or self.served.group.reference):
            raise UnfitError(f"hidden states on {x.device}, not on a GPU")
        if module.training and module.attention_dropout:
            raise UnfitError(f"attention dropout of {module.attention_dropout}")
        if self.call.get("output_attentions") or module.config.output_attentions:
            raise UnfitError("output_attentions")
        if not self.call.get("is_causal", True):
            raise UnfitError("is_causal=False")
        if self.cache is not None and (problem := self.served.group.problem_of(self.cache, module)):
            raise UnfitError(problem)
        if self.sparse and has_dropout(module.kv_b_proj):
            raise UnfitError("an adapter of kv_b_proj with dropout")
        if (self.sparse or self.learning) and x.dtype != torch.bfloat16:
            raise UnfitError(f"an indexer in {x.dtype}, not bfloat16")
        if self.learning and self.cache is not None:
            raise UnfitError("a cache while an indexer learns")
        if self.context:
            self._check_context()

    def _check_context(self) -> None:
        if self.cache is not None:
            raise UnfitError("a cache under context parallelism (pass use_cache=False)")
        if has_dropout(self.module.kv_b_proj):
            raise UnfitError("an adapter of kv_b_proj with dropout under context parallelism")
        if self.learning and self.learning.covers:
            raise UnfitError("coverage under context parallelism")

    def _mask(self) -> torch.Tensor | None:
        try:
            mask = lean(self.call.get("attention_mask"))
        except ValueError as error:
            raise UnfitError(str(error)) from None
        if mask is not None and mask.dtype == torch.int64 and self.cache is not None:
            raise UnfitError("packed sequences with a cache")
        if self.context and mask is not None and mask.dtype == torch.bool:
            raise UnfitError("padding under context parallelism (pad at the end, without a mask)")
        return None if self.context else mask  # where pieces meet, positions jump as in packed sequences

    def _adopt(self) -> LatentLayer | None:
        if self.cache is None:
            return None
        found = self.served.group.adopt(self.cache, self.module, self.served.rope, self.x, self.mask)
        if isinstance(found, str):
            raise UnfitError(found)
        return found

    @property
    def _reads_mask(self) -> bool:
        """False for one new token per sequence, which is always real: reading the mask would wait for the GPU."""
        return not (self.past and self.s == 1)

    def _check_sizes(self) -> None:
        sizes = self.sizes
        if self.past and self.s > 1 and self.mask is not None and self.layer is not None:
            store = self.layer.store
            if not torch.equal(self.mask[:, : self.past], store.is_real(self.b)[:, : self.past]):
                raise UnfitError("a mask that hides other cached tokens than before")
        if self.past and torch.is_grad_enabled() and self._has_gradient:
            raise UnfitError("gradients through cached tokens (use torch.no_grad() for inference)")
        if not self.sparse and not self.is_absorbed and not sizes.prefills:
            raise UnfitError(f"prefill with heads of {sizes.nope + sizes.rope} and {sizes.v} columns")

    @property
    def _has_gradient(self) -> bool:
        return self.x.requires_grad or any(p.requires_grad for p in self.module.parameters())

    @property
    def is_absorbed(self) -> bool:
        """Queries attend to latents."""
        few = self.past > 0 and self.s <= _MOST_ABSORBED and self.new.rows is None
        return self.sparse or (few and self.sizes.decodes)

    # ---- The forward pass

    def run(self) -> tuple[Any, ...]:
        """Compute the result of the module's forward method."""
        indices = None
        if self.sparse:
            out, indices = self._sparse()
        elif self.is_absorbed:
            out = self._decode()
        else:
            out = self._expanded()
        found = (self.module.o_proj(out.reshape(self.b, self.s, -1)), None, indices)
        return found[: self.served._results]

    def _queries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [b, s, h, nope + rope] before RoPE, and the input of q_b_proj."""
        module, x = self.module, self.x
        read = x
        if getattr(module, "q_lora_rank", None) is None:
            q = module.q_proj(x)
        else:
            read = _normed(module.q_a_layernorm, module.q_a_proj(x))
            q = module.q_b_proj(read)
        q = q.view(self.b, self.s, -1, self.sizes.nope + self.sizes.rope)
        if self.served.family.q_factor == "lora":
            q = q * module.mla_scale_q_lora
        elif self.served.family.q_factor == "llama4":
            q = q * _stock(module, "get_llama_4_attn_scale")(
                self.call["position_ids"],
                module.config.rope_parameters.get("llama_4_scaling_beta"),
                module.config.rope_parameters.get("original_max_position_embeddings"),
            ).to(q.dtype).transpose(1, 2)
        return q, read

    def _latents(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [b, s, latent], and RoPE columns [b, s, rope] before RoPE."""
        module, sizes = self.module, self.sizes
        latent, rope = module.kv_a_proj_with_mqa(self.x).split([sizes.latent, sizes.rope], -1)
        latent = _normed(module.kv_a_layernorm, latent)
        return latent * module.mla_scale_kv_lora if self.served.family.q_factor == "lora" else latent, rope

    def _turn(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """RoPE of queries [b, s, h, rope] and keys [b, s, rope], by the stock code."""
        rope, k = self.served.rope, k[:, :, None]
        if rope == "none":
            return q, k[:, :, 0]
        if rope == "complex":
            turn, freqs = _stock(self.module, "apply_rotary_emb"), self.call["position_embeddings"].to(q.device)
            q, k = (x.transpose(1, 2) for x in turn(q.transpose(1, 2), k.transpose(1, 2), freqs))
        else:
            name = "apply_rotary_pos_emb_interleave" if rope == "interleaved" else "apply_rotary_pos_emb"
            q, k = _stock(self.module, name)(q, k, *self.call["position_embeddings"], unsqueeze_dim=2)
        return q, k[:, :, 0]

    def _expanded(self) -> torch.Tensor:
        """Attention to keys and values per head: [b, s, h, v]."""
        sizes, new = self.sizes, self.new
        (q, read), (latent, rope) = self._queries(), self._latents()
        q_rope, k_rope = self._turn(q[..., sizes.nope :], rope)
        q, q_rope, latent, k_rope = (new.take(x) for x in (q, q_rope, latent, k_rope))
        if self.context:
            return self._over_ranks((q[..., : sizes.nope], q_rope), (latent, k_rope), read)
        keys = None
        if self.layer is not None:
            store = self.layer.store
            step = store.begin(self.layer.layer, new)
            store.write(self.layer.layer, latent, k_rope, step.slots)
            if self.past:
                latent, k_rope = store.read(self.layer.layer, store.slots(store.counts))
                keys = starts_of(store.counts, self.x.device)
        kv = self.module.kv_b_proj(latent).view(len(latent), -1, sizes.nope + sizes.v)
        k, v = kv[..., : sizes.nope], kv[..., sizes.nope :]
        of: dict[str, Any] = {"packed": new.packed(keys), "scale": float(self.module.scaling)}
        q = q[..., : sizes.nope]
        out, lse = mla.mla_prefill(q, k, v, q_rope=q_rope, k_rope=k_rope, **of)
        states = self._states(read) if self.learning else None
        if self.learning and states is not None:
            self.learning.from_all_keys((q, q_rope), (k, k_rope), states, lse=lse, **of)
            if self.learning.covers:
                self._cover(states, (q, q_rope), (latent, k_rope), lse)
        return new.put(out)

    def _over_ranks(
        self, q: tuple[torch.Tensor, torch.Tensor], keys: tuple[torch.Tensor, torch.Tensor], read: torch.Tensor
    ) -> torch.Tensor:
        """Attention to the keys of all ranks, from queries without and with RoPE, latents and their RoPE columns."""
        assert self.context is not None
        projection, scale = self.module.kv_b_proj, float(self.module.scaling)
        out, lse = self.context.prefill(projection, self.sizes, q, keys, scale)
        states = self._states(read) if self.learning else None
        if self.learning and states is not None:
            of = {"scale": scale, "lse": lse.detach()}
            self.context.warm_up(self.learning, projection, self.sizes, q, keys, states, **of)
        return self.new.put(out)

    def _cover(
        self,
        states: IndexStates,
        queries: tuple[torch.Tensor, torch.Tensor],
        keys: tuple[torch.Tensor, torch.Tensor],
        lse: torch.Tensor,
    ) -> None:
        """Measure the share that the indexer's selection covers, over queries with more keys than it selects."""
        assert self.learning is not None
        new, topk = self.new, self.module.indexer.index_topk
        w_uk, _ = self.served.halves.of(self.module.kv_b_proj, self.x.dtype)
        of = {"scale": float(self.module.scaling), "lse": lse, "packed": new.packed()}
        with torch.no_grad():
            absorbed = _joined(queries[0], w_uk, queries[1])
            indices = select(states.detach(), new, None, 0, topk)
            positions = torch.arange(len(indices), device=self.x.device) - new.starts[new.sequence]
            self.learning.cover(absorbed, torch.cat(keys, -1), indices, positions >= topk, **of)

    def _decode(self) -> torch.Tensor:
        """Attention of the last tokens to latents: [b, s, h, v]."""
        assert self.layer is not None
        (q, _), (latent, rope) = self._queries(), self._latents()
        store, n, sizes = self.layer.store, self.b * self.s, self.sizes
        step = store.begin(self.layer.layer, self.new)
        w_uk, w_uv = self.served.halves.of(self.module.kv_b_proj, q.dtype)
        plan, project = None, None
        if not store.is_quantised and sizes.is_sparse:
            fused = n <= _MOST_FUSED and sizes.is_fused
            project = Project(w_uv) if fused else None
            d_head = sizes.v if fused else 0
            plan = store.plan((self.b, self.s, d_head), max_b=self.b, s_q=self.s, h_q=q.shape[2], d_head=d_head)
        q = self._absorbed(q, latent, rope, w_uk)
        out = mla.mla_decode(
            q.view(self.b, self.s, *q.shape[1:]),
            store.pages(self.layer.layer),
            step.block_table,
            step.seqlens,
            scale=float(self.module.scaling),
            project=project,
            plan=plan,
        )[0]
        return out if project else _times(out.flatten(0, 1), w_uv.transpose(1, 2)).view(self.b, self.s, -1, sizes.v)

    def _absorbed(self, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
        """Queries [n, h, latent + rope] in the space of latents; stores the tokens of the step, if there is a cache."""
        sizes, take, layer = self.sizes, self.new.take, self.layer
        if layer is not None and sizes.is_fused and self.past:
            few = q.shape[0] * q.shape[1] <= _MOST_FUSED
            q, store = take(q), layer.store
            found: torch.Tensor = mla.mla_prepare(
                q if few else _times(q[..., : sizes.nope], w_uk),
                take(latent),
                take(rope),
                store.pages(layer.layer),
                store.step.slots,
                w_uk=w_uk if few else None,
                q_rope=None if few else q[..., sizes.nope :],
                kv_format=store.kv_format,
                **self._tables(),
            )[0]
            return found
        q_rope, k_rope = self._turn(q[..., sizes.nope :], rope)
        if layer is not None:
            layer.store.write(layer.layer, take(latent), take(k_rope), layer.store.step.slots)
        return _joined(take(q)[..., : sizes.nope], w_uk, take(q_rope))

    def _tables(self) -> dict[str, Any]:
        """cos and sin of each token in float32, once for all layers."""
        if self.served.rope == "none":
            return {}
        tables = _tables_of(self.call["position_embeddings"], self.b, self.s, self.served.rope != "halves")
        return tables if self.new.rows is None else {**tables, "positions": self.new.rows.int()}

    # ---- DeepSeek sparse attention

    def _sparse(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to the selected latents, [b, s, h, v], and the selection, [b, s, topk]."""
        module, new, layer, sizes = self.module, self.new, self.layer, self.sizes
        (q, read), (latent, rope) = self._queries(), self._latents()
        states = self._states(read)
        if layer is not None:
            layer.store.begin(layer.layer, new)
        w_uk, w_uv = self.served.halves.of(module.kv_b_proj, q.dtype)
        if self.past:
            absorbed = self._absorbed(q, latent, rope, w_uk)
            indices = self._selected(states)
            out = _times(self._attend_cached(absorbed, new.take(indices)), w_uv.transpose(1, 2))
        else:
            q_rope, k_rope = self._turn(q[..., sizes.nope :], rope)
            q, q_rope, latent, k_rope = (new.take(x) for x in (q, q_rope, latent, k_rope))
            if layer is not None:
                layer.store.write(layer.layer, latent, k_rope, layer.store.step.slots)
            rows = torch.cat([latent, k_rope], -1)
            if self.context:
                rows, states = self._of_all_ranks(rows, states)
            indices = self._selected(states)
            parts = (q[..., : sizes.nope], q_rope, new.take(indices))
            out = self._attend(parts, rows, w_uk, w_uv, states)
        found = new.put(out)
        gate = module.gate_proj(self.x) if hasattr(module, "gate_proj") else None
        return found if gate is None else found * gate.view_as(found).sigmoid(), indices

    def _of_all_ranks(self, rows: torch.Tensor, states: IndexStates | None) -> tuple[torch.Tensor, IndexStates | None]:
        """Rows, and the indexer's keys, of the tokens of all ranks."""
        assert self.context is not None
        if states is not None:
            states = states._replace(k=self.context.gather(states.k))
        return self.context.gather(rows), states

    def _states(self, read: torch.Tensor) -> IndexStates | None:
        """States of the indexer, of real tokens. Its inputs are constants, so that its loss changes nothing else."""
        indexer = getattr(self.module, "indexer", None)
        if indexer is None:
            return None
        with torch.set_grad_enabled(self.learning is not None and torch.is_grad_enabled()):
            style, embeddings = self.served.family.indexer or ADDED, self.call["position_embeddings"]
            return index_states(indexer, style, self.x.detach(), read.detach(), embeddings).of(self.new)

    def _selected(self, states: IndexStates | None) -> torch.Tensor:
        """Positions of the selected tokens in their sequences, [b, s, topk], -1 where there are no more.

        Under context parallelism, rows of the tokens of all ranks.
        """
        if states is None:
            found: torch.Tensor = self.call["prev_topk_indices"]
            return found
        with torch.no_grad():
            topk = self.module.indexer.index_topk
            if self.context:
                return self.new.put(self.context.select(states, topk))
            return self.new.put(select(states.detach(), self.new, self.layer, self.past, topk))

    @property
    def _softmax(self) -> dict[str, Any]:
        sink = self.module.sinks.float() if hasattr(self.module, "sinks") else None
        return {"scale": float(self.module.scaling), "attn_sink": sink}

    def _attend(
        self,
        parts: tuple[torch.Tensor, ...],
        rows: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        states: IndexStates | None,
    ) -> torch.Tensor:
        """Attention of queries [n, h, nope], [n, h, rope] to selected rows, [n, h, v]; some queries at a time."""
        packed = None if self.context else self.new.packed()
        whole = packed is not None or torch.is_grad_enabled() or self.learning
        pieces = [parts] if whole else zip(*(x.split(_SPARSE_CHUNK) for x in parts), strict=True)
        found = []
        for q, q_rope, indices in pieces:
            absorbed = _joined(q, w_uk, q_rope)
            out, lse, _ = mla.sparse_mla_forward(absorbed, rows, indices, packed=packed, **self._softmax)
            if self.learning and states is not None:
                of = {"lse": lse, "packed": packed, "scale": float(self.module.scaling), "causal": not self.context}
                self.learning.from_selected_keys(absorbed, rows, indices, states, **of)
            found.append(_times(out, w_uv.transpose(1, 2)))
        return torch.cat(found)

    def _attend_cached(self, q: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Attention of absorbed queries [n, h, latent + rope] to selected cached tokens, [n, h, latent]."""
        assert self.layer is not None
        store = self.layer.store
        pages, slots = store.pages(self.layer.layer), store.slots_at(indices, self.new)
        if store.is_quantised:
            return mla.sparse_mla_decode(q[:, None], pages, slots[:, None], **self._softmax)[0][:, 0]
        return mla.sparse_mla_forward(q, pages.view(-1, pages.shape[-1]), slots, **self._softmax)[0]


def _normed(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A root-mean-square norm in one launch instead of some seven, where no gradient needs the stock arithmetic.

    It rounds once, after the weights; the stock code before them, too.
    """
    is_stock = type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon")
    if not is_stock or torch.is_grad_enabled() or norm.weight.dtype != x.dtype:
        found: torch.Tensor = norm(x)
        return found
    return nn.functional.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def _times(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """[n, h, i] times [h, i, o]: [n, h, o]."""
    return torch.bmm(x.transpose(0, 1), w).transpose(0, 1)


def _joined(q: torch.Tensor, w_uk: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
    """Queries times W_UK, and their RoPE columns: [n, h, latent + rope]."""
    if torch.is_grad_enabled():
        return torch.cat([_times(q, w_uk), q_rope], -1)
    latent = w_uk.shape[-1]
    made = q.new_empty(*q.shape[:2], latent + q_rope.shape[-1])
    torch.bmm(q.transpose(0, 1), w_uk, out=made[..., :latent].transpose(0, 1))  # a concatenation would copy it
    made[..., latent:] = q_rope
    return made


def _stock(module: nn.Module, name: str) -> Any:
    """A function of the file that defines the module."""
    return getattr(sys.modules[type(module).__module__], name)


def _cache_of(call: dict[str, Any]) -> Any:
    found = call.get("cache")
    return call.get("past_key_values") if found is None else found


def _layer_of(cache: Any, layer: int) -> Any:
    layers = () if cache is None else cache.layers
    return layers[layer] if layer < len(layers) else None


_turned: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _tables_of(embeddings: Any, b: int, s: int, interleaved: bool) -> dict[str, Any]:
    key = embeddings if isinstance(embeddings, torch.Tensor) else embeddings[0]
    if key not in _turned:
        both = (key.real, key.imag) if key.is_complex() else (x[..., : x.shape[-1] // 2] for x in embeddings)
        cos, sin = (x.float().expand(b, s, x.shape[-1]).reshape(b * s, -1).contiguous() for x in both)
        positions = torch.arange(b * s, dtype=torch.int32, device=cos.device)
        _turned[key] = {"cos": cos, "sin": sin, "positions": positions, "interleaved": interleaved}
    found: dict[str, Any] = _turned[key]
    return found
