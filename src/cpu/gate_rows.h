/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gate_rows.h - the gate's row kernels, a part of nsa_rows.h. Per element of a row of some token and head:
 *
 *   gate_rows      g = sigmoid(W q), o = sum_b g_b o_b                  3 + 3 FMAs, 4 loads, 1 store
 *   gate_backward  r_b = d_o . o_b, d_o_b = g_b d_o, d_q = sum_b dl_b w_b
 *                                                                       3 + 3 + 3 FMAs, 4 loads, 4 stores
 *   gate_weight    d_w_b += sum over tokens of dl_b q                   3 FMAs, 1 load
 *
 * A row of 128 floats is 32 cache lines read and 8 written for about 70 cycles of arithmetic, so memory is the limit
 * and what matters is that nothing waits. From the last FMA of a row's dot products to its gates it takes about 130
 * cycles (sums across lanes, exp2, division), more than a core looks ahead: so the products run LEAD rows before
 * the row that is written. Gates go through memory one vector of four to a row, stored and loaded whole or in
 * parts: a load of what several stores have written would wait until all older stores, the non-temporal ones
 * included, have left the core. Weights (3 rows a head) stay in L1.
 */
#ifndef QUERN_CPU_GATE_ROWS_H
#define QUERN_CPU_GATE_ROWS_H

enum { LEAD = 2, SLOTS = 4 };

/* A place in a grid of tokens and heads, in the order of memory. */
typedef struct grid_place {
    int64_t token, head;
} grid_place;

INLINE grid_place next_place(grid_place p, int64_t heads)
{
    return p.head + 1 < heads ? (grid_place){p.token, p.head + 1} : (grid_place){p.token + 1, 0};
}

INLINE void *grid_row(const row_grid *g, int64_t bytes, grid_place p)
{
    return g->data == NULL ? NULL : (char *)g->data + (p.token * g->token + p.head * g->head) * bytes;
}

/* An activation is f32 or half; a weight is f32 or of the activations' dtype. */
#define BY_DTYPE_AND_WEIGHT(dtype, w_dtype, call)                                                      \
    do {                                                                                               \
        if ((dtype) == QUERN_F32) call(QUERN_F32, QUERN_F32);                                          \
        else if ((dtype) == QUERN_BF16 && (w_dtype) == QUERN_F32) call(QUERN_BF16, QUERN_F32);         \
        else if ((dtype) == QUERN_BF16) call(QUERN_BF16, QUERN_BF16);                                  \
        else if ((w_dtype) == QUERN_F32) call(QUERN_F16, QUERN_F32);                                   \
        else call(QUERN_F16, QUERN_F16);                                                               \
    } while (0)

/* The sums of three vectors in lanes 0, 1 and 2; the other lanes are 0. */
INLINE vfloat sums_of(vfloat x, vfloat y, vfloat z)
{
#if defined(__FMA__)
#if defined(__AVX512F__)
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(y), _mm512_extractf32x8_ps(y, 1));
    const __m256 c = _mm256_add_ps(_mm512_castps512_ps256(z), _mm512_extractf32x8_ps(z, 1));
#else
    const __m256 a = x, b = y, c = z;
#endif
    const __m256 low = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)); /* a b a b */
    const __m256 high = _mm256_add_ps(_mm256_unpacklo_ps(c, _mm256_setzero_ps()), _mm256_unpackhi_ps(c, _mm256_setzero_ps()));
    const __m256 sum = _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x44), _mm256_shuffle_ps(low, high, 0xee));
    const __m128 all = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
#if defined(__AVX512F__)
    return _mm512_zextps128_ps512(all);
#else
    return _mm256_zextps128_ps256(all);
#endif
#else
    return (vfloat){sum_of(x), sum_of(y), sum_of(z)};
#endif
}

/* 1 / (1 + 2^(-x log2 e)); the exponent is kept where v_exp2 is defined, which leaves gates >= 2^-126. */
INLINE vfloat sigmoid(vfloat x)
{
    vfloat y = x * v_splat(-1.44269504088896340736f);
    y = v_select(y > v_splat(126.0f), v_splat(126.0f), y);
    return 1.0f / (1.0f + v_exp2(y));
}

/* sum[b] += x . y_b for one vector of elements at c; an absent y_b counts as 0. */
INLINE void add_products(vfloat sum[3], const void *x, const quern_dtype x_dtype, const void *const y[3], const quern_dtype y_dtype, int64_t c)
{
    const vfloat v = load_as(x, x_dtype, c);
#pragma GCC unroll 3
    for (int b = 0; b < 3; b++)
        if (y[b] != NULL) sum[b] = v_fma(v, load_as(y[b], y_dtype, c), sum[b]);
}

