"""The scripts for a machine with a GPU, as far as they run without one."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.bindings.stand_in import install_modules
from tests.engines import model
from tests.engines.gpu import check, parcel, sglang_check
from tests.engines.gpu.keep_sm90 import CONTAINER, ELF, PTX, containers, shortened


def entry(kind: int, arch: int, size: int) -> bytes:
    header = struct.pack("<HHIQ", kind, 0, 64, size) + bytes(12) + struct.pack("<I", arch) + bytes(32)
    assert len(header) == 64
    return header + bytes([kind + arch]) * size


def fat_binary(*entries: bytes) -> bytes:
    payload = b"".join(entries)
    return CONTAINER + struct.pack("<HHQ", 1, 16, len(payload)) + payload


def test_code_for_other_gpus_is_dropped() -> None:
    """Hopper's stays; else the newest PTX that it loads; else something small. Nothing moves."""
    native, portable, small = entry(ELF, 90, 64), entry(PTX, 80, 40), entry(ELF, 100, 8)
    before = [
        fat_binary(entry(ELF, 80, 96), native, entry(PTX, 90, 32)),
        fat_binary(entry(PTX, 75, 24), portable, entry(PTX, 100, 72)),
        fat_binary(entry(ELF, 100, 80), small),
    ]
    data = b"head" * 4 + b"".join(before) + b"tail"
    made = shortened(data, 16, sum(map(len, before)))
    assert (len(made), made[:16], made[-4:]) == (len(data), data[:16], b"tail")
    at = 16
    for old, kept in zip(before, (native, portable, small), strict=True):
        assert made[at + 16 : at + 16 + len(kept)] == kept
        assert not any(made[at + 16 + len(kept) : at + len(old)])
        ((_, header, stop, found),) = containers(made, at, 16 + len(kept))
        assert (header, stop - at, len(found)) == (16, 16 + len(kept), 1)
        at += len(old)


def test_an_unknown_entry_is_no_code() -> None:
    with pytest.raises(ValueError, match="got an entry of kind 7, expected 1 or 2"):
        shortened(fat_binary(entry(7, 90, 8)), 0, 88)


def test_slices_and_their_setup(tmp_path: Path) -> None:
    """Whatever the order in which they come; nothing is unpacked before all are there, or if one is broken."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "hello.py").write_text("greeting = 1\n")
    subprocess.run(["tar", "-C", tmp_path, "-cJf", tmp_path / "site.tar.xz", "site"], check=True)
    data = (tmp_path / "site.tar.xz").read_bytes()
    parts = parcel.slices(data, tmp_path / "parts", len(data) // 2 + 1)
    assert [x.name for x in parts] == ["part1", "part2"]
    assert hashlib.sha256(data).hexdigest() in (parts[0] / "PARCEL.sha256").read_text()
    for home, broken in (("good", False), ("bad", True)):
        if broken:
            (parts[0] / "slice01of02").write_bytes(data[1 : len(data) // 2 + 2])
        environment = {"PATH": "/usr/bin:/bin", "MLA_ENGINES": str(tmp_path / home), "HOME": str(tmp_path)}
        for number, part in enumerate(reversed(parts)):
            command = ["bash", str(part / "setup.sh")]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert (done.returncode == 0) == (not broken or number == 0)
        assert (tmp_path / home / "site" / "hello.py").exists() == (not broken)


def test_which_extensions_travel() -> None:
    assert parcel.kept("vllm_flash_attn/_vllm_fa3_C", mixture=False)
    assert [parcel.kept("_moe_C_stable_libtorch", mixture=x) for x in (False, True)] == [False, True]
    assert not parcel.kept("vllm_flash_attn/_vllm_fa2_C", mixture=True)


def test_what_vllm_is_asked_for() -> None:
    options = check.arguments(["tokens", "--graphs", "--drafts", "3", "--block", "64", "--no-prefix-cache"])
    made = check.engine_options(options, 4)
    assert made["compilation_config"]["cudagraph_capture_sizes"] == [4, 8, 16]
    assert (made["block_size"], made["enable_prefix_caching"]) == (64, False)
    assert check.label(options, "CUSTOM", 16) == (
        "tokens-CUSTOM-h16-auto-bfloat16-block64-drafts3-graphs-no_prefix_cache"
    )
    cut = check.arguments(["tokens", "--topk", "8", "--step-tokens", "99"])
    assert check.label(cut, "CUSTOM", 16) == "tokens-CUSTOM-h16-auto-bfloat16-topk8-step99"
    assert check.engine_options(check.arguments(["tokens"]), 4)["enforce_eager"]
    assert "enforce_eager" not in check.engine_options(check.arguments(["speed", "--compiled"]), 4)


def test_what_sglang_is_asked_for() -> None:
    options = sglang_check.arguments(["--graphs", "--drafts", "3", "--chunk", "512", "--at-once", "2"])
    made = sglang_check.engine_options(options, "mla_cupy:fp8-math")
    assert (made["decode_attention_backend"], made["chunked_prefill_size"]) == ("mla_cupy", 512)
    assert (made["speculative_num_draft_tokens"], made["speculative_attention_mode"]) == (4, "decode")
    assert made["max_total_tokens"] > 32 * max(check.LENGTHS)
    plain = sglang_check.engine_options(sglang_check.arguments([]), "triton")
    assert not {"chunked_prefill_size", "speculative_algorithm", "max_total_tokens"} & set(plain)


def test_a_model_without_weights(tmp_path: Path) -> None:
    """Only its shape, which is written again if it was another."""
    for layers in (3, 5):
        folder = model.build(tmp_path / "model", empty=True, num_hidden_layers=layers)
        assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == layers
        assert [x.name for x in folder.iterdir()] == ["config.json"]


def test_selection_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions from the query's own token backwards, without repeats; all of them if there are few; then -1."""
    torch = pytest.importorskip("torch")

    class Indexer:
        topk_tokens = 4

        def forward(self, hidden_states: Any, qr: Any, positions: Any, rotary_emb: Any) -> Any:
            return torch.full((6, 5), 99, dtype=torch.int32)

    install_modules(monkeypatch, {"vllm.model_executor.models.deepseek_v2": {"Indexer": Indexer}})
    check.select_by_position()
    chosen = Indexer().forward(None, None, torch.tensor([0, 2, 3, 9]), None)
    assert chosen[:3].tolist() == [[0, -1, -1, -1, 99], [2, 1, 0, -1, 99], [3, 2, 1, 0, 99]]
    assert chosen[3].tolist() == [9, 7, 4, 2, 99]
    assert (chosen[4:] == 99).all()


