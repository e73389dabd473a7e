/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_attend.c - the three branches over given lists, the gate, and the gradients of the whole. */
#include "attention.h"
#include "dot.h"
#include "nsa.h"

#include <math.h>
#include <stdlib.h>

enum { CMP, SLC, WIN, GROUP_ENTRIES = 128 };

/* What a branch's queries see. chosen[list][tile][unit]: the blocks (groups) of the lists, once each. */
typedef struct branch_mask {
    const oracle_nsa *a;
    int branch;
    uint32_t list_heads, tile, unit_keys; /* 32 bits: every key that every query meets divides by these */
    int64_t stride, tiles, units;
    bool *chosen; /* NULL: no list restricts this branch */
} branch_mask;

static bool is_chosen(const branch_mask *m, int64_t head, int64_t t, int64_t key)
{
    const int64_t list = (uint32_t)head / m->list_heads, tile = (uint32_t)t / m->tile;
    return m->chosen[(list * m->tiles + tile) * m->units + (uint32_t)key / m->unit_keys];
}

static bool branch_sees(const void *mask, int64_t head, int64_t t, int64_t j)
{
    const branch_mask *m = mask;
    const quern_nsa_params *p = &m->a->params;
    const bool started = p->compressed_visibility == QUERN_NSA_VISIBLE_STARTED;
    switch (m->branch) {
    case CMP:
        if (p->causal && j * m->stride + (started ? 0 : p->block_size - 1) > t) return false;
        return m->chosen == NULL || is_chosen(m, head, t, j);
    case SLC: return (!p->causal || j <= t) && is_chosen(m, head, t, j);
    default: return p->causal ? j <= t && j > t - p->window : llabs(t - j) <= p->window / 2;
    }
}

static bool *chosen_units(const oracle_nsa *a, const int32_t *list, int64_t k, int64_t units, int64_t rows)
{
    const int64_t tiles = oracle_nsa_tiles(a);
    bool *chosen = calloc((size_t)(oracle_nsa_lists(a) * tiles * units + 1), 1);
    if (chosen == NULL) abort();
    for (int64_t head = 0; head < oracle_nsa_lists(a); head++)
        for (int64_t tile = 0; tile < tiles; tile++)
            for (int64_t r = 0; r < k; r++) {
                const int32_t unit = list[(head * (rows > 0 ? rows : tiles) + tile) * k + r];
                if (unit >= 0 && unit < units) chosen[(head * tiles + tile) * units + unit] = true;
            }
    return chosen;
}

static branch_mask mask_of(const oracle_nsa *a, const oracle_nsa_arrays *x, int branch)
{
    branch_mask m = {.a = a, .branch = branch, .stride = oracle_nsa_stride(a), .tiles = oracle_nsa_tiles(a)};
    m.list_heads = (uint32_t)(a->h / (oracle_nsa_lists(a) > 0 ? oracle_nsa_lists(a) : 1));
    m.tile = (uint32_t)a->params.tile;
    m.unit_keys = branch == SLC ? (uint32_t)oracle_nsa_select_block(a) : GROUP_ENTRIES;
    if (branch == SLC) {
        m.units = oracle_nsa_blocks(a);
        m.chosen = chosen_units(a, x->block_idx, a->params.num_selected, m.units, x->list_rows);
    } else if (branch == CMP && a->params.max_compressed_groups > 0) {
        m.units = (oracle_nsa_entries(a) + GROUP_ENTRIES - 1) / GROUP_ENTRIES;
        m.chosen = chosen_units(a, x->group_idx, a->params.max_compressed_groups, m.units, x->list_rows);
    }
    return m;
}

static oracle_shape shape_of(const oracle_nsa *a, const oracle_nsa_arrays *x, int branch)
{
    const oracle_shape s = {a->n,
                            branch == CMP ? oracle_nsa_entries(a) : a->n,
                            a->h,
                            a->hkv,
                            a->d,
                            a->dv,
                            (double)a->params.scale,
                            x->lse_stride,
                            NULL};
    return s;
}

static const double *keys_of(const oracle_nsa_arrays *x, int branch)
{
    if (branch == CMP) return x->k_cmp;
    const double *own = branch == SLC ? x->k_slc : x->k_win;
    return own != NULL ? own : x->k;
}

static const double *values_of(const oracle_nsa_arrays *x, int branch)
{
    if (branch == CMP) return x->v_cmp;
    const double *own = branch == SLC ? x->v_slc : x->v_win;
    return own != NULL ? own : x->v;
}

static double gate_logit(const oracle_nsa *a, const oracle_nsa_arrays *x, int64_t row, int b)
{
    return oracle_dot(x->q + row * a->d, x->w_gate + (row % a->h * 3 + b) * a->d, a->d);
}

