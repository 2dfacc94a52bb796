/* Vectors of numbers for the compiled functions: loads, stores and rounding of one dtype, sums, the exponential. */

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
/* Accumulators that fit the registers beside what else is needed. */
#define REGISTERS LANES

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

#define INLINE static inline __attribute__((always_inline))

/* ── numbers ─────────────────────────────────────────────────────────────────────────────────────── */

#ifdef BFLOAT16
typedef uint16_t Number;

INLINE Bits round_bits(Vector x) {
    Bits bits = (Bits)x;
    Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Bits is_nan = (Bits)(x != x);
    return (rounded & ~is_nan) | (0x7fc0 & is_nan);
}

INLINE Vector load(const Number *from) {
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    return (Vector)(__builtin_convertvector(halves, Bits) << 16);
}

INLINE void store(Number *to, Vector x) {
    Halves halves = __builtin_convertvector(round_bits(x), Halves);
    memcpy(to, &halves, sizeof halves);
}

INLINE Vector rounded(Vector x) { return (Vector)(round_bits(x) << 16); }

INLINE float round_one(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = x != x ? 0x7fc00000 : (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    memcpy(&x, &bits, 4);
    return x;
}
#else
typedef float Number;

INLINE Vector load(const Number *from) {
    Vector x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(Number *to, Vector x) { memcpy(to, &x, sizeof x); }
INLINE Vector rounded(Vector x) { return x; }
INLINE float round_one(float x) { return x; }
#endif

INLINE Vector load_wide(const float *from) {
    Vector x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store_wide(float *to, Vector x) { memcpy(to, &x, sizeof x); }

INLINE Vector all(float x) { return x - (Vector){0}; }

INLINE Vector larger(Vector a, Vector b) {
    Bits is_larger = (Bits)(a > b);
    return (Vector)(((Bits)a & is_larger) | ((Bits)b & ~is_larger));
}

INLINE Vector smaller(Vector a, Vector b) {
    Bits is_smaller = (Bits)(a < b);
    return (Vector)(((Bits)a & is_smaller) | ((Bits)b & ~is_smaller));
}

typedef float Four __attribute__((vector_size(16)));

/* Add lanes until four are left. */
INLINE Four fold(Vector x) {
#if LANES == 16
    typedef float Eight __attribute__((vector_size(32)));
    Eight eight = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7)
        + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
#else
    return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
#endif
}

INLINE float sum(Vector x) {
    Four four = fold(x);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* The sums of four vectors, each added up as `sum` does. */
INLINE Four sums_of_four(const Vector *x) {
    Four a = fold(x[0]), b = fold(x[1]), c = fold(x[2]), d = fold(x[3]);
    Four ab = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
    Four cd = __builtin_shufflevector(c, d, 0, 1, 4, 5) + __builtin_shufflevector(c, d, 2, 3, 6, 7);
    return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
}

/* e^x to the last bit or two, of x between -87.33 and 88.37: 2^n times a polynomial of what is left of x. */
INLINE Vector exponential(Vector x) {
    x = smaller(all(88.37f), larger(all(-87.33f), x)); /* in this order NaN stays NaN */
    const Vector magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    Vector n = (x * all(1.44269504088896341f) + magic) - magic;
    Vector r = x - n * all(0.693359375f) + n * all(2.12194440e-4f);
    Vector p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * r * r + r + all(1.0f);
    Integers exponent = (__builtin_convertvector(n, Integers) + 127) << 23;
    return p * (Vector)exponent;
}
