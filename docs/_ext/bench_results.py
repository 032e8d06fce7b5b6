"""Tables and figures of kept results in `bench/results`: the directive `bench-table FILE`, and `_generated/*.svg`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from result_tables import RESULTS, markdown
from tables import MarkdownDirective

from bench.core import plot, report

DOCS = Path(__file__).resolve().parents[1]
FIGURES_OF = (
    "decode-h200-2026-11-23.jsonl",
    "sparse-h200-2026-11-22.jsonl",
    "sparse-backward-h200-2026-11-23.jsonl",
)


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
