/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention_backward_rows.h - the row kernels of the attention backward, written once over the level's
 * vectors and compiled by each level's file under its own flags.
 *
 * From a tile of scores S = Q K^T and dP = dO V^T, with c = row_scale (the gate of the branch, or 1):
 *   P = exp2((S - top) scale2) f, dS = P (c dP - delta), and c P, which is what dV = (c P)^T dO needs.
 * top is about lse or the largest score, unscaled; f makes up the difference. Scores close to top lose
 * nothing in it, however large they are.
 * (dS has a c of its own: c = delta = 0 makes dS exactly 0 in a row with one key.) f32: both overwrite S and
 * dP. Read along rows they are the A of dQ = dS K; read along columns, the A of the other two products. bf16
 * dot products need pairs along the dimension of the sum: rows for dV and dK, keys for dQ. The kernel
 * therefore takes two rows at a time and writes dS twice: interleaved with its neighbour row, and row by row.
 *
 * Per vector of scores: 5 FMAs and 4 more operations of exp2, 3 around it, 3 of dS, 4 loads and stores; bf16
 * adds 3 conversions, a permute and a store. A product at D = 128 does 1280 operations per score: at two FMAs
 * a cycle the rows take about 4% of the f32 and 8% of the bf16 time.
 */
#ifndef QUERN_CPU_ATTENTION_BACKWARD_ROWS_H
#define QUERN_CPU_ATTENTION_BACKWARD_ROWS_H

#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/vector.h"

typedef struct backward_vector {
    vfloat p, ds; /* row_scale * P, dS */
} backward_vector;

/* One vector of row r from column c on. The row sees columns [lo, hi). */
INLINE backward_vector backward_of(const softmax_backward_tile *t, int32_t r, int32_t c, int32_t lo,
                                   int32_t hi)
{
    if (c >= hi || c + LANES <= lo) return (backward_vector){{0}, {0}};
    const vfloat above = v_load(t->s + r * t->lds + c) - t->top[r],
                 p = v_exp2(above * t->scale2) * t->factor[r];
    const vfloat ds =
        p * v_fma(v_load(t->dp + r * t->lds + c), v_splat(t->dp_scale[r]), v_splat(-t->delta[r]));
    const vfloat scaled = p * v_splat(t->row_scale[r]);
    if (c >= lo && c + LANES <= hi) return (backward_vector){scaled, ds};
    const vint seen = lanes_in(c, lo, hi);
    return (backward_vector){v_select(seen, scaled, (vfloat){0}), v_select(seen, ds, (vfloat){0})};
}

static void softmax_backward_f32(const softmax_backward_tile *t)
{
    for (int32_t r = 0; r < t->rows; r++) {
        const int32_t lo = t->lo[r], hi = t->hi[r];
        for (int32_t c = 0; c < t->columns; c += LANES) {
            const backward_vector v = backward_of(t, r, c, lo, hi);
            v_store(t->s + r * t->lds + c, v.p);
            v_store(t->dp + r * t->lds + c, v.ds);
        }
    }
}

static void softmax_backward_bf16(const softmax_backward_tile *t)
{
    for (int32_t r = 0; r < t->rows; r += 2) {
        const int32_t lo0 = t->lo[r], hi0 = t->hi[r], lo1 = t->lo[r + 1], hi1 = t->hi[r + 1];
        for (int32_t c = 0; c < t->columns; c += LANES) {
            const backward_vector even = backward_of(t, r, c, lo0, hi0),
                                  odd = backward_of(t, r + 1, c, lo1, hi1);
            const vuint p = v_pairs(even.p, odd.p), ds = v_pairs(even.ds, odd.ds);
            const vhalf ds_even = v_narrow(even.ds), ds_odd = v_narrow(odd.ds);
            memcpy(t->p_pairs + r / 2 * t->lds + c, &p, sizeof p);
            memcpy(t->ds_pairs + r / 2 * t->lds + c, &ds, sizeof ds);
            memcpy((uint16_t *)(t->ds_words + r * t->lds / 2) + c, &ds_even, sizeof ds_even);
            memcpy((uint16_t *)(t->ds_words + (r + 1) * t->lds / 2) + c, &ds_odd, sizeof ds_odd);
        }
    }
}

#define ATTENTION_BACKWARD_ROW_KERNELS .softmax_backward_f32 = softmax_backward_f32
#define ATTENTION_BACKWARD_ROW_KERNELS_BF16 .softmax_backward_bf16 = softmax_backward_bf16

#endif
