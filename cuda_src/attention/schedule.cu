// Cuts a ragged batch into splits, see attention/split_schedule.cuh.
//
// One block.
#include "attention/split_schedule.cuh"
#include "ptx/control.cuh"

namespace mla::attention {

// ---- Params ----------------------------------------------------------------------------------------------------
struct DecodeScheduleParams {
    const i32* seqlens;       // (b,)
    SchedulePoint* schedule;  // (num_splits + 1,)
    i64 seqlens_stride_elems;
    i64 max_tokens;  // max_pages * page_size
    i32 b, num_splits;
    i32 merge_cost, piece_cost;  // see attention/split_schedule.cuh
    i32 cp_world, cp_rank;       // see DecodeParams
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(DecodeScheduleParams, seqlens_stride_elems),
              MLA_OFFSET(DecodeScheduleParams, b), (int)sizeof(DecodeScheduleParams));
MLA_FACT(threads, kScheduleThreads);
MLA_FACT(max_splits, kMaxSplits);
MLA_FACT(price_scale, kPriceScale);

// ---- Kernel ----------------------------------------------------------------------------------------------------
struct Batch {
    const DecodeScheduleParams& p;
    SchedulePoint* schedule;
    i64 max_tokens;
    i32 b, num_splits, merge_cost, piece_cost;

    MLA_DEVICE explicit Batch(const DecodeScheduleParams& p)
        : p(p),
          schedule(p.schedule),
          max_tokens(p.max_tokens),
          b(p.b),
          num_splits(p.num_splits),
          merge_cost(p.merge_cost),
          piece_cost(p.piece_cost) {}
    MLA_DEVICE u32 tokens(i32 request) const {
        return request_length(p.seqlens[request * p.seqlens_stride_elems], max_tokens, p.cp_world, p.cp_rank).tokens;
    }
};

extern "C" __global__ void __launch_bounds__(kScheduleThreads, 1)
    mla_attention_schedule(const __grid_constant__ DecodeScheduleParams p) {
    __shared__ ScheduleStorage s;
    griddepcontrol_wait();
    write_schedule(Batch(p), s);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::attention
