/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * select.cuh - scores stream into top-k lists; no score matrix in memory.
 *
 * A block of eight warps owns LISTS lists (tiles x units) and walks the compressed entries 64 at a time.
 * Scorers put 64 scores per list into shared memory:
 *   softmax, bf16/f16: tensor cores; a list of <= 16 packed rows is one warp's m16 tile, a longer one is
 *     walked by all eight warps in chunks of 128 rows; p = exp(s - lse), summed over the rows in a fixed order;
 *   softmax, f32, and mean_logit: f32 cores (the mean of Q is f32).
 * Then warp w maps entries to selection blocks for list w (each entry weighs as often as the spatial overlap
 * counts it) and inserts what beats the list's worst into a sorted list. Scores are compared as integers whose
 * order is: NaN < -inf < finite; ties keep the earlier, so the lower, index. Forced blocks skip the contest.
 */
#ifndef QUERN_CUDA_SELECT_CUH
#define QUERN_CUDA_SELECT_CUH

#include "any/select/select_launch.cuh"

/* Larger is better; 0 is reserved for an empty slot. */
__device__ __forceinline__ uint32_t order_of(float x)
{
    if (isnan(x)) return 1;
    const uint32_t u = __float_as_uint(x == 0.0f ? 0.0f : x);
    return (u & 0x80000000u ? ~u : u | 0x80000000u);
}

__device__ __forceinline__ int64_t q_end_of(int64_t first, int64_t tile, int64_t nq) { return first + tile < nq ? first + tile : nq; }

/* One list being filled: sorted by falling order; entries of equal order in order of arrival. Warp-wide. */
struct best_list {
    uint32_t *key;
    int32_t *index;
    int size;
};

__device__ __forceinline__ void insert(const best_list &b, uint32_t key, int32_t index, int lane)
{
    if (b.size == 0 || key <= b.key[b.size - 1]) return;
    int at = 0; /* how many stay before it */
    for (int i = lane; i < b.size; i += 32) at += b.key[i] >= key;
    for (int w = 16; w > 0; w /= 2) at += __shfl_xor_sync(~0u, at, w);
    __syncwarp(); /* all have read the list; a shuffle orders no memory */
    for (int top = b.size - 1; top > at; top -= 32) { /* shift right, from the end */
        const int i = top - lane;
        uint32_t k = 0;
        int32_t x = 0;
        if (i > at) k = b.key[i - 1], x = b.index[i - 1];
        __syncwarp();
        if (i > at) b.key[i] = k, b.index[i] = x;
        __syncwarp();
    }
    if (lane == 0) b.key[at] = key, b.index[at] = index;
    __syncwarp();
}

/* Offers 32 candidates at once; `valid` lanes hold one each, rising with the lane. */
__device__ __forceinline__ void offer(const best_list &b, bool valid, float score, int32_t index, int lane)
{
    const uint32_t key = valid ? order_of(score) : 0;
    uint32_t mask = __ballot_sync(~0u, valid && b.size > 0 && key > b.key[b.size - 1]);
    while (mask != 0) {
        const int from = __ffs(mask) - 1;
        mask &= mask - 1;
        insert(b, __shfl_sync(~0u, key, from), __shfl_sync(~0u, index, from), lane);
    }
}

/* Writes forced entries [0, f0) and [g0, g1), and what the list holds, ascending and padded. Warp-wide. */
static __device__ void write_list(const best_list &b, int64_t f0, int64_t g0, int64_t g1, int32_t *dst, int k, int32_t *count, int lane)
{
    const int forced = (int)(f0 + (g1 - g0));
    int kept = 0;
    for (int i = lane; i < b.size; i += 32) kept += b.key[i] != 0;
    for (int w = 16; w > 0; w /= 2) kept += __shfl_xor_sync(~0u, kept, w);
    for (int i = lane; i < forced + kept; i += 32) {
        const int64_t x = i < f0 ? i : i < forced ? g0 + (i - f0) : b.index[i - forced];
        int at = 0;
        for (int j = 0; j < kept; j++) at += b.index[j] < x;
        at += (int)(x < f0 ? x : f0) + (int)(x < g0 ? 0 : x < g1 ? x - g0 : g1 - g0);
        dst[at] = (int32_t)x;
    }
    for (int i = forced + kept + lane; i < k; i += 32) dst[i] = -1;
    if (count != NULL && lane == 0) *count = forced + kept;
}

