/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dsv4_hyper.h - DeepSeek-V4's hyper-connections: instead of one residual stream a model keeps n copies of
 * it, which a sub-layer (attention, experts) reads as one and writes as n.
 *
 * x holds T tokens of n copies of Dm channels; J = n + n + n n weights of a token follow from all of them:
 *
 *   m    = (fn flat(x)) / sqrt(mean(flat(x)^2) + rms_eps)              J numbers; sums in f32
 *   pre  = sigmoid(m[0, n) scale[0] + base[0, n)) + eps
 *   post = 2 sigmoid(m[n, 2n) scale[1] + base[n, 2n))
 *   comb = softmax by rows of (m[2n, J) scale[2] + base[2n, J)) as [n, n], plus eps; then its columns, and
 *          iters - 1 times its rows and its columns, are divided by their sum + eps
 *
 *   h      = RMS norm of sum_i p_i x_i, with norm_weight and rms_eps; p = pre_in, or without it pre
 *   x_new_k = post_k f + sum_i comb[i, k] x_i                           with f, the sub-layer's output
 *
 * A sub-layer takes two calls: the first, without f, gives its input h, and the second, with f, the copies
 * for the next sub-layer. Where a sub-layer's input goes by the weights of the sub-layer before it
 * (DeepSeek-V4.1), pre_in hands those in and `pre` takes its own for the next.
 *
 * With `head`, which ends a model, fn has n rows, base n and scale 1 number, and h alone is made; with pre_in
 * it takes no fn, base and scale.
 *
 * On a GPU a call of up to 511 tokens may read fn before the kernel ahead of it on the stream has ended,
 * where that one lets the next start early (programmatic dependent launch): it must not be what writes fn.
 * None of the library's is.
 *
 * Sources: hyper-connections, arXiv 2409.19606; normalisations in turn, Sinkhorn and Knopp 1967; the
 * DeepSeek-V4 report, arXiv 2606.19348. A GPU takes copies of some 28000 channels, by its shared memory, and
 * says so of more.
 */
#ifndef QUERN_DSV4_HYPER_H
#define QUERN_DSV4_HYPER_H

#include <quern/quern.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct quern_dsv4_hyper_params {
    size_t size;
    int64_t iters; /* 1 to 64; 0: 20 */
    float eps;     /* of the weights; 0: 1e-6 */
    float rms_eps; /* of both mean squares; 0: 1e-6 */
    bool head;
    uint8_t reserved[7]; /* 0; later fields stand here */
} quern_dsv4_hyper_params;
#define QUERN_DSV4_HYPER_PARAMS_INIT                                                                         \
    {                                                                                                        \
        sizeof(quern_dsv4_hyper_params), 20, 1e-6f, 1e-6f, false,                                            \
        {                                                                                                    \
            0                                                                                                \
        }                                                                                                    \
    }

/* act is one of f32, f16, bf16. n is 1 to 8. */
typedef struct quern_dsv4_hyper_tensors {
    size_t size;
    const quern_tensor *x;           /* act [T, n, Dm] */
    const quern_tensor *fn;          /* f32 [J, n Dm]; head: [n, n Dm] */
    const quern_tensor *base;        /* f32 [J]; head: [n] */
    const quern_tensor *scale;       /* f32 [3]; head: [1] */
    const quern_tensor *norm_weight; /* f32 or act [Dm] */
    const quern_tensor *f;           /* act [T, Dm], or NULL; not with head */
    const quern_tensor *pre_in;      /* f32 [T, n], or NULL */
    const quern_tensor *h;     /* act [T, Dm]; written by forward, as those below but for the gradients */
    const quern_tensor *pre;   /* f32 [T, n]; with pre_in alone, where it may be NULL */
    const quern_tensor *post;  /* f32 [T, n]; may be NULL */
    const quern_tensor *comb;  /* f32 [T, n, n]; may be NULL */
    const quern_tensor *x_new; /* act [T, n, Dm]; with f */
    /* Read by backward; NULL: 0, but one of them is needed. */
    const quern_tensor *d_h;    /* act [T, Dm] */
    const quern_tensor *d_pre;  /* f32 [T, n]; with pre_in */
    const quern_tensor *d_post; /* f32 [T, n] */
    const quern_tensor *d_comb; /* f32 [T, n, n] */
    const quern_tensor *d_new;  /* act [T, n, Dm]; with f */
    /* Written by backward; all but d_x may be NULL. */
    const quern_tensor *d_x;  /* act [T, n, Dm] */
    const quern_tensor *d_fn; /* f32, as those below, with the shape of its input */
    const quern_tensor *d_base;
    const quern_tensor *d_scale;
    const quern_tensor *d_norm_weight;
    const quern_tensor *d_f;      /* act [T, Dm] */
    const quern_tensor *d_pre_in; /* f32 [T, n] */
} quern_dsv4_hyper_tensors;
#define QUERN_DSV4_HYPER_TENSORS_INIT QUERN_SIZED(quern_dsv4_hyper_tensors)

QUERN_API quern_status quern_dsv4_hyper_workspace(quern_context *ctx, const quern_dsv4_hyper_params *params,
                                                  const quern_dsv4_hyper_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_dsv4_hyper(quern_context *ctx, const quern_exec *exec,
                                        const quern_dsv4_hyper_params *params,
                                        const quern_dsv4_hyper_tensors *tensors, void *workspace,
                                        size_t workspace_bytes);
/* Makes the weights again from x. */
QUERN_API quern_status quern_dsv4_hyper_backward_workspace(quern_context *ctx,
                                                           const quern_dsv4_hyper_params *params,
                                                           const quern_dsv4_hyper_tensors *tensors,
                                                           size_t *bytes);
QUERN_API quern_status quern_dsv4_hyper_backward(quern_context *ctx, const quern_exec *exec,
                                                 const quern_dsv4_hyper_params *params,
                                                 const quern_dsv4_hyper_tensors *tensors, void *workspace,
                                                 size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
