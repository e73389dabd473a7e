/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* experts.c - lays a layer's experts out in the caller's memory as quern_moe_forward reads them. */
#include "checkpoint/filling.h"

#include "core/arena.h"
#include "runtime/context.h"
#include "core/error.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

/* ---- values, biases, the activations' globals ---- */

/* Copies values, `size` bytes each, that stand `step` bytes apart. */
static void copy_values(uint8_t *to, const uint8_t *from, int64_t count, int64_t step, size_t size)
{
    if (step == (int64_t)size) {
        memcpy(to, from, (size_t)count * size);
        return;
    }
    for (int64_t i = 0; i < count; i++) memcpy(to + (size_t)i * size, from + i * step, size);
}

typedef struct value_rows {
    const expert_matrix *m;
    uint8_t *to;
    size_t size;
    atomic_bool bad;
} value_rows;

static void copy_value_rows(void *arg, int64_t index, int32_t thread)
{
    const value_rows *v = arg;
    const expert_matrix *m = v->m;
    const int64_t end = (index + 1) * TILE < m->rows ? (index + 1) * TILE : m->rows;
    (void)thread;
    for (int64_t r = index * TILE; r < end; r++)
        copy_values(v->to + (size_t)(r * m->columns) * v->size, m->data + r * m->row_bytes, m->columns,
                    m->column_bytes, v->size);
}

static void widen_rows(void *arg, int64_t index, int32_t thread)
{
    value_rows *v = arg;
    const int64_t first = index * TILE, end = first + TILE < v->m->rows ? first + TILE : v->m->rows;
    (void)thread;
    if (!experts_fp8_rows(v->m, first, end, (uint16_t *)v->to + first * v->m->columns))
        atomic_store(&v->bad, true);
}

static quern_status fill_values(filling *f, int part, int64_t expert)
{
    expert_matrix m;
    const quern_status status = experts_matrix(&f->layer, part, expert, &m);
    uint8_t *to = part == PART_DOWN ? f->at.down : f->at.up;
    if (status != QUERN_OK || to == NULL) return status; /* a view of the file is checked all the same */
    const bool plain = experts_are_plain(&f->layer);
    const size_t size = quern_dtype_size(f->layer.dtype);
    const int64_t before = part == PART_DOWN ? expert : 2 * expert + (part == PART_UP);
    value_rows v = {&m, to + (size_t)(before * m.rows * m.columns) * size, size, false};
    parallel_for(&f->exec, (m.rows + TILE - 1) / TILE, plain ? copy_value_rows : widen_rows, &v);
    if (!v.bad) return QUERN_OK;
    return error_set(QUERN_ERR_FORMAT,
                     "expert %" PRId64 " of '%s': a weight is beyond bf16 or no number, or a scale is not "
                     "above 0",
                     expert, TEXT_NAME(f->layer.parts[part].tensor->name));
}

static quern_status fill_bias(filling *f, int part, int64_t expert)
{
    const int64_t inner = f->layer.intermediate, columns = part == PART_DOWN ? f->layer.hidden : 2 * inner;
    uint8_t *to = part == PART_DOWN ? f->at.down_bias : f->at.up_bias;
    const quern_dtype dtype = part == PART_DOWN ? f->at.down_bias_dtype : f->at.up_bias_dtype;
    const uint8_t *from;
    int64_t stride;
    if (to == NULL) return QUERN_OK;
    const stored_tensor *bias = experts_bias(&f->layer, part, expert, &from, &stride);
    if (bias == NULL || bias->element != (int)dtype)
        return error_set(QUERN_ERR_FORMAT,
                         "expert %" PRId64 " of '%s' has no bias in the dtype of expert 0's", expert,
                         TEXT_NAME(f->layer.parts[part].tensor->name));
    const size_t size = quern_dtype_size(dtype);
    const int64_t step = stride * (int64_t)size;
    to += (size_t)(expert * columns) * size;
    if (part == PART_DOWN) {
        copy_values(to, from, columns, step, size);
    } else if (experts_are_values(&f->layer)) {
        copy_values(to + (part == PART_UP ? (size_t)inner * size : 0), from, inner, step, size);
    } else {
        for (int64_t r = 0; r < inner; r += RUN)
            copy_values(to + (size_t)row_place(part, r) * size, from + r * step, RUN, step, size);
    }
    return QUERN_OK;
}

