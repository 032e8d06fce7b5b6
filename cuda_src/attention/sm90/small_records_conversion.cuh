// Attention to FP8 records for few query rows: the work of a dequantising warp that does not depend on who finds its
// rows. It writes rows of keys, and query rows, in the layout of the tensor cores. See
// attention/sm90/small_records.cuh.
#pragma once
#include "attention/sm90/record_query.cuh"
#include "attention/sm90/small_records_storage.cuh"
#include "ptx/control.cuh"

namespace mla::attention::sm90 {
template <class C>
struct DequantWarp {
    using TokenRecord = typename C::TokenRecord;
    using Query = QueryRow<typename C::Tile>;
    static constexpr i32 kQueryRows = C::kBlockRows / kDequantWarps;  // of the warp
    SmallBlock<C>& block;
    i32 warp, lane;
    i32 row;  // the lane's, of each tile
    i32 stage, q_stage;
    Ring<kStagesKV> ring;
    Ring<C::kStagesQ> q_ring;

    MLA_DEVICE DequantWarp(SmallBlock<C>& block, i32 warp, i32 lane)
        : block(block), warp(warp), lane(lane), row(warp * kRowsOfWarp + lane / kPieceLanes), stage(0), q_stage(0) {}

    // The warp's i-th query row of the block; null past the last head.
    MLA_DEVICE auto query_row(i32 query, i32 i) const {
        const i32 row = block.row0 + warp + i * kDequantWarps;
        if (row >= block.rows) return NoRow<typename C::Tokens>::value;
        return C::Tokens::query_row(block.p, query, block.kv_head, row);
    }

    MLA_DEVICE void store_query(i32 query) {
        SmallStorage<C>& s = block.s;
        mbarrier_wait(s.q_empty[q_stage], q_ring.empty_parity(q_stage));
#pragma unroll 2
        for (i32 i = 0; i < kQueryRows; ++i) {
            Query from;
            from.load(query_row(query, i), lane);
            store_query_row(from, i);
        }
        next_query();
    }

    MLA_DEVICE void store_query_row(const Query& from, i32 i) const {
        SmallStorage<C>& s = block.s;
        const i32 at = warp + i * kDequantWarps;
        const float factor = sm90::store_query_row<typename C::Tile, typename C::Element, typename C::Latent>(
            s.q[q_stage][0], C::kQSwTileBytes, from, at, lane);
        if (lane == 0) s.q_factors[q_stage][at] = factor;
    }

    MLA_DEVICE void next_query() {
        q_ring.advance(q_stage);
        q_stage = (q_stage + 1) % C::kStagesQ;
    }

    // Place of a raw piece of the lane's row, if rows come through shared memory.
    MLA_DEVICE u8* raw(i32 piece) const { return block.s.rows.bytes[warp][piece] + lane * 16; }

    template <class Scales>
    MLA_DEVICE void store_piece(i32 piece, const uint4& bytes, const Scales& scales) const {
        u8* to = block.s.kv[stage] + C::sw_tile_of(piece) * kSw128Bytes;
        if constexpr (kMixed<TokenRecord>) {
            const uint4 codes = unpacked_piece(bytes, scales.own.compact, lane);
            store_latent<typename C::Latent, C::kUnshifted>(to, codes, scales.of_piece(piece, lane), row, lane);
        } else if (piece < C::kLatentSwTiles || kScaledRope<TokenRecord>) {
            store_latent<typename C::Latent, C::kUnshifted>(to, bytes, scales.of_piece(piece, lane), row, lane);
        } else {
            store_rope_piece<TokenRecord, typename C::Rope>(to, bytes, piece - C::kLatentSwTiles, row, lane);
        }
    }

    // Stores the presence of the warp's rows as one byte of the tile's bits.
    MLA_DEVICE void store_presence(u32 rows) const {
        if (lane == 0) reinterpret_cast<u8*>(&block.s.present[stage])[warp] = (u8)rows;
    }

    MLA_DEVICE void wait_for_place(i32 group) const {
        mbarrier_wait(block.s.kv_empty[stage][group], ring.empty_parity(stage));
    }

    // A group has been stored.
    MLA_DEVICE void pass_on(i32 group) const {
        if (!C::kFencedByReaders) fence_proxy_async();
        release(block.s.kv_full[stage][group], lane);
    }

    MLA_DEVICE void next_stage() {
        ring.advance(stage);
        stage ^= 1;
    }
};
}  // namespace mla::attention::sm90
