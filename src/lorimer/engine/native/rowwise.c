/* What a decoder layer and the output head do to rows between their products, and the gradients of it.
 *
 * Norms, gated activations, the softmax of attention and the log probabilities of tokens, each in one pass over memory,
 * for one dtype, which is chosen at compilation. Where torch rounds to that dtype these functions round too. A row's
 * results do not depend on other rows. `rowwise.py` calls them, after comparing them with torch on a probe.
 *
 * Legend: N rows, H hidden size, I inner size, V vocabulary.
 */

#include "numbers.h"

#define PARALLEL_ROWS _Pragma("omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)")

/* ── norm ────────────────────────────────────────────────────────────────────────────────────────── */

/* Add `added` (NH), if there is one, to `x` (NH), and write the norm of the result to `out`. */
void add_and_normalise(Number *x, const Number *added, const Number *weight, const float *wide, float eps,
                       int64_t num_rows, int64_t size, int64_t num_threads, Number *out) {
    PARALLEL_ROWS
    for (int64_t row = 0; row < num_rows; row++) {
        Number *from = x + row * size;
        if (added)
            for (int64_t i = 0; i < size; i += LANES) store(from + i, load(added + row * size + i) + load(from + i));
        normalise(from, weight, wide, eps, size, out + row * size);
    }
}

/* Rows whose parts of a weight's gradient are added up by one thread, whatever the number of threads. */
#define TOGETHER 64

/* Write the gradient of `x` (NH), and that of the weight for each 64 rows, (N / 64, H), if it is wanted. */
void normalise_gradient(const Number *x, const Number *d_y, const Number *weight, const float *wide, float eps,
                        int64_t num_rows, int64_t size, int64_t num_threads, Number *d_x, float *d_weights) {
    int64_t num_parts = (num_rows + TOGETHER - 1) / TOGETHER;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)
    for (int64_t part = 0; part < num_parts; part++) {
        int64_t last = (part + 1) * TOGETHER < num_rows ? (part + 1) * TOGETHER : num_rows;
        float *d_weight = d_weights ? d_weights + part * size : 0;
        if (d_weight) memset(d_weight, 0, sizeof(float) * size);
        for (int64_t row = part * TOGETHER; row < last; row++) {
            const Number *from = x + row * size, *d = d_y + row * size;
            float inverse = inverse_rms(from, eps, size);
            Vector products = {0};
            for (int64_t i = 0; i < size; i += LANES) {
                Vector factor = wide ? load_wide(wide + i) : load(weight + i), number = load(from + i), d_i = load(d + i);
                products += d_i * factor * number;
                if (d_weight) store_wide(d_weight + i, load_wide(d_weight + i) + d_i * number * all(inverse));
            }
            Vector along = all(-sum(products) * inverse * inverse * inverse / (float)size);
            for (int64_t i = 0; i < size; i += LANES) {
                Vector factor = wide ? load_wide(wide + i) : load(weight + i);
                store(d_x + row * size + i, load(d + i) * factor * all(inverse) + load(from + i) * along);
            }
        }
    }
}

/* ── gated activation ────────────────────────────────────────────────────────────────────────────── */

INLINE Vector sigmoid(Vector x) { return all(1.0f) / (all(1.0f) + exponential(-x)); }

/* out (NI) = silu(gate) * up, whose rows are `stride` numbers apart. */
void gate_with_silu(const Number *gate, const Number *up, int64_t stride, int64_t num_rows, int64_t size,
                    int64_t num_threads, Number *out) {
    PARALLEL_ROWS
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            Vector x = load(gate + row * stride + i);
            store(out + row * size + i, rounded(x * sigmoid(x)) * load(up + row * stride + i));
        }
}

/* Write the gradient of up (NI), and that of the gate in place of that of the product. */
void gate_gradient(const Number *gate, const Number *up, Number *d_product, int64_t num_rows, int64_t size,
                   int64_t num_threads, Number *d_up) {
    PARALLEL_ROWS
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t i = row * size; i < (row + 1) * size; i += LANES) {
            Vector x = load(gate + i), d = load(d_product + i), part = sigmoid(x);
            store(d_up + i, d * rounded(x * part));
            store(d_product + i, rounded(d * load(up + i)) * part * (all(1.0f) + x * (all(1.0f) - part)));
        }
}

/* ── softmax ─────────────────────────────────────────────────────────────────────────────────────── */

/* Numbers that are added up in float32, before their sum is added to the others in float64. */
#define SUMMED 1024

