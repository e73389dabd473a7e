/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the forward of NSA's selected branch on Hopper where each token of 4 or 8 heads, or of 16 with
 * blocks of 128, has a list of its own, and neighbours' lists have little in common: block by block instead
 * of token by token.
 *
 * Whoever walks the union of neighbours' lists (sm90_tokens/kernel.cuh) fills shared memory with 32 KB for
 * each block of it: on noise at 64k tokens, 4 heads a token, 17 KB for each token and listed block. Here a
 * block of threads copies 64 or 128 keys once and computes the tokens that chose them, 64 rows at a time. It
 * writes a partial result for each token and block, O before its division by the sum, 1 KB at 4 heads;
 * another kernel adds those of a token in the order of the keys. That is 2 KB written and read instead of 17.
 *
 * Partial results are f16, each row times a power of two that brings its largest column to [2^14, 2^15): so
 * they lose less than the probabilities lost before P V.
 *
 * Those of all tokens would be many times the inputs: they are made and added slice by slice, a slice being
 * some thousand tokens of one key/value head. One slice's are added while the next one's are made, in the
 * other of two buffers. launch.cu finds for each slice which tokens chose each block, in whatever
 * order: each row's result is its own. Pieces of tokens whose lists have much in common are left to
 * sm90_tokens/kernel.cuh; the lists of the tokens before them say which (share_little).
 *
 * V that is not finite reaches the rows that see it: V is searched and cleared of it once it is there, and it
 * is added to their O.
 *
 * Registers at D = 128: O 64, S 32, P 16 of 168; shared memory: K and V 32 KB, Q 32 KB (the next 64 rows come
 * while these are computed), three blocks an SM; of 128 keys K and V 64 KB, two. Limit: the bytes of partial
 * results.
 */
#ifndef QUERN_CUDA_ATTEND_SM90_BY_BLOCK_KERNEL_CUH
#define QUERN_CUDA_ATTEND_SM90_BY_BLOCK_KERNEL_CUH

#include "attend/attend.cuh"
#include "hopper/ring.cuh"
#include "common/launch.cuh"
#include "hopper/tma_tiles.cuh"
#include "hopper/wgmma.cuh"
#include "attend/sm90_by_block/params.cuh"
#include "attend/sm90_tokens/feed.cuh"
#include "attend/sm90/rows.cuh"

