// A small batch for the examples, and what the oracle of mla_cupy makes of it.
//
// Numbers are multiples of 1/8 that bfloat16 has exactly. A test of the repository compares the expected ones with
// mla_cupy.reference, which computes them in float64.
#ifndef BATCH_H
#define BATCH_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum {
    kBatch = 2,
    kHeads = 16,
    kWidth = 576,       // of queries and keys: 512 latent, 64 RoPE
    kValueWidth = 512,  // of results
    kPageSize = 64,
    kPages = 4,     // in the pool
    kMaxPages = 2,  // of a sequence
};

static const int32_t kSeqlens[kBatch] = {70, 5};
static const int32_t kBlockTable[kBatch][kMaxPages] = {{3, 0}, {2, 0}};

static inline uint16_t bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);  // exact for the numbers here
}

static inline float from_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Multiples of 1/8 from -1 to 1, which depend on the position alone.
static inline uint16_t element(uint32_t position) {
    uint32_t mixed = position * 2654435761u;
    return bfloat16((float)((int)(mixed >> 16) % 17 - 8) / 8.0f);
}

static inline void fill_elements(uint16_t* out, size_t count, uint32_t first) {
    for (size_t i = 0; i < count; i++) out[i] = element(first + (uint32_t)i);
}

static const struct {
    int sequence, head, column;
    float out;
} kExpectedOut[] = {
    {0, 0, 0, -0.524147f}, {0, 7, 511, -0.952248f}, {0, 15, 100, 0.502931f},
    {1, 0, 1, -0.499803f}, {1, 9, 300, -0.999908f}, {1, 15, 511, -0.126457f},
};

static const struct {
    int sequence, head;
    float lse;
} kExpectedLse[] = {
    {0, 0, 15.490093f},
    {0, 15, 15.372209f},
    {1, 3, 13.730926f},
};

// CRC-32 of bytes, after those that gave `crc`; 0 before all.
static inline uint32_t crc32(uint32_t crc, const void* bytes, size_t count) {
    crc = ~crc;
    for (const unsigned char* next = (const unsigned char*)bytes; count > 0; next++, count--) {
        crc ^= *next;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)));
    }
    return ~crc;
}

// Compares results, out (kBatch, 1, kHeads, kValueWidth) and lse (kBatch, kHeads, 1); returns how many are wrong.
static inline int wrong_results(const uint16_t* out, const float* lse) {
    int wrong = 0;
    for (size_t i = 0; i < sizeof kExpectedOut / sizeof *kExpectedOut; i++) {
        int row = kExpectedOut[i].sequence * kHeads + kExpectedOut[i].head;
        float got = from_bfloat16(out[row * kValueWidth + kExpectedOut[i].column]), expected = kExpectedOut[i].out;
        int bad = !(fabsf(got - expected) <= 0.01f * fabsf(expected) + 0.002f);
        printf("out[%d, 0, %d, %d] = %9.6f, expected %9.6f%s\n", kExpectedOut[i].sequence, kExpectedOut[i].head,
               kExpectedOut[i].column, got, expected, bad ? "  WRONG" : "");
        wrong += bad;
    }
    for (size_t i = 0; i < sizeof kExpectedLse / sizeof *kExpectedLse; i++) {
        float got = lse[kExpectedLse[i].sequence * kHeads + kExpectedLse[i].head], expected = kExpectedLse[i].lse;
        int bad = !(fabsf(got - expected) <= 0.002f);
        printf("lse[%d, %d, 0] = %9.6f, expected %9.6f%s\n", kExpectedLse[i].sequence, kExpectedLse[i].head, got,
               expected, bad ? "  WRONG" : "");
        wrong += bad;
    }
    uint32_t crc = crc32(0, out, sizeof *out * kBatch * kHeads * kValueWidth);
    printf("CRC-32 of out and lse: %08x\n", (unsigned)crc32(crc, lse, sizeof *lse * kBatch * kHeads));
    return wrong;
}

#endif  // BATCH_H
