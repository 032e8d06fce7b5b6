"""Steps after the attention kernel of dense decode: the merge of split requests, and the multiplication by W_UV.

Every class defines where the attention kernel writes results (`place`, its strides, `out_is_fp32`), whether a combine
runs (`combines`), and the finish's additions to the workspace, to the builds and, after the combine, to the steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mla_cupy.kernels.attention import combine, combine_project
from mla_cupy.kernels.attention.combine_project import LATENTS
from mla_cupy.kernels.attention.projection import Build
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.decode.queries import query_strides
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.pipeline import Call, Step
from mla_cupy.kernels.projection import results
from mla_cupy.kernels.spec import KernelSpec, Variant


@dataclass(frozen=True)
class _Unprojected:
    """Results are the caller's `out`."""

    unit_tiles: ClassVar[int] = 0

    def place(self, call: Call) -> str:
        """Name of the array that the attention kernel writes results to."""
        return call.name("out")

    def out_strides(self, call: Call, problem: DecodeProblem) -> tuple[int, int, int]:
        """Strides of the axes b, s_q and h_q, in elements."""
        return query_strides(call, "out")

    def out_is_fp32(self, call: Call) -> bool:
        """True if the attention kernel writes results in float32."""
        return call.view("out").dtype == "float32"

    def blocks(self, resident: int) -> int:
        """Blocks of the combine, at most `resident`."""
        return resident

    def workspace(self, problem: DecodeProblem, b: int | None) -> dict[str, int]:
        """Parts of the workspace for `b` sequences, and their sizes."""
        return {}

    def builds(self) -> list[tuple[KernelSpec[Any], Variant]]:
        """Kernels after the combine."""
        return []

    def steps(self, call: Call, params: DecodeParams) -> list[Step]:
        """Launches after the combine; `params` are the attention kernel's."""
        return []


@dataclass(frozen=True)
class Merge(_Unprojected):
    """The combine merges partial results."""

    combines: ClassVar[bool] = True


@dataclass(frozen=True)
class LeavePartials(_Unprojected):
    """Partial results stay in the workspace, for the caller to merge."""

    combines: ClassVar[bool] = False


@dataclass(frozen=True)
class _Projected:
    """Results are latents in the workspace, which a kernel multiplies by W_UV."""

    build: Build

    def place(self, call: Call) -> str:
        """See `_Unprojected.place`."""
        return LATENTS

    def out_strides(self, call: Call, problem: DecodeProblem) -> tuple[int, int, int]:
        """See `_Unprojected.out_strides`."""
        return combine_project.latents_strides(problem.s_q, problem.h_q)

    def builds(self) -> list[tuple[KernelSpec[Any], Variant]]:
        """See `_Unprojected.builds`."""
        return [self.build[:2]]


@dataclass(frozen=True)
class ProjectInMerge(_Projected):
    """One kernel replaces the combine: it merges and projects. `has_pieces`: the schedule is batch-invariant."""

    has_pieces: bool = False

    combines: ClassVar[bool] = False
    unit_tiles: ClassVar[int] = 0

    def out_is_fp32(self, call: Call) -> bool:
        """See `_Unprojected.out_is_fp32`."""
        return True

    def blocks(self, resident: int) -> int:
        """See `_Unprojected.blocks`."""
        return resident

    def workspace(self, problem: DecodeProblem, b: int | None) -> dict[str, int]:
        """See `_Unprojected.workspace`."""
        return _latents(problem, b, apart=False)

    def steps(self, call: Call, params: DecodeParams) -> list[Step]:
        """See `_Unprojected.steps`."""
        return [combine_project.combine(self.build, call, params, has_pieces=self.has_pieces)]


@dataclass(frozen=True)
class ProjectAfterMerge(_Projected):
    """The combine merges, and a separate kernel projects: it may start before the combine has ended."""

    combines: ClassVar[bool] = True
    unit_tiles: ClassVar[int] = 1

    def out_is_fp32(self, call: Call) -> bool:
        """See `_Unprojected.out_is_fp32`."""
        return False

    def blocks(self, resident: int) -> int:
        """See `_Unprojected.blocks`."""
        return combine.blocks_beside_results(resident)

    def workspace(self, problem: DecodeProblem, b: int | None) -> dict[str, int]:
        """See `_Unprojected.workspace`."""
        return _latents(problem, b, apart=True)

    def steps(self, call: Call, params: DecodeParams) -> list[Step]:
        """See `_Unprojected.steps`."""
        return [results.project(self.build, call)]


Finish = Merge | LeavePartials | ProjectInMerge | ProjectAfterMerge


def _latents(problem: DecodeProblem, b: int | None, apart: bool) -> dict[str, int]:
    assert b is not None
    return {LATENTS: combine_project.latents_nbytes(b * problem.s_q * problem.h_q, apart)}
