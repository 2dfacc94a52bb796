/* What a decoder layer does when it decodes, besides what `rowwise.c` has: attention and the products of adapters.
 *
 * Each function does in one call what takes torch ten small ones, for one dtype, which is chosen at compilation. Where
 * torch rounds to that dtype these functions round too, so that a token has the log probability that training gives it.
 * `decode.py` calls them; a model uses those that gave its own layers' results on a probe.
 *
 * Legend: N rows, H hidden size, Q query heads, K key/value heads, G = Q / K, D head size, C capacity of a cache.
 */

#include "numbers.h"

/* ── attention ───────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    int64_t num_rows;
    int64_t num_threads;
    const int64_t *rows;    /* N: the row of the cache that each row of the pass has */
    const int64_t *lengths; /* N: positions in that row of the cache before this pass */
    const int64_t *pasts;   /* N: the past that the row continues, or -1 */
    const int64_t *past_lengths; /* N */
    float *scratch;
    int64_t scratch_size; /* floats of each thread: keys of the longest row, rounded up, times G */
} Pass;

typedef struct {
    int64_t num_heads, num_kv, head_dim;
    float scale;
    float softcap;  /* 0: none */
    int64_t window; /* 0: none */
    const float *sinks; /* Q, or null */
    float q_eps, k_eps;
} Layer;

typedef struct {
    Number *k, *v; /* (rows, K, C, D) */
    int64_t capacity;
    const Number *const *past_k; /* of each past (K, C, D) */
    const Number *const *past_v;
    const int64_t *past_capacities;
} Cache;

/* Rotate a head by the angles of its position. */
INLINE void rotate(Number *x, const Number *cos, const Number *sin, int64_t size) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        Vector low = load(x + i), high = load(x + half + i);
        Vector turned_low = rounded(-high * load(sin + i)), turned_high = rounded(low * load(sin + half + i));
        store(x + i, rounded(low * load(cos + i)) + turned_low);
        store(x + half + i, rounded(high * load(cos + half + i)) + turned_high);
    }
}

#define MAX_HEAD_DIM 256
#define MAX_GROUP 32
#define MAX_COUNT 4 /* heads whose sums the registers hold */

/* Write the scores of `num` keys for `queries` (COUNT, D), a row of `stride` floats for each query. */
INLINE void score(const int64_t SIZE, const int COUNT, const float *queries, const Number *keys, int64_t num,
                  float *scores, int64_t stride) {
    int64_t key = 0;
    for (; key + 4 <= num; key += 4, keys += 4 * SIZE) {
        Vector sums[4 * MAX_COUNT];
        UNROLL for (int i = 0; i < 4 * COUNT; i++) sums[i] = all(0);
        for (int64_t i = 0; i < SIZE; i += LANES)
            UNROLL for (int part = 0; part < 4; part++) {
                Vector numbers = load(keys + part * SIZE + i);
                UNROLL for (int g = 0; g < COUNT; g++) sums[4 * g + part] += load_wide(queries + g * SIZE + i) * numbers;
            }
        UNROLL for (int g = 0; g < COUNT; g++) {
            Four four = sums_of_four(sums + 4 * g);
            memcpy(scores + g * stride + key, &four, sizeof four);
        }
    }
    for (; key < num; key++, keys += SIZE)
        for (int g = 0; g < COUNT; g++) {
            Vector total = all(0);
            for (int64_t i = 0; i < SIZE; i += LANES) total += load_wide(queries + g * SIZE + i) * load(keys + i);
            scores[g * stride + key] = sum(total);
        }
}

/* Add values with their weights to `out` (COUNT, D). */
INLINE void combine(const int64_t SIZE, const int COUNT, const float *weights, int64_t stride, const Number *values,
                    int64_t num, float *out) {
    Vector sums[2 * MAX_HEAD_DIM / LANES];
    const int PARTS = (int)(SIZE / LANES);
    UNROLL for (int i = 0; i < COUNT * PARTS; i++) sums[i] = load_wide(out + i * LANES);
    for (int64_t key = 0; key < num; key++, values += SIZE)
        UNROLL for (int i = 0; i < PARTS; i++) {
            Vector part = load(values + i * LANES);
            UNROLL for (int g = 0; g < COUNT; g++) sums[g * PARTS + i] += all(weights[g * stride + key]) * part;
        }
    UNROLL for (int i = 0; i < COUNT * PARTS; i++) store_wide(out + i * LANES, sums[i]);
}

