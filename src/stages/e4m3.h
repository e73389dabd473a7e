/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * e4m3.h - the arguments of the stages of products with e4m3 weights.
 *
 * e4m3_gemm: c = a B^T + bias, B [G N, K] = codes scales, by groups: columns g K ... of a, rows g N ... of B,
 * columns g N ... of c. `rows`: c = a B instead, columns g N ... of a and g K ... of c. Each run of up to 128
 * elements along the sum that share a scale is summed on its own, in f32, and takes its scale as it is added;
 * the sum takes `global`, then bias. A row of c depends on its row of a alone. `round`: a is rounded first,
 * as e4m3_round does; a backend may lack the one or the other.
 *
 * e4m3_round: out = s e4m3(x / s), s = amax / 448 of each 128 columns of each of `groups` parts of a row.
 *
 * e4m3_weights: NVFP4 weights [N, K] to e4m3 with one power of two a row.
 */
#ifndef QUERN_STAGES_E4M3_H
#define QUERN_STAGES_E4M3_H

#include "stages/stage.h"

enum { E4M3_GROUP = 128 };

typedef struct e4m3_gemm_args {
    bool rows;
    bool round; /* without `rows` */
    int64_t groups;
    int64_t block_rows, block_columns; /* of codes that share a scale */
    quern_tensor a;                    /* f32, f16, bf16 [T, G K], with `rows` [T, G N] */
    quern_tensor codes;                /* u8 or e4m3 [G N, K] */
    quern_tensor scales;               /* f32, or powers of two u8 or e8m0 [blocks down, blocks across] */
    quern_tensor global;               /* f32 [1], or absent: 1 */
    quern_tensor bias;                 /* f32, f16, bf16 [G N], or absent */
    quern_tensor c;                    /* f32, f16, bf16 [T, G N], with `rows` [T, G K] */
} e4m3_gemm_args;
STAGE_DECLARE(e4m3_gemm);
#define E4M3_GEMM_TENSORS(IN, OUT, GRAD) IN(a) IN(codes) IN(scales) IN(global) IN(bias) OUT(c)
#define E4M3_GEMM_VALUES(F) F(rows) F(round) F(groups) F(block_rows) F(block_columns)

typedef struct e4m3_round_args {
    int64_t groups;
    quern_tensor x;   /* f32, f16, bf16 [T, G K] */
    quern_tensor out; /* f32 [T, G K] */
} e4m3_round_args;
STAGE_DECLARE(e4m3_round);
#define E4M3_ROUND_TENSORS(IN, OUT, GRAD) IN(x) OUT(out)
#define E4M3_ROUND_VALUES(F) F(groups)

typedef struct e4m3_weights_args {
    quern_tensor codes, scales; /* [N, K/2], [N, K/16] */
    quern_tensor out;           /* u8 [N, K] */
    quern_tensor powers;        /* f32 [N, 1] */
} e4m3_weights_args;
STAGE_DECLARE(e4m3_weights);
#define E4M3_WEIGHTS_TENSORS(IN, OUT, GRAD) IN(codes) IN(scales) OUT(out) OUT(powers)
#define E4M3_WEIGHTS_VALUES(F)

#endif
