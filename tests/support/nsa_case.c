/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_case.c - builds the tensors of an NSA problem. */
#include "nsa_case.h"

#include "cmocka_c11.h"
#include "op_case.h"
#include "oracle/nsa.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(offsetof(quern_nsa_tensors, d_gates) ==
                   offsetof(quern_nsa_tensors, q) + NSA_D_GATES * sizeof(const quern_tensor *),
               "nsa_slot follows quern_nsa_tensors");

const char *nsa_slot_name(int slot)
{
    return op_case_field("nsa", slot);
}

nsa_config nsa_config_small(void)
{
    nsa_config c = {
        .params = QUERN_NSA_PARAMS_INIT, .batch = 2, .n = 75, .h = 4, .hkv = 2, .d = 16, .dv = 16};
    c.params.block_size = 8;
    c.params.num_selected = 5;
    c.params.window = 20;
    return c;
}

const char *nsa_config_describe(const nsa_config *c, char text[600])
{
    const quern_nsa_params *p = &c->params;
    static const char *const compress[] = {"mean", "linear", "given"}, *const gate[] = {"none", "weights",
                                                                                        "given"};
    char size[160];
    int at = snprintf(size, sizeof size, c->varlen ? "lens" : "B %" PRId64 " N %" PRId64, c->batch, c->n);
    for (int64_t b = 0; c->varlen && b < c->batch; b++)
        at += snprintf(size + at, sizeof size - (size_t)at, " %" PRId64, c->lens[b]);
    if (c->varlen) snprintf(size + at, sizeof size - (size_t)at, " spare %" PRId64, c->spare);
    snprintf(
        text, 600,
        "%s %s %s, H %" PRId64 "/%" PRId64 " D %" PRId64 "/%" PRId64 ", l %" PRId64 " d %" PRId64
        " l' %" PRId64 " k %" PRId64 " tile %" PRId64 " W %" PRId64 ", %s%s%s%s%s %s %s %s forced %" PRId64
        "/%" PRId64 " groups %" PRId64 " %s scale %g branches %u gate %s separate %d%d, weights %s",
        quern_dtype_name(c->dtype), test_layout_name(c->layout), size, c->h, c->hkv, c->d, c->dv,
        p->block_size, p->stride, p->select_block, p->num_selected, p->tile, p->window, compress[p->compress],
        c->project_k ? " W_k" : "", c->project_v ? " W_v" : "", c->pe_k ? " pe_k" : "",
        c->pe_v ? " pe_v" : "", p->scope == QUERN_NSA_SCOPE_HEAD ? "head" : "group",
        p->metric == QUERN_NSA_METRIC_SOFTMAX ? "softmax" : "mean_logit",
        p->compressed_visibility == QUERN_NSA_VISIBLE_STARTED ? "started" : "complete", p->forced_first,
        p->forced_local, p->max_compressed_groups, p->causal ? "causal" : "non-causal", (double)p->scale,
        p->branches, gate[p->gate], c->separate_slc, c->separate_win, quern_dtype_name(c->weight_dtype));
    return text;
}

/* Makes one tensor; activations of a fixed length get the batch dimension in front. */
static void make(nsa_case *c, test_random *random, nsa_slot slot, quern_dtype dtype, int32_t ndim,
                 const int64_t *shape)
{
    c->tensor[slot] = test_tensor_make(random, dtype, ndim, shape, c->config.layout);
}

static void make_activation(nsa_case *c, test_random *random, nsa_slot slot, quern_dtype dtype,
                            int64_t per_seq, int64_t varlen_rows, int64_t heads, int64_t dim)
{
    const int64_t fixed[] = {c->config.batch, per_seq, heads, dim}, varlen[] = {varlen_rows, heads, dim};
    make(c, random, slot, dtype, c->config.varlen ? 3 : 4, c->config.varlen ? varlen : fixed);
}