def test_prompts_share_their_starts() -> None:
    made = check.prompts(300)
    assert [len(x) for x in made][:10] == [1, 2, 15, 16, 17, 63, 64, 65, 100, 257]
    assert made[7][:43] == made[9][:43]
    assert made[9] != made[8][:257]


def test_more_prompts_than_lengths() -> None:
    """The first ones are the same; lengths come again, with other tokens."""
    count = len(check.LENGTHS)
    made = check.prompts(300, 2 * count + 1)
    assert made[:count] == check.prompts(300)
    assert [len(x) for x in made] == [min(x, 300) for x in [*check.LENGTHS, *check.LENGTHS, check.LENGTHS[0]]]
    assert len({tuple(x) for x in made if len(x) > 2}) == 2 * (count - 2)
    options = check.arguments(["tokens", "--prompts", "64"])
    assert check.label(options, "CUSTOM", 16) == "tokens-CUSTOM-h16-auto-bfloat16-p64"


def test_step_times_are_differences() -> None:
    told = check.step_times([(1.0, 2.28), (1.0, 1.64), (2.0, 4.56)])
    assert told["ms"] == pytest.approx(10.0)
    assert told["all_ms"] == pytest.approx([5.0, 10.0, 20.0])


def test_variants_of_a_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Several add up in the process's environment."""
    seen: dict[str, str] = {}

    def run(command: list[str], env: dict[str, str], **_: Any) -> None:
        seen.update(env)
        Path(command[-1]).write_text('{"facts": {}}')

    monkeypatch.setattr(check.subprocess, "run", run)
    options = check.arguments(["tokens", "--out", str(tmp_path)])
    assert check.process(options, [], "FLASHMLA_SPARSE:ours:indexer:alone", 16, 0) == {"facts": {}}
    assert (seen["MLA_CUPY_VLLM"], seen["MLA_CUPY_ENGINE_INDEXER"]) == ("sparse", "mla_cupy")
    assert check.variants_of("CUSTOM") == set()


def test_processes_are_timed_one_by_one(tmp_path: Path) -> None:
    """Nobody is timed before all are ready or gone, nor beside another."""
    first, second, gone = (check.get_ready(tmp_path) for _ in range(3))
    done: list[str] = []

    def timed(starting: Any, name: str) -> None:
        with starting, check.await_turn(starting):
            done.append(f"{name} begins")
            time.sleep(0.05)
            done.append(f"{name} ends")

    threads = [threading.Thread(target=timed, args=x) for x in ((first, "first"), (second, "second"))]
    threads[0].start()
    time.sleep(0.1)
    assert not done
    gone.close()
    time.sleep(0.1)
    assert not done
    threads[1].start()
    for thread in threads:
        thread.join(10)
    assert len(done) == 4
    assert all(done[at].split()[0] == done[at + 1].split()[0] for at in (0, 2))


def test_who_hangs_is_not_awaited_for_ever(tmp_path: Path) -> None:
    with check.get_ready(tmp_path) as ready, check.get_ready(tmp_path):
        check.await_turn(ready, patience=0.2).close()


def test_selections_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of the second call differs in an index."""
    torch = pytest.importorskip("torch")

    def keep(indices: Any, logits: Any, count: int, ke: Any) -> None:
        assert (tuple(logits.shape), count, ke.tolist()) == ((2, 9), 3, [7, 8])
        indices.copy_(torch.tensor([[0, 1, 2], [4, 5, 6]]))

    def select(*scored: Any, topk: int, slots: bool, indices: Any) -> str:
        assert (topk, slots) == (3, False)
        indices[:] = torch.tensor([[[0, 1, 2]], [[4, 5, wrong]]])
        return "selected"

    ours = {
        "indexer_select_paged": select,
        "indexer_logits_paged": lambda *scored, clean: torch.zeros(2, 1, 9),
        "_keep": keep,
    }
    install_modules(monkeypatch, {"mla_cupy.integrations.vllm_indexer": ours})
    counted = check.compare_selections()
    module = sys.modules["mla_cupy.integrations.vllm_indexer"]
    for wrong, differ in ((6, 0), (7, 1)):
        memory = torch.zeros(2, 1, 3, dtype=torch.int32)
        scored = None, None, None, torch.tensor([[7], [8]]), None
        assert module.indexer_select_paged(*scored, topk=3, slots=False, indices=memory) == "selected"
        assert memory[1, 0].tolist() == [4, 5, wrong]
        assert int(counted["rows that differ"]) == differ
    assert int(counted["rows"]) == 4
