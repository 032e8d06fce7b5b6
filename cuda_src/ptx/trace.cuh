// The PTX of traced builds: a register for a whole entry, and stores to where it points.
#pragma once
#include "common/types.cuh"

namespace mla {
// A register of the PTX, not of C++: its name is valid in every function that is inlined into an entry, without passing
// it through their sources. In memory it would have to be loaded each time. It is declared once, in the entry's first
// block.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#register-state-space
MLA_DEVICE void declare_next_record(u32 index) {
    asm volatile(".reg .u32 mla_next_record;\n mov.u32 mla_next_record, %0;" ::"r"(index));
}

MLA_DEVICE u32 next_record() {
    u32 index;
    asm volatile("mov.u32 %0, mla_next_record;" : "=r"(index));
    return index;
}

// Stores a record of 16 bytes at the register's index, if that is below `limit`: the clock now, the earlier clock, and
// a number. Then adds `step` to the index, up to `kMost`. Predicates instead of branches, also where lanes differ.
// Clocks are not subtracted: ptxas would read the first one by S2UR, which is slower. Two stores need two adjacent
// registers, one store would need four.
template <u32 kMost>
MLA_DEVICE void store_record(void* records, u32 begin, u32 number, u32 limit, u32 step) {
    asm volatile(
        "{\n"
        " .reg .pred fits;\n"
        " .reg .u64 to;\n"
        " .reg .u32 end;\n"
        " cvt.u64.u32 to, mla_next_record;\n"
        " shl.b64 to, to, 4;\n"
        " add.u64 to, to, %0;\n"
        " setp.lt.u32 fits, mla_next_record, %3;\n"
        " mov.u32 end, %%clock;\n"
        " @fits st.global.v2.u32 [to], {end, %1};\n"
        " @fits st.global.u32 [to + 8], %2;\n"
        " add.u32 mla_next_record, mla_next_record, %4;\n"
        " min.u32 mla_next_record, mla_next_record, %5;\n"
        "}" ::"l"(records),
        "r"(begin), "r"(number), "r"(limit), "r"(step), "n"(kMost)
        : "memory");
}

// Stores the record in two steps, before and after a wait: no register holds a clock meanwhile. Math roles have none
// left, and WGMMA would be serialised.
MLA_DEVICE void store_begin(void* records, u32 number, u32 limit) {
    asm volatile(
        "{\n"
        " .reg .pred fits;\n"
        " .reg .u64 to;\n"
        " .reg .u32 begin;\n"
        " cvt.u64.u32 to, mla_next_record;\n"
        " shl.b64 to, to, 4;\n"
        " add.u64 to, to, %0;\n"
        " setp.lt.u32 fits, mla_next_record, %2;\n"
        " @fits st.global.u32 [to + 8], %1;\n"
        " mov.u32 begin, %%clock;\n"
        " @fits st.global.u32 [to + 4], begin;\n"
        "}" ::"l"(records),
        "r"(number), "r"(limit)
        : "memory");
}

// And adds `step` to the index, up to `kMost`.
template <u32 kMost>
MLA_DEVICE void store_end(void* records, u32 limit, u32 step) {
    asm volatile(
        "{\n"
        " .reg .pred fits;\n"
        " .reg .u64 to;\n"
        " .reg .u32 end;\n"
        " cvt.u64.u32 to, mla_next_record;\n"
        " shl.b64 to, to, 4;\n"
        " add.u64 to, to, %0;\n"
        " setp.lt.u32 fits, mla_next_record, %1;\n"
        " mov.u32 end, %%clock;\n"
        " @fits st.global.u32 [to], end;\n"
        " add.u32 mla_next_record, mla_next_record, %2;\n"
        " min.u32 mla_next_record, mla_next_record, %3;\n"
        "}" ::"l"(records),
        "r"(limit), "r"(step), "n"(kMost)
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
