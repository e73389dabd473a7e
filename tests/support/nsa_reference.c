/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_reference.c - the oracle over batches: a loop over sequences, and comparisons. */
#include "nsa_reference.h"

#include "cmocka_c11.h"
#include "compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

nsa_sequence nsa_sequence_of(const nsa_case *c, int64_t b)
{
    const nsa_config *f = &c->config;
    nsa_sequence s = {.a = {f->params, f->varlen ? f->lens[b] : f->n, f->h, f->hkv, f->d, f->dv}};
    const int64_t lists = oracle_nsa_lists(&s.a);
    s.list_rows = c->list_rows;
    s.lse_stride = f->varlen ? c->rows : f->n;
    if (!f->varlen) {
        s.row = b * f->n;
        s.entry = b * oracle_nsa_entries(&s.a);
        s.list = b * lists * c->list_rows;
        s.lse = b * f->h * f->n;
        return s;
    }
    for (int64_t i = 0; i < b; i++) {
        const oracle_nsa before = {f->params, f->lens[i], f->h, f->hkv, f->d, f->dv};
        s.row += before.n;
        s.entry += oracle_nsa_entries(&before);
        s.list += oracle_nsa_tiles(&before);
    }
    s.lse = s.row;
    return s;
}

static bool is_list(int slot)
{
    return slot == NSA_CU_SEQLENS || slot == NSA_CU_SEQLENS_CMP ||
           (slot >= NSA_BLOCK_IDX && slot <= NSA_GROUP_IDX);
}

/* Pointer to a sequence's first row of a tensor with `width` values per row; NULL if it is absent. */
static double *at(const nsa_reference *r, nsa_slot slot, int64_t row, int64_t width)
{
    return r->value[slot] != NULL ? r->value[slot] + row * width : NULL;
}

nsa_reference *nsa_reference_new(const nsa_case *c, bool entries_from_case)
{
    nsa_reference *r = calloc(1, sizeof *r);
    if (r == NULL) fail_msg("the test is out of memory");
    r->c = c;
    for (int i = 0; i < NSA_SLOTS; i++)
        if (c->tensor[i].buffer != NULL && !is_list(i)) r->value[i] = test_tensor_get(&c->tensor[i]);
    const bool given = c->config.params.compress == QUERN_NSA_COMPRESS_GIVEN;
    if (entries_from_case || given) {
        r->k_cmp = test_tensor_get(&c->tensor[NSA_K_CMP]);
        r->v_cmp = test_tensor_get(&c->tensor[NSA_V_CMP]);
    }
    if (!given) {
        memset(r->value[NSA_K_CMP], 0, sizeof(double) * (size_t)test_tensor_count(&c->tensor[NSA_K_CMP]));
        memset(r->value[NSA_V_CMP], 0, sizeof(double) * (size_t)test_tensor_count(&c->tensor[NSA_V_CMP]));
        for (int64_t b = 0; b < c->config.batch; b++) {
            const nsa_sequence s = nsa_sequence_of(c, b);
            const int64_t hkv = s.a.hkv;
            oracle_nsa_compress(&s.a, s.a.d, at(r, NSA_K, s.row, hkv * s.a.d), r->value[NSA_W_K],
                                r->value[NSA_PE_K], at(r, NSA_K_CMP, s.entry, hkv * s.a.d));
            oracle_nsa_compress(&s.a, s.a.dv, at(r, NSA_V, s.row, hkv * s.a.dv), r->value[NSA_W_V],
                                r->value[NSA_PE_V], at(r, NSA_V_CMP, s.entry, hkv * s.a.dv));
        }
    }
    if (r->k_cmp == NULL) {
        const int64_t k_count = test_tensor_count(&c->tensor[NSA_K_CMP]);
        const int64_t v_count = test_tensor_count(&c->tensor[NSA_V_CMP]);
        r->k_cmp = test_doubles(k_count);
        r->v_cmp = test_doubles(v_count);
        memcpy(r->k_cmp, r->value[NSA_K_CMP], sizeof(double) * (size_t)k_count);
        memcpy(r->v_cmp, r->value[NSA_V_CMP], sizeof(double) * (size_t)v_count);
    }
    return r;
}

void nsa_reference_free(nsa_reference *r)
{
    for (int i = 0; i < NSA_SLOTS; i++) free(r->value[i]);
    free(r->pe_k_terms);
    free(r->k_cmp);
    free(r->v_cmp);
    free(r->block_idx);
    free(r->block_count);
    free(r->group_idx);
    free(r);
}

