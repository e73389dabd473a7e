/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * pooling.cuh - entries of 512 channels from rows in shared memory: what the kernels of short and of long
 * blocks share. A team of four warps makes an entry, four channels a thread, and merges rows in their order,
 * so that entries have the bits of any GPU's kernels and of appends.
 */
#ifndef QUERN_CUDA_POOL_SM90_POOLING_CUH
#define QUERN_CUDA_POOL_SM90_POOLING_CUH

#include "hopper/ring.cuh"
#include "hopper/tma.cuh"
#include "pool/emit.cuh"
#include "pool/sm90/params.cuh"

enum {
    POOL_TEAM = WIDTH / GROUP_CHANNELS,
    POOL_TEAMS = 4,
    POOL_ROWS = 4, /* read at a time */
    POOL_WARPS = POOL_TEAMS * POOL_TEAM / 32,
    POOL_THREADS = POOL_WARPS * 32 + 128 /* the first warp of a fifth warpgroup feeds */
};

/* A team as a group, and its parts: two of four floats. */
struct team_parts {
    float of[POOL_TEAMS][2 * WARPS_MOST];
};
__device__ __forceinline__ group team_group(team_parts &m)
{
    /* A group finds its parts by the number of its first warp. */
    return group(m.of[0] + (int)threadIdx.x / POOL_TEAM * (2 * WARPS_MOST - POOL_TEAM / 32), POOL_TEAM);
}

template <typename T> __device__ __forceinline__ raw_channels<T> read_channels(const T *p)
{
    raw_channels<T> c;
    if constexpr (sizeof(T) == 2) {
        const uint2 x = *(const uint2 *)p;
        c.w[0] = x.x;
        c.w[1] = x.y;
    } else {
        const uint4 x = *(const uint4 *)p;
        c.w[0] = x.x;
        c.w[1] = x.y;
        c.w[2] = x.z;
        c.w[3] = x.w;
    }
    return c;
}

/* Whether no value of the rows is infinite or NaN; of f32 rows it is not looked at. */
template <typename T, int N> __device__ __forceinline__ bool values_are_finite(const pool_rows<T, N> &rows)
{
    if constexpr (sizeof(T) == 4) return false;
    else {
        typedef typename pairs_of<T>::type pair;
        pair most = *(const pair *)&rows.value[0].w[0], least = most;
#pragma unroll
        for (int u = 0; u < N; u++) {
            const pair x = *(const pair *)&rows.value[u].w[0], y = *(const pair *)&rows.value[u].w[1];
            most = __hmax2_nan(__hmax2_nan(most, x), y);
            least = __hmin2_nan(__hmin2_nan(least, x), y);
        }
        most = __hmax2_nan(most, __hneg2(least));
        const uint32_t x = *(const uint32_t *)&most, none = pairs_of<T>::NONE & 0x7fff;
        return (x & 0x7fff) < none && (x >> 16 & 0x7fff) < none;
    }
}

/* As merge_row() of a finite value, or of a finite logit: no test for a logit of -inf is needed then. */
__device__ __forceinline__ void merge_finite(pool_sums &s, int i, float logit, float value)
{
    const float log2_e = 1.44269504089f;
    const bool up = logit > s.max[i];
    const float e = exp2_fast(-fabsf(logit - s.max[i]) * log2_e), weight = up ? 1.0f : e,
                shrink = up ? e : 1.0f;
    s.sum[i] = fmaf(s.sum[i], shrink, weight);
    s.weighted[i] = fmaf(s.weighted[i], shrink, weight * value);
    s.max[i] = fmaxf(s.max[i], logit);
}

/* Merges rows in their order. finite: all values are, or all logits are above -inf. */
template <typename T, typename B, int N>
__device__ __forceinline__ void merge_taken(pool_sums &sums, const pool_rows<T, N> &rows,
                                            const pool_biases<B, N> &bias, bool finite)
{
    if (!finite) {
        merge_rows(sums, rows, bias);
        return;
    }
#pragma unroll
    for (int u = 0; u < N; u++)
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++)
            merge_finite(sums, i, rows.logit[u].at(i) + bias.row[u].at(i), rows.value[u].at(i));
}

/* As entry_angles() and entry_rotate() where no pair's channels are of two threads. */
__device__ __forceinline__ entry_factors pair_angles(const entry_kernel &e, int64_t at, int channel)
{
    entry_factors f = {{1.0f, 1.0f}, {0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int c = channel + 2 * i - (WIDTH - e.rotated);
        if (c < 0) continue;
        f.cosine[i] = e.angles.at(at + c / 2);
        f.sine[i] = e.angles.at(at + e.rotated / 2 + c / 2);
    }
    return f;
}

__device__ __forceinline__ void pair_rotate(const entry_kernel &e, const entry_factors &f, int channel,
                                            channels &v)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float x = v.x[2 * i], y = v.x[2 * i + 1];
        if (channel + 2 * i < WIDTH - e.rotated) continue;
        v.x[2 * i] = x * f.cosine[i] - y * f.sine[i];
        v.x[2 * i + 1] = x * f.sine[i] + y * f.cosine[i];
    }
}

/* What a team needs of an entry that is stored as a row; NULL: not wanted. A row that is not live is 0. */
struct row_facts {
    char *out;
    float *pooled;
    int64_t angle; /* of its row of the table */
    int32_t live, before;
};

__device__ __forceinline__ row_facts row_facts_of(const pool_kernel &a, const pool_facts &x)
{
    const bool live = x.live && entry_has_angles(a.entry, x.position);
    if (x.live && !live) raise_status(a.status, QUERN_STATUS_BAD_POSITION);
    return {a.out == NULL
                ? NULL
                : (char *)a.out + (x.view_b * a.out_b + x.n * a.out_row) * (a.out_dtype == QUERN_F32 ? 4 : 2),
            a.pooled == NULL ? NULL : a.pooled + x.view_b * a.pooled_b + x.n * a.pooled_row,
            (x.position + a.entry.offset) * a.entry.angle_row, live, x.before};
}

/* Stores what a team's sums give of such an entry; as pool_emit(). */
__device__ __forceinline__ void row_emit(const pool_kernel &a, const group &g, const row_facts &x,
                                         const channels &norm, const entry_factors &angles, bool rotated,
                                         const pool_sums &sums)
{
    const int channel = g.lane * GROUP_CHANNELS;
    channels v = pooled_of(sums);
    if (!x.live) v = {};
    if (x.pooled != NULL) put_channels(x.pooled + channel, v, GROUP_CHANNELS);
    if (x.out == NULL) return;
    if (x.live) {
        entry_round(a.entry, v);
        if (a.entry.norm.p != NULL) {
            const float scale = inverse_rms(g, v, a.entry.eps, WIDTH);
#pragma unroll
            for (int i = 0; i < GROUP_CHANNELS; i++) v.x[i] = v.x[i] * scale * norm.x[i];
        }
        if (rotated) pair_rotate(a.entry, angles, channel, v);
    }
    put_floats(x.out, a.out_dtype, channel, v, GROUP_CHANNELS);
}

#endif
