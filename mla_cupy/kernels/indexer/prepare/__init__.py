"""Index queries and keys: RoPE, Hadamard transform, quantisation, and the cache of keys."""

from mla_cupy.kernels.indexer.prepare.pipeline import APPEND_KEYS, GATHER_KEYS, PREPARE_K, PREPARE_Q

__all__ = ["APPEND_KEYS", "GATHER_KEYS", "KERNELS", "PREPARE_K", "PREPARE_Q"]

KERNELS = (*PREPARE_Q.kernels, *GATHER_KEYS.kernels)