void nsa_reference_take_lists(nsa_reference *r)
{
    r->block_idx = test_tensor_get_i32(&r->c->tensor[NSA_BLOCK_IDX]);
    if (r->c->config.params.max_compressed_groups > 0)
        r->group_idx = test_tensor_get_i32(&r->c->tensor[NSA_GROUP_IDX]);
}

void nsa_reference_select(nsa_reference *r)
{
    const nsa_config *f = &r->c->config;
    const size_t k = (size_t)test_tensor_count(&r->c->tensor[NSA_BLOCK_IDX]);
    const size_t rows = (size_t)test_tensor_count(&r->c->tensor[NSA_BLOCK_COUNT]);
    const int64_t c = f->params.max_compressed_groups;
    r->block_idx = malloc(sizeof(int32_t) * (k + 1));
    r->block_count = calloc(rows + 1, sizeof(int32_t));
    r->group_idx = malloc(sizeof(int32_t) * (rows * (size_t)c + 1));
    memset(r->block_idx, 0xff, sizeof(int32_t) * k);
    memset(r->group_idx, 0xff, sizeof(int32_t) * rows * (size_t)c);
    for (int64_t b = 0; b < f->batch; b++) {
        const nsa_sequence s = nsa_sequence_of(r->c, b);
        oracle_nsa_select(&s.a, at(r, NSA_Q, s.row, s.a.h * s.a.d), r->k_cmp + s.entry * s.a.hkv * s.a.d,
                          s.list_rows, r->block_idx + s.list * f->params.num_selected,
                          r->block_count + s.list, c > 0 ? r->group_idx + s.list * c : NULL);
    }
}

/* The arrays of one sequence. */
static oracle_nsa_arrays arrays_of(const nsa_reference *r, const nsa_sequence *s)
{
    const int64_t h = s->a.h, hkv = s->a.hkv, d = s->a.d, dv = s->a.dv;
    const quern_nsa_params *p = &s->a.params;
    oracle_nsa_arrays x = {
        .q = at(r, NSA_Q, s->row, h * d),
        .k = at(r, NSA_K, s->row, hkv * d),
        .v = at(r, NSA_V, s->row, hkv * dv),
        .k_slc = at(r, NSA_K_SLC, s->row, hkv * d),
        .v_slc = at(r, NSA_V_SLC, s->row, hkv * dv),
        .k_win = at(r, NSA_K_WIN, s->row, hkv * d),
        .v_win = at(r, NSA_V_WIN, s->row, hkv * dv),
        .k_cmp = r->k_cmp + s->entry * hkv * d,
        .v_cmp = r->v_cmp + s->entry * hkv * dv,
        .w_k = r->value[NSA_W_K],
        .w_v = r->value[NSA_W_V],
        .pe_k = r->value[NSA_PE_K],
        .pe_v = r->value[NSA_PE_V],
        .w_gate = r->value[NSA_W_GATE],
        .gates = at(r, NSA_GATES, s->row, h * 3),
        .block_idx = r->block_idx != NULL ? r->block_idx + s->list * p->num_selected : NULL,
        .group_idx = r->group_idx != NULL ? r->group_idx + s->list * p->max_compressed_groups : NULL,
        .list_rows = s->list_rows,
        .lse_stride = s->lse_stride,
        .o = at(r, NSA_O, s->row, h * dv),
        .d_o = at(r, NSA_D_O, s->row, h * dv),
        .d_q = at(r, NSA_D_Q, s->row, h * d),
        .d_k = at(r, NSA_D_K, s->row, hkv * d),
        .d_v = at(r, NSA_D_V, s->row, hkv * dv),
        .d_k_slc = at(r, NSA_D_K_SLC, s->row, hkv * d),
        .d_v_slc = at(r, NSA_D_V_SLC, s->row, hkv * dv),
        .d_k_win = at(r, NSA_D_K_WIN, s->row, hkv * d),
        .d_v_win = at(r, NSA_D_V_WIN, s->row, hkv * dv),
        .d_k_cmp = at(r, NSA_D_K_CMP, s->entry, hkv * d),
        .d_v_cmp = at(r, NSA_D_V_CMP, s->entry, hkv * dv),
        .d_w_k = r->value[NSA_D_W_K],
        .d_w_v = r->value[NSA_D_W_V],
        .d_pe_k = r->value[NSA_D_PE_K],
        .d_pe_v = r->value[NSA_D_PE_V],
        .pe_k_terms = r->pe_k_terms,
        .d_w_gate = r->value[NSA_D_W_GATE],
        .d_gates = at(r, NSA_D_GATES, s->row, h * 3),
    };
    for (int b = 0; b < 3; b++) {
        x.o_b[b] = at(r, (nsa_slot)(NSA_O_CMP + b), s->row, h * dv);
        x.lse_b[b] = r->value[NSA_LSE_CMP + b] + s->lse;
    }
    return x;
}

