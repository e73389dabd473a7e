/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* job_cuda.c - a job's passes on the GPU, timed in its stream, and its cache. */
#include "job.h"

#include "command.h"

#include <quern/cuda.h>

quern_status job_run_cuda(job *j, quern_context *ctx)
{
    quern_status status = QUERN_OK;
    for (int i = 0; i < 3 && status == QUERN_OK; i++)
        if (j->events[i] == NULL) status = quern_cuda_event_create(0, &j->events[i]);
    if (status == QUERN_OK) status = quern_cuda_event_record(0, j->events[0], NULL);
    if (status == QUERN_OK) status = job_pass(j, ctx, QUERN_OP_FORWARD);
    if (status == QUERN_OK) status = quern_cuda_event_record(0, j->events[1], NULL);
    if (status == QUERN_OK && j->backward) status = job_pass(j, ctx, QUERN_OP_BACKWARD);
    if (status == QUERN_OK) status = quern_cuda_event_record(0, j->events[2], NULL);
    if (status == QUERN_OK) status = quern_cuda_synchronize(0, NULL);
    if (status == QUERN_OK) status = quern_cuda_event_elapsed(0, j->events[0], j->events[1], &j->forward_ms);
    return status == QUERN_OK ? quern_cuda_event_elapsed(0, j->events[1], j->events[2], &j->backward_ms)
                              : status;
}

int job_flush(job *j)
{
    const size_t bytes = (size_t)256 << 20; /* several times any GPU's L2 */
    if (j->device != QUERN_CUDA) return EXIT_DONE;
    quern_status status = j->flush != NULL ? QUERN_OK : quern_cuda_allocate(0, bytes, &j->flush);
    if (status == QUERN_OK) status = quern_cuda_fill(0, j->flush, 1, bytes, NULL);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}
