// Parameters of the exchange between context-parallel ranks, and the memory that ranks and hosts share.
#pragma once
#include "attention/decode_params.cuh"

namespace mla::merge {
using attention::kMaxSplits;
using attention::SchedulePoint;

constexpr i32 kMaxBlocks = 1024;  // of a rank: each has its flags
constexpr i32 kChunkBytes = 16;   // rows are whole chunks; also the room for the log-sum-exp behind a slice

// A rank's memory that the others write to, at its address on this GPU.
struct Mailbox {
    u8* slabs;   // [2][world] slabs of slab_bytes: slices of rows, each followed by its log-sum-exp
    u64* flags;  // [2][world][kMaxBlocks]: call << 32 | epoch
};

// A rank's own; zero before the first call.
struct State {
    u32 epoch;    // calls that have ended
    u32 tickets;  // blocks of this call that have ended
    u32 failed;   // set for good by the first wait that fails
    u32 unused;
};

// In the host's memory.
struct Report {
    u64 failure;  // written by the kernel: Failure | rank << 8 | block << 16 | epoch << 32
    u32 abort;    // set by the host: stop waiting
    u32 unused;
};

enum Failure : u32 { kNone = 0, kTimeout = 1, kMismatch = 2, kAborted = 3 };

struct MergeExchangeParams {
    const void* outs;   // (b, s_q, h_q, d), Element or fp32: this rank's results of all heads
    const float* lses;  // (b, h_q, s_q)
    void* out;          // (b, s_q, h_q / world, d), Element or fp32
    float* lse;         // (b, h_q / world, s_q)
    // The schedule of a decode with unmerged split requests, see DecodeParams; null: `outs` has all rows.
    const SchedulePoint* schedule;
    const float* partial_out;
    const float* partial_lse;
    const Mailbox* mailboxes;
    State* states;
    Report* reports;
    // The first stride of each array steps between the ranks in the grid.
    i64 outs_stride_r_elems, outs_stride_b_elems, outs_stride_s_elems, outs_stride_h_elems;
    i64 lses_stride_r_elems, lses_stride_b_elems, lses_stride_h_elems, lses_stride_s_elems;
    i64 out_stride_r_elems, out_stride_b_elems, out_stride_s_elems, out_stride_h_elems;
    i64 lse_stride_r_elems, lse_stride_b_elems, lse_stride_h_elems, lse_stride_s_elems;
    i64 schedule_stride_r, partial_stride_r_rows;
    i64 slab_bytes;
    i64 timeout_ns;
    i32 world, rank;
    i32 b, s_q, heads, d;  // heads of one rank
    i32 slice_columns;     // of a row, processed together: a multiple of 8, at most 512; the last slice may be shorter
    i32 slices;            // of a row
    i32 num_splits, continued_index, h_kv = 1;  // of the decode
    i32 call;                                   // a digest of all that must be equal on all ranks
    i32 outs_are_fp32, out_is_fp32;
    float to_log2;  // from the caller's base to base 2
    LseConvention lse_convention;
};
}  // namespace mla::merge
