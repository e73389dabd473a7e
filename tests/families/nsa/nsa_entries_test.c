/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_entries_test.c - an entry's bits follow from its block, not from how many entries a call computes. */
#include "cmocka_c11.h"
#include "nsa_case.h"

#include <stdlib.h>

/* Entry i of few and of many: a cache computes it alone. */
static void an_entry_depends_on_its_block_alone(void **state)
{
    (void)state;
    static const quern_nsa_compress_kind kinds[] = {QUERN_NSA_COMPRESS_MEAN, QUERN_NSA_COMPRESS_LINEAR};
    for (int i = 0; i < 4; i++) {
        test_random random = {5};
        nsa_config config = nsa_config_small();
        config.params.compress = kinds[i % 2];
        config.params.block_size = 8;
        config.params.stride = 8;
        config.params.select_block = 8;
        config.project_k = config.project_v = i % 2 == 0;
        config.dtype = config.weight_dtype = i < 2 ? QUERN_F32 : QUERN_BF16;
        config.batch = 1;
        config.h = config.hkv = 1;
        config.d = config.dv = 128;
        config.n = 300 * 8;
        nsa_case *many = nsa_case_new(&config, &random);
        config.n = 10 * 8;
        nsa_case *few = nsa_case_new(&config, &random);
        const nsa_slot inputs[] = {NSA_K, NSA_V, NSA_W_K, NSA_W_V};
        for (int k = 0; k < 4; k++) {
            double *x = test_tensor_get(&many->tensor[inputs[k]]);
            test_tensor_set(&few->tensor[inputs[k]], x);
            free(x);
        }
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
        const nsa_set in = NSA_BIT(NSA_K) | NSA_BIT(NSA_V) | NSA_BIT(NSA_W_K) | NSA_BIT(NSA_W_V),
                      out = NSA_BIT(NSA_K_CMP) | NSA_BIT(NSA_V_CMP);
        nsa_run(many, ctx, nsa_call_compress, in, out);
        nsa_run(few, ctx, nsa_call_compress, in, out);
        double *a = test_tensor_get(&many->tensor[NSA_K_CMP]), *b = test_tensor_get(&few->tensor[NSA_K_CMP]);
        for (int k = 0; k < 10 * 128; k++) assert_true(a[k] == b[k]);
        free(a), free(b);
        nsa_case_free(many), nsa_case_free(few);
        quern_context_destroy(ctx);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(an_entry_depends_on_its_block_alone)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
