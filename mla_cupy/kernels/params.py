"""Parameter structs of the kernels, as the host fills them.

Written by `python -m tools.generate` from the CUDA sources, which say what each member means.
"""

from __future__ import annotations

from mla_cupy.kernels.param_layout import F32, I32, I64, NULL, Address, Params


class CombineProjectParams(Params):
    """Struct of `attention/combine_project.cu`."""

    projection_addresses: ProjectionAddresses
    decode_params: DecodeParams
    projection_sizes: ProjectionSizes
    has_pieces: I32


class DecodeParams(Params):
    """Struct of `attention/decode_params.cuh`."""

    q: Address
    kv: Address
    block_table: Address
    seqlens: Address
    schedule: Address
    out: Address
    lse: Address
    attn_sink: Address
    max_logits: Address = NULL
    partial_out: Address
    partial_lse: Address
    partial_max: Address = NULL
    tickets: Address = NULL
    tree_mask: Address = NULL
    q_stride_b_s_h_elems: tuple[I64, I64, I64]
    kv_stride_page_token_h_elems: tuple[I64, I64, I64]
    table_stride_b_page_elems: tuple[I64, I64]
    seqlens_stride_elems: I64
    out_stride_b_s_h_elems: tuple[I64, I64, I64]
    lse_stride_b_h_s_elems: tuple[I64, I64, I64]
    max_stride_b_h_s_elems: tuple[I64, I64, I64] = (0, 0, 0)
    sink_stride_elems: I64
    tree_stride_b_s_elems: tuple[I64, I64] = (0, 0)
    b: I32
    s_q: I32 = 1
    h_q: I32
    h_kv: I32 = 1
    num_pages: I32
    page_size: I32
    max_pages: I32
    num_splits: I32
    causal: I32 = 0
    out_is_fp32: I32
    continued_index: I32
    request_units: I32 = 0
    unit_tiles: I32 = 0
    cp_world: I32 = 1
    cp_rank: I32 = 0
    new_tokens: I32 = -1
    scale_log2: F32
    lse_convention: LseConvention
    value_scale: F32


class Fp8ScaleAddresses(Params):
    """Struct of `attention/fp8_scales.cuh`."""

    q_scales: Address = NULL
    kv_scales: Address = NULL


class DecodeFp8Params(Params):
    """Struct of `attention/fp8_scales.cuh`."""

    fp8_scale_addresses: Fp8ScaleAddresses
    decode_params: DecodeParams
    q_scales_stride_b_s_h_elems: tuple[I64, I64, I64] = (0, 0, 0)
    bf16_partials: I32


class ProjectionAddresses(Params):
    """Struct of `attention/projection.cuh`."""

    w_uv: Address
    gate: Address
    projected: Address


class ProjectionSizes(Params):
    """Struct of `attention/projection.cuh`."""

    w_uv_stride_h_d_elems: tuple[I64, I64]
    gate_stride_b_s_h_elems: tuple[I64, I64, I64]
    projected_stride_b_s_h_elems: tuple[I64, I64, I64]
    tokens: I32
    d_head: I32
    share_tokens: I32
    projected_is_fp32: I32


class QuantizeOutputParams(Params):
    """Struct of `attention/quantize_output.cu`."""

    results: Address
    codes: Address
    scales: Address
    codes_stride_b_s_h_elems: tuple[I64, I64, I64]
    scales_stride_b_s_h_column_elems: tuple[I64, I64, I64, I64]
    num_scales: I64
    s_q: I32
    h_q: I32
    row_scales: I32
    results_are_bf16: I32
    power_of_2: I32


class FormAddresses(Params):
    """Struct of `attention/query_groups.cuh`."""

    groups: Address
    out_cos: Address
    out_sin: Address
    out_positions: Address


class DecodeFormParams(Params):
    """Struct of `attention/query_groups.cuh`."""

    form_addresses: FormAddresses
    decode_rope_params: DecodeRopeParams
    out_cos_stride_elems: I64
    out_sin_stride_elems: I64
    out_positions_stride_b_s_bytes: tuple[I64, I64]
    window: I32
    out_max_position: I32
    out_positions_are_64: I32


class ExtraAddresses(Params):
    """Struct of `attention/record_tokens.cuh`."""

    extra_cache: Address
    extra_indices: Address
    extra_topk_length: Address


