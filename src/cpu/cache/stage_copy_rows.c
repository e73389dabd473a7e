/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_copy_rows.c - the copy_rows stage. A task is a run. Limit: the copy bandwidth. */
#include "core/parallel.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"

#include <string.h>

static char *row_of(const quern_tensor *t, int64_t row)
{
    return (char *)t->data + row * t->strides[0] * (int64_t)quern_dtype_size(t->dtype);
}

static void copy_run(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const copy_rows_args *args = arg;
    const int64_t *run = (const int64_t *)args->runs.data + index * args->runs.strides[0];
    for (int p = 0; p < COPY_ROWS_PAIRS && is_present(&args->pair[p].x); p++) {
        const quern_tensor *x = &args->pair[p].x, *out = &args->pair[p].out;
        const size_t bytes = (size_t)x->shape[1] * quern_dtype_size(x->dtype);
        for (int64_t i = 0; i < run[2]; i++) memcpy(row_of(out, run[1] + i), row_of(x, run[0] + i), bytes);
    }
}

quern_status cpu_copy_rows(const stage_exec *exec, const copy_rows_args *args, void *workspace)
{
    (void)workspace;
    parallel_for(exec, args->runs.shape[0], copy_run, (void *)(uintptr_t)args);
    return QUERN_OK;
}