/* Turn scores of `num` keys into probabilities, in place. */
static void softmax(float *scores, int64_t num, float softcap, const float *sink) {
    int64_t whole = num & -LANES;
    for (int64_t i = num; i & (LANES - 1); i++) scores[i] = 0;
    for (int64_t i = 0; i < num; i += LANES) store_wide(scores + i, rounded(load_wide(scores + i)));
    if (softcap != 0) {
        for (int64_t i = 0; i < num; i += LANES) {
            /* tanh(y) = 1 - 2 / (e^2y + 1) */
            Vector doubled = load_wide(scores + i) * all(2.0f / softcap);
            store_wide(scores + i, all(softcap) * (all(1.0f) - all(2.0f) / (exponential(doubled) + all(1.0f))));
        }
    }
    for (int64_t i = num; i & (LANES - 1); i++) scores[i] = -INFINITY;
    Vector largest = all(-INFINITY);
    for (int64_t i = 0; i < num; i += LANES) largest = larger(load_wide(scores + i), largest);
    float most = sink ? *sink : -INFINITY;
    for (int i = 0; i < LANES; i++) most = largest[i] > most ? largest[i] : most;
    Vector total = {0};
    for (int64_t i = 0; i < num; i += LANES) {
        Vector part = exponential(load_wide(scores + i) - all(most));
        store_wide(scores + i, part);
        if (i < whole) total += part;
    }
    float sum_of_all = sum(total);
    for (int64_t i = whole; i < num; i++) sum_of_all += scores[i];
    if (sink) sum_of_all += exponential(all(*sink - most))[0];
    for (int64_t i = 0; i < num; i += LANES)
        store_wide(scores + i, rounded(load_wide(scores + i) / all(sum_of_all)));
}

typedef struct {
    const Number *k, *v;
    int64_t num;
} Segment;

/* Attend from `COUNT` heads, whose queries are scaled, to the keys of the segments. */
INLINE void attend_heads(const int64_t SIZE, const int COUNT, const float *queries, const Segment *segments,
                         float softcap, const float *sinks, float *scores, int64_t stride, float *out) {
    int64_t num = 0;
    for (int s = 0; s < 2; s++) {
        score(SIZE, COUNT, queries, segments[s].k, segments[s].num, scores + num, stride);
        num += segments[s].num;
    }
    for (int g = 0; g < COUNT; g++) softmax(scores + g * stride, num, softcap, sinks ? sinks + g : 0);
    memset(out, 0, sizeof(float) * COUNT * SIZE);
    num = 0;
    for (int s = 0; s < 2; s++) {
        combine(SIZE, COUNT, scores + num, stride, segments[s].v, segments[s].num, out);
        num += segments[s].num;
    }
}

/* Attend from all heads of a key head's group, as many together as registers allow. */
INLINE void attend_group(const int64_t SIZE, const float *queries, int64_t group, const Segment *segments,
                         float softcap, const float *sinks, float *scores, int64_t stride, Number *out) {
    const int64_t TOGETHER = REGISTERS * LANES / SIZE;
    float sums[4 * MAX_HEAD_DIM];
    int64_t g = 0;
    while (g < group) {
        int64_t count = 1;
        if (TOGETHER >= 4 && group - g >= 4) {
            count = 4;
            attend_heads(SIZE, 4, queries + g * SIZE, segments, softcap, sinks ? sinks + g : 0, scores, stride, sums);
        } else if (TOGETHER >= 2 && group - g >= 2) {
            count = 2;
            attend_heads(SIZE, 2, queries + g * SIZE, segments, softcap, sinks ? sinks + g : 0, scores, stride, sums);
        } else {
            attend_heads(SIZE, 1, queries + g * SIZE, segments, softcap, sinks ? sinks + g : 0, scores, stride, sums);
        }
        for (int64_t i = 0; i < count * SIZE; i += LANES) store(out + g * SIZE + i, load_wide(sums + i));
        g += count;
    }
}

