/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* from_mxfp4.h - MXFP4 (codes [rows, K/2], a power of two for each 32 [rows, K/32]) to NVFP4 with one global
 * [1]. */
#ifndef QUERN_STAGES_FROM_MXFP4_H
#define QUERN_STAGES_FROM_MXFP4_H

#include "stages/stage.h"

typedef struct from_mxfp4_args {
    quern_tensor codes_in, exponents;
    quern_tensor codes, scales, global;
    quern_tensor rounded_blocks; /* i64 [1]: blocks of 32 whose codes changed; may be absent */
} from_mxfp4_args;
STAGE_DECLARE(from_mxfp4);
#define FROM_MXFP4_TENSORS(IN, OUT, GRAD)                                                                    \
    IN(codes_in) IN(exponents) OUT(codes) OUT(scales) OUT(global) OUT(rounded_blocks)
#define FROM_MXFP4_VALUES(F)

#endif
