/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * norm_rope.h - the arguments of the stages between a projection and the core: RMS norm of rows, rotation of
 * their last channels by the token's position, and the gradients of both.
 */
#ifndef QUERN_STAGES_NORM_ROPE_H
#define QUERN_STAGES_NORM_ROPE_H

#include "stages/stage.h"

typedef struct norm_rope_args {
    bool norm;    /* divide by the root of mean square + eps */
    bool inverse; /* rotate back */
    float eps;
    quern_tensor positions; /* i32 [T], where B is 1: of its tokens. Absent: sequences begin at 0 */
    quern_tensor x;       /* [B, T, H, C] */
    quern_tensor weight;  /* [C], or absent: 1; with norm */
    quern_tensor cos_sin; /* [P, R], or absent: no rotation */
    quern_tensor out;     /* [B, T, H, C] */
    /* Backward: from d_out to d_x, [B, T, H, C], and f32 d_weight [C]; d_weight may be absent. */
    quern_tensor d_out, d_x, d_weight;
} norm_rope_args;
STAGE_DECLARE(norm_rope);
#define NORM_ROPE_TENSORS(IN, OUT, GRAD)                                                                     \
    IN(positions) IN(x) IN(weight) IN(cos_sin) OUT(out) IN(d_out) GRAD(d_x) GRAD(d_weight)
#define NORM_ROPE_VALUES(F) F(norm) F(inverse) F(eps)

#endif
