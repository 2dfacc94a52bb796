/* Products of matrices as they are stored: a linear layer, the gradient of its input and the gradient of its weight.
 *
 * Each packs 32 columns of one factor (16 on CPUs without AVX-512) into the order in which they are read, in the cache,
 * and multiplies them with a few rows of the other one in registers. No weight needs a second copy in another layout.
 * Every number is one sum in float32, in the order of the summed dimension, whatever else is computed with it. So a row's
 * results do not depend on other rows or on the number of threads. `matmul.py` calls them, after comparing them with torch.
 *
 * Where the CPU multiplies pairs of bfloat16, the numbers that are summed are pairs, else float32. Legend: N rows, K summed
 * numbers, M columns; S = K / 2 with pairs, else K: what a step adds.
 */

#include "numbers.h"

#if defined(BFLOAT16) && defined(__AVX512BF16__)
#define PAIRED 1
#else
#define PAIRED 0
#endif
#if LANES == 16
#define TILE 12 /* rows whose sums fit the registers, with two vectors of columns each */
#else
#define TILE 6
#endif
#define FEW 8 /* rows for which packed columns would not be read often enough */
#define WIDTH (2 * LANES)
#define LINE 64 /* bytes that memory is read by */
#define ROWS 768 /* of one task at the most: so many that packing the columns anew for the next ones is negligible */
#define BLOCK (8 * TILE) /* columns of a factor that are turned into rows together */
#define CHUNK 512 /* steps that are added up before their sums are added to others', so that the cache holds them */
#define SHUFFLE __builtin_shufflevector

int64_t is_paired(void) { return PAIRED; }

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Add the products of a step: of columns, one in each lane, with a number or pair of a row. */
INLINE Vector add_step(Vector total, Vector columns, const float *of_row) {
#if PAIRED
    int32_t pair;
    memcpy(&pair, of_row, 4);
    return (Vector)_mm512_dpbf16_ps((__m512)total, (__m512bh)columns, (__m512bh)_mm512_set1_epi32(pair));
#else
    return total + columns * all(*of_row);
#endif
}

/* ── columns ─────────────────────────────────────────────────────────────────────────────────────── */