static void make_weights(nsa_case *c, test_random *random)
{
    const nsa_config *f = &c->config;
    const bool linear = f->params.compress == QUERN_NSA_COMPRESS_LINEAR;
    const int64_t l = f->params.block_size, rows = linear ? l : 1;
    const int64_t w_k[] = {f->hkv, rows * f->d, f->d}, w_v[] = {f->hkv, rows * f->dv, f->dv};
    const int64_t pe_k[] = {f->hkv, l, f->d}, pe_v[] = {f->hkv, l, f->dv}, gate[] = {f->h, 3, f->d};
    const struct {
        nsa_slot slot, gradient;
        bool present;
        const int64_t *shape;
    } weights[] = {
        {NSA_W_K, NSA_D_W_K, linear || (f->params.compress == QUERN_NSA_COMPRESS_MEAN && f->project_k), w_k},
        {NSA_W_V, NSA_D_W_V, linear || (f->params.compress == QUERN_NSA_COMPRESS_MEAN && f->project_v), w_v},
        {NSA_PE_K, NSA_D_PE_K, linear && f->pe_k, pe_k},
        {NSA_PE_V, NSA_D_PE_V, linear && f->pe_v, pe_v},
        {NSA_W_GATE, NSA_D_W_GATE, f->params.gate == QUERN_NSA_GATE_WEIGHTS, gate},
    };
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) {
        if (!weights[i].present) continue;
        const double fan_in = (double)(weights[i].slot == NSA_W_GATE ? f->d : weights[i].shape[1]);
        make(c, random, weights[i].slot, f->weight_dtype, 3, weights[i].shape);
        if (!f->forward_only) make(c, random, weights[i].gradient, QUERN_F32, 3, weights[i].shape);
        test_tensor_normal(&c->tensor[weights[i].slot], random, 1 / sqrt(fan_in));
    }
}

static void make_lists(nsa_case *c, test_random *random)
{
    const nsa_config *f = &c->config;
    const int64_t lists = f->params.scope == QUERN_NSA_SCOPE_HEAD ? f->h : f->hkv;
    const int64_t widths[] = {f->params.num_selected, 0, f->params.max_compressed_groups};
    for (int i = 0; i < 3; i++) {
        const int64_t shape[] = {f->batch, lists, c->list_rows, widths[i]};
        if (i == 2 && widths[i] == 0) continue;
        make(c, random, (nsa_slot)(NSA_BLOCK_IDX + i), QUERN_I32, (f->varlen ? 2 : 3) + (i != 1),
             f->varlen ? shape + 1 : shape);
    }
}

static void make_indexer(nsa_case *c, test_random *random)
{
    const nsa_config *f = &c->config;
    if (f->d_index == 0) return;
    const int64_t keys[] = {f->batch, f->n, f->d_index}, rows[] = {c->rows, f->d_index},
                  lists = f->params.scope == QUERN_NSA_SCOPE_HEAD ? f->h : f->hkv;
    make_activation(c, random, NSA_Q_INDEX, f->dtype, f->n, c->rows, lists, f->d_index);
    if (f->key_a_list) make_activation(c, random, NSA_K_INDEX, f->dtype, f->n, c->rows, lists, f->d_index);
    else make(c, random, NSA_K_INDEX, f->dtype, f->varlen ? 2 : 3, f->varlen ? rows : keys);
    test_tensor_normal(&c->tensor[NSA_Q_INDEX], random, 1);
    test_tensor_normal(&c->tensor[NSA_K_INDEX], random, 1);
}

