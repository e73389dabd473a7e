/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * expert_codes.c - one expert's codes from the file to the layout of a product.
 *
 * They go through rows: gate and up (or down) as [N, K/2] with scales [N, K/16], gate's and up's rows in
 * alternating runs of 8. From there they are transposed into [K/2, N], or repacked. Rows are copied from
 * the file, taken out of GGUF's blocks, or converted from MXFP4, which writes them straight to their
 * places.
 */
#include "checkpoint/filling.h"

#include "core/error.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { SENTENCE = 512 };

static bool is_mxfp4(const filling *f)
{
    return f->layer.format >= QUERN_FORMAT_MXFP4;
}

static quern_tensor bytes_view(void *data, int32_t ndim, const int64_t *shape)
{
    return quern_tensor_contiguous(data, QUERN_U8, ndim, shape);
}

/* Rows of bytes, in runs of 8 that begin `run_bytes` apart. */
static quern_tensor runs_view(const void *data, int64_t rows, int64_t width, int64_t row_bytes,
                              int64_t run_bytes)
{
    quern_tensor view = bytes_view((void *)(uintptr_t)data, 3, (const int64_t[]){rows / RUN, RUN, width});
    view.strides[0] = run_bytes;
    view.strides[1] = row_bytes;
    return view;
}

/* ---- one matrix: rows of codes ---- */

static void copy_rows(const filling *f, int part, const expert_matrix *m)
{
    const int64_t width = m->columns / 2, blocks = m->columns / 16;
    for (int64_t r = 0; r < m->rows; r++) {
        uint8_t *codes = f->at.row_codes + row_place(part, r) * width;
        uint8_t *scales = f->at.row_scales + row_place(part, r) * blocks;
        const uint8_t *from = m->data + r * m->row_bytes;
        if (f->layer.format == QUERN_FORMAT_NVFP4_GGUF) {
            gguf_split_nvfp4(from, (size_t)(m->columns / 64), codes, scales);
        } else {
            memcpy(codes, from, (size_t)width);
            memcpy(scales, m->scales + r * m->scales_row_bytes, (size_t)blocks);
        }
    }
}

/* GGUF's blocks into codes and exponents apart. */
static void take_apart(const filling *f, expert_matrix *m)
{
    for (int64_t r = 0; r < m->rows; r++)
        gguf_split_mxfp4(m->data + r * m->row_bytes, (size_t)(m->columns / 32),
                         f->at.apart_codes + r * m->columns / 2, f->at.apart_scales + r * m->columns / 32);
    m->data = f->at.apart_codes;
    m->row_bytes = m->columns / 2;
    m->scales = f->at.apart_scales;
    m->scales_row_bytes = m->columns / 32;
}

/* The conversion's tensors, whose data may be NULL for a query. */
typedef struct conversion {
    quern_tensor mx_codes, exponents, codes, scales, global, rounded;
    quern_nvfp4_from_mxfp4_tensors tensors;
} conversion;

static void describe_conversion(const filling *f, int part, const expert_matrix *m, float *global,
                                int64_t *rounded, conversion *c)
{
    const int64_t width = m->columns / 2, blocks = m->columns / 16, step = part == PART_DOWN ? RUN : 2 * RUN;
    const int64_t first = row_place(part, 0);
    uint8_t *codes = f->at.row_codes, *scales = f->at.row_scales;
    if (codes != NULL) codes += first * width;
    if (scales != NULL) scales += first * blocks;
    c->mx_codes = runs_view(m->data, m->rows, width, m->row_bytes, RUN * m->row_bytes);
    c->exponents = runs_view(m->scales, m->rows, blocks / 2, m->scales_row_bytes, RUN * m->scales_row_bytes);
    c->codes = runs_view(codes, m->rows, width, width, step * width);
    c->scales = runs_view(scales, m->rows, blocks, blocks, step * blocks);
    c->global = quern_tensor_contiguous(global, QUERN_F32, 0, NULL);
    c->rounded = quern_tensor_contiguous(rounded, QUERN_I64, 0, NULL);
    c->tensors = (quern_nvfp4_from_mxfp4_tensors)QUERN_NVFP4_FROM_MXFP4_TENSORS_INIT;
    c->tensors.mx_codes = &c->mx_codes;
    c->tensors.exponents = &c->exponents;
    c->tensors.codes = &c->codes;
    c->tensors.scales = &c->scales;
    c->tensors.global = &c->global;
    c->tensors.rounded_blocks = &c->rounded;
}