/* Fused, gate and up share the activation: the larger of their globals. */
static quern_status fill_inputs(filling *f, int64_t expert)
{
    float globals[PARTS] = {0};
    for (int part = 0; part < PARTS; part++) {
        bool there;
        const quern_status status = experts_input_global(&f->layer, part, expert, &there, &globals[part]);
        if (status != QUERN_OK) return status;
        if (!there && (part == PART_DOWN ? f->at.down_input : f->at.up_input) != NULL)
            return error_set(QUERN_ERR_FORMAT,
                             "expert %" PRId64 " of '%s' has no input scale, expert 0 has one", expert,
                             TEXT_NAME(f->layer.parts[part].tensor->name));
    }
    if (f->at.up_input != NULL)
        f->at.up_input[expert] =
            globals[PART_GATE] > globals[PART_UP] ? globals[PART_GATE] : globals[PART_UP];
    if (f->at.down_input != NULL) f->at.down_input[expert] = globals[PART_DOWN];
    return QUERN_OK;
}

/* ---- the memory ---- */

/* Whether expert 0 has an input scale for this part, and the one fused with it. */
static bool has_input(const filling *f, int part)
{
    bool there = false;
    float global;
    return experts_input_global(&f->layer, part, 0, &there, &global) == QUERN_OK && there;
}

/* Whether the part stands in the file as the layer takes it. */
static bool is_in_file(const layer_experts *l, int part)
{
    const expert_part *p = &l->parts[part];
    const bool whole = l->shared || (part == PART_DOWN ? p->stacked : p->merged && !l->paired);
    return experts_are_plain(l) && whole && !l->turned &&
           (uintptr_t)p->tensor->data % quern_dtype_size(l->dtype) == 0;
}

static void carve_values(filling *f, arena *a)
{
    const layer_experts *l = &f->layer;
    const size_t size = quern_dtype_size(l->dtype);
    f->up_in_file = is_in_file(l, PART_GATE) && is_in_file(l, PART_UP);
    f->down_in_file = is_in_file(l, PART_DOWN);
    const size_t matrix = (size_t)(l->experts * l->hidden * l->intermediate) * size;
    if (!f->up_in_file) f->at.up = arena_take(a, 2 * matrix);
    if (!f->down_in_file) f->at.down = arena_take(a, matrix);
}

static void carve_codes(filling *f, arena *a)
{
    const layer_experts *l = &f->layer;
    const int64_t n = up_columns(f), values = l->experts * l->hidden * l->intermediate;
    places *at = &f->at;
    if (f->repacked) {
        at->up_repacked = arena_take(a, (size_t)(l->experts * f->up_bytes));
        at->down_repacked = arena_take(a, (size_t)(l->experts * f->down_bytes));
    } else {
        at->up_codes = arena_take(a, (size_t)values);
        at->up_scales = arena_take(a, (size_t)values / 8);
        at->down_codes = arena_take(a, (size_t)values / 2);
        at->down_scales = arena_take(a, (size_t)values / 16);
    }
    at->up_global = arena_take(a, (size_t)l->experts * 2 * sizeof(float));
    at->down_global = arena_take(a, (size_t)l->experts * sizeof(float));
    if (!l->shared && has_input(f, PART_GATE) && has_input(f, PART_UP))
        at->up_input = arena_take(a, (size_t)l->experts * sizeof(float));
    if (!l->shared && has_input(f, PART_DOWN))
        at->down_input = arena_take(a, (size_t)l->experts * sizeof(float));
    at->row_codes = arena_take(a, (size_t)(n * l->hidden / 2));
    at->row_scales = arena_take(a, (size_t)(n * l->hidden / 16));
    if (l->format != QUERN_FORMAT_MXFP4_GGUF) return;
    at->apart_codes = arena_take(a, (size_t)(l->hidden * l->intermediate / 2));
    at->apart_scales = arena_take(a, (size_t)(l->hidden * l->intermediate / 32));
}