/* Return the sum of e^(x - largest), and the largest number; write the terms to `terms` if that is not null. */
INLINE double sum_exponentials(const Number *x, int64_t size, float *largest, float *terms) {
    Vector most = all(-INFINITY);
    int64_t whole = size & -LANES, rest = size - whole;
    for (int64_t i = 0; i < whole; i += LANES) most = larger(load(x + i), most);
    if (rest) most = larger(load_few(x + whole, rest, -INFINITY), most);
    float found = -INFINITY;
    for (int i = 0; i < LANES; i++) found = most[i] > found ? most[i] : found;
    double total = 0;
    for (int64_t first = 0; first < whole; first += SUMMED) {
        int64_t last = first + SUMMED < whole ? first + SUMMED : whole;
        Vector part = {0};
        for (int64_t i = first; i < last; i += LANES) {
            Vector term = exponential(load(x + i) - all(found));
            if (terms) store_wide(terms + i, term);
            part += term;
        }
        total += sum(part);
    }
    if (rest) {
        Vector term = exponential(load_few(x + whole, rest, -INFINITY) - all(found));
        if (terms) store_wide(terms + whole, term);
        for (int64_t i = 0; i < rest; i++) total += term[i];
    }
    *largest = found;
    return total;
}

/* Write the largest of each row of `x` (NV), and the logarithm of the sum of e^(x - largest). */
void log_sums(const Number *x, int64_t num_rows, int64_t size, int64_t num_threads, float *largest, float *logs) {
    PARALLEL_ROWS
    for (int64_t row = 0; row < num_rows; row++)
        logs[row] = (float)log(sum_exponentials(x + row * size, size, largest + row, 0));
}

/* Write the gradient of a loss with respect to logits (NV) in place of them, given that with respect to the log
 * probabilities of tokens `ids`, of which row n has those from `firsts[n] - firsts[0]`. `finals` is as long as `ids`. */
void log_softmax_gradient(Number *x, int64_t num_rows, int64_t size, int64_t num_threads, const float *largest,
                          const float *logs, const int64_t *firsts, const int64_t *ids, const float *d_logprobs,
                          float *finals) {
    PARALLEL_ROWS
    for (int64_t row = 0; row < num_rows; row++) {
        Number *logits = x + row * size;
        int64_t first = firsts[row] - firsts[0], last = firsts[row + 1] - firsts[0];
        float total = 0;
        for (int64_t p = first; p < last; p++) total += d_logprobs[p];
        Vector factor = all(-total), most = all(largest[row]), log_sum = all(logs[row]);
        for (int64_t p = first; p < last; p++) {
            float final = (factor * exponential(load_few(logits + ids[p], 1, 0) - most - log_sum))[0];
            for (int64_t other = first; other < last; other++)
                if (ids[other] == ids[p]) final += d_logprobs[other];
            finals[p] = final;
        }
        int64_t whole = size & -LANES;
        for (int64_t i = 0; i < whole; i += LANES)
            store(logits + i, factor * exponential(load(logits + i) - most - log_sum));
        if (size > whole) {
            Vector part = load_few(logits + whole, size - whole, 0);
            store_few(logits + whole, factor * exponential(part - most - log_sum), size - whole);
        }
        for (int64_t p = first; p < last; p++) store_few(logits + ids[p], all(finals[p]), 1);
    }
}

/* Weights that are added up together before the token among them is looked for. */
#define BLOCK 256

/* e^x, and 0 where that is less than float32 has. */
INLINE Vector weight_of(Vector x) {
    Bits is_zero = (Bits)(x < all(-87.33f)); /* in this order NaN stays NaN */
    return (Vector)((Bits)exponential(x) & ~is_zero);
}

/* The scaled distances of the `num` logits at `from` to the largest. */
INLINE Vector distances(const float *from, int64_t num, float largest, float temperature) {
    float few[LANES];
    if (num < LANES) {
        for (int64_t i = 0; i < LANES; i++) few[i] = i < num ? from[i] : -INFINITY;
        from = few;
    }
    Vector x = load_wide(from) - all(largest);
    return temperature == 1 ? x : x / all(temperature);
}

/* Draw a token for each row of logits (NV): the first whose cumulative weight exceeds `numbers[row]` of the total. Write
 * the largest logit and the logarithm of the total too. */
