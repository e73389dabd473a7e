/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - the arguments of the kernels that append a step's tokens to states. */
#ifndef QUERN_CUDA_POOL_APPEND_PARAMS_CUH
#define QUERN_CUDA_POOL_APPEND_PARAMS_CUH

#include "common/entry.cuh"
#include "common/launch.cuh"

/* A compressor. A group of `lanes` threads, four channels each, has a sequence's rows of it. */
struct append_part {
    int width, lanes, first; /* first: of the block's threads */
    bool wide;               /* all rows can be read and written four channels at a time */
    const char *proj;
    quern_dtype dtype;
    int size; /* bytes of an element */
    int64_t proj_row;
    const char *bias[2];
    quern_dtype bias_dtype[2];
    int64_t bias_row[2];
    float *state;
    int64_t state_row, merged_row;
    int32_t *merged;
    entry_kernel entry;
    float *pooled;
    char *out;
    quern_dtype out_dtype;
    int64_t pooled_row, out_row, rows; /* elements; bytes; of out and of pooled */
    const int32_t *table;              /* NULL: out is rows */
    int64_t table_row, table_column;
    uint32_t columns, pages, page;
    fast_div page_by;
    int64_t page_bytes, slot_bytes;
    int64_t scales, scale_bytes; /* from a page to its scales, from slot to slot; 0: in the row */
};

struct append_kernel {
    uint32_t ratio, ring;
    fast_div ring_by;
    int parts, series;
    bool careful; /* some entry may be refused */
    bool counts;  /* rows behind the entries become 0, and an entry's row is counted over all sequences */
    const void *slots;
    bool slots_i64;
    const int32_t *positions, *rows;
    int64_t slots_row, positions_row, rows_row, rows_next;
    int batch;
    int64_t tokens, states; /* rows of proj; slots */
    int32_t *fault;
    int64_t fault_row;
    int32_t *status;
    /* Of calls of many tokens, else NULL: i32 [batch], not 0 where an entry that pool_append_far made is
     * refused. */
    int32_t *refused;
    append_part part[POOL_PARTS];
};

#endif
