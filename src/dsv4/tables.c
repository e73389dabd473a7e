/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* tables.c - what a caller makes once before a model runs: RoPE tables and packed projection weights. */
#include "core/error.h"
#include "core/float_state.h"
#include "core/half.h"
#include "core/op.h"
#include "core/view.h"
#include "dsv4/dsv4.h"

#include <math.h>

/* Checks a matrix in the CPU's memory: f32, f16 or bf16; extents < 0 are free. */
static quern_status check_matrix(const char *name, const quern_tensor *t, int64_t rows, int64_t columns)
{
    if (t == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a tensor is needed", name);
    if (t->device != QUERN_CPU)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is on device %d: the cpu is accepted", name,
                         (int)t->device);
    if (t->dtype != QUERN_F32 && t->dtype != QUERN_F16 && t->dtype != QUERN_BF16)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s has dtype %s: f32, f16 or bf16 is accepted", name,
                         quern_dtype_name(t->dtype));
    if (t->ndim != 2)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s has %d dimensions: 2 are accepted", name, t->ndim);
    const int64_t wanted[] = {rows, columns};
    for (int i = 0; i < 2; i++)
        if (t->shape[i] < 0 || (wanted[i] >= 0 && t->shape[i] != wanted[i]))
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s.shape[%d] is %lld: %lld is accepted", name, i,
                             (long long)t->shape[i], (long long)(wanted[i] < 0 ? 0 : wanted[i]));
    if (t->shape[1] > 1 && t->strides[1] != 1)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s.strides[1] is %lld: 1 is accepted", name,
                         (long long)t->strides[1]);
    if (t->shape[0] > 0 && t->shape[1] > 0 &&
        (t->data == NULL || (uintptr_t)t->data % quern_dtype_size(t->dtype) != 0))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s.data is %p: memory aligned to %zu bytes is accepted",
                         name, t->data, quern_dtype_size(t->dtype));
    return view_check_extents(name, t);
}

/* A matrix that check_matrix() accepted, for view_check_all(): none that is written shares memory. */
static view_rule rule_of(const char *name, const quern_tensor *t, bool output)
{
    return (view_rule){name, t, VIEW_ACTIVATION, 2, {VIEW_ANY, VIEW_ANY}, true, output};
}

static float get(const quern_tensor *t, int64_t row, int64_t column)
{
    const int64_t at = row * t->strides[0] + column;
    if (t->dtype == QUERN_F32) return ((const float *)t->data)[at];
    const uint16_t half = ((const uint16_t *)t->data)[at];
    return t->dtype == QUERN_BF16 ? float_from_bf16(half) : float_from_f16(half);
}

static void set(const quern_tensor *t, int64_t row, int64_t column, float value)
{
    const int64_t at = row * t->strides[0] + column;
    if (t->dtype == QUERN_F32) ((float *)t->data)[at] = value;
    else ((uint16_t *)t->data)[at] = t->dtype == QUERN_BF16 ? bf16_from_float(value) : f16_from_float(value);
}

/* The pair (as a real number) whose angle makes so many turns over the original length. */
static double place_of(const quern_dsv4_rope_params *p, int64_t dim, float turns)
{
    const double full_turn = 6.283185307179586476925;
    return (double)dim * log((double)p->original_length / (full_turn * (double)turns)) /
           (2 * log((double)p->base));
}

static float clamp_to_unit(float x)
{
    return x < 0.0f ? 0.0f : x > 1.0f ? 1.0f : x;
}

/* Angle per position of pair m. The library is built without contraction, so each operation rounds. */
static float frequency(const quern_dsv4_rope_params *p, int64_t dim, int64_t m)
{
    const float plain = 1.0f / (float)pow((double)p->base, (double)((float)(2 * m) / (float)dim));
    if (p->factor == 0.0f) return plain;
    const float low = (float)fmax(floor(place_of(p, dim, p->beta_fast)), 0.0);
    float high = (float)fmin(ceil(place_of(p, dim, p->beta_slow)), (double)(dim - 1));
    if (low == high) high += 0.001f;
    const float ramp = clamp_to_unit(((float)m - low) / (high - low));
    return plain / p->factor * ramp + plain * (1.0f - ramp);
}

static bool is_positive(float x)
{
    return x > 0.0f && !isinf(x);
}

quern_status quern_dsv4_rope_table(const quern_dsv4_rope_params *params, const quern_tensor *table)
{
    DEFAULT_FLOAT_STATE;
    quern_dsv4_rope_params p = QUERN_DSV4_ROPE_PARAMS_INIT;
    quern_status status = op_struct(&p, params, "params", "QUERN_DSV4_ROPE_PARAMS_INIT");
    if (status != QUERN_OK || (status = check_matrix("table", table, -1, -1)) != QUERN_OK) return status;
    const view_rule rule = rule_of("table", table, true);
    if ((status = view_check_all(&rule, 1, NULL, true)) != QUERN_OK) return status;
    const int64_t dim = table->shape[1];
    if (dim % 2 != 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "table.shape[1] is %lld: an even number is accepted",
                         (long long)dim);
    if (!(p.base > 1.0f) || isinf(p.base))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "base is %g: a finite number above 1 is accepted",
                         (double)p.base);
    if (p.factor != 0.0f && !(is_positive(p.factor) && is_positive(p.original_length) &&
                              is_positive(p.beta_fast) && is_positive(p.beta_slow)))
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "factor is %g, original_length %g, beta_fast %g, beta_slow %g: factor 0 (plain), or "
                         "finite positive numbers are accepted",
                         (double)p.factor, (double)p.original_length, (double)p.beta_fast,
                         (double)p.beta_slow);
    for (int64_t m = 0; m < dim / 2; m++) {
        const float step = frequency(&p, dim, m);
        for (int64_t n = 0; n < table->shape[0]; n++) {
            const double angle = (double)((float)n * step); /* libm reduces a double's whole range */
            set(table, n, m, (float)cos(angle));
            set(table, n, dim / 2 + m, (float)sin(angle));
        }
    }
    return QUERN_OK;
}

