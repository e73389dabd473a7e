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

typedef struct symbol {
    char name[8];
    int64_t value;
} symbol;
enum { SYMBOLS_MAX = 24 };

typedef struct job {
    const operation *op;
    any_params params;
    any_tensors tensors;
    bool save_branches;
    bool backward; /* the trigger is there */
    int device;    /* quern_device: where the tensors are; inputs of a file are copied there */
    bool plan;     /* reserve addresses instead of memory: sizes can be asked for, nothing can run */
    size_t total_bytes; /* of what the job owns */
    quern_tensor storage[SLOTS_MAX]; /* by slot index */
    bool input[SLOTS_MAX];
    void *owned[SLOTS_MAX]; /* memory of the job: outputs, and inputs that are not of a file */
    size_t owned_bytes[SLOTS_MAX];
    symbol symbols[SYMBOLS_MAX];
    size_t symbol_count;
    int64_t lead[QUERN_MAX_DIMS]; /* what "..." stands for */
    int32_t lead_count;
    void *workspace;
    size_t workspace_bytes;
    double forward_ms, backward_ms;
    void *events[3], *flush; /* CUDA: around the passes; what job_flush writes over */
} job;

/* Starts a job; params are taken over. */
void job_init(job *j, const operation *op, const any_params *params);
/* Hands in an input under its name; false if the operation reads no such tensor. */
bool job_bind(job *j, const slot *s, const quern_tensor *t);
/* Reads every input of the operation that the file holds. Returns an exit code after a message. */
int job_read(job *j, const quern_safetensors *file, const char *path, const char *without);
/* For jobs that are not read from a file: sets a symbol, and says the shape of a tensor once the symbols that it
 * needs are set. False where one is missing. */
void job_symbol(job *j, const char *name, int64_t value);
bool job_shape(job *j, const slot *s, int64_t shape[QUERN_MAX_DIMS], int32_t *ndim);
/* Bytes of a contiguous tensor. False where they, or a stride of it, are beyond 2^63. */
bool job_bytes(quern_dtype dtype, int32_t ndim, const int64_t *shape, size_t *bytes);
/* Memory for the tensor of a slot, zeroed, huge pages where it is large; NULL where there is none. */
void *job_allocate(job *j, const slot *s, size_t bytes);
/* Sets the gate and list modes by the inputs, sizes and allocates outputs and workspace. */
int job_prepare(job *j, quern_context *ctx);
/* A step of it: where compressed rows are handed in, writes their borders. The parameters are legal. */
int job_fill_borders(job *j);
/* Runs the forward pass, and the backward pass where its trigger is there; takes the times. */
int job_run(job *j, quern_context *ctx);
/* The same on the GPU, without a message. */
quern_status job_run_cuda(job *j, quern_context *ctx);
/* CUDA: pushes the tensors out of the L2 cache. On the CPU there is nothing to do. */
int job_flush(job *j);
int job_write(const job *j, const char *path);
void job_free(job *j);

/* Milliseconds of a steady clock. */
double now_ms(void);

#endif
