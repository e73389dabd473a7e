/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_swizzle.c - moves scales between row-major order and the order of tensor cores: tiles of 128 rows and
 * 4 columns, 512 bytes each, with row r at byte (r % 32) * 16 + (r / 32) * 4. Rows and columns past the end
 * are zero. Limit: bytes read and written once.
 */
#include "core/parallel.h"
#include "cpu/kernels/rows/views.h"
#include "cpu/quantise/stages.h"

#include <string.h>

enum { TILE_ROWS = 128, TILE_COLUMNS = 4, TILE_BYTES = TILE_ROWS * TILE_COLUMNS };

typedef struct swizzle_job {
    const swizzle_args *args;
    int64_t rows, columns, tiles; /* of a matrix; tiles across */
} swizzle_job;

static uint8_t *in_tile(uint8_t *tile, int64_t r, int64_t c)
{
    return tile + r % 32 * 16 + r / 32 * 4 + c;
}

static uint8_t *linear_at(const swizzle_args *args, int64_t matrix, int64_t row, int64_t column)
{
    const quern_tensor *t = &args->linear;
    if (args->transposed) return (uint8_t *)t->data + matrix * t->strides[0] + column * t->strides[1] + row;
    return (uint8_t *)t->data + row * t->strides[0] + column;
}

/* Copies rows [first, first + rows) of a matrix to or from the row of tiles that begins at `tile`. */
static void move_tiles(const swizzle_job *job, int64_t matrix, int64_t first, int64_t rows, uint8_t *tile)
{
    for (int64_t t = 0; t < job->tiles; t++, tile += TILE_BYTES) {
        const int64_t left = job->columns - t * TILE_COLUMNS,
                      columns = left < TILE_COLUMNS ? left : TILE_COLUMNS;
        if (!job->args->inverse) memset(tile, 0, TILE_BYTES);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++) {
                uint8_t *linear = linear_at(job->args, matrix, first + r, t * TILE_COLUMNS + c),
                        *swizzled = in_tile(tile, r, c);
                if (job->args->inverse) *linear = *swizzled;
                else *swizzled = *linear;
            }
    }
}

/* One row of tiles of one matrix. */
static void tile_row(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const swizzle_job *job = arg;
    const quern_tensor *swizzled = &job->args->swizzled;
    const int64_t down = (job->rows + TILE_ROWS - 1) / TILE_ROWS, matrix = index / down,
                  first = index % down * TILE_ROWS;
    const int64_t rows = job->rows - first < TILE_ROWS ? job->rows - first : TILE_ROWS;
    uint8_t *base = (uint8_t *)swizzled->data + (swizzled->ndim > 1 ? matrix * swizzled->strides[0] : 0);
    move_tiles(job, matrix, first, rows, base + index % down * job->tiles * TILE_BYTES);
}

/* The experts' rows are among those of `linear`, and their tiles in `swizzled`. */
static quern_status check_tokens(const stage_exec *exec, const swizzle_job *job)
{
    const quern_tensor *t = &job->args->tokens;
    const int64_t row_bytes = job->tiles * TILE_BYTES,
                  tiles = row_bytes > 0 ? job->args->swizzled.shape[0] / row_bytes : INT32_MAX;
    int64_t left = job->rows, free = tiles;
    for (int64_t e = 0; e < t->shape[0]; e++) {
        const int64_t n = ((const int32_t *)t->data)[e], room = free * TILE_ROWS,
                      most = left < room ? left : room;
        if (n < 0 || n > most)
            return stage_report(
                exec, (stage_fault){.kind = QUERN_STATUS_BAD_OFFSETS, .tensor = t, .index = e, .most = most});
        left -= n;
        free -= (n + TILE_ROWS - 1) / TILE_ROWS;
    }
    return QUERN_OK;
}

/* Each expert's rows, which start at a new tile. */
static void assemble(const swizzle_job *job)
{
    const swizzle_args *args = job->args;
    const int32_t *tokens = args->tokens.data;
    int32_t *offsets = args->pad_row_offsets.data;
    uint8_t *to = args->swizzled.data;
    int64_t row = 0, padded = 0;
    for (int64_t e = 0; e < args->tokens.shape[0]; e++) {
        if (offsets != NULL) offsets[e] = (int32_t)padded;
        for (int64_t first = 0; first < tokens[e];
             first += TILE_ROWS, to += job->tiles * TILE_BYTES, padded += TILE_ROWS)
            move_tiles(job, 0, row + first, tokens[e] - first < TILE_ROWS ? tokens[e] - first : TILE_ROWS,
                       to);
        row += tokens[e];
    }
    if (offsets != NULL) offsets[args->tokens.shape[0]] = (int32_t)padded;
    if (!args->inverse)
        memset(to, 0, (size_t)(args->swizzled.shape[0] - (to - (uint8_t *)args->swizzled.data)));
    for (; args->inverse && row < job->rows; row++)
        memset(linear_at(args, 0, row, 0), 0, (size_t)job->columns);
}

quern_status cpu_swizzle(const stage_exec *exec, const swizzle_args *args, void *workspace)
{
    (void)workspace;
    const quern_tensor *linear = &args->linear;
    const int64_t matrices = args->transposed ? linear->shape[0] : 1;
    swizzle_job job = {.args = args, .columns = linear->shape[1]};
    if (job.columns > 0) job.rows = linear->shape[args->transposed ? 2 : 0];
    job.tiles = (job.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    if (args->tokens.ndim > 0) {
        const quern_status status = check_tokens(exec, &job);
        if (status != QUERN_OK) return status;
        assemble(&job);
    } else parallel_for(exec, matrices * ((job.rows + TILE_ROWS - 1) / TILE_ROWS), tile_row, &job);
    return QUERN_OK;
}