/* Biases, where all three parts' experts have what expert 0 has. */
static void carve_biases(filling *f, arena *a)
{
    const layer_experts *l = &f->layer;
    const uint8_t *data;
    int64_t stride;
    const stored_tensor *gate = experts_bias(l, PART_GATE, 0, &data, &stride);
    const stored_tensor *up = experts_bias(l, PART_UP, 0, &data, &stride);
    const stored_tensor *down = experts_bias(l, PART_DOWN, 0, &data, &stride);
    if (gate != NULL && up != NULL) {
        f->at.up_bias_dtype = (quern_dtype)gate->element;
        f->at.up_bias =
            arena_take(a, (size_t)(l->experts * up_columns(f)) * quern_dtype_size(f->at.up_bias_dtype));
    }
    if (down == NULL) return;
    f->at.down_bias_dtype = (quern_dtype)down->element;
    f->at.down_bias =
        arena_take(a, (size_t)(l->experts * l->hidden) * quern_dtype_size(f->at.down_bias_dtype));
}

/* The bytes of the repacked matrices. */
static quern_status find_bytes(filling *f)
{
    const layer_experts *l = &f->layer;
    const stage_exec *on = &f->exec;
    const quern_status status =
        quern_nvfp4_repacked_bytes(f->ctx, on->device, on->device_id, up_columns(f), l->hidden, &f->up_bytes);
    return status != QUERN_OK ? status
                              : quern_nvfp4_repacked_bytes(f->ctx, on->device, on->device_id, l->hidden,
                                                           l->intermediate, &f->down_bytes);
}

static quern_status carve(filling *f, bool repacked, arena *a)
{
    const bool values = experts_are_values(&f->layer);
    f->repacked = repacked && !values;
    const quern_status found = f->repacked ? find_bytes(f) : QUERN_OK;
    if (found != QUERN_OK) return found;
    if (values) carve_values(f, a);
    else carve_codes(f, a);
    if (!f->layer.shared) carve_biases(f, a);
    if (values) return QUERN_OK;
    const quern_status sized = codes_workspace(f, &f->at.workspace_bytes);
    f->at.workspace = sized == QUERN_OK ? arena_take(a, f->at.workspace_bytes) : NULL;
    return sized;
}

static quern_status begin(quern_context *ctx, const quern_checkpoint *c, int64_t layer, quern_device device,
                          bool repacked, arena *a, fillings *all)
{
    filling *f = &all->routed, *shared = &all->shared;
    if (ctx == NULL || c == NULL)
        return error_argument("%s is NULL: a pointer is needed", ctx == NULL ? "ctx" : "checkpoint");
    *f = *shared = (filling){.ctx = ctx};
    if (device != QUERN_CPU)
        return error_set(QUERN_ERR_UNSUPPORTED,
                         "device %d: experts are laid out in the host's memory, for the CPU: QUERN_CPU is "
                         "accepted; those that are not repacked may be copied to a GPU",
                         (int)device);
    if (context_backend(ctx, device, 0, NULL, &f->exec) == NULL) return error_status();
    shared->exec = f->exec;
    quern_status status = experts_find(c, layer, &f->layer);
    if (status == QUERN_OK) status = experts_find_shared(&f->layer, &shared->layer);
    if (status == QUERN_OK) status = carve(f, repacked, a);
    return status == QUERN_OK && shared->layer.experts > 0 ? carve(shared, repacked, a) : status;
}

quern_status quern_checkpoint_experts_bytes(quern_context *ctx, const quern_checkpoint *c, int64_t layer,
                                            quern_device device, bool repacked, size_t *bytes)
{
    fillings f;
    arena a = {NULL, 0};
    if (bytes == NULL) return error_argument("bytes is NULL: a pointer is needed");
    const quern_status status = begin(ctx, c, layer, device, repacked, &a, &f);
    if (status == QUERN_OK) *bytes = arena_size(&a);
    return status;
}

/* ---- the result ---- */

/* The next of the result's views. */
static const quern_tensor *view_of(quern_checkpoint_moe *e, int *used, const void *data, quern_dtype dtype,
                                   int32_t ndim, const int64_t *shape)
{
    if (data == NULL) return NULL;
    quern_tensor *view = &e->views[(*used)++];
    *view = quern_tensor_contiguous((void *)(uintptr_t)data, dtype, ndim, shape);
    return view;
}

