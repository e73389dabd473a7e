/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * fused_quantise.h - a product's output to NVFP4. A row of x [M, 2 I] interleaves gate and up by runs of
 * `granularity`. Part [0] is the gate or, under `swiglu`, what SwiGLU makes of both; [1] is up. A part may be
 * absent.
 */
#ifndef QUERN_STAGES_FUSED_QUANTISE_H
#define QUERN_STAGES_FUSED_QUANTISE_H

#include "stages/quantise.h"
#include "stages/swiglu.h"

typedef struct fused_quantise_args {
    quantise_profile profile;
    bool swiglu;
    swiglu_rule rule;
    quern_tensor x, codes[2], scales[2], global[2];
} fused_quantise_args;
STAGE_DECLARE(fused_quantise);
#define FUSED_QUANTISE_TENSORS(IN, OUT, GRAD)                                                                \
    IN(x) OUT(codes[0]) OUT(codes[1]) OUT(scales[0]) OUT(scales[1]) OUT(global[0]) OUT(global[1])
#define FUSED_QUANTISE_VALUES(F) F(profile) F(swiglu) SWIGLU_RULE_VALUES(F)

#endif
