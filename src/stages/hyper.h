/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * hyper.h - the arguments of the stage of hyper-connections, and of its gradients. T tokens of n copies of C
 * channels; J weights a token, in the order pre [n], post [n], comb [n, n]; with `head` pre alone.
 *
 *   m = fn x / sqrt(mean(x^2) + rms_eps)                        over all copies
 *   pre = sigmoid(m s0 + b) + eps, post = 2 sigmoid(m s1 + b)
 *   comb = softmax over its columns of m s2 + b, plus eps; columns, then in turn rows and columns, each over
 *          its sum + eps: 2 iterations - 1 normalisations
 *   h = norm(sum_i p_i x_i), p = pre_in or pre
 *   out_k = post_k f + sum_i comb[i, k] x_i                      with f
 */
#ifndef QUERN_STAGES_HYPER_H
#define QUERN_STAGES_HYPER_H

#include "stages/stage.h"

typedef struct hyper_args {
    bool head;
    int64_t iterations; /* 1 or more */
    float eps, rms_eps;
    quern_tensor x;               /* f32, f16, bf16 [T, n, C] */
    quern_tensor fn, base, scale; /* f32 [J, n C], [J], [3] or [1]; absent with `head` and pre_in */
    quern_tensor weight;          /* of the norm, f32 or as x [C] */
    quern_tensor f;               /* as x [T, C], or absent */
    quern_tensor pre_in;          /* f32 [T, n], or absent */
    quern_tensor h;               /* as x [T, C] */
    quern_tensor pre, post, comb; /* f32 [T, n], [T, n], [T, n, n]; each may be absent */
    quern_tensor out;             /* as x [T, n, C], with f */
    quern_tensor d_h, d_out;      /* as x; each of these may be absent: 0 */
    quern_tensor d_pre;           /* f32, with pre_in */
    quern_tensor d_post, d_comb;  /* f32 */
    quern_tensor d_x, d_f;        /* as x; all but d_x may be absent */
    quern_tensor d_fn, d_base, d_scale, d_weight, d_pre_in; /* f32 */
} hyper_args;
STAGE_DECLARE(hyper);
#define HYPER_TENSORS(IN, OUT, GRAD)                                                                         \
    IN(x)                                                                                                    \
    IN(fn)                                                                                                   \
    IN(base)                                                                                                 \
    IN(scale)                                                                                                \
    IN(weight)                                                                                               \
    IN(f)                                                                                                    \
    IN(pre_in)                                                                                               \
    OUT(h)                                                                                                   \
    OUT(pre)                                                                                                 \
    OUT(post)                                                                                                \
    OUT(comb)                                                                                                \
    OUT(out)                                                                                                 \
    IN(d_h)                                                                                                  \
    IN(d_out)                                                                                                \
    IN(d_pre)                                                                                                \
    IN(d_post)                                                                                               \
    IN(d_comb)                                                                                               \
    GRAD(d_x)                                                                                                \
    GRAD(d_f)                                                                                                \
    GRAD(d_fn) GRAD(d_base) GRAD(d_scale) GRAD(d_weight) GRAD(d_pre_in)
#define HYPER_VALUES(F) F(head) F(iterations) F(eps) F(rms_eps)

#endif
