"""The roofline drawing of a result file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import BenchError
from .report import microseconds


def roofline(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws every timed row over the limits of its run; the file's suffix (png, svg, pdf) decides the format."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise BenchError(f"plot needs matplotlib ({error}); pip install 'mla_cupy[bench]'") from error
    timed = [row for row in rows if microseconds(row) is not None]
    if not timed:
        raise BenchError("plot: the file has no row that was timed")

    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    intensities = [row["flops"] / row["bytes"] for row in timed]
    _draw_limits(axes, timed[-1]["limits"], min(intensities) / 2, max(intensities) * 2)
    for marker, name in zip("osD^vP*X" * 8, dict.fromkeys(row["implementation"] for row in timed), strict=False):
        own = [(x, row["tflops"]) for x, row in zip(intensities, timed, strict=True) if row["implementation"] == name]
        axes.plot(*zip(*own, strict=True), marker, label=name, alpha=0.8)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte that must move", ylabel="TFLOP/s")
    env = timed[-1]["env"]
    operations = ", ".join(dict.fromkeys(row["op"] for row in timed))
    axes.set_title(f"{operations} on {env.get('gpu')}, {str(env.get('date'))[:10]}")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # an unwritable place, or a suffix that is no format
        raise BenchError(f"plot: cannot write {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _draw_limits(axes: Any, limits: dict[str, Any], low: float, high: float) -> None:
    """The sloped line of the copy bandwidth and the flat one of the GEMM rate, as far as they were measured."""
    copy, gemm = limits["copy_tbps"], limits["gemm_tflops"]
    if copy:
        end = min(high, gemm / copy) if gemm else high
        axes.plot([low, end], [low * copy, end * copy], "k-", label=f"copy {copy:.2f} TB/s")
    if gemm:
        start = max(low, gemm / copy) if copy else low
        axes.plot([start, high], [gemm, gemm], "k--", label=f"GEMM {gemm:.0f} TFLOP/s")
