/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* weights.h - a compressor's projection weight in the formats that it may have, as stages take it. */
#ifndef QUERN_DSV4_WEIGHTS_H
#define QUERN_DSV4_WEIGHTS_H

#include "core/op.h"

/* The caller's tensors; absent ones have ndim 0. */
typedef struct dsv4_weight_given {
    quern_tensor w;                   /* [Dm, columns] */
    quern_tensor w_fp8, w_fp8_scales; /* [columns, Dm], a scale for 128 x 128 */
    quern_tensor w_codes, w_scales, w_global;
} dsv4_weight_given;

/* In a family's list the five tensors of FP8 and NVFP4 follow each other as above, from w_fp8 on. */

/* The views of a call; `w`: the tensor in floats, or OP_NONE. */
dsv4_weight_given dsv4_weight_views(const op_call *call, int w, int w_fp8);
/* Sets their roles, where a weight is wanted; returns whether one of them is that weight. */
bool dsv4_weight_roles(op_call *call, int w_fp8);
/* Refuses one of them that stands without its weight. */
quern_status dsv4_weight_refuse(const op_call *call, int tensor, int w_fp8);
/* That none of `floats` (ends with OP_NONE) stands beside one of them, nor both formats; the dtype of FP8's
 * scales; that NVFP4 has whole blocks of Dm. */
quern_status dsv4_weight_check(const op_call *call, const int *floats, int w_fp8, int64_t in);
/* The scales' contents: none of an FP8 weight is the byte that is NaN; NVFP4's global, if there is one, is
 * above 0 and finite. */
quern_status dsv4_weight_check_powers(const quern_tensor *scales, const void *data, const char *name);
quern_status dsv4_weight_check_global(const quern_tensor *global, const void *data, const char *name);
/* Both of a call's weight. */
quern_status dsv4_weight_check_data(const op_call *call, const dsv4_weight_given *given, int w_fp8,
                                    void *const *data);
/* Blocks of 128 that an extent has. */
int64_t dsv4_weight_blocks(int64_t extent);

/* The steps that make a weight, of which a call takes some. */
enum {
    DSV4_WEIGHT_BYTES = OP_STEP_BYTES(widen_blocks) + OP_STEP_BYTES(dequantise) + OP_STEP_BYTES(permute) +
                        OP_STEP_BYTES(grouped_gemm)
};

/* What a compressor multiplies x by, or the product. */
typedef struct dsv4_weight {
    quern_tensor w;    /* in floats; absent: */
    quern_tensor proj; /* f32 [rows, columns] */
} dsv4_weight;

/* Adds the steps that make it: none for a weight in floats; else a widened weight, or projections. x: [B, T,
 * Dm] or [T, Dm]. `floats`: the weight itself is wanted. */
dsv4_weight dsv4_weight_add(op_build *b, const quern_tensor *x, const dsv4_weight_given *given, bool floats);

#endif