static void attend_one(const Pass *pass, const Layer *layer, const Cache *cache, Number *q, Number *k, const Number *v,
                       const Number *cos, const Number *sin, const Number *q_weight, const Number *k_weight,
                       int64_t row, int64_t head, float *scores, Number *out) {
    const int64_t size = layer->head_dim, group = layer->num_heads / layer->num_kv;
    const int64_t own = pass->lengths[row], past = pass->past_lengths[row], position = past + own;
    Number *own_k = cache->k + (pass->rows[row] * layer->num_kv + head) * cache->capacity * size;
    Number *own_v = cache->v + (pass->rows[row] * layer->num_kv + head) * cache->capacity * size;
    if (k_weight) normalise(k, k_weight, 0, layer->k_eps, size, k);
    rotate(k, cos, sin, size);
    memcpy(own_k + own * size, k, size * sizeof(Number));
    memcpy(own_v + own * size, v, size * sizeof(Number));

    float queries[MAX_GROUP * MAX_HEAD_DIM];
    for (int64_t g = 0; g < group; g++, q += size) {
        if (q_weight) normalise(q, q_weight, 0, layer->q_eps, size, q);
        rotate(q, cos, sin, size);
        for (int64_t i = 0; i < size; i += LANES)
            store_wide(queries + g * size + i, rounded(load(q + i) * all(layer->scale)));
    }

    int64_t first = layer->window && position + 1 > layer->window ? position + 1 - layer->window : 0;
    Segment segments[2] = {{0, 0, 0}, {own_k, own_v, own + 1}};
    if (past > first) {
        int64_t which = pass->pasts[row], offset = (head * cache->past_capacities[which] + first) * size;
        segments[0] = (Segment){cache->past_k[which] + offset, cache->past_v[which] + offset, past - first};
    } else if (first > past) {
        int64_t hidden = first - past;
        segments[1] = (Segment){own_k + hidden * size, own_v + hidden * size, own + 1 - hidden};
    }
    const float *sinks = layer->sinks ? layer->sinks + head * group : 0;
    int64_t stride = pass->scratch_size / group;
#define CASE(SIZE) \
    case SIZE: \
        attend_group(SIZE, queries, group, segments, layer->softcap, sinks, scores, stride, out); \
        break;
    switch (size) { CASE(32) CASE(64) CASE(96) CASE(128) CASE(192) CASE(256) }
}

/* Normalise, rotate and store the keys of a pass, whose `qkv` has a row of Q + 2K heads for each token, and attend from
 * its queries, which are changed in place. `cos` and `sin` are (N, D), `out` is (N, Q * D). */
void attend(const Pass *pass, const Layer *layer, const Cache *cache, Number *qkv, const Number *cos, const Number *sin,
            const Number *q_weight, const Number *k_weight, Number *out) {
    const int64_t size = layer->head_dim, num_heads = layer->num_heads, num_kv = layer->num_kv;
    const int64_t group = num_heads / num_kv, width = (num_heads + 2 * num_kv) * size;
#pragma omp parallel for num_threads(pass->num_threads) schedule(static)
    for (int64_t task = 0; task < pass->num_rows * num_kv; task++) {
        /* Rows after each other have the same head, and so the same keys in the cache where they have one past. */
        int64_t row = task % pass->num_rows, head = task / pass->num_rows, thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        Number *heads = qkv + row * width;
        attend_one(pass, layer, cache, heads + head * group * size, heads + (num_heads + head) * size,
                   heads + (num_heads + num_kv + head) * size, cos + row * size, sin + row * size, q_weight, k_weight,
                   row, head, pass->scratch + thread * pass->scratch_size, out + (row * num_heads + head * group) * size);
    }
}

/* ── low-rank pairs ──────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    const Number *a;   /* (R, I) */
    const Number *b_t; /* (R, O), the transpose of B */
    int64_t rank, start, stop; /* rows start:stop of the pass belong to the adapter */
    int64_t out_features, offset; /* the columns of the output that the pair adds to */
    int64_t inner; /* where its products with A begin in the scratch memory */
    double scale;
} Pair;

#if LANES == 16
#define ROWS 4
#else
#define ROWS 2
#endif
#define COLUMNS 4

/* inner (rows, R) = x @ A^T for COUNT rows and up to COLUMNS of the R columns. */
INLINE void multiply_a(const int COUNT, const int WIDTH, const Number *x, const Number *a, int64_t in_features,
                       float *inner, int64_t rank) {
    Vector sums[ROWS * COLUMNS];
    UNROLL for (int i = 0; i < COUNT * WIDTH; i++) sums[i] = all(0);
    for (int64_t i = 0; i < in_features; i += LANES) {
        Vector rows[ROWS];
        UNROLL for (int n = 0; n < COUNT; n++) rows[n] = load(x + n * in_features + i);
        UNROLL for (int c = 0; c < WIDTH; c++) {
            Vector column = load(a + c * in_features + i);
            UNROLL for (int n = 0; n < COUNT; n++) sums[n * WIDTH + c] += rows[n] * column;
        }
    }
    UNROLL for (int n = 0; n < COUNT; n++)
        UNROLL for (int c = 0; c < WIDTH; c++) inner[n * rank + c] = round_one(sum(sums[n * WIDTH + c]));
}

