/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nvfp4_product.h - random grouped products: operands in every form and layout, calls, and the exact result.
 */
#ifndef QUERN_TEST_NVFP4_PRODUCT_H
#define QUERN_TEST_NVFP4_PRODUCT_H

#include "oracle/nvfp4.h"
#include "oracle/nvfp4_gemm.h"
#include "tensor.h"

#include <quern/moe.h>

typedef enum product_a {
    PRODUCT_A_F32,
    PRODUCT_A_F16,
    PRODUCT_A_BF16,
    PRODUCT_A_NVFP4,
    PRODUCT_A_FP8,
    PRODUCT_A_INT8,
#ifdef QUERN_TEST_GPU
    PRODUCT_A_KINDS = PRODUCT_A_INT8 /* the CPU's alone */
#else
    PRODUCT_A_KINDS
#endif
} product_a;

/* How B's codes, and A's scales, are handed in. B's scales are often in another order. */
typedef enum product_layout {
    PRODUCT_LINEAR,
    PRODUCT_K_MAJOR,
    PRODUCT_TRANSPOSED, /* a view of [E, N, K/2] */
    PRODUCT_SWIZZLED,   /* A's scales too */
    PRODUCT_REPACKED,
    PRODUCT_LAYOUTS
} product_layout;

typedef struct product_case {
    product_a kind;
    quern_nvfp4_gemm_params params;
    int64_t tokens, n, k, experts;
    int32_t *ends;
    uint8_t *b_codes, *b_scales; /* [E, K, N] one a byte, [E, K/16, N] */
    uint8_t *a_codes, *a_scales; /* [T, K], [T, K/16]; NVFP4 */
    test_tensor a;               /* floats */
    bool wide;                   /* of any magnitude */
    double
        *a_values; /* [T, K], int8 included: rounded, without the row's scale; FP8: rounded, with its scale */
    double *a_row_scale;         /* int8 */
    double *a_global, *b_global; /* as handed in; NULL: absent */
    int b_parts;                 /* 0: [], 1: [E], 2: [E, 2] */
    double *bias;                /* [E, N] or NULL */
    double *old;                 /* [T, N] or NULL */
    quern_dtype c_dtype;
    bool quantised;
    float c_global[5]; /* of a quantised output: one, or by expert */
    bool c_global_by_expert;
} product_case;

/* `wide`: activations of any magnitude, else normal ones. */
product_case product_make(test_random *random, product_a kind, bool wide);
void product_free(product_case *c);

/* What a call gave: values, or codes one a byte with scales; rows of out_columns. */
typedef struct product_result {
    double *c;
    uint8_t *codes, *scales;
} product_result;
int64_t product_out_columns(const product_case *c);
product_result product_run(const product_case *c, quern_context *ctx, test_random *random,
                           product_layout layout);
void product_result_free(product_result *r);
/* Some of the case's rows, one in `one_in`, those of each expert in any order. Returns how many. */
int64_t product_choose_rows(const product_case *c, test_random *random, int one_in, int64_t *rows);
/* The case with only these rows, in this order: those of an expert stand together, experts rise. */
product_case product_subset(const product_case *c, test_random *random, const int64_t *rows, int64_t count);
/* The expert of a row; past the last: their number. */
int64_t product_expert_of(const product_case *c, int64_t row);
/* Checks a result against float64. */
void product_check(const product_case *c, const product_result *r, const char *what);
/* d_a of a backward, in `dtype`. */
double *product_run_backward(const product_case *c, quern_context *ctx, test_random *random,
                             product_layout layout, const test_tensor *d_c, quern_dtype dtype);
/* Checks it. */
void product_check_backward(const product_case *c, const test_tensor *d_c, const double *d_a,
                            quern_dtype dtype, const char *what);

#endif