class SparseDecodeParams(Params):
    """Struct of `attention/record_tokens.cuh`."""

    extra_addresses: ExtraAddresses
    decode_params: DecodeParams
    indices_stride_s_elems: I64
    extra_page_stride_bytes: I64
    extra_token_stride_bytes: I64
    extra_stride_b_s_k_elems: tuple[I64, I64, I64]
    extra_length_stride_elems: I64
    queries_of_length: I32
    extra_num_pages: I32
    extra_page_size: I32
    extra_topk: I32


class SparseRowsParams(Params):
    """Struct of `attention/row_lists.cu`."""

    indices: Address
    topk_length: Address
    cu_seqlens_q: Address
    cu_seqlens_kv: Address
    rows: Address
    counts: Address
    selected: Address
    indices_stride_b_s_k_elems: tuple[I64, I64, I64]
    topk_length_stride_elems: I64
    cu_seqlens_q_stride_elems: I64
    cu_seqlens_kv_stride_elems: I64
    rows_stride_elems: I64
    s_q: I32
    s_kv: I32
    topk: I32
    b: I32
    causal: I32
    ordered: I32
    queries_of_length: I32
    relative: I32


class DecodeScheduleParams(Params):
    """Struct of `attention/schedule.cu`."""

    seqlens: Address
    schedule: Address
    seqlens_stride_elems: I64
    max_tokens: I64
    b: I32
    num_splits: I32
    merge_cost: I32
    piece_cost: I32
    cp_world: I32
    cp_rank: I32


class RopeAddress(Params):
    """Struct of `attention/split_queries.cuh`."""

    q_rope: Address


class DecodeRopeParams(Params):
    """Struct of `attention/split_queries.cuh`."""

    rope_address: RopeAddress
    decode_params: DecodeParams
    q_rope_stride_b_s_h_elems: tuple[I64, I64, I64]


class AbsorbAddresses(Params):
    """Struct of `cache/absorb.cu`."""

    q_nope: Address
    w_uk: Address
    absorbed: Address


class AbsorbSizes(Params):
    """Struct of `cache/absorb.cu`."""

    q_nope_stride_t_h_elems: tuple[I64, I64]
    w_uk_stride_h_d_elems: tuple[I64, I64]
    absorbed_stride_t_h_elems: tuple[I64, I64]
    t: I32
    d_nope: I32
    parts_log2: I32
    share_tokens: I32


class AbsorbParams(Params):
    """Struct of `cache/absorb.cu`."""

    absorb_addresses: AbsorbAddresses
    cache_prepare_params: CachePrepareParams
    absorb_sizes: AbsorbSizes
    has_rope: I32


class CacheAppendParams(Params):
    """Struct of `cache/append.cu`."""

    latent: Address
    rope: Address
    cache: Address
    slots: Address
    cos: Address
    sin: Address
    positions: Address
    latent_stride_bytes: I64
    rope_stride_bytes: I64
    slots_stride_bytes: I64
    positions_stride_bytes: I64
    cos_stride_elems: I64
    sin_stride_elems: I64
    page_stride_bytes: I64
    token_stride_bytes: I64
    n: I32
    num_pages: I32
    page_size: I32
    max_position: I32
    element: I32
    slots_are_64: I32
    positions_are_64: I32
    interleaved: I32
    power_of_2: I32
    kind: I32
    rope_kind: I32
    latent_chunks: I32
    rope_chunks: I32
    group_chunks: I32
    scale_kind: I32
    rope_offset: I32
    scales_offset: I32
    scales_stride: I32
    kv_scale: F32


class CacheCopyPagesParams(Params):
    """Struct of `cache/copy_pages.cu`."""

    pool: Address
    pairs: Address
    layer_stride_bytes: I64
    page_stride_bytes: I64
    pairs_stride_n_elems: I64
    pairs_stride_elems: I64
    page_bytes: I64
    n: I32
    num_layers: I32
    num_pages: I32
    aligned: I32


class CacheGatherParams(Params):
    """Struct of `cache/gather.cu`."""

    cache: Address
    slots: Address = NULL
    rows: Address
    slots_stride_bytes: I64 = 0
    rows_stride_bytes: I64
    page_stride_bytes: I64
    token_stride_bytes: I64
    n: I32
    num_pages: I32
    page_size: I32
    element: I32
    slots_are_64: I32 = 0
    kind: I32
    rope_kind: I32
    latent_chunks: I32
    rope_chunks: I32
    group_chunks: I32
    scale_kind: I32
    rope_offset: I32
    scales_offset: I32
    scales_stride: I32
    kv_scale: F32


