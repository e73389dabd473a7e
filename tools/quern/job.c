/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* job.c - sizes, memory and passes of a job; its file is in job_file.c. */
#include "job.h"

#include "ceilings.h"
#include "command.h"
#include "device.h"
#include "values.h"

#include <quern/cuda.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

void job_init(job *j, const operation *op, const any_params *params)
{
    memset(j, 0, sizeof *j);
    j->op = op;
    j->params = *params;
    j->tensors = tensors_init(op);
    j->dtype = JOB_DTYPE_USUAL;
}

void job_bind(job *j, int tensor, const quern_tensor *t)
{
    j->storage[tensor] = *t;
    j->input[tensor] = true;
    j->tensors.t[tensor] = &j->storage[tensor];
    if (j->op->tensors[tensor].trigger) j->backward = true;
}

/* ---- memory ---- */

bool job_bytes(quern_dtype dtype, int32_t ndim, const int64_t *shape, size_t *bytes)
{
    int64_t product = (int64_t)quern_dtype_size(dtype); /* of the extents > 0: a stride counts them all */
    bool empty = false;
    for (int32_t i = 0; i < ndim; i++) {
        empty = empty || shape[i] == 0;
        if (shape[i] != 0 && __builtin_mul_overflow(product, shape[i], &product)) return false;
    }
    *bytes = empty ? 0 : (size_t)product;
    return true;
}

/* Zeroed memory, huge pages where it is large; a reservation of addresses for a plan. */
static void *take(job *j, size_t bytes)
{
    void *p;
    if (bytes > SIZE_MAX / 4) return NULL;
    if (j->plan) {
        p = mmap(NULL, bytes + 64, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) p = NULL;
    } else {
        p = device_take(j->device, bytes);
    }
    if (p != NULL) j->total_bytes += bytes;
    return p;
}

static void give_back(const job *j, void *p, size_t bytes)
{
    if (p != NULL && j->plan) munmap(p, bytes + 64);
    else device_free(j->device, p);
}

void *job_allocate(job *j, int tensor, size_t bytes)
{
    j->owned[tensor] = take(j, bytes);
    j->owned_bytes[tensor] = bytes;
    return j->owned[tensor];
}

quern_tensor *job_add_output(job *j, const char *name, quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    size_t bytes;
    quern_tensor *t = &j->added[j->added_count];
    void *data =
        j->added_count < JOB_ADDED_MAX && job_bytes(dtype, ndim, shape, &bytes) ? take(j, bytes) : NULL;
    if (data == NULL) return NULL;
    *t = quern_tensor_contiguous(data, dtype, ndim, shape);
    t->device = (quern_device)j->device;
    j->added_names[j->added_count++] = name;
    return t;
}

/* ---- inputs that follow from others ---- */

/* Fills `made` in host memory from copies of the given index tensors. */
static quern_status complete(const job *j, int tensor, int32_t *made)
{
    any_tensors host = tensors_init(j->op);
    quern_tensor views[QUERN_OP_TENSORS_MAX];
    void *copies[QUERN_OP_TENSORS_MAX] = {NULL};
    quern_status status = QUERN_OK;
    for (int32_t i = 0; i < j->op->info.tensor_count && status == QUERN_OK; i++) {
        if (!j->input[i] || j->storage[i].dtype != QUERN_I32) continue;
        const size_t bytes = (size_t)value_count(&j->storage[i]) * sizeof(int32_t);
        views[i] = j->storage[i];
        views[i].device = QUERN_CPU;
        views[i].data = copies[i] = malloc(bytes + 1);
        host.t[i] = &views[i];
        status = copies[i] != NULL ? device_copy(j->device, copies[i], j->storage[i].data, bytes)
                                   : QUERN_ERR_OUT_OF_MEMORY;
    }
    if (status == QUERN_OK) status = quern_op_complete(j->op->op, &j->params, &host, tensor, made);
    for (int i = 0; i < QUERN_OP_TENSORS_MAX; i++) free(copies[i]);
    return status;
}