/* The same for elements [c, n). */
INLINE void add_rest(vfloat sum[3], const void *x, const quern_dtype x_dtype, const void *const y[3], const quern_dtype y_dtype, int64_t c, int64_t n)
{
    for (; c + LANES <= n; c += LANES) add_products(sum, x, x_dtype, y, y_dtype, c);
    if (c == n) return;
    const vfloat v = load_tail(x, x_dtype, c, n);
#pragma GCC unroll 3
    for (int b = 0; b < 3; b++)
        if (y[b] != NULL) sum[b] = v_fma(v, load_tail(y[b], y_dtype, c, n), sum[b]);
}

/* The logits of a row. */
INLINE vfloat logits_of(const void *q, const quern_dtype dtype, const void *w, const quern_dtype w_dtype, int64_t ldw, int64_t n)
{
    const void *const rows[3] = {w, row_after(w, w_dtype, ldw), row_after(w, w_dtype, 2 * ldw)};
    vfloat sum[3] = {{0}, {0}, {0}};
    add_rest(sum, q, dtype, rows, w_dtype, 0, n);
    return sums_of(sum[0], sum[1], sum[2]);
}

/* Two neighbouring vectors of halves make a line of 64 bytes (AVX-512), which then leaves in one store. */
INLINE void stream_pair(void *p, const quern_dtype dtype, int64_t at, vfloat v, vfloat w)
{
#if defined(__AVX512F__)
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)narrow_as(v, dtype)), (__m256i)narrow_as(w, dtype), 1);
    _mm512_stream_si512((__m512i *)(void *)((uint16_t *)p + at), both);
#else
    stream_as(p, dtype, at, v);
    stream_as(p, dtype, at + LANES, w);
#endif
}

INLINE vfloat combined_at(const void *const o[3], const quern_dtype dtype, const vfloat g[3], int64_t c)
{
    vfloat sum = {0};
#pragma GCC unroll 3
    for (int b = 0; b < 3; b++)
        if (o[b] != NULL) sum = v_fma(load_as(o[b], dtype, c), g[b], sum);
    return sum;
}

INLINE void combine_row(const void *const o[3], const quern_dtype dtype, const float gates[3], int64_t n, void *out, bool stream)
{
    const vfloat g[3] = {v_splat(gates[0]), v_splat(gates[1]), v_splat(gates[2])};
    int64_t c = 0;
    if (stream && dtype == QUERN_F32)
        for (; c < n; c += LANES) stream_as(out, dtype, c, combined_at(o, dtype, g, c));
    else if (stream)
        for (; c < n; c += 2 * LANES) stream_pair(out, dtype, c, combined_at(o, dtype, g, c), combined_at(o, dtype, g, c + LANES));
    else
        for (; c + LANES <= n; c += LANES) store_as(out, dtype, c, combined_at(o, dtype, g, c));
    if (c == n) return;
    vfloat sum = {0};
    for (int b = 0; b < 3; b++)
        if (o[b] != NULL) sum = v_fma(load_tail(o[b], dtype, c, n), g[b], sum);
    store_tail(out, dtype, c, n, sum);
}

INLINE void store_slot(float slot[4], vfloat v)
{
    memcpy(slot, &v, 4 * sizeof(float));
}

INLINE void store_three(float *p, const float slot[3])
{
    for (int b = 0; p != NULL && b < 3; b++) p[b] = slot[b];
}

INLINE void gate_rows_of(const gate_block *t, const quern_dtype dtype, const quern_dtype w_dtype)
{
    const int64_t bytes = dtype_bytes(dtype), rows = t->tokens * t->heads;
    grid_place ahead = {0, 0}, at = {0, 0};
    float slots[SLOTS][4];
    for (int64_t r = -LEAD; r < rows; r++) {
        if (r + LEAD < rows) {
            float *slot = slots[(r + LEAD) % SLOTS], *gates = grid_row(&t->gates, sizeof(float), ahead);
            if (t->w.data == NULL) {
                for (int b = 0; b < 3; b++) slot[b] = gates[b];
            } else {
                const void *w = row_after(t->w.data, w_dtype, ahead.head * t->w.step);
                store_slot(slot, sigmoid(logits_of(grid_row(&t->q, bytes, ahead), dtype, w, w_dtype, t->w.ld, t->dim)));
                store_three(gates, slot);
            }
            ahead = next_place(ahead, t->heads);
        }
        if (r < 0 || t->out.data == NULL) continue;
        const void *const o[3] = {grid_row(&t->o[0], bytes, at), grid_row(&t->o[1], bytes, at), grid_row(&t->o[2], bytes, at)};
        combine_row(o, dtype, slots[r % SLOTS], t->dim_v, grid_row(&t->out, bytes, at), t->stream);
        at = next_place(at, t->heads);
    }
}

