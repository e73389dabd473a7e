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
 * A row of 128 floats is 32 cache lines read and 8 written for about 70 cycles of arithmetic, so memory is
 * the limit. Speed depends on how far ahead a core requests lines: its window of some 450 instructions holds
 * two to four rows.
 *   - Few instructions a row: pointers advance by additions, and a loop does one stage of one row. gate_rows
 *     makes all gates of its block before it combines. Interleaving the products of later rows with the
 *     combination of earlier ones was 5% slower, because incoming lines also evict the weights from L1.
 *   - A loop that computes much from what it reads and writes nothing waits most: the forward products (4%
 *     faster) and gate_weight (5%) prefetch later rows. The other loops gain nothing by that, but where lines
 *     are better requested into L2 (prefetch_l2) so do gate_backward's; gate_rows' sums lose.
 *   - The lines of all o_b are read and written side by side: memory is a tenth faster than with one row
 *     after another.
 *   - From the last FMA of a row's dot products to its gates it takes about 130 cycles (sums across lanes,
 *     exp2, division). The gates of ROWS rows fill a vector and take that time once. In the backward pass
 *     the products run LEAD rows ahead of the row that is written.
 *   - Gates go through memory in one vector, which is stored whole and loaded whole or in parts: a load of
 *     what several stores wrote would wait until all older stores, non-temporal ones too, have left the core.
 * Weights (3 rows a head) stay in L1.
 */
#ifndef QUERN_CPU_GATE_ROWS_H
#define QUERN_CPU_GATE_ROWS_H

enum { ROWS = LANES / 4, PREFETCH = 16, PREFETCH_L2 = 32, LEAD = 2, SLOTS = 4 };

/* Walks a grid's rows in the order of memory: all heads of a token, then the next token's. */
typedef struct row_walk {
    char *row;          /* NULL where the grid is absent */
    int64_t head, wrap; /* bytes to the next head's row; from the last head's to the next token's first */
} row_walk;

INLINE row_walk walk_of(const row_grid *g, int64_t bytes, int64_t heads)
{
    if (g->data == NULL) return (row_walk){NULL, 0, 0};
    return (row_walk){(char *)g->data, g->head * bytes, (g->token - (heads - 1) * g->head) * bytes};
}

INLINE row_walk walk_weights(const gate_weights *w, int64_t bytes, int64_t heads)
{
    const row_grid g = {(void *)(uintptr_t)w->data, 0, w->step};
    return walk_of(&g, bytes, heads);
}

INLINE void walk_on(row_walk *w, bool wraps)
{
    w->row += wraps ? w->wrap : w->head;
}

/* Moves to the next head; whether that was the token's last. */
INLINE bool next_head(int64_t *head, int64_t heads)
{
    const bool wraps = ++*head == heads;
    if (wraps) *head = 0;
    return wraps;
}

/* An activation is f32 or half; a weight is f32 or of the activations' dtype. */
#define BY_DTYPE_AND_WEIGHT(dtype, w_dtype, call)                                                            \
    do {                                                                                                     \
        if ((dtype) == QUERN_F32) call(QUERN_F32, QUERN_F32);                                                \
        else if ((dtype) == QUERN_BF16 && (w_dtype) == QUERN_F32) call(QUERN_BF16, QUERN_F32);               \
        else if ((dtype) == QUERN_BF16) call(QUERN_BF16, QUERN_BF16);                                        \
        else if ((w_dtype) == QUERN_F32) call(QUERN_F16, QUERN_F32);                                         \
        else call(QUERN_F16, QUERN_F16);                                                                     \
    } while (0)

/* Sums three vectors over each group of four lanes, which hold (x, y, z, 0) in the result. */
INLINE vfloat quarter_sums(const vfloat v[3])
{
#if defined(__AVX512F__)
    const __m512 zero = _mm512_setzero_ps();
    const __m512 low =
        _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1])); /* x y x y */
    const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(v[2], zero), _mm512_unpackhi_ps(v[2], zero));
    return _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
