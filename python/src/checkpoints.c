/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * checkpoints.c - checkpoints (quern/checkpoint.h), by their address.
 *
 *   checkpoint_open(path) -> int
 *   checkpoint_close(checkpoint)
 *   checkpoint_tensors(checkpoint) -> bytes: of each tensor seven fields, each with a 0 after it: name,
 * the file's
 *                                     dtype, the number of a quern_dtype or -1, format, shard, address,
 * extents
 *   checkpoint_experts(checkpoint, layer, repacked, memory) -> bytes: of each tensor that is filled four
 * fields:
 *                                     its name among quern.moe.layer's, the number of its dtype, address,
 * extents;
 *                                     last "intermediate", with the number in place of a dtype. memory
 * None: the
 *                                     bytes that it needs, as an int
 */
#include "ffi.h"

#include <quern/checkpoint.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int refuse(void)
{
    return fail("TypeError", "a checkpoint and what this function takes are accepted");
}

static quern_checkpoint *checkpoint_of(const TVMFFIAny *args, int32_t count, int32_t accepted)
{
    if (count == accepted && is_int(&args[0]) && args[0].v_int64 != 0)
        return (quern_checkpoint *)(intptr_t)args[0].v_int64;
    (void)refuse();
    return NULL;
}

/* Text that grows; fields of it end in a 0. */
typedef struct fields {
    char *bytes;
    size_t size;
    FILE *stream;
} fields;

static bool begin(fields *f)
{
    *f = (fields){0};
    f->stream = open_memstream(&f->bytes, &f->size);
    if (f->stream == NULL) (void)fail("MemoryError", "no memory for a list of tensors");
    return f->stream != NULL;
}

static int finish(fields *f, TVMFFIAny *result)
{
    const bool whole = fclose(f->stream) == 0;
    const int code = whole ? give_bytes(f->bytes, f->size, result)
                           : fail("MemoryError", "no memory for a list of "
                                                 "tensors");
    free(f->bytes);
    return code;
}

static void add_shape(fields *f, int32_t ndim, const int64_t *shape)
{
    for (int32_t i = 0; i < ndim; i++) fprintf(f->stream, "%s%" PRId64, i > 0 ? "," : "", shape[i]);
    fputc('\0', f->stream);
}

FUNCTION(checkpoint_open)
{
    (void)self;
    TVMFFIByteArray text;
    quern_checkpoint *checkpoint;
    if (count != 1 || !text_of(&args[0], &text) || memchr(text.data, 0, text.size) != NULL) return refuse();
    char *path = strndup(text.data, text.size);
    if (path == NULL) return fail("MemoryError", "no memory for a path");
    const quern_status status = quern_checkpoint_open(path, &checkpoint);
    free(path);
    if (status == QUERN_ERR_IO) return fail("OSError", quern_last_error(NULL));
    if (status == QUERN_ERR_FORMAT) return fail("ValueError", quern_last_error(NULL));
    return status == QUERN_OK ? give_int((int64_t)(intptr_t)checkpoint, result) : fail_as(status);
}

FUNCTION(checkpoint_close)
{
    (void)self;
    quern_checkpoint *checkpoint = checkpoint_of(args, count, 1);
    if (checkpoint == NULL) return -1;
    quern_checkpoint_close(checkpoint);
    return give_nothing(result);
}

FUNCTION(checkpoint_tensors)
{
    (void)self;
    fields f;
    const quern_checkpoint *checkpoint = checkpoint_of(args, count, 1);
    if (checkpoint == NULL || !begin(&f)) return -1;
    for (size_t i = 0; i < quern_checkpoint_count(checkpoint); i++) {
        quern_checkpoint_tensor t = QUERN_CHECKPOINT_TENSOR_INIT;
        quern_tensor view;
        (void)quern_checkpoint_info(checkpoint, i, &t);
        const bool viewed = quern_checkpoint_view(checkpoint, i, &view) == QUERN_OK;
        fprintf(f.stream, "%s%c%s%c%d%c%s%c%s%c%" PRIuPTR "%c", t.name, 0, t.dtype, 0,
                viewed ? (int)view.dtype : -1, 0, quern_format_name(t.format), 0, t.shard, 0,
                (uintptr_t)t.data, 0);
        if (viewed) add_shape(&f, view.ndim, view.shape);
        else add_shape(&f, 1, (const int64_t[]){(int64_t)t.bytes});
    }
    return finish(&f, result);
}