namespace sm90_by_block
{

using attend_parts::row_state;
using sm90_tokens::KEYS;

enum { WARPS = 4, ROWS = 64 /* of a warpgroup */, MERGE_WARPS = 8, MERGE_AHEAD = 4 };

struct maps {
    tma_tiles k, v;
};

/* SPAN: of 64 keys of a block. */
template <int D, int SPAN> struct __align__(1024) shared
{
    typedef uint16_t panel_row[64];
    panel_row k[SPAN][D / 64][KEYS], v[SPAN][D / 64][KEYS];
    panel_row q[2][D / 64][ROWS]; /* of the tile in hand and of the next */
    stage_barriers<1> full;       /* K and V */
};

/* The id of token `i` of an item; -1 behind its last. */
__device__ __forceinline__ int32_t id_of(const token_slice &s, const block_item &item, int i)
{
    return i < item.count ? s.ids[item.first + i] : -1;
}

/* Begins the copy of the rows of a tile: R heads of each of its tokens. A warp copies its own 16 rows; a lane
 * has the id of one of their tokens. */
template <typename T, int D, int R>
__device__ __forceinline__ void copy_rows(const attend_kernel &a, const token_slice &s, int32_t id,
                                          uint32_t to)
{
    constexpr int CHUNKS = D / 8, OWN = 16; /* rows of a warp */
    const int lane = threadIdx.x & 31, row0 = (threadIdx.x >> 5) * OWN, chunk = lane % CHUNKS;
    const T *q = (const T *)a.q.p + s.view * a.q.s[0] + s.unit * R * a.q.s[2] + chunk * 8;
#pragma unroll
    for (int r = lane / CHUNKS; r < OWN; r += 32 / CHUNKS) {
        const int32_t of = __shfl_sync(~0u, id, r / R);
        const bool valid = of >= 0 && chunk * 8 < a.dim_k;
        const T *row = q + (int64_t)(s.query0 + (of >> RANK_BITS)) * a.q.s[1] + r % R * a.q.s[2];
        cp_async16(to + tile_at<ROWS>(row0 + r, chunk), valid ? row : q, valid);
    }
}

/* Clears V of what is not finite; whether there was such. All threads call. */
template <typename T, int D> __device__ __forceinline__ bool clean_values(char *v)
{
    constexpr int CHUNKS = D / 8;
    if (!__syncthreads_or(any_nonfinite<T, KEYS, 32 * WARPS, CHUNKS>(v))) return false;
    clear_nonfinite<T, KEYS, 32 * WARPS, CHUNKS>(v);
    async_fence();
    __syncthreads();
    return true;
}

/* Adds what is not finite in V of the keys from `key` on to a thread's rows, which see the first left[h]. */
template <typename T, int OT>
__device__ __forceinline__ void add_nonfinite(float (&o)[OT][4], const attend_kernel &a, const token_slice &s,
                                              const int (&left)[2], int key)
{
    const T *v = (const T *)a.v.p + s.view * a.v.s[0] + s.unit * a.v.s[2] + (threadIdx.x & 3) * 2;
#pragma unroll 1
    for (int j = 0; j < KEYS && key + j < (int)a.sq.n_kv; j++)
        add_row_nonfinite(o, a.dim_v, v + (int64_t)(key + j) * a.v.s[1], j < left[0], j < left[1]);
}

/* S = Q K^T of a tile. */
template <typename T, int D>
__device__ __forceinline__ void multiply_keys(float (&c)[KEYS / 8][4], uint32_t rows, uint32_t keys)
{
    const uint64_t q = wg_fresh(wg_tile(rows, 0)), k = wg_fresh(wg_tile(keys, 0));
    wg_start();
#pragma unroll
    for (int i = 0; i < D; i += 16) {
        const uint32_t at = (i >> 6) * (64 * 128) + (i & 63) * 2;
        if (i == 0) wg_ss_wide<T, KEYS, false>(c, wg_further(q, at), wg_further(k, at));
        else wg_ss_wide<T, KEYS, true>(c, wg_further(q, at), wg_further(k, at));
    }
    wg_commit();
    wg_wait<0>(c);
}

/* O = P V of a tile, or O += P V. */
template <typename T, int D, bool ADD>
__device__ __forceinline__ void multiply_values(float (&o)[D / 8][4], const float (&s)[KEYS / 8][4],
                                                uint32_t values)
{
    uint32_t p[KEYS / 16][4];
    attend_parts::pack_rows<T>(s, p);
    const uint64_t v = wg_fresh(wg_tile(values, KEYS * 128));
    wg_start();
#pragma unroll
    for (int k = 0; k < KEYS; k += 16) {
        if (k == 0) wg_rs_wide<T, D, ADD, true>(o, p[0], v);
        else wg_rs_wide<T, D, true, true>(o, p[k / 16], wg_further(v, k * 128));
    }
    wg_commit();
    wg_wait<0>(o);
}

/* The power of two that brings the largest of a row's finite columns to [2^14, 2^15), for f16, as bits of a
 * float. */
template <int OT> __device__ __forceinline__ uint32_t find_scale(const float (&o)[OT][4], int h)
{
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < OT; i++) most = fmaxf(most, fmaxf(fabsf(o[i][h * 2]), fabsf(o[i][h * 2 + 1])));
    if (most == INFINITY) {
        most = 0.0f;
#pragma unroll
        for (int i = 0; i < OT; i++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (fabsf(o[i][h * 2 + c]) < INFINITY) most = fmaxf(most, fabsf(o[i][h * 2 + c]));
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const int exponent = 2 * 127 + 14 - (int)(__float_as_uint(most) >> 23);
    return (uint32_t)(exponent > 253 ? 253 : exponent) << 23;
}

/* Leaves the partial result of a thread's row h; of its four lanes each calls. */
template <int OT>
__device__ __forceinline__ void store_partial(const float (&o)[OT][4], const token_slice &s, int64_t row,
                                              int h, float top, float sum, bool mine)
{
    const uint32_t scale = find_scale(o, h);
    const float by = __uint_as_float(scale);
    if (!mine) return;
    uint4 *to = (uint4 *)s.parts + row * OT + (threadIdx.x & 3);
#pragma unroll
    for (int i = 0; i < OT; i += 4) {
        uint32_t x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = pack2<__half>(o[i + j][h * 2] * by, o[i + j][h * 2 + 1] * by);
        __stcs(to + i, make_uint4(x[0], x[1], x[2], x[3]));
    }
    if ((threadIdx.x & 3) == 0)
        __stcs((float4 *)s.stats + row, make_float4(top, sum, __uint_as_float((254u << 23) - scale), 0.0f));
}

/* How many keys of the block from `key` on a token sees. */
__device__ __forceinline__ int keys_left(const attend_kernel &a, const token_slice &s, int32_t id, int key,
                                         int keys)
{
    const int seen = a.causal ? s.query0 + (id >> RANK_BITS) + 1 : (int)a.sq.n_kv;
    return id < 0 ? keys : (seen < (int)a.sq.n_kv ? seen : (int)a.sq.n_kv) - key;
}

/* A tile of 64 rows over 64 keys from `key` on; ADD: to what they have from others. */
template <typename T, int D, bool ADD>
__device__ __forceinline__ void compute_keys(const attend_kernel &a, const token_slice &s, row_state &r,
                                             float (&o)[D / 8][4], const int (&left)[2], int key, bool clear,
                                             uint32_t rows, uint32_t keys, uint32_t values)
{
    constexpr int NT = KEYS / 8;
    float c[NT][4], shrink[2];
    multiply_keys<T, D>(c, rows, keys);
    if (!__all_sync(~0u, left[0] >= KEYS && left[1] >= KEYS))
#pragma unroll
        for (int i = 0; i < NT; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (i * 8 + (int)(threadIdx.x & 3) * 2 + (j & 1) >= left[j >> 1]) c[i][j] = -INFINITY;
    attend_parts::softmax(c, r, shrink, a.scale_log2);
    if (ADD)
#pragma unroll
        for (int i = 0; i < D / 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) o[i][j] *= shrink[j >> 1];
    multiply_values<T, D, ADD>(o, c, values);
    if (clear) add_nonfinite<T>(o, a, s, left, key);
}

/* A tile of 64 rows: their partial results over a block. `clear`: V was cleared of what was not finite. */
template <typename T, int D, int R, int SPAN>
__device__ __forceinline__ void compute_rows(const attend_kernel &a, const token_slice &s, int32_t id,
                                             int key, bool clear, uint32_t rows, uint32_t keys,
                                             uint32_t values)
{
    const int lane = threadIdx.x & 31;
    int32_t own[2];
    int left[2];
    float o[D / 8][4];
    row_state r = {{0, 0}, {0, 0}, {-INFINITY, -INFINITY}, {0.0f, 0.0f}};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        own[h] = __shfl_sync(~0u, id, ((lane >> 2) + h * 8) / R);
        left[h] = keys_left(a, s, own[h], key, SPAN * KEYS);
    }
    compute_keys<T, D, false>(a, s, r, o, left, key, clear, rows, keys, values);
    if constexpr (SPAN == 2) {
        const int rest[2] = {left[0] - KEYS, left[1] - KEYS};
        compute_keys<T, D, true>(a, s, r, o, rest, key + KEYS, clear, rows, keys + D * KEYS * 2,
                                 values + D * KEYS * 2);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = r.sum[h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int64_t slot = (int64_t)(own[h] >> RANK_BITS) * a.list_k + (own[h] & ((1 << RANK_BITS) - 1));
        store_partial(o, s, slot * R + ((lane >> 2) + h * 8) % R, h, r.top[h], sum, own[h] >= 0);
    }
}

/* An item: a block of keys and some of the tokens that chose it. */
template <typename T, int D, int R, int SPAN>
__global__ void __launch_bounds__(32 * WARPS, SPAN == 1 ? 3 : 2)
    attend_by_block_blocks(const __grid_constant__ attend_kernel a, const __grid_constant__ token_slice s,
                           const __grid_constant__ maps m)
{
#ifdef QUERN_WGMMA
    constexpr int TOKENS = ROWS / R, OF_WARP = 16 / R;
    extern __shared__ __align__(1024) char smem[];
    shared<D, SPAN> &sm = *(shared<D, SPAN> *)smem;
    const uint32_t k = smem_address(sm.k), v = smem_address(sm.v);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int32_t items = *s.item_count;
    const block_item item = s.items[blockIdx.x]; /* or nothing that is read */
    let_next_start();
    if ((int)blockIdx.x >= items) {
        wait_for_before(); /* the slice after the next one may write where the one before this was added */
        return;
    }
    const int key = item.block * KEYS * SPAN;
    if (threadIdx.x == 0) {
        sm.full.init(1);
        mbar_init_done();
        const uint32_t full = sm.full.expect({}, sizeof sm.k + sizeof sm.v);
#pragma unroll
        for (int i = 0; i < SPAN; i++) {
            tma_load_tile<D / 64, KEYS>(stage_address(sm.k, i), m.k, full, s.unit, key + i * KEYS, s.view);
            tma_load_tile<D / 64, KEYS>(stage_address(sm.v, i), m.v, full, s.unit, key + i * KEYS, s.view);
        }
    }
    auto own_id = [&](int tile) { return id_of(s, item, tile * TOKENS + warp * OF_WARP + lane % OF_WARP); };
    int32_t id = own_id(0), id_next = own_id(1);
    copy_rows<T, D, R>(a, s, id, stage_address(sm.q, 0));
    bool clear = false;
    for (int tile = 0; tile * TOKENS < item.count; tile++) {
        const uint32_t rows = stage_address(sm.q, tile & 1);
        cp_async_commit();
        cp_async_wait<0>();
        async_fence();
        __syncthreads(); /* the rows are there; so is the barrier */
        if (tile == 0) {
            sm.full.wait({});
            for (int i = 0; i < SPAN; i++) clear |= clean_values<T, D>((char *)sm.v[i]);
        }
        const int32_t id_after = own_id(tile + 2);
        copy_rows<T, D, R>(a, s, id_next, stage_address(sm.q, (tile & 1) ^ 1));
        compute_rows<T, D, R, SPAN>(a, s, id, key, clear, rows, k, v);
        id = id_next;
        id_next = id_after;
    }
    cp_async_commit();
    cp_async_wait<0>();
    wait_for_before();
#endif
}

/* Adds a token's partial results, R rows of 32 / R lanes; a warp has a token. The order of a row's columns is
 * that of store_partial(). */
template <typename T, int D, int R>
__global__ void __launch_bounds__(32 * MERGE_WARPS)
    attend_by_block_merge(const __grid_constant__ attend_kernel a, const __grid_constant__ token_slice s)
{
    constexpr int LANES = 32 / R, OWN = D / 8 / LANES, AHEAD = OWN > 4 ? MERGE_AHEAD / 2 : (int)MERGE_AHEAD;
    const int lane = threadIdx.x & 31, sub = lane % LANES, head = lane / LANES,
              list = (int)blockIdx.x * MERGE_WARPS + (threadIdx.x >> 5);
    wait_for_before();
    let_next_start();
    const int count = list < s.lists ? s.counts[list] : -1;
    if (count < 0) return;
    const int64_t row0 = (int64_t)list * a.list_k * R + head;
    const uint4 *from = (const uint4 *)s.parts + row0 * (D / 8) + sub;
    const float4 *stats = (const float4 *)s.stats + row0;
    float top = -INFINITY, sum = 0.0f;
    for (int i = sub; i < count; i += LANES) top = fmaxf(top, stats[i * R].x);
#pragma unroll
    for (int w = LANES / 2; w > 0; w /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, w));
    const float base = top == -INFINITY ? 0.0f : top * a.scale_log2;
    float o[OWN][8] = {};
    for (int i0 = 0; i0 < count; i0 += AHEAD) {
        uint4 x[AHEAD][OWN];
        float4 st[AHEAD]; /* maximum, sum, scale */
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const bool in = i0 + i < count;
            st[i] = in ? stats[(i0 + i) * R] : make_float4(-INFINITY, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int n = 0; n < OWN; n++)
                x[i][n] =
                    in ? __ldcs(from + (int64_t)(i0 + i) * R * (D / 8) + n * LANES) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const float weight = i0 + i < count ? exp2_fast(fmaf(st[i].x, a.scale_log2, -base)) : 0.0f,
                        by = weight * st[i].z;
            sum = fmaf(weight, st[i].y, sum);
#pragma unroll
            for (int n = 0; n < OWN; n++) {
                const uint32_t words[4] = {x[i][n].x, x[i][n].y, x[i][n].z, x[i][n].w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float2 two = unpack2<__half>(words[j]);
                    o[n][j * 2] = fmaf(by, two.x, o[n][j * 2]);
                    o[n][j * 2 + 1] = fmaf(by, two.y, o[n][j * 2 + 1]);
                }
            }
        }
    }
    const int64_t query = s.query0 + list;
    const int of = s.unit * R + head;
    const float by = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (sub == 0 && a.lse.p != NULL)
        a.lse.p[s.view * a.lse.s[0] + of * a.lse.s[1] + query * a.lse.s[2]] =
            sum == 0.0f ? -INFINITY : top * a.scale + logf(sum);
    T *to = (T *)a.o.p + s.view * a.o.s[0] + query * a.o.s[1] + of * a.o.s[2];
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        const int i = sub + n * LANES, c = i / 4 * 32 + i % 4 * 2;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (c + j * 8 < a.dim_v)
                *(uint32_t *)(to + c + j * 8) =
                    pack2<T>(o[n][j * 2] * by + 0.0f, o[n][j * 2 + 1] * by + 0.0f);
    }
}

