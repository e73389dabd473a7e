/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nvfp4_offsets_test.c - element offsets above 2^31: NVFP4's operations, the router and the layer give the
 * same bits on compact tensors and on tensors whose rows stand 2^31 elements apart, over mappings that
 * reserve no memory. */
#include "cmocka_c11.h"
#include "moe/call.h"
#include "nvfp4/gemm.h"
#include "op_case.h"

#include <quern/moe.h>

#include <string.h>
#include <sys/mman.h>

enum { TENSORS_MOST = 10, BYTES_MOST = 8192 };

/* What a tensor holds before the call: RESULT: nothing. */
typedef enum content { RESULT, FLOATS, CODES, SCALES, EXPONENTS, ENDS, ONES } content;

typedef struct operand {
    int index; /* in the family's struct */
    content content;
    quern_dtype dtype;
    int32_t ndim;
    int64_t shape[3];
} operand;

/* A call, by its description; `operands` ends with an ndim of -1. */
typedef struct call_case {
    const char *op;
    quern_op_pass pass;
    const void *params;
    operand operands[TENSORS_MOST + 1];
} call_case;

#define END                                                                                                  \
    {                                                                                                        \
        .ndim = -1                                                                                           \
    }

/* The same elements twice. */
typedef struct pair {
    quern_tensor compact, wide;
    void *map;
    size_t size;
    unsigned char bytes[BYTES_MOST];
} pair;

static int64_t rows_of(const quern_tensor *t)
{
    int64_t rows = 1;
    for (int32_t i = 0; i + 1 < t->ndim; i++) rows *= t->shape[i];
    return rows;
}

static size_t row_bytes(const quern_tensor *t)
{
    return (t->ndim > 0 ? (size_t)t->shape[t->ndim - 1] : 1) * quern_dtype_size(t->dtype);
}

static unsigned char *row_at(const quern_tensor *t, int64_t row)
{
    int64_t at = 0;
    for (int32_t i = t->ndim - 2; i >= 0; row /= t->shape[i], i--) at += row % t->shape[i] * t->strides[i];
    return (unsigned char *)t->data + at * (int64_t)quern_dtype_size(t->dtype);
}

static void fill(pair *p, content of, test_random *random)
{
    const int64_t count =
        rows_of(&p->compact) * (int64_t)row_bytes(&p->compact) / (int64_t)quern_dtype_size(p->compact.dtype);
    int32_t end = 0;
    for (int64_t i = 0; i < count; i++) {
        const float number = of == ONES ? 1.0f : (float)test_random_normal(random);
        if (of == CODES) p->bytes[i] = (uint8_t)test_random_int(random, 0, 255);
        if (of == SCALES) p->bytes[i] = (uint8_t)test_random_int(random, 0x20, 0x40);
        if (of == EXPONENTS) p->bytes[i] = (uint8_t)test_random_int(random, 120, 127);
        if (of == FLOATS || of == ONES) memcpy(p->bytes + 4 * i, &number, 4);
        end += 2;
        if (of == ENDS) memcpy(p->bytes + 4 * i, &end, 4);
    }
}

/* False if this machine refuses such mappings. */
static bool make_pair(pair *p, const operand *o, test_random *random)
{
    const int64_t apart = ((int64_t)1 << 31) + 8;
    memset(p, 0, sizeof *p);
    p->compact = p->wide = quern_tensor_contiguous(p->bytes, o->dtype, o->ndim, o->shape);
    for (int32_t i = o->ndim - 2; i >= 0; i--)
        p->wide.strides[i] = i == o->ndim - 2 ? apart : p->wide.strides[i + 1] * o->shape[i + 1];
    fill(p, o->content, random);
    p->size = o->ndim < 2 ? BYTES_MOST : (size_t)(rows_of(&p->wide) * apart) * quern_dtype_size(o->dtype);
    p->map = mmap(NULL, p->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p->map == MAP_FAILED) return false;
    p->wide.data = p->map;
    for (int64_t r = 0; r < rows_of(&p->compact); r++)
        memcpy(row_at(&p->wide, r), row_at(&p->compact, r), row_bytes(&p->compact));
    return true;
}

static void compare(const call_case *c, const pair *pairs, int count)
{
    for (int i = 0; i < count; i++)
        for (int64_t r = 0; r < rows_of(&pairs[i].compact); r++)
            if (memcmp(row_at(&pairs[i].wide, r), row_at(&pairs[i].compact, r),
                       row_bytes(&pairs[i].compact)) != 0)
                fail_msg("%s: row %lld of %s differs", c->op, (long long)r,
                         op_case_field(c->op, c->operands[i].index));
}

