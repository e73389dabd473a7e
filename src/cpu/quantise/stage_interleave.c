/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_interleave.c - turns the two halves of a row, gate and up, into runs that alternate, and back. A half
 * that is no multiple of the run is padded with zeros. Limit: bytes read and written once. */
#include "core/parallel.h"
#include "cpu/kernels/rows/views.h"
#include "cpu/quantise/stages.h"

#include <string.h>

static void interleave_row(void *arg, int64_t row, int32_t thread)
{
    (void)thread;
    const interleave_args *args = arg;
    const quern_tensor *halves = args->inverse ? &args->out : &args->in,
                       *runs = args->inverse ? &args->in : &args->out;
    const size_t element = quern_dtype_size(args->in.dtype);
    const int64_t width = view_columns(halves) / 2, q = args->granularity;
    char *half = view_row(halves, row), *run = view_row(runs, row);
    for (int64_t part = 0; part < 2; part++)
        for (int64_t c = 0; c < view_columns(runs) / 2; c += q) {
            const int64_t left = width - c, n = left < 0 ? 0 : left < q ? left : q;
            char *one = half + (size_t)(part * width + c) * element,
                 *other = run + (size_t)(2 * c + part * q) * element;
            if (args->inverse) memcpy(one, other, (size_t)n * element);
            else {
                memcpy(other, one, (size_t)n * element);
                memset(other + (size_t)n * element, 0, (size_t)(q - n) * element);
            }
        }
}

quern_status cpu_interleave(const stage_exec *exec, const interleave_args *args, void *workspace)
{
    (void)workspace;
    interleave_args copy = *args;
    parallel_for(exec, view_columns(&args->out) > 0 ? view_rows(&args->in) : 0, interleave_row, &copy);
    return QUERN_OK;
}
