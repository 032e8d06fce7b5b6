"""W_UV after decode, as a launch of its own: of results that are merged, in 16 bits."""

from __future__ import annotations

from mla_cupy.kernels.attention import projection
from mla_cupy.kernels.attention.combine_project import LATENTS
from mla_cupy.kernels.attention.projection import Build
from mla_cupy.kernels.param_layout import NULL
from mla_cupy.kernels.params import MergeProjectParams, StatesAddresses
from mla_cupy.kernels.pipeline import Call, Launch


def project(build: Build, call: Call, latents_stride_b_s_h: tuple[int, int, int], *, by_query: bool = False) -> Launch:
    """Multiply what decode has left in `LATENTS`; for `by_query` see `projection.sizes`."""
    s_q = 1 if by_query else call.view("out").shape[1]
    params = MergeProjectParams(
        projection_addresses=projection.addresses(call),
        states_addresses=StatesAddresses(outs=LATENTS, lses=NULL, lse=NULL),
        projection_sizes=projection.sizes(call, build, by_query),
        outs_stride_n_b_s_h_elems=(0, *latents_stride_b_s_h),
        lses_stride_n_b_h_s_elems=(0, 0, 0, 0),
        lse_stride_b_h_s_elems=(0, 0, 0),
        states=1,
        s_q=s_q,
        outs_are_fp32=False,
        to_log2=1.0,
        lse_factor=1.0,
        empty_lse=0.0,
    )
    return projection.launch(build, call, params)