class CachePrepareParams(Params):
    """Struct of `cache/prepare.cuh`."""

    q: Address
    q_rope: Address
    out: Address
    q_scales: Address = NULL
    rope_out: Address = NULL
    latent: Address = NULL
    rope: Address = NULL
    cache: Address = NULL
    slots: Address = NULL
    cos: Address = NULL
    sin: Address = NULL
    positions: Address = NULL
    frequencies: tuple[
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
        I64,
    ]
    q_stride_n_h_bytes: tuple[I64, I64]
    q_rope_stride_n_h_bytes: tuple[I64, I64]
    out_stride_n_h_bytes: tuple[I64, I64]
    q_scales_stride_n_h_elems: tuple[I64, I64] = (0, 0)
    rope_out_stride_bytes: I64 = 0
    latent_stride_bytes: I64 = 0
    rope_stride_bytes: I64 = 0
    slots_stride_bytes: I64 = 0
    positions_stride_bytes: I64 = 0
    cos_stride_elems: I64 = 0
    sin_stride_elems: I64 = 0
    page_stride_bytes: I64 = 0
    token_stride_bytes: I64 = 0
    n: I32
    num_pages: I32 = 0
    page_size: I32 = 0
    max_position: I32 = 0
    element: I32 = 0
    slots_are_64: I32 = 0
    positions_are_64: I32 = 0
    interleaved: I32 = 0
    power_of_2: I32 = 0
    kind: I32 = 0
    rope_kind: I32 = 0
    latent_chunks: I32 = 0
    rope_chunks: I32 = 0
    group_chunks: I32 = 0
    scale_kind: I32 = 0
    rope_offset: I32 = 0
    scales_offset: I32 = 0
    scales_stride: I32 = 0
    h: I32
    pieces: I32 = 0
    token_blocks: I32 = 0
    own_scale: I32 = 0
    kv_scale: F32 = 1.0
    q_scale: F32 = 1.0


class CacheSlotsParams(Params):
    """Struct of `cache/slots.cu`."""

    block_table: Address
    starts: Address
    lengths: Address
    slots: Address
    cu_seqlens: Address
    block_table_stride_b_page_elems: tuple[I64, I64]
    starts_stride_elems: I64
    lengths_stride_elems: I64
    slots_stride_elems: I64
    cu_seqlens_stride_elems: I64
    b: I32
    max_pages: I32
    page_size: I32
    num_pages: I32
    max_tokens: I32


class CacheUpdateParams(Params):
    """Struct of `cache/update.cu`."""

    packed: Address
    table: Address
    seqlens: Address
    step_table: Address
    step_seqlens: Address
    slots: Address
    positions: Address
    table_stride_elems: I64
    step_table_stride_elems: I64
    max_rows: I32
    max_pages: I32
    page_size: I32
    changes_at: I32
    max_changes: I32
    max_tokens: I32


class LseConvention(Params):
    """Struct of `common/lse.cuh`."""

    factor: F32
    empty: F32


class DecodeScheduleGroupsParams(Params):
    """Struct of `decode/schedule_groups.cu`."""

    seqlens: Address
    cu_seqlens_q: Address
    groups: Address
    schedule: Address
    seqlens_stride_elems: I64
    cu_seqlens_q_stride_elems: I64
    max_tokens: I64
    b: I32
    s_q: I32
    max_groups: I32
    group_queries: I32
    window: I32
    num_splits: I32
    merge_cost: I32
    piece_cost: I32
    piece_tiles: I32 = 0


class DecodeSchedulePiecesParams(Params):
    """Struct of `decode/schedule_pieces.cu`."""

    seqlens: Address
    schedule: Address
    seqlens_stride_elems: I64
    max_tokens: I64
    b: I32
    num_splits: I32
    piece_tiles: I32
    cp_world: I32
    cp_rank: I32