static void make_sequences(nsa_case *c, test_random *random, oracle_nsa one)
{
    const nsa_config *f = &c->config;
    const int64_t shape[] = {f->batch + 1};
    int32_t cu[NSA_MAX_BATCH + 1] = {0}, cu_cmp[NSA_MAX_BATCH + 1] = {0};
    c->rows = f->spare;
    for (int64_t b = 0; b < f->batch; b++) {
        one.n = f->lens[b];
        c->rows += one.n;
        cu[b + 1] = cu[b] + (int32_t)one.n;
        cu_cmp[b + 1] = cu_cmp[b] + (int32_t)oracle_nsa_entries(&one);
    }
    make(c, random, NSA_CU_SEQLENS, QUERN_I32, 1, shape);
    make(c, random, NSA_CU_SEQLENS_CMP, QUERN_I32, 1, shape);
    test_tensor_set_i32(&c->tensor[NSA_CU_SEQLENS], cu);
    test_tensor_set_i32(&c->tensor[NSA_CU_SEQLENS_CMP], cu_cmp);
    c->entries = c->rows / oracle_nsa_stride(&one);
    c->list_rows = c->rows / f->params.tile + f->batch;
}

nsa_case *nsa_case_new(const nsa_config *config, test_random *random)
{
    nsa_case *c = calloc(1, sizeof *c);
    if (c == NULL) fail_msg("the test is out of memory");
    c->config = *config;
    const nsa_config *f = &c->config;
    const oracle_nsa one = {f->params, f->n, f->h, f->hkv, f->d, f->dv};
    const int64_t nc = oracle_nsa_entries(&one);
    if (f->varlen) {
        make_sequences(c, random, one);
    } else {
        c->rows = f->batch * f->n;
        c->entries = f->batch * nc;
        c->list_rows = oracle_nsa_tiles(&one);
    }
    const struct {
        nsa_slot slot, gradient;
        bool present, value;
    } pairs[] = {{NSA_K, NSA_D_K, true, false},
                 {NSA_V, NSA_D_V, true, true},
                 {NSA_K_SLC, NSA_D_K_SLC, f->separate_slc, false},
                 {NSA_V_SLC, NSA_D_V_SLC, f->separate_slc, true},
                 {NSA_K_WIN, NSA_D_K_WIN, f->separate_win, false},
                 {NSA_V_WIN, NSA_D_V_WIN, f->separate_win, true},
                 {NSA_K_CMP, NSA_D_K_CMP, true, false},
                 {NSA_V_CMP, NSA_D_V_CMP, true, true}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        const int64_t dim = pairs[i].value ? f->dv : f->d;
        const bool entry = pairs[i].slot == NSA_K_CMP || pairs[i].slot == NSA_V_CMP;
        if (!pairs[i].present) continue;
        for (int g = 0; g < (f->forward_only ? 1 : 2); g++)
            make_activation(c, random, g ? pairs[i].gradient : pairs[i].slot, f->dtype, entry ? nc : f->n,
                            entry ? c->entries : c->rows, f->hkv, dim);
        if (!f->forward_only || !entry || f->params.compress == QUERN_NSA_COMPRESS_GIVEN)
            test_tensor_normal(&c->tensor[pairs[i].slot], random, 1);
        if (!f->forward_only) /* of k_cmp: an input to some calls */
            test_tensor_normal(&c->tensor[pairs[i].gradient], random, 1);
    }
    make_activation(c, random, NSA_Q, f->dtype, f->n, c->rows, f->h, f->d);
    if (!f->forward_only) make_activation(c, random, NSA_D_Q, f->dtype, f->n, c->rows, f->h, f->d);
    test_tensor_normal(&c->tensor[NSA_Q], random, 1);
    for (int b = 0; b < 4; b++) { /* o, o_cmp, o_slc, o_win */
        make_activation(c, random, (nsa_slot)(NSA_O + b), f->dtype, f->n, c->rows, f->h, f->dv);
        if (f->forward_only) continue;
        make_activation(c, random, (nsa_slot)(NSA_D_O + b), f->dtype, f->n, c->rows, f->h, f->dv);
        test_tensor_normal(&c->tensor[NSA_O + b], random, 1);
        test_tensor_normal(&c->tensor[NSA_D_O + b], random, 1);
    }
    for (int b = 0; b < 3; b++) {
        const int64_t shape[] = {f->batch, f->h, f->varlen ? c->rows : f->n};
        make(c, random, (nsa_slot)(NSA_LSE_CMP + b), QUERN_F32, f->varlen ? 2 : 3,
             f->varlen ? shape + 1 : shape);
    }
    make_activation(c, random, NSA_GATES, QUERN_F32, f->n, c->rows, f->h, 3);
    if (!f->forward_only) make_activation(c, random, NSA_D_GATES, QUERN_F32, f->n, c->rows, f->h, 3);
    double *gates = test_doubles(c->rows * f->h * 3);
    for (int64_t i = 0; i < c->rows * f->h * 3; i++) gates[i] = test_random_uniform(random);
    test_tensor_set(&c->tensor[NSA_GATES], gates);
    free(gates);
    make_weights(c, random);
    make_lists(c, random);
    make_indexer(c, random);
    return c;
}