void oracle_nsa_gate(const oracle_nsa *a, const oracle_nsa_arrays *x)
{
    for (int64_t row = 0; row < a->n * a->h; row++) {
        for (int b = 0; b < 3; b++) {
            if (a->params.gate == QUERN_NSA_GATE_NONE) x->gates[row * 3 + b] = 1.0 / 3;
            if (a->params.gate == QUERN_NSA_GATE_WEIGHTS)
                x->gates[row * 3 + b] = 1 / (1 + exp(-gate_logit(a, x, row, b)));
        }
        for (int64_t c = 0; x->o != NULL && c < a->dv; c++) {
            double sum = 0;
            for (int b = 0; b < 3; b++) sum += x->gates[row * 3 + b] * x->o_b[b][row * a->dv + c];
            x->o[row * a->dv + c] = sum;
        }
    }
}

void oracle_nsa_forward(const oracle_nsa *a, const oracle_nsa_arrays *x)
{
    for (int b = 0; b < 3; b++) {
        for (int64_t i = 0; i < a->n * a->h * a->dv; i++) x->o_b[b][i] = 0;
        if ((a->params.branches >> b & 1) == 0) continue;
        const oracle_shape shape = shape_of(a, x, b);
        const branch_mask mask = mask_of(a, x, b);
        oracle_attend(&shape, branch_sees, &mask, x->q, keys_of(x, b), values_of(x, b), x->o_b[b],
                      x->lse_b[b]);
        free(mask.chosen);
    }
    oracle_nsa_gate(a, x);
}

void oracle_nsa_branch_rows(const oracle_nsa *a, const oracle_nsa_arrays *x, int branch, int64_t head,
                            int64_t first, int64_t count, double *o, double *lse)
{
    const oracle_shape shape = shape_of(a, x, branch);
    const branch_mask mask = mask_of(a, x, branch);
    for (int64_t t = 0; t < count; t++)
        lse[t] = oracle_attend_row(&shape, branch_sees, &mask, x->q, keys_of(x, branch), values_of(x, branch),
                                   head, first + t, o + t * a->dv);
    free(mask.chosen);
}

void oracle_nsa_branch_backward(const oracle_nsa *a, const oracle_nsa_arrays *x, int branch,
                                const double *d_o_b, double *d_q, double *d_k, double *d_v)
{
    const oracle_shape shape = shape_of(a, x, branch);
    const branch_mask mask = mask_of(a, x, branch);
    oracle_attend_backward(&shape, branch_sees, &mask, x->q, keys_of(x, branch), values_of(x, branch), d_o_b,
                           d_q, d_k, d_v);
    free(mask.chosen);
}

/* dO_b = g_b dO;  dg_b = dO . O_b;  dlogit_b = dg_b g_b (1 - g_b). */
void oracle_nsa_gate_backward(const oracle_nsa *a, const oracle_nsa_arrays *x, double *const d_o_b[3])
{
    for (int64_t row = 0; row < a->n * a->h; row++) {
        for (int b = 0; b < 3; b++) {
            const double g = x->gates[row * 3 + b];
            double d_g = 0;
            for (int64_t c = 0; c < a->dv; c++) {
                const double d_out = x->d_o[row * a->dv + c];
                d_o_b[b][row * a->dv + c] = g * d_out;
                d_g += d_out * x->o_b[b][row * a->dv + c];
            }
            if (a->params.gate == QUERN_NSA_GATE_GIVEN && x->d_gates != NULL) x->d_gates[row * 3 + b] += d_g;
            if (a->params.gate != QUERN_NSA_GATE_WEIGHTS) continue;
            const double d_logit = d_g * g * (1 - g);
            for (int64_t c = 0; c < a->d; c++) {
                const int64_t w = (row % a->h * 3 + b) * a->d + c;
                x->d_q[row * a->d + c] += d_logit * x->w_gate[w];
                x->d_w_gate[w] += d_logit * x->q[row * a->d + c];
            }
        }
    }
}

void oracle_nsa_backward(const oracle_nsa *a, const oracle_nsa_arrays *x)
{
    double *d_o_b[3];
    double *d_keys[] = {x->d_k_cmp, x->d_k_slc != NULL ? x->d_k_slc : x->d_k,
                        x->d_k_win != NULL ? x->d_k_win : x->d_k};
    double *d_values[] = {x->d_v_cmp, x->d_v_slc != NULL ? x->d_v_slc : x->d_v,
                          x->d_v_win != NULL ? x->d_v_win : x->d_v};
    for (int b = 0; b < 3; b++) {
        d_o_b[b] = malloc(sizeof(double) * (size_t)(a->n * a->h * a->dv + 1));
        if (d_o_b[b] == NULL) abort();
    }
    oracle_nsa_gate_backward(a, x, d_o_b);
    for (int b = 0; b < 3; b++) {
        if (a->params.branches >> b & 1)
            oracle_nsa_branch_backward(a, x, b, d_o_b[b], x->d_q, d_keys[b], d_values[b]);
        free(d_o_b[b]);
    }
    if (a->params.compress == QUERN_NSA_COMPRESS_GIVEN) return;
    oracle_nsa_compress_backward(a, a->d, x->k, x->w_k, x->pe_k, x->d_k_cmp, x->d_k, x->d_w_k, x->d_pe_k,
                                 x->pe_k_terms);
    oracle_nsa_compress_backward(a, a->dv, x->v, x->w_v, x->pe_v, x->d_v_cmp, x->d_v, x->d_w_v, x->d_pe_v,
                                 NULL);
}