/* Chunk `chunk` of row `row` of a tile, or zeros where src is NULL; `any` is an address to name then. */
template <typename T, int ROWS>
__device__ __forceinline__ void load_row(const void *any, uint32_t tile, char *tile_ptr, int row, int chunk, const T *src, int dim, bool vec)
{
    const bool valid = src != NULL && chunk * 8 < dim;
    load_chunk16<T>(tile, tile_ptr, tile_at<ROWS>(row, chunk), valid ? src + chunk * 8 : (const T *)any, valid, vec);
}

/* MODE 0: mean_logit; 1: softmax on f32 cores; 2: softmax on tensor cores, <= 16 rows a list; 3: the same, any
 * number of rows. LISTS lists a block: 8 for modes 0 and 2, 1 for modes 1 and 3. */
template <typename T, int DP, int MODE>
__global__ void __launch_bounds__(THREADS, DP <= 128 ? 2 : 1) select_blocks(const __grid_constant__ select_kernel s)
{
    constexpr int LISTS = MODE == 0 || MODE == 2 ? WARPS : 1, CHUNKS = DP / 8, NT = KEYS / 8;
    constexpr bool CORES = MODE >= 2;
    const attend_kernel &a = s.a;
    const int LD = CORES ? DP : a.dim_k + 1; /* f32 rows of an odd length, free of bank conflicts */
    extern __shared__ __align__(128) char smem[];
    char *sq = smem, *sk = sq + (CORES ? 128 * DP * 2 : (MODE == 0 ? LISTS : 64) * LD * 4);
    float *history = (float *)(sk + (CORES ? 2 * KEYS * DP * 2 : KEYS * LD * 4)); /* [LISTS][MAX_HISTORY + KEYS] */
    float *partial = history + LISTS * (MAX_HISTORY + KEYS);                 /* [WARPS][KEYS] */
    uint32_t *keys = (uint32_t *)(partial + WARPS * KEYS);                    /* [LISTS][k] */
    int32_t *indices = (int32_t *)(keys + LISTS * s.k);
    uint32_t *group_keys = (uint32_t *)(indices + LISTS * s.k);
    int32_t *group_indices = (int32_t *)(group_keys + LISTS * s.c);
    const uint32_t aq = smem_address(sq), ak0 = smem_address(sk);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, u = blockIdx.y;
    const int64_t vb = blockIdx.z;

    /* The lists of this block: LISTS consecutive list rows, of one sequence each; they may differ in sequence
     * only for packed batches, where a block takes one list row per warp but shares keys, so a row of another
     * sequence ends the block's share and starts the next block. */
    sequence seq, other;
    int64_t q_first, q_other;
    const int64_t row0 = (int64_t)blockIdx.x * LISTS;
    int32_t done_rows = 0;
    while (done_rows < LISTS) {
        const int64_t row_begin = row0 + done_rows;
        const int64_t global = a.sq.cu_q == NULL ? vb * s.list_rows + row_begin : row_begin;
        if (row_begin >= s.list_rows) return;
        if (!piece_at(a.sq, global, a.tile, 1, &seq, &q_first)) { /* unused rows of a packed batch */
            if (warp == 0)
                for (int64_t row = row_begin; row < s.list_rows && row < row0 + LISTS; row++) {
                    for (int i = lane; i < s.k; i += 32) s.idx[vb * s.idx_stride[0] + u * s.idx_stride[1] + row * s.idx_stride[2] + i] = -1;
                    for (int i = lane; i < s.c; i += 32) s.groups[vb * s.group_stride[0] + u * s.group_stride[1] + row * s.group_stride[2] + i] = -1;
                    if (s.count != NULL && lane == 0) s.count[vb * s.count_stride[0] + u * s.count_stride[1] + row * s.count_stride[2]] = 0;
                }
            return;
        }
        int lists = 1;
        while (lists < LISTS - done_rows && row_begin + lists < s.list_rows && piece_at(a.sq, global + lists, a.tile, 1, &other, &q_other) &&
               other.b == seq.b)
            lists++;
        done_rows += lists;

        const int kvh = a.units == a.heads ? u / a.group : u, head0 = a.units == a.heads ? u : u * a.group;
        const T *q = (const T *)a.q.p + seq.view_b * a.q.s[0] + seq.q0 * a.q.s[1] + head0 * a.q.s[2];
        const T *k = (const T *)a.k.p + seq.view_b * a.k.s[0] + seq.k0 * a.k.s[1] + kvh * a.k.s[2];

        /* This warp's list. */
        const int64_t q0 = q_first + (int64_t)warp * a.tile;
        const bool mine = warp < lists;
        const int64_t q_end = q0 + a.tile < seq.nq ? q0 + a.tile : seq.nq, q_last = q_end - 1;
        const int64_t blocks = (seq.nq + s.select_block - 1) / s.select_block;
        int ignore, seen_last = 0, seen_first = 0;
        if (mine) row_keys(a, seq, q_last, &ignore, &seen_last), row_keys(a, seq, q0, &ignore, &seen_first);
        int64_t candidates = a.causal ? q_last / s.select_block + 1 : blocks;
        int64_t f0 = s.forced_first < candidates ? s.forced_first : candidates, g0 = 0, g1 = 0;
        if (a.causal && s.forced_local > 0) {
            g1 = candidates;
            g0 = q0 / s.select_block - (s.forced_local - 1);
            if (g0 < f0) g0 = f0;
            if (g0 > g1) g0 = g1;
        }
        const int contest = s.k - (int)(f0 + (g1 - g0));
        const best_list best = {keys + warp * s.k, indices + warp * s.k, contest > 0 ? contest : 0};
        /* Groups: kept always are the newest visible to the last query and the newest visible to the first. */
        const int64_t groups_seen = (seen_last + GROUP - 1) / GROUP;
        const int64_t keep_last = a.causal && seen_last > 0 ? (seen_last - 1) / GROUP : -1;
        const int64_t keep_first = a.causal && seen_first > 0 ? (seen_first - 1) / GROUP : -1;
        const int kept_groups = keep_last < 0 ? 0 : keep_first < 0 || keep_first == keep_last ? 1 : 2;
        const best_list best_group = {group_keys + warp * s.c, group_indices + warp * s.c, s.c > kept_groups ? s.c - kept_groups : 0};
        if (mine) {
            for (int i = lane; i < s.k; i += 32) best.key[i] = 0;
            for (int i = lane; i < s.c; i += 32) best_group.key[i] = 0;
            for (int i = lane; i < MAX_HISTORY + KEYS; i += 32) history[warp * (MAX_HISTORY + KEYS) + i] = 0.0f;
        }
        __syncthreads();

        /* Q of the lists: rows (mode 2), or the mean over a list's rows in f32 (mode 0). */
        if (MODE == 2) {
            for (int i = threadIdx.x; i < 128 * CHUNKS; i += THREADS) {
                const int r = i / CHUNKS, list = r / 16, row = r % 16;
                const int64_t query = q_first + (int64_t)list * a.tile + row / a.hs;
                const bool in = list < lists && row < a.tile * a.hs && query < seq.nq;
                load_row<T, 128>(a.q.p, aq, sq, r, i % CHUNKS, in ? q + query * a.q.s[1] + row % a.hs * a.q.s[2] : NULL, a.dim_k, a.vec_q);
            }
            cp_async_commit();
        }
        if (MODE == 0) {
            float *mean = (float *)sq;
            for (int i = threadIdx.x; i < lists * a.dim_k; i += THREADS) {
                const int list = i / a.dim_k, c = i % a.dim_k;
                const int64_t from = q_first + (int64_t)list * a.tile, to = from + a.tile < seq.nq ? from + a.tile : seq.nq;
                float sum = 0.0f;
                for (int64_t n = from; n < to; n++)
                    for (int h = 0; h < a.hs; h++) sum += to_float<T>(q[n * a.q.s[1] + h * a.q.s[2] + c]);
                mean[list * LD + c] = sum / (float)((to - from) * a.hs);
            }
        }
        /* Row statistics for mode 2: this lane's two rows of the warp's list. */
        float lse2[2] = {0, 0};
        int hi[2] = {0, 0};
        if (MODE == 2 && mine)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = h * 8 + (lane >> 2);
                const int64_t query = q0 + row / a.hs;
                if (row >= a.tile * a.hs || query >= seq.nq) continue;
                row_keys(a, seq, query, &ignore, &hi[h]);
                lse2[h] = a.lse.p[seq.view_b * a.lse.s[0] + (head0 + row % a.hs) * a.lse.s[1] + (seq.q0 + query) * a.lse.s[2]] * 1.4426950408889634f;
            }

        /* Entries to walk: all that any list of the block may see, then on until every block is closed. */
        int64_t walk_end = 0;
        {
            const int64_t tail_q = q_first + (int64_t)lists * a.tile - 1 < seq.nq ? q_first + (int64_t)lists * a.tile - 1 : seq.nq - 1;
            const int64_t last_block = a.causal ? tail_q / s.select_block + 1 : blocks;
            walk_end = last_block * s.s_over_d;
        }
        const int back = s.l_over_d - 1; /* entries before a block's first that overlap it */
        float group_sum = 0.0f;
        auto load_keys = [&](int64_t from) {
            const uint32_t to = (uint32_t)(from / KEYS & 1) * KEYS * DP * 2;
            for (int i = threadIdx.x; from < seq.nk && i < KEYS * CHUNKS; i += THREADS) {
                const int64_t key = from + i / CHUNKS;
                load_row<T, KEYS>(a.k.p, ak0 + to, sk + to, i / CHUNKS, i % CHUNKS, key < seq.nk ? k + key * a.k.s[1] : NULL, a.dim_k, a.vec_k);
            }
            cp_async_commit();
        };
        uint32_t ak = ak0;
        if (CORES) load_keys(0);
        for (int64_t e0 = 0; e0 < walk_end; e0 += KEYS) {
            if (CORES) cp_async_wait<0>();
            __syncthreads();
            const bool any = e0 < seq.nk;
            if (CORES) {
                load_keys(e0 + KEYS);
                ak = ak0 + (uint32_t)(e0 / KEYS & 1) * KEYS * DP * 2;
            } else if (any) {
                float *kt = (float *)sk;
                for (int i = threadIdx.x; i < KEYS * a.dim_k; i += THREADS) {
                    const int64_t key = e0 + i / a.dim_k;
                    kt[i / a.dim_k * LD + i % a.dim_k] = key < seq.nk ? to_float<T>(k[key * a.k.s[1] + i % a.dim_k]) : 0.0f;
                }
            }
            if (!CORES) __syncthreads();
            float *out = history + warp * (MAX_HISTORY + KEYS) + MAX_HISTORY;
            if (MODE == 0) {
                if (mine)
                    for (int j = lane; j < KEYS; j += 32) {
                        float dot = 0.0f;
                        if (e0 + j < seen_last) {
                            const float *m = (const float *)sq + warp * LD, *kt = (const float *)sk + j * LD;
                            for (int c = 0; c < a.dim_k; c++) dot = fmaf(m[c], kt[c], dot);
                            dot *= a.scale;
                        } else {
                            dot = -INFINITY;
                        }
                        out[j] = dot;
                    }
            } else if (MODE == 2) {
                if (any && mine) {
                    float acc[NT][4] = {};
#pragma unroll
                    for (int k0 = 0; k0 < DP; k0 += 16) {
                        uint32_t fa[4];
                        load_a<128>(fa, aq, warp * 16, k0, lane);
#pragma unroll
                        for (int n = 0; n < NT; n += 2) {
                            uint32_t fb[4];
                            load_b<KEYS>(fb, ak, n * 8, k0, lane);
                            mma16816<T>(acc[n], fa, fb[0], fb[1]);
                            mma16816<T>(acc[n + 1], fa, fb[2], fb[3]);
                        }
                    }
#pragma unroll
                    for (int n = 0; n < NT; n++)
#pragma unroll
                        for (int c = 0; c < 2; c++) {
                            const int j = n * 8 + (lane & 3) * 2 + c;
                            float sum = 0.0f;
#pragma unroll
                            for (int h = 0; h < 2; h++)
                                if (e0 + j < hi[h]) sum += exp2_fast(fmaf(acc[n][h * 2 + c], a.scale_log2, -lse2[h]));
                            sum += __shfl_xor_sync(~0u, sum, 4);
                            sum += __shfl_xor_sync(~0u, sum, 8);
                            sum += __shfl_xor_sync(~0u, sum, 16);
                            if (lane < 4) out[j] = sum;
                        }
                } else if (mine) {
                    for (int j = lane; j < KEYS; j += 32) out[j] = 0.0f;
                }
            } else { /* modes 1 and 3: all warps on one list, rows in chunks */
                float *shared_out = history + MAX_HISTORY;
                const int64_t rows = (q_end_of(q_first, a.tile, seq.nq) - q_first) * a.hs;
                float column[NT][2] = {};
                float scalar = 0.0f; /* mode 1: this thread's column share */
                for (int64_t r0 = 0; any && r0 < rows; r0 += MODE == 3 ? 128 : 64) {
                    __syncthreads();
                    if (MODE == 3) {
                        for (int i = threadIdx.x; i < 128 * CHUNKS; i += THREADS) {
                            const int64_t row = r0 + i / CHUNKS;
                            load_row<T, 128>(a.q.p, aq, sq, i / CHUNKS, i % CHUNKS,
                                             row < rows ? q + (q_first + row / a.hs) * a.q.s[1] + row % a.hs * a.q.s[2] : NULL, a.dim_k, a.vec_q);
                        }
                        cp_async_commit();
                        cp_async_wait<0>();
                    } else {
                        float *qt = (float *)sq;
                        for (int i = threadIdx.x; i < 64 * a.dim_k; i += THREADS) {
                            const int64_t row = r0 + i / a.dim_k;
                            qt[i / a.dim_k * LD + i % a.dim_k] =
                                row < rows ? to_float<T>(q[(q_first + row / a.hs) * a.q.s[1] + row % a.hs * a.q.s[2] + i % a.dim_k]) : 0.0f;
                        }
                    }
                    __syncthreads();
                    if (MODE == 3) {
                        float acc[NT][4] = {};
#pragma unroll
                        for (int k0 = 0; k0 < DP; k0 += 16) {
                            uint32_t fa[4];
                            load_a<128>(fa, aq, warp * 16, k0, lane);
#pragma unroll
                            for (int n = 0; n < NT; n += 2) {
                                uint32_t fb[4];
                                load_b<KEYS>(fb, ak, n * 8, k0, lane);
                                mma16816<T>(acc[n], fa, fb[0], fb[1]);
                                mma16816<T>(acc[n + 1], fa, fb[2], fb[3]);
                            }
                        }
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            const int64_t row = r0 + warp * 16 + h * 8 + (lane >> 2);
                            if (row >= rows) continue;
                            const int64_t query = q_first + row / a.hs;
                            int low, high;
                            row_keys(a, seq, query, &low, &high);
                            const float l2 = a.lse.p[seq.view_b * a.lse.s[0] + (head0 + row % a.hs) * a.lse.s[1] + (seq.q0 + query) * a.lse.s[2]] *
                                             1.4426950408889634f;
#pragma unroll
                            for (int n = 0; n < NT; n++)
#pragma unroll
                                for (int c = 0; c < 2; c++)
                                    if (e0 + n * 8 + (lane & 3) * 2 + c < high) column[n][c] += exp2_fast(fmaf(acc[n][h * 2 + c], a.scale_log2, -l2));
                        }
                    } else {
                        const int j = threadIdx.x % KEYS, part = threadIdx.x / KEYS; /* 4 threads share a column */
                        for (int r = part; r < 64 && r0 + r < rows; r += THREADS / KEYS) {
                            const int64_t query = q_first + (r0 + r) / a.hs;
                            int low, high;
                            row_keys(a, seq, query, &low, &high);
                            if (e0 + j >= high) continue;
                            const float *m = (const float *)sq + r * LD, *kt = (const float *)sk + j * LD;
                            float dot = 0.0f;
                            for (int c = 0; c < a.dim_k; c++) dot = fmaf(m[c], kt[c], dot);
                            scalar += expf(dot * a.scale -
                                           a.lse.p[seq.view_b * a.lse.s[0] + (head0 + (r0 + r) % a.hs) * a.lse.s[1] + (seq.q0 + query) * a.lse.s[2]]);
                        }
                    }
                }
                if (MODE == 3) {
#pragma unroll
                    for (int n = 0; n < NT; n++)
#pragma unroll
                        for (int c = 0; c < 2; c++) {
                            float sum = column[n][c];
                            sum += __shfl_xor_sync(~0u, sum, 4);
                            sum += __shfl_xor_sync(~0u, sum, 8);
                            sum += __shfl_xor_sync(~0u, sum, 16);
                            if (lane < 4) partial[warp * KEYS + n * 8 + lane * 2 + c] = sum;
                        }
                } else {
                    partial[threadIdx.x] = scalar;
                }
                __syncthreads();
                if (threadIdx.x < KEYS) {
                    float sum = 0.0f;
                    for (int w = 0; w < (MODE == 3 ? WARPS : THREADS / KEYS); w++) sum += partial[w * KEYS + threadIdx.x];
                    shared_out[threadIdx.x] = sum;
                }
                __syncthreads();
            }
            __syncwarp();
            if (!mine) continue;
            /* Close the selection blocks whose last entry is in this step. */
            const int64_t from = (e0 + s.s_over_d) / s.s_over_d - 1, to = (e0 + KEYS) / s.s_over_d; /* blocks with last entry in [e0, e0 + 64) */
            for (int64_t j0 = from; j0 < to; j0 += 32) {
                const int64_t block = j0 + lane, last_entry = (block + 1) * s.s_over_d - 1;
                bool valid = block < to && last_entry >= e0 && block < candidates && block >= f0 && !(block >= g0 && block < g1);
                float score = 0.0f;
                if (valid) {
                    if (s.mean_logit) {
                        score = out[last_entry - e0];
                    } else {
                        const int span = back + s.s_over_d;
                        for (int i = 0; i < span; i++) { /* entry = block start - back + i, counted as often as it overlaps */
                            const int64_t at = last_entry - e0 - (span - 1) + i;
                            const int up = i + 1 < span - i ? i + 1 : span - i;
                            const int most = s.l_over_d < s.s_over_d ? s.l_over_d : s.s_over_d;
                            score += (float)(up < most ? up : most) * out[at];
                        }
                    }
                }
                offer(best, valid, score, (int32_t)block, lane);
            }
            if (s.c > 0) {
                for (int j = lane; j < KEYS; j += 32)
                    if (e0 + j < seen_last) group_sum += out[j];
                if (e0 % GROUP == GROUP - KEYS || e0 + KEYS >= walk_end) {
                    for (int w = 16; w > 0; w /= 2) group_sum += __shfl_xor_sync(~0u, group_sum, w);
                    const int64_t g = e0 / GROUP, seen = seen_last - g * GROUP < GROUP ? seen_last - g * GROUP : GROUP;
                    if (g < groups_seen && g != keep_last && g != keep_first) offer(best_group, lane == 0, group_sum / (float)seen, (int32_t)g, lane);
                    group_sum = 0.0f;
                }
            }
            /* Keep the last scores that a later block may overlap before the next step's. */
            float *h = history + warp * (MAX_HISTORY + KEYS) + MAX_HISTORY - s.history;
            for (int i0 = 0; i0 < s.history; i0 += 32) {
                const float x = h[i0 + lane + KEYS];
                __syncwarp();
                h[i0 + lane] = x;
                __syncwarp();
            }
        }
        if (CORES) cp_async_wait<0>();
        if (mine) {
            const int64_t row = row_begin + warp;
            if (s.idx != NULL)
                write_list(best, f0, g0, g1, s.idx + vb * s.idx_stride[0] + u * s.idx_stride[1] + row * s.idx_stride[2], s.k,
                           s.count != NULL ? s.count + vb * s.count_stride[0] + u * s.count_stride[1] + row * s.count_stride[2] : NULL, lane);
            if (s.c > 0) {
                const int64_t ga = keep_first >= 0 && keep_first != keep_last ? keep_first : -1;
                for (int w = 0; w < 2; w++) { /* put the kept ones behind the contest's, then write all ascending */
                    const int64_t g = w == 0 ? keep_last : ga;
                    if (g >= 0 && lane == 0) best_group.key[best_group.size + w] = ~0u, best_group.index[best_group.size + w] = (int32_t)g;
                    __syncwarp();
                }
                const best_list all = {best_group.key, best_group.index, best_group.size + kept_groups};
                /* drop empty slots of the contest by moving the kept ones up */
                int full = 0;
                for (int i = 0; i < best_group.size; i++) full += best_group.key[i] != 0;
                __syncwarp();
                if (full < best_group.size && lane == 0)
                    for (int w = 0; w < kept_groups; w++) {
                        all.key[full + w] = ~0u, all.index[full + w] = all.index[best_group.size + w];
                    }
                __syncwarp();
                const best_list compact = {all.key, all.index, full + kept_groups};
                write_list(compact, 0, 0, 0, s.groups + vb * s.group_stride[0] + u * s.group_stride[1] + row * s.group_stride[2], s.c, NULL, lane);
            }
        }
        __syncthreads();
    }
}

