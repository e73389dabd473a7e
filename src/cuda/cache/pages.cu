/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* pages.cu - copies of pages, and rows of a sequence to packed bytes and back: a block a part of a page, or a
 * warp a packed row. Limit: the copy rate. */
#include "cache/params.cuh"
#include "variants.cuh"

enum { THREADS = 256, WARPS = THREADS / 32 };

struct pages_kernel {
    char *p;
    int64_t page, part, bytes; /* from page to page, from part to part, of a part */
    int64_t parts;
    int32_t pages;
};

static pages_kernel pages_of(const quern_tensor &t)
{
    const int64_t size = bytes_of(t.dtype);
    return {(char *)t.data,
            t.strides[0] * size,
            t.ndim > 2 ? t.strides[1] * size : 0,
            t.shape[t.ndim - 1] * size,
            t.ndim > 2 ? t.shape[1] : 1,
            (int32_t)t.shape[0]};
}

struct copies_kernel {
    pages_kernel pool;
    const int32_t *copies;
    int64_t copy_s[2], number;
    int32_t *status;
};

template <int BYTES>
__device__ __forceinline__ void copy_bytes(char *to, const char *from, int64_t bytes, int n)
{
    typedef typename unit_of<BYTES>::type U;
    for (int64_t i = threadIdx.x % n; i < bytes / (int64_t)sizeof(U); i += n)
        ((U *)to)[i] = ((const U *)from)[i];
}

template <int BYTES>
__global__ void __launch_bounds__(THREADS) cache_copy_pages(const __grid_constant__ copies_kernel a)
{
    const int32_t *const copy = a.copies + blockIdx.x * a.copy_s[0];
    const int32_t from = copy[a.copy_s[1]], to = copy[2 * a.copy_s[1]];
    if (copy[0] != a.number) return;
    if ((uint32_t)from >= (uint32_t)a.pool.pages || (uint32_t)to >= (uint32_t)a.pool.pages) {
        if (threadIdx.x == 0) raise_status(a.status, QUERN_STATUS_BAD_PAGE);
        return;
    }
    for (int64_t part = blockIdx.y; part < a.pool.parts; part += gridDim.y)
        copy_bytes<BYTES>(a.pool.p + to * a.pool.page + part * a.pool.part,
                          a.pool.p + from * a.pool.page + part * a.pool.part, a.pool.bytes, THREADS);
}

static quern_status copy_pages_run(const stage_exec *exec, const copy_pages_args *args, void *)
{
    enum { PARTS_MOST = 65535 };
    const quern_tensor &t = args->copies;
    const copies_kernel a = {pages_of(args->pages),
                             (const int32_t *)t.data,
                             {t.strides[0], t.strides[1]},
                             args->pool,
                             exec->status};
    const int64_t parts = a.pool.parts < PARTS_MOST ? a.pool.parts : (int64_t)PARTS_MOST;
    if (t.shape[0] == 0 || parts == 0) return QUERN_OK;
    const dim3 grid((unsigned)t.shape[0], (unsigned)parts);
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    if (rows_aligned(args->pages, 16) && a.pool.bytes % 16 == 0)
        cache_copy_pages<16><<<grid, THREADS, 0, stream>>>(a);
    else if (bytes_of(args->pages.dtype) == 4) cache_copy_pages<4><<<grid, THREADS, 0, stream>>>(a);
    else if (bytes_of(args->pages.dtype) == 2) cache_copy_pages<2><<<grid, THREADS, 0, stream>>>(a);
    else cache_copy_pages<1><<<grid, THREADS, 0, stream>>>(a);
    return LAUNCHED("copies of pages");
}

struct pack_kernel {
    pages_kernel pool;
    const int32_t *table;
    char *packed;
    int64_t table_s, columns, slots, data, scales, parts, first, count, ring;
    bool unpack;
    int32_t *status;
};

template <int BYTES>
__global__ void __launch_bounds__(THREADS) cache_pack_rows(const __grid_constant__ pack_kernel a)
{
    const int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (i >= a.count) return;
    const int64_t row = a.first + i, slot = row % a.slots, block = row / a.slots,
                  column = a.ring > 0 ? block % a.ring : block;
    const int32_t page = column < a.columns ? a.table[column * a.table_s] : -1;
    if ((uint32_t)page >= (uint32_t)a.pool.pages) {
        if (threadIdx.x % 32 == 0) raise_status(a.status, QUERN_STATUS_BAD_PAGE);
        return;
    }
    char *packed = a.packed + i * a.parts * (a.data + a.scales);
    for (int64_t part = 0; part < a.parts; part++) {
        char *const base = a.pool.p + page * a.pool.page + part * a.pool.part;
        char *const data = base + slot * a.data, *const scales = base + a.slots * a.data + slot * a.scales;
        copy_bytes<BYTES>(a.unpack ? data : packed, a.unpack ? packed : data, a.data, 32);
        packed += a.data;
        copy_bytes<BYTES>(a.unpack ? scales : packed, a.unpack ? packed : scales, a.scales, 32);
        packed += a.scales;
    }
}

static quern_status pack_rows_run(const stage_exec *exec, const pack_rows_args *args, void *)
{
    const pack_kernel a = {pages_of(args->pages),
                           (const int32_t *)args->table.data,
                           (char *)args->packed.data,
                           args->table.strides[0],
                           args->table.shape[0],
                           args->page,
                           args->data,
                           args->scales,
                           args->parts,
                           args->first,
                           args->count,
                           args->ring,
                           args->unpack,
                           exec->status};
    if (a.count == 0) return QUERN_OK;
    const unsigned grid = blocks_for(a.count, WARPS);
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    const bool wide = ((a.data | a.scales | (int64_t)((uintptr_t)a.packed | (uintptr_t)a.pool.p) |
                        a.pool.page | a.pool.part) &
                       15) == 0;
    if (wide) cache_pack_rows<16><<<grid, THREADS, 0, stream>>>(a);
    else cache_pack_rows<1><<<grid, THREADS, 0, stream>>>(a);
    return LAUNCHED("rows packed");
}

extern const variant<copy_pages_args> copy_pages_any = {"copy_pages_any", NULL, NULL, copy_pages_run};
extern const variant<pack_rows_args> pack_rows_any = {"pack_rows_any", NULL, NULL, pack_rows_run};
