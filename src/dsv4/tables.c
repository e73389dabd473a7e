/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* tables.c - what a caller makes once before a model runs: RoPE tables and packed projection weights. */
#include "core/error.h"
#include "core/float_state.h"
#include "core/half.h"
#include "core/op.h"
#include "core/view.h"
#include "dsv4/dsv4.h"
#include "runtime/plugin.h"

#include <math.h>

/* A matrix in the CPU's memory: f32, f16 or bf16; extents < 0 are free. */
typedef struct matrix {
    const char *name;
    const quern_tensor *t;
    int64_t rows, columns;
    bool output;
} matrix;

static quern_status check_matrix(const matrix *m, view_span *span)
{
    const quern_tensor *t = m->t;
    if (t == NULL) return error_argument("%s is NULL: a tensor is needed", m->name);
    if (t->device != QUERN_CPU)
        return error_argument("%s is on device %d: the cpu is accepted", m->name, (int)t->device);
    const int64_t shape[] = {m->rows < 0 ? t->shape[0] : m->rows, m->columns < 0 ? t->shape[1] : m->columns};
    const view_want want = {m->name, VIEW_ACTIVATION, 2, shape, m->output, true};
    quern_status status = view_check_extents(m->name, t);
    if (status == QUERN_OK) status = view_check_one(&want, t, NULL, span);
    if (status != QUERN_OK || span->high == 0) return status;
    return plugin_check_pointer(t->data, t->device, t->device_id, m->name);
}

/* Checks all, and that none that is written shares memory with another. */
static quern_status check_matrices(const matrix *list, int count)
{
    enum { MOST = 6 };
    view_span spans[MOST];
    quern_status status = QUERN_OK;
    for (int i = 0; i < count && status == QUERN_OK; i++) status = check_matrix(&list[i], &spans[i]);
    for (int i = 0; i < count && status == QUERN_OK; i++)
        for (int j = 0; j < count && list[i].output; j++)
            if (i != j && (!list[j].output || j < i) &&
                view_share_memory(list[i].t, &spans[i], list[j].t, &spans[j]))
                return error_argument("%s shares memory with %s: outputs need memory of their own",
                                      list[i].name, list[j].name);
    return status;
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
    const matrix whole = {"table", table, -1, -1, true};
    if (status != QUERN_OK || (status = check_matrices(&whole, 1)) != QUERN_OK) return status;
    const int64_t dim = table->shape[1];
    if (dim % 2 != 0)
        return error_argument("table.shape[1] is %lld: an even number is accepted", (long long)dim);
    if (!(p.base > 1.0f) || isinf(p.base))
        return error_argument("base is %g: a finite number above 1 is accepted", (double)p.base);
    if (p.factor != 0.0f && !(is_positive(p.factor) && is_positive(p.original_length) &&
                              is_positive(p.beta_fast) && is_positive(p.beta_slow)))
        return error_argument("factor is %g, original_length %g, beta_fast %g, beta_slow %g: factor 0 "
                              "(plain), or finite positive numbers are accepted",
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
    return error_argument("kind is %d: 0 (CSA) and 1 (HCA) are accepted", (int)kind);
}

static quern_status refuse_b(const char *name)
{
    return error_argument("%s is given: HCA has no series b", name);
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
    matrix all[5] = {{names[0], w_a_kv, -1, -1, false}};
    quern_status status = check_kind(kind);
    if (status != QUERN_OK || (status = check_matrices(all, 1)) != QUERN_OK) return status;
    const int64_t rows = w_a_kv->shape[0], columns = w_a_kv->shape[1];
    for (int i = 1; i < count; i++) all[i] = (matrix){names[i], parts[i], rows, columns, false};
    all[count] = (matrix){"w", w, rows, count * columns, true};
    for (int i = count; i < 4; i++)
        if (parts[i] != NULL) return refuse_b(names[i]);
    if ((status = check_matrices(all, count + 1)) != QUERN_OK) return status;
    for (int i = 1; i < count; i++)
        if (parts[i]->dtype != w_a_kv->dtype)
            return error_argument("%s has dtype %s: %s, as w_a_kv, is accepted", names[i],
                                  quern_dtype_name(parts[i]->dtype), quern_dtype_name(w_a_kv->dtype));
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
    const matrix given[] = {{"wkv", wkv, -1, -1, false}, {"ape", ape, -1, -1, false}};
    quern_status status = check_kind(kind);
    if (status != QUERN_OK || (status = check_matrices(given, 2)) != QUERN_OK) return status;
    if (wkv->shape[0] % series != 0)
        return error_argument("wkv.shape[0] is %lld: an even number (two series) is accepted",
                              (long long)wkv->shape[0]);
    const int64_t rows = wkv->shape[0], columns = wkv->shape[1], width = rows / series, r = ape->shape[0];
    if (series == 1 && b_b != NULL) return refuse_b("b_b");
    const matrix all[] = {{"wkv", wkv, -1, -1, false},   {"wgate", wgate, rows, columns, false},
                          {"ape", ape, -1, rows, false}, {"w", w, columns, 2 * rows, true},
                          {"b_a", b_a, r, width, true},  {"b_b", b_b, r, width, true}};
    if ((status = check_matrices(all, series == 2 ? 6 : 5)) != QUERN_OK) return status;
    for (int64_t s = 0; s < series; s++) { /* s = 0 is series a, the last rows of the checkpoint */
        const int64_t from = (series - 1 - s) * width;
        copy_block(w, 2 * s * width, wkv, from, width, true);
        copy_block(w, (2 * s + 1) * width, wgate, from, width, true);
        copy_block(s == 0 ? b_a : b_b, 0, ape, from, width, false);
    }
    return QUERN_OK;
}
