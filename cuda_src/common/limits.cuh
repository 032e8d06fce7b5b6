// Limits per SM and per block on sm_90 and sm_100.
#pragma once
#include "common/types.cuh"

namespace mla {
constexpr u32 kMaxDynamicSmem = 232448;  // 227 KB, of a block
constexpr u32 kTmemColumns = 512;        // of tensor memory
constexpr i32 kRegsOfSm = 65536;

// The SM's registers over a warpgroup's lanes: the budget of setmaxnreg for all warpgroups together, per thread.
constexpr i32 kRegsOfLane = kRegsOfSm / kWarpgroupThreads;

// The most that each thread of a block has at entry if the SM holds no other block; registers come in eights.
MLA_DEVICE constexpr i32 regs_at_entry(i32 threads) { return kRegsOfSm / threads / 8 * 8; }
}  // namespace mla