/* Load 16 bytes of every fourth row, beside each other. */
INLINE Vector load_every_fourth(const char *from, int64_t stride) {
#if LANES == 16
    __m512 x = _mm512_castps128_ps512(_mm_loadu_ps((const float *)from));
    x = _mm512_mask_broadcast_f32x4(x, 0x00f0, _mm_loadu_ps((const float *)(from + 4 * stride)));
    x = _mm512_mask_broadcast_f32x4(x, 0x0f00, _mm_loadu_ps((const float *)(from + 8 * stride)));
    return (Vector)_mm512_mask_broadcast_f32x4(x, 0xf000, _mm_loadu_ps((const float *)(from + 12 * stride)));
#else
    Four low, high;
    memcpy(&low, from, sizeof low);
    memcpy(&high, from + 4 * stride, sizeof high);
    return SHUFFLE(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
#endif
}

#if LANES == 16
#define IN_QUARTERS(A, B, C, D) A, B, C, D, A + 4, B + 4, C + 4, D + 4, A + 8, B + 8, C + 8, D + 8, A + 12, B + 12, C + 12, D + 12
#else
#define IN_QUARTERS(A, B, C, D) A, B, C, D, A + 4, B + 4, C + 4, D + 4
#endif

/* Read LANES rows of as many floats, `stride` bytes apart, as columns. */
INLINE void transpose(const char *from, int64_t stride, Vector *columns) {
    UNROLL for (int c = 0; c < LANES; c += 4) {
        Vector rows[4], low[2], high[2];
        UNROLL for (int i = 0; i < 4; i++) rows[i] = load_every_fourth(from + i * stride + 4 * c, stride);
        UNROLL for (int i = 0; i < 2; i++) {
            low[i] = SHUFFLE(rows[2 * i], rows[2 * i + 1], IN_QUARTERS(0, LANES, 1, LANES + 1));
            high[i] = SHUFFLE(rows[2 * i], rows[2 * i + 1], IN_QUARTERS(2, LANES + 2, 3, LANES + 3));
        }
        columns[c] = SHUFFLE(low[0], low[1], IN_QUARTERS(0, 1, LANES, LANES + 1));
        columns[c + 1] = SHUFFLE(low[0], low[1], IN_QUARTERS(2, 3, LANES + 2, LANES + 3));
        columns[c + 2] = SHUFFLE(high[0], high[1], IN_QUARTERS(0, 1, LANES, LANES + 1));
        columns[c + 3] = SHUFFLE(high[0], high[1], IN_QUARTERS(2, 3, LANES + 2, LANES + 3));
    }
}

#define PER_STEP (1 + PAIRED)
#define PER_VECTOR (4 * LANES / (int64_t)sizeof(Number))
#if defined(BFLOAT16) && !PAIRED
#define STEPS_PER_VECTOR (2 * LANES)
#else
#define STEPS_PER_VECTOR LANES
#endif

/* Load `num` numbers, up to a vector, of each of `num_rows` rows, and return one vector of columns for each step. */
INLINE void load_columns(const Number *from, int64_t num_rows, int64_t stride, int64_t num, Vector *columns) {
    Vector rows[LANES];
    if (num_rows >= LANES && num >= PER_VECTOR) {
        transpose((const char *)from, stride * sizeof(Number), rows);
    } else {
        Number whole[LANES * PER_VECTOR] = {0};
        for (int64_t i = 0; i < least(num_rows, LANES); i++)
            memcpy(whole + i * PER_VECTOR, from + i * stride, least(num, PER_VECTOR) * sizeof(Number));
        transpose((const char *)whole, sizeof(Vector), rows);
    }
#if defined(BFLOAT16) && !PAIRED
    UNROLL for (int i = 0; i < LANES; i++) {
        columns[2 * i] = (Vector)((Bits)rows[i] << 16);
        columns[2 * i + 1] = (Vector)((Bits)rows[i] & 0xffff0000);
    }
#else
    UNROLL for (int i = 0; i < LANES; i++) columns[i] = rows[i];
#endif
}

/* Pack (S, WIDTH) from rows that become columns, `num_rows` of them. */
NOINLINE void pack_rows(const Number *from, int64_t num_rows, int64_t size, float *packed) {
    for (int half = 0; half < 2; half++, from += LANES * size, num_rows -= LANES, packed += LANES)
        for (int64_t k = 0; k < size; k += PER_VECTOR) {
            Vector columns[STEPS_PER_VECTOR];
            load_columns(from + k, num_rows, size, size - k, columns);
            float *to = packed + k / PER_STEP * WIDTH;
            if (size - k >= PER_VECTOR)
                UNROLL for (int i = 0; i < STEPS_PER_VECTOR; i++) store_wide(to + i * WIDTH, columns[i]);
            else
                for (int i = 0; i < (size - k) / PER_STEP; i++) store_wide(to + i * WIDTH, columns[i]);
        }
}

INLINE Vector load_up_to(const Number *from, int64_t num) {
    return num >= LANES ? load(from) : num > 0 ? load_few(from, num, 0) : all(0);
}

/* Pack (S, WIDTH) from columns: `num_columns` of each of `size` rows. */
INLINE void pack_columns_of(const Number *from, const int64_t num_columns, int64_t size, int64_t stride, float *packed) {
    for (int64_t k = 0; k < size; k += PER_STEP, packed += WIDTH, from += PER_STEP * stride)
        UNROLL for (int i = 0; i < WIDTH; i += LANES) {
            Vector x = load_up_to(from + i, num_columns - i);
#if PAIRED
            Vector other = k + 1 < size ? load_up_to(from + stride + i, num_columns - i) : all(0);
            x = (Vector)(((Bits)x >> 16) | (Bits)other);
#endif
            store_wide(packed + i, x);
        }
}

NOINLINE void pack_columns(const Number *from, int64_t num_columns, int64_t size, int64_t stride, float *packed) {
    if (num_columns == WIDTH) pack_columns_of(from, WIDTH, size, stride, packed);
    else pack_columns_of(from, num_columns, size, stride, packed);
}

/* ── rows times packed columns ───────────────────────────────────────────────────────────────────── */

/* What becomes of the sums of a tile: `to = sums * scale + bias`, or added to what is there, as Numbers or as floats. */
typedef struct {
    Number *to;
    float *wide;
    int64_t stride, num_columns;
    const Number *bias;
    float scale;
    int is_added;
} Result;

/* total * scale + before, rounded alike wherever it is computed: compilers fuse the two in some places only. */
INLINE Vector scaled_sum(Vector total, Vector scale, Vector before) {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
    return X86(fmadd_ps, total, scale, before);
#elif defined(__ARM_FEATURE_FMA)
    for (int i = 0; i < LANES; i++) total[i] = __builtin_fmaf(total[i], scale[i], before[i]);
    return total;
#else
    return total * scale + before;
#endif
}

INLINE void finish(const Result *result, int64_t row, int64_t column, Vector total) {
    int64_t num = result->num_columns - column, place = row * result->stride + column;
    if (num <= 0) return;
    Vector scale = all(result->scale);
    if (result->wide) {
        float *to = result->wide + place;
        if (num >= LANES) store_wide(to, scaled_sum(total, scale, load_wide(to)));
        else for (int64_t i = 0; i < num; i++) to[i] += total[i] * result->scale;
        return;
    }
    Number *to = result->to + place;
    const Number *other = result->is_added ? to : result->bias ? result->bias + column : 0;
    Vector before = !other ? all(-0.0f) : num >= LANES ? load(other) : load_few(other, num, 0);
    total = scaled_sum(total, scale, before);
    if (num >= LANES) store(to, total);
    else store_few(to, total, num);
}

/* Return into how many blocks of rows a product is divided, so that there are enough tasks for all threads. Which of them
 * computes a row does not change it. */
static int64_t count_blocks(int64_t num_rows, int64_t num_panels, int64_t num_threads) {
    int64_t num = (num_rows + ROWS - 1) / ROWS, wanted = (4 * num_threads + num_panels - 1) / num_panels;
    return wanted > num ? least(wanted, (num_rows + BLOCK - 1) / BLOCK) : num;
}

/* Multiply COUNT rows, `stride` floats apart, with packed columns; meanwhile ask for `num_lines` lines at `next`, which is
 * at most two for each step. */
INLINE void multiply_tile(const int COUNT, const float *rows, int64_t stride, const float *packed, int64_t num_steps,
                          const char *next, int64_t num_lines, const Result *result, int64_t first) {
    Vector sums[2 * TILE];
    UNROLL for (int i = 0; i < 2 * COUNT; i++) sums[i] = all(0);
    for (int64_t k = 0; k < num_steps; k++) {
        Vector left = load_wide(packed + k * WIDTH), right = load_wide(packed + k * WIDTH + LANES);
        if (k < num_lines) __builtin_prefetch(next + k * LINE, 0, 2);
        if (k + num_steps < num_lines) __builtin_prefetch(next + (k + num_steps) * LINE, 0, 2);
        UNROLL for (int n = 0; n < COUNT; n++) {
            sums[2 * n] = add_step(sums[2 * n], left, rows + n * stride + k);
            sums[2 * n + 1] = add_step(sums[2 * n + 1], right, rows + n * stride + k);
        }
    }
    if (result->num_columns == WIDTH && !result->wide && !result->bias) { /* the usual case, with one branch */
        Vector scale = all(result->scale);
        Number *to = result->to + first * result->stride;
        if (result->is_added)
            UNROLL for (int n = 0; n < COUNT; n++, to += result->stride) {
                store(to, scaled_sum(sums[2 * n], scale, load(to)));
                store(to + LANES, scaled_sum(sums[2 * n + 1], scale, load(to + LANES)));
            }
        else
            UNROLL for (int n = 0; n < COUNT; n++, to += result->stride) {
                store(to, sums[2 * n] * scale);
                store(to + LANES, sums[2 * n + 1] * scale);
            }
    } else
        UNROLL for (int n = 0; n < COUNT; n++) {
            finish(result, first + n, 0, sums[2 * n]);
            finish(result, first + n, LANES, sums[2 * n + 1]);
        }
}

#if TILE == 12
#define CASES CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#else
#define CASES CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif

/* Multiply rows `first` to `last` with packed columns. */
NOINLINE void multiply_packed(const float *rows, int64_t stride, int64_t first, int64_t last, const float *packed,
                            int64_t num_steps, const char *next, int64_t num_lines, const Result *result) {
    int64_t num_tiles = (last - first + TILE - 1) / TILE;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        int64_t from = first + tile * (last - first) / num_tiles, to = first + (tile + 1) * (last - first) / num_tiles;
        /* Memory is read all the time, not by the first tile alone. */
        int64_t line = tile * num_lines / num_tiles, lines = (tile + 1) * num_lines / num_tiles - line;
#define CASE(COUNT) \
    case COUNT: \
        multiply_tile(COUNT, rows + from * stride, stride, packed, num_steps, next + line * LINE, lines, result, \
                      from); \
        break;
        switch (to - from) { CASES }
#undef CASE
    }
}

