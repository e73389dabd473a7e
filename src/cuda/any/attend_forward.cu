/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_forward.cu - blockwise softmax attention on mma.m16n8k16, for bf16 and f16, every mask.
 *
 * A block of WM x WN warps owns 16 MT WM packed rows (attend.cuh) and walks its key slots 64 at a time:
 * S = Q K^T in registers, running maximum and sum in the exp2 domain, P straight from the accumulators as
 * the A operand of O += P V. K and V tiles alternate: V loads while S is computed, the next K while P V is.
 * With WN = 1 each warp holds all 64 keys of its rows; with WN = 4 (per-token lists, <= 16 rows a tile) the
 * warps split the keys, keep their own maximum, sum and O, and merge through shared memory in warp order.
 *
 * Registers a thread at D = 128, MT = 2: O 128, S 64. Shared memory: (16 MT WM + 128) x DP x 2 bytes =
 * 64 KB, two blocks an SM. Limit: mma.sync reaches about 0.6 of the wgmma rate on Hopper.
 */
#include "any/attend.cuh"
#include "any/stages.cuh"

#include <math.h>

enum { KEYS = 64 };

template <typename T, int DP, int MT, int WM, int WN, bool LISTED>
__global__ void __launch_bounds__(32 * WM * WN) attend_forward(const __grid_constant__ attend_kernel a)
{
    constexpr int M = 16 * MT * WM, WK = KEYS / WN, NT = WK / 8, OT = DP / 8, CHUNKS = DP / 8;
    constexpr int THREADS = 32 * WM * WN;
    extern __shared__ __align__(128) char smem[];
    char *sq = smem, *sk = sq + M * DP * 2, *sv = sk + KEYS * DP * 2;
    int32_t *column = (int32_t *)(sv + KEYS * DP * 2); /* LISTED: [2][KEYS] key index of each slot */
    int32_t *list = column + 2 * KEYS;                 /* LISTED: [list_k] clean, then flags, then raw */
    const uint32_t aq = smem_address(sq), ak = smem_address(sk), av = smem_address(sv);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp % WM, wn = warp / WM;

    sequence seq;
    int64_t first; /* first packed row of this block, and of its rows' end */
    int64_t rows_end;
    const int u = blockIdx.y;
    const int64_t piece = (int64_t)gridDim.x - 1 - blockIdx.x; /* the longest causal rows start first */
    const int32_t *list_row = NULL;
    if (LISTED) {
        const int64_t tile_rows = (int64_t)a.tile * a.hs, per = (tile_rows + M - 1) / M;
        int64_t q0;
        if (!piece_at(a.sq, piece / per, a.tile, 1, &seq, &q0)) return;
        first = q0 * a.hs + piece % per * M;
        const int64_t tile_end = (q0 + a.tile) * a.hs, end = seq.nq * a.hs;
        rows_end = tile_end < end ? tile_end : end;
        const int64_t row = a.sq.cu_q == NULL ? q0 / a.tile : piece / per;
        list_row = a.list + seq.view_b * a.list_stride[0] + u * a.list_stride[1] + row * a.list_stride[2];
    } else {
        if (!piece_at(a.sq, piece, M, a.hs, &seq, &first)) return;
        rows_end = seq.nq * a.hs;
    }
    if (first >= rows_end) return;
    const int kvh = a.units == a.heads ? u / a.group : u;
    const int head0 = a.units == a.heads ? u : u * a.group;
    const T *q = (const T *)a.q.p + seq.view_b * a.q.s[0] + seq.q0 * a.q.s[1] + head0 * a.q.s[2];
    const T *k = (const T *)a.k.p + seq.view_b * a.k.s[0] + seq.k0 * a.k.s[1] + kvh * a.k.s[2];
    const T *v = (const T *)a.v.p + seq.view_b * a.v.s[0] + seq.k0 * a.v.s[1] + kvh * a.v.s[2];

    for (int i = threadIdx.x; i < M * CHUNKS; i += THREADS) {
        const int r = i / CHUNKS;
        const int64_t row = first + r;
        const T *src = row < rows_end ? q + row / a.hs * a.q.s[1] + row % a.hs * a.q.s[2] : NULL;
        load_row_chunk<T, DP>(aq, sq, r, i % CHUNKS, src, a.dim_k, a.vec_q);
    }

    /* What the rows of this block see: each row's interval, and the bounds over all rows. */
    const int64_t last = (first + M < rows_end ? first + M : rows_end) - 1;
    int first_lo, first_hi, last_lo, last_hi;
    row_keys(a, seq, first / a.hs, &first_lo, &first_hi);
    row_keys(a, seq, last / a.hs, &last_lo, &last_hi);
    int lo[MT][2], hi[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int64_t row = first + wm * 16 * MT + m * 16 + h * 8 + (lane >> 2);
            lo[m][h] = hi[m][h] = 0;
            if (row < rows_end) row_keys(a, seq, row / a.hs, &lo[m][h], &hi[m][h]);
        }
    int64_t base = first_lo, slots = last_hi - first_lo;
    if (LISTED) {
        const int kept = clean_list(list_row, a.list_k, a.list_block, last_hi, list, list + a.list_k, list + 2 * a.list_k);
        slots = (int64_t)kept * a.list_block;
    }
    const int tiles = slots > 0 ? (int)((slots + KEYS - 1) / KEYS) : 0;

    auto key_of = [&](int64_t slot) -> int64_t {
        if (slot >= slots) return seq.nk;
        if (!LISTED) return base + slot;
        return (int64_t)list[slot / a.list_block] * a.list_block + slot % a.list_block;
    };
    auto load_keys = [&](int t) {
        for (int i = threadIdx.x; i < KEYS * CHUNKS; i += THREADS) {
            const int r = i / CHUNKS;
            const int64_t key = key_of((int64_t)t * KEYS + r);
            load_row_chunk<T, DP>(ak, sk, r, i % CHUNKS, key < seq.nk ? k + key * a.k.s[1] : NULL, a.dim_k, a.vec_k);
            if (LISTED && i % CHUNKS == 0) column[(t & 1) * KEYS + r] = (int32_t)key;
        }
        cp_async_commit();
    };
    auto load_values = [&](int t) {
        for (int i = threadIdx.x; i < KEYS * CHUNKS; i += THREADS) {
            const int r = i / CHUNKS;
            const int64_t key = key_of((int64_t)t * KEYS + r);
            load_row_chunk<T, DP>(av, sv, r, i % CHUNKS, key < seq.nk ? v + key * a.v.s[1] : NULL, a.dim_v, a.vec_v);
        }
        cp_async_commit();
    };

    float o[MT][OT][4] = {};
    float row_max[MT][2], row_sum[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) row_max[m][h] = -INFINITY, row_sum[m][h] = 0.0f;

    if (tiles > 0) load_keys(0);
    for (int t = 0; t < tiles; t++) {
        cp_async_wait<0>();
        __syncthreads();
        load_values(t);
        float s[MT][NT][4] = {};
#pragma unroll
        for (int k0 = 0; k0 < DP; k0 += 16) {
            uint32_t fa[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++) load_a<DP>(fa[m], aq, (wm * MT + m) * 16, k0, lane);
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                uint32_t fb[4];
                load_b<DP>(fb, ak, wn * WK + n * 8, k0, lane);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma16816<T>(s[m][n], fa[m], fb[0], fb[1]);
                    mma16816<T>(s[m][n + 1], fa[m], fb[2], fb[3]);
                }
            }
        }
        __syncthreads();
        if (t + 1 < tiles) load_keys(t + 1);
        else cp_async_commit();

        const int64_t slot0 = (int64_t)t * KEYS;
        bool inside = slot0 + KEYS <= slots;
        if (LISTED) {
            for (int64_t e = slot0 / a.list_block; inside && e <= (slot0 + KEYS - 1) / a.list_block; e++)
                inside = ((int64_t)list[e] + 1) * a.list_block <= first_hi;
        } else {
            inside = inside && base + slot0 >= last_lo && base + slot0 + KEYS <= first_hi;
        }
        if (!inside) {
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int at = wn * WK + n * 8 + (lane & 3) * 2 + c;
                    const int key = LISTED ? column[(t & 1) * KEYS + at] : (int)(base + slot0) + at;
#pragma unroll
                    for (int m = 0; m < MT; m++)
#pragma unroll
                        for (int h = 0; h < 2; h++)
                            if (key < lo[m][h] || key >= hi[m][h]) s[m][n][h * 2 + c] = -INFINITY;
                }
        }
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float top = row_max[m][h];
#pragma unroll
                for (int n = 0; n < NT; n++) top = fmaxf(top, fmaxf(s[m][n][h * 2], s[m][n][h * 2 + 1]));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                const float base2 = top == -INFINITY ? 0.0f : top * a.scale_log2;
                const float shrink = exp2_fast(row_max[m][h] * a.scale_log2 - base2);
                row_max[m][h] = top;
                float sum = row_sum[m][h] * shrink;
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        const float p = exp2_fast(fmaf(s[m][n][h * 2 + c], a.scale_log2, -base2));
                        s[m][n][h * 2 + c] = p;
                        sum += p;
                    }
                row_sum[m][h] = sum;
