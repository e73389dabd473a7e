/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * linear.h - what stands between the large operations of a model: projections whose weights are floats, FP8
 * or NVFP4, RMS norm of rows, and rotation by position. Each with its gradient.
 */
#ifndef QUERN_LINEAR_H
#define QUERN_LINEAR_H

#include <quern/quern.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * y = x W^T + bias, in f32 and with one rounding to y's dtype. T rows, K inputs, N outputs, G groups: group g
 * reads columns g K ... (g + 1) K - 1 of x and rows g N ... (g + 1) N - 1 of W, and writes columns g N ... of
 * y. (DeepSeek-V4's wo_a; G is 1 elsewhere.) A row of y depends on its row of x alone, to the bit.
 *
 * The weight is one of
 *   - w in f32, f16 or bf16;
 *   - w of e4m3 bytes with w_scale: one number [] or [1], or one for each `block` x `block` of w, counted
 *     from w's row 0 and column 0 (the last block of a row or column may be short); f32, or powers of two
 *     (e8m0, u8). The weight is w w_scale. NaN bytes of w give NaN;
 *   - w_codes, w_scales and w_global, NVFP4 of profile rne along K (nvfp4.h), K a multiple of 16.
 *
 * a8 = QUERN_LINEAR_A8_FP8 rounds x to FP8 first, by row and by 128 columns of each group's K (the last may
 * be fewer): s = amax / 448, 1 where that is 0, and x becomes s e4m3(x / s). FP8 weights stay as they are;
 * NVFP4 weights are rounded by row of W to 2^e e4m3(code scale 2^-e), 2^e the smallest power of two with
 * 6 s_max <= 448 2^e, s_max the row's largest scale (e = 0 where that is 0). Gradients pass straight through
 * and take W as it is stored. Float weights are refused with a8.
 *
 * On a GPU a call of up to 128 rows may read FP8 weights before the kernel ahead of it on the stream has
 * ended, where that one lets the next start early (programmatic dependent launch): it must not be what writes
 * them. None of the library's is.
 *
 * Faults of data, refused: a scale byte 0xFF, a scale in f32 that is not finite, a scale with which a weight
 * exceeds f32 (BAD_SCALE), an NVFP4 scale byte above 0x7E, a w_global that is not finite and above 0, with
 * a8 an x that is not finite. On a GPU they set a bit of the status word and count as 0, but for a weight
 * that exceeds f32, which is infinite there.
 */
typedef enum quern_linear_a8 { QUERN_LINEAR_A8_NONE = 0, QUERN_LINEAR_A8_FP8 = 1 } quern_linear_a8;

typedef struct quern_linear_params {
    size_t size;
    int64_t block;  /* of w_scale: 128 or 32 */
    int64_t groups; /* G >= 1; divides x's columns and W's rows */
    quern_linear_a8 a8;
    uint8_t reserved[4]; /* 0; later fields stand here */
} quern_linear_params;
#define QUERN_LINEAR_PARAMS_INIT                                                                             \
    {                                                                                                        \
        sizeof(quern_linear_params), 128, 1, QUERN_LINEAR_A8_NONE,                                           \
        {                                                                                                    \
            0                                                                                                \
        }                                                                                                    \
    }

typedef struct quern_linear_tensors {
    size_t size;
    const quern_tensor *x; /* f32, f16, bf16 [T, G K] */
    /* [G N, K]; [ceil(G N / block), ceil(K / block)], [] or [1]; or */
    const quern_tensor *w, *w_scale;
    const quern_tensor *w_codes, *w_scales; /* [G N, K/2], [G N, K/16] */
    const quern_tensor *w_global;           /* f32 [] or [1] */
    const quern_tensor *bias;               /* f32 or x's dtype [G N]; or NULL */
    const quern_tensor *y;                  /* as x, or with a float w f32, [T, G N]; written by forward */
    const quern_tensor *d_y;                /* as x [T, G N]; read by backward */
    const quern_tensor *d_x;                /* as x; written by backward, as those below; each may be NULL */
    const quern_tensor *d_w;                /* f32 [G N, K]; of a float w */
    const quern_tensor *d_bias;             /* f32 [G N] */
} quern_linear_tensors;
#define QUERN_LINEAR_TENSORS_INIT QUERN_SIZED(quern_linear_tensors)

