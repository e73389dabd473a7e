/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * tensor.cuh - items of the block indexer's loss on the tensor cores of any GPU, for bf16 and f16.
 *
 * A block holds an item's keys of attention and of the indexer in shared memory. 64 of the queries that chose
 * them are a step; each of eight warps has eight of these:
 *
 *   z = key_index q_index^T   of its eight queries at once, 128 x 8
 *   S = q key^T               a query's heads, 16 at a time, against the 128 keys; q goes from memory to
 *                             registers while the query before it is computed
 *   T, P, g = P - T           sums over heads stay in registers: each lane has four keys at the end
 *   d_q_index = g key_index   of its eight queries at once
 *   d_keys += g^T q_index     a warp has 16 keys, of all 64 queries of the step, and keeps them in registers
 *
 * Channels of q and key meet in an order of their own: a lane reads eight that follow one another, so that
 * a fragment is a load of 16 bytes on either side. Elements that are not finite become 0 in the last two
 * products, and what sees them gets them afterwards: 0 does not undo a NaN. g is 2^8 times itself in f16.
 *
 * Limit: shared memory, from which each query reads the keys, 32 KB at D 128: 256 clocks.
 */
#ifndef QUERN_CUDA_INDEX_LOSS_TENSOR_CUH
#define QUERN_CUDA_INDEX_LOSS_TENSOR_CUH

#include "common/nonfinite.cuh"
#include "index_loss/params.cuh"

namespace index_loss
{

enum { OWN = 8, STEP = OWN * WARPS, WIDTH = 128, WIDTH_ROW = WIDTH + 8, HEADS = 16, SCORES_ROW = KEYS + 4 };

/* Rows of keys begin four chunks of 16 bytes apart modulo 8, those of the indexer one: no bank conflicts. */
template <typename T, int DP> struct tensor_shared {
    T key[KEYS][DP + 32];
    T key_index[KEYS][WIDTH_ROW];
    T q_index[STEP][WIDTH_ROW];
    int32_t seen[STEP];
    float scores[STEP][SCORES_ROW]; /* z, then g in place of it; not while weighing */

    __device__ __forceinline__ T *gradient(int row) { return (T *)scores[row]; }
};

template <typename T> struct is_bf16 {
    static constexpr bool value = false;
};
template <> struct is_bf16<bf16> {
    static constexpr bool value = true;
};
template <typename T> struct gradient_power {
    static constexpr float up = is_bf16<T>::value ? 1.0f : 256.0f;
};

template <typename T> static __device__ __forceinline__ void make_finite(uint32_t (&x)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] &= ~nonfinite_halves<T>(x[i]);
}

/* ROWS rows of a tile from those of `at`, NULL: zeros. Returns whether this thread saw what is not finite. */
template <typename T, int ROWS, int COLUMNS, int ROW, int BY, typename At>
static __device__ __forceinline__ bool load_tile(T (*to)[ROW], int thread, int dim, const At &at)
{
    constexpr int CHUNKS = COLUMNS / 8;
    uint32_t odd = 0;
#pragma unroll 4
    for (int i = thread; i < ROWS * CHUNKS; i += BY) {
        const int row = i / CHUNKS, column = i % CHUNKS * 8;
        const T *const from = at(row);
        uint4 x = make_uint4(0, 0, 0, 0);
        if (from != NULL && column < dim) x = __ldg((const uint4 *)(from + column));
        odd |= nonfinite_halves<T>(x.x) | nonfinite_halves<T>(x.y) | nonfinite_halves<T>(x.z) |
               nonfinite_halves<T>(x.w);
        *(uint4 *)(to[row] + column) = x;
    }
    return odd != 0;
}

/* What lane i % 8 knows of query i of its warp's eight, and which of these there are. */
struct own_queries {
    int32_t query, seen;
    int64_t part;
    float lse_index;
    uint32_t wanted; /* in all lanes */
};

