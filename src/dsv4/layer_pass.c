/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* layer_pass.c - sizing or running the stages of a layer, and the views that they take. */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/layer.h"

static quern_status unsupported(const layer_pass *p, const char *why)
{
    if (why[0] != '\0') return error_set(QUERN_ERR_UNSUPPORTED, "%s", why);
    return error_set(QUERN_ERR_UNSUPPORTED, "the %s backend has no layers of DeepSeek-V4: the cpu has",
                     p->call->head.backend->name);
}

// NOLINTBEGIN(bugprone-macro-parentheses): a function's name cannot stand in parentheses here
#define STAGE(stage, name)                                                                                   \
    void layer_##stage(layer_pass *p, const name##_args *args)                                               \
    {                                                                                                        \
        const op_call *call = &p->call->head;                                                                \
        const name##_stage *of = &call->backend->stage;                                                      \
        char why[STAGE_WHY_BYTES] = "";                                                                      \
        if (p->status != QUERN_OK) return;                                                                   \
        if (p->frame != NULL) {                                                                              \
            p->status = op_##stage(call, p->frame, args, p->call->scratch);                                  \
        } else if (of->run == NULL || !STAGE_TAKES(*of, &call->exec, args, why)) {                           \
            p->status = unsupported(p, why);                                                                 \
        } else {                                                                                             \
            const size_t bytes = STAGE_WORKSPACE(*of, &call->exec, args);                                    \
            if (bytes > p->scratch_bytes) p->scratch_bytes = bytes;                                          \
        }                                                                                                    \
    }
LAYER_STAGES(STAGE)
// NOLINTEND(bugprone-macro-parentheses)

quern_tensor layer_room(layer_pass *p, quern_dtype dtype, int64_t rows, int64_t columns)
{
    const int64_t shape[] = {rows, columns};
    void *data = arena_take(&p->a, (size_t)(rows * columns) * quern_dtype_size(dtype));
    return view_on(&p->call->head.like, data, dtype, 2, shape);
}

quern_tensor layer_batches(const quern_tensor *t, int64_t batch)
{
    quern_tensor v = *t;
    if (t->ndim == 0) return v;
    v.ndim = 3;
    v.shape[0] = batch;
    v.shape[1] = batch > 0 ? t->shape[0] / batch : 0;
    v.shape[2] = t->shape[1];
    v.strides[0] = v.shape[1] * t->strides[0];
    v.strides[1] = t->strides[0];
    v.strides[2] = 1;
    return v;
}

quern_tensor layer_heads(const quern_tensor *t, int64_t batch, int64_t heads)
{
    quern_tensor v = layer_batches(t, batch);
    if (t->ndim == 0) return v;
    v.ndim = 4;
    v.shape[3] = v.shape[2] / heads;
    v.shape[2] = heads;
    v.strides[2] = v.shape[3];
    v.strides[3] = 1;
    return v;
}

quern_tensor layer_rows(const quern_tensor *t, int64_t first, int64_t count)
{
    quern_tensor v = *t;
    view_narrow(&v, 0, first, count);
    return v;
}

quern_tensor layer_columns(const quern_tensor *t, int64_t first, int64_t count)
{
    quern_tensor v = *t;
    view_narrow(&v, 1, first, count);
    return v;
}

void layer_copy(layer_pass *p, const quern_tensor *from, const quern_tensor *to)
{
    layer_permute(p, &(permute_args){.per = 1, .x = *from, .out = *to});
}

quern_tensor layer_matrix(layer_pass *p, dsv4_layer_tensor tensor)
{
    const quern_tensor *t = &p->call->view[tensor];
    quern_tensor flat;
    if (view_flatten(t, &flat)) return flat;
    flat = layer_room(p, t->dtype, view_elements(t) / t->shape[t->ndim - 1], t->shape[t->ndim - 1]);
    layer_copy(p, t, &flat);
    return flat;
}

void layer_change(layer_pass *p, const quern_tensor *from, const quern_tensor *to)
{
    const int64_t rows = to->shape[1];
    layer_convert(
        p,
        &(convert_args){.seqs = {.batch = to->shape[0], .n_q = rows, .n_kv = rows}, .in = *from, .out = *to});
}

void layer_give(layer_pass *p, dsv4_layer_tensor tensor, const quern_tensor *from)
{
    const quern_tensor *to = &p->call->view[tensor];
    if (to->ndim > 0) layer_copy(p, from, to);
}

void layer_product(layer_pass *p, const quern_tensor *a, const quern_tensor *w, const quern_tensor *c)
{
    layer_gemm(p, &(gemm_args){.a = *a, .b = *w, .c = *c, .b_transposed = true});
}
