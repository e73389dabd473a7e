/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * inverse.cu - the inverted index of block lists: for every block, the tiles that chose it, in tile order.
 *
 * The rows of a list are cut into a fixed number of chunks. count: how often each chunk names each block
 * (integer atomics: the sum does not depend on their order). scan: exclusive sums over chunks, then over
 * blocks. fill: one warp a chunk walks its rows in order, so that each block's tiles come out ascending.
 * A row's entries count once each, and only those inside the sequence whose first key some query of the
 * tile may see. Packed batches: sequence b's blocks start at index floor(k0 / lb) + b, which never meet.
 */
#include "any/attend.cuh"
#include "any/stages.cuh"

enum { MAX_CHUNKS = 256 };

struct inverse_shape {
    int64_t lists;    /* (batch view, unit) pairs */
    int64_t rows;     /* list rows of one pair */
    int64_t capacity; /* blocks of one pair, + 1 */
    int64_t chunks, chunk_rows;
};

static inverse_shape shape_of(const attend_args *args)
{
    inverse_shape s;
    const int64_t lb = args->mask == ATTEND_COMPRESSED ? 128 : args->block_size;
    s.lists = args->list.shape[0] * args->list.shape[1];
    s.rows = args->list.shape[2];
    s.capacity = args->seqs.n_kv / lb + args->seqs.batch + 1;
    s.chunk_rows = (s.rows + MAX_CHUNKS - 1) / MAX_CHUNKS;
    if (s.chunk_rows < 64) s.chunk_rows = 64;
    s.chunks = (s.rows + s.chunk_rows - 1) / s.chunk_rows;
    return s;
}

struct inverse_memory {
    int32_t *count, *start, *tile;
};

static inverse_memory carve(const attend_args *args, void *workspace, size_t *bytes)
{
    const inverse_shape s = shape_of(args);
    const size_t count = (size_t)(s.lists * s.chunks * s.capacity), start = (size_t)(s.lists * s.capacity);
    int32_t *p = (int32_t *)(((uintptr_t)workspace + 15) & ~(uintptr_t)15);
    *bytes = 4 * (count + start + (size_t)(s.lists * s.rows * args->list.shape[3])) + 15;
    return {p, p + count, p + count + start};
}

size_t inverse_workspace(const attend_args *args)
{
    size_t bytes;
    carve(args, NULL, &bytes);
    return bytes;
}

/* Sequence and tile of list row `row`; false for an unused row. */
__device__ bool row_place(const attend_kernel &a, int64_t view_b, int64_t row, sequence *seq, int64_t *q0)
{
    if (a.sq.cu_q == NULL) {
        *seq = sequence_at(a.sq, view_b);
        *q0 = row * a.tile;
        return *q0 < seq->nq;
    }
    return piece_at(a.sq, row, a.tile, 1, seq, q0);
}

/* The block index of entry e of a list row, or -1 where it does not count. */
__device__ int64_t entry_block(const attend_kernel &a, const int32_t *list, int e, const sequence &seq, int64_t q0)
{
    const int32_t x = list[e];
    const int64_t last = (q0 + a.tile < seq.nq ? q0 + a.tile : seq.nq) - 1;
    int lo, hi;
    row_keys(a, seq, last, &lo, &hi);
    if (x < 0 || (int64_t)x * a.list_block >= hi) return -1;
    for (int i = 0; i < e; i++)
        if (list[i] == x) return -1;
    return (a.sq.cu_q == NULL ? 0 : seq.k0 / a.list_block + seq.b) + x;
}

__global__ void inverse_count(const __grid_constant__ attend_kernel a, int64_t rows, int64_t capacity, int64_t chunk_rows, int32_t *count)
{
    const int64_t pair = blockIdx.y, view_b = pair / a.units, u = pair % a.units;
    const int64_t first = (int64_t)blockIdx.x * chunk_rows, end = first + chunk_rows < rows ? first + chunk_rows : rows;
    int32_t *c = count + (pair * gridDim.x + blockIdx.x) * capacity;
    for (int64_t i = threadIdx.x; i < (end - first) * a.list_k; i += blockDim.x) {
        const int64_t row = first + i / a.list_k;
        sequence seq;
        int64_t q0;
        if (!row_place(a, view_b, row, &seq, &q0)) continue;
        const int32_t *list = a.list + view_b * a.list_stride[0] + u * a.list_stride[1] + row * a.list_stride[2];
        const int64_t block = entry_block(a, list, (int)(i % a.list_k), seq, q0);
        if (block >= 0) atomicAdd(&c[block], 1);
    }
}