template <bool WEIGHS>
static __device__ __forceinline__ own_queries take_queries(const params &p, const item &x, int step,
                                                           int *count)
{
    const int left = min((int)STEP, x.count - step), each = (left + WARPS - 1) / WARPS,
              lane = threadIdx.x % 32, first = (int)(threadIdx.x / 32) * each;
    *count = max(0, min(each, left - first));
    own_queries own = {0, 0, 0, 0.0f, 0};
    bool wanted = false;
    if (lane % OWN < *count) {
        const int32_t entry = x.entries[step + first + lane % OWN];
        own.query = (int32_t)(entry / p.k);
        own.part = part_of(p, x.list, entry, x.sub);
        own.seen = item_seen(p, x, own.query);
        const int64_t row = x.list * p.queries + own.query;
        if (WEIGHS) {
            float lse;
            for (int64_t h = lane / OWN; !wanted && h < p.group; h += 32 / OWN)
                wanted = !given_lse(p, p.first + own.query, x.list * p.group + h, &lse);
        } else {
            wanted = p.idle[row] == 0;
            if (!wanted) own.seen = 0;
            own.lse_index = p.lse_index[row];
        }
    }
    const uint32_t all = __ballot_sync(~0u, wanted);
    own.wanted = (all | all >> 8 | all >> 16 | all >> 24) & 0xff;
    return own;
}

/* z of the warp's eight queries: keys 16 m + lane / 4 (+ 8), queries lane % 4 * 2 (+ 1). */
template <typename T, int DP>
static __device__ __forceinline__ void score_index(const tensor_shared<T, DP> &m, const params &p, int keys,
                                                   float (&z)[KEYS / 16][4])
{
    const int lane = threadIdx.x % 32, row0 = (int)(threadIdx.x / 32) * OWN;
#pragma unroll
    for (int k0 = 0; k0 < WIDTH; k0 += 32) {
        uint32_t b[4];
        if (k0 >= p.width) continue;
        ldmatrix4(b, smem_address(&m.q_index[row0 + lane % 8][k0 + lane / 8 * 8]));
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
            uint32_t a[4];
            if (i * 16 >= keys) continue;
#pragma unroll
            for (int s = 0; s < 2; s++) {
                ldmatrix4(a, smem_address(&m.key_index[i * 16 + lane % 16][k0 + s * 16 + lane / 16 * 8]));
                mma16816<T>(z[i], a, b[s * 2], b[s * 2 + 1]);
            }
        }
    }
}

/* Maximum and sum of the eight queries' z. */
static __device__ __forceinline__ void weigh_index(const params &p, const own_queries &own, int count,
                                                   const float (&z)[KEYS / 16][4])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const int i = lane % 4 * 2 + c, seen = __shfl_sync(~0u, own.seen, i);
        const int64_t part = __shfl_sync(~0u, own.part, i);
        float most = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
            if (j * 8 + lane / 4 < seen) most = fmaxf(most, z[j / 2][j % 2 * 2 + c] * p.scale_index2);
        for (int by = 4; by <= 16; by *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
        const float from = most == -INFINITY ? 0.0f : most;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
            if (j * 8 + lane / 4 < seen)
                sum += exp2_fast(fmaf(z[j / 2][j % 2 * 2 + c], p.scale_index2, -from));
        for (int by = 4; by <= 16; by *= 2) sum += __shfl_xor_sync(~0u, sum, by);
        if (lane < 4 && i < count) p.student[part] = make_float2(most, sum);
    }
}

/* Leaves z in shared memory, and g = 0 of queries that have none. */
template <typename T, int DP>
static __device__ __forceinline__ void put_scores(tensor_shared<T, DP> &m, const own_queries &own,
                                                  const float (&z)[KEYS / 16][4])
{
    const int lane = threadIdx.x % 32, row0 = (int)(threadIdx.x / 32) * OWN;
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            m.scores[row0 + lane % 4 * 2 + c][j * 8 + lane / 4] = z[j / 2][j % 2 * 2 + c];
    __syncwarp();
    for (int i = 0; i < OWN; i++)
        if ((own.wanted >> i & 1) == 0) *(uint2 *)(m.gradient(row0 + i) + lane * 4) = make_uint2(0, 0);
}

