"""Host side of `decode/sm90_small_cluster8.cu`."""

from mla_cupy.kernels.decode import sm90_small_cluster

KERNEL = sm90_small_cluster.kernel(8)