void nsa_case_free(nsa_case *c)
{
    for (int i = 0; i < NSA_SLOTS; i++) test_tensor_free(&c->tensor[i]);
    free(c);
}

nsa_set nsa_present(const nsa_case *c, nsa_set set)
{
    for (int i = 0; i < NSA_SLOTS; i++)
        if (c->tensor[i].buffer == NULL) set &= ~NSA_BIT(i);
    return set;
}

static nsa_set slots(nsa_slot first, nsa_slot last)
{
    nsa_set set = 0;
    for (int i = (int)first; i <= (int)last; i++) set |= NSA_BIT(i);
    return set;
}

/* The tensors that the active branches use; a call ignores the others. */
typedef struct uses {
    bool cmp, slc, win, compresses, k, groups, selects, indexes;
} uses;

static uses uses_of(const nsa_case *c)
{
    const quern_nsa_params *p = &c->config.params;
    uses u = {.cmp = p->branches & QUERN_NSA_BRANCH_CMP,
              .slc = p->branches & QUERN_NSA_BRANCH_SLC,
              .win = p->branches & QUERN_NSA_BRANCH_WIN};
    u.selects = u.slc && p->selection == QUERN_NSA_LIST_COMPUTED;
    u.indexes = u.slc && p->selection == QUERN_NSA_LIST_INDEXED;
    u.compresses = p->compress != QUERN_NSA_COMPRESS_GIVEN && (u.cmp || u.selects);
    u.k = u.compresses || (u.slc && !c->config.separate_slc) || (u.win && !c->config.separate_win);
    u.groups = u.cmp && p->max_compressed_groups > 0;
    return u;
}

nsa_set nsa_attend_inputs(const nsa_case *c)
{
    const uses u = uses_of(c);
    nsa_set set = NSA_BIT(NSA_Q) | NSA_BIT(NSA_CU_SEQLENS);
    if (u.cmp) set |= slots(NSA_K_CMP, NSA_V_CMP) | NSA_BIT(NSA_CU_SEQLENS_CMP);
    if ((u.slc && !c->config.separate_slc) || (u.win && !c->config.separate_win)) set |= slots(NSA_K, NSA_V);
    if (u.slc) set |= slots(NSA_K_SLC, NSA_V_SLC) | NSA_BIT(NSA_BLOCK_IDX);
    if (u.win) set |= slots(NSA_K_WIN, NSA_V_WIN);
    if (u.groups) set |= NSA_BIT(NSA_GROUP_IDX);
    return nsa_present(c, set);
}

nsa_set nsa_attend_outputs(const nsa_case *c)
{
    nsa_set set = 0;
    for (int b = 0; b < 3; b++)
        if (c->config.params.branches >> b & 1) set |= NSA_BIT(NSA_O_CMP + b) | NSA_BIT(NSA_LSE_CMP + b);
    return set;
}