class PrefillBackwardParams(Params):
    """Struct of `dense/backward_params.cuh`."""

    q: Address
    q_rope: Address
    k: Address
    k_rope: Address
    v: Address
    out: Address
    dout: Address
    lse: Address
    dlse: Address
    lse2: Address
    delta: Address
    dq_sums: Address
    dk_rope_sums: Address
    dq: Address
    dq_rope: Address
    dk: Address
    dk_rope: Address
    dv: Address
    schedule: Address
    key_schedule: Address
    tiles: Address
    key_tiles: Address
    q_stride_s_h_elems: tuple[I64, I64]
    q_rope_stride_s_h_elems: tuple[I64, I64]
    k_stride_s_h_elems: tuple[I64, I64]
    k_rope_stride_s_h_elems: tuple[I64, I64]
    v_stride_s_h_elems: tuple[I64, I64]
    out_stride_s_h_elems: tuple[I64, I64]
    dout_stride_s_h_elems: tuple[I64, I64]
    lse_stride_s_h_elems: tuple[I64, I64]
    dlse_stride_s_h_elems: tuple[I64, I64]
    dk_rope_sums_stride_s_h_elems: tuple[I64, I64]
    dq_stride_s_h_elems: tuple[I64, I64]
    dq_rope_stride_s_h_elems: tuple[I64, I64]
    dk_stride_s_h_elems: tuple[I64, I64]
    dk_rope_stride_s_h_elems: tuple[I64, I64]
    dv_stride_s_h_elems: tuple[I64, I64]
    s_q: I32
    s_kv: I32
    h_q: I32
    h_kv: I32
    num_rows: I32
    q_rope_column: I32
    k_rope_column: I32
    k_rope_heads: I32
    heads_at_once: I32
    kv_heads_at_once: I32
    out_is_fp32: I32
    scale: F32
    scale_log2: F32


class DenseDeltaParams(Params):
    """Struct of `dense/delta.cu`."""

    out: Address
    dout: Address
    lse: Address
    dlse: Address
    lse2: Address
    delta: Address
    dq_sums: Address
    dk_rope_sums: Address
    schedule: Address
    key_schedule: Address
    tiles: Address
    key_tiles: Address
    cu_seqlens_q: Address
    cu_seqlens_kv: Address
    out_stride_s_h_elems: tuple[I64, I64]
    dout_stride_s_h_elems: tuple[I64, I64]
    lse_stride_s_h_elems: tuple[I64, I64]
    dlse_stride_s_h_elems: tuple[I64, I64]
    dk_rope_sums_stride_h_elems: I64
    cu_seqlens_q_stride_elems: I64
    cu_seqlens_kv_stride_elems: I64
    s_q: I32
    s_kv: I32
    h_q: I32
    num_rows: I32
    out_is_fp32: I32
    one_sequence: I32
    causal: I32


class PrefillFp8Addresses(Params):
    """Struct of `dense/fp8_params.cuh`."""

    q_scales: Address
    k_scales: Address
    v_scales: Address
    sequences: Address


class PrefillFp8Params(Params):
    """Struct of `dense/fp8_params.cuh`."""

    prefill_fp8_addresses: PrefillFp8Addresses
    prefill_params: PrefillParams
    q_scales_stride_b_h_elems: tuple[I64, I64]
    k_scales_stride_b_h_elems: tuple[I64, I64]
    v_scales_stride_b_h_elems: tuple[I64, I64]
    b: I32
    out_is_fp16: I32


class MaskParams(Params):
    """Struct of `dense/mask.cu`."""

    indices: Address
    cu_seqlens_q: Address
    cu_seqlens_kv: Address
    mask: Address
    indices_stride_s_k_elems: tuple[I64, I64]
    cu_seqlens_q_stride_elems: I64
    cu_seqlens_kv_stride_elems: I64
    mask_stride_bytes: I64
    topk: I32
    b: I32
    mask_bytes: I32
    relative: I32
    aligned: I32