#pragma unroll
                for (int n = 0; n < OT; n++) o[m][n][h * 2] *= shrink, o[m][n][h * 2 + 1] *= shrink;
            }
        cp_async_wait<1>();
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < NT; kk += 2) {
            uint32_t p[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++) {
                p[m][0] = pack2<T>(s[m][kk][0], s[m][kk][1]);
                p[m][1] = pack2<T>(s[m][kk][2], s[m][kk][3]);
                p[m][2] = pack2<T>(s[m][kk + 1][0], s[m][kk + 1][1]);
                p[m][3] = pack2<T>(s[m][kk + 1][2], s[m][kk + 1][3]);
            }
#pragma unroll
            for (int n = 0; n < OT; n += 2) {
                uint32_t fb[4];
                load_b_trans<DP>(fb, av, wn * WK + kk * 8, n * 8, lane);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma16816<T>(o[m][n], p[m], fb[0], fb[1]);
                    mma16816<T>(o[m][n + 1], p[m], fb[2], fb[3]);
                }
            }
        }
    }
    cp_async_wait<0>();
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            row_sum[m][h] += __shfl_xor_sync(~0u, row_sum[m][h], 1);
            row_sum[m][h] += __shfl_xor_sync(~0u, row_sum[m][h], 2);
        }

    if (WN > 1) { /* merge the warps' shares, in warp order, into warp 0 */
        float *part = (float *)sk; /* [WN][16][DP] over the K and V tiles */
        __shared__ float part_max[WN][16], part_sum[WN][16];
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = h * 8 + (lane >> 2);
            if ((lane & 3) == 0) part_max[wn][r] = row_max[0][h], part_sum[wn][r] = row_sum[0][h];
            for (int n = 0; n < OT; n++)
                *(float2 *)&part[(wn * 16 + r) * DP + n * 8 + (lane & 3) * 2] = make_float2(o[0][n][h * 2], o[0][n][h * 2 + 1]);
        }
        __syncthreads();
        if (wn != 0) return;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = h * 8 + (lane >> 2);
            float top = -INFINITY, weight[WN], sum = 0.0f;
            for (int w = 0; w < WN; w++) top = fmaxf(top, part_max[w][r]);
            const float base2 = top == -INFINITY ? 0.0f : top * a.scale_log2;
            for (int w = 0; w < WN; w++) {
                weight[w] = exp2_fast(part_max[w][r] * a.scale_log2 - base2);
                sum += part_sum[w][r] * weight[w];
            }
            row_max[0][h] = top;
            row_sum[0][h] = sum;
            for (int n = 0; n < OT; n++) {
                float x = 0.0f, y = 0.0f;
                for (int w = 0; w < WN; w++) {
                    const float2 f = *(float2 *)&part[(w * 16 + r) * DP + n * 8 + (lane & 3) * 2];
                    x += f.x * weight[w];
                    y += f.y * weight[w];
                }
                o[0][n][h * 2] = x;
                o[0][n][h * 2 + 1] = y;
            }
        }
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int64_t row = first + (wm * MT + m) * 16 + h * 8 + (lane >> 2);
            if (row >= rows_end) continue;
            const int64_t query = row / a.hs, head = head0 + row % a.hs;
            const float sum = row_sum[m][h], inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
            if (a.o.p != NULL) {
            T *dst = (T *)a.o.p + seq.view_b * a.o.s[0] + (seq.q0 + query) * a.o.s[1] + head * a.o.s[2];
#pragma unroll
            for (int n = 0; n < OT; n++) {
                const int c = n * 8 + (lane & 3) * 2;
                if (c >= a.dim_v) continue;
                const float x = o[m][n][h * 2] * inverse, y = o[m][n][h * 2 + 1] * inverse;
                if (a.vec_o) {
                    *(uint32_t *)(dst + c) = pack2<T>(x, y);
                } else {
                    dst[c] = from_float<T>(x);
                    dst[c + 1] = from_float<T>(y);
                }
            }
            }
            if (a.lse.p != NULL && (lane & 3) == 0)
                a.lse.p[seq.view_b * a.lse.s[0] + head * a.lse.s[1] + (seq.q0 + query) * a.lse.s[2]] =
                    sum == 0.0f ? -INFINITY : row_max[m][h] * a.scale + logf(sum);
        }
}

