/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * widen_blocks.h - the arguments of the stage that turns a matrix of e4m3 with a scale for every 128 x 128
 * block into floats, transposed: out[k, n] = codes[n, k] scales[n / 128, k / 128].
 */
#ifndef QUERN_STAGES_WIDEN_BLOCKS_H
#define QUERN_STAGES_WIDEN_BLOCKS_H

#include "stages/stage.h"

enum { WIDEN_BLOCK = 128 };

typedef struct widen_blocks_args {
    quern_tensor codes;  /* e4m3 or u8 [N, K] */
    quern_tensor scales; /* f32, or powers of two e8m0 or u8, [ceil(N / 128), ceil(K / 128)] */
    quern_tensor out;    /* f32 or bf16 [K, N] */
} widen_blocks_args;
STAGE_DECLARE(widen_blocks);
#define WIDEN_BLOCKS_TENSORS(IN, OUT, GRAD) IN(codes) IN(scales) OUT(out)
#define WIDEN_BLOCKS_VALUES(F)

#endif