/* A projection of the shared expert: gate and up follow one another, but for tensors of their own in the
 * file. */
static const void *shared_values(const filling *f, int part)
{
    const layer_experts *l = &f->layer;
    const expert_part *p = &l->parts[part];
    const bool in_file = part == PART_DOWN ? f->down_in_file : f->up_in_file;
    const size_t matrix = (size_t)(l->hidden * l->intermediate) * quern_dtype_size(l->dtype);
    const bool second = part == PART_UP && (p->merged || !in_file);
    const uint8_t *data = in_file ? p->tensor->data : part == PART_DOWN ? f->at.down : f->at.up;
    return data + (second ? matrix : 0);
}

static void describe_shared(const filling *f, quern_checkpoint_moe *e, int used)
{
    const layer_experts *l = &f->layer;
    const places *at = &f->at;
    const int64_t d = l->hidden, i = l->intermediate, n = 2 * i;
    quern_moe_tensors *t = &e->tensors;
    if (experts_are_values(l)) {
        const int64_t up[] = {i, d}, down[] = {d, i};
        t->shared_gate = view_of(e, &used, shared_values(f, PART_GATE), l->dtype, 2, up);
        t->shared_up = view_of(e, &used, shared_values(f, PART_UP), l->dtype, 2, up);
        t->shared_down = view_of(e, &used, shared_values(f, PART_DOWN), l->dtype, 2, down);
        return;
    }
    t->shared_gate_up_codes = view_of(e, &used, at->up_codes, QUERN_U8, 2, (const int64_t[]){d / 2, n});
    t->shared_gate_up_scales = view_of(e, &used, at->up_scales, QUERN_U8, 2, (const int64_t[]){d / 16, n});
    t->shared_down_codes = view_of(e, &used, at->down_codes, QUERN_U8, 2, (const int64_t[]){i / 2, d});
    t->shared_down_scales = view_of(e, &used, at->down_scales, QUERN_U8, 2, (const int64_t[]){i / 16, d});
    t->shared_gate_up_repacked = view_of(e, &used, at->up_repacked, QUERN_U8, 1, &f->up_bytes);
    t->shared_down_repacked = view_of(e, &used, at->down_repacked, QUERN_U8, 1, &f->down_bytes);
    t->shared_gate_up_global = view_of(e, &used, at->up_global, QUERN_F32, 1, (const int64_t[]){2});
    t->shared_down_global = view_of(e, &used, at->down_global, QUERN_F32, 0, NULL);
}

static void describe(const fillings *all, quern_checkpoint_moe *e)
{
    const filling *f = &all->routed;
    const layer_experts *l = &f->layer;
    const places *at = &f->at;
    const int64_t experts = l->experts, d = l->hidden, i = l->intermediate, n = 2 * i;
    quern_moe_tensors *t = &e->tensors;
    int used = 0;
    *t = (quern_moe_tensors)QUERN_MOE_TENSORS_INIT;
    t->gate_up_codes = view_of(e, &used, at->up_codes, QUERN_U8, 3, (const int64_t[]){experts, d / 2, n});
    t->gate_up_scales = view_of(e, &used, at->up_scales, QUERN_U8, 3, (const int64_t[]){experts, d / 16, n});
    t->down_codes = view_of(e, &used, at->down_codes, QUERN_U8, 3, (const int64_t[]){experts, i / 2, d});
    t->down_scales = view_of(e, &used, at->down_scales, QUERN_U8, 3, (const int64_t[]){experts, i / 16, d});
    t->gate_up_repacked =
        view_of(e, &used, at->up_repacked, QUERN_U8, 2, (const int64_t[]){experts, f->up_bytes});
    t->down_repacked =
        view_of(e, &used, at->down_repacked, QUERN_U8, 2, (const int64_t[]){experts, f->down_bytes});
    t->gate_up_global = view_of(e, &used, at->up_global, QUERN_F32, 2, (const int64_t[]){experts, 2});
    t->down_global = view_of(e, &used, at->down_global, QUERN_F32, 1, &experts);
    if (experts_are_values(l)) {
        const void *up = f->up_in_file ? l->parts[PART_UP].tensor->data : at->up;
        const void *down = f->down_in_file ? l->parts[PART_DOWN].tensor->data : at->down;
        t->gate_up = view_of(e, &used, up, l->dtype, 3, (const int64_t[]){experts, n, d});
        t->down = view_of(e, &used, down, l->dtype, 3, (const int64_t[]){experts, d, i});
    }
    t->gate_up_bias = view_of(e, &used, at->up_bias, at->up_bias_dtype, 2, (const int64_t[]){experts, n});
    t->down_bias = view_of(e, &used, at->down_bias, at->down_bias_dtype, 2, (const int64_t[]){experts, d});
    e->gate_up_input_global = view_of(e, &used, at->up_input, QUERN_F32, 1, &experts);
    e->down_input_global = view_of(e, &used, at->down_input, QUERN_F32, 1, &experts);
    const stored_tensor *router = experts_router(l), *bias = experts_correction(l), *table = experts_table(l);
    if (router != NULL)
        t->weight =
            view_of(e, &used, router->data, (quern_dtype)router->element, 2, (const int64_t[]){experts, d});
    if (bias != NULL) t->bias = view_of(e, &used, bias->data, QUERN_F32, 1, &experts);
    if (table != NULL)
        t->tid2eid = view_of(e, &used, table->data, (quern_dtype)table->element, 2, table->shape);
    e->experts = experts;
    e->hidden = d;
    e->intermediate = i;
    e->shared_intermediate = all->shared.layer.intermediate;
    e->rounded_blocks = f->rounded + all->shared.rounded;
    if (all->shared.layer.experts > 0) describe_shared(&all->shared, e, used);
}

