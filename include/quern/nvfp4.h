/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nvfp4.h - NVFP4, a 4-bit float format: E2M1 codes in blocks of 16, an E4M3 scale per block, an f32 scale
 * per tensor.
 *
 * A code is 0, 0.5, 1, 1.5, 2, 3, 4 or 6, bit 3 its sign; two stand in a byte, the low nibble first. A scale
 * is one byte of E4M3, 0x00 to 0x7E. With the tensor's (or expert's, or row's) global scale G
 *     value = fl(fl(code * scale) * G)
 * in f32, rounded once more to the output's type.
 */
#ifndef QUERN_NVFP4_H
#define QUERN_NVFP4_H

#include <quern/quern.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Values of a block. */
enum { QUERN_NVFP4_BLOCK = 16 };

/*
 * How values become codes. Each step is one f32 rounding; E4M3 and E2M1 round to the nearest, ties to even,
 * and saturate. amax is the largest magnitude of what shares a global, a that of a block.
 */
typedef enum quern_nvfp4_profile {
    /* G = max(amax, 1e-8) / 2688; scale = a / (6 G), 0 (and codes 0) where that is below 2^-9. */
    QUERN_NVFP4_PROFILE_RNE = 0,
    /* The same, codes rounded twice, to halves and then down at a tie: what older checkpoints hold. */
    QUERN_NVFP4_PROFILE_HALFSTEP = 1,
    /* ModelOpt: G = amax / 2688; scale at least 2^-9, 1 for a block of zeros. */
    QUERN_NVFP4_PROFILE_MODELOPT = 2,
    /* compressed-tensors: the global is the reciprocal R = 2688 / amax, value = code * fl(scale / R). A
     * product takes G = 1 / R. */
    QUERN_NVFP4_PROFILE_COMPRESSED_TENSORS = 3
} quern_nvfp4_profile;

/* Which scale a block gets. The other two minimise the squared error among candidates, under the
 * normalisation, underflow and code rules of RNE and the profile's own global; HALFSTEP takes RNE only. */
typedef enum quern_nvfp4_scales {
    QUERN_NVFP4_SCALES_RNE = 0,           /* the profile's own rule */
    QUERN_NVFP4_SCALES_FOUR_OVER_SIX = 1, /* the block's largest value becomes 6 or 4 */
    QUERN_NVFP4_SCALES_SEARCH = 2         /* three scales below RNE's to eight above */
} quern_nvfp4_scales;

/* What shares a global scale. One number is [] or [1] everywhere. The shape of a global that is read says
 * what shares it where one of these alone fits; where more do, the parameter says it. */
typedef enum quern_nvfp4_global {
    QUERN_NVFP4_GLOBAL_TENSOR = 0, /* all: [] */
    QUERN_NVFP4_GLOBAL_EXPERT = 1, /* the rows, or the matrix, of an expert: [E] */
    QUERN_NVFP4_GLOBAL_ROW = 2     /* a row of an activation: its leading shape, or that and 1 */
} quern_nvfp4_global;

/*
 * Common to all operations
 *  - Scales and codes are u8; scales may also be e4m3, codes e2m1x2. Blocks lie along the last dimension D
 *    of an activation, whose last block is padded with zeros: codes [.., 8 ceil(D / 16)], scales [..,
 *    ceil(D / 16)]. A weight [K, N] or [E, K, N] has them along K, a multiple of 16: codes [(E,) K/2, N],
 *    scales [(E,) K/16, N].
 *  - Globals are f32, finite and above 0. offsets are i32 [E], where each expert's rows of an activation [T,
 *    D] end: never falling, at most T. Rows past the last are written as 0, and not read. Experts of as many
 *    rows each may be a stack [E, n, D], without offsets.
 *  - On the CPU a value that is not finite, a scale byte of 0x7F or more, a bad global or a bad offset is
 *    QUERN_ERR_INVALID_ARGUMENT, and the sentence names the first; outputs are then untouched. Pointers may
 *    not overlap.
 */

typedef struct quern_nvfp4_quantize_params {
    size_t size;
    quern_nvfp4_profile profile;
    quern_nvfp4_scales scales;
    quern_nvfp4_global global_per;
    bool weight;         /* x is [K, N] or [E, K, N], blocks along K */
    uint8_t reserved[3]; /* 0; later fields stand here */
} quern_nvfp4_quantize_params;
#define QUERN_NVFP4_QUANTIZE_PARAMS_INIT QUERN_SIZED(quern_nvfp4_quantize_params)

