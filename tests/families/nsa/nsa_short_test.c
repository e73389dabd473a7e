/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_short_test.c - the whole NSA over documents of few compressed entries that overlap: their values are
 * alike, so that dP - delta is small beside delta, and a delta off by the rounding of o shows in d_w_k first.
 */
#include "cmocka_c11.h"
#include "nsa_reference.h"

static void short_documents_of_overlapping_entries(void **state)
{
    static const int64_t last[] = {40, 63, 100}; /* tokens: 2, 4, 9 entries */
    (void)state;
    for (int which = 0; which < 3; which++)
        for (int compress = QUERN_NSA_COMPRESS_MEAN; compress <= QUERN_NSA_COMPRESS_LINEAR; compress++)
            for (int dtype = QUERN_F32; dtype <= QUERN_BF16; dtype++)
                for (int level = QUERN_CPU_LEVEL_PORTABLE; level <= (int)quern_cpu_level_detect(); level++) {
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
                    quern_context *ctx = test_context((quern_cpu_level)level, 2);
                    nsa_check_whole(c, ctx);
                    quern_context_destroy(ctx);
                    nsa_case_free(c);
                }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(short_documents_of_overlapping_entries)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
