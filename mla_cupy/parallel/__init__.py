"""Context-parallel decode: several GPUs share the tokens of a sequence, with one process per GPU or one for all.

Token t is in the cache of rank t % world. Every rank decodes all heads over its own tokens, then the ranks exchange
their partial results, and each merges the results of its own heads. `ContextParallel` does that over a transport:

- `PeerTransport`: GPUs of one host that reach each other's memory; one launch exchanges and merges;
- `NcclTransport`: any GPUs that NCCL connects, by CuPy or nccl4py, on one host or on many;
- `HostTransport`: arrays on the host, through the rendezvous; for tests and trials without a GPU.

Processes meet at a `Rendezvous`, threads of one process in a `LocalGroup`.
"""

from mla_cupy.parallel.context import ContextParallel
from mla_cupy.parallel.group import Group, LocalGroup
from mla_cupy.parallel.host import HostTransport
from mla_cupy.parallel.nccl import NcclTransport
from mla_cupy.parallel.peer import PeerTransport
from mla_cupy.parallel.rendezvous import Rendezvous
from mla_cupy.parallel.transport import Transport
from mla_cupy.parallel.zigzag import Zigzag

__all__ = [
    "ContextParallel",
    "Group",
    "HostTransport",
    "LocalGroup",
    "NcclTransport",
    "PeerTransport",
    "Rendezvous",
    "Transport",
    "Zigzag",
]


def __dir__() -> list[str]:
    return __all__