static quern_status check_kind(quern_dsv4_kind kind)
{
    if (kind == QUERN_DSV4_CSA || kind == QUERN_DSV4_HCA) return QUERN_OK;
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "kind is %d: 0 (CSA) and 1 (HCA) are accepted", (int)kind);
}

static quern_status refuse_b(const char *name)
{
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is given: HCA has no series b", name);
}

/* to[i, first + j] = from[i, j], or from[j, i]. */
static void copy_block(const quern_tensor *to, int64_t first, const quern_tensor *from, int64_t from_first,
                       int64_t columns, bool transposed)
{
    for (int64_t i = 0; columns > 0 && i < to->shape[0]; i++)
        for (int64_t j = 0; j < columns; j++)
            set(to, i, first + j, transposed ? get(from, from_first + j, i) : get(from, i, from_first + j));
}

quern_status quern_dsv4_pack_weights(quern_dsv4_kind kind, const quern_tensor *w_a_kv,
                                     const quern_tensor *w_a_z, const quern_tensor *w_b_kv,
                                     const quern_tensor *w_b_z, const quern_tensor *w)
{
    DEFAULT_FLOAT_STATE;
    static const char *const names[] = {"w_a_kv", "w_a_z", "w_b_kv", "w_b_z"};
    const quern_tensor *const parts[] = {w_a_kv, w_a_z, w_b_kv, w_b_z};
    const int count = kind == QUERN_DSV4_CSA ? 4 : 2;
    quern_status status = check_kind(kind);
    if (status != QUERN_OK || (status = check_matrix("w_a_kv", w_a_kv, -1, -1)) != QUERN_OK) return status;
    for (int i = 1; i < count; i++) {
        if ((status = check_matrix(names[i], parts[i], w_a_kv->shape[0], w_a_kv->shape[1])) != QUERN_OK)
            return status;
        if (parts[i]->dtype != w_a_kv->dtype)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s has dtype %s: %s, as w_a_kv, is accepted",
                             names[i], quern_dtype_name(parts[i]->dtype), quern_dtype_name(w_a_kv->dtype));
    }
    for (int i = count; i < 4; i++)
        if (parts[i] != NULL) return refuse_b(names[i]);
    const view_rule rules[] = {rule_of("w_a_kv", w_a_kv, false), rule_of("w_a_z", w_a_z, false),
                               rule_of("w_b_kv", w_b_kv, false), rule_of("w_b_z", w_b_z, false),
                               rule_of("w", w, true)};
    if ((status = check_matrix("w", w, w_a_kv->shape[0], count * w_a_kv->shape[1])) != QUERN_OK ||
        (status = view_check_all(rules, 5, NULL, true)) != QUERN_OK)
        return status;
    for (int i = 0; i < count; i++) copy_block(w, i * w_a_kv->shape[1], parts[i], 0, w_a_kv->shape[1], false);
    return QUERN_OK;
}

quern_status quern_dsv4_pack_checkpoint(quern_dsv4_kind kind, const quern_tensor *wkv,
                                        const quern_tensor *wgate, const quern_tensor *ape,
                                        const quern_tensor *w, const quern_tensor *b_a,
                                        const quern_tensor *b_b)
{
    DEFAULT_FLOAT_STATE;
    const int64_t series = kind == QUERN_DSV4_CSA ? 2 : 1;
    quern_status status = check_kind(kind);
    if (status != QUERN_OK || (status = check_matrix("wkv", wkv, -1, -1)) != QUERN_OK ||
        (status = check_matrix("wgate", wgate, wkv->shape[0], wkv->shape[1])) != QUERN_OK ||
        (status = check_matrix("ape", ape, -1, wkv->shape[0])) != QUERN_OK)
        return status;
    if (wkv->shape[0] % series != 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "wkv.shape[0] is %lld: an even number (two series) is accepted",
                         (long long)wkv->shape[0]);
    const int64_t width = wkv->shape[0] / series, r = ape->shape[0];
    if ((status = check_matrix("w", w, wkv->shape[1], 2 * series * width)) != QUERN_OK ||
        (status = check_matrix("b_a", b_a, r, width)) != QUERN_OK)
        return status;
    if (series == 1 && b_b != NULL) return refuse_b("b_b");
    if (series == 2 && (status = check_matrix("b_b", b_b, r, width)) != QUERN_OK) return status;
    const view_rule rules[] = {rule_of("wkv", wkv, false), rule_of("wgate", wgate, false),
                               rule_of("ape", ape, false), rule_of("w", w, true),
                               rule_of("b_a", b_a, true),  rule_of("b_b", b_b, true)};
    if ((status = view_check_all(rules, 6, NULL, true)) != QUERN_OK) return status;
    for (int64_t s = 0; s < series; s++) { /* s = 0 is series a, the last rows of the checkpoint */
        const int64_t from = (series - 1 - s) * width;
        copy_block(w, 2 * s * width, wkv, from, width, true);
        copy_block(w, (2 * s + 1) * width, wgate, from, width, true);
        copy_block(s == 0 ? b_a : b_b, 0, ape, from, width, false);
    }
    return QUERN_OK;
}