/* Multiply COUNT rows with LANES columns that are used immediately, not packed; ask for what is at `next`. */
INLINE void multiply_few(const int COUNT, const float *rows, int64_t stride, const Number *weight, int64_t num_columns,
                         int64_t size, const char *next, const Result *result, int64_t column) {
    Vector sums[FEW];
    UNROLL for (int n = 0; n < COUNT; n++) sums[n] = all(0);
    for (int64_t k = 0; k < size; k += PER_VECTOR) {
        Vector columns[STEPS_PER_VECTOR];
        if (next) UNROLL for (int i = 0; i < LANES; i++)
            __builtin_prefetch((const Number *)next + k * LANES + i * PER_VECTOR, 0, 2);
        load_columns(weight + k, num_columns, size, size - k, columns);
        const float *from = rows + k / PER_STEP;
        if (size - k >= PER_VECTOR)
            UNROLL for (int i = 0; i < STEPS_PER_VECTOR; i++)
                UNROLL for (int n = 0; n < COUNT; n++) sums[n] = add_step(sums[n], columns[i], from + n * stride + i);
        else
            for (int i = 0; i < (size - k) / PER_STEP; i++)
                UNROLL for (int n = 0; n < COUNT; n++) sums[n] = add_step(sums[n], columns[i], from + n * stride + i);
    }
    UNROLL for (int n = 0; n < COUNT; n++) finish(result, n, column, sums[n]);
}