template <typename T, int DP, int MT, int WM, int WN, bool LISTED>
static quern_status launch(const attend_args *args, const attend_kernel &a, cudaStream_t stream)
{
    constexpr int M = 16 * MT * WM;
    const size_t bytes = (size_t)(M + 2 * KEYS) * DP * 2 + (LISTED ? (2 * KEYS + 3 * (size_t)a.list_k) * 4 : 0);
    int64_t pieces = piece_bound(args->seqs, M, a.hs);
    if (LISTED) pieces = piece_bound(args->seqs, a.tile, 1) * (((int64_t)a.tile * a.hs + M - 1) / M);
    if (pieces == 0 || a.units == 0) return QUERN_OK;
    auto kernel = attend_forward<T, DP, MT, WM, WN, LISTED>;
    cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (code != cudaSuccess) return cuda_report(code, "attend_forward: shared memory");
    kernel<<<dim3((unsigned)pieces, (unsigned)a.units), 32 * WM * WN, bytes, stream>>>(a);
    return LAUNCHED("attend_forward");
}

template <typename T, int DP>
static quern_status choose(const attend_args *args, const attend_launch &l, cudaStream_t stream)
{
    constexpr int MT = DP > 128 ? 1 : 2, WM = DP > 128 ? 8 : 4;
    if (!l.listed) return launch<T, DP, MT, WM, 1, false>(args, l.kernel, stream);
    if ((int64_t)l.kernel.tile * l.kernel.hs <= 16) return launch<T, DP, 1, 1, 4, true>(args, l.kernel, stream);
    return launch<T, DP, MT, WM, 1, true>(args, l.kernel, stream);
}

template <typename T> static quern_status choose_dim(const attend_args *args, const attend_launch &l, cudaStream_t stream)
{
    if (l.dim == 64) return choose<T, 64>(args, l, stream);
    if (l.dim == 128) return choose<T, 128>(args, l, stream);
    return choose<T, 256>(args, l, stream);
}

quern_status attend_forward_half(const quern_exec *exec, const attend_args *args)
{
    const attend_launch l = attend_launch_of(args);
    cudaStream_t stream = (cudaStream_t)exec->stream;
    return l.dtype == QUERN_BF16 ? choose_dim<bf16>(args, l, stream) : choose_dim<f16>(args, l, stream);
}
