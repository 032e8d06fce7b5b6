"""The specification of every operation, in NumPy and float64, written to be read.

Functions have the names and arguments of the public ones. Every kernel is judged against them, and they answer where
there is no GPU. `layer` holds the textbook MLA layer around the attention.
"""

from mla_cupy.reference.dense_decode import mla_decode
from mla_cupy.reference.layer import MlaConfig, MlaWeights, mla_layer, random_weights
from mla_cupy.reference.merge import merge_states
from mla_cupy.reference.sparse import sparse_mla_backward, sparse_mla_forward

__all__ = [
    "MlaConfig",
    "MlaWeights",
    "merge_states",
    "mla_decode",
    "mla_layer",
    "random_weights",
    "sparse_mla_backward",
    "sparse_mla_forward",
]