#elif defined(__FMA__)
    const __m256 zero = _mm256_setzero_ps();
    const __m256 low = _mm256_add_ps(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
    const __m256 high = _mm256_add_ps(_mm256_unpacklo_ps(v[2], zero), _mm256_unpackhi_ps(v[2], zero));
    return _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x44), _mm256_shuffle_ps(low, high, 0xee));
#else
    return (vfloat){sum_of(v[0]), sum_of(v[1]), sum_of(v[2])};
#endif
}

/* Adds up the quarter_sums() of ROWS rows, four lanes a row. */
INLINE vfloat sums_of_rows(const vfloat q[ROWS])
{
#if defined(__AVX512F__)
    const __m512 low =
        _mm512_add_ps(_mm512_shuffle_f32x4(q[0], q[1], 0x44), _mm512_shuffle_f32x4(q[0], q[1], 0xee));
    const __m512 high =
        _mm512_add_ps(_mm512_shuffle_f32x4(q[2], q[3], 0x44), _mm512_shuffle_f32x4(q[2], q[3], 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
#elif defined(__FMA__)
    return _mm256_add_ps(_mm256_permute2f128_ps(q[0], q[1], 0x20), _mm256_permute2f128_ps(q[0], q[1], 0x31));
#else
    return q[0];
#endif
}

/* 1 / (1 + 2^(-x log2 e)). Clamping the exponent to v_exp2's domain keeps gates >= 2^-126. */
INLINE vfloat sigmoid(vfloat x)
{
    vfloat y = x * v_splat(-1.44269504088896340736f);
    y = v_select(y > v_splat(126.0f), v_splat(126.0f), y);
    return 1.0f / (1.0f + v_exp2(y));
}

/* sum[b] += x . y_b for one vector of elements at c. An absent y_b counts as 0; `whole`: there is none. */
INLINE void add_products(vfloat sum[3], const void *x, const quern_dtype x_dtype, const void *const y[3],
                         const quern_dtype y_dtype, int64_t c, const bool whole)
{
    const vfloat v = load_as(x, x_dtype, c);
#pragma GCC unroll 3
    for (int b = 0; b < 3; b++)
        if (whole || y[b] != NULL) sum[b] = v_fma(v, load_as(y[b], y_dtype, c), sum[b]);
}

/* The same for elements [c, n). */
INLINE void add_rest(vfloat sum[3], const void *x, const quern_dtype x_dtype, const void *const y[3],
                     const quern_dtype y_dtype, int64_t c, int64_t n, const bool whole)
{
    for (; c + LANES <= n; c += LANES) add_products(sum, x, x_dtype, y, y_dtype, c, whole);
    if (c == n) return;
    const vfloat v = load_tail(x, x_dtype, c, n);
#pragma GCC unroll 3
    for (int b = 0; b < 3; b++)
        if (whole || y[b] != NULL) sum[b] = v_fma(v, load_tail(y[b], y_dtype, c, n), sum[b]);
}

/* Two neighbouring vectors of halves fill a line of 64 bytes (AVX-512), and one store writes it. */
INLINE void stream_pair(void *p, const quern_dtype dtype, int64_t at, vfloat v, vfloat w)
{
#if defined(__AVX512F__)
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)narrow_as(v, dtype)),
                                            (__m256i)narrow_as(w, dtype), 1);
    _mm512_stream_si512((__m512i *)(void *)((uint16_t *)p + at), both);
#else
    stream_as(p, dtype, at, v);
    stream_as(p, dtype, at + LANES, w);
#endif
}

/* Stores elements c ... c + 2 LANES - 1 of a row; streamed ones as whole lines. */
INLINE void put_pair(void *p, const quern_dtype dtype, int64_t c, vfloat v, vfloat w, const bool stream)
{
    if (stream && dtype != QUERN_F32) {
        stream_pair(p, dtype, c, v, w);
    } else if (stream) {
        stream_as(p, dtype, c, v);
        stream_as(p, dtype, c + LANES, w);
    } else {
        store_as(p, dtype, c, v);
        store_as(p, dtype, c + LANES, w);
    }
}