class PrefillParams(Params):
    """Struct of `dense/params.cuh`."""

    q: Address
    q_rope: Address
    k: Address
    k_rope: Address
    v: Address
    state_out: Address
    state_lse: Address
    out: Address
    lse: Address
    schedule: Address
    tiles: Address
    mask: Address
    cu_seqlens_q: Address
    cu_seqlens_kv: Address
    mask_stride_bytes: I64
    q_stride_s_h_elems: tuple[I64, I64]
    q_rope_stride_s_h_elems: tuple[I64, I64]
    k_stride_s_h_elems: tuple[I64, I64]
    k_rope_stride_s_h_elems: tuple[I64, I64]
    v_stride_s_h_elems: tuple[I64, I64]
    state_out_stride_s_h_elems: tuple[I64, I64]
    state_lse_stride_s_h_elems: tuple[I64, I64]
    out_stride_s_h_elems: tuple[I64, I64]
    lse_stride_s_h_elems: tuple[I64, I64]
    cu_seqlens_q_stride_elems: I64
    cu_seqlens_kv_stride_elems: I64
    s_q: I32
    s_kv: I32
    h_q: I32
    h_kv: I32
    q_rope_column: I32
    k_rope_column: I32
    k_rope_heads: I32
    heads_at_once: I32
    state_is_fp32: I32
    out_is_fp32: I32
    mask_bytes: I32
    causal: I32
    scale_log2: F32


class DenseScheduleParams(Params):
    """Struct of `dense/schedule.cu`."""

    cu_seqlens_q: Address
    cu_seqlens_kv: Address
    schedule: Address
    key_schedule: Address
    sequences: Address
    tiles: Address
    key_tiles: Address
    cu_seqlens_q_stride_elems: I64
    cu_seqlens_kv_stride_elems: I64
    s_q: I32
    s_kv: I32
    b: I32
    causal: I32


class SegmentsParams(Params):
    """Struct of `dense/segments.cu`."""

    segment_ids_q: Address
    segment_ids_kv: Address
    cu_seqlens_q: Address
    cu_seqlens_kv: Address
    runs: Address
    segment_ids_q_stride_elems: I64
    segment_ids_kv_stride_elems: I64
    cu_seqlens_q_stride_elems: I64
    cu_seqlens_kv_stride_elems: I64
    s_q: I32
    s_kv: I32
    max_segments: I32
    keys_have_ids: I32


class BinsParams(Params):
    """Struct of `exact_sums/bins.cu`."""

    selected: Address
    largest: Address
    extractors: Address
    s_kv: I32
    additions: I32


class BoundsParams(Params):
    """Struct of `exact_sums/bounds.cu`."""

    q: Address
    dout: Address
    lse2: Address
    delta: Address
    rows: Address
    counts: Address
    norms: Address
    largest: Address
    q_stride_s_h_elems: tuple[I64, I64]
    dout_stride_s_h_elems: tuple[I64, I64]
    rows_stride_elems: I64
    s_q: I32
    h_q: I32
    d_qk: I32
    scale: F32


class NormsParams(Params):
    """Struct of `exact_sums/norms.cu`."""

    kv: Address
    selected: Address
    norms: Address
    kv_stride_s_elems: I64
    s_kv: I32


class LogitsParams(Params):
    """Struct of `indexer/logits/params.cuh`."""

    q: Address
    k: Address
    weights: Address
    k_scale: Address = NULL
    begins: Address = NULL
    ends: Address
    block_table: Address = NULL
    cuts: Address
    logits: Address
    q_stride_block_token_head_elems: tuple[I64, I64, I64]
    k_stride_elems: I64
    weights_stride_block_token_head_elems: tuple[I64, I64, I64]
    k_scale_stride_elems: I64 = 0
    begins_stride_elems: I64 = 0
    ends_stride_block_token_elems: tuple[I64, I64]
    table_stride_block_page_elems: tuple[I64, I64] = (0, 0)
    page_stride_bytes: I64 = 0
    logits_stride_block_token_elems: tuple[I64, I64]
    num_tokens: I32
    block_tokens: I32
    num_keys: I32
    end_of_last: I32 = 0
    heads: I32
    head_dim: I32
    page_size: I32 = 0
    num_pages: I32 = 0
    clean: I32
    bf16_out: I32
    wide_rows: I32
    num_blocks: I32


class LogitsScheduleParams(Params):
    """Struct of `indexer/logits/schedule.cu`."""

    begins: Address
    ends: Address
    cuts: Address
    begins_stride_elems: I64
    ends_stride_block_token_elems: tuple[I64, I64]
    num_tokens: I32
    num_blocks: I32
    block_tokens: I32
    num_keys: I32
    end_of_last: I32
    num_splits: I32


