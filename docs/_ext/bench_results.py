"""Tables and figures of kept results in `bench/results`: the directive `bench-table FILE`, and `_generated/*.svg`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from tables import MarkdownDirective, table

from bench.core import plot, report

DOCS = Path(__file__).resolve().parents[1]
RESULTS = DOCS.parent / "bench" / "results"
FIGURES_OF = (
    "decode-h200-2026-11-23.jsonl",
    "sparse-h200-2026-11-22.jsonl",
    "sparse-backward-h200-2026-11-23.jsonl",
)
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


class BenchTable(MarkdownDirective):
    """The tables of a result file."""

    required_arguments = 1

    def markdown(self) -> str:
        """Computed from the rows."""
        return markdown(report.read(self._path))

    def run(self) -> list[nodes.Node]:
        """Return the nodes; a change of the file builds the page again."""
        self.env.note_dependency(str(self._path))
        return super().run()

    @property
    def _path(self) -> Path:
        return RESULTS / self.arguments[0]


def _draw(app: Any) -> None:
    """Draw the figures, unless they are newer than the results."""
    sources, mark = [RESULTS / name for name in FIGURES_OF], DOCS / "_generated" / "figures.drawn"
    if not mark.exists() or mark.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        plot.draw([row for source in sources for row in report.read(source)], mark.parent, "svg")
        mark.touch()


def setup(app: Any) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("builder-inited", _draw)
    app.add_directive("bench-table", BenchTable)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