static int complete_input(job *j, int tensor, const quern_tensor *expected)
{
    size_t bytes;
    if (!job_bytes(QUERN_I32, expected->ndim, expected->shape, &bytes)) return EXIT_DONE;
    int32_t *made = malloc(bytes + 1);
    void *to = made != NULL ? job_allocate(j, tensor, bytes) : NULL;
    quern_status status = to != NULL ? QUERN_OK : QUERN_ERR_OUT_OF_MEMORY;
    if (status == QUERN_OK && !j->plan) status = complete(j, tensor, made);
    if (status == QUERN_OK && !j->plan) status = device_copy(j->device, to, made, bytes);
    free(made);
    if (status != QUERN_OK && status != QUERN_ERR_UNSUPPORTED) return fail_status(status);
    if (status == QUERN_ERR_UNSUPPORTED) { /* it is missing: the library says so */
        give_back(j, to, bytes);
        j->owned[tensor] = NULL;
        return EXIT_DONE;
    }
    j->storage[tensor] = *expected;
    j->storage[tensor].data = to;
    j->tensors.t[tensor] = &j->storage[tensor];
    return EXIT_DONE;
}

static int complete_inputs(job *j)
{
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    quern_tensor expected[QUERN_OP_TENSORS_MAX];
    quern_status status = quern_op_roles(j->op->op, QUERN_OP_FORWARD, &j->params, &j->tensors, roles);
    if (status != QUERN_OK) return fail_status(status);
    for (int32_t i = 0; i < j->op->info.tensor_count; i++) {
        const quern_op_tensor *t = &j->op->tensors[i];
        if (roles[i] != QUERN_OP_NEEDED || j->tensors.t[i] != NULL || strcmp(t->dtype, "i32") != 0 ||
            t->needed)
            continue;
        status = quern_op_expect(j->op->op, QUERN_OP_FORWARD, &j->params, &j->tensors, j->asked, expected);
        if (status != QUERN_OK) return fail_status(status);
        const int code = complete_input(j, i, &expected[i]);
        if (code != EXIT_DONE) return code;
    }
    return EXIT_DONE;
}

/* ---- outputs ---- */

static int allocate_output(job *j, int tensor, const quern_tensor *expected)
{
    const quern_op_tensor *info = &j->op->tensors[tensor];
    const bool floats = strcmp(info->dtype, "float") == 0 ||
                        (strcmp(info->dtype, "stored") == 0 && expected->dtype != QUERN_U8);
    quern_tensor *t = &j->storage[tensor];
    size_t bytes;
    const quern_dtype dtype = j->dtype != JOB_DTYPE_USUAL && floats ? (quern_dtype)j->dtype : expected->dtype;
    if (!job_bytes(dtype, expected->ndim, expected->shape, &bytes)) {
        const bool varlen = expected->ndim > 0 && *info->varlen != '\0' && expected->ndim < 4;
        return fail(EXIT_INPUT, "output %s: its shape [%s] makes 2^63 bytes or more", info->name,
                    varlen ? info->varlen : info->fixed);
    }
    void *data = job_allocate(j, tensor, bytes);
    if (data == NULL) return fail(EXIT_MACHINE, "no memory for output %s of %zu bytes", info->name, bytes);
    *t = quern_tensor_contiguous(data, dtype, expected->ndim, expected->shape);
    t->device = (quern_device)j->device;
    j->tensors.t[tensor] = t;
    return EXIT_DONE;
}

static bool is_result(quern_op_role role)
{
    return role == QUERN_OP_RESULT || role == QUERN_OP_OPTIONAL_RESULT;
}

