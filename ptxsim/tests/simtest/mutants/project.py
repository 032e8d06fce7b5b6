# ruff: noqa: E501 (lines of CUDA are kept whole)
"""Plants bugs in the sparse kernels of this project and prints what catches them.

``python -m simtest.mutants.project [part of a name]``, in ptxsim/tests of a checkout of mla_cupy with its test extras. Each bug runs through the public call, in a process of its own, with a copy of the CUDA sources. It is a script and no
test: the kernels change, and a bug whose text is gone is named as one that no longer applies.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ptxsim
from simtest.mutants.run import row
from simtest.runners import MODES

ROOT = Path(__file__).resolve().parents[4]
BACKWARD, PAIR, SMALL = "sparse_backward_sm90", "sparse_backward_sm90_pair", "sparse_forward_sm90_small"
SOURCES = {
    BACKWARD: "sparse_backward/sm90.cu",
    PAIR: "sparse_backward/sm90_pair.cu",
    SMALL: "sparse_forward/sm90_small.cu",
}
SHARED = (
    "sparse_backward/sm90.cuh",
    "sparse_backward/dkv_adder.cuh",
    "sparse/gather.cuh",
    "attention/sm90/math.cuh",
    "tile/sw128_fragments.cuh",
)


@dataclass(frozen=True)
class KernelMutant:
    """A bug: replacements in a kernel's source. ``everywhere``: also look for races in global memory, two blocks at a time."""

    kernel: str
    name: str
    edits: tuple[tuple[str, str], ...]
    everywhere: bool = False


def bug(kernel: str, name: str, old: str, new: str = "", *more: tuple[str, str]) -> KernelMutant:
    """Return a mutant of one or more replacements."""
    return KernelMutant(kernel, name, ((old, new), *more))


_GATHERED = "    cp_async_wait_all();\n    fence_proxy_async();\n    mbarrier_arrive(full);"
_ADDED = "red_add_v4(to, x[0], x[1], x[2], x[3], wanted);"
_PLAIN = "if (wanted) { float4* at = reinterpret_cast<float4*>(to); float4 v = *at; *at = make_float4(v.x + x[0], v.y + x[1], v.z + x[2], v.w + x[3]); }"
_WAITED = "            wgmma_wait_group<0>();\n            pin(reduce.dq_rope);\n        }\n        release(s.k_empty, thread);"
_EARLY = "            release(s.k_empty, thread);\n            wgmma_wait_group<0>();\n            pin(reduce.dq_rope);\n        }"
_STORED = "matrix_offset(thread, step), fragment[step]);\n    }\n"
_MULTIPLIED = "            add_values<kRight>(s, math, stage);\n"
_FREED = "            release(kRight ? s.kv_empty[stage].right : s.kv_empty[stage].left, thread);\n"

MUTANTS = [
    bug(BACKWARD, "dS overwrites P before reduce has read it", "    mbarrier_wait(block.s.p_read, math.state.tile_parity());\n"),
    bug(BACKWARD, "next tile gathered before all have released K", "        mbarrier_wait(s.k_empty, math.state.tile_parity());\n"),
    bug(BACKWARD, "no proxy fence after the gather", _GATHERED, _GATHERED.replace("    fence_proxy_async();\n", "")),
    bug(BACKWARD, "gather arrives before its copies are done", _GATHERED, "    fence_proxy_async();\n    mbarrier_arrive(full);\n    cp_async_wait_all();"),
    bug(BACKWARD, "reduce releases K before its product is done", _WAITED, _EARLY),
    bug(BACKWARD, "reduce warps refill Q without meeting", "            bar_sync(ItemMultiplied, kWarpgroupThreads);\n"),
    bug(BACKWARD, "no proxy fence after P and dS", _STORED + "    fence_proxy_async();\n", _STORED),
    bug(BACKWARD, "row numbers always in one place", "block.s.rows[stage][to_row]", "block.s.rows[0][to_row]"),
    KernelMutant(BACKWARD, "dKV added without atomics (race_global)", ((_ADDED, _PLAIN),), True),
    bug(PAIR, "a block exits while the other may still send", "    cluster_sync();  // the peer may still send to this block\n"),
    bug(PAIR, "dP sent before the other block has read the last", "    mbarrier_wait(kValues ? s.dp_empty : s.s_empty, math.state.empty_parity());\n", "    if (!kValues) mbarrier_wait(s.s_empty, math.state.empty_parity());\n"),
    bug(PAIR, "no proxy fence between S and P of the other block", "    if (!kValues) fence_proxy_async();  // the peer's P arrives in the same buffer\n"),
    bug(PAIR, "S sent when only the own block is done", "        release(block.peer(&s.s_empty), thread);\n", "", ("mbarrier_init(s.s_empty, 2 * kWarpgroupWarps)", "mbarrier_init(s.s_empty, kWarpgroupWarps)")),
    bug(PAIR, "P sent before S is read there", "    mbarrier_wait(s.s_read, math.state.full_parity());\n"),
    bug(PAIR, "expects half of P", "mbarrier_arrive_expect_tx(s.peer_p_full, kSw128Bytes);", "mbarrier_arrive_expect_tx(s.peer_p_full, kSw128Bytes / 2);"),
    bug(PAIR, "dS used before it has come", "            mbarrier_wait(s.peer_ds_full, math.state.full_parity());\n"),
    bug(SMALL, "no proxy fence before the products", "    fence_proxy_async();  // a gathered tile is written by ordinary copies\n"),
    bug(SMALL, "Q released after the first tile", "if (tile + 1 == item.tile_end) release(s.q_empty, thread);", "if (tile == item.tile_begin) release(s.q_empty, thread);"),
    bug(SMALL, "shares of the scores have one place", "    math.turn ^= 1;\n"),
    bug(SMALL, "maxima read before they are stored", "math.scores, thread);\n    bar_sync(own_barrier(kRight), kWarpgroupThreads);\n", "math.scores, thread);\n"),
    bug(SMALL, "next maxima before the sums are read", "    bar_sync(own_barrier(kRight), kWarpgroupThreads);  // the sums have been read\n"),
    bug(SMALL, "stage released before its product", _MULTIPLIED + _FREED, _FREED + _MULTIPLIED),
]  # fmt: skip


