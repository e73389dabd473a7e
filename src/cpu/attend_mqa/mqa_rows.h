/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * mqa_rows.h - the row kernels of attention whose heads share their keys, written once over the level's
 * vectors.
 *
 * A vector of heads walks down its column of keys twice: for the maximum, then for the exponentials and their
 * sum. At D = 512 the products take 64 bf16 dot products for a vector of scores; these kernels take about 12
 * operations.
 */
#ifndef QUERN_CPU_MQA_ROWS_H
#define QUERN_CPU_MQA_ROWS_H

#include "cpu/attend_mqa/mqa_kernels.h"
#include "cpu/kernels/vector.h"

/* The maximum of a column. Two chains, because a maximum takes longer than a load. */
INLINE vfloat column_max(const float *s, int32_t keys, int64_t stride)
{
    vfloat even = v_splat(-INFINITY), odd = even;
    int32_t k = 0;
    for (; k + 1 < keys; k += 2, s += 2 * stride) {
        even = v_max(v_load(s), even);
        odd = v_max(v_load(s + stride), odd);
    }
    if (k < keys) even = v_max(v_load(s), even);
    return v_max(odd, even);
}

/* exp2((s - max) scale2) of a column; returns its sum. Even and odd keys are summed apart. */
INLINE vfloat column_exp2(float *s, int32_t keys, int64_t stride, vfloat scale2, vfloat max, bool narrow)
{
    vfloat sum_even = {0}, sum_odd = {0};
    float *to = s;
    for (int32_t k = 0; k < keys; k += 2, s += 2 * stride) {
        const bool both = k + 1 < keys;
        const vfloat even = v_exp2((v_load(s) - max) * scale2);
        const vfloat odd = both ? v_exp2((v_load(s + stride) - max) * scale2) : (vfloat){0};
        sum_even += even;
        sum_odd += odd;
        if (narrow) {
            const vuint words = v_pairs(even, odd);
            memcpy(to, &words, sizeof words);
            to += stride;
        } else {
            v_store(s, even);
            if (both) v_store(s + stride, odd);
        }
    }
    return sum_even + sum_odd;
}

INLINE void softmax_columns(const mqa_softmax *t, bool narrow)
{
    const vfloat scale2 = v_splat(t->scale2);
    for (int32_t c = 0; c < t->heads; c += LANES) {
        const vfloat before = v_load(t->max + c),
                     after = v_max(column_max(t->s + c, t->keys, t->heads), before);
        const vfloat fall = v_select(after > before, v_exp2((before - after) * scale2), v_splat(1.0f));
        const vfloat max = v_select(after == -INFINITY, (vfloat){0}, after);
        const vfloat sum = column_exp2(t->s + c, t->keys, t->heads, scale2, max, narrow);
        v_store(t->max + c, after);
        v_store(t->shrink + c, fall);
        v_store(t->sum + c, v_load(t->sum + c) * fall + sum);
    }
}

static void mqa_softmax_f32(const mqa_softmax *t)
{
    softmax_columns(t, false);
}

static void mqa_softmax_bf16(const mqa_softmax *t)
{
    softmax_columns(t, true);
}

typedef struct gradient_vector {
    vfloat p, ds;
} gradient_vector;

INLINE gradient_vector gradient_of(const mqa_gradient *t, int32_t key, int32_t c)
{
    const int64_t at = (int64_t)key * t->heads + c;
    const vfloat top = v_load(t->top + c),
                 p = v_exp2((v_load(t->s + at) - top) * t->scale2) * v_load(t->factor + c);
    const vfloat ds = p * (v_load(t->dp + at) - v_load(t->delta + c)) * t->scale;
    const vint none = top == INFINITY;
    return (gradient_vector){v_select(none, (vfloat){0}, p), v_select(none, (vfloat){0}, ds)};
}

static void mqa_gradient_f32(const mqa_gradient *t)
{
    for (int32_t k = 0; k < t->keys; k++) {
        for (int32_t c = 0; c < t->heads; c += LANES) {
            const gradient_vector g = gradient_of(t, k, c);
            v_store(t->s + (int64_t)k * t->heads + c, g.p);
            v_store(t->dp + (int64_t)k * t->heads + c, g.ds);
        }
    }
}

INLINE void store_halves(uint16_t *to, vfloat v)
{
    const vhalf h = v_narrow(v);
    memcpy(to, &h, sizeof h);
}

static void mqa_gradient_bf16(const mqa_gradient *t)
{
    for (int32_t k = 0; k < t->keys; k += 2) {
        for (int32_t c = 0; c < t->heads; c += LANES) {
            const int64_t at = (int64_t)k * t->heads + c;
            const gradient_vector even = gradient_of(t, k, c);
            gradient_vector odd = {{0}, {0}};
            store_halves(t->p + at, even.p);
            store_halves(t->ds + at, even.ds);
            if (k + 1 < t->keys) {
                odd = gradient_of(t, k + 1, c);
                store_halves(t->p + at + t->heads, odd.p);
                store_halves(t->ds + at + t->heads, odd.ds);
            }
            const vuint words = v_pairs(even.ds, odd.ds);
            memcpy(t->ds_pairs + (int64_t)k / 2 * t->heads + c, &words, sizeof words);
        }
    }
}

#define MQA_ROW_KERNELS .mqa_softmax_f32 = mqa_softmax_f32, .mqa_gradient_f32 = mqa_gradient_f32
#define MQA_ROW_KERNELS_BF16 .mqa_softmax_bf16 = mqa_softmax_bf16, .mqa_gradient_bf16 = mqa_gradient_bf16

#endif
