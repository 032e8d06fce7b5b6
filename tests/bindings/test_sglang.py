"""The plugin of SGLang against a stand-in of its interface; SGLang itself has not run it."""

from __future__ import annotations

import importlib
import logging
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mla_cupy import UnsupportedDeviceError, reference
from mla_cupy.integrations import sglang as plugin
from tests.bindings import stand_in_sglang
from tests.interop.test_torch import array, tensor
from tests.support.tolerance import check

pytestmark = pytest.mark.usefixtures("_numpy_backend")

HEADS, CONTEXT, PAGES, SCALE = 4, 200, 9, 192**-0.5


def runner(
    torch: Any, page_size: int = 64, drafts: int | None = None, device: str = "cpu", **changes: Any
) -> SimpleNamespace:
    """A model: three requests of the pool have pages; two of them mix theirs."""
    rng = np.random.default_rng(4)
    more = 64 // page_size
    rows = rng.standard_normal(((PAGES + more) * page_size, 1, 576)).astype(ml_dtypes.bfloat16)
    slots = np.full((4, CONTEXT), len(rows) - 1, np.int32)
    for request, pages in ((2, range(1, PAGES, 2)), (0, range(0, PAGES, 2)), (1, range(PAGES, PAGES + more))):
        held = (np.array(pages)[:, None] * page_size + np.arange(page_size)).ravel()[:CONTEXT]
        slots[request, : len(held)] = held
    made = SimpleNamespace(
        model_config=SimpleNamespace(num_attention_heads=HEADS, kv_lora_rank=512, qk_rope_head_dim=64),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.from_numpy(slots).to(device), size=4),
        token_to_kv_pool=stand_in_sglang.Pool(tensor(torch, rows, device)),
        kv_cache_dtype=torch.bfloat16,
        dtype=torch.bfloat16,
        server_args=SimpleNamespace(speculative_num_draft_tokens=drafts, speculative_eagle_topk=drafts and 1),
        page_size=page_size,
        dcp_world_size=1,
        is_unified=False,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def make(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in_sglang.install(monkeypatch)
    return lambda **changes: plugin.create(runner(torch, **changes))


def batch(torch: Any, lengths: Any, mode: str = "decode", device: str = "cpu") -> SimpleNamespace:
    """Requests 2, 0 and 1, whose lengths SGLang keeps as int64."""
    return SimpleNamespace(
        forward_mode=stand_in_sglang.Mode(mode),
        batch_size=len(lengths),
        seq_lens=torch.tensor(lengths, dtype=torch.int64, device=device),
        req_pool_indices=torch.tensor([2, 0, 1][: len(lengths)], device=device),
        out_cache_loc=torch.tensor([5, 70, 9][: len(lengths)], device=device),
    )


def layer_of(heads: int = HEADS) -> SimpleNamespace:
    return SimpleNamespace(layer_id=0, tp_q_head_num=heads, head_dim=576, v_head_dim=512, scaling=SCALE)


def oracle(torch: Any, backend: Any, q: Any, lengths: Any, rounding: str | None, **options: Any) -> Any:
    """The result from the slots of each request, one by one."""
    rows = array(torch, backend.token_to_kv_pool.rows)
    slots = backend.req_to_token.cpu().numpy()[[2, 0, 1][: len(lengths)]]
    b = len(lengths)
    q = q.reshape(b, -1, HEADS, 576)
    width = slots.shape[1]
    return reference.mla_decode(
        q,
        rows,
        np.where(np.arange(width) < np.array(lengths)[:, None], slots, 0),
        lengths,
        scale=SCALE,
        rounding=rounding,
        **options,
    )


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("s_q", [1, 3], ids=["decode", "verify"])
@pytest.mark.parametrize("graph", [False, True])
def test_a_step(torch: Any, make: Any, page_size: int, s_q: int, graph: bool) -> None:
    """Two layers of two steps of several lengths; one request has no tokens."""
    backend = make(page_size=page_size, drafts=3)
    backend.init_cuda_graph_state(3, 9)
    held = backend._of_graphs
    mode = "decode" if s_q == 1 else "verify"
    longest = 4 if page_size == 1 else 130
    for step, lengths in enumerate(([longest, 1, 0], [3, 2, 1])):
        forward = batch(torch, lengths, mode)
        if graph:
            backend.init_forward_metadata_out_graph(forward, in_capture=step == 0)
            assert backend._step.block_table.data_ptr() == held[0].data_ptr()
            assert backend._step.seqlens.data_ptr() == held[1].data_ptr()
        else:
            backend.init_forward_metadata(forward)
        shown = np.array(lengths, np.int32) + (0 if s_q == 1 else 3)
        q = np.random.default_rng(step).standard_normal((3 * s_q, HEADS, 576)).astype(ml_dtypes.bfloat16)
        run = backend.forward_decode if s_q == 1 else backend.forward_extend
        for _ in range(2):
            out = run(tensor(torch, q).flatten(1), None, None, layer_of(), forward)
            assert out.shape == (3 * s_q, HEADS * 512)
            exact, rounded = (oracle(torch, backend, q, shown, rounding) for rounding in (None, "bfloat16"))
            got = array(torch, out).reshape(3, s_q, HEADS, 512), exact[1]
            check(got, exact, rounded, "bfloat16")
    assert len(backend._plans) == 1
    assert backend.left == ["init_cuda_graph_state"]


@pytest.mark.parametrize("graph", [False, True])
def test_the_first_layer_schedules(torch: Any, make: Any, monkeypatch: pytest.MonkeyPatch, graph: bool) -> None:
    """Once a step, whichever layer is first, each time that it runs; preparing a step launches no schedule."""
    backend = make()
    backend.init_cuda_graph_state(3, 3)
    module: Any = sys.modules["mla_cupy.integrations.sglang_backend"]
    updates: list[Any] = []
    monkeypatch.setattr(
        module.TorchDecodePlan,
        "update",
        lambda plan, seqlens, inner=module.TorchDecodePlan.update: (updates.append(seqlens), inner(plan, seqlens)),
    )
    prepare = backend.init_forward_metadata_out_graph if graph else backend.init_forward_metadata
    layers, q = [layer_of(), layer_of()], torch.zeros(3, HEADS * 576).bfloat16()
    for lengths in ([70, 20, 1], [71, 21, 2]):
        forward = batch(torch, lengths)
        prepare(forward)
        assert updates == []
        for _ in range(2):  # a step that is captured runs before
            for layer in layers:
                backend.forward_decode(q, None, None, layer, forward)
        assert [x.tolist() for x in updates] == [lengths, lengths]
        updates.clear()


def in_fp8(torch: Any, device: str = "cpu", **changes: Any) -> SimpleNamespace:
    """The model with its cache cast to e4m3, as SGLang does it."""
    made = runner(torch, device=device, kv_cache_dtype=torch.float8_e4m3fn, **changes)
    made.token_to_kv_pool.rows = made.token_to_kv_pool.rows.to(torch.float8_e4m3fn)
    return made


@pytest.mark.parametrize("math", ["exact", "fp8"])
@pytest.mark.parametrize("s_q", [1, 3], ids=["decode", "verify"])
def test_an_fp8_cache(torch: Any, monkeypatch: pytest.MonkeyPatch, s_q: int, math: str) -> None:
    """16-bit queries, rows without a scale; new rows are cast. Products as the user wants them."""
    monkeypatch.setenv("MLA_CUPY_ENGINE_MATH", math)
    stand_in_sglang.install(monkeypatch)
    backend = plugin.create(in_fp8(torch, drafts=3))
    forward = batch(torch, [130, 1, 0], "decode" if s_q == 1 else "verify")
    backend.init_forward_metadata(forward)
    q = np.random.default_rng(3).standard_normal((3 * s_q, HEADS, 576)).astype(ml_dtypes.bfloat16)
    run = backend.forward_decode if s_q == 1 else backend.forward_extend
    new = torch.full((3, 1, 576), 0.3).bfloat16()
    out = run(tensor(torch, q).flatten(1), new, new[..., :512], layer_of(), forward)
    assert (backend.token_to_kv_pool.rows[forward.out_cache_loc].float() == 0.3125).all()
    shown = np.array([130, 1, 0], np.int32) + (0 if s_q == 1 else 3)
    options = {} if math == "exact" else {"math": math}
    exact, rounded = (oracle(torch, backend, q, shown, rounding, **options) for rounding in (None, "bfloat16"))
    check((array(torch, out).reshape(3, s_q, HEADS, 512), exact[1]), exact, rounded, "bfloat16")


@pytest.mark.parametrize("s_q", [1, 3], ids=["decode", "verify"])
@pytest.mark.parametrize("cache", ["bfloat16", "fp8"])
def test_queries_in_two_arrays(torch: Any, monkeypatch: pytest.MonkeyPatch, s_q: int, cache: str) -> None:
    """Queries in SGLang's two arrays, the latent part head by head: joined for FP8 tokens alone; new rows are joined,
    too.
    """
    found = stand_in_sglang.install(monkeypatch)
    backend = plugin.create((in_fp8 if cache == "fp8" else runner)(torch, drafts=3))
    assert found.in_parts == ["fa3", "mla_cupy"]
    assert backend._plans.sizes["q_rope"] == (cache != "fp8")
    forward = batch(torch, [130, 1, 0], "decode" if s_q == 1 else "verify")
    q = tensor(torch, np.random.default_rng(8).standard_normal((3 * s_q, HEADS, 576)).astype(ml_dtypes.bfloat16))
    latent = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    new = torch.arange(3 * 576).view(3, 1, 576).bfloat16() / 1024
    run = backend.forward_decode if s_q == 1 else backend.forward_extend
    joined: list[Any] = []
    module: Any = sys.modules["mla_cupy.integrations.sglang_backend"]
    inner = module._joined
    monkeypatch.setattr(module, "_joined", lambda x, rope: (joined.append(tuple(x.shape[1:])), inner(x, rope))[1])
    outs = []
    for rows, parts in (
        ((q.flatten(1), new), {}),
        ((latent, new[..., :512]), {"q_rope": q[..., 512:], "k_rope": new[..., 512:]}),
    ):
        joined.clear()
        backend.init_forward_metadata(forward)
        outs.append(run(*rows, new[..., :512], layer_of(), forward, **parts))
        assert torch.equal(
            backend.token_to_kv_pool.rows[forward.out_cache_loc].float(), new.to(backend.data_type).float()
        )
    assert torch.equal(*outs)
    assert joined == [(1, 512)] + [(HEADS, 512)] * (cache == "fp8")


def test_prefill_gets_one_array(torch: Any, make: Any) -> None:
    """The base class's own takes no second one."""
    backend = make()
    q, k = torch.randn(5, HEADS, 576), torch.randn(5, 1, 576)
    forward = batch(torch, [70, 20], "extend")
    parts = {"q_rope": q[..., 512:], "k_rope": k[..., 512:]}
    backend.forward_extend(q[..., :512], k[..., :512], k[..., :512], layer_of(), forward, **parts)
    assert torch.equal(backend.extended[0], q)
    assert torch.equal(backend.extended[1], k)


def test_a_version_that_joins_queries(torch: Any, make: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Then queries come in one array; the log says so."""
    monkeypatch.delattr(
        sys.modules["sglang.srt.models.deepseek_common.utils"], "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS"
    )
    with caplog.at_level(logging.WARNING):
        backend = make()
    assert "joins the parts of queries" in caplog.text
    assert not backend._plans.sizes["q_rope"]


def test_new_tokens_are_kept_first(torch: Any, make: Any) -> None:
    backend = make()
    rows = backend.token_to_kv_pool.rows
    forward, new = batch(torch, [70, 20]), torch.ones(2, 1, 576).bfloat16()
    backend.init_forward_metadata(forward)
    q = torch.zeros(2, HEADS * 576).bfloat16()
    before = rows.clone()
    backend.forward_decode(q, new, new[..., :512], layer_of(), forward, save_kv_cache=False)
    assert torch.equal(rows, before)
    backend.forward_decode(q, new, new[..., :512], layer_of(), forward)
    assert torch.equal(rows[forward.out_cache_loc], new)


def test_more_heads_than_the_plan_is_for(torch: Any, make: Any) -> None:
    """Without a plan for them, and with a request that has no tokens."""
    backend = make()
    forward = batch(torch, [70, 20, 0])
    backend.init_forward_metadata(forward)
    q = np.random.default_rng(1).standard_normal((3, HEADS, 576)).astype(ml_dtypes.bfloat16)
    doubled = np.concatenate([q, q], axis=1)
    out = backend.forward_decode(tensor(torch, doubled).flatten(1), None, None, layer_of(2 * HEADS), forward)
    exact, rounded = (oracle(torch, backend, q, [70, 20, 0], rounding) for rounding in (None, "bfloat16"))
    assert out.shape == (3, 2 * HEADS * 512)
    for half in (slice(HEADS), slice(HEADS, None)):
        got = array(torch, out.view(3, 1, 2 * HEADS, 512))[:, :, half], exact[1]
        check(got, exact, rounded, "bfloat16")


def test_a_version_whose_pool_takes_plain_slots(torch: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that knows no ranks that share a cache, and no translator: 0.5.13."""
    monkeypatch.delattr(sys.modules["sglang.srt.mem_cache.memory_pool"], "KVWriteLoc")
    inner = stand_in_sglang.FlashMLABackend.__init__

    def older(
        self: Any,
        model_runner: Any,
        skip_prefill: Any = False,
        kv_indptr_buf: Any = None,
        kv_last_page_len_buf: Any = None,
    ) -> None:
        inner(self, model_runner)
        del self.dcp_world_size, self.kv_index_translator

    monkeypatch.setattr(stand_in_sglang.FlashMLABackend, "__init__", older)
    backend = make()
    forward, new = batch(torch, [70, 20]), torch.ones(2, 1, 576).bfloat16()
    backend.init_forward_metadata(forward)
    backend.forward_decode(torch.zeros(2, HEADS * 576).bfloat16(), new, new[..., :512], layer_of(), forward)
    assert torch.equal(backend.token_to_kv_pool.rows[forward.out_cache_loc], new)


def test_prefills_are_dispatched_as_for_the_base_class(make: Any) -> None:
    make()
    assert stand_in_sglang.AttentionBackendRegistry.get_handler("mla_cupy") == "FlashMLA's"


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ({"attention_backend": "mla_cupy"}, (64, None)),
        ({"decode_attention_backend": "mla_cupy", "page_size": 16}, (16, None)),
        ({"attention_backend": "mla_cupy", "speculative_algorithm": "EAGLE"}, (64, "flashmla")),
        ({"attention_backend": "mla_cupy", "speculative_algorithm": "EAGLE", "page_size": 16}, (16, "triton")),
        (
            {
                "attention_backend": "mla_cupy",
                "speculative_algorithm": "EAGLE",
                "speculative_draft_attention_backend": "fa3",
            },
            (64, "fa3"),
        ),
        ({"attention_backend": "flashmla", "speculative_algorithm": "EAGLE"}, (1, None)),
    ],
)
@pytest.mark.parametrize("arguments", [stand_in_sglang.ServerArgs, stand_in_sglang.OlderServerArgs])
def test_defaults_of_a_server(
    monkeypatch: pytest.MonkeyPatch, arguments: type, given: dict[str, Any], resolved: tuple[int, str | None]
) -> None:
    """Pages of 64 and a backend that can make drafts, where the user says nothing; nothing for other backends."""
    stand_in_sglang.install(monkeypatch, arguments)
    plugin.register()
    stand_in_sglang.HookRegistry.apply_hooks(monkeypatch)
    made: Any = arguments(**given)
    if arguments is stand_in_sglang.ServerArgs:
        made.resolve_once()
    assert (made.page_size, made.speculative_draft_attention_backend) == resolved