static void fill(nsa_reference *r, nsa_slot first, nsa_slot last, double value)
{
    for (int i = (int)first; i <= (int)last; i++) {
        if (r->value[i] == NULL) continue;
        const int64_t count = test_tensor_count(&r->c->tensor[i]);
        for (int64_t j = 0; j < count; j++) r->value[i][j] = value;
    }
}

/* Rows of no sequence: gates are 0 there where they are computed. */
static void clear_computed_gates(nsa_reference *r)
{
    if (r->c->config.params.gate != QUERN_NSA_GATE_GIVEN) fill(r, NSA_GATES, NSA_GATES, 0);
}

void nsa_reference_forward(nsa_reference *r)
{
    fill(r, NSA_O, NSA_O_WIN, 0);
    fill(r, NSA_LSE_CMP, NSA_LSE_WIN, -INFINITY);
    clear_computed_gates(r);
    for (int64_t b = 0; b < r->c->config.batch; b++) {
        const nsa_sequence s = nsa_sequence_of(r->c, b);
        const oracle_nsa_arrays x = arrays_of(r, &s);
        oracle_nsa_forward(&s.a, &x);
    }
}

static void clear_gradients(nsa_reference *r, nsa_slot first)
{
    fill(r, first, NSA_D_GATES, 0);
    if (r->value[NSA_D_PE_K] == NULL) return;
    free(r->pe_k_terms);
    r->pe_k_terms = test_doubles(test_tensor_count(&r->c->tensor[NSA_D_PE_K]));
}

void nsa_reference_backward(nsa_reference *r)
{
    clear_gradients(r, NSA_D_Q);
    for (int64_t b = 0; b < r->c->config.batch; b++) {
        const nsa_sequence s = nsa_sequence_of(r->c, b);
        const oracle_nsa_arrays x = arrays_of(r, &s);
        oracle_nsa_backward(&s.a, &x);
    }
}

void nsa_reference_compress_backward(nsa_reference *r)
{
    clear_gradients(r, NSA_D_W_K);
    fill(r, NSA_D_K, NSA_D_V, 0);
    for (int64_t b = 0; b < r->c->config.batch; b++) {
        const nsa_sequence s = nsa_sequence_of(r->c, b);
        const oracle_nsa_arrays x = arrays_of(r, &s);
        oracle_nsa_compress_backward(&s.a, s.a.d, x.k, x.w_k, x.pe_k, x.d_k_cmp, x.d_k, x.d_w_k, x.d_pe_k,
                                     x.pe_k_terms);
        oracle_nsa_compress_backward(&s.a, s.a.dv, x.v, x.w_v, x.pe_v, x.d_v_cmp, x.d_v, x.d_w_v, x.d_pe_v,
                                     NULL);
    }
}

void nsa_reference_attend_backward(nsa_reference *r)
{
    clear_gradients(r, NSA_D_Q);
    for (int64_t b = 0; b < r->c->config.batch; b++) {
        const nsa_sequence s = nsa_sequence_of(r->c, b);
        const oracle_nsa_arrays x = arrays_of(r, &s);
        double *d_keys[] = {x.d_k_cmp, x.d_k_slc != NULL ? x.d_k_slc : x.d_k,
                            x.d_k_win != NULL ? x.d_k_win : x.d_k};
        double *d_values[] = {x.d_v_cmp, x.d_v_slc != NULL ? x.d_v_slc : x.d_v,
                              x.d_v_win != NULL ? x.d_v_win : x.d_v};
        for (int branch = 0; branch < 3; branch++)
            if (s.a.params.branches >> branch & 1)
                oracle_nsa_branch_backward(&s.a, &x, branch,
                                           at(r, (nsa_slot)(NSA_D_O_CMP + branch), s.row, s.a.h * s.a.dv),
                                           x.d_q, d_keys[branch], d_values[branch]);
    }
}