static bool is_left_out(const job *j, const char *name)
{
    const size_t length = strlen(name);
    for (const char *at = j->without; at != NULL && (at = strstr(at, name)) != NULL; at += length)
        if ((at == j->without || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0')) return true;
    return false;
}

/* A result that is written only on request is also wanted if the backward pass reads it. */
static bool wanted(const job *j, int tensor, const quern_op_role *backward)
{
    const bool read =
        j->backward && (backward[tensor] == QUERN_OP_NEEDED || backward[tensor] == QUERN_OP_OPTIONAL);
    if (is_left_out(j, j->op->tensors[tensor].name)) return false;
    return !j->op->tensors[tensor].aside || j->aside || read;
}

/* Every given input has a gradient: zeros if the parameters do not use the input. */
static int allocate_gradient(job *j, int tensor, quern_op_role role, const quern_tensor *expected)
{
    const quern_op_tensor *t = &j->op->tensors[tensor];
    if (t->gradient_of < 0) return is_result(role) ? allocate_output(j, tensor, expected) : EXIT_DONE;
    if (!j->input[t->gradient_of] || (!is_result(role) && role != QUERN_OP_UNUSED)) return EXIT_DONE;
    quern_tensor like = j->storage[t->gradient_of];
    if (strcmp(t->dtype, "f32") == 0) like.dtype = QUERN_F32;
    return allocate_output(j, tensor, is_result(role) ? expected : &like);
}

static int allocate_outputs(job *j, quern_op_pass pass)
{
    quern_op_role roles[QUERN_OP_TENSORS_MAX], backward[QUERN_OP_TENSORS_MAX];
    quern_tensor expected[QUERN_OP_TENSORS_MAX];
    quern_status status = quern_op_roles(j->op->op, pass, &j->params, &j->tensors, roles);
    if (status == QUERN_OK && j->backward)
        status = quern_op_roles(j->op->op, QUERN_OP_BACKWARD, &j->params, &j->tensors, backward);
    if (status == QUERN_OK)
        status = quern_op_expect(j->op->op, pass, &j->params, &j->tensors, j->asked, expected);
    if (status != QUERN_OK) return fail_status(status);
    int code = EXIT_DONE;
    for (int32_t i = 0; i < j->op->info.tensor_count && code == EXIT_DONE; i++) {
        if (j->tensors.t[i] != NULL || !j->op->tensors[i].result[pass]) continue;
        if (pass == QUERN_OP_BACKWARD) code = allocate_gradient(j, i, roles[i], &expected[i]);
        else if (is_result(roles[i]) && wanted(j, i, backward)) code = allocate_output(j, i, &expected[i]);
    }
    return code;
}

/* The number of words in a shape; -1 if it means any number of dimensions. */
static int word_count(const char *shape)
{
    int n = *shape != '\0';
    for (const char *c = shape; *c != '\0'; c++) n += *c == ' ';
    return strstr(shape, "...") != NULL ? -1 : n;
}

static int check_dimensions(const job *j)
{
    const int varlen = j->op->info.varlen_by;
    for (int32_t i = 0; i < j->op->info.tensor_count; i++) {
        const quern_op_tensor *t = &j->op->tensors[i];
        const char *shape = *t->varlen != '\0' && varlen >= 0 && j->input[varlen] ? t->varlen : t->fixed;
        const int n = word_count(shape);
        const quern_tensor *given = &j->storage[i];
        const bool one = n == 0 && given->ndim == 1 && given->shape[0] == 1;
        if (j->input[i] && n >= 0 && given->ndim != n && !one)
            return fail(EXIT_INPUT, "tensor %s has %d dimensions: %s is accepted", t->name, given->ndim,
                        n > 0 ? shape : "one number, [] or [1],");
    }
    return EXIT_DONE;
}

int job_prepare(job *j, quern_context *ctx)
{
    size_t forward = 0, backward = 0;
    int code = check_dimensions(j);
    if (code == EXIT_DONE) code = complete_inputs(j);
    if (code == EXIT_DONE) code = allocate_outputs(j, QUERN_OP_FORWARD);
    if (code == EXIT_DONE && j->backward) code = allocate_outputs(j, QUERN_OP_BACKWARD);
    if (code != EXIT_DONE) return code;
    quern_status status =
        quern_op_workspace(ctx, j->op->op, QUERN_OP_FORWARD, &j->params, &j->tensors, &forward);
    if (status == QUERN_OK && j->backward)
        status = quern_op_workspace(ctx, j->op->op, QUERN_OP_BACKWARD, &j->params, &j->tensors, &backward);
    if (status != QUERN_OK) return fail_status(status);
    j->workspace_bytes = forward > backward ? forward : backward;
    j->workspace = take(j, j->workspace_bytes);
    return j->workspace != NULL
               ? EXIT_DONE
               : fail(EXIT_MACHINE, "no memory for a workspace of %zu bytes", j->workspace_bytes);
}

/* ---- passes ---- */

quern_exec job_exec(const job *j)
{
    quern_exec exec = QUERN_EXEC_INIT;
    if (j->status != NULL) exec.status = &j->word;
    return exec;
}

quern_status job_pass(job *j, quern_context *ctx, quern_op_pass pass)
{
    const quern_exec exec = job_exec(j);
    return quern_op_run(ctx, &exec, j->op->op, pass, &j->params, &j->tensors, j->workspace,
                        j->workspace_bytes);
}

int job_watch(job *j)
{
    const int64_t one = 1;
    if (j->device != QUERN_CUDA) return EXIT_DONE;
    j->status = device_take(j->device, sizeof(int32_t));
    j->word = device_tensor(j->device, j->status, QUERN_I32, 1, &one);
    return j->status != NULL ? EXIT_DONE : fail_status(QUERN_ERR_OUT_OF_MEMORY);
}

int job_faults(job *j, int code)
{
    int32_t faults = 0;
    if (j->status == NULL) return code;
    const quern_status status =
        code == EXIT_DONE ? device_copy(j->device, &faults, j->status, sizeof faults) : QUERN_OK;
    device_free(j->device, j->status);
    j->status = NULL;
    if (code != EXIT_DONE) return code;
    if (status != QUERN_OK) return fail_status(status);
    if (faults == 0) return EXIT_DONE;
    return fail(EXIT_INPUT, "the tensors hold %s: on the CPU the call says where",
                quern_cuda_fault_name(faults));
}

/* Runs the passes on a GPU; a fault of data is an error. */
static int run_on_gpu(job *j, quern_context *ctx)
{
    int code = job_watch(j);
    if (code != EXIT_DONE) return code;
    const quern_status status = job_run_cuda(j, ctx);
    if (status != QUERN_OK) code = fail_status(status);
    return job_faults(j, code);
}

int job_run(job *j, quern_context *ctx)
{
    if (j->device == QUERN_CUDA) return run_on_gpu(j, ctx);
    const double start = now_ms();
    quern_status status = job_pass(j, ctx, QUERN_OP_FORWARD);
    j->forward_ms = now_ms() - start;
    if (status == QUERN_OK && j->backward) {
        status = job_pass(j, ctx, QUERN_OP_BACKWARD);
        j->backward_ms = now_ms() - start - j->forward_ms;
    }
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

void job_free(job *j)
{
    for (size_t i = 0; i < QUERN_OP_TENSORS_MAX; i++) give_back(j, j->owned[i], j->owned_bytes[i]);
    for (size_t i = 0; i < j->added_count; i++)
        give_back(j, j->added[i].data,
                  (size_t)value_count(&j->added[i]) * quern_dtype_size(j->added[i].dtype));
    for (size_t i = 0; i < QUERN_OP_TENSORS_MAX; i++) free(j->narrowed[i]);
    give_back(j, j->workspace, j->workspace_bytes);
    for (int i = 0; i < 3; i++) (void)quern_cuda_event_destroy(0, j->events[i]);
    (void)quern_cuda_free(0, j->flush);
    memset(j->events, 0, sizeof j->events);
    j->workspace = j->flush = NULL;
    j->added_count = 0;
    memset(j->owned, 0, sizeof j->owned);
    memset(j->narrowed, 0, sizeof j->narrowed);
}