class LossParams(Params):
    """Struct of `indexer/loss/params.cuh`."""

    q: Address
    q_rope: Address
    k: Address
    k_rope: Address
    v: Address
    index_q: Address
    index_k: Address
    weights: Address
    k_scale: Address
    q_scale: Address
    lse: Address
    row_weights: Address
    cu_seqlens_q: Address
    cu_seqlens_kv: Address
    ranges: Address
    target: Address
    scores: Address = NULL
    gradient: Address = NULL
    finite_keys: Address = NULL
    decoded_queries: Address = NULL
    finite_values: Address = NULL
    nonfinite_tiles: Address = NULL
    key_sums: Address = NULL
    kl: Address
    mass: Address
    index_lse: Address
    d_index_q: Address
    d_index_k: Address
    d_weights: Address
    out: Address
    attention_lse: Address
    rows: Address = NULL
    counts: Address = NULL
    extractors: Address = NULL
    largest: Address = NULL
    head_sums: Address
    q_stride_token_head_elems: tuple[I64, I64]
    q_rope_stride_token_head_elems: tuple[I64, I64]
    k_stride_token_head_elems: tuple[I64, I64]
    k_rope_stride_token_head_elems: tuple[I64, I64]
    v_stride_token_head_elems: tuple[I64, I64]
    index_q_stride_token_head_elems: tuple[I64, I64]
    index_k_stride_elems: I64
    weights_stride_token_head_elems: tuple[I64, I64]
    k_scale_stride_elems: I64
    q_scale_stride_token_head_elems: tuple[I64, I64]
    lse_stride_token_head_elems: tuple[I64, I64]
    row_weights_stride_elems: I64
    cu_seqlens_q_stride_elems: I64
    cu_seqlens_kv_stride_elems: I64
    kl_stride_token_head_elems: tuple[I64, I64]
    mass_stride_token_head_elems: tuple[I64, I64]
    index_lse_stride_token_head_elems: tuple[I64, I64]
    d_index_q_stride_token_head_elems: tuple[I64, I64]
    d_index_k_stride_elems: I64
    d_weights_stride_token_head_elems: tuple[I64, I64]
    out_stride_token_head_elems: tuple[I64, I64]
    attention_lse_stride_token_head_elems: tuple[I64, I64]
    head_sums_stride_elems: I64
    target_stride_elems: I64
    row_stride_elems: I64
    rows_stride_elems: I64
    s_q: I32
    s_kv: I32
    b: I32
    num_keys: I32
    heads: I32
    index_heads: I32
    kv_head_heads: I32
    head_dim: I32
    value_dim: I32
    index_dim: I32
    first_dim: I32
    q_rope_column: I32
    k_rope_column: I32
    causal: I32
    per_head: I32
    first_token: I32
    num_tokens: I32
    first_target: I32
    first_fetched: I32
    first_chunk: I32
    last_chunk: I32
    weights_bf16: I32
    codes: I32
    d_index_q_fp32: I32
    d_index_k_fp32: I32
    key_splits: I32
    min_split_tokens: I32
    scale: F32
    target_scale: F32
    score_unit: F32


class GatherKeysParams(Params):
    """Struct of `indexer/prepare/gather_keys.cu`."""

    cache: Address
    slots: Address
    codes: Address
    k_scale: Address
    slots_stride_bytes: I64
    page_stride_bytes: I64
    codes_stride_elems: I64
    k_scale_stride_elems: I64
    n: I32
    num_pages: I32
    page_size: I32
    d: I32
    slots_are_64: I32
    keys_are_e2m1: I32


class PrepareParams(Params):
    """Struct of `indexer/prepare/quantize.cu`."""

    x: Address
    weights: Address
    cos: Address
    sin: Address
    positions: Address
    slots: Address
    codes: Address
    scales: Address
    k: Address
    k_codes: Address
    k_scales: Address
    norm_weight: Address
    norm_bias: Address
    x_stride_n_h_elems: tuple[I64, I64]
    weights_stride_n_h_elems: tuple[I64, I64]
    cos_stride_elems: I64
    sin_stride_elems: I64
    positions_stride_elems: I64
    codes_stride_n_h_elems: tuple[I64, I64]
    scales_stride_n_h_elems: tuple[I64, I64]
    slots_stride_bytes: I64
    page_stride_bytes: I64
    k_stride_elems: I64
    k_codes_stride_elems: I64
    k_scales_stride_elems: I64
    norm_weight_stride_elems: I64
    norm_bias_stride_elems: I64
    n: I32
    h: I32
    half_rope: I32
    max_position: I32
    interleaved: I32
    hadamard: I32
    power_of_2: I32
    rounded: I32
    x_aligned: I32
    tables_aligned: I32
    num_pages: I32
    page_size: I32
    slots_are_64: I32
    e2m1_keys: I32
    group_vectors: I32
    step_tokens: I32
    step_heads: I32
    independent: I32 = 0
    h_factor: F32
    d_factor: F32
    max_code: F32
    inverse_max_code: F32
    norm_eps: F32