void nsa_reference_gate(nsa_reference *r)
{
    fill(r, NSA_O, NSA_O, 0);
    clear_computed_gates(r);
    for (int64_t b = 0; b < r->c->config.batch; b++) {
        const nsa_sequence s = nsa_sequence_of(r->c, b);
        const oracle_nsa_arrays x = arrays_of(r, &s);
        oracle_nsa_gate(&s.a, &x);
    }
}

void nsa_reference_gate_backward(nsa_reference *r)
{
    clear_gradients(r, NSA_D_W_K);
    fill(r, NSA_D_Q, NSA_D_Q, 0);
    fill(r, NSA_D_O_CMP, NSA_D_O_WIN, 0);
    for (int64_t b = 0; b < r->c->config.batch; b++) {
        const nsa_sequence s = nsa_sequence_of(r->c, b);
        const oracle_nsa_arrays x = arrays_of(r, &s);
        double *d_o_b[3];
        for (int branch = 0; branch < 3; branch++)
            d_o_b[branch] = at(r, (nsa_slot)(NSA_D_O_CMP + branch), s.row, s.a.h * s.a.dv);
        oracle_nsa_gate_backward(&s.a, &x, d_o_b);
    }
}

void nsa_check(const nsa_reference *r, nsa_set set)
{
    const quern_dtype dtype = r->c->config.dtype;
    char text[600], name[700];
    for (int i = 0; i < NSA_SLOTS; i++) {
        const test_tensor *t = &r->c->tensor[i];
        if ((set & NSA_BIT(i)) == 0 || r->value[i] == NULL) continue;
        double *out = test_tensor_get(t);
        /* Gates are f32 whatever the activations are, and their inputs are exact. */
        const double bound = i == NSA_GATES ? test_forward_bound(QUERN_F32)
                             : i >= NSA_D_O ? test_gradient_bound(dtype)
                                            : test_forward_bound(dtype);
        snprintf(name, sizeof name, "%s [%s]", nsa_slot_name(i), nsa_config_describe(&r->c->config, text));
        test_check(name, out, r->value[i], test_tensor_count(t), bound);
        free(out);
    }
}

void nsa_check_lists(const nsa_reference *r, bool judge_groups)
{
    const nsa_case *c = r->c;
    const quern_nsa_params *p = &c->config.params;
    const int64_t k = p->num_selected, groups = judge_groups ? p->max_compressed_groups : 0;
    int32_t *idx = test_tensor_get_i32(&c->tensor[NSA_BLOCK_IDX]);
    int32_t *count = test_tensor_get_i32(&c->tensor[NSA_BLOCK_COUNT]);
    int32_t *group_idx = groups > 0 ? test_tensor_get_i32(&c->tensor[NSA_GROUP_IDX]) : NULL;
    const int64_t rows = test_tensor_count(&c->tensor[NSA_BLOCK_COUNT]);
    bool *used = calloc((size_t)rows + 1, 1);
    char why[200], text[600];
    for (int64_t b = 0; b < c->config.batch; b++) {
        const nsa_sequence s = nsa_sequence_of(c, b);
        if (!oracle_nsa_judge(&s.a, at(r, NSA_Q, s.row, s.a.h * s.a.d), r->k_cmp + s.entry * s.a.hkv * s.a.d,
                              s.list_rows, idx + s.list * k, count + s.list,
                              groups > 0 ? group_idx + s.list * groups : NULL, why))
            fail_msg("sequence %lld: %s [%s]", (long long)b, why, nsa_config_describe(&c->config, text));
        for (int64_t list = 0; list < oracle_nsa_lists(&s.a); list++)
            for (int64_t tile = 0; tile < oracle_nsa_tiles(&s.a); tile++)
                used[s.list + list * s.list_rows + tile] = true;
    }
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = 0; i < k && !used[row]; i++)
            if (idx[row * k + i] != -1 || count[row] != 0)
                fail_msg("unused list row %lld is not empty [%s]", (long long)row,
                         nsa_config_describe(&c->config, text));
        for (int64_t i = 0; i < groups && !used[row]; i++)
            if (group_idx[row * groups + i] != -1)
                fail_msg("unused group row %lld is not empty", (long long)row);
    }
    free(idx);
    free(count);
    free(group_idx);
    free(used);
}
