/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * grouped_outer.cu - the gradient of each expert's matrix, c[e] = sum over its rows of weight[r] a[r]^T
 * b[r]. A block owns a tile of one expert's matrix and walks the expert's rows in order; there are no
 * atomics, and an element's sum has one order.
 *
 * 16-bit operands of one dtype: a tile of 128 x 128, 8 warps of 64 x 32 by mma.m16n8k16. 32 rows of both
 * operands are a stage of shared memory, in panels of 64 columns (common/mma.cuh), whose fragments
 * ldmatrix.trans turns; the next stage's rows wait in registers, where a's are multiplied by their
 * weights. The others: a tile of 64 x 64 on the f32 cores, 4 x 4 a thread. Limit: the products; with few
 * rows, writing c.
 */
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/rows.cuh"
#include "common/values.cuh"
#include "variants.cuh"

enum {
    THREADS = 256,
    TILE = 64,
    DEPTH = 16,
    EACH = 4, /* of the f32 cores */
    WIDE = 128,
    ROWS = 32,
    CHUNKS = WIDE / 8,              /* of 8 columns, in a row */
    HELD = ROWS * CHUNKS / THREADS, /* a thread's, of each operand */
    PANEL_BYTES = ROWS * 128        /* 64 columns */
};

struct outer_params {
    const void *a, *b;
    void *c;
    quern_dtype a_dtype, b_dtype, c_dtype;
    int64_t a_s, b_s, c_expert, c_s, n, k;
    unsigned across;         /* tiles along k */
    bool a_vector, b_vector; /* rows at multiples of 16 bytes */
    expert_ends ends;
    const int32_t *permutation; /* with weights */
    const float *weights;
    int64_t weights_s, per, slots;
};

/* 1 without weights; 0 for a row whose slot is none. */
__device__ __forceinline__ float weight_of(const outer_params &p, int64_t row)
{
    if (p.weights == NULL) return 1.0f;
    const int64_t slot = p.permutation[row];
    return slot >= 0 && slot < p.slots ? p.weights[slot / p.per * p.weights_s + slot % p.per] : 0.0f;
}

/* Eight columns of a row, zeros past the last column. */
template <typename T>
__device__ __forceinline__ uint4 load_eight(const T *row, int64_t column, int64_t columns, bool vector)
{
    if (vector && column + 8 <= columns) return *(const uint4 *)(row + column);
    uint32_t x[4] = {};
    for (int i = 0; i < 8; i++)
        if (column + i < columns) x[i / 2] |= (uint32_t)((const uint16_t *)row)[column + i] << (i % 2 * 16);
    return make_uint4(x[0], x[1], x[2], x[3]);
}

template <typename T> __device__ __forceinline__ uint32_t weighted(uint32_t x, float w)
{
    const float2 v = unpack2<T>(x);
    return pack2<T>(v.x * w, v.y * w);
}

/* A thread's part of a stage. */
template <typename T> struct outer_rows {
    uint4 a[HELD], b[HELD];

    __device__ __forceinline__ void load(const outer_params &p, int64_t row0, int64_t end, int64_t n0,
                                         int64_t k0)
    {
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int at = i * THREADS + threadIdx.x, column = at % CHUNKS * 8;
            const int64_t row = row0 + at / CHUNKS;
            a[i] = b[i] = make_uint4(0, 0, 0, 0);
            if (row >= end) continue;
            a[i] = load_eight((const T *)p.a + row * p.a_s, n0 + column, p.n, p.a_vector);
            b[i] = load_eight((const T *)p.b + row * p.b_s, k0 + column, p.k, p.b_vector);
            if (p.weights == NULL) continue;
            const float w = weight_of(p, row);
            a[i] = make_uint4(weighted<T>(a[i].x, w), weighted<T>(a[i].y, w), weighted<T>(a[i].z, w),
                              weighted<T>(a[i].w, w));
        }
    }
    __device__ __forceinline__ void store(char *to_a, char *to_b) const
    {
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int at = i * THREADS + threadIdx.x;
            const uint32_t offset = tile_at<ROWS>(at / CHUNKS, at % CHUNKS);
            *(uint4 *)(to_a + offset) = a[i];
            *(uint4 *)(to_b + offset) = b[i];
        }
    }
};

/* 16 columns of a, transposed: an operand of 16 rows by 16 of depth. */
__device__ __forceinline__ void load_a_trans(uint32_t (&r)[4], uint32_t tile, int depth, int column, int lane)
{
    ldmatrix4_trans(
        r, tile + tile_at<ROWS>(depth + (lane >> 4) * 8 + (lane & 7), (column >> 3) + ((lane >> 3) & 1)));
}

