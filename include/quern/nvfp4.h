/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nvfp4.h - NVFP4, a 4-bit float format: E2M1 codes in blocks of 16, an E4M3 scale a block, an f32 scale a tensor.
 *
 * A code is 0, 0.5, 1, 1.5, 2, 3, 4 or 6, bit 3 its sign; two stand in a byte, the low nibble first. A scale is one byte
 * of E4M3, 0x00 to 0x7E. With the tensor's (or expert's, or row's) global scale G
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
 * How values become codes. Each step is one f32 rounding; E4M3 and E2M1 round to the nearest, ties to even, and saturate.
 * amax is the largest magnitude of what shares a global, a that of a block.
 */
typedef enum quern_nvfp4_profile {
    /* G = max(amax, 1e-8) / 2688; scale = a / (6 G), 0 (and codes 0) where that is below 2^-9. */
    QUERN_NVFP4_PROFILE_RNE = 0,
    /* The same, codes rounded twice, to halves and then down at a tie: what older checkpoints hold. */
    QUERN_NVFP4_PROFILE_HALFSTEP = 1,
    /* ModelOpt: G = amax / 2688; scale at least 2^-9, 1 for a block of zeros. */
    QUERN_NVFP4_PROFILE_MODELOPT = 2,
    /* compressed-tensors: the global is the reciprocal R = 2688 / amax, value = code * fl(scale / R). A product takes
     * G = 1 / R. */
    QUERN_NVFP4_PROFILE_COMPRESSED_TENSORS = 3
} quern_nvfp4_profile;

/* Which scale a block gets. The other two minimise the squared error among candidates, under the normalisation, underflow
 * and code rules of RNE and the profile's own global; HALFSTEP takes RNE only. */
typedef enum quern_nvfp4_scales {
    QUERN_NVFP4_SCALES_RNE = 0,           /* the profile's own rule */
    QUERN_NVFP4_SCALES_FOUR_OVER_SIX = 1, /* the block's largest value becomes 6 or 4 */
    QUERN_NVFP4_SCALES_SEARCH = 2         /* three scales below RNE's to eight above */
} quern_nvfp4_scales;

/* What shares a global scale. */
typedef enum quern_nvfp4_global {
    QUERN_NVFP4_GLOBAL_TENSOR = 0, /* all: [] */
    QUERN_NVFP4_GLOBAL_EXPERT = 1, /* the rows, or the matrix, of an expert: [E] */
    QUERN_NVFP4_GLOBAL_ROW = 2     /* a row of an activation: its leading shape */
} quern_nvfp4_global;

#ifdef __cplusplus
}
#endif
#endif