typedef struct quern_nvfp4_quantize_tensors {
    size_t size;
    const quern_tensor *x;              /* f32, f16, bf16 [.., D], or a weight */
    const quern_tensor *offsets;        /* where each expert of an activation [T, D] has a global */
    const quern_tensor *given_global;   /* as global; NULL: computed from x. An expert without rows gets 1 */
    const quern_tensor *codes, *scales; /* written */
    const quern_tensor *global; /* written: [], [E], or x's leading shape; may be NULL with given_global */
} quern_nvfp4_quantize_tensors;
#define QUERN_NVFP4_QUANTIZE_TENSORS_INIT QUERN_SIZED(quern_nvfp4_quantize_tensors)

QUERN_API quern_status quern_nvfp4_quantize_workspace(quern_context *ctx,
                                                      const quern_nvfp4_quantize_params *params,
                                                      const quern_nvfp4_quantize_tensors *tensors,
                                                      size_t *bytes);
QUERN_API quern_status quern_nvfp4_quantize(quern_context *ctx, const quern_exec *exec,
                                            const quern_nvfp4_quantize_params *params,
                                            const quern_nvfp4_quantize_tensors *tensors, void *workspace,
                                            size_t workspace_bytes);

/* Codes back to values, rounded to the nearest of x's dtype. The profile says whether the global is G or
 * R. */
typedef struct quern_nvfp4_dequantize_params {
    size_t size;
    quern_nvfp4_profile profile;
    quern_nvfp4_global global_per;
    bool weight;
    uint8_t reserved[7]; /* 0; later fields stand here */
} quern_nvfp4_dequantize_params;
#define QUERN_NVFP4_DEQUANTIZE_PARAMS_INIT QUERN_SIZED(quern_nvfp4_dequantize_params)

typedef struct quern_nvfp4_dequantize_tensors {
    size_t size;
    const quern_tensor *codes, *scales, *global;
    const quern_tensor *offsets; /* where each expert of an activation [T, D] has a global */
    const quern_tensor *x;       /* written; its last extent says where a row ends */
} quern_nvfp4_dequantize_tensors;
#define QUERN_NVFP4_DEQUANTIZE_TENSORS_INIT QUERN_SIZED(quern_nvfp4_dequantize_tensors)

QUERN_API quern_status quern_nvfp4_dequantize_workspace(quern_context *ctx,
                                                        const quern_nvfp4_dequantize_params *params,
                                                        const quern_nvfp4_dequantize_tensors *tensors,
                                                        size_t *bytes);
QUERN_API quern_status quern_nvfp4_dequantize(quern_context *ctx, const quern_exec *exec,
                                              const quern_nvfp4_dequantize_params *params,
                                              const quern_nvfp4_dequantize_tensors *tensors, void *workspace,
                                              size_t workspace_bytes);

/*
 * A product's output x [M, 2 I] to NVFP4 in one pass. x interleaves gate and up by runs of `granularity`
 * columns, which divides I. Either gate, up or both are quantised unchanged or, under `swiglu`, the f32
 * result of SwiGLU is:
 *     min(g, limit) sigmoid(alpha min(g, limit)) (clamp(u, -limit, limit) + beta)
 * Without up_codes the up columns are not read, and without gate_codes and swiglu the gate columns are not.
 * Scales follow the profile's own rule. Codes may differ from those of exact arithmetic where a value lies
 * within 1e-5 of a midpoint.
 */
typedef struct quern_nvfp4_fused_quantize_params {
    size_t size;
    quern_nvfp4_profile profile;
    bool swiglu;
    float limit;       /* 0: no clamp */
    float alpha, beta; /* 1 and 0 */
    int64_t granularity;
} quern_nvfp4_fused_quantize_params;
#define QUERN_NVFP4_FUSED_QUANTIZE_PARAMS_INIT                                                               \
    {                                                                                                        \
        sizeof(quern_nvfp4_fused_quantize_params), QUERN_NVFP4_PROFILE_RNE, false, 0.0f, 1.0f, 0.0f, 8       \
    }

