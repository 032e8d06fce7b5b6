"""Small hostile calls of every kernel on a GPU: what test_sanitizer.py runs under compute-sanitizer."""

from __future__ import annotations

import mla_cupy
from tests.support.cases import DecodeCase
from tests.support.cases import make as make_decode
from tests.support.gpu import upload
from tests.support.kernels import BACKWARD_KERNELS, DECODE_KERNELS, FORWARD_KERNELS
from tests.support.sparse_cases import SparseCase
from tests.support.sparse_cases import make as make_sparse

DECODE = (
    DecodeCase(b=3, seqlens=(130, 0, 65), h_q=16),
    DecodeCase(b=2, seqlens=(70, 200), s_q=2, h_q=64, page_size=24, missing_pages=1),
)
SPARSE = (
    SparseCase(s_q=3, s_kv=200, h_q=100, topk=130, lengths=True, sink=True),
    SparseCase(s_q=3, s_kv=90, h_q=16, topk=70, d_qk=512, dtype="float16"),
    SparseCase(s_q=6, s_kv=90, h_q=5, topk=40, sequences=((2, 30), (0, 5), (3, 40)), causal=True),
)


def main() -> None:
    """Call everything once."""
    calls = 0
    for decode in DECODE:
        inputs = [upload(x) for x in make_decode(decode).arguments]
        for name in DECODE_KERNELS:
            try:
                mla_cupy.mla_decode(*inputs, kernel=name)
            except mla_cupy.UnsupportedDeviceError:
                continue
            calls += 1
    for case in SPARSE:
        sparse = make_sparse(case)
        named = {**{name: upload(x) for name, x in sparse.optional.items()}, "causal": case.causal}
        arguments = [upload(x) for x in sparse.backward_arguments]
        q, kv, _, _, _, indices = arguments
        for name in FORWARD_KERNELS:
            try:
                mla_cupy.sparse_mla_forward(q, kv, indices, **named, kernel=name)
            except mla_cupy.UnsupportedDeviceError:
                continue
            calls += 1
        for name in BACKWARD_KERNELS:
            for deterministic in (False, True):
                try:
                    mla_cupy.sparse_mla_backward(*arguments, **named, kernel=name, deterministic=deterministic)
                except mla_cupy.UnsupportedDeviceError:
                    continue
                calls += 1
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
