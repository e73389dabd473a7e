/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * entry.cuh - from a pooled row to a stored entry, and back for gradients: RMS norm, rotation, Walsh-Hadamard
 * transform, the formats of caches. A group holds the row, four channels a thread. Scales are powers of two
 * from a float's bits, or true quotients, so formats have the CPU's bits.
 */
#ifndef QUERN_CUDA_ENTRY_CUH
#define QUERN_CUDA_ENTRY_CUH

#include "common/fp4.cuh"
#include "common/group.cuh"
#include "common/rows.cuh"

enum { FP4_ENTRY_BLOCK = 32, ROW584_WIDTH = 512, ROW584_TILE = 64, ROW584_CODES = 448, ROW584_SCALES = 576 };

/* A vector of f32, f16 or bf16; p NULL: absent. */
struct any_floats {
    const void *p;
    quern_dtype dtype;

    __device__ __forceinline__ float at(int64_t i) const
    {
        if (dtype == QUERN_F32) return __ldg((const float *)p + i);
        return dtype == QUERN_BF16 ? __bfloat162float(((const bf16 *)p)[i])
                                   : __half2float(((const __half *)p)[i]);
    }
};

static inline any_floats any_floats_of(const quern_tensor &t)
{
    return {present(t) ? t.data : NULL, t.dtype};
}

struct entry_kernel {
    bool round_bf16, hadamard;
    float eps;
    entry_format format;
    int width, rotated;                    /* the last channels */
    int64_t angle_row, angle_rows, offset; /* of the table; from a block's position to the rotation's */
    any_floats norm, angles;
};

static inline entry_kernel entry_kernel_of(const entry_args &e, int64_t width, int64_t ratio)
{
    entry_kernel k = {};
    k.round_bf16 = e.round_bf16;
    k.hadamard = e.hadamard;
    k.eps = e.eps;
    k.format = e.format;
    k.width = (int)width;
    k.norm = any_floats_of(e.norm_weight);
    k.angles = any_floats_of(e.cos_sin);
    if (!present(e.cos_sin)) return k;
    k.rotated = (int)e.cos_sin.shape[1];
    k.angle_row = e.cos_sin.strides[0];
    k.angle_rows = e.cos_sin.shape[0];
    k.offset = e.rope_last ? ratio - 1 : 0;
    return k;
}

/* Whether the table has the angles of a block at a position. */
__device__ __forceinline__ bool entry_has_angles(const entry_kernel &e, int64_t position)
{
    return e.rotated == 0 || (position >= 0 && position + e.offset < e.angle_rows);
}

/* Four channels of a row, from channel `first` on; channels past the width are 0. */
struct channels {
    float x[GROUP_CHANNELS];
};

/* The cosines and sines of a thread's two pairs, read ahead where no pair's channels are of two threads. */
struct entry_factors {
    float cosine[2], sine[2];
};

__device__ __forceinline__ bool entry_splits_pairs(const entry_kernel &e)
{
    return (e.width - e.rotated) % 2 != 0;
}

__device__ __forceinline__ entry_factors entry_angles(const entry_kernel &e, const group &g, int64_t position)
{
    const int start = e.width - e.rotated, half = e.rotated / 2;
    const int64_t at = (position + e.offset) * e.angle_row;
    entry_factors f = {{1.0f, 1.0f}, {0.0f, 0.0f}};
    if (e.rotated == 0 || entry_splits_pairs(e) || !entry_has_angles(e, position)) return f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int c = g.lane * GROUP_CHANNELS + 2 * i;
        if (c < start || c >= e.width) continue;
        f.cosine[i] = e.angles.at(at + (c - start) / 2);
        f.sine[i] = e.angles.at(at + half + (c - start) / 2);
    }
    return f;
}

