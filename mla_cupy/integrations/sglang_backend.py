"""An MLA backend of SGLang: its own prefill and cache, our decode and verification of drafts.

Caches of bfloat16, float16, or e4m3 without a scale, which is how SGLang keeps them; pages of any size, chains of draft
tokens, full CUDA graphs. Imported when SGLang makes the backend.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend
from sglang.srt.mem_cache import memory_pool

from mla_cupy.integrations.plans import Plans, math_of
from mla_cupy.ops.groups import Fp8
from mla_cupy.shapes import D_QK, D_V
from mla_cupy.torch import TorchDecodePlan, mla_decode

_FP8 = torch.float8_e4m3fn
_SERVED = (torch.bfloat16, torch.float16, _FP8)


@dataclass
class Step:
    """State that all layers of a step share."""

    block_table: torch.Tensor
    seqlens: torch.Tensor
    plan: TorchDecodePlan
    first: Any = None

    def schedule(self, layer: Any) -> None:
        """Enqueue the schedule before the first layer, whenever that runs: a captured graph holds it.

        The host then does nothing for it before a replay. The first layer is known by itself, since a step that is
        captured runs before, to warm up.
        """
        if self.first is None:
            self.first = layer
        if self.first is layer:
            self.plan.update(self.seqlens)


class MlaCupyBackend(FlashMLABackend):  # type: ignore[misc]
    """Everything but decode and the verification of drafts is left to SGLang's FlashMLA backend.

    Parameters
    ----------
    model_runner : ModelRunner
    skip_prefill, kv_indptr_buf, kv_last_page_len_buf
        Arguments of the base class.
    takes_parts : bool
        SGLang passes queries and keys in two arrays, the latent part and the RoPE part. Queries are then decoded from
        both if a kernel supports that.

    Raises
    ------
    NotImplementedError
        If the cache or the drafts are of a kind that there is no kernel for.
    """

    supports_ragged_verify_graph = False
    """The base class verifies any number of draft tokens per request, ours one number for all."""

    def __init__(
        self,
        model_runner: Any,
        skip_prefill: bool = False,
        kv_indptr_buf: torch.Tensor | None = None,
        kv_last_page_len_buf: torch.Tensor | None = None,
        takes_parts: bool = False,
    ) -> None:
        super().__init__(model_runner, skip_prefill, kv_indptr_buf, kv_last_page_len_buf)
        self._refuse_what_has_no_kernel(model_runner)
        self._page_size = model_runner.page_size
        # The columns of a request's tokens where its pages begin.
        width, place = self.req_to_token.shape[1], self.req_to_token.device
        self._page_starts = torch.arange(0, width, self._page_size, device=place)
        self._max_b = model_runner.req_to_token_pool.size
        record = "fp8" if self.data_type == _FP8 else None
        self._plans = Plans(
            h_q=self.num_q_heads,
            d_qk=self.kv_cache_dim,
            kv_format=record,
            page_size=self._page_size,
            dtype=self.q_data_type if record else self.data_type,
            math=math_of(record),
            q_rope=takes_parts and record is None and self.kv_cache_dim == D_QK,
            device=place,
        )
        self._of_graphs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._step: Step | None = None

    def _refuse_what_has_no_kernel(self, model_runner: Any) -> None:
        if self.data_type not in _SERVED:
            expected = ", ".join(map(str, _SERVED))
            raise NotImplementedError(f"mla_cupy decodes caches of {expected}, not {self.data_type}")
        widths = (D_QK,) if self.data_type == _FP8 else (D_QK, D_V)
        if self.kv_lora_rank != D_V or self.kv_cache_dim not in widths:
            expected = " or ".join(f"{D_V} + {width - D_V}" for width in widths)
            sizes = f"{self.kv_lora_rank} + {self.kv_cache_dim - self.kv_lora_rank}"
            raise NotImplementedError(
                f"mla_cupy decodes keys of {expected} elements from a cache of {self.data_type}, not {sizes}"
            )
        if (_speculation(model_runner).speculative_eagle_topk or 1) > 1:
            raise NotImplementedError("mla_cupy verifies chains of draft tokens, not trees: --speculative-eagle-topk 1")
        if getattr(self.token_to_kv_pool, "use_dsa", False):
            raise NotImplementedError(
                "mla_cupy attends to all tokens, and this model selects some: leave --attention-backend out"
            )
        # Locations then count over all ranks, but the pool is one rank's.
        if getattr(self, "dcp_world_size", 1) > 1:
            raise NotImplementedError("mla_cupy reads no cache that is spread over ranks: leave --dcp-size at 1")
        translator = getattr(self, "kv_index_translator", None)
        if getattr(translator, "reads_are_translated", False):
            raise NotImplementedError("mla_cupy supports no unified pool: a translator locates its tokens")

    def init_cuda_graph_state(
        self, max_bs: int, max_num_tokens: int, block_kv_indices: torch.Tensor | None = None
    ) -> None:
        """Memory that all captured steps read, and every replay's preparation writes."""
        super().init_cuda_graph_state(max_bs, max_num_tokens, block_kv_indices)
        place = self.req_to_token.device
        table = torch.zeros((max_bs, len(self._page_starts)), dtype=torch.int32, device=place)
        self._of_graphs = table, torch.zeros(max_bs, dtype=torch.int32, device=place)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a step that runs eagerly."""
        if not _is_ours(forward_batch.forward_mode):
            super().init_forward_metadata(forward_batch)
            return
        table, seqlens = self._pages(forward_batch), self._lengths(forward_batch)
        self._step = self._step_of(forward_batch, table, seqlens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a step that is about to be captured or replayed. Runs outside of the graph; nothing waits."""
        if not _is_ours(forward_batch.forward_mode):
            super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
            return
        assert self._of_graphs is not None, "init_cuda_graph_state comes first"
        table, seqlens = (memory[: forward_batch.batch_size] for memory in self._of_graphs)
        table.copy_(self._pages(forward_batch))
        seqlens.copy_(self._lengths(forward_batch))
        self._step = self._step_of(forward_batch, table, seqlens)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode one token per request.

        Parameters
        ----------
        q : tensor, (tokens, heads * d_qk), or of that many elements; with `q_rope` (tokens, heads, 512)
        k, v : tensor or None
            What the base class's pool takes as the tokens' rows; with `k_rope` (tokens, 1, 512).
        q_rope, k_rope : tensor, optional
            (tokens, heads, 64) and (tokens, 1, 64): the other columns.

        Returns
        -------
        out : tensor, (tokens, heads * 512)
        """
        if k is not None and save_kv_cache:
            rows = _joined(k, k_rope)
            self.token_to_kv_pool.set_kv_buffer(layer, _write_location(forward_batch), rows, v)
        step = self._step
        assert step is not None, "init_forward_metadata comes first"
        heads = layer.tp_q_head_num
        cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        planned = heads == self.num_q_heads
        if planned:
            step.schedule(layer)
        shape, rope = (forward_batch.batch_size, -1, heads), None
        if self._plans.sizes["q_rope"]:
            query, rope = _parts(q if q_rope is not None else q.view(-1, heads, layer.head_dim), q_rope)
            query, rope = (x.unflatten(0, shape[:2]) for x in (query, rope))
        else:
            query = _joined(q, q_rope).view(*shape, layer.head_dim)
        out, _ = mla_decode(
            query,
            cache.view(-1, self._page_size, layer.head_dim),
            step.block_table,
            step.seqlens,
            q_rope=rope,
            plan=step.plan if planned else None,
            scale=layer.scaling,
            fp8=Fp8(self._plans.sizes["math"]),
        )
        return out.view(-1, heads * D_V)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> Any:
        """Verify draft tokens, which is decode with several tokens per request; the rest is the base class's."""
        if forward_batch.forward_mode.is_target_verify():
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope)
        return super().forward_extend(_joined(q, q_rope), _joined(k, k_rope), v, layer, forward_batch, save_kv_cache)

    def _tokens_per_request(self, forward_batch: Any) -> int:
        return int(self.num_draft_tokens) if forward_batch.forward_mode.is_target_verify() else 1

    def _lengths(self, forward_batch: Any) -> torch.Tensor:
        """(b,) int32: tokens in the cache. The batch does not count draft tokens yet."""
        drafts = self.num_draft_tokens if forward_batch.forward_mode.is_target_verify() else 0
        return (forward_batch.seq_lens + drafts).to(torch.int32)

    def _pages(self, forward_batch: Any) -> torch.Tensor:
        """(b, max_pages) int32. Past a request's end there are pages of others, which are never read."""
        rows = forward_batch.req_pool_indices[:, None]
        first_slots = self.req_to_token[rows, self._page_starts]
        return torch.div(first_slots, self._page_size, rounding_mode="floor").to(torch.int32)

    def _step_of(self, forward_batch: Any, table: torch.Tensor, seqlens: torch.Tensor) -> Step:
        max_b = max(self._max_b, len(seqlens))
        return Step(table, seqlens, self._plans.get(max_b, self._tokens_per_request(forward_batch), table.shape[1]))


def _joined(latent: Any, rope: torch.Tensor | None) -> Any:
    """Queries or keys in one array."""
    return latent if rope is None else torch.cat((latent, rope), dim=-1)


def _parts(q: torch.Tensor, rope: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries in two arrays; of one array its columns."""
    return (q, rope) if rope is not None else (q[..., :D_V], q[..., D_V:])


def _is_ours(mode: Any) -> bool:
    return bool(mode.is_decode_or_idle() or mode.is_target_verify())


def _speculation(model_runner: Any) -> Any:
    """Holder of SGLang's resolved options of speculation: its context, or in older versions the server's arguments."""
    try:
        return importlib.import_module("sglang.srt.runtime_context").get_spec()
    except (ImportError, AttributeError):
        return model_runner.server_args


def _write_location(forward_batch: Any) -> Any:
    """Locations of new tokens: newer versions require a flag that they are the pool's own."""
    kind: Any = getattr(memory_pool, "KVWriteLoc", None)
    if hasattr(kind, "for_batch"):
        return kind.for_batch(forward_batch)
    return forward_batch.out_cache_loc