void draw(const float *logits, int64_t num_rows, int64_t size, int64_t num_threads, const float *temperatures,
          const double *numbers, int64_t *tokens, float *logprobs, float *all_largest, float *logs) {
    int64_t num_blocks = (size + BLOCK - 1) / BLOCK;
    PARALLEL_ROWS
    for (int64_t row = 0; row < num_rows; row++) {
        const float *x = logits + row * size;
        float largest = -INFINITY, temperature = temperatures[row];
        Vector most = all(-INFINITY);
        for (int64_t i = 0; i + LANES <= size; i += LANES) most = larger(load_wide(x + i), most);
        for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
        for (int64_t i = size & -LANES; i < size; i++) largest = x[i] > largest ? x[i] : largest;
        double cumulative[num_blocks], total = 0;
        for (int64_t b = 0; b < num_blocks; b++) {
            int64_t last = (b + 1) * BLOCK < size ? (b + 1) * BLOCK : size;
            Vector weights = {0};
            for (int64_t i = b * BLOCK; i < last; i += LANES)
                weights += weight_of(distances(x + i, last - i, largest, temperature));
            cumulative[b] = total += sum(weights);
        }
        double point = numbers[row] * total;
        int64_t block = 0;
        while (block < num_blocks - 1 && !(cumulative[block] > point)) block++;
        double before = block ? cumulative[block - 1] : 0;
        int64_t first = block * BLOCK, last = first + BLOCK < size ? first + BLOCK : size, token = first;
        for (int64_t i = first; i < last && !(before > point); i++) {
            float weight = weight_of(distances(x + i, 1, largest, temperature))[0];
            before += weight;
            /* Rounding may point behind the last weight of the block: the last token that has one is meant. */
            if (weight > 0) token = i;
        }
        tokens[row] = token;
        all_largest[row] = largest;
        logs[row] = (float)log(total);
        logprobs[row] = distances(x + token, 1, largest, temperature)[0] - logs[row];
    }
}

/* The keys that each row of scores sees: rows of `cycle` successive queries, the first of which sees keys up to `first`,
 * each those within its window. */
typedef struct {
    int64_t num_rows, num_keys, cycle, first, window; /* 0: no window */
    int64_t num_threads;
    float *scratch; /* of each thread, num_keys rounded up */
} Mask;

/* The scores of a row that are seen, and memory for as many numbers. */
typedef struct {
    int64_t low, num;
    float *terms;
} Seen;

INLINE Seen seen_by(const Mask *mask, int64_t row) {
    int64_t high = mask->first + row % mask->cycle + 1, thread = 0;
    int64_t low = mask->window && high > mask->window ? high - mask->window : 0;
#ifdef _OPENMP
    thread = omp_get_thread_num();
#endif
    return (Seen){low, high - low, mask->scratch + thread * ((mask->num_keys + LANES - 1) & -LANES)};
}

INLINE void clear_unseen(Number *row, Seen seen, int64_t num_keys) {
    memset(row, 0, seen.low * sizeof(Number));
    memset(row + seen.low + seen.num, 0, (num_keys - seen.low - seen.num) * sizeof(Number));
}

/* Turn scores into probabilities, in place. */
void masked_softmax(const Mask *mask, Number *scores) {
    int64_t num_threads = mask->num_threads;
    PARALLEL_ROWS
    for (int64_t row = 0; row < mask->num_rows; row++) {
        Number *x = scores + row * mask->num_keys;
        Seen seen = seen_by(mask, row);
        clear_unseen(x, seen, mask->num_keys);
        x += seen.low;
        float largest;
        Vector inverse = all((float)(1 / sum_exponentials(x, seen.num, &largest, seen.terms)));
        int64_t i = 0;
        for (; i + LANES <= seen.num; i += LANES) store(x + i, load_wide(seen.terms + i) * inverse);
        if (i < seen.num) store_few(x + i, load_wide(seen.terms + i) * inverse, seen.num - i);
    }
}

/* Turn scores into probabilities, and the gradients of these into those of the scores, in place. */
void masked_softmax_gradient(const Mask *mask, Number *scores, Number *gradients) {
    int64_t num_threads = mask->num_threads;
    PARALLEL_ROWS
    for (int64_t row = 0; row < mask->num_rows; row++) {
        Number *x = scores + row * mask->num_keys, *d = gradients + row * mask->num_keys;
        Seen seen = seen_by(mask, row);
        clear_unseen(x, seen, mask->num_keys);
        clear_unseen(d, seen, mask->num_keys);
        x += seen.low;
        d += seen.low;
        float largest;
        Vector inverse = all((float)(1 / sum_exponentials(x, seen.num, &largest, seen.terms)));
        int64_t whole = seen.num & -LANES, rest = seen.num - whole;
        Vector products = {0};
        for (int64_t i = 0; i < whole; i += LANES) products += load_wide(seen.terms + i) * load(d + i);
        if (rest) products += load_wide(seen.terms + whole) * load_few(d + whole, rest, 0);
        Vector mean = all(sum(products * inverse));
        for (int64_t i = 0; i < whole; i += LANES) {
            Vector p = load_wide(seen.terms + i) * inverse;
            store(d + i, p * (load(d + i) - mean));
            store(x + i, p);
        }
        if (rest) {
            Vector p = load_wide(seen.terms + whole) * inverse;
            store_few(d + whole, p * (load_few(d + whole, rest, 0) - mean), rest);
            store_few(x + whole, p, rest);
        }
    }
}