class SelectParams(Params):
    """Struct of `indexer/select/sm90_paged.cu`."""

    weights: Address
    ends: Address
    block_table: Address
    cache: Address
    indices: Address
    counts: Address
    weights_stride_block_token_head_elems: tuple[I64, I64, I64]
    ends_stride_block_token_elems: tuple[I64, I64]
    table_stride_block_page_elems: tuple[I64, I64]
    page_stride_bytes: I64
    indices_stride_q_elems: I64
    counts_stride_elems: I64
    block_tokens: I32
    num_keys: I32
    end_of_last: I32
    heads: I32
    num_pages: I32
    k: I32
    in_cache: I32
    keep_first: I32
    keep_last: I32


class TopkParams(Params):
    """Struct of `indexer/topk/select.cu`."""

    logits: Address
    ks: Address
    ke: Address
    block_table: Address
    indices: Address
    counts: Address
    values: Address
    logits_stride_q_elems: I64
    ks_stride_elems: I64
    ke_stride_elems: I64
    table_stride_b_page_elems: tuple[I64, I64]
    indices_stride_q_elems: I64
    counts_stride_elems: I64
    values_stride_q_elems: I64
    s_q: I32
    s_kv: I32
    k: I32
    rows_per_table: I32
    max_pages: I32
    page_size: I32
    rows_per_ke: I32
    keep_first: I32
    keep_last: I32
    by_value: I32
    relative: I32
    logits_are_bf16: I32


class MergeExchangeParams(Params):
    """Struct of `merge/exchange_params.cuh`."""

    outs: Address
    lses: Address
    out: Address
    lse: Address
    schedule: Address
    partial_out: Address
    partial_lse: Address
    mailboxes: Address
    states: Address
    reports: Address
    outs_stride_r_b_s_h_elems: tuple[I64, I64, I64, I64]
    lses_stride_r_b_h_s_elems: tuple[I64, I64, I64, I64]
    out_stride_r_b_s_h_elems: tuple[I64, I64, I64, I64]
    lse_stride_r_b_h_s_elems: tuple[I64, I64, I64, I64]
    schedule_stride_r: I64
    partial_stride_r_rows: I64
    slab_bytes: I64
    timeout_ns: I64
    world: I32
    rank: I32
    b: I32
    s_q: I32
    heads: I32
    d: I32
    slice_columns: I32
    slices: I32
    num_splits: I32
    continued_index: I32
    h_kv: I32 = 1
    call: I32
    outs_are_fp32: I32
    out_is_fp32: I32
    to_log2: F32
    lse_convention: LseConvention


class MergeStatesParams(Params):
    """Struct of `merge/states.cu`."""

    outs: Address
    lses: Address
    out: Address
    lse: Address
    outs_stride_n_b_s_h_elems: tuple[I64, I64, I64, I64]
    lses_stride_n_b_h_s_elems: tuple[I64, I64, I64, I64]
    out_stride_b_s_h_elems: tuple[I64, I64, I64]
    lse_stride_b_h_s_elems: tuple[I64, I64, I64]
    n: I32
    b: I32
    s_q: I32
    h_q: I32
    d: I32
    row_lanes: I32
    outs_are_fp32: I32
    out_is_fp32: I32
    to_log2: F32
    lse_convention: LseConvention


class ResultsParams(Params):
    """Struct of `projection/sm90_results.cu`."""

    projection_addresses: ProjectionAddresses
    projection_sizes: ProjectionSizes
    s_q: I32


class StatesAddresses(Params):
    """Struct of `projection/states.cu`."""

    outs: Address
    lses: Address = NULL
    lse: Address = NULL


