/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nvfp4_fused_gemm_test.c - fused equals unfused, to the bit: SwiGLU and quantisation in the grouped
 * product's epilogue, SwiGLU there and the quantiser after it, and the plain product before the fused
 * quantiser. */
#include "cmocka_c11.h"
#include "levels.h"
#include "nvfp4_case.h"
#include "tensor.h"

#include <quern/moe.h>

#include <stdlib.h>
#include <string.h>

enum { EXPERTS = 3, TOKENS_MOST = 24 };

typedef struct fused_gemm {
    int64_t tokens, n, k, width, blocks; /* width: of SwiGLU, n / 2 */
    test_tensor a, codes, scales, bias;
    int32_t ends[EXPERTS];
    float global, b_global[EXPERTS * 2];
    quern_nvfp4_gemm_params params;
} fused_gemm;

static fused_gemm make(test_random *random, quern_dtype dtype)
{
    static const int64_t runs[] = {1, 2, 8, 16};
    fused_gemm c = {.tokens = test_random_int(random, 0, TOKENS_MOST),
                    .k = 16 * test_random_int(random, 1, 12),
                    .global = 0.01f,
                    .params = QUERN_NVFP4_GEMM_PARAMS_INIT};
    c.params.granularity = runs[test_random_int(random, 0, 3)];
    c.width = c.params.granularity * test_random_int(random, 1, 96 / c.params.granularity);
    c.n = 2 * c.width;
    c.blocks = (c.width + 15) / 16;
    c.params.limit = test_random_one_in(random, 2) ? 0.7f : 0;
    c.params.alpha = test_random_one_in(random, 2) ? 1.702f : 1;
    c.params.beta = test_random_one_in(random, 2) ? 1 : 0;
    c.params.profile = (quern_nvfp4_profile)test_random_int(random, 0, 3);
    if (c.params.profile == QUERN_NVFP4_PROFILE_COMPRESSED_TENSORS) c.global = 1 / c.global;
    const int64_t a[] = {c.tokens, c.k}, codes[] = {EXPERTS, c.k / 2, c.n},
                  scales[] = {EXPERTS, c.k / 16, c.n}, bias[] = {EXPERTS, c.n};
    c.a = test_tensor_make(random, dtype, 2, a, TEST_STRIDED);
    c.codes = test_tensor_make(random, QUERN_U8, 3, codes, TEST_CONTIGUOUS);
    c.scales = test_tensor_make(random, QUERN_U8, 3, scales, TEST_CONTIGUOUS);
    c.bias = test_tensor_make(random, QUERN_F32, 2, bias, TEST_UNALIGNED);
    test_tensor_normal(&c.a, random, 1), test_tensor_normal(&c.bias, random, 0.2);
    for (int64_t i = 0; i < test_tensor_count(&c.codes); i++)
        ((uint8_t *)c.codes.view.data)[i] = (uint8_t)test_random_int(random, 0, 255);
    for (int64_t i = 0; i < test_tensor_count(&c.scales); i++)
        ((uint8_t *)c.scales.view.data)[i] = (uint8_t)test_random_int(random, 0x20, 0x48);
    for (int e = 0; e < EXPERTS; e++)
        c.ends[e] = e + 1 < EXPERTS ? (int32_t)test_random_int(random, e > 0 ? c.ends[e - 1] : 0, c.tokens)
                                    : (int32_t)c.tokens;
    for (int i = 0; i < 2 * EXPERTS; i++) c.b_global[i] = 0.02f * (float)(i + 1);
    return c;
}

static void release(fused_gemm *c)
{
    test_tensor_free(&c->a), test_tensor_free(&c->codes), test_tensor_free(&c->scales);
    test_tensor_free(&c->bias);
}

