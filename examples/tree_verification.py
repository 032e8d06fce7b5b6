"""Speculative decoding with a tree of drafts: one call verifies all of them. Runs anywhere: on the GPU if there is one.

A small model has guessed several ways in which each sequence may go on. The drafts, tree by tree, are appended to the
cache, and one call of `mla_decode` with a `tree_mask` attends from all of them: each sees the sequence and its own
ancestors, and no draft of another branch. Then the longest path that the large model agrees with is accepted, its
tokens are moved to the front of the drafts, and the others are given up: the length is all that says so.
"""

from __future__ import annotations

import argparse
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import mla_cupy

BF16 = ml_dtypes.bfloat16
PAGE_SIZE, D_QK = 64, 576
SCALE = 192**-0.5  # of DeepSeek-V3, which YaRN multiplies further
Array = npt.NDArray[Any]

# Parents of the drafts in the order of the cache, -1 where it is the sequence's last token:
#
#        .- 0 -+- 2 --- 5
#   ... -|     '- 3
#        '- 1 --- 4 --- 6
PARENTS = (-1, -1, 0, 0, 1, 2, 4)


def ancestors(parents: tuple[int, ...]) -> Array:
    """The mask of a tree: bit j of entry i is set where draft j is i or an ancestor of it."""
    masks = np.zeros(len(parents), np.uint64)
    for draft, parent in enumerate(parents):
        masks[draft] = np.uint64(1 << draft) | (masks[parent] if parent >= 0 else np.uint64(0))
    return masks


def path_to(draft: int, parents: tuple[int, ...]) -> list[int]:
    """The drafts from the sequence to one of them."""
    path: list[int] = []
    while draft >= 0:
        path.insert(0, draft)
        draft = parents[draft]
    return path


def accepted(agrees: Array, parents: tuple[int, ...]) -> list[int]:
    """The longest path on which every draft is what the large model would have said there."""
    paths = [path_to(draft, parents) for draft in range(len(parents))]
    good = [path for path in paths if agrees[path].all()]
    return max(good, key=len, default=[])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=int, default=8, metavar="N", help="query heads (default: %(default)s)")
    lengths = {"type": int, "nargs": "+", "default": [500, 63, 0], "metavar": "N", "help": "tokens before the drafts"}
    parser.add_argument("--lengths", **lengths)
    options = parser.parse_args()
    rng = np.random.default_rng(0)

    b, drafts = len(options.lengths), len(PARENTS)
    seqlens = np.array(options.lengths, np.int32) + drafts  # the drafts are in the cache
    max_pages = -(-int(seqlens.max()) // PAGE_SIZE)
    block_table = rng.permutation(b * max_pages).astype(np.int32).reshape(b, max_pages)
    kv_cache = rng.standard_normal((b * max_pages, PAGE_SIZE, D_QK)).astype(BF16)
    q = rng.standard_normal((b, drafts, options.heads, D_QK)).astype(BF16)
    tree_mask = np.tile(ancestors(PARENTS), (b, 1))  # here all sequences have one tree; each may have its own

    out, _ = mla_cupy.mla_decode(q, kv_cache, block_table, seqlens, tree_mask=tree_mask, scale=SCALE)

    for i, length in enumerate(options.lengths):
        # The rest of the model and its logits would come here; a coin says what it thinks of each draft.
        path = accepted(rng.random(drafts) < 0.7, PARENTS)
        slots = [(block_table[i, t // PAGE_SIZE], t % PAGE_SIZE) for t in range(length, length + drafts)]
        kept = [kv_cache[slots[draft]].copy() for draft in path]
        for slot, token in zip(slots, kept, strict=False):  # a path's tokens move to the front
            kv_cache[slot] = token
        seqlens[i] = length + len(path)
        print(f"  {length:5} tokens: accepted drafts {path}, now {seqlens[i]} tokens")
        if not path:
            continue
        # The sequence goes on as if its tokens had come one by one: the last one's attention is what it was above.
        last = q[i : i + 1, path[-1] : path[-1] + 1]
        alone, _ = mla_cupy.mla_decode(last, kv_cache, block_table[i : i + 1], seqlens[i : i + 1], scale=SCALE)
        error = np.abs(alone[0, 0].astype(np.float32) - out[i, path[-1]].astype(np.float32)).max()
        print(f"         attention of its last token alone differs by {error:.1e}")


if __name__ == "__main__":
    main()
