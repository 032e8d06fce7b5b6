"""The public operations: what they mean, what they check, how they run."""

from mla_cupy.ops.decode import mla_decode
from mla_cupy.ops.decode_plan import DecodePlan, plan_decode
from mla_cupy.ops.merge import merge_states
from mla_cupy.ops.sparse_backward import sparse_mla_backward
from mla_cupy.ops.sparse_forward import sparse_mla_forward

__all__ = ["DecodePlan", "merge_states", "mla_decode", "plan_decode", "sparse_mla_backward", "sparse_mla_forward"]