/* A slice's partial results, and their sums. Each kernel may start before the one before it ends: sums wait
 * for their partial results at once, those for the sums of the slice before at their end. */
template <typename T, int D, int R, int SPAN>
static quern_status run_slice(const attend_args *args, const attend_kernel &a, const token_slice &s,
                              cudaStream_t stream)
{
    const char *const name = "attend_forward_sm90_by_block";
    const dim3 grid((unsigned)s.most_items);
    maps m;
    quern_status status = tma_describe_tiles(&m.k, args->k, KEYS, D / 64);
    if (status == QUERN_OK) status = tma_describe_tiles(&m.v, args->v, KEYS, D / 64);
    if (status == QUERN_OK && s.first)
        status = launch_shared({stream, NULL}, attend_by_block_blocks<T, D, R, SPAN>, grid, 32 * WARPS,
                               sizeof(shared<D, SPAN>), name, a, s, m);
    else if (status == QUERN_OK)
        status = launch_behind(stream, attend_by_block_blocks<T, D, R, SPAN>, grid, 32 * WARPS,
                               sizeof(shared<D, SPAN>), name, a, s, m);
    if (status != QUERN_OK) return status;
    return launch_behind(stream, attend_by_block_merge<T, D, R>, dim3(blocks_for(s.lists, MERGE_WARPS)),
                         32 * MERGE_WARPS, 0, name, a, s);
}

template <typename T, int D>
static quern_status run(const attend_args *args, const attend_kernel &a, const token_slice &s,
                        cudaStream_t stream)
{
    return a.hs == 4   ? run_slice<T, D, 4, 1>(args, a, s, stream)
           : a.hs == 8 ? run_slice<T, D, 8, 1>(args, a, s, stream)
                       : run_slice<T, D, 16, 2>(args, a, s, stream);
}

} // namespace sm90_by_block

#endif