static void check(const call_case *c)
{
    static pair pairs[TENSORS_MOST];
    quern_op_info info;
    test_random random = {test_seed("nvfp4 offsets", 81)};
    struct {
        size_t size;
        const quern_tensor *t[QUERN_OP_TENSORS_MAX];
    } compact = {0, {NULL}}, wide = {0, {NULL}};
    int count = 0;
    bool mapped = true;
    assert_int_equal(quern_op_get(quern_op_named(c->op), &info), QUERN_OK);
    compact.size = wide.size = info.tensors_size;
    for (; mapped && c->operands[count].ndim >= 0; count++) {
        mapped = make_pair(&pairs[count], &c->operands[count], &random);
        compact.t[c->operands[count].index] = &pairs[count].compact;
        wide.t[c->operands[count].index] = &pairs[count].wide;
    }
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; mapped && test_next_level(&level);) {
        quern_context *ctx = test_context(level, 2);
        op_case_call(ctx, c->op, c->pass, c->params, &compact);
        op_case_call(ctx, c->op, c->pass, c->params, &wide);
        compare(c, pairs, count);
        quern_context_destroy(ctx);
    }
    for (int i = 0; i < count; i++)
        if (pairs[i].map != MAP_FAILED) munmap(pairs[i].map, pairs[i].size);
    if (mapped) return;
    print_message("this machine refuses mappings without reserve\n");
    skip();
}

#define U8 QUERN_U8
#define F32 QUERN_F32

static void quantisers(void **state)
{
    quern_nvfp4_quantize_params rows = QUERN_NVFP4_QUANTIZE_PARAMS_INIT, weight = rows;
    quern_nvfp4_dequantize_params back = QUERN_NVFP4_DEQUANTIZE_PARAMS_INIT, weight_back = back;
    const quern_nvfp4_from_mxfp4_params from = QUERN_NVFP4_FROM_MXFP4_PARAMS_INIT;
    const quern_nvfp4_fused_quantize_params fused = QUERN_NVFP4_FUSED_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_fused_quantize_params swiglu = fused;
    (void)state;
    weight.weight = weight_back.weight = swiglu.swiglu = true;
    check(&(call_case){"nvfp4-quantize",
                       QUERN_OP_FORWARD,
                       &rows,
                       {{0, FLOATS, F32, 2, {3, 40}},
                        {3, RESULT, U8, 2, {3, 24}},
                        {4, RESULT, U8, 2, {3, 3}},
                        {5, RESULT, F32, 0, {0}},
                        END}});
    check(&(call_case){"nvfp4-quantize",
                       QUERN_OP_FORWARD,
                       &weight,
                       {{0, FLOATS, F32, 3, {2, 32, 20}},
                        {3, RESULT, U8, 3, {2, 16, 20}},
                        {4, RESULT, U8, 3, {2, 2, 20}},
                        {5, RESULT, F32, 0, {0}},
                        END}});
    check(&(call_case){"nvfp4-dequantize",
                       QUERN_OP_FORWARD,
                       &back,
                       {{0, CODES, U8, 2, {3, 24}},
                        {1, SCALES, U8, 2, {3, 3}},
                        {2, ONES, F32, 0, {0}},
                        {4, RESULT, F32, 2, {3, 40}},
                        END}});
    check(&(call_case){"nvfp4-dequantize",
                       QUERN_OP_FORWARD,
                       &weight_back,
                       {{0, CODES, U8, 3, {2, 16, 20}},
                        {1, SCALES, U8, 3, {2, 2, 20}},
                        {2, ONES, F32, 0, {0}},
                        {4, RESULT, F32, 3, {2, 32, 20}},
                        END}});
    check(&(call_case){"nvfp4-from-mxfp4",
                       QUERN_OP_FORWARD,
                       &from,
                       {{0, CODES, U8, 2, {3, 32}},
                        {1, EXPONENTS, U8, 2, {3, 2}},
                        {2, RESULT, U8, 2, {3, 32}},
                        {3, RESULT, U8, 2, {3, 4}},
                        {4, RESULT, F32, 0, {0}},
                        END}});
    for (int part = 0; part < 2; part++)
        check(&(call_case){"nvfp4-fused-quantize",
                           QUERN_OP_FORWARD,
                           part == 0 ? &fused : &swiglu,
                           {{0, FLOATS, F32, 2, {3, 48}},
                            {1, ONES, F32, 0, {0}},
                            {3, RESULT, U8, 2, {3, 16}},
                            {4, RESULT, U8, 2, {3, 2}},
                            END}});
}

static void layouts(void **state)
{
    quern_nvfp4_swizzle_params rows = QUERN_NVFP4_SWIZZLE_PARAMS_INIT, weight = rows;
    const quern_nvfp4_interleave_params interleave = QUERN_NVFP4_INTERLEAVE_PARAMS_INIT;
    quern_moe_prepack_params prepack = QUERN_MOE_PREPACK_PARAMS_INIT, unpack = prepack;
    (void)state;
    weight.weight = unpack.inverse = true;
    check(&(call_case){"nvfp4-swizzle",
                       QUERN_OP_FORWARD,
                       &rows,
                       {{0, SCALES, U8, 2, {5, 6}}, {1, RESULT, U8, 1, {1024}}, END}});
    check(&(call_case){"nvfp4-swizzle",
                       QUERN_OP_FORWARD,
                       &weight,
                       {{0, SCALES, U8, 3, {2, 6, 5}}, {1, RESULT, U8, 2, {2, 1024}}, END}});
    check(&(call_case){"nvfp4-interleave",
                       QUERN_OP_FORWARD,
                       &interleave,
                       {{0, FLOATS, F32, 3, {2, 3, 20}}, {1, RESULT, F32, 3, {2, 3, 32}}, END}});
    check(&(call_case){"moe-prepack",
                       QUERN_OP_FORWARD,
                       &prepack,
                       {{0, CODES, U8, 3, {2, 16, 20}},
                        {1, SCALES, U8, 3, {2, 2, 20}},
                        {2, RESULT, U8, 2, {2, 2304}},
                        END}});
    check(&(call_case){"moe-prepack",
                       QUERN_OP_FORWARD,
                       &unpack,
                       {{0, RESULT, U8, 3, {2, 16, 20}},
                        {1, RESULT, U8, 3, {2, 2, 20}},
                        {2, SCALES, U8, 2, {2, 2304}},
                        END}});
}

