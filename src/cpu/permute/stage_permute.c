/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_permute.c - the permute stage, some rows a task. Limit: rows read and written once. */
#include "core/parallel.h"
#include "cpu/permute/stages.h"
#include "cpu/kernels/rows/views.h"

#include <string.h>

enum { ROWS_A_TASK = 16 };

static void permute_task(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const permute_args *args = arg;
    const int32_t *slots = args->permutation.data;
    const int64_t rows = view_rows(&args->out), first = index * ROWS_A_TASK;
    const int64_t end = first + ROWS_A_TASK < rows ? first + ROWS_A_TASK : rows;
    const size_t bytes = (size_t)view_columns(&args->out) * quern_dtype_size(args->out.dtype);
    for (int64_t row = first; row < end; row++) {
        const int64_t from = args->permutation.ndim > 0 ? slots[row] / args->per : row;
        memcpy(view_row(&args->out, row), view_row(&args->x, from), bytes);
    }
}

/* Every sorted row holds a slot of a token. */
static quern_status check_slots(const stage_exec *exec, const permute_args *args)
{
    const int32_t *slots = args->permutation.data;
    const int64_t most = view_rows(&args->x) * args->per - 1;
    for (int64_t row = 0; args->permutation.ndim > 0 && row < view_rows(&args->out); row++)
        if (slots[row] < 0 || slots[row] > most)
            return stage_report(exec,
                                (stage_fault){QUERN_STATUS_BAD_ID, &args->permutation, row, .most = most});
    return QUERN_OK;
}

quern_status cpu_permute(const stage_exec *exec, const permute_args *args, void *workspace)
{
    (void)workspace;
    permute_args copy = *args;
    if (view_columns(&args->out) == 0) return QUERN_OK;
    const quern_status status = check_slots(exec, args);
    if (status != QUERN_OK) return status;
    parallel_for(exec, (view_rows(&args->out) + ROWS_A_TASK - 1) / ROWS_A_TASK, permute_task, &copy);
    return QUERN_OK;
}
