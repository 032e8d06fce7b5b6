// The PTX of traced builds: a register for a whole entry, and stores to where it points.
#pragma once
#include "common/types.cuh"

namespace mla {
// A register of the PTX, not of C++: its name holds in every function that is inlined into an entry, though their
// sources pass nothing on. In memory, what it holds would have to be loaded each time. It is declared once, in the
// entry's first block.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#register-state-space
MLA_DEVICE void declare_next_record(u32 index) {
    asm volatile(".reg .u32 mla_next_record;\n mov.u32 mla_next_record, %0;" ::"r"(index));
}

MLA_DEVICE u32 next_record() {
    u32 index;
    asm volatile("mov.u32 %0, mla_next_record;" : "=r"(index));
    return index;
}

// If `wanted`, stores at the register's index if that is below `limit`, and then adds `step` to it, up to `kMost`.
// Without a branch: predicates, also where lanes differ.
template <u32 kMost>
MLA_DEVICE void store_record(void* records, uint4 value, bool wanted, u32 limit, u32 step) {
    asm volatile(
        "{\n"
        " .reg .pred wanted, fits;\n"
        " .reg .u64 to;\n"
        " cvt.u64.u32 to, mla_next_record;\n"
        " shl.b64 to, to, 4;\n"
        " add.u64 to, to, %0;\n"
        " setp.ne.u32 wanted, %5, 0;\n"
        " setp.lt.and.u32 fits, mla_next_record, %6, wanted;\n"
        " @fits st.global.v4.u32 [to], {%1, %2, %3, %4};\n"
        " @wanted add.u32 mla_next_record, mla_next_record, %7;\n"
        " min.u32 mla_next_record, mla_next_record, %8;\n"
        "}" ::"l"(records),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"((u32)wanted), "r"(limit), "r"(step), "n"(kMost)
        : "memory");
}

// Index of the block in its grid, and of the thread in a block of one dimension; read anew at each call, like own_lane.
MLA_DEVICE u32 own_block() {
    u32 block;
    asm volatile(
        "{\n"
        " .reg .u32 index, blocks;\n"
        " mov.u32 %0, %%ctaid.z;\n"
        " mov.u32 blocks, %%nctaid.y;\n"
        " mov.u32 index, %%ctaid.y;\n"
        " mad.lo.u32 %0, %0, blocks, index;\n"
        " mov.u32 blocks, %%nctaid.x;\n"
        " mov.u32 index, %%ctaid.x;\n"
        " mad.lo.u32 %0, %0, blocks, index;\n"
        "}"
        : "=&r"(block));
    return block;
}

MLA_DEVICE u32 own_thread() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}
}  // namespace mla