/* Exclusive sums: over chunks for each block, then over blocks. One block of threads a pair. */
__global__ void inverse_scan(int64_t capacity, int64_t chunks, int32_t *count, int32_t *start)
{
    __shared__ int32_t totals[1024], carry;
    int32_t *c = count + (int64_t)blockIdx.x * chunks * capacity, *s = start + (int64_t)blockIdx.x * capacity;
    if (threadIdx.x == 0) carry = 0;
    for (int64_t base = 0; base < capacity; base += blockDim.x) {
        const int64_t block = base + threadIdx.x;
        int32_t total = 0;
        if (block < capacity)
            for (int64_t i = 0; i < chunks; i++) {
                const int32_t n = c[i * capacity + block];
                c[i * capacity + block] = total;
                total += n;
            }
        totals[threadIdx.x] = total;
        __syncthreads();
        for (unsigned step = 1; step < blockDim.x; step *= 2) {
            const int32_t left = threadIdx.x >= step ? totals[threadIdx.x - step] : 0;
            __syncthreads();
            totals[threadIdx.x] += left;
            __syncthreads();
        }
        const int32_t begin = carry + totals[threadIdx.x] - total;
        __syncthreads();
        if (block < capacity) s[block] = begin;
        if (threadIdx.x == blockDim.x - 1) carry += totals[threadIdx.x];
        __syncthreads();
    }
}

__global__ void inverse_fill(const __grid_constant__ attend_kernel a, int64_t rows, int64_t capacity, int64_t chunk_rows, int32_t *count,
                             const int32_t *start, int32_t *tile, int64_t pair_entries)
{
    const int64_t pair = blockIdx.y, view_b = pair / a.units, u = pair % a.units;
    const int64_t first = (int64_t)blockIdx.x * chunk_rows, end = first + chunk_rows < rows ? first + chunk_rows : rows;
    int32_t *c = count + (pair * gridDim.x + blockIdx.x) * capacity;
    const int32_t *s = start + pair * capacity;
    for (int64_t row = first; row < end; row++) {
        sequence seq;
        int64_t q0;
        if (!row_place(a, view_b, row, &seq, &q0)) continue;
        const int32_t *list = a.list + view_b * a.list_stride[0] + u * a.list_stride[1] + row * a.list_stride[2];
        for (int e = threadIdx.x; e < a.list_k; e += 32) {
            const int64_t block = entry_block(a, list, e, seq, q0);
            if (block >= 0) tile[pair * pair_entries + s[block] + c[block]++] = (int32_t)(q0 / a.tile);
        }
        __syncwarp();
    }
}

quern_status inverse_build(const quern_exec *exec, const attend_args *args, attend_kernel *kernel, void *workspace)
{
    const inverse_shape s = shape_of(args);
    cudaStream_t stream = (cudaStream_t)exec->stream;
    size_t bytes;
    const inverse_memory m = carve(args, workspace, &bytes);
    kernel->inverse_start = m.start;
    kernel->inverse_tile = m.tile;
    kernel->inverse_entries = s.rows * kernel->list_k;
    if (s.lists == 0) return QUERN_OK;
    if (s.rows == 0) return cuda_report(cudaMemsetAsync(m.start, 0, (size_t)(s.lists * s.capacity) * 4, stream), "inverse: clear");
    const cudaError_t code = cudaMemsetAsync(m.count, 0, (size_t)(s.lists * s.chunks * s.capacity) * 4, stream);
    if (code != cudaSuccess) return cuda_report(code, "inverse: clear");
    const dim3 grid((unsigned)s.chunks, (unsigned)s.lists);
    inverse_count<<<grid, 256, 0, stream>>>(*kernel, s.rows, s.capacity, s.chunk_rows, m.count);
    inverse_scan<<<(unsigned)s.lists, 1024, 0, stream>>>(s.capacity, s.chunks, m.count, m.start);
    inverse_fill<<<grid, 32, 0, stream>>>(*kernel, s.rows, s.capacity, s.chunk_rows, m.count, m.start, m.tile, kernel->inverse_entries);
    return LAUNCHED("inverse");
}
