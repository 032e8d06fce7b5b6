//! A small batch, and what the oracle of mla_cupy makes of it: the numbers of examples/c/batch.h, which says more.

pub const BATCH: usize = 2;
pub const HEADS: usize = 16;
pub const WIDTH: usize = 576; // of queries and keys: 512 latent, 64 RoPE
pub const VALUE_WIDTH: usize = 512; // of results
pub const PAGE_SIZE: usize = 64;
pub const PAGES: usize = 4; // in the pool
pub const MAX_PAGES: usize = 2; // of a sequence

pub const SEQLENS: [i32; BATCH] = [70, 5];
pub const BLOCK_TABLE: [[i32; MAX_PAGES]; BATCH] = [[3, 0], [2, 0]];

fn from_bfloat16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// Multiples of 1/8 from -1 to 1 as bfloat16, which depend on the position alone.
pub fn elements(count: usize, first: u32) -> Vec<u16> {
    let element = |position: u32| {
        let mixed = position.wrapping_mul(2654435761);
        let value = ((mixed >> 16) % 17) as f32 / 8.0 - 1.0;
        (value.to_bits() >> 16) as u16 // exact for these numbers
    };
    (0..count as u32).map(|i| element(first + i)).collect()
}

/// Sequence, head, column, number.
const EXPECTED_OUT: [(usize, usize, usize, f32); 6] = [
    (0, 0, 0, -0.524147),
    (0, 7, 511, -0.952248),
    (0, 15, 100, 0.502931),
    (1, 0, 1, -0.499803),
    (1, 9, 300, -0.999908),
    (1, 15, 511, -0.126457),
];
/// Sequence, head, number.
const EXPECTED_LSE: [(usize, usize, f32); 3] = [(0, 0, 15.490093), (0, 15, 15.372209), (1, 3, 13.730926)];

/// CRC-32 of bytes.
fn crc32(bytes: impl Iterator<Item = u8>) -> u32 {
    let shifted = |crc: u32, _| (crc >> 1) ^ (0xEDB88320 & (crc & 1).wrapping_neg());
    !bytes.fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(byte), shifted))
}

/// Compares results, out (BATCH, 1, HEADS, VALUE_WIDTH) and lse (BATCH, HEADS, 1); returns how many are wrong.
pub fn wrong_results(out: &[u16], lse: &[f32]) -> usize {
    let mut wrong = 0;
    let mut compare = |name: String, got: f32, expected: f32, tolerance: f32| {
        let fine = (got - expected).abs() <= tolerance; // false for NaN
        println!("{name} = {got:9.6}, expected {expected:9.6}{}", if fine { "" } else { "  WRONG" });
        wrong += usize::from(!fine);
    };
    for (i, h, column, expected) in EXPECTED_OUT {
        let got = from_bfloat16(out[(i * HEADS + h) * VALUE_WIDTH + column]);
        compare(format!("out[{i}, 0, {h}, {column}]"), got, expected, 0.01 * expected.abs() + 0.002);
    }
    for (i, h, expected) in EXPECTED_LSE {
        compare(format!("lse[{i}, {h}, 0]"), lse[i * HEADS + h], expected, 0.002);
    }
    let bytes = out.iter().flat_map(|x| x.to_le_bytes()).chain(lse.iter().flat_map(|x| x.to_le_bytes()));
    println!("CRC-32 of out and lse: {:08x}", crc32(bytes));
    wrong
}