static void gate_rows(const gate_block *t)
{
#define CALL(dtype, w_dtype) gate_rows_of(t, dtype, w_dtype)
    BY_DTYPE_AND_WEIGHT(t->dtype, t->w.dtype, CALL);
#undef CALL
}

/* dst = scale x for elements [c, n). */
INLINE void scale_row(const void *x, const quern_dtype dtype, float scale, int64_t c, int64_t n, void *dst, bool stream)
{
    const vfloat g = v_splat(scale);
    if (stream && dtype == QUERN_F32)
        for (; c < n; c += LANES) stream_as(dst, dtype, c, load_as(x, dtype, c) * g);
    else if (stream)
        for (; c < n; c += 2 * LANES) stream_pair(dst, dtype, c, load_as(x, dtype, c) * g, load_as(x, dtype, c + LANES) * g);
    else
        for (; c + LANES <= n; c += LANES) store_as(dst, dtype, c, load_as(x, dtype, c) * g);
    if (c < n) store_tail(dst, dtype, c, n, load_tail(x, dtype, c, n) * g);
}

/* d_q (+)= sum_b s[b] w[b]. */
INLINE void query_row(const float s[3], const void *w, const quern_dtype w_dtype, int64_t ld, int64_t n, void *d_q, const quern_dtype dtype,
                      bool accumulate, bool stream)
{
    const void *w1 = row_after(w, w_dtype, ld), *w2 = row_after(w, w_dtype, 2 * ld);
    const vfloat g[3] = {v_splat(s[0]), v_splat(s[1]), v_splat(s[2])};
    for (int64_t c = 0; c < n; c += LANES) {
        vfloat x = g[0] * load_some(w, w_dtype, c, n);
        x = v_fma(g[1], load_some(w1, w_dtype, c, n), x);
        x = v_fma(g[2], load_some(w2, w_dtype, c, n), x);
        if (accumulate) x += load_some(d_q, dtype, c, n);
        if (stream) stream_as(d_q, dtype, c, x);
        else store_some(d_q, dtype, c, n, x);
    }
}

/* What a row's dot products make: its gates and factors dl, and what the caller wants of them. */
INLINE void row_factors(const gate_backward_block *t, grid_place at, const float r[3], float g[3], float dl[3])
{
    const float *gates = grid_row(&t->gates, sizeof(float), at);
    store_three(grid_row(&t->d_gates, sizeof(float), at), r);
    for (int b = 0; b < 3; b++) {
        g[b] = gates != NULL ? gates[b] : 1.0f / 3.0f;
        dl[b] = r[b] * g[b] * (1.0f - g[b]);
        float *delta = grid_row(&t->delta[b], sizeof(float), at);
        if (delta != NULL) *delta = g[b] * r[b];
    }
    if (t->dl != NULL) memcpy(t->dl + 3 * (at.token * t->heads + at.head), dl, 3 * sizeof *dl);
}

/* The dot products of one row and what another's gates make of its d_o, in turns: the lines of all rows then arrive and
 * leave side by side, which is a twentieth faster than a row after the other. Whole vectors only; returns where it
 * ended. */
INLINE int64_t dots_and_scales(vfloat sum[3], const void *ahead, const void *const o[3], const void *d_o, const float gates[3], void *const d_o_b[3],
                               const quern_dtype dtype, int64_t n, bool stream)
{
    const vfloat g[3] = {v_splat(gates[0]), v_splat(gates[1]), v_splat(gates[2])};
    int64_t c = 0;
    for (; c + 2 * LANES <= n; c += 2 * LANES) {
        add_products(sum, ahead, dtype, o, dtype, c);
        add_products(sum, ahead, dtype, o, dtype, c + LANES);
        const vfloat v = load_as(d_o, dtype, c), w = load_as(d_o, dtype, c + LANES);
#pragma GCC unroll 3
        for (int b = 0; b < 3; b++) {
            if (stream && dtype != QUERN_F32) {
                stream_pair(d_o_b[b], dtype, c, v * g[b], w * g[b]);
            } else if (stream) {
                stream_as(d_o_b[b], dtype, c, v * g[b]);
                stream_as(d_o_b[b], dtype, c + LANES, w * g[b]);
            } else {
                store_as(d_o_b[b], dtype, c, v * g[b]);
                store_as(d_o_b[b], dtype, c + LANES, w * g[b]);
            }
        }
    }
    return c;
}

