"""Tables and figures of kept results in `bench/results`: the directive `bench-table FILE`, and `_generated/*.svg`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tables import MarkdownDirective, table

from bench.core import plot, report

DOCS = Path(__file__).resolve().parents[1]
RESULTS = DOCS.parent / "bench" / "results"
FIGURES_OF = ("decode-h200-2026-11-22.jsonl", "sparse-h200-2026-11-21.jsonl")
PEERS = {"flashmla": "FlashMLA", "fa3": "FA3", "cudnn": "cudnn-frontend", "deterministic": "deterministic"}


def duration(microseconds: float) -> str:
    """With three or four digits."""
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds / 1000:.2f} ms"


def rates(row: dict[str, Any]) -> str:
    """What the row's call computes and moves per second."""
    seconds = row["timing"]["us_median"] * 1e-6
    return f"{row['flops'] / seconds * 1e-12:.0f} TFLOP/s, {row['bytes'] / seconds * 1e-12:.2f} TB/s"


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line per case of each operation: our time, what it amounts to, and the peers."""
    timed = [row for row in rows if row["timing"]]
    text = []
    for op in dict.fromkeys(row["op"] for row in timed):
        own = {row["case"]: row for row in timed if row["op"] == op and row["implementation"] == "mla_cupy"}
        others = {(row["case"], row["implementation"]): row for row in timed if row["op"] == op}
        peers = [name for name in PEERS if any((case, name) in others for case in own)]
        lines = [
            [
                f"`{case}`",
                duration(row["timing"]["us_median"]),
                rates(row),
                *(
                    f"{duration(others[case, peer]['timing']['us_median'])}, {row['speed_vs'][peer]:.2f}x"
                    if (case, peer) in others
                    else ""
                    for peer in peers
                ),
            ]
            for case, row in own.items()
        ]
        env, limits = next(iter(own.values()))["env"], next(iter(own.values()))["limits"]
        head = ["case", "mla_cupy", "rates", *(PEERS[peer] for peer in peers)]
        text.append(
            f"**`{op}`**, {env['gpu']}, driver {env['driver']}, NVRTC {env['nvrtc']}, {env['date'][:10]}. In the same "
            f"run a copy reached {limits['copy_tbps']:.2f} TB/s and a GEMM {limits['gemm_tflops']:.0f} TFLOP/s.\n\n"
            + table(head, [[cell.replace(" ", "\u00a0") for cell in line] for line in lines])
        )
    return "\n".join(text)


class BenchTable(MarkdownDirective):
    """The tables of a result file."""

    required_arguments = 1

    def markdown(self) -> str:
        """Computed from the rows."""
        path = RESULTS / self.arguments[0]
        self.env.note_dependency(str(path))
        return markdown(report.read(path))


def _draw(app: Any) -> None:
    """Draw the figures, unless they are newer than the results."""
    for name in FIGURES_OF:
        source, mark = RESULTS / name, DOCS / "_generated" / f"{name}.drawn"
        if not mark.exists() or mark.stat().st_mtime < source.stat().st_mtime:
            plot.draw(report.read(source), mark.parent, "svg")
            mark.touch()


def setup(app: Any) -> dict[str, Any]:
    """For Sphinx."""
    app.connect("builder-inited", _draw)
    app.add_directive("bench-table", BenchTable)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