template <typename T, int DP, int MODE> static quern_status launch(const select_kernel &s, int64_t views, const launcher &to)
{
    constexpr int LISTS = MODE == 0 || MODE == 2 ? WARPS : 1;
    const int LD = s.a.dim_k + 1;
    const size_t q_bytes = MODE >= 2 ? 128 * DP * 2 : (MODE == 0 ? LISTS : 64) * LD * 4, k_bytes = MODE >= 2 ? 2 * KEYS * DP * 2 : KEYS * LD * 4;
    const size_t bytes = q_bytes + k_bytes + ((size_t)LISTS * (MAX_HISTORY + KEYS) + WARPS * KEYS + 2 * (size_t)LISTS * (s.k + s.c)) * 4;
    const dim3 grid((unsigned)((s.list_rows + LISTS - 1) / LISTS), (unsigned)s.a.units, (unsigned)views);
    return launch_shared(to, select_blocks<T, DP, MODE>, grid, THREADS, bytes, "select", s);
}

/* What the f32 cores score takes any dim at run time; the tensor cores' fragments are unrolled for theirs. */
template <typename T> quern_status select_launch(const select_kernel &s, int dim, int64_t views, const launcher &to)
{
    if (s.mean_logit) return launch<T, 64, 0>(s, views, to);
    if constexpr (sizeof(T) == 4) {
        return launch<T, 64, 1>(s, views, to);
    } else if ((int64_t)s.a.tile * s.a.hs <= 16) {
        return dim == 64 ? launch<T, 64, 2>(s, views, to) : dim == 128 ? launch<T, 128, 2>(s, views, to) : launch<T, 256, 2>(s, views, to);
    } else {
        return dim == 64 ? launch<T, 64, 3>(s, views, to) : dim == 128 ? launch<T, 128, 3>(s, views, to) : launch<T, 256, 3>(s, views, to);
    }
}

#endif