class MergeProjectParams(Params):
    """Struct of `projection/states.cu`."""

    projection_addresses: ProjectionAddresses
    states_addresses: StatesAddresses
    projection_sizes: ProjectionSizes
    outs_stride_n_b_s_h_elems: tuple[I64, I64, I64, I64]
    lses_stride_n_b_h_s_elems: tuple[I64, I64, I64, I64] = (0, 0, 0, 0)
    lse_stride_b_h_s_elems: tuple[I64, I64, I64] = (0, 0, 0)
    states: I32 = 1
    s_q: I32
    outs_are_fp32: I32 = 0
    to_log2: F32 = 1.0
    lse_convention: LseConvention


class DeltaParams(Params):
    """Struct of `sparse_backward/delta.cu`."""

    out: Address
    dout: Address
    lse: Address
    attn_sink: Address
    counts: Address
    delta: Address
    lse2: Address
    sink_sums: Address
    out_stride_s_h_elems: tuple[I64, I64]
    dout_stride_s_h_elems: tuple[I64, I64]
    lse_stride_s_h_elems: tuple[I64, I64]
    attn_sink_stride_elems: I64
    s_q: I32
    h_q: I32
    out_is_fp32: I32
    lse_to_log2: F32


class DkvParams(Params):
    """Struct of `sparse_backward/dkv.cu`."""

    sums: Address
    dkv: Address
    dkv_stride_s_elems: I64
    s_kv: I32
    d_qk: I32
    num_bins: I32
    order: I32
    dkv_is_fp32: I32


class DlseParams(Params):
    """Struct of `sparse_backward/dlse.cu`."""

    dlse: Address
    lse: Address
    lse2: Address
    delta: Address
    delta_bounds: Address
    dlse_stride_s_h_elems: tuple[I64, I64]
    lse_stride_s_h_elems: tuple[I64, I64]
    s_q: I32
    h_q: I32
    lse_to_log2: F32


class DqPiecesParams(Params):
    """Struct of `sparse_backward/dq_pieces.cu`."""

    dq_pieces: Address
    counts: Address
    dq: Address
    dq_stride_s_h_elems: tuple[I64, I64]
    first_query: I32
    pieces: I32
    piece_keys: I32
    h_q: I32
    d_qk: I32


class BackwardParams(Params):
    """Struct of `sparse_backward/params.cuh`."""

    q: Address
    kv: Address
    dout: Address
    rows: Address
    counts: Address
    lse2: Address
    delta: Address
    extractors: Address
    dq: Address
    dkv: Address
    progress: Address
    out: Address
    q_stride_s_h_elems: tuple[I64, I64]
    kv_stride_s_elems: I64
    dout_stride_s_h_elems: tuple[I64, I64]
    dq_stride_s_h_elems: tuple[I64, I64]
    out_stride_s_h_elems: tuple[I64, I64]
    lse2_stride_s_h_elems: tuple[I64, I64]
    rows_stride_elems: I64
    s_q: I32
    s_kv: I32
    h_q: I32
    lse2_factor: F32
    scale: F32
    scale_log2: F32


class PiecesParams(Params):
    """Struct of `sparse_backward/pieces_params.cuh`."""

    backward_params: BackwardParams
    first_query: I32
    pieces: I32
    piece_keys: I32


class SinkParams(Params):
    """Struct of `sparse_backward/sink.cu`."""

    sink_sums: Address
    d_sink: Address
    spans: I32
    h_q: I32


class SparseDecodeScheduleParams(Params):
    """Struct of `sparse_decode/schedule.cu`."""

    topk_length: Address
    extra_topk_length: Address
    schedule: Address
    topk_length_stride_elems: I64
    extra_topk_length_stride_elems: I64
    queries: I32
    s_q: I32
    topk: I32
    extra_topk: I32
    num_splits: I32
    merge_cost: I32
    piece_tiles: I32 = 0


class SparseDecodeTurnParams(Params):
    """Struct of `sparse_decode/turn_results.cu`."""

    out: Address
    cos: Address
    sin: Address
    positions: Address
    out_stride_query_h_elems: tuple[I64, I64]
    cos_stride_elems: I64
    sin_stride_elems: I64
    positions_stride_b_s_bytes: tuple[I64, I64]
    queries: I32
    s_q: I32
    h_q: I32
    max_position: I32
    positions_are_64: I32
    out_is_fp32: I32
    out_is_bf16: I32
