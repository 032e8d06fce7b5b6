"""One file per kernel: what it is, what it can take, how it is launched."""

from mla_cupy.launchers import (
    decode_schedule,
    dense_decode_generic,
    dense_decode_sm90_delayed,
    dense_decode_sm90_seesaw,
    merge_states,
    sparse_backward_generic,
    sparse_backward_sm90,
    sparse_backward_sm90_pair,
    sparse_backward_sm100,
    sparse_backward_sm100_ws,
    sparse_bounds,
    sparse_delta,
    sparse_dkv,
    sparse_forward_sm90,
    sparse_forward_small_sm90,
    sparse_norms,
    sparse_rounders,
    sparse_rows,
    sparse_sink,
    split_combine,
)
from mla_cupy.launchers.spec import KernelSpec

#: Every kernel of the package, by name.
SPECS: dict[str, KernelSpec] = {
    module.SPEC.name: module.SPEC
    for module in (
        dense_decode_sm90_delayed,
        dense_decode_sm90_seesaw,
        dense_decode_generic,
        decode_schedule,
        split_combine,
        merge_states,
        sparse_rows,
        sparse_forward_sm90,
        sparse_forward_small_sm90,
        sparse_delta,
        sparse_sink,
        sparse_norms,
        sparse_bounds,
        sparse_rounders,
        sparse_backward_sm90,
        sparse_backward_sm90_pair,
        sparse_backward_sm100,
        sparse_backward_sm100_ws,
        sparse_backward_generic,
        sparse_dkv,
    )
}
