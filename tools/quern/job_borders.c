/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* job_borders.c - cu_seqlens_cmp of packed sequences whose compressed rows are handed in: files and benches hold only
 * cu_seqlens, from which it follows. */
#include "command.h"
#include "job.h"

#include <quern/cuda.h>

#include <stdlib.h>
#include <string.h>

static quern_status copy(const job *j, void *to, const void *from, size_t bytes)
{
    if (j->device == QUERN_CUDA) {
        const quern_status status = quern_cuda_copy(0, to, from, bytes, NULL);
        return status == QUERN_OK ? quern_cuda_synchronize(0, NULL) : status;
    }
    memcpy(to, from, bytes);
    return QUERN_OK;
}

int job_fill_borders(job *j)
{
    const quern_nsa_params *p = &j->params.nsa;
    const quern_nsa_tensors *t = &j->tensors.nsa;
    if (j->plan || strcmp(j->op->name, "nsa") != 0 || p->compress != QUERN_NSA_COMPRESS_GIVEN || t->cu_seqlens_cmp == NULL) return EXIT_DONE;
    const int64_t l = p->block_size, d = p->stride > 0 ? p->stride : l, count = t->cu_seqlens->shape[0];
    const size_t bytes = (size_t)count * sizeof(int32_t);
    int32_t *tokens = malloc(2 * bytes), *entries = tokens + count;
    if (tokens == NULL) return fail(EXIT_MACHINE, "no memory for %zu bytes of cu_seqlens", bytes);
    quern_status status = copy(j, tokens, t->cu_seqlens->data, bytes);
    int64_t sum = 0; /* borders that make no sense are the library's to refuse */
    for (int64_t b = 0; b < count && status == QUERN_OK; b++) {
        const int64_t n = b > 0 ? (int64_t)tokens[b] - tokens[b - 1] : 0;
        sum += n < l ? 0 : (n - l) / d + 1;
        entries[b] = (int32_t)sum;
    }
    if (status == QUERN_OK) status = copy(j, t->cu_seqlens_cmp->data, entries, bytes);
    free(tokens);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}
