/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* globals.c - the first sweep: what a group's global scale follows from. */
#include "quantize/convert.h"
#include "quantize/error_rows.h"
#include "quantize/mxfp4_rows.h"

#include "command.h"
#include "core/half.h"
#include "core/mxfp4.h"

#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

/* Values of a piece; of one whose codes go from file to file, which waits less for the file's lock. */
enum { PIECE_VALUES = 1 << 17, COPIED_VALUES = 1 << 20 };

int64_t rows_a_piece(const matrix *m, bool copied)
{
    const int64_t rows = (copied ? COPIED_VALUES : PIECE_VALUES) / m->columns;
    return rows < 1 ? 1 : rows > m->rows ? m->rows : rows;
}

group_method group_method_of(const module_list *list, const module_group *g)
{
    bool mxfp4 = true, nvfp4 = true;
    for (size_t i = 0; i < g->count; i++) {
        const encoding e = list->modules[list->members[g->first + i]].weight.encoding;
        mxfp4 = mxfp4 && e == ENCODING_MXFP4;
        nvfp4 = nvfp4 && e == ENCODING_NVFP4;
    }
    return mxfp4 ? METHOD_MXFP4 : nvfp4 ? METHOD_NVFP4 : METHOD_QUANTISE;
}

/* Some rows of a module, and what they hold. */
typedef struct sweep_piece {
    const module *module;
    group_method method;
    int64_t first, count;
    uint32_t largest;  /* bits of the largest magnitude */
    mxfp4_range range; /* of MXFP4 */
} sweep_piece;

/* A group's pieces: threads take them by `next`, and the last to end one sets the global. */
typedef struct sweep_group {
    size_t first, count;
    atomic_size_t next, ended;
    atomic_size_t failed; /* the first piece that did; SIZE_MAX: none */
    atomic_bool ready;
} sweep_group;

struct sweep {
    sweep_piece *pieces;
    sweep_group *groups; /* of all, by number */
    size_t count, room;
};

static int beyond(const module *m, int64_t row, const char *what, char sentence[1024])
{
    snprintf(sentence, 1024, "tensor '%s.weight', row %lld: %s", TEXT_NAME(m->name), (long long)row, what);
    return EXIT_INPUT;
}

static int sweep_mxfp4(sweep_piece *p, char sentence[1024])
{
    const matrix *m = &p->module->weight;
    const int64_t blocks = m->columns / MX_BLOCK;
    p->range = (mxfp4_range){.largest = -1, .least = 256};
    for (int64_t r = p->first; r < p->first + p->count; r++)
        mxfp4_sweep(m->data + r * m->row_bytes, m->scales + r * m->scales_row_bytes, blocks, &p->range);
    for (int64_t i = 0; p->range.most >= 0xFD && i < p->count * blocks; i++) {
        const int64_t row = p->first + i / blocks, b = i % blocks;
        if (mx_is_bad(m->data + row * m->row_bytes + b * MX_BYTES, m->scales[row * m->scales_row_bytes + b]))
            return beyond(p->module, row,
                          "an MXFP4 block has a value beyond f32, or a scale that is no number", sentence);
    }
    return EXIT_DONE;
}

static int sweep_rows(sweep_piece *p, void *buffer, char sentence[1024])
{
    const matrix *m = &p->module->weight;
    if (p->method == METHOD_MXFP4) return sweep_mxfp4(p, sentence);
    const matrix_values x = matrix_read(m, p->first, p->count, buffer);
    p->largest = largest_of_values(&x, p->count, m->columns);
    if (p->largest < 0x7f800000u) return EXIT_DONE;
    int64_t row = 0;
    const size_t bytes = (size_t)x.stride * quern_dtype_size(x.dtype);
    while (largest_of_values(&(matrix_values){(const char *)x.data + (size_t)row * bytes, x.dtype, x.stride},
                             1, m->columns) < 0x7f800000u)
        row++;
    return beyond(p->module, p->first + row, "a value is not finite", sentence);
}

static bool add_pieces(sweep *s, const module *m, group_method method)
{
    const int64_t rows = rows_a_piece(&m->weight, method == METHOD_MXFP4);
    for (int64_t first = 0; first < m->weight.rows; first += rows) {
        if (s->count == s->room) {
            const size_t room = 2 * s->room + 64;
            sweep_piece *grown = realloc(s->pieces, room * sizeof *grown);
            if (grown == NULL) return false;
            s->pieces = grown;
            s->room = room;
        }
        const int64_t count = m->weight.rows - first < rows ? m->weight.rows - first : rows;
        s->pieces[s->count++] = (sweep_piece){.module = m,
                                              .method = method,
                                              .first = first,
                                              .count = count,
                                              .range = {.largest = -1, .least = 256}};
    }
    return true;
}

/* G of a profile, R under compressed-tensors. */
static float global_of_largest(const conversion *c, float amax)
{
    if (c->format != FORMAT_COMPRESSED_TENSORS) return amax == 0.0f ? 1.0f : fmaxf(amax / 2688.0f, 0x1p-149f);
    const float r = 1.0f / amax * 2688.0f;
    return isfinite(r) ? r : 1.0f;
}

