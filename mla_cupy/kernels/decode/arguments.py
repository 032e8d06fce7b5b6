"""Arguments of the attention kernels of dense decode."""

from __future__ import annotations

from mla_cupy.arrays.view import View
from mla_cupy.cache_formats import FORMATS
from mla_cupy.kernels.attention.record_layout import page_and_token_bytes
from mla_cupy.kernels.decode.configs import DecodeConfig
from mla_cupy.kernels.decode.problem import DecodeOptions
from mla_cupy.kernels.decode.queries import batch_of, position_strides, query_strides
from mla_cupy.kernels.lse import LseOptions
from mla_cupy.kernels.numbers import LOG2_E
from mla_cupy.kernels.params import (
    DecodeFormParams,
    DecodeFp8Params,
    DecodeParams,
    DecodeRopeParams,
    FormAddresses,
    Fp8ScaleAddresses,
    RopeAddress,
)
from mla_cupy.kernels.pipeline import Call, LaunchArgs


def args_of(config: DecodeConfig, call: Call, params: DecodeParams) -> LaunchArgs:
    """Arguments of the attention kernel: `params` in the struct that its build declares, and its tensor maps."""
    kv_cache, variant = call.view("kv_cache"), config.variant
    struct = config.kernel.params_of(variant)
    filled: DecodeParams | DecodeRopeParams | DecodeFormParams | DecodeFp8Params = params
    if struct is DecodeFp8Params:
        filled = _fp8_params(config, call, params)
    elif struct is DecodeRopeParams:
        filled = _rope_params(config, call, params)
    elif struct is DecodeFormParams:
        filled = _form_params(config, call, params)
    maps = config.kernel.kv_maps(kv_cache, variant)
    # A pool without pages may have no address, which a map needs; of 16-bit rows it has a kernel without maps.
    empty = maps and config.problem.record and kv_cache.shape[0] == 0
    return LaunchArgs(filled, maps=tuple(("schedule" if empty else "kv_cache", spec) for spec in maps))


def params_of(config: DecodeConfig, call: Call, splits: int) -> DecodeParams:
    """Parameters that every attention kernel reads, for a schedule of `splits` splits."""
    options: DecodeOptions = call.options
    kv_cache = call.view("kv_cache")
    num_pages, page_size, _ = kv_cache.shape
    return DecodeParams(
        q="q",
        kv="kv_cache",
        block_table="block_table",
        seqlens="seqlens",
        schedule=config.schedule_part,
        out=config.finish.place(call),
        lse="lse",
        attn_sink=call.name("attn_sink"),
        partial_out="partial_out",
        partial_lse="partial_lse",
        tickets=config.tickets_part,
        tree_mask=call.name("tree_mask"),
        q_stride_b_s_h_elems=query_strides(call, "q"),
        kv_stride_page_token_h_elems=_cache_strides(config.problem.record, kv_cache),
        table_stride_b_page_elems=call.strides("block_table", 2),
        seqlens_stride_elems=call.stride("seqlens"),
        out_stride_b_s_h_elems=config.finish.out_strides(call, config.problem),
        lse_stride_b_h_s_elems=query_strides(call, "lse"),
        sink_stride_elems=call.stride("attn_sink"),
        tree_stride_b_s_elems=call.strides("tree_mask", 2),
        b=config.requests(*batch_of(call)),
        s_q=config.s_q,
        h_q=config.problem.h_q,
        num_pages=num_pages,
        page_size=page_size,
        max_pages=call.view("block_table").shape[1],
        num_splits=splits,
        causal=options.causal,
        out_is_fp32=config.finish.out_is_fp32(call),
        continued_index=config.continued_index,
        unit_tiles=config.unit_tiles,
        cp_world=options.cp_world,
        cp_rank=options.cp_rank,
        scale_log2=options.scale * options.kv_scale * options.q_scale * LOG2_E,
        lse_convention=LseOptions.of(options).convention,
        value_scale=options.kv_scale,
        new_tokens=config.s_q if config.after_prepare else -1,
    )


def _fp8_params(config: DecodeConfig, call: Call, params: DecodeParams) -> DecodeFp8Params:
    return DecodeFp8Params(
        fp8_scale_addresses=Fp8ScaleAddresses(q_scales=call.name("q_scales"), kv_scales=call.name("kv_scales")),
        decode_params=params,
        q_scales_stride_b_s_h_elems=call.strides("q_scales", 3),
        bf16_partials=config.bf16_partials and not params.out_is_fp32,
    )


def _rope_params(config: DecodeConfig, call: Call, params: DecodeParams) -> DecodeRopeParams:
    return DecodeRopeParams(
        rope_address=RopeAddress(q_rope=call.name("q_rope")),
        decode_params=params,
        q_rope_stride_b_s_h_elems=query_strides(call, "q_rope" if config.problem.forms.q_rope else "q"),
    )


def _form_params(config: DecodeConfig, call: Call, params: DecodeParams) -> DecodeFormParams:
    cos, positions = call.views["out_cos"], call.views["out_positions"]
    return DecodeFormParams(
        form_addresses=FormAddresses(
            groups=config.groups_part,
            out_cos=call.name("out_cos"),
            out_sin=call.name("out_sin"),
            out_positions=call.name("out_positions"),
        ),
        decode_rope_params=_rope_params(config, call, params),
        out_cos_stride_elems=call.stride("out_cos"),
        out_sin_stride_elems=call.stride("out_sin"),
        out_positions_stride_b_s_bytes=position_strides(call),
        window=config.problem.forms.window,
        out_max_position=cos.shape[0] if cos else 0,
        out_positions_are_64=positions is not None and positions.dtype == "int64",
    )


def _cache_strides(record: str, kv_cache: View) -> tuple[int, int, int]:
    """Strides of pages, tokens and heads: in elements, or in bytes of a plane of records."""
    page, token = page_and_token_bytes(FORMATS[record], kv_cache) if record else kv_cache.strides[:2]
    return page, token, 0