nsa_set nsa_attend_gradients(const nsa_case *c)
{
    const nsa_set inputs = nsa_attend_inputs(c);
    nsa_set set = 0;
    for (int i = NSA_Q; i <= NSA_V_CMP; i++)
        if (inputs & NSA_BIT(i)) set |= NSA_BIT(i - NSA_Q + NSA_D_Q);
    return set;
}

nsa_set nsa_forward_inputs(const nsa_case *c)
{
    const quern_nsa_params *p = &c->config.params;
    const uses u = uses_of(c);
    nsa_set set = nsa_attend_inputs(c) & ~(slots(NSA_K_CMP, NSA_V_CMP) | NSA_BIT(NSA_CU_SEQLENS_CMP) |
                                           NSA_BIT(NSA_BLOCK_IDX) | NSA_BIT(NSA_GROUP_IDX));
    if (u.k) set |= slots(NSA_K, NSA_V);
    if (u.compresses) set |= slots(NSA_W_K, NSA_PE_V);
    else if (u.cmp || u.selects) set |= slots(NSA_K_CMP, NSA_V_CMP) | NSA_BIT(NSA_CU_SEQLENS_CMP);
    if (u.indexes) set |= slots(NSA_Q_INDEX, NSA_K_INDEX);
    set |= NSA_BIT(NSA_W_GATE);
    if (p->gate == QUERN_NSA_GATE_GIVEN) set |= NSA_BIT(NSA_GATES);
    if (u.slc && p->selection == QUERN_NSA_LIST_GIVEN) set |= NSA_BIT(NSA_BLOCK_IDX);
    if (u.groups && p->groups == QUERN_NSA_LIST_GIVEN) set |= NSA_BIT(NSA_GROUP_IDX);
    return nsa_present(c, set);
}

nsa_set nsa_forward_outputs(const nsa_case *c)
{
    const uses u = uses_of(c);
    nsa_set set = nsa_attend_outputs(c) | NSA_BIT(NSA_O);
    if (!c->config.params.ungated) set |= NSA_BIT(NSA_GATES);
    if (u.compresses) set |= slots(NSA_K_CMP, NSA_V_CMP) | NSA_BIT(NSA_CU_SEQLENS_CMP);
    if (u.selects || u.indexes) set |= NSA_BIT(NSA_BLOCK_IDX) | NSA_BIT(NSA_BLOCK_COUNT);
    if (u.groups) set |= NSA_BIT(NSA_GROUP_IDX);
    return nsa_present(c, set & ~nsa_forward_inputs(c));
}

nsa_set nsa_backward_inputs(const nsa_case *c)
{
    const nsa_set none = NSA_BIT(NSA_O) | NSA_BIT(NSA_BLOCK_COUNT) | slots(NSA_Q_INDEX, NSA_K_INDEX);
    return (nsa_forward_inputs(c) | nsa_forward_outputs(c) | NSA_BIT(NSA_D_O)) & ~none;
}

nsa_set nsa_backward_outputs(const nsa_case *c)
{
    const quern_nsa_params *p = &c->config.params;
    const uses u = uses_of(c);
    nsa_set set = nsa_attend_gradients(c) & ~slots(NSA_D_K_CMP, NSA_D_V_CMP);
    if (u.k) set |= slots(NSA_D_K, NSA_D_V);
    if (u.compresses) set |= slots(NSA_D_W_K, NSA_D_PE_V);
    if (u.cmp && p->compress == QUERN_NSA_COMPRESS_GIVEN) set |= slots(NSA_D_K_CMP, NSA_D_V_CMP);
    set |= NSA_BIT(NSA_D_W_GATE);
    if (p->gate == QUERN_NSA_GATE_GIVEN) set |= NSA_BIT(NSA_D_GATES);
    return nsa_present(c, set);
}

quern_nsa_tensors nsa_bind(const nsa_case *c, nsa_set set)
{
    quern_nsa_tensors tensors;
    op_case_bind("nsa", c->tensor, NSA_SLOTS, set, &tensors);
    return tensors;
}
