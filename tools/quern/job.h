/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * job.h - one operation on tensors by name: binds inputs, sizes and allocates outputs, runs the passes.
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
    bool aside;          /* write results that are written only on request */
    const char *without; /* forward results that are not written: "pooled scores"; NULL: none */
    bool backward;       /* an input that triggers the backward pass is given */
    bool plan;           /* reserve addresses instead of memory, to query sizes; nothing can run */
    int device;          /* quern_device of the tensors; inputs of a file are copied there */
    int dtype;           /* quern_dtype of results that may be f32, f16 or bf16; JOB_DTYPE_USUAL */
    int64_t asked[4];    /* extents, as quern_op_expect() takes them */
    /* Sets parameters that the inputs, or options of a scenario, decide; job_read() calls it before it checks
     * the parameters. NULL: none. Returns an exit code after a message. */
    int (*set_params)(struct job *j);
    size_t total_bytes; /* of what the job owns */
    quern_tensor storage[QUERN_OP_TENSORS_MAX];
    bool input[QUERN_OP_TENSORS_MAX];
    void *narrowed[QUERN_OP_TENSORS_MAX]; /* i32 copies of a file's i64 */
    void *owned[QUERN_OP_TENSORS_MAX];    /* memory of the job: outputs, and inputs that no file holds */
    size_t owned_bytes[QUERN_OP_TENSORS_MAX];
    const char *added_names[JOB_ADDED_MAX]; /* outputs of a scenario */
    quern_tensor added[JOB_ADDED_MAX];
    size_t added_count;
    void *workspace;
    size_t workspace_bytes;
    double forward_ms, backward_ms;
    void *status;            /* CUDA: the status word of job_watch(), else NULL */
    quern_tensor word;       /* that word */
    void *events[3], *flush; /* CUDA: before, between and after the passes; memory that job_flush() writes */
} job;
/* Starts a job; copies params. */
void job_init(job *j, const operation *op, const any_params *params);
/* Sets an input. */
void job_bind(job *j, int tensor, const quern_tensor *t);
/* Reads every input of the operation that the file holds and the parameters use, and sets the parameters that
 * follow from them. Returns an exit code after a message. */
int job_read(job *j, const quern_safetensors *file, const char *path, const char *without);
/* Bytes of a contiguous tensor. False if they, or a stride, exceed 2^63. */
bool job_bytes(quern_dtype dtype, int32_t ndim, const int64_t *shape, size_t *bytes);
/* Zeroed memory for a tensor, on huge pages if it is large; NULL without memory. */
void *job_allocate(job *j, int tensor, size_t bytes);
/* A zeroed tensor on the job's device that is written to the file under `name` (static); NULL without
 * memory. */
quern_tensor *job_add_output(job *j, const char *name, quern_dtype dtype, int32_t ndim, const int64_t *shape);
/* Computes inputs that follow from the others, sizes and allocates outputs and workspace. */
int job_prepare(job *j, quern_context *ctx);
/* The pass's function with the job's structs. */
quern_status job_pass(job *j, quern_context *ctx, quern_op_pass pass);
/* What calls on the job's tensors get: on a GPU, between these two, a status word. job_faults() ends that
 * with the exit code of the calls, and a fault of data is an error. */
int job_watch(job *j);
int job_faults(job *j, int code);
quern_exec job_exec(const job *j);
/* Runs the forward pass, and the backward pass if its trigger is given; times both. */
int job_run(job *j, quern_context *ctx);
/* The same on the GPU, without a message. */
quern_status job_run_cuda(job *j, quern_context *ctx);
/* CUDA: evicts the tensors from the L2 cache. Does nothing on the CPU. */
int job_flush(job *j);
int job_write(const job *j, const char *op, const char *path);
void job_free(job *j);

/* Milliseconds of a monotonic clock. */
double now_ms(void);

#endif
