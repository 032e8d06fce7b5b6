"""Decode steps of DeepSeek sparse attention, from the cache of the last token to the attention of the next.

Two pools lie under one block table: 656-byte latent records and 132-byte index keys. A step appends both records of
each sequence's new token, lets the indexer select the slots of the keys that matter, and attends to these alone. With a
GPU all launches of a step are one CUDA graph; without one the NumPy backend takes the same calls.

The projections of a model are random numbers here. The last step is compared with the oracle: the selection with an
exact sort of the logits, and the attention with the float64 one over the same slots.
"""

from __future__ import annotations

import argparse
from typing import Any

import ml_dtypes
import numpy as np

import mla_cupy
from mla_cupy import PagedKVCache, reference

PAGE_SIZE, INDEX_HEADS, INDEX_DIM = 64, 4, 128
D_LATENT, D_ROPE = 512, 64
SCALE = 192**-0.5


class Step:
    """The arrays of a step, all of a fixed size: what a graph needs."""

    def __init__(self, cache: PagedKVCache, b: int, heads: int, topk: int, arrays: Any) -> None:
        self.cache, self.topk, self.arrays = cache, topk, arrays
        half = np.dtype(np.float16)
        self.latent, self.rope = arrays.zeros((b, D_LATENT), half), arrays.zeros((b, D_ROPE), half)
        self.q = arrays.zeros((b, 1, heads, D_LATENT + D_ROPE), half)
        self.index_k = arrays.zeros((b, INDEX_DIM), ml_dtypes.bfloat16)
        self.index_q = arrays.zeros((b, INDEX_HEADS, INDEX_DIM), ml_dtypes.bfloat16)
        self.weights = arrays.zeros((b, INDEX_HEADS), np.float32)
        angles = np.arange(1 << 12)[:, None] * 10000.0 ** -(np.arange(D_ROPE // 2) / (D_ROPE // 2))
        self.cos, self.sin = (arrays.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
        # Arrays that `extend` fills for every step, and the results' memory.
        self.slots, self.positions = arrays.zeros(b, np.int32), arrays.zeros(b, np.int32)
        self.table = arrays.zeros((b, cache.block_table.shape[1]), np.int32)
        self.seqlens = arrays.zeros(b, np.int32)
        self.codes = arrays.zeros((b, INDEX_HEADS, INDEX_DIM), np.uint8)
        self.folded = arrays.zeros((b, INDEX_HEADS), np.float32)
        self.logits = arrays.zeros((b, self.table.shape[1] * PAGE_SIZE), np.float32)
        self.indices, self.counts = arrays.zeros((b, 1, topk), np.int32), arrays.zeros((b, 1), np.int32)
        self.out, self.lse = arrays.zeros((b, 1, heads, D_LATENT), half), arrays.zeros((b, 1, heads), np.float32)
        self.scratch: dict[str, Any] = {}
        if arrays is not np:  # the calls of a graph own their memory
            self.scratch = {"select": arrays.empty(self._select_bytes(), np.uint8)}
            self.scratch["attend"] = arrays.empty(self._attend_bytes(), np.uint8)

    def fill(self, rng: np.random.Generator) -> None:
        """Fill in what a model would have computed for the new tokens."""
        for x in (self.latent, self.rope, self.q, self.index_k, self.index_q, self.weights):
            numbers = rng.standard_normal(x.shape, np.float32).astype(x.dtype)
            if self.arrays is np:
                x[...] = numbers
            else:
                x.set(numbers)

    def extend(self, sequences: list[int]) -> None:
        """Room for the new tokens: on the host, and outside of the graph."""
        step = self.cache.extend(sequences, 1)
        for mine, given in (
            (self.slots, step.slots),
            (self.positions, step.positions),
            (self.table, step.block_table),
            (self.seqlens, step.seqlens),
        ):
            mine[...] = given

    def run(self) -> None:
        """Append, select, attend: no allocation, no synchronisation."""
        rope = {"cos": self.cos, "sin": self.sin, "positions": self.positions}
        latent_pages, key_pages = self.cache.layer(0, "kv"), self.cache.layer(0, "indexer")
        mla_cupy.cache_append(self.latent, self.rope, latent_pages, self.slots, **rope)
        mla_cupy.indexer_cache_append(self.index_k, key_pages, self.slots, **rope)
        mla_cupy.indexer_prepare_q(self.index_q, self.weights, **rope, codes=self.codes, folded=self.folded)
        mla_cupy.indexer_select_paged(
            *self._index_inputs(),
            topk=self.topk,
            logits=self.logits,
            indices=self.indices,
            counts=self.counts,
            workspace=self.scratch.get("select"),
        )
        mla_cupy.sparse_mla_decode(
            self.q,
            latent_pages,
            self.indices,
            scale=SCALE,
            topk_length=self.counts[:, 0],
            out=self.out,
            lse=self.lse,
            workspace=self.scratch.get("attend"),
        )

    def _index_inputs(self) -> tuple[Any, ...]:
        key_pages = self.cache.layer(0, "indexer")
        return self.codes[:, None], key_pages, self.folded[:, None], self.seqlens, self.table

    def _select_bytes(self) -> int:
        given = {"topk": self.topk, "logits": self.logits}
        return max(1, mla_cupy.workspace_bytes(mla_cupy.indexer_select_paged, *self._index_inputs(), **given))

    def _attend_bytes(self) -> int:
        pages = self.cache.layer(0, "kv")
        given = {"scale": SCALE, "topk_length": self.counts[:, 0]}
        return max(1, mla_cupy.workspace_bytes(mla_cupy.sparse_mla_decode, self.q, pages, self.indices, **given))

    def check(self) -> tuple[bool, float]:
        """Check that the selection is exact, and return the largest error of the attention."""
        to = (lambda x: x) if self.arrays is np else self.arrays.asnumpy
        logits = mla_cupy.indexer_logits_paged(*self._index_inputs())
        rows = to(logits)[:, 0]
        wanted, _, _ = reference.indexer_topk(
            rows, ke=to(self.seqlens), block_table=to(self.table), k=self.topk, page_size=PAGE_SIZE
        )
        arrays = map(to, (self.q, self.cache.layer(0, "kv"), self.indices))
        exact, _ = reference.sparse_mla_decode(*arrays, scale=SCALE)
        same = bool((wanted == to(self.indices)[:, 0]).all())
        return same, float(np.abs(to(self.out).astype(np.float64) - exact).max())


def captured(step: Step, arrays: Any) -> Any:
    """A function that replays the step's launches on a stream; the first call loads the kernels, so capture later."""
    stream = arrays.cuda.Stream(non_blocking=True)
    arrays.cuda.Device().synchronize()
    with stream:
        step.run()
        stream.begin_capture()
        step.run()
        graph = stream.end_capture()
        stream.synchronize()

    def replay() -> None:
        arrays.cuda.get_current_stream().synchronize()  # what `fill` and `extend` enqueued
        graph.launch(stream)
        stream.synchronize()

    return replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="sequences (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=16, help="query heads (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=300, help="tokens before the first step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--topk", type=int, default=64, help="keys that a token attends to (default: %(default)s)")
    parser.add_argument("--device", default=None, help='"cpu", or none for the current GPU, if there is one')
    options = parser.parse_args()

    rng = np.random.default_rng(0)
    max_pages = -(-(options.prompt + options.steps + 2) // PAGE_SIZE)
    cache = PagedKVCache(
        {"kv": "v32", "indexer": "indexer"},
        num_pages=options.batch * max_pages,
        page_size=PAGE_SIZE,
        max_seqs=options.batch,
        max_pages=max_pages,
        max_tokens=max(options.prompt * options.batch, 1),
        device=options.device,
    )
    arrays: Any = np
    if not isinstance(cache.seqlens, np.ndarray):
        import cupy

        arrays = cupy

    # The prompt: both records of all its tokens, and a fork that shares its pages where there are more sequences.
    sequences = [cache.allocate()[0]]
    written = cache.extend(sequences, options.prompt)
    numbers = [rng.standard_normal((options.prompt, d), np.float32) for d in (D_LATENT, D_ROPE, INDEX_DIM)]
    latent, rope, index_k = (
        arrays.asarray(x.astype(kind))
        for x, kind in zip(numbers, (np.float16, np.float16, ml_dtypes.bfloat16), strict=True)
    )
    step = Step(cache, options.batch, options.heads, options.topk, arrays)
    cache.append(written, 0, latent, rope, cos=step.cos, sin=step.sin)
    cache.append_keys(written, 0, index_k, cos=step.cos, sin=step.sin)
    sequences += cache.fork(sequences[0], options.batch - 1)

    run = step.run
    for number in range(options.steps):
        step.fill(rng)
        step.extend(sequences)
        if arrays is not np and number == 0:
            run = captured(step, arrays)  # which has run the step
        else:
            run()
    same, error = step.check()
    lengths = sorted({cache.length(sequence) for sequence in sequences})
    done = f"{options.steps} steps of {options.batch} sequences, now {lengths} tokens"
    print(f"{done}; {cache.stats().copies} pages copied")
    print(f"selection exact: {same}; largest error of out: {error:.1e}")


if __name__ == "__main__":
    main()