/* The smallest exponent byte whose reciprocal global is a number of f32. */
enum { LEAST_EXPONENT_OF_R = 8 };

static void set_mxfp4(const conversion *c, module_group *g, mxfp4_range range)
{
    int largest = range.largest;
    const bool reciprocal = c->format == FORMAT_COMPRESSED_TENSORS;
    if (reciprocal && largest >= 0 && largest < LEAST_EXPONENT_OF_R) largest = LEAST_EXPONENT_OF_R;
    g->largest = largest;
    g->zeros = range.zeros;
    g->below = range.least < largest - (MX_LARGEST_POWER - MX_LEAST_POWER);
    g->global = reciprocal ? 1.0f / mx_global(largest) : mx_global(largest);
}

/* NVFP4 keeps its global; of several that differ the largest G counts. */
static int set_nvfp4(conversion *c, module_group *g)
{
    const bool reciprocal = c->format == FORMAT_COMPRESSED_TENSORS;
    for (size_t i = 0; i < g->count; i++) {
        const module *m = &c->list.modules[c->list.members[g->first + i]];
        const float global = m->weight.reciprocal == reciprocal ? m->weight.global : 1.0f / m->weight.global;
        if (!(global > 0.0f && isfinite(global)))
            return fail(EXIT_INPUT, "tensor '%s': the reciprocal of its global scale %g is no number of f32",
                        TEXT_NAME(m->name), (double)m->weight.global);
        if (i == 0 || (reciprocal ? global < g->global : global > g->global)) g->global = global;
    }
    return EXIT_DONE;
}

/* The group's global from what its pieces hold. */
static void set_global(const conversion *c, const sweep *s, size_t number)
{
    module_group *g = &c->list.groups[number];
    const sweep_group *w = &s->groups[number];
    uint32_t bits = 0;
    mxfp4_range range = {.largest = -1, .least = 256};
    for (size_t p = w->first; p < w->first + w->count; p++) {
        const mxfp4_range *one = &s->pieces[p].range;
        bits = s->pieces[p].largest > bits ? s->pieces[p].largest : bits;
        range.largest = one->largest > range.largest ? one->largest : range.largest;
        range.least = one->least < range.least ? one->least : range.least;
        range.zeros = range.zeros || one->zeros;
    }
    if (group_method_of(&c->list, g) == METHOD_MXFP4) {
        set_mxfp4(c, g, range);
    } else {
        g->amax = float_from_bits(bits);
        g->global = global_of_largest(c, g->amax);
    }
    g->known = true;
}

sweep *sweep_new(const conversion *c)
{
    sweep *s = calloc(1, sizeof *s);
    if (s != NULL) s->groups = calloc(c->list.group_count + 1, sizeof *s->groups);
    if (s != NULL && s->groups != NULL) return s;
    free(s);
    return NULL;
}

void sweep_free(sweep *s)
{
    if (s == NULL) return;
    free(s->pieces);
    free(s->groups);
    free(s);
}

void sweep_begin(sweep *s)
{
    s->count = 0;
}

int sweep_add(conversion *c, sweep *s, size_t number, int64_t *values)
{
    module_group *g = &c->list.groups[number];
    sweep_group *w = &s->groups[number];
    const group_method method = group_method_of(&c->list, g);
    if (g->known || w->count > 0) return EXIT_DONE;
    if (method == METHOD_NVFP4) {
        g->known = true;
        return set_nvfp4(c, g);
    }
    w->first = s->count;
    for (size_t k = 0; k < g->count; k++) {
        const module *m = &c->list.modules[c->list.members[g->first + k]];
        const int64_t most = rows_a_piece(&m->weight, false) * m->weight.columns;
        if (!add_pieces(s, m, method)) return fail(EXIT_MACHINE, "no memory for pieces of tensors");
        if (method == METHOD_QUANTISE && most > *values) *values = most;
    }
    w->count = s->count - w->first;
    w->failed = SIZE_MAX;
    return EXIT_DONE;
}

/* Notes the first piece that failed, so that the sentence does not depend on the threads. */
static void note_failure(sweep_group *w, size_t piece)
{
    size_t before = atomic_load(&w->failed);
    while (piece < before && !atomic_compare_exchange_weak(&w->failed, &before, piece)) {
    }
}

int sweep_find(const conversion *c, sweep *s, size_t number, void *buffer, char sentence[1024])
{
    sweep_group *w = &s->groups[number];
    if (w->count == 0) return EXIT_DONE; /* known before */
    for (size_t i; !atomic_load(&w->ready) && (i = atomic_fetch_add(&w->next, 1)) < w->count;) {
        if (sweep_rows(&s->pieces[w->first + i], buffer, sentence) != EXIT_DONE)
            note_failure(w, w->first + i);
        if (atomic_fetch_add(&w->ended, 1) + 1 < w->count) continue;
        set_global(c, s, number);
        atomic_store(&w->ready, true);
    }
    while (!atomic_load(&w->ready)) sched_yield(); /* others are at the last pieces */
    const size_t failed = atomic_load(&w->failed);
    return failed == SIZE_MAX ? EXIT_DONE : sweep_rows(&s->pieces[failed], buffer, sentence);
}