/* 16 heads of a query: rows lane / 4 and that + 8, eight channels of each 32. */
template <int DP> struct query_heads {
    uint4 x[DP / 32][2];
    float lse2[2]; /* INFINITY where there is no head */
};

template <typename T, int DP, bool WEIGHS>
static __device__ __forceinline__ void load_heads(query_heads<DP> &q, const params &p, const item &x,
                                                  int32_t query, int chunk)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t head = chunk * HEADS + h * 8 + lane / 4;
        const bool here = head < p.group;
        const T *const row = query_row<T>(p, p.q, x, query, x.list * p.group + (here ? head : 0));
#pragma unroll
        for (int k = 0; k < DP / 32; k++) {
            const int column = k * 32 + lane % 4 * 8;
            q.x[k][h] = make_uint4(0, 0, 0, 0);
            if (here && column < p.dim) q.x[k][h] = __ldg((const uint4 *)(row + column));
        }
        if (!WEIGHS) q.lse2[h] = here ? p.lse2[(x.list * p.queries + query) * p.group + head] : INFINITY;
    }
}

/* S of 16 heads and 64 keys. */
template <typename T, int DP>
static __device__ __forceinline__ void score_heads(const tensor_shared<T, DP> &m, const query_heads<DP> &q,
                                                   int key0, float (&s)[8][4])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[j][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < DP / 32; k++) {
        const uint4 low = q.x[k][0], high = q.x[k][1];
        const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint4 b = *(const uint4 *)&m.key[key0 + j * 8 + lane / 4][k * 32 + lane % 4 * 8];
            mma16816<T>(s[j], a[0], b.x, b.y);
            mma16816<T>(s[j], a[1], b.z, b.w);
        }
    }
}

/* Two heads' maxima and sums over 64 keys more; four lanes have a head. */
static __device__ __forceinline__ void weigh_heads(const params &p, const float (&s)[8][4], int seen,
                                                   float2 (&of)[2])
{
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most = of[h].x, sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (j * 8 + column + c < seen) most = fmaxf(most, s[j][h * 2 + c] * p.scale2);
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float from = most == -INFINITY ? 0.0f : most;
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (j * 8 + column + c < seen) sum += exp2_fast(fmaf(s[j][h * 2 + c], p.scale2, -from));
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float old = of[h].x == -INFINITY ? 0.0f : of[h].y * exp2_fast(of[h].x - from);
        of[h] = make_float2(most, old + sum);
    }
}

/* Rows without a head: 0 times what is not finite is no score. */
static __device__ __forceinline__ void hide_heads(const float (&lse2)[2], float (&s)[8][4])
{
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (lse2[e / 2] == INFINITY) s[j][e] = 0.0f;
}

/* The first half of x over both, as lanes `by` apart: each gets the half that its bit names. */
template <int N> static __device__ __forceinline__ void fold(float (&x)[16][2], int by)
{
    const bool upper = (threadIdx.x & by) != 0;
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float kept = upper ? x[i + N][c] : x[i][c], sent = upper ? x[i][c] : x[i + N][c];
            x[i][c] = kept + __shfl_xor_sync(~0u, sent, by);
        }
}

