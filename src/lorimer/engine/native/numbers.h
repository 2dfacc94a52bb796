/* Vectors of numbers for the compiled functions: loads, stores and rounding of one dtype, sums, the exponential, and the
 * norm of a row. */

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

/* For other CPUs the compiler finds the instructions; on x86 it finds slower ones. */
#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#define X86(name, ...) (Vector)_mm512_##name(__VA_ARGS__)
#elif defined(__AVX2__)
#include <immintrin.h>
#define LANES 8
#define X86(name, ...) (Vector)_mm256_##name(__VA_ARGS__)
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
#define NOINLINE static __attribute__((noinline))
/* Before a loop over an array of vectors, whose size must be a constant: then they stay in registers. */
#define UNROLL _Pragma("GCC unroll 32")

/* ── numbers ─────────────────────────────────────────────────────────────────────────────────────── */

#ifdef BFLOAT16
typedef uint16_t Number;

INLINE Bits round_bits(Vector x) {
    Bits bits = (Bits)x;
    Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Bits is_nan = (Bits)(x != x);
    return (rounded & ~is_nan) | (0x7fc0 & is_nan);
}

INLINE Vector widen(Halves halves) {
#if defined(__AVX512F__)
    return (Vector)((Bits)_mm512_cvtepu16_epi32((__m256i)halves) << 16);
#elif defined(__AVX2__)
    return (Vector)((Bits)_mm256_cvtepu16_epi32((__m128i)halves) << 16);
#else
    return (Vector)(__builtin_convertvector(halves, Bits) << 16);
#endif
}

INLINE Halves narrow(Vector x) {
#if defined(__AVX512BF16__)
    return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
    return __builtin_convertvector(round_bits(x), Halves);
#endif
}

INLINE Vector load(const Number *from) {
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    return widen(halves);
}

INLINE void store(Number *to, Vector x) {
    Halves halves = narrow(x);
    memcpy(to, &halves, sizeof halves);
}

INLINE Vector rounded(Vector x) { return widen(narrow(x)); }

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

/* The second where one is not a number. */
INLINE Vector larger(Vector a, Vector b) {
#ifdef X86
    return X86(max_ps, a, b);
#else
    Bits is_larger = (Bits)(a > b);
    return (Vector)(((Bits)a & is_larger) | ((Bits)b & ~is_larger));
#endif
}

INLINE Vector smaller(Vector a, Vector b) {
#ifdef X86
    return X86(min_ps, a, b);
#else
    Bits is_smaller = (Bits)(a < b);
    return (Vector)(((Bits)a & is_smaller) | ((Bits)b & ~is_smaller));
#endif
}

/* Load `num` numbers, fewer than LANES, and fill what is left. */
INLINE Vector load_few(const Number *from, int64_t num, float fill) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    __mmask16 is_loaded = (__mmask16)((1u << num) - 1);
#ifdef BFLOAT16
    Vector x = widen((Halves)_mm256_maskz_loadu_epi16(is_loaded, from));
#else
    Vector x = X86(maskz_loadu_ps, is_loaded, from);
#endif
    return X86(mask_blend_ps, is_loaded, (__m512)all(fill), (__m512)x);
#else
    Number numbers[LANES] = {0};
    memcpy(numbers, from, num * sizeof(Number));
    Vector x = load(numbers);
    for (int64_t i = num; i < LANES; i++) x[i] = fill;
    return x;
#endif
}

/* Store the first `num` numbers, fewer than LANES. */
INLINE void store_few(Number *to, Vector x, int64_t num) {
#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(BFLOAT16)
    _mm256_mask_storeu_epi16(to, (__mmask16)((1u << num) - 1), (__m256i)narrow(x));
#elif defined(__AVX512F__) && !defined(BFLOAT16)
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << num) - 1), (__m512)x);
#else
    Number numbers[LANES];
    store(numbers, x);
    memcpy(to, numbers, num * sizeof(Number));
#endif
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

INLINE float inverse_rms(const Number *x, float eps, int64_t size) {
    Vector squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        Vector part = load(x + i);
        squares += part * part;
    }
    return 1.0f / sqrtf(sum(squares) / (float)size + eps);
}

/* out = norm(x) of one row, with a weight of either type. */
INLINE void normalise(const Number *x, const Number *weight, const float *wide, float eps, int64_t size, Number *out) {
    float inverse = inverse_rms(x, eps, size);
    for (int64_t i = 0; i < size; i += LANES) {
        Vector factor = wide ? load_wide(wide + i) : load(weight + i);
        store(out + i, load(x + i) * all(inverse) * factor);
    }
}