static quern_status fill_expert(filling *f, int64_t expert)
{
    quern_status status = QUERN_OK;
    const bool values = experts_are_values(&f->layer);
    if (!values) {
        status = fill_codes(f, expert);
        if (status == QUERN_OK) status = fill_inputs(f, expert);
    }
    for (int part = 0; part < PARTS && status == QUERN_OK; part++) {
        if (values) status = fill_values(f, part, expert);
        if (status == QUERN_OK) status = fill_bias(f, part, expert);
    }
    return status;
}

/* Lays memory out for a layer's experts, fills it or takes it as filled, and describes it. */
static quern_status lay_out(quern_context *ctx, const quern_checkpoint *c, int64_t layer, quern_device device,
                            bool repacked, bool filled, void *memory, size_t bytes,
                            quern_checkpoint_moe *experts)
{
    fillings f = {0};
    arena a = arena_on(memory), sizes = {NULL, 0};
    if (experts == NULL || experts->size < sizeof *experts)
        return error_argument(
            "experts is NULL or smaller than quern_checkpoint_moe: QUERN_CHECKPOINT_MOE_INIT sets its size");
    quern_status status = begin(ctx, c, layer, device, repacked, &sizes, &f);
    if (status != QUERN_OK) return status;
    if (arena_size(&sizes) > bytes || (memory == NULL && arena_size(&sizes) > 0))
        return error_set(QUERN_ERR_WORKSPACE, "memory has %zu bytes: quern_checkpoint_experts_bytes says %zu",
                         memory != NULL ? bytes : 0, arena_size(&sizes));
    if (memory != NULL) status = begin(ctx, c, layer, device, repacked, &a, &f);
    for (int64_t e = 0; e < f.routed.layer.experts && status == QUERN_OK && !filled; e++)
        status = fill_expert(&f.routed, e);
    if (status == QUERN_OK && f.shared.layer.experts > 0 && !filled) status = fill_expert(&f.shared, 0);
    if (status == QUERN_OK) describe(&f, experts);
    return status;
}

quern_status quern_checkpoint_experts(quern_context *ctx, const quern_checkpoint *c, int64_t layer,
                                      quern_device device, bool repacked, void *memory, size_t bytes,
                                      quern_checkpoint_moe *experts)
{
    return lay_out(ctx, c, layer, device, repacked, false, memory, bytes, experts);
}

quern_status quern_checkpoint_experts_filled(quern_context *ctx, const quern_checkpoint *c, int64_t layer,
                                             quern_device device, bool repacked, void *memory, size_t bytes,
                                             quern_checkpoint_moe *experts)
{
    return lay_out(ctx, c, layer, device, repacked, true, memory, bytes, experts);
}