/* T's sums over heads and z become the query's terms of the loss, and g in place of z. */
template <typename T, int DP>
static __device__ __forceinline__ void compare(tensor_shared<T, DP> &m, const params &p, float (&t)[16][2],
                                               int row, int seen, int64_t part, float lse_index)
{
    fold<8>(t, 16);
    fold<4>(t, 8);
    fold<2>(t, 4);
    const int lane = threadIdx.x % 32, key = lane / 4 * 16 + lane % 4 * 2;
    const float by_group = 1.0f / (float)p.group;
    float loss = 0.0f, total = 0.0f, g[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float log2_p = fmaf(m.scores[row][key + i * 8 + c], p.scale_index2, -lse_index),
                        teacher = t[i][c] * by_group;
            const bool sees = key + i * 8 + c < seen;
            g[i][c] = sees ? (exp2_fast(log2_p) - teacher) * gradient_power<T>::up : 0.0f;
            if (sees) loss += teacher * (__log2f(fmaxf(teacher, 1e-10f)) - log2_p);
            if (sees) total += teacher;
        }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        loss += __shfl_xor_sync(~0u, loss, by);
        total += __shfl_xor_sync(~0u, total, by);
    }
    if (lane == 0) p.terms[part] = make_float2(loss * 0.69314718f, total);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; i++) *(uint32_t *)(m.gradient(row) + key + i * 8) = pack2<T>(g[i][0], g[i][1]);
}

/* A warp's queries: their sums over keys, or T, P and g. */
template <typename T, int DP, bool WEIGHS>
static __device__ __forceinline__ void walk_queries(tensor_shared<T, DP> &m, const params &p, const item &x,
                                                    const own_queries &own)
{
    const int lane = threadIdx.x % 32, row0 = (int)(threadIdx.x / 32) * OWN,
              chunks = (int)((p.group + HEADS - 1) / HEADS), halves = x.keys > KEYS / 2 ? 2 : 1;
    uint32_t left = own.wanted;
    query_heads<DP> q;
    q.lse2[0] = q.lse2[1] = 0.0f;
    if (left != 0) load_heads<T, DP, WEIGHS>(q, p, x, __shfl_sync(~0u, own.query, __ffs((int)left) - 1), 0);
    while (left != 0) {
        const int i = __ffs((int)left) - 1, seen = __shfl_sync(~0u, own.seen, i);
        const int64_t part = __shfl_sync(~0u, own.part, i);
        float t[16][2];
#pragma unroll
        for (int j = 0; j < 16; j++) t[j][0] = t[j][1] = 0.0f;
        left &= left - 1;
        for (int chunk = 0; chunk < chunks; chunk++) {
            const bool last = chunk + 1 == chunks;
            const int next = !last ? i : left != 0 ? __ffs((int)left) - 1 : -1;
            const int32_t next_query = __shfl_sync(~0u, own.query, next < 0 ? 0 : next);
            const float lse2[2] = {q.lse2[0], q.lse2[1]};
            float2 of[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float s[8][4];
                if (half >= halves) continue;
                score_heads(m, q, half * 64, s);
                if (half + 1 == halves && next >= 0)
                    load_heads<T, DP, WEIGHS>(q, p, x, next_query, last ? 0 : chunk + 1);
                if (WEIGHS) {
                    weigh_heads(p, s, seen - half * 64, of);
                    continue;
                }
                if (p.group % HEADS != 0) hide_heads(lse2, s);
#pragma unroll
                for (int j = 0; j < 8; j++)
#pragma unroll
                    for (int c = 0; c < 2; c++)
                        t[half * 8 + j][c] += exp2_fast(fmaf(s[j][c], p.scale2, -lse2[0])) +
                                              exp2_fast(fmaf(s[j][2 + c], p.scale2, -lse2[1]));
            }
#pragma unroll
            for (int h = 0; WEIGHS && h < 2; h++) {
                const int head = chunk * HEADS + h * 8 + lane / 4;
                if (lane % 4 == 0 && head < p.group) p.teacher[part * p.group + head] = of[h];
            }
        }
        if (!WEIGHS) compare(m, p, t, row0 + i, seen, part, __shfl_sync(~0u, own.lse_index, i));
    }
}