/* Rotates pairs. `row`: shared, a float a channel; needed where a pair's channels are of two threads. */
__device__ __forceinline__ void entry_rotate(const entry_kernel &e, const group &g, int64_t position,
                                             bool inverse, const entry_factors &f, channels &v, float *row)
{
    if (e.rotated == 0) return;
    if (!entry_splits_pairs(e)) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float x = v.x[2 * i], y = v.x[2 * i + 1], sine = inverse ? -f.sine[i] : f.sine[i];
            if (g.lane * GROUP_CHANNELS + 2 * i < e.width - e.rotated) continue;
            v.x[2 * i] = x * f.cosine[i] - y * sine;
            v.x[2 * i + 1] = x * sine + y * f.cosine[i];
        }
        return;
    }
    const int first = g.lane * GROUP_CHANNELS, start = e.width - e.rotated, half = e.rotated / 2;
    const int64_t at = (position + e.offset) * e.angle_row;
    g.sync();
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++)
        if (first + i < e.width) row[first + i] = v.x[i];
    g.sync();
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) {
        const int c = first + i, m = (c - start) / 2;
        if (c < start || c >= e.width) continue;
        const float cosine = e.angles.at(at + m), s = e.angles.at(at + half + m), sine = inverse ? -s : s;
        v.x[i] =
            (c - start) % 2 == 0 ? row[c] * cosine - row[c + 1] * sine : row[c - 1] * sine + row[c] * cosine;
    }
}

/* Over sqrt(width), a power of two. `row`: shared, a float a channel. */
__device__ __forceinline__ void entry_hadamard(const entry_kernel &e, const group &g, channels &v, float *row)
{
    const int first = g.lane * GROUP_CHANNELS;
#pragma unroll
    for (int h = 1; h < GROUP_CHANNELS; h *= 2)
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++)
            if ((i & h) == 0 && h < e.width) {
                const float x = v.x[i], y = v.x[i + h];
                v.x[i] = x + y;
                v.x[i + h] = x - y;
            }
#pragma unroll
    for (int h = GROUP_CHANNELS; h < 32 * GROUP_CHANNELS; h *= 2) {
        if (h >= e.width) break;
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) {
            const float other = __shfl_xor_sync(~0u, v.x[i], h / GROUP_CHANNELS);
            v.x[i] = (first & h) ? other - v.x[i] : v.x[i] + other;
        }
    }
    for (int h = 32 * GROUP_CHANNELS; h < e.width; h *= 2) {
        g.sync();
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) row[first + i] = v.x[i];
        g.sync();
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) {
            const float other = row[(first ^ h) + i];
            v.x[i] = (first & h) ? other - v.x[i] : v.x[i] + other;
        }
    }
    const float scale = 1.0f / sqrtf((float)e.width);
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) v.x[i] *= scale;
}

__device__ __forceinline__ void entry_round(const entry_kernel &e, channels &v)
{
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++)
        if (e.round_bf16) v.x[i] = __bfloat162float(__float2bfloat16_rn(v.x[i]));
}

__device__ __forceinline__ float inverse_rms(const group &g, const channels &v, float eps, int width)
{
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) squares = fmaf(v.x[i], v.x[i], squares);
    return rsqrtf(g.sum(squares) / (float)width + eps);
}

/* Weights of the norm, where there is one; 0 past the width. */
__device__ __forceinline__ channels norm_weights(const entry_kernel &e, const group &g)
{
    const int first = g.lane * GROUP_CHANNELS;
    channels w = {};
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++)
        if (e.norm.p != NULL && first + i < e.width) w.x[i] = e.norm.at(first + i);
    return w;
}

/* A pooled row becomes the entry of the block at `position`. w: norm_weights(), where there is a norm. */
__device__ __forceinline__ void entry_finish(const entry_kernel &e, const group &g, int64_t position,
                                             const channels &w, const entry_factors &f, channels &v,
                                             float *row)
{
    entry_round(e, v);
    if (e.norm.p != NULL) {
        const float scale = inverse_rms(g, v, e.eps, e.width);
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) v.x[i] = v.x[i] * scale * w.x[i];
    }
    entry_rotate(e, g, position, false, f, v, row);
    if (e.hadamard) entry_hadamard(e, g, v, row);
}