template <typename T>
__global__ void __launch_bounds__(THREADS) grouped_outer(const __grid_constant__ outer_params p)
{
    __shared__ __align__(128) char room[2][2][2 * PANEL_BYTES];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, e = blockIdx.y;
    const int m0 = warp % 2 * 64, c0 = warp / 2 * 32;
    const int64_t k0 = (int64_t)(blockIdx.x % p.across) * WIDE, n0 = (int64_t)(blockIdx.x / p.across) * WIDE;
    const int64_t first = p.ends.first_of(e), end = p.ends.end_of(e);
    float acc[4][4][4] = {};
    outer_rows<T> held;
    int stage = 0;
    if (first < end) {
        held.load(p, first, end, n0, k0);
        held.store(room[0][0], room[0][1]);
    }
    __syncthreads();
    for (int64_t row = first; row < end; row += ROWS, stage ^= 1) {
        const bool more = row + ROWS < end;
        const uint32_t a = smem_address(room[stage][0]), b = smem_address(room[stage][1]);
        if (more) held.load(p, row + ROWS, end, n0, k0);
#pragma unroll
        for (int d = 0; d < ROWS; d += 16) {
            uint32_t fa[4][4], fb[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) load_a_trans(fa[i], a, d, m0 + i * 16, lane);
#pragma unroll
            for (int j = 0; j < 2; j++) load_b_trans<ROWS>(fb[j], b, d, c0 + j * 16, lane);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mma16816<T>(acc[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
        }
        if (more) held.store(room[stage ^ 1][0], room[stage ^ 1][1]);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int x = 0; x < 4; x++) {
                const int64_t n = n0 + m0 + i * 16 + lane / 4 + x / 2 * 8,
                              k = k0 + c0 + j * 8 + lane % 4 * 2 + x % 2;
                if (n < p.n && k < p.k) put_at(p.c, p.c_dtype, e * p.c_expert + n * p.c_s + k, acc[i][j][x]);
            }
}

__global__ void __launch_bounds__(THREADS) grouped_outer_f32(const __grid_constant__ outer_params p)
{
    __shared__ float a[DEPTH][TILE + 1], b[DEPTH][TILE + 1];
    const int x = threadIdx.x % 16, y = threadIdx.x / 16, e = blockIdx.y;
    const int64_t k0 = (int64_t)(blockIdx.x % p.across) * TILE, n0 = (int64_t)(blockIdx.x / p.across) * TILE;
    const int64_t end = p.ends.end_of(e);
    float sum[EACH][EACH] = {};
    for (int64_t row0 = p.ends.first_of(e); row0 < end; row0 += DEPTH) {
        for (int i = threadIdx.x; i < DEPTH * TILE; i += THREADS) {
            const int d = i / TILE, c = i % TILE;
            const int64_t row = row0 + d;
            a[d][c] = row < end && n0 + c < p.n
                          ? weight_of(p, row) * value_at(p.a, p.a_dtype, row * p.a_s + n0 + c)
                          : 0.0f;
            b[d][c] = row < end && k0 + c < p.k ? value_at(p.b, p.b_dtype, row * p.b_s + k0 + c) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++)
                    sum[i][j] = fmaf(a[d][y * EACH + i], b[d][x + j * 16], sum[i][j]);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int64_t n = n0 + y * EACH + i, k = k0 + x + j * 16;
            if (n < p.n && k < p.k) put_at(p.c, p.c_dtype, e * p.c_expert + n * p.c_s + k, sum[i][j]);
        }
}

static quern_status grouped_outer_any_run(const stage_exec *exec, const grouped_outer_args *args, void *)
{
    outer_params p = {};
    p.a = args->a.data;
    p.b = args->b.data;
    p.c = args->c.data;
    p.a_dtype = args->a.dtype;
    p.b_dtype = args->b.dtype;
    p.c_dtype = args->c.dtype;
    p.a_s = args->a.strides[0];
    p.b_s = args->b.strides[0];
    p.c_expert = args->c.strides[0];
    p.c_s = args->c.strides[1];
    p.n = args->c.shape[1];
    p.k = args->c.shape[2];
    p.a_vector = rows_aligned(args->a, 16);
    p.b_vector = rows_aligned(args->b, 16);
    p.ends = expert_ends_of(args->offsets, args->a.shape[0]);
    if (present(args->weights)) {
        p.permutation = (const int32_t *)args->permutation.data;
        p.weights = (const float *)args->weights.data;
        p.weights_s = args->weights.strides[0];
        const int64_t tokens = args->weights.shape[0];
        p.per = tokens > 0 ? args->a.shape[0] / tokens : 1;
        p.slots = tokens * p.per;
    }
    const bool products = p.a_dtype == p.b_dtype && p.a_dtype != QUERN_F32;
    const int64_t tile = products ? WIDE : TILE, across = (p.k + tile - 1) / tile,
                  down = (p.n + tile - 1) / tile;
    if (p.n == 0 || p.k == 0 || args->c.shape[0] == 0) return QUERN_OK;
    p.across = (unsigned)across;
    const dim3 grid((unsigned)(across * down), (unsigned)args->c.shape[0]);
    cudaStream_t stream = (cudaStream_t)exec->stream;
    if (!products) grouped_outer_f32<<<grid, THREADS, 0, stream>>>(p);
    else if (p.a_dtype == QUERN_BF16) grouped_outer<bf16><<<grid, THREADS, 0, stream>>>(p);
    else grouped_outer<f16><<<grid, THREADS, 0, stream>>>(p);
    return LAUNCHED("grouped_outer");
}

extern const variant<grouped_outer_args> grouped_outer_any = {"grouped_outer_any", NULL, NULL,
                                                              grouped_outer_any_run};