/* Parts of d_q_index of the warp's queries. `odd`: of the item's keys some elements are not finite. */
template <typename T, int DP>
static __device__ __forceinline__ void give_d_q(tensor_shared<T, DP> &m, const params &p, const item &x,
                                                const own_queries &own, int count, bool odd)
{
    const int lane = threadIdx.x % 32, row0 = (int)(threadIdx.x / 32) * OWN;
    float d_q[WIDTH / 16][4] = {};
#pragma unroll
    for (int k0 = 0; k0 < KEYS; k0 += 32) {
        uint32_t b[4];
        if (k0 >= x.keys) continue;
        ldmatrix4(b, smem_address(m.gradient(row0 + lane % 8) + k0 + lane / 8 * 8));
#pragma unroll
        for (int i = 0; i < WIDTH / 16; i++) {
            uint32_t a[4];
            if (i * 16 >= p.width) continue;
#pragma unroll
            for (int s = 0; s < 2; s++) {
                ldmatrix4_trans(a, smem_address(&m.key_index[k0 + s * 16 + lane % 8 + lane / 16 * 8]
                                                            [i * 16 + lane / 8 % 2 * 8]));
                if (odd) make_finite<T>(a);
                mma16816<T>(d_q[i], a, b[s * 2], b[s * 2 + 1]);
            }
        }
    }
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const int i = lane % 4 * 2 + c, seen = __shfl_sync(~0u, own.seen, i);
        float *const to = p.d_q + __shfl_sync(~0u, own.part, i) * p.width;
#pragma unroll 1
        for (int s = 0; odd && s < seen; s++) {
            const float g = to_float(m.gradient(row0 + i)[s]);
#pragma unroll
            for (int j = 0; j < WIDTH / 8; j++) {
                const float key = to_float(m.key_index[s][j * 8 + lane / 4]);
                if (!isfinite(key)) d_q[j / 2][j % 2 * 2 + c] += g * key;
            }
        }
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++)
            if (i < count && j * 8 + lane / 4 < p.width)
                to[j * 8 + lane / 4] = d_q[j / 2][j % 2 * 2 + c] * (1.0f / gradient_power<T>::up);
    }
}

/* The step's part of the gradient of the warp's 16 keys. `odd`: of the queries something is not finite. */
template <typename T, int DP>
static __device__ __forceinline__ void add_d_keys(tensor_shared<T, DP> &m, const params &p,
                                                  float (&d_keys)[WIDTH / 8][4], bool odd)
{
    const int lane = threadIdx.x % 32, key0 = (int)(threadIdx.x / 32) * 16;
#pragma unroll
    for (int row = 0; row < STEP; row += 16) {
        uint32_t a[4];
        ldmatrix4_trans(
            a, smem_address(m.gradient(row + lane % 8 + lane / 16 * 8) + key0 + lane / 8 % 2 * 8));
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j += 2) {
            uint32_t b[4];
            if (j * 8 >= p.width) continue;
            ldmatrix4_trans(b, smem_address(&m.q_index[row + lane % 16][j * 8 + lane / 16 * 8]));
            if (odd) make_finite<T>(b);
            mma16816<T>(d_keys[j], a, b[0], b[1]);
            mma16816<T>(d_keys[j + 1], a, b[2], b[3]);
        }
    }
#pragma unroll 1
    for (int row = 0; odd && row < STEP; row++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int key = key0 + lane / 4 + h * 8;
            if (key >= m.seen[row]) continue;
            const float g = to_float(m.gradient(row)[key]);
#pragma unroll
            for (int j = 0; j < WIDTH / 8; j++) {
                const uint32_t q = *(const uint32_t *)&m.q_index[row][j * 8 + lane % 4 * 2];
                const float2 two = unpack2<T>(q & nonfinite_halves<T>(q));
                if (nonfinite_halves<T>(q) == 0) continue;
                if (!isfinite(two.x)) d_keys[j][h * 2] = fmaf(g, two.x, d_keys[j][h * 2]);
                if (!isfinite(two.y)) d_keys[j][h * 2 + 1] = fmaf(g, two.y, d_keys[j][h * 2 + 1]);
            }
        }
    }
}

