/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_short_test.c - the whole NSA over documents of few compressed entries that overlap: their values are
 * alike, so that dP - delta is small beside delta, and a delta off by the rounding of o shows in d_w_k first.
 * And its forward where a tile's queries are more than one piece of a GPU's kernel. */
#include "cmocka_c11.h"
#include "nsa_reference.h"

#include <math.h>
#include <stdlib.h>

static void short_documents_of_overlapping_entries(void **state)
{
    static const int64_t last[] = {40, 63, 100}; /* tokens: 2, 4, 9 entries */
    (void)state;
    for (int which = 0; which < 3; which++)
        for (int compress = QUERN_NSA_COMPRESS_MEAN; compress <= QUERN_NSA_COMPRESS_LINEAR; compress++)
            for (int dtype = QUERN_F32; dtype <= QUERN_BF16; dtype++)
                for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
                    nsa_config config = nsa_config_small();
                    test_random random = {(uint64_t)which + 1};
                    config.varlen = true;
                    config.batch = 3;
                    config.lens[0] = 1;
                    config.lens[1] = 16;
                    config.lens[2] = last[which];
                    config.dtype = (quern_dtype)dtype;
                    config.params.block_size = config.params.select_block = 32;
                    config.params.stride = 8;
                    config.params.gate = QUERN_NSA_GATE_WEIGHTS;
                    config.params.compress = (quern_nsa_compress_kind)compress;
                    config.project_k = config.project_v = true;
                    nsa_case *c = nsa_case_new(&config, &random);
                    quern_context *ctx = test_context(level, 2);
                    nsa_check_whole(c, ctx);
                    quern_context_destroy(ctx);
                    nsa_case_free(c);
                }
}

/* Lists by the mean of up to 256 queries, some of which are NaN (of the tile's first half and of its second),
 * and gates: without the branches' outputs, as in inference. */
static void tiles_of_many_queries(void **state)
{
    static const int64_t tiles[] = {256, 200, 136, 100};
    (void)state;
    for (int64_t i = 0; i < 8 * 3 * 4; i++) {
        nsa_config config = nsa_config_small();
        test_random random = {(uint64_t)i + 1};
        const int64_t poison = i / 8 % 3;
        config.params.tile = tiles[i / 24];
        config.params.scope = QUERN_NSA_SCOPE_HEAD;
        config.params.metric = QUERN_NSA_METRIC_MEAN_LOGIT;
        config.params.block_size = config.params.select_block = 16;
        config.params.stride = 0;
        config.params.num_selected = 6;
        config.params.forced_local = 0;
        config.params.gate = QUERN_NSA_GATE_WEIGHTS;
        config.dtype = i & 2 ? QUERN_BF16 : QUERN_F16;
        config.varlen = (i & 4) != 0;
        config.forward_only = true;
        config.batch = config.varlen ? 3 : 1;
        config.n = 530;
        config.lens[0] = 140;
        config.lens[1] = 5;
        config.lens[2] = 385;
        config.d = config.dv = i & 1 ? 64 : 72;
        nsa_case *c = nsa_case_new(&config, &random);
        if (poison > 0) {
            double *q = test_tensor_get(&c->tensor[NSA_Q]);
            q[((poison == 1 ? 11 : 133) * config.h + 1) * config.d + 5] = NAN;
            test_tensor_set(&c->tensor[NSA_Q], q);
            free(q);
        }
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        const nsa_set outputs =
            nsa_forward_outputs(c) & ~(NSA_BIT(NSA_O_CMP) | NSA_BIT(NSA_O_SLC) | NSA_BIT(NSA_O_WIN));
        nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), outputs);
        nsa_reference *r = nsa_reference_new(c, true);
        nsa_check_lists(r, false);
        nsa_reference_take_lists(r);
        nsa_reference_forward(r);
        nsa_check(r, outputs);
        nsa_reference_free(r);
        nsa_case_free(c);
        quern_context_destroy(ctx);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(short_documents_of_overlapping_entries),
                                       cmocka_unit_test(tiles_of_many_queries)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