def sources(mutant: KernelMutant, folder: Path) -> bool:
    """Write the CUDA sources with the bug; return whether it applies."""
    shutil.copytree(ROOT / "cuda_src", folder, dirs_exist_ok=True)
    files = [folder / name for name in (SOURCES[mutant.kernel], *SHARED)]
    for old, new in mutant.edits:
        path = next((file for file in files if old in file.read_text()), None)
        if path is None:
            return False
        path.write_text(path.read_text().replace(old, new, 1))
    return True


@contextlib.contextmanager
def races_everywhere() -> Iterator[None]:
    """Let every launch look for races in global memory, with two blocks at a time."""
    real = ptxsim.Module.launch
    ptxsim.Module.launch = lambda self, *a, **k: real(self, *a, **k, race_global=True, resident=2)
    try:
        yield
    finally:
        ptxsim.Module.launch = real


def call(kernel: str, mode: str, seed: int) -> None:
    """Run a kernel through the public call and compare with the oracle."""
    sys.path.insert(0, str(ROOT))
    import mla_cupy
    from tests.support.gradients import check_gradients
    from tests.support.sim_driver import simulated
    from tests.support.sparse_cases import SparseCase, make
    from tests.support.tolerance import check

    if kernel == SMALL:
        # Lists of all lengths: a short one after a long one lets the gather come early to the next query.
        inputs = make(SparseCase(s_q=7, s_kv=300, h_q=16, topk=200, lengths=True, invalid=0.0))
        with simulated(1, (9, 0), mode, seed):
            got = mla_cupy.sparse_mla_forward(*inputs.arguments, **inputs.options, kernel=kernel)
        check(got[:2], inputs.exact[:2], inputs.rounded[:2], inputs.case.dtype)
        return
    heads, queries = (20, 6) if kernel == BACKWARD else (70, 2)
    inputs = make(SparseCase(s_q=queries, s_kv=250, h_q=heads, topk=150, invalid=0.0))
    with simulated(2, (9, 0), mode, seed):
        check_gradients(
            mla_cupy.sparse_mla_backward(*inputs.backward_arguments, **inputs.options, kernel=kernel), inputs
        )


def results(mutant: KernelMutant) -> list[str]:
    """Return what catches a bug in each mode."""
    found = []
    for mode, seed in MODES:
        try:
            with races_everywhere() if mutant.everywhere else contextlib.nullcontext():
                call(mutant.kernel, mode, seed)
            found.append("")
        except ptxsim.SimError as error:
            found.append(type(error).__name__)
        except AssertionError:
            found.append("wrong result")
    return found


def main() -> None:
    """Print one row for each bug whose kernel and name contain the argument."""
    if "--one" in sys.argv:
        print("|".join(results(MUTANTS[int(sys.argv[2])])))
        return
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    for index, mutant in enumerate(MUTANTS):
        if wanted not in f"{mutant.kernel} {mutant.name}":
            continue
        with tempfile.TemporaryDirectory() as folder:
            if not sources(mutant, Path(folder) / "cuda_src"):
                print(f"| {mutant.kernel} | {mutant.name} | does not apply any more |")
                continue
            where = dict(os.environ, MLA_CUPY_CUDA_SRC=f"{folder}/cuda_src", MLA_CUPY_CACHE_DIR=f"{folder}/cache")
            command = [sys.executable, "-m", "simtest.mutants.project", "--one", str(index)]
            out = subprocess.run(command, env=where, capture_output=True, text=True, check=True).stdout
            print(row(mutant.kernel, mutant.name, 3, out.rstrip("\n").split("|")), flush=True)


if __name__ == "__main__":
    main()
