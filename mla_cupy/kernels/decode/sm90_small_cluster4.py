"""Host side of `decode/sm90_small_cluster4.cu`."""

from mla_cupy.kernels.decode import sm90_small_cluster

KERNEL = sm90_small_cluster.kernel(4)