INLINE vfloat combined_at(const void *const o[3], const quern_dtype dtype, const vfloat g[3], int64_t c,
                          const bool whole)
{
    if (whole)
        return v_fma(load_as(o[2], dtype, c), g[2],
                     v_fma(load_as(o[1], dtype, c), g[1], load_as(o[0], dtype, c) * g[0]));
    vfloat sum = {0};
#pragma GCC unroll 3
    for (int b = 0; b < 3; b++)
        if (o[b] != NULL) sum = v_fma(load_as(o[b], dtype, c), g[b], sum);
    return sum;
}

INLINE void put(void *p, const quern_dtype dtype, int64_t c, vfloat v, const bool stream)
{
    if (stream) stream_as(p, dtype, c, v);
    else store_as(p, dtype, c, v);
}

/* out = sum_b g_b o_b. */
INLINE void combine_row(const void *const o[3], const quern_dtype dtype, const vfloat g[3], int64_t n,
                        void *out, const bool stream, const bool whole)
{
    int64_t c = 0;
    if (stream && dtype != QUERN_F32)
        for (; c + 2 * LANES <= n; c += 2 * LANES)
            stream_pair(out, dtype, c, combined_at(o, dtype, g, c, whole),
                        combined_at(o, dtype, g, c + LANES, whole));
    for (; c + LANES <= n; c += LANES) put(out, dtype, c, combined_at(o, dtype, g, c, whole), stream);
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

/* Stores the gates of `rows` <= ROWS rows, four lanes a row, to `to`; `contiguous`: one after another. */
INLINE void store_gates(float *const to[ROWS], vfloat gates, int rows, bool contiguous)
{
#if defined(__AVX512F__)
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 3, 7, 11, 15);
    if (contiguous) {
        _mm512_mask_storeu_ps(to[0], (__mmask16)((1u << 3 * rows) - 1), _mm512_permutexvar_ps(order, gates));
        return;
    }
#else
    (void)contiguous;
#endif
    float each[LANES];
    v_store(each, gates);
    for (int k = 0; k < rows; k++) store_three(to[k], each + 4 * k);
}