INLINE void gate_backward_of(const gate_backward_block *t, const quern_dtype dtype, const quern_dtype w_dtype)
{
    const int64_t bytes = dtype_bytes(dtype), rows = t->tokens * t->heads;
    bool alike = t->stream[0] == t->stream[1] && t->stream[1] == t->stream[2];
    for (int b = 0; b < 3; b++) alike = alike && t->d_o_b[b].data != NULL;
    grid_place ahead = {0, 0}, at = {0, 0};
    float slots[SLOTS][4];
    for (int64_t r = -LEAD; r < rows; r++) {
        const bool more = r + LEAD < rows;
        const void *const o[3] = {grid_row(&t->o[0], bytes, ahead), grid_row(&t->o[1], bytes, ahead), grid_row(&t->o[2], bytes, ahead)};
        vfloat sum[3] = {{0}, {0}, {0}};
        int64_t c = 0;
        if (r >= 0) {
            const void *d_o = grid_row(&t->d_o, bytes, at);
            void *const d_o_b[3] = {grid_row(&t->d_o_b[0], bytes, at), grid_row(&t->d_o_b[1], bytes, at), grid_row(&t->d_o_b[2], bytes, at)};
            float g[3], dl[3];
            row_factors(t, at, slots[r % SLOTS], g, dl);
            if (more && alike) c = dots_and_scales(sum, grid_row(&t->d_o, bytes, ahead), o, d_o, g, d_o_b, dtype, t->dim_v, t->stream[0]);
            for (int b = 0; b < 3; b++)
                if (d_o_b[b] != NULL) scale_row(d_o, dtype, g[b], c, t->dim_v, d_o_b[b], t->stream[b]);
            if (t->d_q.data != NULL) {
                const void *w = row_after(t->w.data, w_dtype, at.head * t->w.step);
                if (t->d_q_dtype == QUERN_F32)
                    query_row(dl, w, w_dtype, t->w.ld, t->dim, grid_row(&t->d_q, sizeof(float), at), QUERN_F32, t->accumulate, t->stream[3]);
                else
                    query_row(dl, w, w_dtype, t->w.ld, t->dim, grid_row(&t->d_q, bytes, at), dtype, t->accumulate, t->stream[3]);
            }
            at = next_place(at, t->heads);
        }
        if (!more) continue;
        add_rest(sum, grid_row(&t->d_o, bytes, ahead), dtype, o, dtype, c, t->dim_v);
        store_slot(slots[(r + LEAD) % SLOTS], sums_of(sum[0], sum[1], sum[2]));
        ahead = next_place(ahead, t->heads);
    }
}

static void gate_backward(const gate_backward_block *t)
{
#define CALL(dtype, w_dtype) gate_backward_of(t, dtype, w_dtype)
    BY_DTYPE_AND_WEIGHT(t->dtype, t->w.dtype, CALL);
#undef CALL
}

/* A head's share of `tokens` tokens: d_w goes through the registers once for all of them. */
INLINE void weight_rows(const float *s, int64_t s_step, const char *q, const quern_dtype dtype, int64_t q_step, const int tokens, int64_t n, float *d_w)
{
    for (int64_t c = 0; c < n; c += LANES) {
        vfloat sum[3];
#pragma GCC unroll 3
        for (int b = 0; b < 3; b++) sum[b] = load_some(d_w + b * n, QUERN_F32, c, n);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            const vfloat x = load_some(q + t * q_step * dtype_bytes(dtype), dtype, c, n);
#pragma GCC unroll 3
            for (int b = 0; b < 3; b++) sum[b] = v_fma(x, v_splat(s[t * s_step + b]), sum[b]);
        }
#pragma GCC unroll 3
        for (int b = 0; b < 3; b++) store_some(d_w + b * n, QUERN_F32, c, n, sum[b]);
    }
}

INLINE void gate_weight_of(const float *s, const row_grid *q, const quern_dtype dtype, int64_t tokens, int64_t heads, int64_t n, float *d_w)
{
    enum { TOKENS = 4 };
    int64_t t = 0;
    for (; t + TOKENS <= tokens; t += TOKENS)
        for (int64_t h = 0; h < heads; h++)
            weight_rows(s + 3 * (t * heads + h), 3 * heads, grid_row(q, dtype_bytes(dtype), (grid_place){t, h}), dtype, q->token, TOKENS, n,
                        d_w + 3 * h * n);
    for (; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++)
            weight_rows(s + 3 * (t * heads + h), 0, grid_row(q, dtype_bytes(dtype), (grid_place){t, h}), dtype, 0, 1, n, d_w + 3 * h * n);
}

static void gate_weight(const float *s, const row_grid *q, quern_dtype dtype, int64_t tokens, int64_t heads, int64_t n, float *d_w)
{
#define CALL(t) gate_weight_of(s, q, t, tokens, heads, n, d_w)
    BY_DTYPE(dtype, CALL);
#undef CALL
}

#endif