/* Adds them to the sums of earlier slices. */
template <typename T>
static __device__ __forceinline__ void store_d_keys(const params &p, const item &x,
                                                    const float (&d_keys)[WIDTH / 8][4])
{
    const int lane = threadIdx.x % 32, key0 = (int)(threadIdx.x / 32) * 16;
    const float down = 1.0f / gradient_power<T>::up;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int key = key0 + lane / 4 + h * 8;
        if (key >= x.keys) continue;
        float *const to = sums_row(p, x, key);
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) {
            const int column = j * 8 + lane % 4 * 2;
            if (column >= p.width) continue;
            float2 *const two = (float2 *)(to + column);
            const float2 old = *two;
            *two = make_float2(fmaf(d_keys[j][h * 2], down, old.x), fmaf(d_keys[j][h * 2 + 1], down, old.y));
        }
    }
}

template <typename T, int DP, bool WEIGHS>
static __global__ void __launch_bounds__(THREADS, WEIGHS && DP <= 128 ? 2 : 1)
    index_loss_tensor(const __grid_constant__ params p)
{
    extern __shared__ __align__(16) char memory[];
    tensor_shared<T, DP> &m = *(tensor_shared<T, DP> *)memory;
    const int lane = threadIdx.x % 32, row0 = (int)(threadIdx.x / 32) * OWN;
    item x;
    if (!item_at(p, blockIdx.x, &x)) return;
    load_tile<T, KEYS, DP, DP + 32, THREADS>(m.key, threadIdx.x, p.dim, [&](int row) -> const T * {
        return row < x.keys ? key_row<T>(p.key, x, row, x.list) : NULL;
    });
    const bool odd_keys = __syncthreads_or(load_tile<T, KEYS, WIDTH, WIDTH_ROW, THREADS>(
        m.key_index, threadIdx.x, p.width, [&](int row) -> const T * {
            return row < x.keys ? key_row<T>(p.key_index, x, row, p.shared ? 0 : x.list) : NULL;
        }));
    float d_keys[WIDTH / 8][4] = {};
    for (int step = 0; step < x.count; step += STEP) {
        int count;
        const own_queries own = take_queries<WEIGHS>(p, x, step, &count);
        if (lane < OWN) m.seen[row0 + lane] = lane < count ? own.seen : 0;
        const bool odd = load_tile<T, OWN, WIDTH, WIDTH_ROW, 32>(
            m.q_index + row0, lane, p.width, [&](int row) -> const T * {
                const int32_t query = __shfl_sync(~0u, own.query, row);
                return row < count ? query_row<T>(p, p.q_index, x, query, x.list) : NULL;
            });
        __syncwarp();
        float z[KEYS / 16][4] = {};
        score_index(m, p, x.keys, z);
        if constexpr (WEIGHS) {
            weigh_index(p, own, count, z);
            walk_queries<T, DP, true>(m, p, x, own);
            __syncwarp();
        } else {
            put_scores(m, own, z);
            walk_queries<T, DP, false>(m, p, x, own);
            __syncwarp();
            if (p.d_q != NULL) give_d_q(m, p, x, own, count, odd_keys);
            const bool odd_rows = __syncthreads_or(odd);
            if (p.d_keys != NULL && (int)(threadIdx.x / 32) * 16 < x.keys) add_d_keys(m, p, d_keys, odd_rows);
            __syncthreads();
        }
    }
    if constexpr (!WEIGHS) {
        if (p.d_keys != NULL) store_d_keys<T>(p, x, d_keys);
    }
}

template <typename T, int DP>
static quern_status tensor_of(const params &p, bool weighs, cudaStream_t stream)
{
    const dim3 items((unsigned)(p.lists * p.blocks * p.subs));
    const size_t bytes = sizeof(tensor_shared<T, DP>);
    if (!weighs)
        return launch_shared({stream, NULL}, index_loss_tensor<T, DP, false>, items, THREADS, bytes,
                             "index_loss, items", p);
    return launch_shared({stream, NULL}, index_loss_tensor<T, DP, true>, items, THREADS,
                         bytes - sizeof(tensor_shared<T, DP>::scores), "index_loss, sums of items", p);
}

} // namespace index_loss

#endif
