"""Tables of kept results in Markdown, and the page that shows them where directives do not run.

`python3 docs/_ext/result_tables.py` writes `bench/results/README.md`, in the order of `docs/benchmarks.md`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))

from bench.core import report  # noqa: E402

RESULTS = REPOSITORY / "bench" / "results"
BENCHMARKS = REPOSITORY / "docs" / "benchmarks.md"
PAGE = RESULTS / "README.md"
HEAD = """# Rows of the benchmarks

The tables of [benchmarks](../../docs/benchmarks.md), which describes the cases and the method. "1.10x": mla_cupy is
1.10 times as fast. Written by `python3 docs/_ext/result_tables.py`.
"""
OWN = "mla_cupy"
NAMES = {
    "flashmla": "FlashMLA",
    "flashmla_fp8": "FlashMLA in FP8",
    "fa3": "FA3",
    "cudnn": "cudnn-frontend",
    "deep_gemm": "DeepGEMM",
    "torch": "torch.topk",
    "flash": "FlashAttention-2",
    "rows": "16-bit rows",
    "plain": "mla_decode",
}
"""Names of implementations; the others have the name of the result file."""

Row = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def duration(microseconds: float) -> str:
    """Duration with three or four digits."""
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds / 1000:.2f} ms"


def rates(row: Row) -> str:
    """Rates of the row's call: what it computes, if it does, and moves per second."""
    seconds = row["timing"]["us_median"] * 1e-6
    computed = [f"{row['flops'] / seconds * 1e-12:.0f} TFLOP/s"] if row["flops"] else []
    return ", ".join([*computed, f"{row['bytes'] / seconds * 1e-12:.2f} TB/s"])


def copied(row: Row) -> str:
    """A copy of as many bytes, and its time over ours."""
    copy = row["figures_us"]["copy"]
    return f"{duration(copy)}, {copy / row['timing']['us_median']:.2f}x"


def compared(own: Row, peer: Row | None) -> str:
    """A peer's time, and that over ours."""
    if peer is None:
        return ""
    return f"{duration(peer['timing']['us_median'])}, {own['speed_vs'][peer['implementation']]:.2f}x"


def markdown(rows: list[Row]) -> str:
    """One line per case of each operation: our time, what it amounts to, and the peers."""
    timed = [row for row in rows if row["timing"]]
    return "\n".join(_of_operation([row for row in timed if row["op"] == op]) for op in _in_order(timed, "op"))


def _in_order(rows: list[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


def _of_operation(rows: list[Row]) -> str:
    own = {row["case"]: row for row in rows if row["implementation"] == OWN}
    by_name = {(row["case"], row["implementation"]): row for row in rows}
    found = [name for name in _in_order(rows, "implementation") if name != OWN]
    peers = sorted(found, key=lambda name: [*NAMES, name].index(name))
    beside_copy = all("copy" in row["figures_us"] for row in own.values())
    lines = [
        [f"`{case}`", duration(row["timing"]["us_median"]), rates(row)]
        + ([copied(row)] if beside_copy else [])
        + [compared(row, by_name.get((case, peer))) for peer in peers]
        for case, row in own.items()
    ]
    env, limits = next(iter(own.values()))["env"], next(iter(own.values()))["limits"]
    head = ["case", OWN, "rates", *(["a copy"] if beside_copy else []), *(NAMES.get(peer, peer) for peer in peers)]
    where = f"**`{rows[0]['op']}`**, {env['gpu']}, driver {env['driver']}, NVRTC {env['nvrtc']}, {env['date'][:10]}."
    if limits["copy_tbps"] is not None:  # a run with --no-limits has not measured them
        copy, gemm = limits["copy_tbps"], limits["gemm_tflops"]
        where += f" In the same run a copy reached {copy:.2f} TB/s and a GEMM {gemm:.0f} TFLOP/s."
    return f"{where}\n\n" + table(head, [[cell.replace(" ", "\u00a0") for cell in line] for line in lines])


def page() -> str:
    """Text of the page: a heading and the tables for each file that the benchmarks name."""
    files = re.findall(r"^```\{bench-table\} (\S+)$", BENCHMARKS.read_text(), re.MULTILINE)
    parts = [f"## {file.removesuffix('.jsonl')}\n\n{markdown(report.read(RESULTS / file))}" for file in files]
    return "\n".join([HEAD, *parts]).replace("\u00a0", " ")


if __name__ == "__main__":
    PAGE.write_text(page())
