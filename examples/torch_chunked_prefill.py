"""Chunked prefill over a paged cache in PyTorch: one CUDA graph, replayed for each chunk of the context.

Each sequence has a context in the cache and some new tokens. A replay finds the slots of the next chunk on the device,
reads them, expands them to keys and values per head, attends, and merges: the host sets nothing and waits for nothing.
Without a GPU the same steps run on the CPU, without the graph, with smaller sizes and in some 5 seconds. The result is
compared with one call over all keys.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

import mla_cupy
import mla_cupy.torch as mla
from mla_cupy import Packed
from mla_cupy.cache_formats import FORMATS

PAGE_SIZE, LATENT, NOPE, ROPE, D_V = 64, 512, 128, 64, 128
TOLERANCE = 2e-2
"""Error allowed in bfloat16, relative to the largest value."""
SIZES = {
    "batch": "sequences",
    "tokens": "new tokens of each sequence",
    "context": "tokens of the longest context",
    "chunk": "tokens of a chunk",
    "heads": "heads",
}
DEFAULTS = {
    "gpu": {"batch": 2, "tokens": 512, "context": 20000, "chunk": 8192, "heads": 16},
    "cpu": {"batch": 2, "tokens": 32, "context": 1500, "chunk": 512, "heads": 4},
}


class ChunkedPrefill:
    """Everything that a chunk reads and writes: a graph remembers where it is."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        b, h, generator = options.batch, options.heads, torch.Generator().manual_seed(0)
        self.share, self.device = options.chunk // b, device
        self.new = torch.full((b,), options.tokens, dtype=torch.int32, device=device)
        self.context = torch.randint(0, options.context + 1, (b,), generator=generator).to(device, torch.int32)
        self.context[0] = options.context

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

        max_pages = -(-(options.context + options.tokens) // PAGE_SIZE)
        pages = torch.randperm(b * max_pages, generator=generator)
        self.block_table = pages.view(b, max_pages).to(device, torch.int32)
        record = FORMATS[options.record]
        shape = b * max_pages, PAGE_SIZE, record.width
        self.cache = torch.zeros(shape, dtype=getattr(torch, record.dtype), device=device)
        self.kv_b_proj = random(LATENT, h * (NOPE + D_V)) * LATENT**-0.5
        self.q = random(b * options.tokens, h, NOPE + ROPE)
        self.earlier, self.current = random(int(self.context.sum()), LATENT + ROPE), random(len(self.q), LATENT + ROPE)
        self._write(torch.zeros_like(self.context), self.context, self.earlier)
        self._write(self.context, self.new, self.current)

        self.starts_q = torch.arange(0, len(self.q) + 1, options.tokens, dtype=torch.int32, device=device)
        self.starts, self.lengths = torch.zeros_like(self.context), torch.zeros_like(self.context)
        self.slots = torch.zeros(b * self.share, dtype=torch.int32, device=device)
        self.starts_kv = torch.zeros(b + 1, dtype=torch.int32, device=device)
        self.rows = torch.zeros(len(self.slots), LATENT + ROPE, dtype=torch.bfloat16, device=device)
        self.kv = torch.zeros(len(self.slots), h * (NOPE + D_V), dtype=torch.bfloat16, device=device)
        self.out = torch.zeros(len(self.q), h, D_V, device=device)
        self.lse = torch.zeros(len(self.q), h, device=device)
        self.workspace: torch.Tensor | None = None
        if device != "cpu":
            nbytes = mla_cupy.workspace_bytes(mla_cupy.mla_prefill, *self._operands(), **self._options())
            self.workspace = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def _write(self, starts: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor) -> None:
        slots, _ = mla.cache_slots(self.block_table, starts, lengths, page_size=PAGE_SIZE, max_tokens=len(tokens))
        mla.cache_append(tokens[:, :LATENT].contiguous(), tokens[:, LATENT:].contiguous(), self.cache, slots)

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kv = self.kv.view(len(self.kv), -1, NOPE + D_V)
        return self.q, kv[..., :NOPE], kv[..., NOPE:]

    def _options(self) -> dict[str, Any]:
        packed = Packed(self.starts_q, self.starts_kv)
        state = {"state_out": self.out, "state_lse": self.lse, "out": self.out, "lse": self.lse}
        return {"packed": packed, **state, "k_rope": self.rows[:, LATENT:], "causal": False}

    def begin(self) -> None:
        """Back to the first chunk, with an empty state."""
        self.starts.zero_()
        self.lse.fill_(-torch.inf)

    def attend_to_chunk(self) -> None:
        """Attend to the next chunk: this is what a graph holds."""
        torch.clamp(self.context - self.starts, 0, self.share, out=self.lengths)
        sizes = {"page_size": PAGE_SIZE, "max_tokens": len(self.slots), "num_pages": len(self.cache)}
        mla.cache_slots(
            self.block_table, self.starts, self.lengths, **sizes, slots=self.slots, cu_seqlens=self.starts_kv
        )
        mla.cache_gather(self.cache, self.slots, out=self.rows)
        torch.mm(self.rows[:, :LATENT], self.kv_b_proj, out=self.kv)
        mla.mla_prefill(*self._operands(), **self._options(), workspace=self.workspace)
        self.starts += self.share

    def attend_to_current(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from the new tokens to one another, which completes the result."""
        k, v, k_rope = self._expand(self.current)
        packed = Packed(self.starts_q, self.starts_q)
        return mla.mla_prefill(
            self.q, k, v, k_rope=k_rope, packed=packed, state_out=self.out, state_lse=self.lse, out_dtype=torch.float32
        )

    def _expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kv = (rows[:, :LATENT] @ self.kv_b_proj).view(len(rows), -1, NOPE + D_V)
        return kv[..., :NOPE], kv[..., NOPE:], rows[:, LATENT:]

    def in_one_call(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over keys and values of all tokens: the contexts read back from the cache, and the new ones."""
        lengths = self.context + self.new
        total, none = int(lengths.sum()), torch.zeros_like(lengths)
        slots, starts = mla.cache_slots(self.block_table, none, lengths, page_size=PAGE_SIZE, max_tokens=total)
        rows = mla.cache_gather(self.cache, slots, out_dtype=torch.bfloat16)
        for end, tokens in zip(starts[1:].tolist(), self.current.chunk(len(self.new)), strict=True):
            rows[end - len(tokens) : end] = tokens
        k, v, k_rope = self._expand(rows)
        packed = Packed(self.starts_q, starts)
        return mla.mla_prefill(self.q, k, v, k_rope=k_rope, packed=packed, out_dtype=torch.float32)


def run_in_graph(prefill: ChunkedPrefill, chunks: int) -> None:
    """One chunk as it is, which loads the kernels; then replays, from the first chunk on."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        prefill.attend_to_chunk()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill.attend_to_chunk()
    prefill.begin()
    for _ in range(chunks):
        graph.replay()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in SIZES.items():
        default = f"default: {DEFAULTS['gpu'][name]}; on the CPU {DEFAULTS['cpu'][name]}"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{text} ({default})")
    parser.add_argument("--record", choices=("bf16", "v32"), default="v32", help="of the cache (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    for name, size in DEFAULTS["cpu" if options.device == "cpu" else "gpu"].items():
        setattr(options, name, size if getattr(options, name) is None else getattr(options, name))
    if min(options.batch, options.tokens, options.context, options.heads) < 1 or options.chunk < options.batch:
        parser.error("sizes must be at least 1, and --chunk at least --batch")
    prefill = ChunkedPrefill(options, options.device)
    chunks = -(-options.context // prefill.share)
    prefill.begin()
    if options.device == "cpu":
        for chunk in range(chunks):
            prefill.attend_to_chunk()
            print(f"chunk {chunk + 1} of {chunks}", flush=True)
    else:
        run_in_graph(prefill, chunks)
    out, lse = prefill.attend_to_current()
    whole, whole_lse = prefill.in_one_call()
    way = "by hand" if options.device == "cpu" else "replays of one graph"
    print(f"contexts of {prefill.context.tolist()} tokens: {chunks} chunks of {options.chunk}, {way}")
    error, lse_error = float((out - whole).abs().max()), float((lse - whole_lse).abs().max())
    print(f"largest difference from one call: out {error:.2e}, lse {lse_error:.2e}")
    close = error < TOLERANCE * float(whole.abs().max()) and lse_error < TOLERANCE * float(whole_lse.abs().max())
    print("equal to one call" if close else "DIFFERENT")
    return 0 if close else 1


if __name__ == "__main__":
    sys.exit(main())