typedef struct quern_nvfp4_fused_quantize_tensors {
    size_t size;
    const quern_tensor *x; /* f32, f16, bf16 [M, 2 I] */
    /* [] for each part that is written; swiglu takes gate_global */
    const quern_tensor *gate_global, *up_global;
    /* [M, 8 ceil(I/16)], [M, ceil(I/16)]; under swiglu the result's */
    const quern_tensor *gate_codes, *gate_scales;
    const quern_tensor *up_codes, *up_scales; /* not under swiglu */
} quern_nvfp4_fused_quantize_tensors;
#define QUERN_NVFP4_FUSED_QUANTIZE_TENSORS_INIT QUERN_SIZED(quern_nvfp4_fused_quantize_tensors)

QUERN_API quern_status quern_nvfp4_fused_quantize_workspace(quern_context *ctx,
                                                            const quern_nvfp4_fused_quantize_params *params,
                                                            const quern_nvfp4_fused_quantize_tensors *tensors,
                                                            size_t *bytes);
QUERN_API quern_status quern_nvfp4_fused_quantize(quern_context *ctx, const quern_exec *exec,
                                                  const quern_nvfp4_fused_quantize_params *params,
                                                  const quern_nvfp4_fused_quantize_tensors *tensors,
                                                  void *workspace, size_t workspace_bytes);

/*
 * MXFP4 (OCP Microscaling: E2M1 codes, a power of two for each 32) to NVFP4. Codes stay as they are, and the
 * values too, where the exponents of blocks that are not zero span at most 17 binades; blocks below that are
 * rounded and counted. An exponent byte 0xFF is an error, and so is a value beyond f32: 0xFD with a code of
 * magnitude 4 or 6, 0xFE with one of 2, 3, 4 or 6.
 */
typedef struct quern_nvfp4_from_mxfp4_params {
    size_t size;
} quern_nvfp4_from_mxfp4_params;
#define QUERN_NVFP4_FROM_MXFP4_PARAMS_INIT QUERN_SIZED(quern_nvfp4_from_mxfp4_params)

typedef struct quern_nvfp4_from_mxfp4_tensors {
    size_t size;
    const quern_tensor *mx_codes;       /* u8 [.., K/2] */
    const quern_tensor *exponents;      /* u8 or e8m0 [.., K/32] */
    const quern_tensor *codes, *scales; /* written: [.., K/2], [.., K/16] */
    const quern_tensor *global;         /* written: [] */
    const quern_tensor *rounded_blocks; /* written: i64 [], blocks of 32; may be NULL */
} quern_nvfp4_from_mxfp4_tensors;
#define QUERN_NVFP4_FROM_MXFP4_TENSORS_INIT QUERN_SIZED(quern_nvfp4_from_mxfp4_tensors)

QUERN_API quern_status quern_nvfp4_from_mxfp4_workspace(quern_context *ctx,
                                                        const quern_nvfp4_from_mxfp4_params *params,
                                                        const quern_nvfp4_from_mxfp4_tensors *tensors,
                                                        size_t *bytes);
QUERN_API quern_status quern_nvfp4_from_mxfp4(quern_context *ctx, const quern_exec *exec,
                                              const quern_nvfp4_from_mxfp4_params *params,
                                              const quern_nvfp4_from_mxfp4_tensors *tensors, void *workspace,
                                              size_t workspace_bytes);

/*
 * Scales between rows and the order of tensor cores. With C = ceil(columns / 4), scale (r, c) stands at byte
 *     ((r / 128) C + c / 4) 512 + (r % 32) 16 + ((r % 128) / 32) 4 + c % 4
 * of ceil(rows / 128) 128 rows of 4 C bytes; the padding is 0.
 *   - linear [rows, columns], swizzled [bytes].
 *   - experts: the linear rows are the experts' one after the other, tokens_per_expert i32 [E] of each (they
 *     sum to at most `rows`). Each expert's rows begin at a multiple of 128 rows: at most rows + 127 E. An
 *     expert without rows takes none. pad_row_offsets i32 [E + 1] says where they begin. swizzled may have
 *     more bytes than the experts' tiles. Bytes past the last tile are 0; so are linear rows past
 *     the last token.
 *   - weight: linear [E, columns, rows] (scales of codes [E, K/2, N]), swizzled [E, bytes].
 */