/* y (rows, .) += scale * inner @ B^T for COUNT rows and WIDTH vectors of columns. */
INLINE void multiply_b(const int COUNT, const int WIDTH, const float *inner, int64_t rank, const Number *b_t,
                       int64_t out_features, float scale, Number *y, int64_t stride) {
    Vector sums[ROWS * COLUMNS];
    UNROLL for (int i = 0; i < COUNT * WIDTH; i++) sums[i] = all(0);
    for (int64_t r = 0; r < rank; r++)
        UNROLL for (int c = 0; c < WIDTH; c++) {
            Vector column = load(b_t + r * out_features + c * LANES);
            UNROLL for (int n = 0; n < COUNT; n++) sums[n * WIDTH + c] += all(inner[n * rank + r]) * column;
        }
    UNROLL for (int n = 0; n < COUNT; n++)
        UNROLL for (int c = 0; c < WIDTH; c++) {
            Number *to = y + n * stride + c * LANES;
            store(to, load(to) + all(scale) * sums[n * WIDTH + c]);
        }
}

/* Columns of A that one task multiplies, and columns of the output that another one adds to. */
#define A_TASK 8
#define B_TASK 256

static void multiply_a_part(const Pair *pair, int64_t first, const Number *x, int64_t in_features, float *scratch) {
    int64_t last = first + A_TASK < pair->rank ? first + A_TASK : pair->rank;
    for (int64_t c = first; c < last;) {
        int64_t width = last - c >= COLUMNS ? COLUMNS : 1;
        const Number *a = pair->a + c * in_features;
        for (int64_t n = pair->start; n < pair->stop;) {
            float *inner = scratch + pair->inner + (n - pair->start) * pair->rank + c;
            const Number *rows = x + n * in_features;
            if (pair->stop - n >= ROWS) {
                if (width == COLUMNS) multiply_a(ROWS, COLUMNS, rows, a, in_features, inner, pair->rank);
                else multiply_a(ROWS, 1, rows, a, in_features, inner, pair->rank);
                n += ROWS;
            } else {
                if (width == COLUMNS) multiply_a(1, COLUMNS, rows, a, in_features, inner, pair->rank);
                else multiply_a(1, 1, rows, a, in_features, inner, pair->rank);
                n += 1;
            }
        }
        c += width;
    }
}

static void multiply_b_part(const Pair *pair, int64_t first, const float *scratch, Number *y, int64_t stride) {
    int64_t end = first + B_TASK, last = end < pair->out_features ? end : pair->out_features;
    for (int64_t o = first; o < last;) {
        int64_t width = last - o >= COLUMNS * LANES ? COLUMNS : 1;
        const Number *b_t = pair->b_t + o;
        for (int64_t n = pair->start; n < pair->stop;) {
            const float *inner = scratch + pair->inner + (n - pair->start) * pair->rank;
            Number *to = y + n * stride + pair->offset + o;
            float scale = (float)pair->scale;
            int64_t rank = pair->rank, size = pair->out_features;
            if (pair->stop - n >= ROWS) {
                if (width == COLUMNS) multiply_b(ROWS, COLUMNS, inner, rank, b_t, size, scale, to, stride);
                else multiply_b(ROWS, 1, inner, rank, b_t, size, scale, to, stride);
                n += ROWS;
            } else {
                if (width == COLUMNS) multiply_b(1, COLUMNS, inner, rank, b_t, size, scale, to, stride);
                else multiply_b(1, 1, inner, rank, b_t, size, scale, to, stride);
                n += 1;
            }
        }
        o += width * LANES;
    }
}

/* Add the products of low-rank pairs to `y`, which has rows of `stride` numbers. A task is a part of one pair:
 * `tasks` has its pair and first column, the `num_a` tasks of factors A first. */
void add_pairs(const Pair *pairs, const int32_t *tasks, int64_t num_a, int64_t num_tasks, const Number *x,
               int64_t in_features, Number *y, int64_t stride, float *scratch, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_a; i++)
            multiply_a_part(pairs + tasks[2 * i], tasks[2 * i + 1], x, in_features, scratch);
#pragma omp for schedule(static)
        for (int64_t i = num_a; i < num_tasks; i++)
            multiply_b_part(pairs + tasks[2 * i], tasks[2 * i + 1], scratch, y, stride);
    }
}