NOINLINE void multiply_few_rows(const float *rows, int64_t stride, int64_t num_rows, const Number *weight, int64_t left,
                                int64_t size, const Result *result) {
    for (int half = 0; half < 2 && left > half * LANES; half++) {
        const char *next = left > (half + 2) * LANES ? (const char *)(weight + (half + 2) * LANES * size) : 0;
#define CASE(COUNT) \
    case COUNT: \
        multiply_few(COUNT, rows, stride, weight + half * LANES * size, left - half * LANES, size, next, result, \
                     half * LANES); \
        break;
        switch (num_rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
    }
}

/* ── what is called ──────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    const Number *weight; /* (columns, K) */
    const Number *bias;   /* (columns), or null */
    int64_t num_columns;
} Part;

/* y (N, .) = scale * x @ weight^T + bias, of all parts beside each other, or without the bias added to `y`. Rows of `x` are
 * `stride` floats apart. */
void multiply(const float *x, int64_t stride, int64_t num_rows, int64_t size, const Part *parts, int64_t num_parts,
              float scale, int64_t is_added, Number *y, int64_t y_stride, int64_t num_threads, float *scratch) {
    int64_t num_steps = size / PER_STEP, num_panels = 0;
    for (int64_t i = 0; i < num_parts; i++) num_panels += (parts[i].num_columns + WIDTH - 1) / WIDTH;
    int64_t num_blocks = count_blocks(num_rows, num_panels, num_threads);
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)
    for (int64_t task = 0; task < num_blocks * num_panels; task++) {
        int64_t panel = task % num_panels, block = task / num_panels, offset = 0, thread = 0;
        int64_t first = block * num_rows / num_blocks, last = (block + 1) * num_rows / num_blocks;
        const Part *part = parts;
        for (;; part++) {
            int64_t own = (part->num_columns + WIDTH - 1) / WIDTH;
            if (panel < own) break;
            panel -= own;
            offset += part->num_columns;
        }
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        int64_t column = panel * WIDTH, left = part->num_columns - column;
        const Number *weight = part->weight + column * size;
        Result result = {.to = y + offset + column, .stride = y_stride, .num_columns = least(left, WIDTH),
                         .scale = scale, .is_added = (int)is_added, .bias = part->bias ? part->bias + column : 0};
        if (num_rows <= FEW) {
            multiply_few_rows(x, stride, num_rows, weight, left, size, &result);
            continue;
        }
        float *packed = scratch + thread * num_steps * WIDTH;
        pack_rows(weight, left, size, packed);
        const char *next = (const char *)(weight + WIDTH * size);
        int64_t num_lines = left >= 2 * WIDTH ? WIDTH * size * (int64_t)sizeof(Number) / LINE : 0;
        multiply_packed(x, stride, first, last, packed, num_steps, next, num_lines, &result);
    }
}