INLINE void prefetch_row(const char *row, int64_t bytes, bool l2)
{
    if (l2)
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
    else
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

/* How many tokens of `heads` rows ahead lines are requested. */
INLINE int64_t tokens_ahead(int64_t heads, bool l2)
{
    return heads > 0 ? ((l2 ? PREFETCH_L2 : PREFETCH) + heads - 1) / heads : 0;
}

INLINE void make_gates_of(const gate_block *t, const quern_dtype dtype, const quern_dtype w_dtype)
{
    const int64_t bytes = dtype_bytes(dtype), ahead = tokens_ahead(t->heads, t->prefetch_l2);
    const bool contiguous = t->gates.head == 3 && t->gates.token == 3 * t->heads;
    vfloat sums[ROWS] = {{0}};
    float *to[ROWS];
    int waiting = 0;
    for (int64_t n = 0; n < t->tokens; n++) {
        const char *q = (const char *)t->q.data + n * t->q.token * bytes,
                   *next = n + ahead < t->tokens ? q + ahead * t->q.token * bytes : NULL;
        const void *w = t->w.data;
        float *gates = (float *)t->gates.data + n * t->gates.token;
        for (int64_t h = 0; h < t->heads; h++) {
            const void *const ws[3] = {w, row_after(w, w_dtype, t->w.ld), row_after(w, w_dtype, 2 * t->w.ld)};
            vfloat sum[3] = {{0}, {0}, {0}};
            if (next != NULL) {
                prefetch_row(next, t->dim * bytes, t->prefetch_l2);
                next += t->q.head * bytes;
            }
            add_rest(sum, q, dtype, ws, w_dtype, 0, t->dim, true);
            sums[waiting] = quarter_sums(sum);
            to[waiting++] = gates;
            if (waiting == ROWS) {
                store_gates(to, sigmoid(sums_of_rows(sums)), ROWS, contiguous);
                waiting = 0;
            }
            q += t->q.head * bytes;
            w = row_after(w, w_dtype, t->w.step);
            gates += t->gates.head;
        }
    }
    if (waiting > 0) store_gates(to, sigmoid(sums_of_rows(sums)), waiting, contiguous);
}

/* Token by token: a row then costs one addition per pointer. */
INLINE void combine_rows_of(const gate_block *t, const quern_dtype dtype, const bool stream, const bool whole)
{
    const int64_t bytes = dtype_bytes(dtype);
    for (int64_t n = 0; n < t->tokens; n++) {
        const float *gates = (const float *)t->gates.data + n * t->gates.token;
        char *out = (char *)t->out.data + n * t->out.token * bytes;
        const char *o[3];
        for (int b = 0; b < 3; b++)
            o[b] = t->o[b].data != NULL ? (const char *)t->o[b].data + n * t->o[b].token * bytes : NULL;
        for (int64_t h = 0; h < t->heads; h++) {
            const void *const rows[3] = {o[0], o[1], o[2]};
            const vfloat g[3] = {v_splat(gates[0]), v_splat(gates[1]), v_splat(gates[2])};
            combine_row(rows, dtype, g, t->dim_v, out, stream, whole);
            for (int b = 0; b < 3; b++)
                if (whole || o[b] != NULL) o[b] += t->o[b].head * bytes;
            gates += t->gates.head;
            out += t->out.head * bytes;
        }
    }
}

static void gate_rows(const gate_block *t)
{
    const bool whole = t->o[0].data != NULL && t->o[1].data != NULL && t->o[2].data != NULL;
    if (t->w.data != NULL) {
#define CALL(dtype, w_dtype) make_gates_of(t, dtype, w_dtype)
        BY_DTYPE_AND_WEIGHT(t->dtype, t->w.dtype, CALL);
#undef CALL
    }
    if (t->out.data != NULL) {
#define CALL(dtype)                                                                                          \
    (!whole      ? combine_rows_of(t, dtype, t->stream, false)                                               \
     : t->stream ? combine_rows_of(t, dtype, true, true)                                                     \
                 : combine_rows_of(t, dtype, false, true))
        BY_DTYPE(t->dtype, CALL);
#undef CALL
    }
}

/* dst = scale x for elements [c, n). */
INLINE void scale_row(const void *x, const quern_dtype dtype, float scale, int64_t c, int64_t n, void *dst,
                      bool stream)
{
    const vfloat g = v_splat(scale);
    if (stream && dtype == QUERN_F32)
        for (; c < n; c += LANES) stream_as(dst, dtype, c, load_as(x, dtype, c) * g);
    else if (stream)
        for (; c < n; c += 2 * LANES)
            stream_pair(dst, dtype, c, load_as(x, dtype, c) * g, load_as(x, dtype, c + LANES) * g);
    else
        for (; c + LANES <= n; c += LANES) store_as(dst, dtype, c, load_as(x, dtype, c) * g);
    if (c < n) store_tail(dst, dtype, c, n, load_tail(x, dtype, c, n) * g);
}

/* d_q (+)= sum_b s[b] w[b]. */
INLINE void query_row(const float s[3], const void *w, const quern_dtype w_dtype, int64_t ld, int64_t n,
                      void *d_q, const quern_dtype dtype, bool accumulate, bool stream)
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

/* A row's gates and factors dl from its dot products, and the results that the caller wants. */
INLINE void row_factors(const float r[3], const float *gates, float *d_gates, float *const delta[3],
                        float g[3], float dl[3])
{
    store_three(d_gates, r);
    for (int b = 0; b < 3; b++) {
        g[b] = gates != NULL ? gates[b] : 1.0f / 3.0f;
        dl[b] = r[b] * g[b] * (1.0f - g[b]);
        if (delta[b] != NULL) *delta[b] = g[b] * r[b];
    }
}

/* Alternates between one row's dot products and another row's d_o_b = g_b d_o, over all whole pairs of
 * vectors; returns the element where they end. */
INLINE int64_t products_and_scales(vfloat sum[3], const void *ahead, const void *const o[3], const void *d_o,
                                   const vfloat g[3], void *const d_o_b[3], const quern_dtype dtype,
                                   int64_t n, const bool stream)
{
    int64_t c = 0;
    for (; c + 2 * LANES <= n; c += 2 * LANES) {
        add_products(sum, ahead, dtype, o, dtype, c, true);
        add_products(sum, ahead, dtype, o, dtype, c + LANES, true);
        const vfloat v = load_as(d_o, dtype, c), w = load_as(d_o, dtype, c + LANES);
#pragma GCC unroll 3
        for (int b = 0; b < 3; b++) put_pair(d_o_b[b], dtype, c, v * g[b], w * g[b], stream);
    }
    return c;
}

/* `whole`: no branch is absent, and either all d_o_b are streamed or none. */
INLINE void gate_backward_of(const gate_backward_block *t, const quern_dtype dtype, const quern_dtype w_dtype,
                             const bool whole)
{
    const int64_t bytes = dtype_bytes(dtype), heads = t->heads, rows = t->tokens * heads,
                  d_q_bytes = t->d_q_dtype == QUERN_F32 ? 4 : bytes, ahead = tokens_ahead(heads, true);
    row_walk d_o_ahead = walk_of(&t->d_o, bytes, heads), d_o = d_o_ahead,
             d_q = walk_of(&t->d_q, d_q_bytes, heads);
    row_walk w = walk_weights(&t->w, dtype_bytes(w_dtype), heads),
             given = walk_of(&t->gates, sizeof(float), heads);
    row_walk d_gates = walk_of(&t->d_gates, sizeof(float), heads), o[3], d_o_b[3], delta[3];
    int64_t head_ahead = 0, head = 0;
    float slots[SLOTS][4];
    for (int b = 0; b < 3; b++) {
        o[b] = walk_of(&t->o[b], bytes, heads);
        d_o_b[b] = walk_of(&t->d_o_b[b], bytes, heads);
        delta[b] = walk_of(&t->delta[b], sizeof(float), heads);
    }
    for (int64_t r = -LEAD; r < rows; r++) {
        const bool more = r + LEAD < rows;
        const void *const o_rows[3] = {o[0].row, o[1].row, o[2].row};
        vfloat sum[3] = {{0}, {0}, {0}};
        int64_t c = 0;
        if (r >= 0) {
            void *const scaled[3] = {d_o_b[0].row, d_o_b[1].row, d_o_b[2].row};
            float *const deltas[3] = {(float *)(void *)delta[0].row, (float *)(void *)delta[1].row,
                                      (float *)(void *)delta[2].row};
            float g[3], dl[3];
            row_factors(slots[r % SLOTS], (const float *)(const void *)given.row,
                        (float *)(void *)d_gates.row, deltas, g, dl);
            if (t->dl != NULL) memcpy(t->dl + 3 * r, dl, sizeof dl);
            const vfloat gates[3] = {v_splat(g[0]), v_splat(g[1]), v_splat(g[2])};
            if (whole && more && t->stream[0])
                c = products_and_scales(sum, d_o_ahead.row, o_rows, d_o.row, gates, scaled, dtype, t->dim_v,
                                        true);
            else if (whole && more)
                c = products_and_scales(sum, d_o_ahead.row, o_rows, d_o.row, gates, scaled, dtype, t->dim_v,
                                        false);
            for (int b = 0; b < 3; b++)
                if (scaled[b] != NULL) scale_row(d_o.row, dtype, g[b], c, t->dim_v, scaled[b], t->stream[b]);
            if (d_q.row != NULL && t->d_q_dtype == QUERN_F32)
                query_row(dl, w.row, w_dtype, t->w.ld, t->dim, d_q.row, QUERN_F32, t->accumulate,
                          t->stream[3]);
            else if (d_q.row != NULL)
                query_row(dl, w.row, w_dtype, t->w.ld, t->dim, d_q.row, dtype, t->accumulate, t->stream[3]);
            const bool wraps = next_head(&head, heads);
            for (int b = 0; b < 3; b++) {
                walk_on(&d_o_b[b], wraps);
                walk_on(&delta[b], wraps);
            }
            walk_on(&d_o, wraps);
            walk_on(&d_q, wraps);
            walk_on(&w, wraps);
            walk_on(&given, wraps);
            walk_on(&d_gates, wraps);
        }
        if (!more) continue;
        if (t->prefetch_l2 && r + LEAD + ahead * heads < rows) {
            prefetch_row(d_o_ahead.row + ahead * t->d_o.token * bytes, t->dim_v * bytes, true);
            for (int b = 0; b < 3; b++)
                if (whole || o[b].row != NULL)
                    prefetch_row(o[b].row + ahead * t->o[b].token * bytes, t->dim_v * bytes, true);
        }
        add_rest(sum, d_o_ahead.row, dtype, o_rows, dtype, c, t->dim_v, whole);
        const vfloat sums[ROWS] = {quarter_sums(sum)};
        store_slot(slots[(r + LEAD) % SLOTS], sums_of_rows(sums));
        const bool wraps = next_head(&head_ahead, heads);
        for (int b = 0; b < 3; b++) walk_on(&o[b], wraps);
        walk_on(&d_o_ahead, wraps);
    }
}

static void gate_backward(const gate_backward_block *t)
{
    bool whole = t->stream[0] == t->stream[1] && t->stream[1] == t->stream[2];
    for (int b = 0; b < 3; b++) whole = whole && t->o[b].data != NULL && t->d_o_b[b].data != NULL;
#define CALL(dtype, w_dtype)                                                                                 \
    (whole ? gate_backward_of(t, dtype, w_dtype, true) : gate_backward_of(t, dtype, w_dtype, false))
    BY_DTYPE_AND_WEIGHT(t->dtype, t->w.dtype, CALL);
#undef CALL
}

/* A head's sum over `tokens` tokens: d_w goes through the registers once for all of them. */
INLINE void weight_rows(const float *s, int64_t s_step, const char *q, const quern_dtype dtype,
                        int64_t q_step, const int tokens, int64_t n, float *d_w)
{
    for (int64_t c = 0; c < n; c += LANES) {
        vfloat sum[3];
#pragma GCC unroll 3
        for (int b = 0; b < 3; b++) sum[b] = load_some(d_w + b * n, QUERN_F32, c, n);
#pragma GCC unroll 2
        for (int t = 0; t < tokens; t++) {
            const vfloat x = load_some(q + t * q_step * dtype_bytes(dtype), dtype, c, n);
#pragma GCC unroll 3
            for (int b = 0; b < 3; b++) sum[b] = v_fma(x, v_splat(s[t * s_step + b]), sum[b]);
        }
#pragma GCC unroll 3
        for (int b = 0; b < 3; b++) store_some(d_w + b * n, QUERN_F32, c, n, sum[b]);
    }
}

INLINE void gate_weight_of(const float *s, const row_grid *q, const quern_dtype dtype, int64_t tokens,
                           int64_t heads, int64_t n, float *d_w, bool l2)
{
    enum { TOKENS = 2 };
    for (int64_t t = 0; t < tokens; t += TOKENS) {
        for (int64_t h = 0; h < heads; h++) {
            const float *factors = s + 3 * (t * heads + h);
            const char *row = row_after(q->data, dtype, t * q->token + h * q->head);
            for (int64_t i = TOKENS; i < 2 * TOKENS && t + i < tokens; i++)
                prefetch_row(row_after(row, dtype, i * q->token), n * dtype_bytes(dtype), l2);
            if (t + TOKENS <= tokens)
                weight_rows(factors, 3 * heads, row, dtype, q->token, TOKENS, n, d_w + 3 * h * n);
            else weight_rows(factors, 0, row, dtype, 0, 1, n, d_w + 3 * h * n);
        }
    }
}

static void gate_weight(const float *s, const row_grid *q, quern_dtype dtype, int64_t tokens, int64_t heads,
                        int64_t n, float *d_w, bool prefetch_l2)
{
#define CALL(t) gate_weight_of(s, q, t, tokens, heads, n, d_w, prefetch_l2)
    BY_DTYPE(dtype, CALL);
#undef CALL
}

#endif