/* Puts the tensor before the reason of a call that failed. */
static quern_status explain(const filling *f, int part, int64_t expert, quern_status status)
{
    char reason[SENTENCE];
    snprintf(reason, sizeof reason, "%s", quern_last_error(f->ctx));
    return error_set(status == QUERN_ERR_INVALID_ARGUMENT ? QUERN_ERR_FORMAT : status,
                     "expert %" PRId64 " of '%s': %s", expert, TEXT_NAME(f->layer.parts[part].tensor->name),
                     reason);
}

/* One part's rows and global. */
static quern_status fill_rows(filling *f, int part, int64_t expert, float *global)
{
    expert_matrix m;
    quern_status status = experts_matrix(&f->layer, part, expert, &m);
    if (status != QUERN_OK) return status;
    if (!is_mxfp4(f)) {
        copy_rows(f, part, &m);
        *global = m.global;
        return QUERN_OK;
    }
    int64_t rounded = 0;
    conversion c;
    const quern_nvfp4_from_mxfp4_params params = QUERN_NVFP4_FROM_MXFP4_PARAMS_INIT;
    if (f->layer.format == QUERN_FORMAT_MXFP4_GGUF) take_apart(f, &m);
    describe_conversion(f, part, &m, global, &rounded, &c);
    status =
        quern_nvfp4_from_mxfp4(f->ctx, NULL, &params, &c.tensors, f->at.workspace, f->at.workspace_bytes);
    f->rounded += rounded;
    return status == QUERN_OK ? status : explain(f, part, expert, status);
}

/* ---- one expert: rows to the layout of a product ---- */

typedef struct transposition {
    const uint8_t *from; /* [rows, width] */
    uint8_t *to;         /* [width, rows] */
    int64_t rows, width;
} transposition;

static void transpose_tile(void *arg, int64_t index, int32_t thread)
{
    const transposition *t = arg;
    const int64_t first = index * TILE, end = first + TILE < t->width ? first + TILE : t->width;
    (void)thread;
    for (int64_t r0 = 0; r0 < t->rows; r0 += TILE) {
        const int64_t r1 = r0 + TILE < t->rows ? r0 + TILE : t->rows;
        for (int64_t k = first; k < end; k++)
            for (int64_t r = r0; r < r1; r++) t->to[k * t->rows + r] = t->from[r * t->width + k];
    }
}

static void transpose(const filling *f, const uint8_t *from, uint8_t *to, int64_t rows, int64_t width)
{
    transposition t = {from, to, rows, width};
    parallel_for(&f->exec, (width + TILE - 1) / TILE, transpose_tile, &t);
}

typedef struct packing {
    quern_tensor codes, scales, repacked;
    quern_moe_prepack_params params;
    quern_moe_prepack_tensors tensors;
} packing;

