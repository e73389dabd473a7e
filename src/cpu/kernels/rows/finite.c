/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* finite.c - the largest magnitudes of rows. Limit: x read once. */
#include "cpu/kernels/rows/finite.h"
#include "cpu/levels.h"

#include "core/parallel.h"
#include "cpu/kernels/rows/row_kernels.h"

#include <math.h>

static const uint32_t infinite = 0x7f800000u;

typedef struct magnitude_job {
    const row_kernels *kernels;
    const quern_tensor *x;
    const row_magnitudes *m;
} magnitude_job;

static row_cut cut_of(const quern_tensor *x)
{
    return cut_rows(view_rows(x), view_columns(x));
}

size_t row_magnitudes_bytes(const quern_tensor *x)
{
    const row_cut cut = cut_of(x);
    return (size_t)(cut.rows * cut.pieces_a_row) * sizeof(uint32_t);
}

static void measure_piece(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const magnitude_job *job = arg;
    const row_cut *cut = &job->m->cut;
    const row_piece p = piece_at(cut, index);
    const int64_t part = p.column / cut->columns_a_piece, element = (int64_t)quern_dtype_size(job->x->dtype);
    for (int64_t row = p.first; row < p.end; row++)
        job->m->bits[row * cut->pieces_a_row + part] = job->kernels->magnitude(
            (const char *)view_row(job->x, row) + p.column * element, job->x->dtype, p.columns);
}

quern_status report_not_finite(const stage_exec *exec, const quern_tensor *x, int64_t row, int64_t column)
{
    const stage_fault fault = {
        .kind = QUERN_STATUS_NOT_FINITE, .tensor = x, .index = row * view_columns(x) + column};
    return stage_report(exec, fault);
}

static quern_status report_piece(const stage_exec *exec, const quern_tensor *x, const row_cut *cut,
                                 int64_t entry)
{
    const int64_t row = entry / cut->pieces_a_row;
    int64_t c = entry % cut->pieces_a_row * cut->columns_a_piece;
    while (isfinite(element_of(view_row(x, row), x->dtype, c))) c++;
    return report_not_finite(exec, x, row, c);
}

quern_status row_magnitudes_of(const stage_exec *exec, const quern_tensor *x, int64_t rows, row_magnitudes *m)
{
    m->cut = cut_first_rows(cut_of(x), rows);
    magnitude_job job = {cpu_kernels_for(exec->cpu_level)->rows, x, m};
    parallel_for(exec, m->cut.pieces, measure_piece, &job);
    for (int64_t i = 0; i < rows * m->cut.pieces_a_row; i++)
        if (m->bits[i] >= infinite) return report_piece(exec, x, &m->cut, i);
    return QUERN_OK;
}

float largest_of_rows(const row_magnitudes *m, int64_t first, int64_t end)
{
    uint32_t most = 0;
    for (int64_t i = first * m->cut.pieces_a_row; i < end * m->cut.pieces_a_row; i++)
        if (m->bits[i] > most) most = m->bits[i];
    return float_from_bits(most);
}