typedef struct quern_nvfp4_swizzle_params {
    size_t size;
    bool inverse; /* from swizzled to linear */
    bool weight;
    bool experts;        /* tokens_per_expert is read; not with weight */
    uint8_t reserved[5]; /* 0; later fields stand here */
} quern_nvfp4_swizzle_params;
#define QUERN_NVFP4_SWIZZLE_PARAMS_INIT QUERN_SIZED(quern_nvfp4_swizzle_params)

typedef struct quern_nvfp4_swizzle_tensors {
    size_t size;
    const quern_tensor *linear, *swizzled; /* one is read, the other written */
    const quern_tensor *tokens_per_expert; /* with experts */
    const quern_tensor *pad_row_offsets;   /* written, with experts and without inverse; or NULL */
} quern_nvfp4_swizzle_tensors;
#define QUERN_NVFP4_SWIZZLE_TENSORS_INIT QUERN_SIZED(quern_nvfp4_swizzle_tensors)

QUERN_API quern_status quern_nvfp4_swizzle_workspace(quern_context *ctx,
                                                     const quern_nvfp4_swizzle_params *params,
                                                     const quern_nvfp4_swizzle_tensors *tensors,
                                                     size_t *bytes);
QUERN_API quern_status quern_nvfp4_swizzle(quern_context *ctx, const quern_exec *exec,
                                           const quern_nvfp4_swizzle_params *params,
                                           const quern_nvfp4_swizzle_tensors *tensors, void *workspace,
                                           size_t workspace_bytes);

/*
 * Gate and up of a weight's last dimension, [.., 2 I] in two halves, to runs of q = granularity columns that
 * alternate: gate column i stands at (i / q) 2 q + i % q, up column i at that + q. Where q does not divide I
 * both are padded with zeros first: the other tensor is [.., 2 q ceil(I / q)]. One call takes a weight's
 * codes, scales and bias together, so that none is forgotten.
 */
typedef struct quern_nvfp4_interleave_params {
    size_t size;
    bool inverse; /* x holds runs, out halves */
    int64_t granularity;
} quern_nvfp4_interleave_params;
#define QUERN_NVFP4_INTERLEAVE_PARAMS_INIT                                                                   \
    {                                                                                                        \
        sizeof(quern_nvfp4_interleave_params), false, 8                                                      \
    }

typedef struct quern_nvfp4_interleave_tensors {
    size_t size;
    /* At least one of x, codes, scales and bias; each with the tensor of its dtype and leading shape that is
     * written. Any of f32, f16, bf16, u8, e2m1x2, e4m3 and e8m0. */
    const quern_tensor *x, *out;
    const quern_tensor *codes, *codes_out;
    const quern_tensor *scales, *scales_out;
    const quern_tensor *bias, *bias_out;
} quern_nvfp4_interleave_tensors;
#define QUERN_NVFP4_INTERLEAVE_TENSORS_INIT QUERN_SIZED(quern_nvfp4_interleave_tensors)

QUERN_API quern_status quern_nvfp4_interleave_workspace(quern_context *ctx,
                                                        const quern_nvfp4_interleave_params *params,
                                                        const quern_nvfp4_interleave_tensors *tensors,
                                                        size_t *bytes);
QUERN_API quern_status quern_nvfp4_interleave(quern_context *ctx, const quern_exec *exec,
                                              const quern_nvfp4_interleave_params *params,
                                              const quern_nvfp4_interleave_tensors *tensors, void *workspace,
                                              size_t workspace_bytes);

