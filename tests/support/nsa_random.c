/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_random.c - draws NSA problems. */
#include "nsa_random.h"

#include "cmocka_c11.h"
#include "oracle/nsa.h"

#include <stdlib.h>

static int64_t gcd(int64_t a, int64_t b)
{
    return b == 0 ? a : gcd(b, a % b);
}

static int64_t pick(test_random *random, const int64_t *values, size_t count)
{
    return values[test_random_int(random, 0, (int64_t)count - 1)];
}
#define PICK(random, ...)                                                                                    \
    pick(random, (const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t))

int64_t nsa_least_selected(const quern_nsa_params *p)
{
    const int64_t block = p->select_block > 0 ? p->select_block : p->block_size;
    const int64_t local = p->causal && p->forced_local > 0
                              ? p->forced_local + (block - gcd(p->tile, block) + p->tile - 1) / block
                              : 0;
    const int64_t least = p->forced_first + local;
    return least > 1 ? least : 1;
}

static void draw_params(test_random *random, quern_nsa_params *p, int64_t tokens)
{
    p->block_size = PICK(random, 1, 2, 4, 5, 8, 16, 16, 24, 32);
    p->metric = (quern_nsa_metric)test_random_int(random, 0, 1);
    if (p->metric == QUERN_NSA_METRIC_SOFTMAX) {
        const int64_t divisors[] = {1, 2, 3, 4, 8};
        do p->stride = p->block_size / pick(random, divisors, 5);
        while (p->stride == 0 || p->block_size % p->stride != 0);
        p->select_block = p->stride * test_random_int(random, 1, 6);
        if (test_random_one_in(random, 3)) p->select_block = p->block_size;
    }
    p->tile = PICK(random, 1, 1, 1, 2, 3, 7, 16, 33, 64, 100, 256);
    p->window =
        test_random_one_in(random, 4) ? PICK(random, 1, 2, 1000) : test_random_int(random, 1, tokens / 2);
    p->compress = (quern_nsa_compress_kind)test_random_int(random, 0, 2);
    p->scope = (quern_nsa_scope)test_random_int(random, 0, 1);
    p->compressed_visibility = (quern_nsa_visibility)test_random_one_in(random, 3);
    p->causal = !test_random_one_in(random, 4);
    p->forced_first = test_random_int(random, 0, 2);
    p->forced_local = test_random_int(random, 0, 3);
    p->num_selected = nsa_least_selected(p) + test_random_int(random, 0, 4);
    p->scale = test_random_one_in(random, 3) ? 0.3f : 0.0f;
    p->gate = (quern_nsa_gate_kind)test_random_int(random, 0, 2);
    p->selection = (quern_nsa_list)test_random_one_in(random, 5);
    if (test_random_one_in(random, 4)) p->branches = (uint32_t)test_random_int(random, 1, 7);
    if (p->metric == QUERN_NSA_METRIC_MEAN_LOGIT && p->block_size <= 4 && test_random_one_in(random, 2)) {
        p->max_compressed_groups = 1 + (p->tile - 1 + 128 * p->block_size - 1) / (128 * p->block_size);
        p->groups = (quern_nsa_list)test_random_one_in(random, 4);
    }
}

nsa_config nsa_config_random(test_random *random, int64_t tokens)
{
    nsa_config c = {.params = QUERN_NSA_PARAMS_INIT};
    draw_params(random, &c.params, tokens);
    /* Groups of compressed entries are left out only where there are more than 128 entries. */
    if (c.params.max_compressed_groups > 0) tokens += 300 * c.params.block_size;
    c.dtype = (quern_dtype)test_random_int(random, 0, 2);
    c.weight_dtype = test_random_one_in(random, 2) ? c.dtype : QUERN_F32;
    c.layout = (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1);
    c.hkv = PICK(random, 1, 1, 2, 3);
    c.h = c.hkv * PICK(random, 1, 2, 3, 4);
    if (test_random_one_in(random, 12)) {
        c.hkv = 1;
        c.h = 16;
    }
    c.d = 8 * test_random_int(random, 1, 5);
    c.dv = test_random_one_in(random, 2) ? c.d : 8 * test_random_int(random, 1, 5);
    c.varlen = test_random_one_in(random, 2);
    c.batch = test_random_int(random, 1, c.varlen ? 4 : 2);
    if (c.params.block_size > 16) tokens += 64;
    if (c.varlen) {
        for (int64_t b = 0; b < c.batch; b++)
            c.lens[b] = test_random_one_in(random, 3) ? PICK(random, 0, 1, 2, c.params.block_size - 1)
                                                      : test_random_int(random, 1, tokens / c.batch + 1);
        c.lens[test_random_int(random, 0, c.batch - 1)] = tokens / 2 + test_random_int(random, 0, 9);
        c.spare = test_random_one_in(random, 2) ? test_random_int(random, 1, 20) : 0;
    } else {
        c.n = tokens / c.batch + test_random_int(random, 0, 9);
    }
    c.project_k = c.params.compress == QUERN_NSA_COMPRESS_MEAN && test_random_one_in(random, 2);
    c.project_v = c.params.compress == QUERN_NSA_COMPRESS_MEAN && test_random_one_in(random, 2);
    c.pe_k = c.params.compress == QUERN_NSA_COMPRESS_LINEAR && test_random_one_in(random, 2);
    c.pe_v = c.params.compress == QUERN_NSA_COMPRESS_LINEAR && test_random_one_in(random, 2);
    c.separate_slc = test_random_one_in(random, 3);
    c.separate_win = test_random_one_in(random, 3);
    /* Where each query sees one key, the gradients of q and k cancel exactly: nothing to compare by norm. */
    const bool shared = !c.separate_slc && !c.separate_win && c.params.branches == QUERN_NSA_BRANCH_ALL;
    if (!shared && c.params.window < 4) c.params.window = 4;
    if (!shared && c.params.num_selected < 2) c.params.num_selected = 2;
    return c;
}

static void draw_list(nsa_case *c, test_random *random, nsa_slot slot, int64_t units)
{
    const int64_t count = test_tensor_count(&c->tensor[slot]);
    int32_t *list = malloc(sizeof *list * (size_t)(count + 1));
    if (list == NULL) fail_msg("the test is out of memory");
    for (int64_t i = 0; i < count; i++)
        list[i] = test_random_one_in(random, 5) ? -1 : (int32_t)test_random_int(random, 0, units);
    test_tensor_set_i32(&c->tensor[slot], list);
    free(list);
}

nsa_case *nsa_case_random(const nsa_config *config, test_random *random)
{
    nsa_case *c = nsa_case_new(config, random);
    oracle_nsa longest = {config->params, config->n, config->h, config->hkv, config->d, config->dv};
    for (int64_t b = 0; config->varlen && b < config->batch; b++)
        if (config->lens[b] > longest.n) longest.n = config->lens[b];
    if (config->params.selection == QUERN_NSA_LIST_GIVEN)
        draw_list(c, random, NSA_BLOCK_IDX, oracle_nsa_blocks(&longest));
    if (config->params.groups == QUERN_NSA_LIST_GIVEN)
        draw_list(c, random, NSA_GROUP_IDX, oracle_nsa_entries(&longest) / 128);
    return c;
}