/* y (N, M) = scale * x (N, K) @ weight (K, M), or added to `y`. Rows of `x` are `stride` floats apart. */
void multiply_transposed(const float *x, int64_t stride, int64_t num_rows, int64_t size, const Number *weight,
                         int64_t num_columns, int64_t weight_stride, float scale, int64_t is_added, Number *y,
                         int64_t y_stride, int64_t num_threads, float *scratch) {
    int64_t num_steps = size / PER_STEP, num_panels = (num_columns + WIDTH - 1) / WIDTH;
    int64_t num_blocks = count_blocks(num_rows, num_panels, num_threads);
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)
    for (int64_t task = 0; task < num_blocks * num_panels; task++) {
        int64_t column = task % num_panels * WIDTH, block = task / num_panels, thread = 0;
        int64_t first = block * num_rows / num_blocks, last = (block + 1) * num_rows / num_blocks;
        int64_t width = least(num_columns - column, WIDTH);
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        float *packed = scratch + thread * (CHUNK + ROWS) * WIDTH, *sums = packed + CHUNK * WIDTH;
        Result result = {.to = y + column, .stride = y_stride, .num_columns = width, .scale = scale,
                         .is_added = (int)is_added};
        Result partial = {.wide = sums - first * WIDTH, .stride = WIDTH, .num_columns = WIDTH, .scale = 1};
        if (num_steps > CHUNK) memset(sums, 0, (last - first) * WIDTH * sizeof(float));
        for (int64_t step = 0; step < num_steps; step += CHUNK) {
            int64_t num = least(CHUNK, num_steps - step);
            const Number *from = weight + step * PER_STEP * weight_stride + column;
            pack_columns(from, width, num * PER_STEP, weight_stride, packed);
            multiply_packed(x + step, stride, first, last, packed, num, 0, 0, num_steps > CHUNK ? &partial : &result);
        }
        if (num_steps > CHUNK)
            for (int64_t row = first; row < last; row++)
                for (int i = 0; i < WIDTH; i += LANES)
                    finish(&result, row, i, load_wide(sums + (row - first) * WIDTH + i));
    }
}

/* Write columns `first` to `first + num` of `from` (N, .) as rows of `num_steps` floats, filled up with zeros. */
NOINLINE void turn(const Number *from, int64_t stride, int64_t num_rows, int64_t first, int64_t num, int64_t num_steps,
                 float *to) {
    for (int64_t k = 0; k < num_steps; k += LANES)
        for (int64_t c = 0; c < num; c += LANES) {
            Vector rows[LANES], columns[LANES];
            int64_t width = num - c;
            for (int i = 0; i < LANES; i++) {
                int64_t row = (k + i) * PER_STEP;
                const Number *place = from + row * stride + first + c;
                Vector x = row < num_rows ? load_up_to(place, width) : all(0);
#if PAIRED
                Vector other = row + 1 < num_rows ? load_up_to(place + stride, width) : all(0);
                x = (Vector)(((Bits)x >> 16) | (Bits)other);
#endif
                rows[i] = x;
            }
            transpose((const char *)rows, sizeof(Vector), columns);
            for (int64_t i = 0; i < LANES && i < width; i++) {
                float *at = to + (c + i) * num_steps + k;
                if (num_steps - k >= LANES) store_wide(at, columns[i]);
                else memcpy(at, &columns[i], (num_steps - k) * 4);
            }
        }
}

/* gradient (O, I) += scale * left (N, O)^T @ right (N, I), in float32. */
void add_gradient(const Number *left, int64_t left_stride, int64_t num_left, const Number *right, int64_t right_stride,
                  int64_t num_right, int64_t num_rows, float scale, float *gradient, int64_t stride,
                  int64_t num_threads, float *scratch) {
    int64_t num_panels = (num_right + WIDTH - 1) / WIDTH;
    int64_t num_blocks = (num_left + BLOCK - 1) / BLOCK;
    /* Enough tasks for all threads; which of them computes a number does not change it. */
    int64_t num_parts = least(num_panels, (4 * num_threads + num_blocks - 1) / num_blocks);
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)
    for (int64_t task = 0; task < num_blocks * num_parts; task++) {
        int64_t first = task / num_parts * BLOCK, part = task % num_parts, thread = 0;
        int64_t count = least(BLOCK, num_left - first);
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        float *packed = scratch + thread * CHUNK * (WIDTH + BLOCK), *turned = packed + CHUNK * WIDTH;
        for (int64_t row = 0; row < num_rows; row += CHUNK * PER_STEP) {
            int64_t num = least(CHUNK * PER_STEP, num_rows - row), num_steps = (num + PER_STEP - 1) / PER_STEP;
            turn(left + row * left_stride, left_stride, num, first, count, num_steps, turned);
            for (int64_t panel = part * num_panels / num_parts; panel < (part + 1) * num_panels / num_parts; panel++) {
                int64_t column = panel * WIDTH, width = least(num_right - column, WIDTH);
                Result result = {.wide = gradient + first * stride + column, .stride = stride, .num_columns = width,
                                 .scale = scale};
                pack_columns(right + row * right_stride + column, width, num, right_stride, packed);
                multiply_packed(turned, num_steps, 0, count, packed, num_steps, 0, 0, &result);
            }
        }
    }
}
