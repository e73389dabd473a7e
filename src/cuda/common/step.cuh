/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* step.cuh - the sequences of a step and the pages of a cache, whose numbers only the device knows. Rows,
 * positions and pages are clamped or skipped where they are read; step_check() says so. */
#ifndef QUERN_CUDA_STEP_CUH
#define QUERN_CUDA_STEP_CUH

#include "common/rows.cuh"

struct step_view {
    const void *slots;
    bool slots_i64;
    int64_t slots_s, positions_s, rows_s[2];
    const int32_t *positions, *rows;
    int32_t batch;
    int64_t total; /* rows of the call */
};

static inline step_view step_view_of(const stage_step &s, int64_t total)
{
    return {s.slots.data,
            s.slots.dtype == QUERN_I64,
            s.slots.strides[0],
            s.positions.strides[0],
            {s.rows.strides[0], s.rows.strides[1]},
            (const int32_t *)s.positions.data,
            (const int32_t *)s.rows.data,
            (int32_t)s.slots.shape[0],
            total};
}

/* Sequence b: rows [row, row + count) of the call stand at positions first ... */
struct step_rows {
    int64_t first, row, count;
};

__device__ __forceinline__ int64_t step_slot(const step_view &s, int64_t b)
{
    return s.slots_i64 ? ((const int64_t *)s.slots)[b * s.slots_s]
                       : ((const int32_t *)s.slots)[b * s.slots_s];
}

__device__ __forceinline__ step_rows step_rows_at(const step_view &s, int64_t b)
{
    const int32_t *const rows = s.rows + b * s.rows_s[0];
    const int64_t slot = step_slot(s, b), from = cu_seqlens_at(rows, 0, s.total),
                  to = cu_seqlens_at(rows, s.rows_s[1], s.total);
    return {s.positions[b * s.positions_s], from, slot >= 0 && to > from ? to - from : 0};
}

/* The sequence that has row t of the call; -1: none. A warp calls. Equal numbers of rows are found first. */
__device__ __forceinline__ int step_sequence_of(const step_view &s, int64_t t)
{
    const auto has = [&](int64_t b) {
        const step_rows r = step_rows_at(s, b);
        return t >= r.row && t < r.row + r.count;
    };
    const int guess = (int)(t * s.batch / s.total);
    if (has(guess)) return guess;
    for (int b0 = 0; b0 < s.batch; b0 += 32) {
        const int b = b0 + (int)threadIdx.x % 32;
        const unsigned found = __ballot_sync(~0u, b < s.batch && has(b));
        if (found != 0) return b0 + __ffs((int)found) - 1;
    }
    return -1;
}

/* A kind of rows in pages of 64: of each head the keys of a page, then its values. Distances in bytes. */
struct plane_view {
    char *p;
    const int32_t *table;
    int64_t page, head, table_s[2];
    int32_t columns, pages, ring, heads;
    int32_t key, value; /* bytes of a row */
    int32_t dim, dim_v;
};

static inline plane_view plane_view_of(const cache_plane &plane)
{
    const quern_tensor &t = plane.blocks;
    const int64_t size = bytes_of(t.dtype);
    plane_view v = {};
    if (!present(t)) return v;
    v.p = (char *)t.data;
    v.table = (const int32_t *)plane.table.data;
    v.page = t.strides[0] * size;
    v.head = t.strides[1] * size;
    v.table_s[0] = plane.table.strides[0];
    v.table_s[1] = plane.table.strides[1];
    v.columns = (int32_t)plane.table.shape[1];
    v.pages = (int32_t)t.shape[0];
    v.ring = (int32_t)plane.ring;
    v.heads = (int32_t)t.shape[1];
    v.key = (int32_t)(plane.dim * size);
    v.value = (int32_t)(plane.dim_v * size);
    v.dim = (int32_t)plane.dim;
    v.dim_v = (int32_t)plane.dim_v;
    return v;
}

/* Whether each row of keys and values starts at a multiple of `bytes`. */
static __host__ __device__ inline bool plane_aligned(const plane_view &v, int64_t bytes)
{
    return (((uintptr_t)v.p | (uint64_t)v.page | (uint64_t)v.head | (uint64_t)v.key | (uint64_t)v.value) &
            (uint64_t)(bytes - 1)) == 0;
}

/* Where the table names the page of a block of sequence b; NULL where it has no such column. */
__device__ __forceinline__ const int32_t *plane_page(const plane_view &v, int64_t b, int64_t block)
{
    const uint32_t all = (uint32_t)block, /* positions are i32 */
        column = v.ring > 0 ? all % (uint32_t)v.ring : all;
    return column < (uint32_t)v.columns ? v.table + b * v.table_s[0] + column * v.table_s[1] : NULL;
}
/* The keys of a head's block in a page; NULL where the pool has no such page. */
__device__ __forceinline__ char *plane_block_in(const plane_view &v, int32_t page, int head, int32_t *status)
{
    if ((uint32_t)page < (uint32_t)v.pages) return v.p + page * v.page + head * v.head;
    raise_status(status, QUERN_STATUS_BAD_PAGE);
    return NULL;
}
/* The same of a block of sequence b. */
__device__ __forceinline__ char *plane_block(const plane_view &v, int64_t b, int head, int64_t block,
                                             int32_t *status)
{
    const int32_t *const page = plane_page(v, b, block);
    return page != NULL ? plane_block_in(v, __ldg(page), head, status) : NULL;
}

/* A key's row, and how far behind it its value's row begins. */
struct plane_row {
    char *key;
    int32_t value;
};
__device__ __forceinline__ plane_row plane_row_in(const plane_view &v, char *block, uint32_t row)
{
    const int slot = (int)(row % CACHE_BLOCK);
    return {block != NULL ? block + slot * v.key : NULL, (CACHE_BLOCK - slot) * v.key + slot * v.value};
}
__device__ __forceinline__ plane_row plane_row_at(const plane_view &v, int64_t b, int head, int64_t row,
                                                  int32_t *status)
{
    return plane_row_in(v, plane_block(v, b, head, (uint32_t)row / CACHE_BLOCK, status), (uint32_t)row);
}

/* Whether sequence b with `tokens` tokens fits into a plane's table. A block_size: the plane's rows are
 * entries. */
__device__ __forceinline__ bool plane_holds(const plane_view &v, int64_t tokens, int64_t count,
                                            int64_t block_size, int64_t stride)
{
    if (v.p == NULL) return true;
    const int64_t rows = block_size > 0 ? mask_entries(tokens, block_size, stride) : tokens;
    return (v.ring > 0 ? count : rows) <= (int64_t)v.columns * CACHE_BLOCK;
}

/* Whether a sequence has a position. */
__device__ __forceinline__ bool step_good(const step_view &s, int64_t b)
{
    return s.positions[b * s.positions_s] >= 0;
}

/* Looks for faults of a step's offsets and positions: a block's threads, all sequences. */
__device__ __forceinline__ void step_check(const step_view &s, int32_t *status)
{
    if (status == NULL) return;
    const bool offsets = s.rows_s[0] == s.rows_s[1]; /* the rows are cu_seqlens: they start at 0 */
    for (int64_t b = threadIdx.x; b < s.batch; b += blockDim.x) {
        const int32_t *const rows = s.rows + b * s.rows_s[0];
        const int64_t from = rows[0], to = rows[s.rows_s[1]];
        if (from < 0 || to < from || to > s.total || (offsets && b == 0 && from != 0))
            raise_status(status, QUERN_STATUS_BAD_OFFSETS);
        if (!step_good(s, b)) raise_status(status, QUERN_STATUS_BAD_POSITION);
    }
}

#endif
