"""Launcher of `generic/sparse_sink.cu`."""

from __future__ import annotations

from mla_cupy.launchers.spec import KernelSpec, Launch, Params, Variant, any_arch, argument_block

HEADS_PER_BLOCK = 32

PARAMS = Params(sink_sums="u8", d_sink="u8", spans="i4", h_q="i4")

SPEC = KernelSpec(
    "sparse_sink",
    "generic/sparse_sink.cu",
    variants=(Variant(),),
    core=(Variant(),),
    supports_arch=any_arch,
    params=PARAMS,
)


def launch(kernel: Launch, sink_sums: int, d_sink: int, spans: int, h_q: int, stream: int) -> None:
    """Add the partial sums of `sparse_delta` up to the gradient of the sink, (h_q,)."""
    args = argument_block(PARAMS.size)
    PARAMS.pack_into(args.views[0], sink_sums, d_sink, spans, h_q)
    kernel((-(-h_q // HEADS_PER_BLOCK), 1, 1), args, stream)