/* `to`: the first expert's. */
static void describe_packing(const filling *f, int part, int64_t n, int64_t k, int64_t expert, uint8_t *to,
                             packing *p)
{
    const int64_t bytes = part == PART_DOWN ? f->down_bytes : f->up_bytes;
    p->codes = bytes_view(f->at.row_codes, 3, (const int64_t[]){1, n, k / 2});
    p->scales = bytes_view(f->at.row_scales, 3, (const int64_t[]){1, n, k / 16});
    p->repacked = bytes_view(to != NULL ? to + expert * bytes : NULL, 2, (const int64_t[]){1, bytes});
    p->params = (quern_moe_prepack_params)QUERN_MOE_PREPACK_PARAMS_INIT;
    p->params.b_codes = QUERN_NVFP4_CODES_K_MAJOR;
    p->params.b_scales = QUERN_NVFP4_LAYOUT_K_MAJOR;
    p->tensors = (quern_moe_prepack_tensors)QUERN_MOE_PREPACK_TENSORS_INIT;
    p->tensors.b_codes = &p->codes;
    p->tensors.b_scales = &p->scales;
    p->tensors.b_repacked = &p->repacked;
}

/* The scratch rows [n, k] of expert number `expert` to their place. */
static quern_status put_rows(filling *f, int part, int64_t expert, int64_t n, int64_t k)
{
    const places *at = &f->at;
    if (f->repacked) {
        packing p;
        uint8_t *to = part == PART_DOWN ? at->down_repacked : at->up_repacked;
        describe_packing(f, part, n, k, expert, to, &p);
        const quern_status status =
            quern_moe_prepack(f->ctx, NULL, &p.params, &p.tensors, at->workspace, at->workspace_bytes);
        return status == QUERN_OK ? status : explain(f, part, expert, status);
    }
    uint8_t *codes = part == PART_DOWN ? at->down_codes : at->up_codes;
    uint8_t *scales = part == PART_DOWN ? at->down_scales : at->up_scales;
    transpose(f, at->row_codes, codes + expert * n * k / 2, n, k / 2);
    transpose(f, at->row_scales, scales + expert * n * k / 16, n, k / 16);
    return QUERN_OK;
}

quern_status fill_codes(filling *f, int64_t expert)
{
    const layer_experts *l = &f->layer;
    quern_status status = fill_rows(f, PART_GATE, expert, &f->at.up_global[2 * expert]);
    if (status == QUERN_OK) status = fill_rows(f, PART_UP, expert, &f->at.up_global[2 * expert + 1]);
    if (status == QUERN_OK) status = put_rows(f, PART_GATE, expert, up_columns(f), l->hidden);
    if (status == QUERN_OK) status = fill_rows(f, PART_DOWN, expert, &f->at.down_global[expert]);
    return status == QUERN_OK ? put_rows(f, PART_DOWN, expert, l->hidden, l->intermediate) : status;
}

quern_status codes_workspace(const filling *f, size_t *workspace)
{
    const layer_experts *l = &f->layer;
    size_t most = 0, bytes;
    for (int part = PART_UP; part < PARTS; part++) {
        const int64_t rows = part == PART_DOWN ? l->hidden : l->intermediate;
        const int64_t columns = part == PART_DOWN ? l->intermediate : l->hidden;
        quern_status status = QUERN_OK;
        if (is_mxfp4(f)) {
            const expert_matrix m = {
                .rows = rows, .columns = columns, .row_bytes = columns / 2, .scales_row_bytes = columns / 32};
            const quern_nvfp4_from_mxfp4_params params = QUERN_NVFP4_FROM_MXFP4_PARAMS_INIT;
            conversion c;
            describe_conversion(f, part, &m, NULL, NULL, &c);
            status = quern_nvfp4_from_mxfp4_workspace(f->ctx, &params, &c.tensors, &bytes);
            if (status == QUERN_OK && bytes > most) most = bytes;
        }
        if (status == QUERN_OK && f->repacked) {
            packing p;
            describe_packing(f, part, part == PART_DOWN ? rows : 2 * rows, columns, 0, NULL, &p);
            status = quern_moe_prepack_workspace(f->ctx, &p.params, &p.tensors, &bytes);
            if (status == QUERN_OK && bytes > most) most = bytes;
        }
        if (status != QUERN_OK) return status;
    }
    *workspace = most;
    return QUERN_OK;
}