/*
 * The grouped product: C[t] = A[t] B[e] for the rows t of expert e, B in NVFP4.
 *     result = fl(acc fl(G_A G_B)) + bias + C, in f32 and in that order
 * then SwiGLU where asked, then one rounding to C's dtype, or quantisation. acc sums in f32 the products of
 * f32, f16 and bf16 activations with code * scale, which is exact. With A in NVFP4, or rounded to int8 (a8
 * INT8), acc sums exact integers within a block of 16.
 *
 * a8 FP8: both operands are e4m3, products on a GPU have FP8's rate. A is rounded by row and 128 of K: s =
 * amax / 448, 1 where that is 0, q = e4m3(x / s). A weight becomes w = e4m3(code scale 2^-e), with 2^e of its
 * column the smallest power of two with 6 largest scale <= 448 2^e. acc = 2^e times the sum over the 128s, in
 * order and in f32, of s (sum of q w). Weights converted from MXFP4 stay exact; others gain 2.1% RMS of their
 * size in error. A number in A that is not finite is QUERN_ERR_INVALID_ARGUMENT on the CPU; on a GPU it sets
 * QUERN_STATUS_NOT_FINITE and counts as 0.
 * Within a context, a row's result depends on that row alone,
 * to the bit, whatever the other rows, the layout of B and the number of threads.
 *
 * Bound against exact arithmetic, with S the sum of |a b| and the globals, |bias| and |C|:
 * (4 + K / 16) 2^-23 S for integer products, (2^-6 + ceil(K / 128) 2^-23) S for FP8's by its operands,
 * (K + 8) 2^-24 S for others, and half a unit of the output's last place. (bf16 activations at the levels
 * AVX512BF16 and AMX: numbers below 2^-126 count as 0 in rows that have one of at least 2^-60.)
 */
typedef enum quern_nvfp4_codes_layout {
    QUERN_NVFP4_CODES_LINEAR =
        0, /* [E, K/2, N]; a view of [E, N, K/2] with strides (., 1, K/2) is taken too */
    QUERN_NVFP4_CODES_K_MAJOR = 1 /* [E, N, K/2] */
} quern_nvfp4_codes_layout;

typedef enum quern_nvfp4_scales_layout {
    QUERN_NVFP4_LAYOUT_LINEAR = 0,  /* [E, K/16, N] */
    QUERN_NVFP4_LAYOUT_K_MAJOR = 1, /* [E, N, K/16] */
    QUERN_NVFP4_LAYOUT_SWIZZLED = 2 /* [E, bytes], as quern_nvfp4_swizzle makes of a weight's */
} quern_nvfp4_scales_layout;

/* The type of a product's result, for commands and bindings, which allocate it. A call reads it from c, or
 * c_codes. */
typedef enum quern_nvfp4_output {
    QUERN_NVFP4_OUTPUT_INPUT = 0, /* A's dtype; f32 where A is in NVFP4 */
    QUERN_NVFP4_OUTPUT_F32 = 1,
    QUERN_NVFP4_OUTPUT_BF16 = 2,
    QUERN_NVFP4_OUTPUT_F16 = 3,
    QUERN_NVFP4_OUTPUT_NVFP4 = 4
} quern_nvfp4_output;

/* Rounding of A, in floats, before the product. */
typedef enum quern_nvfp4_a8 {
    QUERN_NVFP4_A8_NONE = 0,
    QUERN_NVFP4_A8_INT8 = 1, /* one scale a row: amax / 127 */
    QUERN_NVFP4_A8_FP8 = 2   /* to e4m3, as the weights: see above */
} quern_nvfp4_a8;

typedef enum quern_nvfp4_activation {
    QUERN_NVFP4_ACTIVATION_NONE = 0,
    QUERN_NVFP4_ACTIVATION_SWIGLU = 1
} quern_nvfp4_activation;

typedef struct quern_nvfp4_gemm_params {
    size_t size;
    quern_nvfp4_codes_layout b_codes;
    quern_nvfp4_scales_layout b_scales;
    int64_t n; /* columns of B; 0: from b_codes */
    quern_nvfp4_global a_global_per;
    quern_nvfp4_a8 a8;
    bool accumulate; /* C is added to; not with an activation, nor to a quantised output */
    quern_nvfp4_activation activation;
    float limit, alpha, beta;    /* of SwiGLU, as for quern_nvfp4_fused_quantize */
    int64_t granularity;         /* of gate and up in B's columns; with an activation a divisor of 32 */
    quern_nvfp4_profile profile; /* of a quantised output */
    bool a_swizzled;             /* a_scales are swizzled; true also wherever there are pad_row_offsets */
    quern_nvfp4_output output;
    bool prepack;        /* repack B into the workspace first: the same bits */
    uint8_t reserved[3]; /* 0; later fields stand here */
} quern_nvfp4_gemm_params;
#define QUERN_NVFP4_GEMM_PARAMS_INIT                                                                         \
    {                                                                                                        \
        sizeof(quern_nvfp4_gemm_params), QUERN_NVFP4_CODES_LINEAR, QUERN_NVFP4_LAYOUT_LINEAR, 0,             \
            QUERN_NVFP4_GLOBAL_TENSOR, QUERN_NVFP4_A8_NONE, false, QUERN_NVFP4_ACTIVATION_NONE, 0.0f, 1.0f,  \
            0.0f, 8, QUERN_NVFP4_PROFILE_RNE, false, QUERN_NVFP4_OUTPUT_INPUT, false,                        \
        {                                                                                                    \
            0                                                                                                \
        }                                                                                                    \
    }