QUERN_API quern_status quern_linear_forward_workspace(quern_context *ctx, const quern_linear_params *params,
                                                      const quern_linear_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_linear_forward(quern_context *ctx, const quern_exec *exec,
                                            const quern_linear_params *params,
                                            const quern_linear_tensors *tensors, void *workspace,
                                            size_t workspace_bytes);
/* d_x = d_y W, d_w = d_y^T x, d_bias = the sum of d_y's rows. */
QUERN_API quern_status quern_linear_backward_workspace(quern_context *ctx, const quern_linear_params *params,
                                                       const quern_linear_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_linear_backward(quern_context *ctx, const quern_exec *exec,
                                             const quern_linear_params *params,
                                             const quern_linear_tensors *tensors, void *workspace,
                                             size_t workspace_bytes);

/*
 * RMS norm (Zhang and Sennrich 2019, arXiv 1910.07467): y = x weight / sqrt(mean(x^2) + eps) by row, in f32
 * with one rounding. A GPU takes rows of up to 8192 channels.
 */
typedef struct quern_rms_norm_params {
    size_t size;
    float eps;           /* finite and above 0; 0: 1e-6 */
    uint8_t reserved[4]; /* 0; later fields stand here */
} quern_rms_norm_params;
#define QUERN_RMS_NORM_PARAMS_INIT                                                                           \
    {                                                                                                        \
        sizeof(quern_rms_norm_params), 1e-6f,                                                                \
        {                                                                                                    \
            0                                                                                                \
        }                                                                                                    \
    }

typedef struct quern_rms_norm_tensors {
    size_t size;
    const quern_tensor *x;        /* f32, f16, bf16 [T, D] */
    const quern_tensor *weight;   /* f32 or x's dtype [D]; NULL: 1 */
    const quern_tensor *y;        /* as x; written by forward */
    const quern_tensor *d_y;      /* as x; read by backward */
    const quern_tensor *d_x;      /* as x; written by backward */
    const quern_tensor *d_weight; /* f32 [D]; written by backward; may be NULL; needs weight */
} quern_rms_norm_tensors;
#define QUERN_RMS_NORM_TENSORS_INIT QUERN_SIZED(quern_rms_norm_tensors)

QUERN_API quern_status quern_rms_norm_forward_workspace(quern_context *ctx,
                                                        const quern_rms_norm_params *params,
                                                        const quern_rms_norm_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_rms_norm_forward(quern_context *ctx, const quern_exec *exec,
                                              const quern_rms_norm_params *params,
                                              const quern_rms_norm_tensors *tensors, void *workspace,
                                              size_t workspace_bytes);
QUERN_API quern_status quern_rms_norm_backward_workspace(quern_context *ctx,
                                                         const quern_rms_norm_params *params,
                                                         const quern_rms_norm_tensors *tensors,
                                                         size_t *bytes);
QUERN_API quern_status quern_rms_norm_backward(quern_context *ctx, const quern_exec *exec,
                                               const quern_rms_norm_params *params,
                                               const quern_rms_norm_tensors *tensors, void *workspace,
                                               size_t workspace_bytes);

/*
 * Rotation by position (Su et al. 2021, arXiv 2104.09864): the pairs (2m, 2m + 1) of a head's last R channels
 * turn by the angles whose R/2 cosines and R/2 sines are a row of cos_sin (dsv4.h makes such tables); the
 * other channels are copied. Token t stands at positions[t], or at start_abs_pos + t. `inverse` turns back.
 * The gradient turns the other way. A position outside the table is an error. A GPU takes heads of up to 8192
 * channels.
 */
typedef struct quern_rope_params {
    size_t size;
    int64_t start_abs_pos; /* >= 0; 0 with positions */
    bool inverse;
    uint8_t reserved[7]; /* 0; later fields stand here */
} quern_rope_params;
#define QUERN_ROPE_PARAMS_INIT QUERN_SIZED(quern_rope_params)

typedef struct quern_rope_tensors {
    size_t size;
    const quern_tensor *x;         /* f32, f16, bf16 [T, H, D] */
    const quern_tensor *cos_sin;   /* f32 or x's dtype [max_pos, R], R even and at most D */
    const quern_tensor *positions; /* i32 [T]; or NULL */
    const quern_tensor *y;         /* as x; written by forward */
    const quern_tensor *d_y;       /* as x; read by backward */
    const quern_tensor *d_x;       /* as x; written by backward */
} quern_rope_tensors;
#define QUERN_ROPE_TENSORS_INIT QUERN_SIZED(quern_rope_tensors)

QUERN_API quern_status quern_rope_forward_workspace(quern_context *ctx, const quern_rope_params *params,
                                                    const quern_rope_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_rope_forward(quern_context *ctx, const quern_exec *exec,
                                          const quern_rope_params *params, const quern_rope_tensors *tensors,
                                          void *workspace, size_t workspace_bytes);
QUERN_API quern_status quern_rope_backward_workspace(quern_context *ctx, const quern_rope_params *params,
                                                     const quern_rope_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_rope_backward(quern_context *ctx, const quern_exec *exec,
                                           const quern_rope_params *params, const quern_rope_tensors *tensors,
                                           void *workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