def test_drafts_of_several_lengths_are_not_verified_in_one_graph(make: Any) -> None:
    """The base class's kernels take them; ours take one number of tokens for all requests."""
    assert make().supports_ragged_verify_graph is False


def test_the_rest_is_left_to_sglang(torch: Any, make: Any) -> None:
    backend = make()
    forward = batch(torch, [9], "extend")
    backend.init_forward_metadata(forward)
    backend.init_forward_metadata_out_graph(forward, in_capture=True)
    backend.forward_extend(None, None, None, layer_of(), forward)
    assert backend.left == ["init_forward_metadata", "init_forward_metadata_out_graph True", "forward_extend"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_dtype": "float8_e5m2"}, "not torch.float8_e5m2"),
        (
            {
                "kv_cache_dtype": "float8_e4m3fn",
                "model_config": SimpleNamespace(num_attention_heads=4, kv_lora_rank=512, qk_rope_head_dim=0),
            },
            r"512 \+ 64 elements from a cache of torch.float8_e4m3fn, not 512 \+ 0",
        ),
        (
            {"model_config": SimpleNamespace(num_attention_heads=4, kv_lora_rank=256, qk_rope_head_dim=64)},
            "not 256 \\+ 64",
        ),
        (
            {"server_args": SimpleNamespace(speculative_num_draft_tokens=4, speculative_eagle_topk=2)},
            "chains of draft tokens",
        ),
        ({"dcp_world_size": 2}, "no cache that is spread over ranks: leave --dcp-size at 1"),
        ({"is_unified": True}, "no unified pool"),
        ({"token_to_kv_pool": SimpleNamespace(use_dsa=True)}, "attends to all tokens, and this model selects some"),
    ],
)
def test_what_it_cannot_do(torch: Any, make: Any, changes: dict[str, Any], message: str) -> None:
    if isinstance(changes.get("kv_cache_dtype"), str):
        changes = {**changes, "kv_cache_dtype": getattr(torch, changes["kv_cache_dtype"])}
    with pytest.raises(NotImplementedError, match=message):
        make(**changes)


