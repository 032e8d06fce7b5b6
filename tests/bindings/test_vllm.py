"""The plugin of vLLM against a stand-in of its interface; `tests/engines` has what is held against vLLM itself."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy.integrations import vllm as plugin
from tests.bindings import stand_in_vllm
from tests.interop.test_torch import array, tensor
from tests.support import cases
from tests.support.flat import mla_decode
from tests.support.tolerance import check

pytestmark = pytest.mark.usefixtures("_numpy_backend")

IMPL = {
    "num_heads": 4,
    "head_size": 576,
    "scale": 576**-0.5,
    "num_kv_heads": 1,
    "alibi_slopes": None,
    "sliding_window": None,
    "kv_cache_dtype": "auto",
    "logits_soft_cap": None,
    "attn_type": "decoder",
    "kv_sharing_target_layer_name": None,
}


@pytest.fixture
def backend(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in_vllm.install(monkeypatch)
    return importlib.import_module("mla_cupy.integrations.vllm_backend")


@pytest.fixture
def plans(torch: Any) -> Any:
    return importlib.import_module("mla_cupy.integrations.plans")


def builder_of(
    backend: Any,
    torch: Any,
    heads: int = 4,
    max_num_seqs: int = 8,
    dcp: int = 1,
    device: str = "cpu",
    cache_dtype: str = "bfloat16",
    head_size: int = 576,
    drafts: int = 1,
) -> Any:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp),
        model_config=SimpleNamespace(get_num_attention_heads=lambda parallel: heads, dtype=torch.bfloat16),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
    )
    spec = SimpleNamespace(block_size=64, head_size=head_size, dtype=getattr(torch, cache_dtype))
    return backend.MlaCupyBackend.get_builder_cls()(spec, ["layer"], config, torch.device(device))


def step(torch: Any, table: Any, seqlens: Any, *lengths: int) -> SimpleNamespace:
    """vLLM's metadata for a builder, for queries of one length or one length per sequence."""
    all_lengths = lengths if len(lengths) > 1 else lengths * len(seqlens)
    starts = torch.tensor([sum(all_lengths[:i]) for i in range(len(seqlens) + 1)], dtype=torch.int32)
    return SimpleNamespace(
        block_table_tensor=table,
        seq_lens=seqlens,
        max_seq_len=int(seqlens.max()),
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        max_query_len=max(all_lengths),
        num_reqs=len(seqlens),
        num_actual_tokens=sum(all_lengths),
        is_prefilling=torch.zeros(len(seqlens), dtype=torch.bool),
        dcp_tot_seq_lens=None,
    )


