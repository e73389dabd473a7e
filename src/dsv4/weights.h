/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* weights.h - a compressor's projection weight in the formats that it may have, as stages take it. */
#ifndef QUERN_DSV4_WEIGHTS_H
#define QUERN_DSV4_WEIGHTS_H

#include "core/op.h"

/* The rows, each with its comma, of the tensors of a weight [k, n] in FP8, with a scale for 128 x 128, and in
 * NVFP4. */
#define DSV4_WEIGHT_TENSORS(field, name, k, n)                                                               \
    {field "_fp8", name "fp8", OP_SCALE, OP_NONE, {n, k}, {0}},                                              \
        {field "_fp8_scales", name "fp8_scales", OP_ANY, OP_NONE, {OP_128TH + (n), OP_128TH + (k)}, {0}},    \
        {field "_codes", name "codes", OP_CODES, OP_NONE, {OP_HALF + (k), n}, {0}},                          \
        {field "_scales", name "scales", OP_SCALE, OP_NONE, {OP_SIXTEENTH + (k), n}, {0}},                   \
        {field "_global", name "global", OP_GLOBAL, OP_NONE, {0}, {0}},

/* Where a weight stands among a family's tensors: in floats, as one tensor or as two, and the first of the
 * rows above. */
typedef struct dsv4_weight_row {
    int32_t floats[2], fp8; /* floats[1]: or OP_NONE */
} dsv4_weight_row;

/* Sets the roles of a weight's tensors. */
void dsv4_weight_roles(op_call *call, const dsv4_weight_row *row, bool wanted);
/* Whether it has a tensor in FP8 or NVFP4. Refuses one that stands without its weight. */
bool dsv4_weight_has(const dsv4_weight_row *row, int32_t tensor);
const char *dsv4_weight_refuse(const op_call *call, const dsv4_weight_row *row, int32_t tensor,
                               char text[OP_REASON]);
/* That a call has it in one format; the dtype of FP8's scales; that NVFP4 has whole blocks of Dm. */
quern_status dsv4_weight_check(const op_call *call, const dsv4_weight_row *row, int64_t in);

/* The caller's tensors; absent ones have ndim 0. */
typedef struct dsv4_weight_given {
    quern_tensor w;                   /* [Dm, columns] */
    quern_tensor w_fp8, w_fp8_scales; /* [columns, Dm] */
    quern_tensor w_codes, w_scales, w_global;
} dsv4_weight_given;

dsv4_weight_given dsv4_weight_views(const op_call *call, const dsv4_weight_row *row);
/* The scales' contents: none of an FP8 weight is the byte that is NaN; NVFP4's global, if there is one, is
 * above 0 and finite. */
quern_status dsv4_weight_check_data(const op_call *call, const dsv4_weight_row *row,
                                    const dsv4_weight_given *given, void *const *data);

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
