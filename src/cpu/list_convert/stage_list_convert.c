/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_list_convert.c - the list_convert stage: lists of blocks of `from` tokens as lists of blocks of `to`
 * tokens. Entries that are padding or outside the sequence are skipped. */
#include "core/parallel.h"
#include "cpu/stages.h"

#include <stdio.h>

/* Inserts x into the ascending list unless it is there. */
static int64_t insert(int32_t *list, int64_t count, int32_t x)
{
    int64_t at = count;
    while (at > 0 && list[at - 1] > x) at--;
    if (at > 0 && list[at - 1] == x) return count;
    for (int64_t i = count; i > at; i--) list[i] = list[i - 1];
    list[at] = x;
    return count + 1;
}

static void convert_list(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const list_convert_args *args = arg;
    const int32_t *in = (const int32_t *)args->in.data + index * args->in.strides[0];
    int32_t *out = (int32_t *)args->out.data + index * args->out.strides[0];
    const int64_t wide = args->from >= args->to ? args->from / args->to : 1;  /* blocks out of one */
    const int64_t narrow = args->to > args->from ? args->to / args->from : 1; /* blocks into one */
    const int64_t blocks = (args->n + args->to - 1) / args->to;
    int64_t count = 0;
    for (int64_t i = 0; i < args->in.shape[1]; i++)
        if (in[i] >= 0 && in[i] * args->from < args->n) count = insert(out, count, (int32_t)(in[i] / narrow));
    for (int64_t i = count - 1; i >= 0; i--) { /* from the back, because no entry moves towards the front */
        const int64_t first = out[i] * wide;
        for (int64_t j = wide - 1; j >= 0; j--) out[i * wide + j] = (int32_t)(first + j);
    }
    count *= wide;
    while (count > 0 && out[count - 1] >= blocks) count--;
    for (int64_t i = count; i < args->out.shape[1]; i++) out[i] = -1;
    if (args->count.ndim > 0) ((int32_t *)args->count.data)[index * args->count.strides[0]] = (int32_t)count;
}

quern_status cpu_list_convert(const stage_exec *exec, const list_convert_args *args, void *workspace)
{
    (void)workspace;
    list_convert_args copy = *args;
    if (args->out.shape[1] > 0 || args->count.ndim > 0)
        parallel_for(exec, args->in.shape[0], convert_list, &copy);
    return QUERN_OK;
}

void cpu_list_convert_kernel(const stage_exec *exec, const list_convert_args *args,
                             char text[STAGE_NAME_BYTES])
{
    (void)exec;
    (void)args;
    snprintf(text, STAGE_NAME_BYTES, "list_convert_i32_%s", quern_cpu_level_name(QUERN_CPU_LEVEL_PORTABLE));
}
