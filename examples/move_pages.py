"""Moves the pages of a sequence from one process to another, and converts them by what `formats --json` says.

One process writes tokens to a cache, and sends the bytes of their pages, the page size and the record's description as
JSON. The other one has a cache of plain rows with smaller pages: it reads each field by that description alone, and
multiplies by the scales. In the end its rows equal what `cache_gather` reads in the first process. Runs in a second,
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

import ml_dtypes
import numpy as np

import mla_cupy
from mla_cupy import PagedKVCache

TOKENS = 100
DTYPES = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def send(pipe: Connection, record: str) -> None:
    """Write tokens, send their pages, then the rows that a reader must find."""
    cache = PagedKVCache(record, num_pages=8, page_size=32, max_seqs=1, max_pages=8, device="cpu")
    sequence, _ = cache.allocate()
    step = cache.extend([sequence], TOKENS)
    draw, parts = np.random.default_rng(0), cache.formats["kv"]
    latent = draw.standard_normal((TOKENS, parts.d_latent)).astype(np.float32)
    rope = draw.standard_normal((TOKENS, 64)).astype(np.float32) if parts.d_rope else None
    cache.append(step, 0, latent, rope)
    command = [sys.executable, "-m", "mla_cupy", "formats", "--json"]
    described = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)[record]
    pages = cache.layer(0)[cache.pages(sequence)]
    pipe.send((described, 32, pages.tobytes()))
    pipe.send(mla_cupy.cache_gather(cache.layer(0), step.slots, kv_format=record, out_dtype="float32"))


def read_field(described: dict[str, Any], name: str, page_size: int, pages: np.ndarray[Any, Any]) -> Any:
    """One field of all tokens, (pages, page_size, elements), in float32."""
    field = next(field for field in described["fields"] if field["name"] == name)
    begin = page_size * sum(described["planes"][: field["plane"]])
    plane = pages[:, begin : begin + page_size * field["token_stride"]].reshape(len(pages), page_size, -1)
    raw = np.ascontiguousarray(plane[..., field["offset"] : field["offset"] + field["nbytes"]])
    kind = field["kind"]
    if kind == "float4_e2m1fn":
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        values = np.concatenate([values, -values])
        return np.stack([values[raw & 15], values[raw >> 4]], -1).reshape(*raw.shape[:2], -1)
    if kind == "float8_e8m0fnu":
        return np.where(raw == 255, np.float32(np.nan), np.exp2(raw.astype(np.float32) - 127))
    return raw.view(DTYPES.get(kind, np.float32)).astype(np.float32)


def rows_of(described: dict[str, Any], page_size: int, data: bytes) -> Any:
    """The tokens' rows, latent and then RoPE, (pages * page_size, columns), in float32."""
    pages = np.frombuffer(data, np.uint8).reshape(-1, page_size * described["token_bytes"])
    names = [name for name in ("latent", "rope") if any(field["name"] == name for field in described["fields"])]
    columns = {name: read_field(described, name, page_size, pages) for name in names}
    if described["group"]:
        scales = np.repeat(read_field(described, "scales", page_size, pages), described["group"], -1)
        begin = 0
        for name, values in columns.items():
            if name in described["scaled_fields"]:
                columns[name] = values * scales[..., begin : begin + values.shape[-1]]
            begin += values.shape[-1]
    return np.concatenate([*columns.values()], -1).reshape(len(pages) * page_size, -1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", choices=("v32", "v4", "v41", "v41-fp4", "bf16", "fp16"), default="v32")
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    sender = multiprocessing.get_context("spawn").Process(target=send, args=(there, options.record))
    sender.start()
    described, page_size, data = here.recv()
    exact = here.recv()
    sender.join()

    rows = rows_of(described, page_size, data)[:TOKENS]
    plain = "bf16" if rows.shape[1] == 576 else "bf16-nope"
    cache = PagedKVCache(plain, num_pages=32, page_size=8, max_seqs=1, max_pages=32, device="cpu")
    step = cache.extend([cache.allocate()[0]], TOKENS)
    latent, rope = (np.ascontiguousarray(part) for part in np.split(rows, [512], axis=1))
    cache.append(step, 0, latent, rope if rope.size else None)
    mine = mla_cupy.cache_gather(cache.layer(0), step.slots)
    print(f"{len(data):,} bytes of {options.record} pages, {page_size} tokens each")
    equal = bool((rows == exact).all() and (mine == exact.astype(ml_dtypes.bfloat16)).all())
    print(f"{TOKENS} rows of {rows.shape[1]} columns {'equal' if equal else 'DIFFER from'} what cache_gather reads")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