/* The product, to floats where `values` is there, else to codes and scales. */
static void multiply(quern_context *ctx, const fused_gemm *c, quern_nvfp4_activation activation,
                     const quern_tensor *values, const quern_tensor *codes, const quern_tensor *scales)
{
    const int64_t experts = EXPERTS, globals[] = {EXPERTS, 2};
    const quern_tensor offsets = quern_tensor_contiguous((void *)c->ends, QUERN_I32, 1, &experts),
                       b_global = quern_tensor_contiguous((void *)c->b_global, QUERN_F32, 2, globals),
                       c_global = quern_tensor_contiguous((void *)&c->global, QUERN_F32, 0, NULL);
    quern_nvfp4_gemm_params p = c->params;
    quern_nvfp4_gemm_tensors t = QUERN_NVFP4_GEMM_TENSORS_INIT;
    size_t bytes = 0;
    p.activation = activation;
    t.a = &c->a.view;
    t.b_codes = &c->codes.view;
    t.b_scales = &c->scales.view;
    t.b_global = &b_global;
    t.bias = &c->bias.view;
    t.offsets = &offsets;
    if (values != NULL) t.c = values;
    else {
        t.c_codes = codes;
        t.c_scales = scales;
        t.c_global = &c_global;
    }
    if (quern_nvfp4_gemm_workspace(ctx, &p, &t, &bytes) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
    test_workspace w = test_workspace_make(bytes);
    if (quern_nvfp4_gemm(ctx, NULL, &p, &t, w.data, w.bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
}

/* SwiGLU's values, or gate and up, to codes and scales. */
static void quantise(quern_context *ctx, const fused_gemm *c, bool swiglu, const quern_tensor *x,
                     const quern_tensor *codes, const quern_tensor *scales)
{
    const quern_tensor global = quern_tensor_contiguous((void *)&c->global, QUERN_F32, 0, NULL);
    quern_nvfp4_quantize_params p = QUERN_NVFP4_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_quantize_tensors t = QUERN_NVFP4_QUANTIZE_TENSORS_INIT;
    quern_nvfp4_fused_quantize_params fp = QUERN_NVFP4_FUSED_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_fused_quantize_tensors ft = QUERN_NVFP4_FUSED_QUANTIZE_TENSORS_INIT;
    size_t bytes = 0;
    fp.swiglu = true;
    p.profile = fp.profile = c->params.profile;
    fp.limit = c->params.limit;
    fp.alpha = c->params.alpha;
    fp.beta = c->params.beta;
    fp.granularity = c->params.granularity;
    t.x = ft.x = x;
    t.codes = ft.gate_codes = codes;
    t.scales = ft.gate_scales = scales;
    t.given_global = ft.gate_global = &global;
    quern_status status = swiglu ? quern_nvfp4_fused_quantize_workspace(ctx, &fp, &ft, &bytes)
                                 : quern_nvfp4_quantize_workspace(ctx, &p, &t, &bytes);
    if (status != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
    test_workspace w = test_workspace_make(bytes);
    status = swiglu ? quern_nvfp4_fused_quantize(ctx, NULL, &fp, &ft, w.data, w.bytes)
                    : quern_nvfp4_quantize(ctx, NULL, &p, &t, w.data, w.bytes);
    if (status != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
}

static const uint8_t *row_of(const test_tensor *t, int64_t row)
{
    return (const uint8_t *)t->view.data + row * t->view.strides[0];
}

static void three_ways(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    const uint64_t seed = test_seed("fused gemm", 62);
    (void)state;
    for (int trial = 0; trial < test_trials(60); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        fused_gemm c = make(&random, dtypes[trial % 3]);
        const int64_t plain[] = {c.tokens, c.n}, act[] = {c.tokens, c.width},
                      codes[] = {c.tokens, 8 * c.blocks}, scales[] = {c.tokens, c.blocks};
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, 1 + trial % 3);
            test_tensor y = test_tensor_make(&random, QUERN_F32, 2, plain, TEST_STRIDED),
                        h = test_tensor_make(&random, QUERN_F32, 2, act, TEST_STRIDED), made[3][2];
            for (int way = 0; way < 3; way++) {
                made[way][0] = test_tensor_make(&random, QUERN_U8, 2, codes, TEST_STRIDED);
                made[way][1] = test_tensor_make(&random, QUERN_U8, 2, scales, TEST_STRIDED);
            }
            multiply(ctx, &c, QUERN_NVFP4_ACTIVATION_SWIGLU, NULL, &made[0][0].view, &made[0][1].view);
            multiply(ctx, &c, QUERN_NVFP4_ACTIVATION_SWIGLU, &h.view, NULL, NULL);
            quantise(ctx, &c, false, &h.view, &made[1][0].view, &made[1][1].view);
            multiply(ctx, &c, QUERN_NVFP4_ACTIVATION_NONE, &y.view, NULL, NULL);
            quantise(ctx, &c, true, &y.view, &made[2][0].view, &made[2][1].view);
            for (int way = 1; way < 3; way++)
                for (int i = 0; i < 2; i++)
                    for (int64_t r = 0; r < c.tokens; r++)
                        if (memcmp(row_of(&made[0][i], r), row_of(&made[way][i], r),
                                   (size_t)made[0][i].view.shape[1]) != 0)
                            fail_msg("trial %d, %s, way %d: row %lld of %s differs", trial,
                                     quern_cpu_level_name(level), way, (long long)r,
                                     i == 0 ? "codes" : "scales");
            for (int way = 0; way < 3; way++)
                test_tensor_free(&made[way][0]), test_tensor_free(&made[way][1]);
            test_tensor_free(&y), test_tensor_free(&h);
            quern_context_destroy(ctx);
        }
        release(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(three_ways)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