typedef struct quern_nvfp4_gemm_tensors {
    size_t size;
    const quern_tensor *a; /* f32, f16, bf16 [T, K]; or */
    /* [T, K/2], [T, K/16], or with pad_row_offsets [bytes], swizzled by expert */
    const quern_tensor *a_codes, *a_scales;
    const quern_tensor *pad_row_offsets;    /* i32 [E + 1], multiples of 128; NULL: scales in rows */
    const quern_tensor *a_global;           /* [], [E], or [T] or [T, 1]; NULL: 1 */
    const quern_tensor *b_codes, *b_scales; /* K a multiple of 16; or */
    const quern_tensor *b_repacked;         /* u8 [E, bytes], of quern_nvfp4_repacked_bytes() */
    const quern_tensor
        *b_global; /* [], [E], or [E, 2]: gate's and up's, N a multiple of 2 granularity; NULL: 1 */
    const quern_tensor *offsets;            /* i32 [E] */
    const quern_tensor *bias;               /* f32, f16, bf16 [E, N], interleaved as B; or NULL */
    const quern_tensor *c;                  /* f32, f16, bf16 [T, N], [T, N/2] under SwiGLU; or */
    const quern_tensor *c_codes, *c_scales; /* [T, 8 ceil(N/16)], [T, ceil(N/16)], of N/2 under SwiGLU */
    const quern_tensor *c_global;           /* [] or [E], read, for a quantised output */
    const quern_tensor *c_old;              /* as c: added as by `accumulate`, and left as it is; or NULL */
    const quern_tensor *d_c;                /* f32, f16, bf16, as c: read by backward */
    const quern_tensor *d_a;                /* f32, f16, bf16 [T, K]: written by backward */
} quern_nvfp4_gemm_tensors;
#define QUERN_NVFP4_GEMM_TENSORS_INIT QUERN_SIZED(quern_nvfp4_gemm_tensors)

/* Bytes of a weight [K, N] in the layout into which quern_moe_prepack repacks it on a device; n and k are
 * below 2^31. QUERN_ERR_UNSUPPORTED where the device has no such layout. */
QUERN_API quern_status quern_nvfp4_repacked_bytes(quern_context *ctx, quern_device device, int32_t device_id,
                                                  int64_t n, int64_t k, int64_t *bytes);
QUERN_API quern_status quern_nvfp4_gemm_workspace(quern_context *ctx, const quern_nvfp4_gemm_params *params,
                                                  const quern_nvfp4_gemm_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_nvfp4_gemm(quern_context *ctx, const quern_exec *exec,
                                        const quern_nvfp4_gemm_params *params,
                                        const quern_nvfp4_gemm_tensors *tensors, void *workspace,
                                        size_t workspace_bytes);

/* The gradient of A for frozen weights: d_a = d B^T G_B, times G_A, too, where A is in floats. d is d_c
 * or, under SwiGLU, d_c taken back through SwiGLU, for which the product is computed again. Gradients pass
 * straight through quantised and int8 activations: d_a is then the gradient of the values that they stand
 * for. Rows past the last offset are 0. */
QUERN_API quern_status quern_nvfp4_gemm_backward_workspace(quern_context *ctx,
                                                           const quern_nvfp4_gemm_params *params,
                                                           const quern_nvfp4_gemm_tensors *tensors,
                                                           size_t *bytes);
QUERN_API quern_status quern_nvfp4_gemm_backward(quern_context *ctx, const quern_exec *exec,
                                                 const quern_nvfp4_gemm_params *params,
                                                 const quern_nvfp4_gemm_tensors *tensors, void *workspace,
                                                 size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
