"""Host side of `attention/generic_forms.cu`, and what its faster counterparts have in common with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention import generic
from mla_cupy.kernels.attention.kernel import AttentionKernel
from mla_cupy.kernels.params import DecodeFormParams
from mla_cupy.kernels.spec import Variant, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_QK, D_V

FORMS = ("attn_sink", "q_rope", "packed", "out_rope", "window")
"""Forms that all kernels for forms take."""
WITH_FORMS = "forms"
"""Value of the macro of builds with forms, of sources that have others without."""
BUILDS = variants(dtype=HALF, head_dim_qk=(D_QK, D_V))


def wide_variant(problem: Any, device: DeviceInfo) -> Variant:
    """The build of `BUILDS` for a problem."""
    return Variant(dtype=problem.dtype, head_dim_qk=problem.d_qk)


KERNEL: AttentionKernel[Any] = replace(
    generic.KERNEL,
    name="attention_generic_forms",
    about="dense decode as attention_generic, for lengths that vary, windows, queries in two arrays, turned results",
    source="attention/generic_forms.cu",
    params=DecodeFormParams,
    variants=BUILDS,
    core=(),
    variant=wide_variant,
    value_widths=(D_V,),
    forms=FORMS,
)
