/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* job_file.c - a job's inputs from a file, its outputs to one. */
#include "command.h"
#include "job.h"
#include "output.h"
#include "tensor_names.h"
#include "values.h"

#include <quern/cuda.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *name_of(const job *j, int tensor)
{
    return quern_op_tensor_name(j->op->op, &j->params, tensor);
}

/* Whether a list with commas holds a name. */
static bool listed(const char *list, const char *name)
{
    const size_t length = strlen(name);
    for (const char *at = list; at != NULL; at = strchr(at, ','), at += at != NULL)
        if (strncmp(at, name, length) == 0 && (at[length] == ',' || at[length] == '\0')) return true;
    return false;
}

/* Indices that frameworks keep as i64, as the i32 that operations take. */
static int narrow(job *j, int tensor, quern_tensor *view)
{
    if (strcmp(j->op->tensors[tensor].dtype, "i32") != 0 || view->dtype != QUERN_I64) return EXIT_DONE;
    const int64_t count = value_count(view), *from = view->data;
    int32_t *to = j->narrowed[tensor] = malloc((size_t)count * sizeof *to + 1);
    if (to == NULL) return fail(EXIT_MACHINE, "no memory for %s as i32", name_of(j, tensor));
    for (int64_t i = 0; i < count; i++) {
        if (from[i] != (int32_t)from[i])
            return fail(EXIT_INPUT,
                        "tensor %s: number %" PRId64 " is %" PRId64 ": numbers of 32 bits are accepted",
                        name_of(j, tensor), i, from[i]);
        to[i] = (int32_t)from[i];
    }
    *view = quern_tensor_contiguous(to, QUERN_I32, view->ndim, view->shape);
    return EXIT_DONE;
}

static int open_inputs(job *j, const quern_safetensors *file, const char *without)
{
    for (int32_t i = 0; i < j->op->info.tensor_count; i++) {
        const quern_op_tensor *t = &j->op->tensors[i];
        const char *name = name_of(j, i);
        quern_tensor view;
        if ((!t->input && !t->trigger) || !quern_safetensors_has(file, name) || listed(without, name))
            continue;
        const quern_status status = quern_safetensors_get(file, name, &view);
        if (status != QUERN_OK) return fail_file(NULL, status);
        const int code = narrow(j, i, &view);
        if (code != EXIT_DONE) return code;
        job_bind(j, i, &view);
    }
    return EXIT_DONE;
}

/* roles NULL: the library does not accept the parameters, so that no roles are known. */
static int check_missing(const job *j, const quern_op_role *roles, const char *path)
{
    char needs[256] = "";
    int missing = -1;
    for (int32_t i = 0; i < j->op->info.tensor_count; i++) {
        const quern_op_tensor *t = &j->op->tensors[i];
        const size_t used = strlen(needs);
        if (!t->needed) continue;
        snprintf(needs + used, sizeof needs - used, "%s%s", used > 0 ? " " : "", name_of(j, i));
        const bool needed = roles == NULL || roles[i] == QUERN_OP_NEEDED || roles[i] == QUERN_OP_UPDATED;
        if (missing < 0 && !j->input[i] && needed) missing = i;
    }
    if (missing < 0) return EXIT_DONE;
    return fail(EXIT_INPUT, "tensor %s is missing from '%s': %s needs %s", name_of(j, missing), path,
                j->op->name, needs);
}

/* Prints a note of a parameter's value with which the tensor would be read. */
static void note_unread(const job *j, int tensor)
{
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    for (size_t i = 0; i < j->op->option_count; i++) {
        const option_row *row = &j->op->options[i];
        const char *word = row->choices[1];
        if (strchr(word, '|') == NULL || strchr(word, ',') != NULL) continue;
        while (word != NULL) {
            any_params params = j->params;
            char value[32];
            snprintf(value, sizeof value, "%.*s", (int)strcspn(word, "|"), word);
            if (quern_op_set(j->op->op, &params, row->name, value) == QUERN_OK &&
                quern_op_roles(j->op->op, QUERN_OP_FORWARD, &params, &j->tensors, roles) == QUERN_OK &&
                roles[tensor] == QUERN_OP_NEEDED) {
                fprintf(stderr, "quern run: note: %s of the file is not read: --%s %s reads it\n",
                        j->op->tensors[tensor].name, row->name, value);
                return;
            }
            word = strchr(word, '|');
            word += word != NULL;
        }
    }
}