/* From d, the gradient of norm(x): that of x; adds the weights' shares to d_weight. */
__device__ __forceinline__ void norm_gradient(const group &g, const channels &x, const channels &w, float eps,
                                              int width, channels &d, channels &d_weight)
{
    const float scale = inverse_rms(g, x, eps, width);
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) dot = fmaf(d.x[i] * x.x[i], w.x[i], dot);
    const float mean = g.sum(dot) / (float)width * scale * scale;
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) {
        d_weight.x[i] = fmaf(d.x[i] * x.x[i], scale, d_weight.x[i]);
        d.x[i] = (d.x[i] * w.x[i] - x.x[i] * mean) * scale;
    }
}

/* From d, the gradient of an entry: that of the pooled row. */
__device__ __forceinline__ void entry_backward(const entry_kernel &e, const group &g, int64_t position,
                                               const channels &w, const entry_factors &f,
                                               const channels &pooled, channels &d, channels &d_norm,
                                               float *row)
{
    if (e.hadamard) entry_hadamard(e, g, d, row);
    entry_rotate(e, g, position, true, f, d, row);
    if (e.norm.p == NULL) return;
    channels x = pooled;
    entry_round(e, x);
    norm_gradient(g, x, w, e.eps, e.width, d, d_norm);
}

/* ---- formats ---- */

/* The least power of two that is not below x, a normal number. */
__device__ __forceinline__ float power_above(float x)
{
    return __uint_as_float((__float_as_uint(x) + 0x7fffffu) & 0x7f800000u);
}

/* What is not finite becomes 0; whether there was some. */
__device__ __forceinline__ bool clear_infinite(channels &v)
{
    bool bad = false;
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) {
        const bool finite = isfinite(v.x[i]);
        bad = bad || !finite;
        if (!finite) v.x[i] = 0.0f;
    }
    return bad;
}

__device__ __forceinline__ float largest_of(const channels &v)
{
    return fmaxf(fmaxf(fabsf(v.x[0]), fabsf(v.x[1])), fmaxf(fabsf(v.x[2]), fabsf(v.x[3])));
}

/* The largest of `lanes` threads that follow one another, a power of two up to 32. */
__device__ __forceinline__ float largest_of_lanes(const channels &v, int lanes)
{
    float most = largest_of(v);
    for (int by = 1; by < lanes; by *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
    return most;
}

__device__ __forceinline__ uint32_t e4m3_codes(const channels &v, float scale)
{
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) {
        const float y = __fdiv_rn(v.x[i], scale);
        codes |= ((uint32_t)saturated_e4m3(fabsf(y)) | (__float_as_uint(y) >> 31) << 7) << 8 * i;
    }
    return codes;
}

/* The first `count` of up to four bytes, or of four elements. */
__device__ __forceinline__ void put_bytes(uint8_t *to, uint32_t bytes, int count)
{
    if (count >= 4 && ((uintptr_t)to & 3) == 0) *(uint32_t *)to = bytes;
    else
        for (int i = 0; i < 4 && i < count; i++) to[i] = (uint8_t)(bytes >> 8 * i);
}

template <typename T> __device__ __forceinline__ void put_channels(T *to, const channels &v, int count)
{
    if (count >= GROUP_CHANNELS && ((uintptr_t)to & (GROUP_CHANNELS * sizeof(T) - 1)) == 0) {
        struct alignas(GROUP_CHANNELS * sizeof(T)) {
            T t[GROUP_CHANNELS];
        } all;
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) all.t[i] = from_float<T>(v.x[i]);
        if (sizeof(T) == 2) __stcs((uint2 *)to, *(const uint2 *)&all);
        else __stcs((uint4 *)to, *(const uint4 *)&all);
        return;
    }
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++)
        if (i < count) to[i] = from_float<T>(v.x[i]);
}

__device__ __forceinline__ void put_floats(void *row, quern_dtype dtype, int first, const channels &v,
                                           int count)
{
    if (dtype == QUERN_F32) put_channels((float *)row + first, v, count);
    else if (dtype == QUERN_BF16) put_channels((bf16 *)row + first, v, count);
    else put_channels((__half *)row + first, v, count);
}

__device__ __forceinline__ uint32_t bf16_pair(float low, float high)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)&pair;
}

/* Stores a row whose codes stand at `to` and whose scales at `scales` in a format of bytes. A call, so that
 * kernels need no registers for it where rows are floats. */
