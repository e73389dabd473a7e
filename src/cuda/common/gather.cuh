/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gather.cuh - rows of sequences that stand one after another or in pages of a pool, of 16-bit elements or of
 * bytes with scales, and their copies into the tiles of mma.cuh. */
#ifndef QUERN_CUDA_GATHER_CUH
#define QUERN_CUDA_GATHER_CUH

#include "common/mma.cuh"

/* Distances are in bytes. Contiguous rows are the slots of one page a sequence. */
struct row_source {
    const char *p;
    const int32_t *table;      /* pages of a sequence; NULL: contiguous */
    int64_t page, row;         /* from page to page (sequence to sequence), from slot to slot */
    int64_t scales, scale_row; /* rows of bytes: from a page to the scales of its slot 0, from slot to slot */
    int64_t table_row;         /* elements from sequence to sequence */
    int32_t columns, pages;    /* of the table, of the pool */
    fast_div slots;            /* of a page */
    bool wide;   /* rows can be read 16 bytes at a time; rows of bytes and their scales: ALIGNED_BYTES */
    bool widest; /* rows of bytes can be read 16 bytes at a time, their scales 8 */
};
enum { ALIGNED_BYTES = 4 };

/* A row's elements and, of a row of bytes, its scales. */
struct row_place {
    const char *data, *scales;
};

static inline const char *dtype_text(quern_dtype dtype)
{
    return dtype == QUERN_F32 ? "f32" : dtype == QUERN_F16 ? "f16" : dtype == QUERN_BF16 ? "bf16" : "u8";
}

/* A view [sequences, rows, ..] or, with `slots` of a page, a pool; rows of bytes hold `codes` bytes, then
 * scales. */
static inline row_source row_source_of(const quern_tensor &t, const quern_tensor &table, int64_t slots,
                                       int64_t codes)
{
    const int64_t size = t.dtype == QUERN_F32 ? 4 : t.dtype == QUERN_U8 ? 1 : 2;
    row_source s = {};
    if (!present(t)) return s;
    s.p = (const char *)t.data;
    s.page = t.strides[0] * size;
    if (!present(table)) {
        s.row = s.scale_row = t.strides[1] * size;
        s.scales = codes;
    } else {
        s.table = (const int32_t *)table.data;
        s.table_row = table.strides[0];
        s.columns = (int32_t)table.shape[1];
        s.pages = (int32_t)t.shape[0];
        s.slots = fast_div_by((uint32_t)slots);
        const bool planar = codes > 0 && t.ndim == 2; /* all slots' codes, then their scales */
        s.row = planar ? codes : t.strides[1] * size;
        s.scales = planar ? codes * slots : codes;
        s.scale_row = planar ? t.shape[1] / slots - codes : s.row;
    }
    s.wide =
        (((uintptr_t)s.p | (uint64_t)s.page | (uint64_t)s.row | (uint64_t)s.scale_row | (uint64_t)s.scales) &
         (codes > 0 ? ALIGNED_BYTES - 1 : 15)) == 0;
    s.widest = (((uintptr_t)s.p | (uint64_t)s.page | (uint64_t)s.row) & 15) == 0 &&
               (((uint64_t)s.scales | (uint64_t)s.scale_row) & 7) == 0;
    return s;
}

/* Whether the table names a page of the pool for row i, which may be any. */
__device__ __forceinline__ bool row_exists(const row_source &s, int64_t sequence, uint32_t i)
{
    if (s.table == NULL) return true;
    const uint32_t column = quotient(i, s.slots);
    return column < (uint32_t)s.columns &&
           (uint32_t)__ldg(s.table + sequence * s.table_row + column) < (uint32_t)s.pages;
}

/* In which page row i stands, and where there. */
__device__ __forceinline__ int row_page(const row_source &s, int64_t sequence, uint32_t i)
{
    return s.table == NULL ? (int)sequence : __ldg(s.table + sequence * s.table_row + quotient(i, s.slots));
}
__device__ __forceinline__ row_place row_in_page(const row_source &s, int64_t page, uint32_t i)
{
    const uint32_t slot = s.table == NULL ? i : i - quotient(i, s.slots) * s.slots.d;
    const char *base = s.p + page * s.page;
    return {base + slot * s.row, base + s.scales + slot * s.scale_row};
}
__device__ __forceinline__ row_place row_at(const row_source &s, int64_t sequence, uint32_t i)
{
    return row_in_page(s, row_page(s, sequence, i), i);
}

/* Four and eight bytes. */
__device__ __forceinline__ uint32_t load_four(const char *p, bool wide)
{
    if (wide) return __ldg((const uint32_t *)p);
    uint32_t w = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) w |= (uint32_t)(uint8_t)p[i] << i * 8;
    return w;
}
__device__ __forceinline__ uint2 load_eight(const char *p, bool wide)
{
    return wide ? make_uint2(load_four(p, true), load_four(p + 4, true))
                : make_uint2(load_four(p, false), load_four(p + 4, false));
}

#endif
