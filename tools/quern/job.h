/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * job.h - one operation on tensors by name: inputs are bound, outputs sized and allocated, the passes run.
 * `quern run` fills a job from a file, the bench and the probe from random data.
 */
#ifndef QUERN_TOOLS_JOB_H
#define QUERN_TOOLS_JOB_H

#include "ops.h"

#include <quern/safetensors.h>

enum { JOB_DTYPE_USUAL = -1, JOB_ADDED_MAX = 8 };

typedef struct job {
    const operation *op;
    any_params params;
    any_tensors tensors;
    bool aside;         /* results that are written only where they are asked for */
    bool backward;      /* a trigger is there */
    bool plan;          /* reserve addresses instead of memory: sizes can be asked for, nothing can run */
    int device;         /* quern_device: where the tensors are; inputs of a file are copied there */
    int dtype;          /* quern_dtype of results that may be f32, f16 or bf16; JOB_DTYPE_USUAL */
    int64_t asked[4];   /* extents, as quern_op_expect() takes them */
    size_t total_bytes; /* of what the job owns */
    quern_tensor storage[QUERN_OP_TENSORS_MAX];
    bool input[QUERN_OP_TENSORS_MAX];
    void *owned[QUERN_OP_TENSORS_MAX]; /* memory of the job: outputs, and inputs that are not of a file */
    size_t owned_bytes[QUERN_OP_TENSORS_MAX];
    const char *added_names[JOB_ADDED_MAX]; /* what a scenario writes itself */
    quern_tensor added[JOB_ADDED_MAX];
    size_t added_count;
    void *workspace;
    size_t workspace_bytes;
    double forward_ms, backward_ms;
    void *events[3], *flush; /* CUDA: around the passes; what job_flush writes over */
} job;
/* Starts a job; params are taken over. */
void job_init(job *j, const operation *op, const any_params *params);
/* Hands in an input. */
void job_bind(job *j, int tensor, const quern_tensor *t);
/* Reads every input of the operation that the file holds and the parameters use, and sets the parameters that
 * follow from them. Returns an exit code after a message. */
int job_read(job *j, const quern_safetensors *file, const char *path, const char *without);
/* Bytes of a contiguous tensor. False where they, or a stride of it, are beyond 2^63. */
bool job_bytes(quern_dtype dtype, int32_t ndim, const int64_t *shape, size_t *bytes);
/* Memory for a tensor, zeroed, huge pages where it is large; NULL where there is none. */
void *job_allocate(job *j, int tensor, size_t bytes);
/* A tensor that is written to the file under `name` (static), zeroed, on the job's device; NULL where there
 * is no memory. */
quern_tensor *job_add_output(job *j, const char *name, quern_dtype dtype, int32_t ndim, const int64_t *shape);
/* Computes inputs that follow from the others, sizes and allocates outputs and workspace. */
int job_prepare(job *j, quern_context *ctx);
/* The pass's function with the job's structs. */
quern_status job_pass(job *j, quern_context *ctx, quern_op_pass pass);
/* Runs the forward pass, and the backward pass where its trigger is there; takes the times. */
int job_run(job *j, quern_context *ctx);
/* The same on the GPU, without a message. */
quern_status job_run_cuda(job *j, quern_context *ctx);
/* CUDA: pushes the tensors out of the L2 cache. On the CPU there is nothing to do. */
int job_flush(job *j);
int job_write(const job *j, const char *op, const char *path);
void job_free(job *j);

/* Milliseconds of a steady clock. */
double now_ms(void);

#endif