static bool is_read(quern_op_role role)
{
    return role == QUERN_OP_NEEDED || role == QUERN_OP_OPTIONAL ||
           role == QUERN_OP_REFUSED; /* the last one's error comes from the library */
}

/* Drops tensors that the call itself writes, and triggers of results that the parameters exclude. */
static int choose_inputs(job *j, const quern_op_role *roles)
{
    quern_op_role backward[QUERN_OP_TENSORS_MAX] = {QUERN_OP_UNUSED};
    const quern_status status =
        j->backward ? quern_op_roles(j->op->op, QUERN_OP_BACKWARD, &j->params, &j->tensors, backward)
                    : QUERN_OK;
    if (status != QUERN_OK) return fail_status(status);
    j->backward = false;
    for (int32_t i = 0; i < j->op->info.tensor_count; i++) {
        const bool trigger = j->op->tensors[i].trigger,
                   result = roles[i] == QUERN_OP_RESULT || roles[i] == QUERN_OP_OPTIONAL_RESULT;
        if (!j->input[i]) continue;
        if (trigger ? is_read(backward[i]) : !result) {
            j->backward = j->backward || trigger;
            continue;
        }
        if (result) note_unread(j, i);
        j->input[i] = false;
        j->tensors.t[i] = NULL;
    }
    return EXIT_DONE;
}

/* A file's memory is not the job's to write. */
static int copy_updated(job *j, const quern_op_role *roles)
{
    for (int32_t i = 0; i < j->op->info.tensor_count; i++) {
        quern_tensor *t = &j->storage[i];
        if (!j->input[i] || roles[i] != QUERN_OP_UPDATED) continue;
        const size_t bytes = (size_t)value_count(t) * quern_dtype_size(t->dtype);
        void *own = job_allocate(j, i, bytes);
        if (own == NULL) return fail(EXIT_MACHINE, "no memory for %s of %zu bytes", name_of(j, i), bytes);
        memcpy(own, t->data, bytes);
        t->data = own;
    }
    return EXIT_DONE;
}

static int upload(job *j)
{
    for (int32_t i = 0; i < j->op->info.tensor_count; i++) {
        quern_tensor *t = &j->storage[i];
        if (!j->input[i]) continue;
        const size_t bytes = (size_t)value_count(t) * quern_dtype_size(t->dtype);
        const void *from = t->data;
        t->data = job_allocate(j, i, bytes);
        t->device = QUERN_CUDA;
        if (t->data == NULL) return fail_status(QUERN_ERR_OUT_OF_MEMORY);
        const quern_status status = quern_cuda_copy(0, t->data, from, bytes, NULL);
        if (status != QUERN_OK) return fail_status(status);
    }
    return EXIT_DONE;
}

int job_read(job *j, const quern_safetensors *file, const char *path, const char *without)
{
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    int code = open_inputs(j, file, without);
    if (code != EXIT_DONE) return code;
    if (quern_op_follow(j->op->op, &j->params, &j->tensors) != QUERN_OK) {
        char sentence[512];
        tensor_names_put(quern_last_error(NULL), sentence, sizeof sentence);
        return fail(EXIT_INPUT, "the file holds %s; --without NAME leaves one out", sentence);
    }
    if (j->set_params != NULL && (code = j->set_params(j)) != EXIT_DONE) return code;
    const quern_status status = quern_op_roles(j->op->op, QUERN_OP_FORWARD, &j->params, &j->tensors, roles);
    if (status != QUERN_OK) {
        if (status != QUERN_ERR_OUT_OF_MEMORY) code = check_missing(j, NULL, path);
        return code == EXIT_DONE ? fail_status(status) : code;
    }
    code = check_missing(j, roles, path);
    if (code == EXIT_DONE) code = choose_inputs(j, roles);
    if (code != EXIT_DONE) return code;
    return j->device == QUERN_CUDA ? upload(j) : copy_updated(j, roles);
}

