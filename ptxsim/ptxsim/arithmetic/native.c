/* Hot arithmetic as inner loops of NumPy's universal functions: what numeric.py and mma_form.py say, bit for bit.
 *
 * A loop gets the addresses of its operands (inputs, then the output), the number of elements, and the operands'
 * strides. Nothing of Python or NumPy is included: of both, only the form of a loop is used.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef intptr_t Size;

#define LOOP(name) void name(char** args, Size const* count, Size const* step, void* data)
#define EACH for (Size i = 0; i < count[0]; ++i)
#define AT(type, k) (*(type*)(args[k] + i * step[k]))

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- float32 ------------------------------------------------------------------------------------------------ */
LOOP(fma32) {
    EACH {
        const float a = AT(float, 0), b = AT(float, 1), c = AT(float, 2);
        const float sum = fmaf(a, b, c);
        AT(float, 3) = isnan(sum) ? (float)((double)a * b + c) : sum; /* NaNs as the sum in double has them */
    }
}

LOOP(flush) {
    EACH {
        const uint32_t x = AT(uint32_t, 0);
        AT(uint32_t, 1) = x & 0x7f800000u ? x : x & 0x80000000u;
    }
}

LOOP(fmin32) {
    EACH {
        const float a = AT(float, 0), b = AT(float, 1);
        const uint32_t either = bits_of(a) | bits_of(b);
        AT(float, 2) = a == 0 && b == 0 ? float_of(either & 0x80000000u) : a <= b || isnan(b) ? a : b;
    }
}

LOOP(fmax32) {
    EACH {
        const float a = AT(float, 0), b = AT(float, 1);
        const uint32_t both = bits_of(a) & bits_of(b);
        AT(float, 2) = a == 0 && b == 0 ? float_of(both & 0x80000000u) : a >= b || isnan(b) ? a : b;
    }
}

LOOP(to_bf16) {
    EACH {
        const uint32_t x = AT(uint32_t, 0);
        const int nan = (x & 0x7fffffffu) > 0x7f800000u;
        AT(uint16_t, 1) = nan ? 0x7fff : (uint16_t)((x + 0x7fffu + (x >> 16 & 1)) >> 16);
    }
}

/* ---- integers ----------------------------------------------------------------------------------------------- */
#define UNSIGNED(type, bits)                                                                               \
    LOOP(div_u##bits) { EACH AT(type, 2) = AT(type, 1) ? AT(type, 0) / AT(type, 1) : (type)~0; }           \
    LOOP(rem_u##bits) { EACH AT(type, 2) = AT(type, 1) ? AT(type, 0) % AT(type, 1) : (type)~0; }           \
    LOOP(left_u##bits) { EACH AT(type, 2) = AT(uint32_t, 1) < bits ? AT(type, 0) << AT(uint32_t, 1) : 0; } \
    LOOP(right_u##bits) { EACH AT(type, 2) = AT(uint32_t, 1) < bits ? AT(type, 0) >> AT(uint32_t, 1) : 0; }

/* The smallest number over -1 is itself, as its negative is. */
#define SIGNED(type, raw, bits)                                                                                      \
    LOOP(div_s##bits) {                                                                                              \
        EACH {                                                                                                       \
            const type a = AT(type, 0), b = AT(type, 1);                                                             \
            AT(type, 2) = b == 0 ? (type) - 1 : b == -1 ? (type)(0 - (raw)a) : (type)(a / b);                        \
        }                                                                                                            \
    }                                                                                                                \
    LOOP(rem_s##bits) {                                                                                              \
        EACH {                                                                                                       \
            const type a = AT(type, 0), b = AT(type, 1);                                                             \
            AT(type, 2) = b == 0 ? (type) - 1 : b == -1 ? 0 : (type)(a % b);                                         \
        }                                                                                                            \
    }                                                                                                                \
    LOOP(right_s##bits) { EACH AT(type, 2) = AT(type, 0) >> (AT(uint32_t, 1) < bits ? AT(uint32_t, 1) : bits - 1); } \
    LOOP(left_s##bits) { EACH AT(raw, 2) = AT(uint32_t, 1) < bits ? (raw)(AT(raw, 0) << AT(uint32_t, 1)) : 0; }

UNSIGNED(uint16_t, 16)
UNSIGNED(uint32_t, 32)
UNSIGNED(uint64_t, 64)
SIGNED(int16_t, uint16_t, 16)
SIGNED(int32_t, uint32_t, 32)
SIGNED(int64_t, uint64_t, 64)

/* ---- mma.sync ----------------------------------------------------------------------------------------------- */
typedef struct {
    int32_t rows, depth;  /* of A; B has 8 columns */
    int32_t bits;         /* of an element of A or B */
    int32_t whole, clamp; /* integers: D is s32, saturated or not; else float32 */
    int32_t nan;          /* set where D has a NaN, whose bits are not promised here */
    const float *a, *b;   /* values of the elements by their bits, which have at most 16 */
} Form;

static double element(const float* values, int bits, uint32_t word, int place) {
    if (bits == 32) return float_of(word & 0xffffe000u); /* tf32 */
    return values[word >> (place * bits) & ((1u << bits) - 1)];
}

static uint32_t rounded(Form* form, double sum) {
    if (!form->whole) {
        if (isnan(sum)) form->nan = 1;
        return bits_of((float)sum);
    }
    if (form->clamp) sum = sum > INT32_MAX ? INT32_MAX : sum < INT32_MIN ? INT32_MIN : sum;
    return (uint32_t)(int64_t)sum;
}

#define WORD(k) (*(uint32_t*)(args[k] + lane * core[k]))

/* Operands: A's, B's and C's registers, then D's; each is the words of 32 lanes. WarpMma in mma_form.py has the
 * layouts. The strides of lanes come after those of whole operands, of which there is one each.
 */
LOOP(mma) {
    Form* form = data;
    const int e = 32 / form->bits, halves = form->rows / 8, nb = form->depth / (4 * e), na = nb * halves;
    const int of_c = na + nb, of_d = of_c + 2 * halves;
    const Size* core = step + of_d + 2 * halves;
    double a[16][64], b[64][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, first = e * (lane % 4);
        for (int r = 0; r < na; ++r)
            for (int j = 0; j < e; ++j)
                a[g + 8 * (r % halves)][4 * e * (r / halves) + first + j] = element(form->a, form->bits, WORD(r), j);
        for (int r = 0; r < nb; ++r)
            for (int j = 0; j < e; ++j) b[4 * e * r + first + j][g] = element(form->b, form->bits, WORD(na + r), j);
    }
    for (int row = 0; row < form->rows; ++row) {
        double sums[8] = {0};
        for (int k = 0; k < form->depth; ++k)
            for (int n = 0; n < 8; ++n) sums[n] += a[row][k] * b[k][n];
        for (int n = 0; n < 8; ++n) {
            const int lane = row % 8 * 4 + n / 2, place = row / 8 * 2 + n % 2;
            const uint32_t old = WORD(of_c + place);
            WORD(of_d + place) = rounded(form, sums[n] + (form->whole ? (double)(int32_t)old : (double)float_of(old)));
        }
    }
    (void)count;
}
