/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the warpgroup that gathers. Eight lanes copy a row, 16 bytes of a panel a lane; a stage has 128
 * rows, so each lane of a warp finds one of its 32 and hands the address to those that copy. */
#ifndef QUERN_CUDA_INDEXER_SM90_FEED_CUH
#define QUERN_CUDA_INDEXER_SM90_FEED_CUH

#include "indexer/sm90/shared.cuh"

namespace sm90_indexer
{

enum { ROWS_A_THREAD = 8 };

__device__ __forceinline__ int copied_row(int i)
{
    return i * 16 + threadIdx.x / 8;
}
__device__ __forceinline__ int found_row()
{
    return threadIdx.x % 32 / 4 * 16 + threadIdx.x / 32 * 4 + threadIdx.x % 4;
}
__device__ __forceinline__ int finder(int i)
{
    return i * 4 + threadIdx.x % 32 / 8;
}
__device__ __forceinline__ const char *handed(const char *p, int i)
{
    return (const char *)__shfl_sync(~0u, (unsigned long long)p, finder(i));
}

/* Copies 128 rows of 128 elements; a row without an address becomes zeros. */
template <typename T> __device__ __forceinline__ void copy_rows(char *tile, const char *found, bool wide)
{
    const uint32_t to = smem_address(tile), at = tile_at<KEYS>(copied_row(0), threadIdx.x % 8);
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; i++) {
        const char *const from = handed(found, i);
#pragma unroll
        for (int p = 0; p < PANELS; p++)
            load_chunk16<T>(to, tile, at + i * 16 * 128 + p * PANEL_BYTES,
                            (const T *)from + p * 64 + threadIdx.x % 8 * 8, from != NULL, wide);
    }
}

/* The same of codes. */
__device__ __forceinline__ void decode_rows(const index_kernel &a, char *tile, const row_place &found,
                                            const index_scale &scale)
{
    char *const to = tile + tile_at<KEYS>(copied_row(0), threadIdx.x % 8);
#pragma unroll 2
    for (int i = 0; i < ROWS_A_THREAD; i++) {
        const row_place from = {handed(found.data, i), handed(found.scales, i)};
        const index_scale s = {0.0f, 0, __shfl_sync(~0u, scale.most, finder(i)),
                               __shfl_sync(~0u, (int)scale.negative, finder(i)) != 0};
#pragma unroll
        for (int p = 0; p < PANELS; p++)
            *(uint4 *)(to + i * 16 * 128 + p * PANEL_BYTES) =
                from.data != NULL ? index_codes(a, from, p * 64 + threadIdx.x % 8 * 8, s)
                                  : make_uint4(0, 0, 0, 0);
    }
}

template <typename T, int STAGES>
__device__ __forceinline__ void feed_queries(const index_kernel &a, shared<T, STAGES> &m, const item_of &x)
{
    for (int pair = 0; pair < QUERIES / 2; pair++) {
        const int query = x.query + pair * 2 + found_row() / HEADS, head = found_row() % HEADS;
        const T *const row = (const T *)a.q.p + x.b * a.q.s[0] + query * a.q.s[1] + head * a.q.s[2];
        copy_rows<T>((char *)m.q[pair], query < a.queries ? (const char *)row : NULL, a.q_wide);
    }
    for (int i = threadIdx.x; i < QUERIES * HEADS; i += 128) {
        const int query = x.query + i / HEADS;
        m.w[i / HEADS][i % HEADS] = query < a.queries ? index_weight(a, x.b, query, i % HEADS) : 0.0f;
    }
}

template <typename T, int STAGES>
__device__ __forceinline__ void feed(const index_kernel &a, shared<T, STAGES> &m, int items)
{
    ring_place<STAGES> at;
    ring_place<1> q;
    for (int item = blockIdx.x; item < items; item += gridDim.x, q.advance()) {
        const item_of x = item_at(a, item);
        m.queries.wait_free(q);
        feed_queries(a, m, x);
        m.queries.give_copies(q);
        m.queries.give(q);
        for (int s = 0; s < x.stages; s++) {
            const int key = s * KEYS + found_row();
            const bool here = key < a.entries && row_exists(a.keys, x.b, key);
            row_place place = {NULL, NULL};
            if (here) place = row_at(a.keys, x.b, key);
            index_scale scale = index_scale_of(a, place.scales);
            if (!here) scale.score = NAN; /* a page is missing: chosen last */
            m.keys.wait_free(at);
            if (a.format == ENTRY_ROWS) copy_rows<T>((char *)m.k[at.stage], place.data, a.keys.wide);
            else decode_rows(a, (char *)m.k[at.stage], place, scale);
            m.scale[at.stage][found_row()] = scale.score * a.scale;
            m.keys.give_copies(at);
            m.keys.give(at);
            at.advance();
        }
    }
}

} // namespace sm90_indexer

#endif