static void products(void **state)
{
    const quern_nvfp4_gemm_params plain = QUERN_NVFP4_GEMM_PARAMS_INIT;
    (void)state;
    check(&(call_case){"nvfp4-gemm",
                       QUERN_OP_FORWARD,
                       &plain,
                       {{G(a), FLOATS, F32, 2, {5, 32}},
                        {G(b_codes), CODES, U8, 3, {2, 16, 20}},
                        {G(b_scales), SCALES, U8, 3, {2, 2, 20}},
                        {G(b_global), ONES, F32, 1, {2}},
                        {G(offsets), ENDS, QUERN_I32, 1, {2}},
                        {G(bias), FLOATS, F32, 2, {2, 20}},
                        {G(c_old), FLOATS, F32, 2, {5, 20}},
                        {G(c), RESULT, F32, 2, {5, 20}},
                        END}});
    check(&(call_case){"nvfp4-gemm",
                       QUERN_OP_FORWARD,
                       &plain,
                       {{G(a_codes), CODES, U8, 2, {5, 16}},
                        {G(a_scales), SCALES, U8, 2, {5, 2}},
                        {G(b_codes), CODES, U8, 3, {2, 16, 20}},
                        {G(b_scales), SCALES, U8, 3, {2, 2, 20}},
                        {G(offsets), ENDS, QUERN_I32, 1, {2}},
                        {G(c_global), ONES, F32, 0, {0}},
                        {G(c_codes), RESULT, U8, 2, {5, 16}},
                        {G(c_scales), RESULT, U8, 2, {5, 2}},
                        END}});
    check(&(call_case){"nvfp4-gemm",
                       QUERN_OP_BACKWARD,
                       &plain,
                       {{G(a), FLOATS, F32, 2, {5, 32}},
                        {G(b_codes), CODES, U8, 3, {2, 16, 20}},
                        {G(b_scales), SCALES, U8, 3, {2, 2, 20}},
                        {G(offsets), ENDS, QUERN_I32, 1, {2}},
                        {G(d_c), FLOATS, F32, 2, {5, 20}},
                        {G(d_a), RESULT, F32, 2, {5, 32}},
                        END}});
}

static void layers(void **state)
{
    const quern_moe_route_params route = QUERN_MOE_ROUTE_PARAMS_INIT;
    const quern_moe_params plain = QUERN_MOE_PARAMS_INIT;
    quern_moe_params a4 = plain;
    (void)state;
    a4.a4 = true;
    check(&(call_case){"moe-route",
                       QUERN_OP_FORWARD,
                       &route,
                       {{1, FLOATS, F32, 2, {5, 32}},
                        {2, FLOATS, F32, 2, {3, 32}},
                        {6, RESULT, QUERN_I32, 2, {5, 1}},
                        {7, RESULT, F32, 2, {5, 1}},
                        {8, RESULT, QUERN_I32, 1, {3}},
                        {9, RESULT, QUERN_I32, 1, {5}},
                        END}});
    for (int pass = 0; pass < 3; pass++)
        check(&(call_case){"moe",
                           pass == 2 ? QUERN_OP_BACKWARD : QUERN_OP_FORWARD,
                           pass == 1 ? &a4 : &plain,
                           {{M(hidden), FLOATS, F32, 2, {5, 32}},
                            {M(weight), FLOATS, F32, 2, {3, 32}},
                            {M(gate_up_codes), CODES, U8, 3, {3, 16, 64}},
                            {M(gate_up_scales), SCALES, U8, 3, {3, 2, 64}},
                            {M(down_codes), CODES, U8, 3, {3, 16, 32}},
                            {M(down_scales), SCALES, U8, 3, {3, 2, 32}},
                            {M(down_bias), FLOATS, F32, 2, {3, 32}},
                            {pass == 2 ? M(d_hidden) : M(out), RESULT, F32, 2, {5, 32}},
                            {pass == 2 ? M(d_out) : M(experts),
                             pass == 2 ? FLOATS : RESULT,
                             pass == 2 ? F32 : QUERN_I32,
                             2,
                             {5, pass == 2 ? 32 : 1}},
                            END}});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantisers),
        cmocka_unit_test(layouts),
        cmocka_unit_test(products),
        cmocka_unit_test(layers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
