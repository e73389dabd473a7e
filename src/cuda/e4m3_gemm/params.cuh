/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - the arguments of the products with e4m3 weights, as kernels take them. */
#ifndef QUERN_CUDA_E4M3_GEMM_PARAMS_CUH
#define QUERN_CUDA_E4M3_GEMM_PARAMS_CUH

#include "common/decode.cuh"
#include "common/entry.cuh"
#include "common/values.cuh"
#include "common/mma.cuh"
#include "common/launch.cuh"

/* A scale for each square of codes, whose side is a power of two, or one for all. */
struct e4m3_scales {
    const void *p;
    bool floats, one;
    int32_t shift;
    int64_t row;

    /* That of codes' row and column; what is no number counts as 0. */
    __device__ __forceinline__ float at(int64_t r, int64_t column, int32_t *status) const
    {
        const int64_t i = one ? 0 : (r >> shift) * row + (column >> shift);
        if (floats) {
            const float scale = __ldg((const float *)p + i);
            if (isfinite(scale)) return scale;
            raise_status(status, QUERN_STATUS_BAD_SCALE);
            return 0.0f;
        }
        const uint32_t byte = __ldg((const uint8_t *)p + i);
        if (byte == 255) raise_status(status, QUERN_STATUS_BAD_SCALE);
        return byte == 255 ? 0.0f : __uint_as_float(byte == 0 ? 0x400000 : byte << 23);
    }
    /* The same in two steps, so that it can be read ahead: as it is stored, and its value. */
    __device__ __forceinline__ uint32_t stored(int64_t r, int64_t column) const
    {
        const int64_t i = one ? 0 : (r >> shift) * row + (column >> shift);
        return floats ? __ldg((const uint32_t *)p + i) : __ldg((const uint8_t *)p + i);
    }
    __device__ __forceinline__ float value(uint32_t x, int32_t *status) const
    {
        const bool bad = floats ? (x & 0x7f800000) == 0x7f800000 : x == 255;
        if (bad) raise_status(status, QUERN_STATUS_BAD_SCALE);
        return __uint_as_float(bad ? 0 : floats ? x : x == 0 ? 0x400000 : x << 23);
    }
};

struct e4m3_params {
    const void *a;
    quern_dtype a_dtype;
    int64_t a_row;
    const uint8_t *codes;
    int64_t code_row;
    e4m3_scales scales;
    any_floats bias;
    void *c;
    quern_dtype c_dtype;
    int64_t c_row;
    int64_t tokens, groups, in, out; /* in, out: of a group, the length of the sum and columns of c */
    bool wide;                       /* codes and a allow the kernel's loads */
    int32_t *status;
};

static inline e4m3_params e4m3_params_of(const stage_exec *exec, const e4m3_gemm_args *args)
{
    const int64_t n = args->codes.shape[0] / args->groups, k = args->codes.shape[1];
    e4m3_params p = {};
    p.a = args->a.data;
    p.a_dtype = args->a.dtype;
    p.a_row = args->a.strides[0];
    p.codes = (const uint8_t *)args->codes.data;
    p.code_row = args->codes.strides[0];
    p.scales.p = args->scales.data;
    p.scales.floats = args->scales.dtype == QUERN_F32;
    p.scales.one = args->scales.shape[0] * args->scales.shape[1] == 1;
    while ((int64_t)1 << p.scales.shift < args->block_columns && p.scales.shift < 62) p.scales.shift++;
    p.scales.row = args->scales.strides[0];
    p.bias = any_floats_of(args->bias);
    p.c = args->c.data;
    p.c_dtype = args->c.dtype;
    p.c_row = args->c.strides[0];
    p.tokens = args->c.shape[0];
    p.groups = args->groups;
    p.in = args->rows ? n : k;
    p.out = args->rows ? k : n;
    p.status = exec->status;
    return p;
}

/* Whether the kernels take a call; if not, says so. */
static inline bool e4m3_takes(const e4m3_gemm_args *args, char why[STAGE_WHY_BYTES])
{
    const bool one = args->scales.shape[0] * args->scales.shape[1] == 1;
    if (!present(args->global) &&
        (one || (args->block_rows == args->block_columns &&
                 (args->block_rows & (args->block_rows - 1)) == 0 && args->block_rows >= 16)))
        return true;
    snprintf(why, STAGE_WHY_BYTES,
             "scales of %lld x %lld codes%s: the cuda backend takes one scale, or squares of 32 or 128, "
             "without a global",
             (long long)args->block_rows, (long long)args->block_columns,
             present(args->global) ? " and a global" : "");
    return false;
}

/* Rounds the rows of x [T, groups K] to e4m3 by runs of 128 of each group's K: to floats, or, with `scale`,
 * to codes, of which a run has 128, zeros behind K. */
struct e4m3_round_params {
    const void *x;
    quern_dtype dtype;
    int64_t x_row, tokens, groups, k;
    bool wide;      /* rows allow loads of four */
    bool very_wide; /* and of sixteen, 16 bytes at a time */
    void *out;      /* [T][out_row]: floats [groups][K], or codes [groups][runs][128] */
    float *scale;   /* [groups runs][scale_row], or NULL */
    int64_t out_row, scale_row;
    int32_t *status;
};
static inline e4m3_round_params e4m3_round_params_of(const e4m3_params &p, const quern_tensor &a)
{
    e4m3_round_params r = {};
    r.x = p.a;
    r.dtype = p.a_dtype;
    r.x_row = p.a_row;
    r.tokens = p.tokens;
    r.groups = p.groups;
    r.k = p.in;
    r.wide = p.in % 4 == 0 && rows_aligned(a, 4 * bytes_of(p.a_dtype));
    r.very_wide = p.in % 16 == 0 && rows_aligned(a, 16);
    r.status = p.status;
    return r;
}
quern_status e4m3_round_rows(const e4m3_round_params &p, cudaStream_t stream);

#endif
