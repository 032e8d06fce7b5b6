// Merges the pieces of the requests of a batch-invariant schedule (decode/schedule_pieces.cu).
//
// Grid: x = teams of 128 threads, which divide the rows of all requests; y = columns of a row with the most possible
// pieces. A request with fewer pieces has fewer columns. The order of a row's merge depends on its number of pieces
// only. attention/merge_partials.cuh does the merge.
#include "attention/merge_partials.cuh"
#include "attention/pieces.cuh"
#include "attention/query_groups.cuh"
#include "ptx/control.cuh"

namespace mla::decode {
using namespace attention;

// ---- Variant ---------------------------------------------------------------------------------------------------
// With optional inputs, requests are groups of queries.
#ifdef MLA_FORMS
using Params = DecodeFormParams;
using Work = GroupedWork;
MLA_DECODE_FORM_FACTS();
#else
using Params = DecodeParams;
using Work = ScheduledWork;
MLA_DECODE_FACTS();
#endif

using Element = MLA_DTYPE;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kTeams = kThreads / kTeamThreads;

MLA_FACT(threads, kThreads);
MLA_FACT(max_pieces, kMaxPartials);

// Four blocks per SM, as attention_combine.
extern "C" __global__ void __launch_bounds__(kThreads, 4) mla_decode_combine_pieces(const __grid_constant__ Params p) {
    __shared__ Team teams[kTeams];
    griddepcontrol_wait();
    const i32 rows = p.s_q * p.h_q, column = blockIdx.y;
    Team& team = teams[threadIdx.x / kTeamThreads];
#pragma unroll 1
    for (i64 i = blockIdx.x * kTeams + threadIdx.x / kTeamThreads; i < (i64)p.b * rows; i += gridDim.x * kTeams) {
        const i32 request = (i32)(i / rows), first = first_splits(p)[request];
        const i32 num_partials = min(first_splits(p)[request + 1] - first, kMaxPartials);
        if (num_partials < 2) continue;
        const UnitShape shape{0, UnitShape::of(num_partials).group_shift};
        if (column >= shape.groups()) continue;
        prepare_unit<Work>(p, team, shape, first, num_partials, request, (i32)(i % rows), column);
        merge_unit<Element>(p, team);
    }
}
}  // namespace mla::decode