static __device__ __noinline__ void entry_quantise(const entry_kernel &e, const group &g, channels v,
                                                   uint8_t *to, uint8_t *scales, int32_t *status)
{
    const int first = g.lane * GROUP_CHANNELS, count = e.width - first;
    if (clear_infinite(v)) raise_status(status, QUERN_STATUS_NOT_FINITE);
    if (e.format == ENTRY_FP4) {
        const float most = largest_of_lanes(v, FP4_ENTRY_BLOCK / GROUP_CHANNELS),
                    scale = power_above(__fdiv_rn(fmaxf(most, 6 * 0x1p-126f), 6.0f));
        uint32_t codes = 0;
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++)
            codes |=
                (uint32_t)(e2m1_of(fminf(fabsf(__fdiv_rn(v.x[i], scale)), 6.0f)) | (v.x[i] < 0.0f ? 8 : 0))
                << 4 * i;
        if (count <= 0) return;
        put_bytes(to + first / 2, codes, 2);
        if (first % FP4_ENTRY_BLOCK == 0)
            scales[first / FP4_ENTRY_BLOCK] = (uint8_t)(__float_as_uint(scale) >> 23);
    } else if (e.format == ENTRY_ROW584) {
        const float most = largest_of_lanes(v, ROW584_TILE / GROUP_CHANNELS),
                    scale = power_above(__fdiv_rn(fmaxf(most, 1e-4f), 448.0f));
        const bool tile = first % ROW584_TILE == 0;
        if (first >= ROW584_CODES) {
            uint8_t *const plain = to + ROW584_CODES + 2 * (first - ROW584_CODES);
#pragma unroll
            for (int i = 0; i < GROUP_CHANNELS; i += 2)
                put_bytes(plain + 2 * i, bf16_pair(v.x[i], v.x[i + 1]), 4);
            if (tile) scales[first / ROW584_TILE] = 0;
        } else {
            put_bytes(to + first, e4m3_codes(v, scale), 4);
            if (tile) scales[first / ROW584_TILE] = (uint8_t)(__float_as_uint(scale) >> 23);
        }
    } else {
        float scale = __fdiv_rn(fmaxf(g.max(largest_of(v)), 1e-4f), 448.0f);
        if (e.format == ENTRY_FP8_POWER) scale = power_above(scale);
        put_bytes(to + first, e4m3_codes(v, scale), count);
        if (g.lane == 0) put_bytes(scales, __float_as_uint(scale), 4);
    }
}

/* Bytes of a row's codes, and of the whole row. */
static inline __host__ __device__ int64_t entry_data_bytes(entry_format format, int64_t width)
{
    if (format == ENTRY_ROW584) return ROW584_SCALES;
    return format == ENTRY_FP4 ? width / 2 : width;
}
static inline __host__ __device__ int64_t entry_row_bytes(entry_format format, int64_t width)
{
    return entry_data_bytes(format, width) + (format == ENTRY_FP4      ? width / FP4_ENTRY_BLOCK
                                              : format == ENTRY_ROW584 ? 8
                                                                       : 4);
}

/* Stores a finished row. */
__device__ __forceinline__ void entry_store(const entry_kernel &e, const group &g, const channels &v,
                                            void *row, quern_dtype dtype, int32_t *status)
{
    const int first = g.lane * GROUP_CHANNELS;
    if (e.format == ENTRY_ROWS) put_floats(row, dtype, first, v, e.width - first);
    else
        entry_quantise(e, g, v, (uint8_t *)row, (uint8_t *)row + entry_data_bytes(e.format, e.width), status);
}

/* The row of a block that is not there. */
__device__ __forceinline__ void entry_clear(const entry_kernel &e, const group &g, void *row,
                                            quern_dtype dtype)
{
    const int first = g.lane * GROUP_CHANNELS;
    if (e.format == ENTRY_ROWS) {
        put_floats(row, dtype, first, {}, e.width - first);
        return;
    }
    const int64_t bytes = entry_row_bytes(e.format, e.width);
    for (int64_t i = first; i < bytes; i += g.lanes * 4) put_bytes((uint8_t *)row + i, 0, (int)(bytes - i));
}

#endif