enum { COLLECTED_MAX = QUERN_OP_TENSORS_MAX + JOB_ADDED_MAX };

typedef struct collection {
    quern_safetensors_item items[COLLECTED_MAX];
    size_t count;
} collection;

/* Replaces device tensors by copies in host memory, one after another in *memory. */
static quern_status download(collection *c, quern_tensor copies[COLLECTED_MAX], char **memory)
{
    size_t sizes[COLLECTED_MAX], total = 0;
    for (size_t i = 0; i < c->count; i++) {
        copies[i] = *c->items[i].tensor;
        sizes[i] = (size_t)value_count(&copies[i]) * quern_dtype_size(copies[i].dtype);
        total += (sizes[i] + 63) & ~(size_t)63;
    }
    *memory = malloc(total + 1);
    if (*memory == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    quern_status status = QUERN_OK;
    char *at = *memory;
    for (size_t i = 0; i < c->count && status == QUERN_OK; i++) {
        status = quern_cuda_copy(0, at, copies[i].data, sizes[i], NULL);
        copies[i].data = at;
        copies[i].device = QUERN_CPU;
        c->items[i].tensor = &copies[i];
        at += (sizes[i] + 63) & ~(size_t)63;
    }
    return status == QUERN_OK ? quern_cuda_synchronize(0, NULL) : status;
}

/* Whether an input is an output, too: the call would have computed it had it not been there. An error is of
 * memory. */
static quern_status passes_through(const job *j, int tensor, bool *passes)
{
    quern_op_role roles[QUERN_OP_TENSORS_MAX] = {QUERN_OP_UNUSED};
    any_params params = j->params;
    any_tensors others = j->tensors;
    for (int32_t i = 0; i < j->op->info.tensor_count; i++)
        if (!j->input[i] || i == tensor) others.t[i] = NULL;
    quern_status status = quern_op_follow(j->op->op, &params, &others);
    if (status == QUERN_OK) status = quern_op_roles(j->op->op, QUERN_OP_FORWARD, &params, &others, roles);
    *passes =
        status == QUERN_OK && (roles[tensor] == QUERN_OP_RESULT || roles[tensor] == QUERN_OP_OPTIONAL_RESULT);
    return status == QUERN_ERR_OUT_OF_MEMORY ? status : QUERN_OK;
}

int job_write(const job *j, const char *op, const char *path)
{
    collection c = {.count = 0};
    quern_tensor copies[COLLECTED_MAX];
    char *memory = NULL;
    for (int32_t i = 0; i < j->op->info.tensor_count; i++) {
        const quern_op_tensor *t = &j->op->tensors[i];
        const bool result = (t->result[QUERN_OP_FORWARD] && (!t->aside || j->aside)) ||
                            (j->backward && t->result[QUERN_OP_BACKWARD]);
        bool written = result && j->tensors.t[i] != NULL;
        const quern_status status =
            written && j->input[i] && !t->updated ? passes_through(j, i, &written) : QUERN_OK;
        if (status != QUERN_OK) return fail_status(status);
        if (written) c.items[c.count++] = (quern_safetensors_item){name_of(j, i), j->tensors.t[i]};
    }
    for (size_t i = 0; i < j->added_count; i++)
        c.items[c.count++] = (quern_safetensors_item){j->added_names[i], &j->added[i]};
    const quern_safetensors_pair metadata[] = {{"quern", quern_version()}, {"op", op}};
    quern_status status = j->device == QUERN_CUDA ? download(&c, copies, &memory) : QUERN_OK;
    output_last(path);
    if (status == QUERN_OK) status = quern_safetensors_save(path, c.items, c.count, metadata, 2);
    free(memory);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}