static void add_tensor(fields *f, const char *name, const quern_tensor *t)
{
    if (t == NULL) return;
    fprintf(f->stream, "%s%c%d%c%" PRIuPTR "%c", name, 0, (int)t->dtype, 0, (uintptr_t)t->data, 0);
    add_shape(f, t->ndim, t->shape);
}

static void add_number(fields *f, const char *name, int64_t value)
{
    fprintf(f->stream, "%s%c%" PRId64 "%c0%c%c", name, 0, value, 0, 0, 0);
}

static int give_experts(const quern_checkpoint_moe *e, TVMFFIAny *result)
{
    fields f;
    const quern_moe_tensors *t = &e->tensors;
    if (!begin(&f)) return -1;
    add_tensor(&f, "weight", t->weight);
    add_tensor(&f, "bias", t->bias);
    add_tensor(&f, "tid2eid", t->tid2eid);
    add_tensor(&f, "gate_up_codes", t->gate_up_codes);
    add_tensor(&f, "gate_up_scales", t->gate_up_scales);
    add_tensor(&f, "gate_up_repacked", t->gate_up_repacked);
    add_tensor(&f, "gate_up_global", t->gate_up_global);
    add_tensor(&f, "down_codes", t->down_codes);
    add_tensor(&f, "down_scales", t->down_scales);
    add_tensor(&f, "down_repacked", t->down_repacked);
    add_tensor(&f, "down_global", t->down_global);
    add_tensor(&f, "gate_up", t->gate_up);
    add_tensor(&f, "down", t->down);
    add_tensor(&f, "gate_up_bias", t->gate_up_bias);
    add_tensor(&f, "down_bias", t->down_bias);
    add_tensor(&f, "shared_gate", t->shared_gate);
    add_tensor(&f, "shared_up", t->shared_up);
    add_tensor(&f, "shared_down", t->shared_down);
    add_tensor(&f, "shared_gate_up_codes", t->shared_gate_up_codes);
    add_tensor(&f, "shared_gate_up_scales", t->shared_gate_up_scales);
    add_tensor(&f, "shared_gate_up_repacked", t->shared_gate_up_repacked);
    add_tensor(&f, "shared_gate_up_global", t->shared_gate_up_global);
    add_tensor(&f, "shared_down_codes", t->shared_down_codes);
    add_tensor(&f, "shared_down_scales", t->shared_down_scales);
    add_tensor(&f, "shared_down_repacked", t->shared_down_repacked);
    add_tensor(&f, "shared_down_global", t->shared_down_global);
    add_tensor(&f, "gate_up_input_global", e->gate_up_input_global);
    add_tensor(&f, "down_input_global", e->down_input_global);
    add_number(&f, "intermediate", e->intermediate);
    add_number(&f, "shared_intermediate", e->shared_intermediate);
    return finish(&f, result);
}

FUNCTION(checkpoint_experts)
{
    (void)self;
    size_t bytes = 0;
    void *memory = NULL;
    quern_context *context = need_context();
    const quern_checkpoint *checkpoint = context != NULL ? checkpoint_of(args, count, 4) : NULL;
    if (checkpoint == NULL) return -1;
    if (!is_int(&args[1]) || !is_int(&args[2])) return refuse();
    const bool repacked = args[2].v_int64 != 0;
    quern_status status;
    if (args[3].type_index == kTVMFFINone) {
        status =
            quern_checkpoint_experts_bytes(context, checkpoint, args[1].v_int64, QUERN_CPU, repacked, &bytes);
        if (status == QUERN_OK) return give_int((int64_t)bytes, result);
    } else {
        quern_checkpoint_moe experts = QUERN_CHECKPOINT_MOE_INIT;
        if (read_memory(&args[3], &memory, &bytes) != 0) return -1;
        status = quern_checkpoint_experts(context, checkpoint, args[1].v_int64, QUERN_CPU, repacked, memory,
                                          bytes, &experts);
        if (status == QUERN_OK) return give_experts(&experts, result);
    }
    return status == QUERN_ERR_FORMAT ? fail("ValueError", quern_last_error(context)) : fail_as(status);
}
