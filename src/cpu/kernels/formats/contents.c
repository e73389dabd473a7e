/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "cpu/kernels/formats/contents.h"

#include "core/parallel.h"
#include "cpu/kernels/rows/views.h"

#include <math.h>
#include <stdatomic.h>

enum { LARGEST_SCALE = 0x7E };

typedef struct scan_job {
    const quern_tensor *scales;
    row_cut cut;
    atomic_bool bad;
} scan_job;

static bool is_bad(const uint8_t *bytes, int64_t n)
{
    uint8_t most = 0;
    for (int64_t i = 0; i < n; i++) most = bytes[i] > most ? bytes[i] : most;
    return most > LARGEST_SCALE;
}

static void scan_piece(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    scan_job *job = arg;
    const row_piece p = piece_at(&job->cut, index);
    for (int64_t row = p.first; row < p.end; row++)
        if (is_bad((const uint8_t *)view_row(job->scales, row) + p.column, p.columns))
            atomic_store(&job->bad, true);
}

quern_status check_scale_bytes(const stage_exec *exec, const quern_tensor *scales, int64_t rows)
{
    const int64_t columns = view_columns(scales);
    scan_job job = {.scales = scales, .cut = cut_rows(rows, columns)};
    parallel_for(exec, job.cut.pieces, scan_piece, &job);
    if (!atomic_load(&job.bad)) return QUERN_OK;
    int64_t row = 0, c = 0;
    while (!is_bad(view_row(scales, row), columns)) row++;
    const uint8_t *bytes = view_row(scales, row);
    while (bytes[c] <= LARGEST_SCALE) c++;
    return stage_report(
        exec, (stage_fault){QUERN_STATUS_BAD_SCALE, scales, row * columns + c, .most = LARGEST_SCALE});
}

quern_status check_global_scales(const stage_exec *exec, const quern_tensor *globals)
{
    const int64_t columns = view_columns(globals),
                  count = globals->ndim > 0 ? view_rows(globals) * columns : 0;
    for (int64_t i = 0; i < count; i++) {
        const float g = element_of(view_row(globals, i / columns), QUERN_F32, i % columns);
        if (!(g > 0.0f) || isinf(g))
            return stage_report(
                exec, (stage_fault){.kind = QUERN_STATUS_BAD_GLOBAL, .tensor = globals, .index = i});
    }
    return QUERN_OK;
}

quern_status check_ends(const stage_exec *exec, const quern_tensor *offsets, int64_t rows)
{
    const int32_t *ends = offsets->data;
    int32_t before = 0;
    for (int64_t e = 0; offsets->ndim > 0 && e < offsets->shape[0]; before = ends[e++])
        if (ends[e] < before || ends[e] > rows)
            return stage_report(
                exec, (stage_fault){QUERN_STATUS_BAD_OFFSETS, offsets, e, .least = before, .most = rows});
    return QUERN_OK;
}