@contextmanager
def noted(torch: Any) -> Iterator[list[str]]:
    """Names of PyTorch's operations on tensors, host tensors included, in order."""
    found: list[str] = []

    class Noting(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    with Noting():
        yield found


def build(builder: Any, torch: Any, table: Any, seqlens: Any, s_q: int) -> Any:
    return builder.build(0, step(torch, table, seqlens, s_q))


@pytest.mark.parametrize("s_q", [1, 2])
@pytest.mark.parametrize("split_query", [False, True])
def test_a_step(torch: Any, backend: Any, s_q: int, split_query: bool) -> None:
    """Two layers of one step, and an empty sequence among the others."""
    inputs = cases.make(cases.DecodeCase(b=3, s_q=s_q, h_q=4, seqlens="ragged-200", strides="dense", head_axis=False))
    q, cache, table, seqlens = (tensor(torch, x) for x in inputs.arguments)
    builder = builder_of(backend, torch)
    metadata = build(builder, torch, table, seqlens, s_q)
    query: Any = q.flatten(0, 1)
    if split_query:
        query = (query[..., :512], query[..., 512:])
    for _ in range(2):
        layer = backend.MlaCupyBackend.get_impl_cls()(**IMPL)
        out, lse = layer.forward_mqa(query, cache, metadata, None)
        assert (tuple(out.shape), tuple(lse.shape)) == ((3 * s_q, 4, 512), (3 * s_q, 4))
        got = array(torch, out.view(3, s_q, 4, 512)), array(torch, lse.view(3, s_q, 4).transpose(1, 2))
        check(got, inputs.exact, inputs.rounded, "bfloat16")
    assert len(builder._plans) == 1
    again = build(builder, torch, table[:2], seqlens[:2], s_q)
    assert again.decode.plan is metadata.decode.plan


def test_what_vllm_is_asked_for(backend: Any) -> None:
    """Pages of 64, whoever asks how; what it takes; widths that it has kernels for, others in words."""
    kinds = backend.MlaCupyBackend
    assert kinds.get_preferred_block_size(16) == 64
    assert kinds.get_supported_kernel_block_sizes() == kinds.get_supported_kernel_block_sizes(object()) == [16]
    assert kinds.get_supported_head_sizes() == [512, 576]
    said = [kinds.supports_combination(x, None, y, *[None] * 6) for x, y in ((512, "auto"), (576, "fp8"), (512, "fp8"))]
    assert said == [None, None, "mla_cupy decodes FP8 rows of 576 elements, not 512"]
    assert (backend.MlaCupyImpl.lse_base_on_e, backend.MlaCupyImpl.supports_dcp) == (True, True)


def test_short_queries_are_decoded(torch: Any, backend: Any) -> None:
    """Up to 128 tokens on a cached prefix; lengths that no step has again and again get no plan of their own."""
    builder = builder_of(backend, torch, drafts=3)
    assert builder.reorder_batch_threshold == 128
    assert builder_of(backend, torch, dcp=2).reorder_batch_threshold == 1
    inputs = cases.make(cases.DecodeCase(b=3, s_q=5, h_q=4, seqlens="ragged-200", strides="dense", head_axis=False))
    q, cache, table, seqlens = (tensor(torch, x) for x in inputs.arguments)
    metadata = build(builder, torch, table, seqlens, 5)
    assert (metadata.decode.plan, len(builder._plans)) == (None, 0)
    out, lse = backend.MlaCupyImpl(**IMPL).forward_mqa(q.flatten(0, 1), cache, metadata, None)
    got = array(torch, out.view(3, 5, 4, 512)), array(torch, lse.view(3, 5, 4).transpose(1, 2))
    check(got, inputs.exact, inputs.rounded, "bfloat16")
    for s_q in (1, 4):
        assert build(builder, torch, table, seqlens, s_q).decode.plan is not None
    captured = builder.build_for_cudagraph_capture(step(torch, table, seqlens, 7))
    assert captured.decode.plan is build(builder, torch, table, seqlens, 7).decode.plan is not None


COUNTED = {
    "a token each": ((1,), True),
    "a token or none, as a graph is filled up": ((1, 1, 0, 0), True),
    "drafts": ((4,), True),
    "drafts, and rows without a query": ((4, 4, 0, 0), False),
    "longer ones last": ((1, 1, 2, 2), False),
    "others of as many tokens": ((1, 3, 2, 2), False),
    "longer than what is decoded": ((129,), False),
}
"""The lengths of a step's queries, and whether all decode by the longest one and by how many there are."""


@pytest.mark.parametrize(("lengths", "known"), COUNTED.values(), ids=COUNTED)
def test_lengths_that_are_known_are_not_compared(
    torch: Any, backend: Any, lengths: tuple[int, ...], known: bool
) -> None:
    """The division into decodes and prefills is the same with views alone; vLLM compares lengths by tensors."""
    builder, rows = builder_of(backend, torch, drafts=3), 4
    table, seqlens = torch.zeros((rows, 3), dtype=torch.int32), torch.full((rows,), 150, dtype=torch.int32)
    given = step(torch, table, seqlens, *lengths)
    compared = stand_in_vllm.MLACommonMetadataBuilder.build(builder, 0, given)
    with noted(torch) as operations:
        built = builder.build(0, given)
    assert (built.num_decodes, built.num_decode_tokens) == (compared.num_decodes, compared.num_decode_tokens)
    assert (set(operations) <= {"slice"}) == known
    assert builder.query_len_support is backend.QueryLenSupport.UNIFORM  # of the next step


def test_lengths_are_compared_where_ranks_share_the_prefill(torch: Any, backend: Any) -> None:
    """There vLLM also asks which requests are still being prefilled, and rows without a query are no decodes."""
    builder = builder_of(backend, torch)
    builder.use_pcp = True
    table, seqlens = torch.zeros((4, 3), dtype=torch.int32), torch.full((4,), 9, dtype=torch.int32)
    for lengths, decodes in (((1, 1, 1, 1), 3), ((1, 1, 0, 0), 2)):
        given = step(torch, table, seqlens, *lengths)
        given.is_prefilling[3] = True
        built = builder.build(0, given)
        assert (built.num_decodes, built.num_decode_tokens) == (decodes, decodes)


def test_a_failed_build_leaves_the_builder_as_it_was(torch: Any, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = builder_of(backend, torch)
    monkeypatch.setattr(builder, "_build_decode", lambda **given: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        build(builder, torch, torch.zeros((3, 3), dtype=torch.int32), torch.full((3,), 9, dtype=torch.int32), 1)
    assert builder.query_len_support is backend.QueryLenSupport.UNIFORM


def test_a_graph_filled_up_with_rows_that_have_no_query(torch: Any, backend: Any) -> None:
    """Two requests of two tokens in a graph for four: the schedule is for all rows that the kernel gets."""
    table, seqlens = torch.zeros((4, 3), dtype=torch.int32), torch.tensor([70, 2, 0, 0], dtype=torch.int32)
    given = step(torch, table, seqlens, 2)
    builder = builder_of(backend, torch)
    built = builder._build_decode(table, seqlens, 70, given.query_start_loc, given.query_start_loc, 8, 2, None)
    assert build(builder, torch, table, seqlens, 2).decode.plan is built.plan is not None
    with_totals = builder._build_decode(table, seqlens, 70, given.query_start_loc, given.query_start_loc, 8, 2, seqlens)
    older = builder._build_decode(table, seqlens, 70, given.query_start_loc, given.query_start_loc, 8, seqlens)
    assert with_totals.dcp_tot_seq_lens is older.dcp_tot_seq_lens is seqlens
    assert built.dcp_tot_seq_lens is None


def test_plans_are_made_before_the_cache_is_sized(
    torch: Any, backend: Any, plans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the layers are made, once for all of them; the first builder gets them, the second its own."""
    made: list[dict[str, Any]] = []
    inner = plans.plan_decode
    monkeypatch.setattr(plans, "plan_decode", lambda **sizes: made.append(sizes) or inner(**sizes))
    monkeypatch.setattr(plans, "_spare", {})
    monkeypatch.setattr(stand_in_vllm.CONFIG, "speculative_config", SimpleNamespace(num_speculative_tokens=3))
    for _ in range(3):
        backend.MlaCupyImpl(**IMPL)
    assert [(x["max_b"], x["s_q"], x["max_pages"], x["page_size"]) for x in made] == [(8, 1, 10, 64), (8, 4, 10, 64)]
    table, seqlens = torch.zeros((3, 10), dtype=torch.int32), torch.tensor([9, 70, 3], dtype=torch.int32)
    first, second = (builder_of(backend, torch, drafts=3) for _ in range(2))
    build(first, torch, table, seqlens, 1)
    assert len(made) == 2
    build(second, torch, table, seqlens, 1)
    assert len(made) == 3
    build(first, torch, table[:, :7].contiguous(), seqlens, 4)  # another table than was foreseen
    assert [x["max_pages"] for x in made] == [10, 10, 10, 7]
    assert first._plans._unused == {}


def test_plans_for_other_sizes_are_given_back(backend: Any, plans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_spare", {})
    backend.MlaCupyImpl(**IMPL)
    assert len(plans._spare) == 1
    sizes = {**dict.fromkeys(("h_q", "d_qk", "kv_format", "page_size", "dtype", "batch_invariant", "device")), "h_q": 9}
    assert len(plans.claim(**sizes)) == 0
    assert plans._spare == {}


def test_queries_without_a_rope_part_are_not_copied(torch: Any, backend: Any) -> None:
    latent = torch.zeros(3, 4, 512)
    assert backend._joined((latent, latent[..., :0])) is latent
    assert backend._joined((latent, latent[..., :64])).shape == (3, 4, 576)
    assert backend._joined(latent) is latent


def test_queries_in_two_arrays_are_not_joined(torch: Any, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for caches of records, and where ranks share the cache."""
    inputs = cases.make(cases.DecodeCase(b=2, h_q=4, seqlens=70, strides="dense", head_axis=False))
    q, cache, table, seqlens = (tensor(torch, x) for x in inputs.arguments)
    monkeypatch.setattr(backend.torch, "cat", lambda *_, **__: pytest.fail("joined"))
    metadata = build(builder_of(backend, torch), torch, table, seqlens, 1)
    flat = q.flatten(0, 1)
    backend.MlaCupyImpl(**IMPL).forward_mqa((flat[..., :512], flat[..., 512:]), cache, metadata, None)
    for others in ({"cache_dtype": "uint8"}, {"dcp": 2}):
        assert not build(builder_of(backend, torch, **others), torch, table, seqlens, 1).decode.in_parts


def test_the_first_layer_schedules(torch: Any, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it runs, and no other: a graph that is captured after a run with the same metadata has a schedule."""
    inputs = cases.make(cases.DecodeCase(b=2, h_q=4, seqlens="ragged-90", strides="dense", head_axis=False))
    q, cache, table, seqlens = (tensor(torch, x) for x in inputs.arguments)
    updates: list[Any] = []
    update = backend.TorchDecodePlan.update

    def counted(plan: Any, lengths: Any) -> None:
        updates.append((plan, lengths.data_ptr()))
        update(plan, lengths)

    monkeypatch.setattr(backend.TorchDecodePlan, "update", counted)
    builder = builder_of(backend, torch)
    first, second = (backend.MlaCupyImpl(**IMPL) for _ in range(2))
    metadata = build(builder, torch, table, seqlens, 1)
    assert not updates
    for count in (1, 2):
        for layer in (first, second):
            layer.forward_mqa(q.flatten(0, 1), cache, metadata, None)
        assert updates == [(metadata.decode.plan, seqlens.data_ptr())] * count
    second.forward_mqa(q.flatten(0, 1), cache, build(builder, torch, table, seqlens, 1), None)
    assert len(updates) == 3


def test_gathered_heads(torch: Any, backend: Any) -> None:
    """Under decode context parallelism there are more query heads than the layer has; without a plan for them, too."""
    inputs = cases.make(cases.DecodeCase(b=2, h_q=8, seqlens="ragged-90", strides="dense", head_axis=False))
    q, cache, table, seqlens = (tensor(torch, x) for x in inputs.arguments)
    for dcp, heads in ((2, 4), (1, 4)):
        builder = builder_of(backend, torch, heads=heads, dcp=dcp)
        metadata = build(builder, torch, table, seqlens, 1)
        assert metadata.decode.plan_heads == heads * dcp
        out, _ = backend.MlaCupyImpl(**IMPL).forward_mqa(q.flatten(0, 1), cache, metadata, None)
        wanted = mla_decode(q, cache, table, seqlens)[0]
        assert torch.equal(out, wanted.flatten(0, 1))


FP8 = cases.DecodeCase(b=3, h_q=4, seqlens="ragged-200", strides="dense", head_axis=False, record="fp8", kv_scale=0.03)


@pytest.mark.parametrize("s_q", [1, 2])
def test_an_fp8_cache(torch: Any, backend: Any, s_q: int) -> None:
    """16-bit queries, a cache whose bytes vLLM shows as e4m3, and a scale of each layer."""
    inputs = cases.make(replace(FP8, s_q=s_q))
    q, cache, table, seqlens = (tensor(torch, x) for x in inputs.arguments)
    builder = builder_of(backend, torch, cache_dtype="uint8")
    metadata = build(builder, torch, table, seqlens, s_q)
    layer = backend.MlaCupyImpl(**{**IMPL, "kv_cache_dtype": "fp8"})
    assert layer.supports_quant_query_input is False
    for scale in (FP8.kv_scale, 2 * FP8.kv_scale):
        scales = SimpleNamespace(_k_scale_float=scale)
        out, lse = layer.forward_mqa(q.flatten(0, 1), cache.view(torch.float8_e4m3fn), metadata, scales)
        exact, rounded = (
            mla_cupy.reference.mla_decode(*inputs.arguments, kv_scale=scale, rounding=rounding)
            for rounding in (None, "bfloat16")
        )
        got = array(torch, out.view(3, s_q, 4, 512)), array(torch, lse.view(3, s_q, 4).transpose(1, 2))
        check(got, exact, rounded, "bfloat16")
    assert len(builder._plans) == 1


@pytest.mark.parametrize("queries", ["float8_e4m3fn", ""])
def test_products_in_fp8(torch: Any, backend: Any, monkeypatch: pytest.MonkeyPatch, queries: str) -> None:
    """Queries as vLLM quantises them, and both scales as the layer has them on the device; or queries in 16 bits."""
    monkeypatch.setenv("MLA_CUPY_ENGINE_MATH", "fp8")
    case = replace(FP8, s_q=2, math="fp8", queries=queries, q_scale=0.5 if queries else 1.0)
    inputs = cases.make(case)
    q, cache, table, seqlens = (tensor(torch, x) for x in inputs.arguments)
    metadata = build(builder_of(backend, torch, cache_dtype="uint8"), torch, table, seqlens, 2)
    layer = backend.MlaCupyImpl(**{**IMPL, "kv_cache_dtype": "fp8"})
    assert layer.supports_quant_query_input is True
    scales = SimpleNamespace(_q_scale=torch.tensor(case.q_scale), _k_scale=torch.tensor(case.kv_scale))
    out, lse = layer.forward_mqa(q.flatten(0, 1), cache.view(torch.float8_e4m3fn), metadata, scales)
    got = array(torch, out.view(3, 2, 4, 512)), array(torch, lse.view(3, 2, 4).transpose(1, 2))
    check(got, inputs.exact, inputs.rounded, "bfloat16")


def test_products_of_16_bit_caches_stay_exact(torch: Any, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_ENGINE_MATH", "fp8")
    assert backend.MlaCupyImpl(**IMPL).supports_quant_query_input is False
    assert builder_of(backend, torch)._plans.sizes["math"] == "exact"


def test_fp8_caches_that_it_declines(torch: Any, backend: Any) -> None:
    supported = backend.MlaCupyBackend.supported_kv_cache_dtypes
    assert {"fp8", "fp8_e4m3"} <= set(supported)
    for other in ("fp8_e5m2", "fp8_ds_mla"):
        assert other not in supported
        with pytest.raises(NotImplementedError, match=f"not {other}"):
            backend.MlaCupyImpl(**{**IMPL, "kv_cache_dtype": other})
    with pytest.raises(NotImplementedError, match="FP8 rows of 576 elements, not 512"):
        builder_of(backend, torch, cache_dtype="uint8", head_size=512)


def test_batch_invariance(torch: Any, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch invariance follows vLLM's switch, only with the plans' heads."""
    inputs = cases.make(cases.DecodeCase(b=2, h_q=8, seqlens=70, strides="dense", head_axis=False))
    q, cache, table, seqlens = (tensor(torch, x) for x in inputs.arguments)
    assert backend.MlaCupyBackend.supports_batch_invariance()
    for wanted in (False, True):
        monkeypatch.setattr(backend.envs, "VLLM_BATCH_INVARIANT", wanted)
        builder = builder_of(backend, torch)
        assert (builder._plans.sizes["batch_invariant"], builder.reorder_batch_threshold) == (
            wanted,
            2 if wanted else 128,
        )
    metadata = build(builder_of(backend, torch, heads=4), torch, table, seqlens, 1)
    with pytest.raises(NotImplementedError, match="batch-invariant with 4 heads, not 8"):
        backend.MlaCupyImpl(**IMPL).forward_mqa(q.flatten(0, 1), cache, metadata, None)
    metadata = build(builder_of(backend, torch, heads=8), torch, table, seqlens, 1)
    out, _ = backend.MlaCupyImpl(**IMPL).forward_mqa(q.flatten(0, 1), cache, metadata, None)
    assert torch.equal(out, mla_decode(q, cache, table, seqlens)[0].flatten(0, 1))
    monkeypatch.delattr(backend.envs, "VLLM_BATCH_INVARIANT")
    assert not backend.MlaCupyBackend.supports_batch_invariance()


def test_what_it_cannot_do(torch: Any, backend: Any) -> None:
    with pytest.raises(NotImplementedError, match="without sliding_window"):
        backend.MlaCupyImpl(**{**IMPL, "sliding_window": 128})
    kinds = backend.MlaCupyBackend
    assert kinds.get_name() == "CUSTOM"
    assert [kinds.supports_compute_capability(SimpleNamespace(major=x)) for x in (8, 9, 10)] == [False, True, False]


@pytest.fixture
def sparse_backend(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in_vllm.install(monkeypatch)
    return importlib.import_module("mla_cupy.integrations.vllm_sparse_backend")


@pytest.mark.parametrize("impl", [stand_in_vllm.FlashMLASparseImpl, stand_in_vllm.OlderSparseImpl])
@pytest.mark.parametrize("split_query", [False, True])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_sparse_attention(
    torch: Any, monkeypatch: pytest.MonkeyPatch, impl: type, split_query: bool, with_lengths: bool
) -> None:
    """Two requests whose pages are mixed, padded heads that hold NaN, and a token without rows."""
    stand_in_vllm.install(monkeypatch, impl)
    sparse_backend = importlib.import_module("mla_cupy.integrations.vllm_sparse_backend")
    assert sparse_backend.difference() == ""
    tokens, heads, topk, pages, size = 5, 4, 7, 6, 64
    rng = np.random.default_rng(8)
    q = rng.standard_normal((tokens, heads, 576)).astype(ml_dtypes.bfloat16)
    cache = rng.standard_normal((pages, size, 576)).astype(ml_dtypes.bfloat16)
    table = np.array([[4, 1, 3], [0, 5, 2]], np.int32)
    requests = np.array([0, 0, 1, 1, 1])
    chosen = rng.integers(0, 3 * size, (tokens, topk)).astype(np.int32)
    chosen[:, -2] = -1
    chosen[3] = -1
    lengths = np.array([topk, 3, 0, topk, 1], np.int32) if with_lengths else None
    metadata = SimpleNamespace(
        block_table=torch.from_numpy(table),
        req_id_per_token=torch.from_numpy(requests),
        block_size=size,
        topk_length=None if lengths is None else torch.from_numpy(lengths),
    )
    layer = sparse_backend.MlaCupySparseBackend.get_impl_cls()(heads, 0.07, torch.from_numpy(chosen))
    query = tensor(torch, q)
    out, lse = layer.forward_mqa(
        (query[..., :512], query[..., 512:]) if split_query else query, tensor(torch, cache), metadata, None
    )
    rows = table[requests[:, None], chosen // size] * size + chosen % size
    rows[chosen < 0] = -1
    arguments = (q, cache.reshape(-1, 576), rows)
    exact, rounded = (
        mla_cupy.reference.sparse_mla_forward(*arguments, scale=0.07, topk_length=lengths, rounding=rounding)
        for rounding in (None, "bfloat16")
    )
    older = impl is stand_in_vllm.OlderSparseImpl
    assert (lse is None) == older
    check((array(torch, out), exact[1] if older else array(torch, lse)), exact[:2], rounded[:2], "bfloat16")
    assert np.isneginf(exact[1]).any()


def fp8_selection(heads: int = 4) -> tuple[Any, ...]:
    """Queries, a cache of records, and the tokens that each query selects; one query has none."""
    rng = np.random.default_rng(9)
    tokens, topk, pages, size = 5, 7, 6, 64
    q = rng.standard_normal((tokens, heads, 576)).astype(ml_dtypes.bfloat16)
    cache = np.zeros((pages, size, 656), np.uint8)
    latent, rope = (rng.standard_normal((pages * size, width)).astype(ml_dtypes.bfloat16) for width in (512, 64))
    mla_cupy.reference.cache_append(latent, rope, cache, np.arange(pages * size))
    chosen = rng.integers(0, 3 * size, (tokens, topk)).astype(np.int32)
    chosen[:, -2] = -1
    chosen[3] = -1
    return q, cache, chosen


@pytest.mark.parametrize("split_query", [False, True])
def test_sparse_attention_from_an_fp8_cache(torch: Any, sparse_backend: Any, split_query: bool) -> None:
    """Heads are not padded; a query without tokens counts for nothing where ranks are merged."""
    q, cache, chosen = fp8_selection()
    table = np.array([[4, 1, 3]], np.int32)
    metadata = SimpleNamespace(
        block_table=torch.from_numpy(table), req_id_per_token=torch.zeros(5, dtype=torch.int64), block_size=64
    )
    layer = sparse_backend.MlaCupySparseImpl(4, 0.07, torch.from_numpy(chosen), "fp8_ds_mla")
    query = tensor(torch, q)
    given = (query[..., :512], query[..., 512:]) if split_query else query
    out, lse = layer.forward_mqa(given, torch.from_numpy(cache), metadata, None)
    assert (tuple(out.shape), tuple(lse.shape)) == ((5, 4, 512), (5, 4))
    slots = np.where(chosen < 0, -1, table[0][chosen // 64] * 64 + chosen % 64)
    exact, rounded = (
        mla_cupy.reference.sparse_mla_decode(q[None], cache, slots[None], scale=0.07, rounding=rounding)
        for rounding in (None, "float16")
    )
    check((array(torch, out)[None], array(torch, lse)[None]), exact, rounded, "bfloat16")
    assert (lse[3] == -torch.inf).all()
    assert not out[3].any()


def test_what_the_sparse_backend_takes(sparse_backend: Any) -> None:
    kinds = sparse_backend.MlaCupySparseBackend
    assert kinds.get_name() == "FLASHMLA_SPARSE"
    assert kinds.supported_kv_cache_dtypes == ["auto", "bfloat16", "fp8", "fp8_ds_mla"]
    assert [kinds.supports_compute_capability(SimpleNamespace(major=x)) for x in (9, 10, 12)] == [True, False, False]
    assert kinds.get_supported_kernel_block_sizes() == [64]


@pytest.mark.parametrize(("kind", "names"), [("dense", ["CUSTOM"]), ("sparse", ["CUSTOM", "FLASHMLA_SPARSE"])])
def test_registration(
    torch: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, names: list[str]
) -> None:
    """Dense and sparse at once, each under its name."""
    registered = stand_in_vllm.install(monkeypatch)
    monkeypatch.setenv("MLA_CUPY_VLLM", kind)
    with caplog.at_level(logging.WARNING, "mla_cupy"):
        plugin.register()
    assert registered == {name: plugin.BACKENDS[name] for name in names}
    assert caplog.records == []
    for name, path in registered.items():
        module, _, kind = path.rpartition(".")
        assert getattr(importlib.import_module(module), kind).get_name() == name


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *(
            (name, what)
            for name in plugin.BACKENDS
            for what in ("parameters", "method", "unknown", "absent", "registry")
        ),
        ("FLASHMLA_SPARSE", "result"),
    ],
)
def test_another_interface_is_declined(
    torch: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, what: str
) -> None:
    """Another interface is declined with one line in the log; nothing is registered, and the other backend stays."""
    registered = stand_in_vllm.install(monkeypatch)
    monkeypatch.setenv("MLA_CUPY_VLLM", "sparse")
    dense = name == "CUSTOM"
    impl = stand_in_vllm.MLACommonImpl if dense else stand_in_vllm.FlashMLASparseImpl
    method = "forward_mqa" if dense else "_fp8_flash_mla_kernel"
    registry = sys.modules[plugin._REGISTRY]
    if what == "parameters":
        monkeypatch.setattr(impl, method, lambda self, q, cache: None)
    elif what == "method":
        monkeypatch.delattr(impl, method)
    elif what == "unknown":
        monkeypatch.setattr(impl, method, lambda self, q, kv_c_and_k_pe_cache, attn_metadata, layer, sinks: None)
    elif what == "absent":
        module = "vllm.model_executor.layers.attention.mla_attention"
        module = module if dense else "vllm.v1.attention.backends.mla.flashmla_sparse"
        monkeypatch.setitem(sys.modules, module, None)
    elif what == "registry":
        monkeypatch.delattr(registry.AttentionBackendEnum, name)
    else:
        monkeypatch.setitem(impl._bf16_flash_mla_kernel.__annotations__, "return", "None")
    with caplog.at_level(logging.WARNING, "mla_cupy"):
        plugin.register()
    assert list(registered) == ["FLASHMLA_SPARSE" if dense else "CUSTOM"]
    (record,) = caplog.records
    assert "mla_cupy is no attention backend for this vLLM" in record.getMessage()
