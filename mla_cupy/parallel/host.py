"""Partial results through the rendezvous: slow but correct, without a GPU."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from mla_cupy import arrays
from mla_cupy.dtypes import FLOATS, TABLE
from mla_cupy.errors import DeviceError, DTypeError, explain
from mla_cupy.ops.checks import check_lse_base
from mla_cupy.ops.merge import merge_states
from mla_cupy.parallel.transport import OfGroup, Result, check_alike, heads_per_rank


class HostTransport(OfGroup):
    """NumPy or PyTorch arrays on the host; every rank receives the partial results of all ranks.

    Parameters
    ----------
    group : Group
        A `Rendezvous`, or a member of a `LocalGroup`.
    """

    def merge(self, outs: Any, lses: Any, result: Result) -> tuple[Any, Any]:
        """See `Transport.merge`."""
        check_lse_base(result.lse_options.lse_base)
        family = arrays.common_family({"outs": outs, "lses": lses})
        if family.on_gpu:
            raise DeviceError(explain("outs", f"an array of {family.name} on the GPU", "one on the host"))
        out, lse = np.asarray(family.adopt(outs)), np.asarray(family.adopt(lses))
        heads = heads_per_rank(out.shape, lse.shape, self.world)
        mine = slice(self.rank * heads, (self.rank + 1) * heads)
        name = arrays.NUMPY.view(out, "outs").dtype
        if name not in FLOATS:
            raise DTypeError(explain("outs.dtype", name, "float32, bfloat16 or float16"))
        if lse.dtype != np.float32:
            raise DTypeError(explain("lses.dtype", lse.dtype, "float32"))
        kind = json.dumps([out.shape, name, lse.shape, result.lse_options.lse_base]).encode()
        gathered = self._group.gather(kind + b"\n" + out.tobytes() + lse.tobytes())
        calls, _, payloads = zip(*(payload.partition(b"\n") for payload in gathered), strict=True)
        check_alike(calls, self.rank)
        all_outs, all_lses = [], []
        for data in payloads:
            numbers = np.frombuffer(data, TABLE[name].numpy, out.size).reshape(out.shape)
            all_outs.append(numbers[:, :, mine])
            all_lses.append(np.frombuffer(data, np.float32, lse.size, numbers.nbytes).reshape(lse.shape)[:, mine])
        merged = merge_states(
            *(family.release(np.stack(parts)) for parts in (all_outs, all_lses)),
            **result._replace(stream=None).arguments,
        )
        return merged[0], merged[1]
