/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* prepack.h - NVFP4 weights to the layout that a backend's products read fastest, and exactly back. */
#ifndef QUERN_STAGES_PREPACK_H
#define QUERN_STAGES_PREPACK_H

#include "stages/stage.h"

/* How scales of a weight [K, N] stand: [E, K/16, N], [E, N, K/16], or [E, bytes] in the order of tensor cores
 * with N down and K/16 across. */
typedef enum scale_order { SCALES_LINEAR = 0, SCALES_K_MAJOR = 1, SCALES_SWIZZLED = 2 } scale_order;

typedef struct prepack_args {
    bool inverse;
    bool k_major; /* codes are [E, N, K/2], else [E, K/2, N] */
    scale_order order;
    int64_t n, k;
    quern_tensor codes, scales;
    quern_tensor repacked; /* u8 [E, bytes], of the backend's repacked_bytes() */
} prepack_args;
STAGE_DECLARE(prepack);
#define PREPACK_TENSORS(IN, OUT, GRAD) OUT(codes) OUT(scales) OUT(repacked)
#define PREPACK_VALUES(F) F(inverse) F(k_major) F(order) F(n) F(k)

#endif
