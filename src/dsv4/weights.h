/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* weights.h - a compressor's projection weight in the formats that it may have, as stages take it. */
#ifndef QUERN_DSV4_WEIGHTS_H
#define QUERN_DSV4_WEIGHTS_H

#include "backend.h"
#include "core/arena.h"
#include "core/op.h"

/* The caller's tensors; absent ones have ndim 0. */
typedef struct dsv4_weight_given {
    quern_tensor w;                   /* [Dm, columns] */
    quern_tensor w_fp8, w_fp8_scales; /* [columns, Dm], a scale for 128 x 128 */
    quern_tensor w_codes, w_scales, w_global;
} dsv4_weight_given;

/* In a family's list the five tensors of FP8 and NVFP4 follow each other as above, from w_fp8 on. */

/* Sets their roles, where a weight is wanted; returns whether one of them is that weight. */
bool dsv4_weight_roles(op_call *call, int w_fp8);
/* Refuses one of them that stands without its weight. */
quern_status dsv4_weight_refuse(const op_call *call, int tensor, int w_fp8);
/* That none of `floats` (ends with OP_NONE) stands beside one of them, nor both formats; the dtype of FP8's
 * scales; that NVFP4 has whole blocks of Dm. */
quern_status dsv4_weight_check(const op_call *call, const int *floats, int w_fp8, int64_t in);
/* That NVFP4's global scale, if there is one, is above 0 and finite. */
quern_status dsv4_weight_check_global(const quern_tensor *global, const void *data, const char *name);
/* That no scale of an FP8 weight is the byte that is NaN. */
quern_status dsv4_weight_check_powers(const quern_tensor *scales, const void *data, const char *name);
/* Blocks of 128 that an extent has. */
int64_t dsv4_weight_blocks(int64_t extent);

/* What a call runs before it pools: nothing for a weight in floats; else a widened weight, or projections. */
typedef struct dsv4_weight {
    quern_tensor w;      /* in floats; absent: */
    quern_tensor proj;   /* f32 [rows, columns] */
    quern_tensor global; /* of NVFP4 */
    widen_blocks_args widen;
    dequantise_args dequantise;
    permute_args rows; /* x without gaps between its rows */
    grouped_gemm_args product;
} dsv4_weight;

/* F(stage, field): the steps, of which those with an output run. */
#define DSV4_WEIGHT_STEPS(F)                                                                                 \
    F(widen_blocks, widen, out)                                                                              \
    F(dequantise, dequantise, out) F(permute, rows, out) F(grouped_gemm, product, c)

/* Fills the steps with memory from `a`. x: [B, T, Dm] or [T, Dm]. `floats`: the weight itself is wanted. */
dsv4_weight dsv4_weight_of(const quern_tensor *x, const dsv4_weight_given *given, bool floats, arena *a);
/* The name of the first stage that the backend lacks or refuses, or NULL; *bytes becomes at least what the
 * steps need. */
const char *dsv4_weight_missing(const quern_backend *backend, const stage_exec *exec,
                                const dsv4_weight *weight, size_t *bytes);

#endif