def test_registration(torch: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Once, however often SGLang loads the plugin."""
    found = stand_in_sglang.install(monkeypatch)
    with caplog.at_level(logging.WARNING, "mla_cupy"):
        plugin.register()
        plugin.register()
        backend = found.backends["mla_cupy"](runner(torch))
    assert found.choices == found.chunked == ["flashmla", "mla_cupy"]
    assert caplog.records == []
    assert isinstance(backend, importlib.import_module("mla_cupy.integrations.sglang_backend").MlaCupyBackend)


@pytest.mark.parametrize("what", ["choices", "registry", "hooks", "absent"])
def test_another_registry_is_declined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """Another registry is declined with one line in the log; nothing is registered."""
    found = stand_in_sglang.install(monkeypatch)
    if what == "choices":
        monkeypatch.setattr(sys.modules[plugin._ARGUMENTS], "add_attention_backend_choices", lambda: None)
    elif what == "registry":
        monkeypatch.delattr(sys.modules[plugin._REGISTRY], "register_attention_backend")
    elif what == "hooks":
        monkeypatch.setattr(stand_in_sglang.HookRegistry, "register", lambda target: None)
    else:
        monkeypatch.setitem(sys.modules, plugin._ARGUMENTS, None)
    with caplog.at_level(logging.WARNING, "mla_cupy"):
        plugin.register()
    assert (found.choices, found.backends) == (["flashmla"], {})
    (record,) = caplog.records
    assert "mla_cupy is no attention backend for this SGLang" in record.getMessage()


@pytest.mark.parametrize("what", ["parameters", "method", "absent"])
def test_another_backend_interface_is_declined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """Another interface is declined when a model is loaded: one line in the log, and an error with the remedy."""
    stand_in_sglang.install(monkeypatch)
    name = "init_forward_metadata_out_graph"
    if what == "parameters":
        monkeypatch.setattr(stand_in_sglang.FlashMLABackend, name, lambda self, batch: None)
    elif what == "method":
        monkeypatch.delattr(stand_in_sglang.FlashMLABackend, name)
    else:
        monkeypatch.setitem(sys.modules, "sglang.srt.layers.attention.flashmla_backend", None)
    with caplog.at_level(logging.WARNING, "mla_cupy"), pytest.raises(UnsupportedDeviceError, match="choose another"):
        plugin.create(None)
    (record,) = caplog.records
    assert "mla_cupy is no attention backend for this SGLang" in record.getMessage()
