/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* convert.c - files' modules by batches, and the numbers and copies beside them. */
#include "quantize/convert.h"
#include "quantize/pieces.h"

#include "command.h"

#include <stdlib.h>

/* Bytes of a batch, of which the second sweep finds much in the caches; and of a piece that is copied. */
enum { BATCH_BYTES = 64 << 20, COPY_BYTES = 4 << 20 };

/* The pieces of a batch, and the groups that it needs. */
typedef struct batch {
    piece_team team;
    size_t room;
    size_t *groups, group_count;
    int64_t bytes;
} batch;

/* Where the next batch goes on in a file. */
typedef struct position {
    size_t tensor, part;
} position;

static bool add_piece(batch *b, write_piece piece)
{
    if (b->team.count == b->room) {
        const size_t room = 2 * b->room + 64;
        write_piece *grown = realloc(b->team.pieces, room * sizeof *grown);
        if (grown == NULL) return false;
        b->team.pieces = grown;
        b->room = room;
    }
    b->team.pieces[b->team.count++] = piece;
    return true;
}

/* Pieces of `step` out of `extent`. */
static bool add_range(batch *b, write_piece piece, int64_t extent, int64_t step)
{
    bool good = true;
    for (piece.first = 0; piece.first < extent && good; piece.first += step) {
        piece.count = extent - piece.first < step ? extent - piece.first : step;
        good = add_piece(b, piece);
    }
    return good;
}

static bool add_part(conversion *c, batch *b, const open_output *o, const output_tensor *t, size_t index)
{
    const output_part *part = &o->file->parts[t->first_part + index];
    const int64_t at = t->offset + (int64_t)index * t->bytes;
    if (t->kind == OUTPUT_COPY) {
        const int64_t step = COPY_BYTES / part->element;
        b->bytes += t->bytes;
        return add_range(
            b,
            (write_piece){.out = o->out, .module = SIZE_MAX, .copied = part, .kind = OUTPUT_COPY, .at = at},
            part->count, step);
    }
    module *m = &c->list.modules[part->module];
    if (t->kind == OUTPUT_SCALES) m->scales_at = at;
    if (t->kind == OUTPUT_CODES || t->kind == OUTPUT_BLOCKS) m->codes_at = at;
    if (t->kind == OUTPUT_VALUES || t->kind == OUTPUT_VALUES_TURNED) m->values_at = at;
    if (t->kind == OUTPUT_SCALES || t->kind == OUTPUT_GLOBAL || t->kind == OUTPUT_INPUT_SCALE) return true;
    b->bytes += matrix_bytes(&m->weight);
    m->error = (module_error){0};
    if (t->kind != OUTPUT_VALUES && t->kind != OUTPUT_VALUES_TURNED && !c->list.groups[m->group].known &&
        (b->group_count == 0 || b->groups[b->group_count - 1] != m->group))
        b->groups[b->group_count++] = m->group;
    const bool turned = t->kind == OUTPUT_VALUES_TURNED;
    return add_range(b, (write_piece){.out = o->out, .module = part->module, .kind = t->kind},
                     turned ? m->weight.columns : m->weight.rows,
                     turned ? columns_a_piece(&m->weight) : rows_a_piece(&m->weight));
}

/* Each group once: a module of another may have come between two of its own. */
static void keep_each_once(conversion *c, batch *b)
{
    size_t kept = 0;
    for (size_t i = 0; i < b->group_count; i++) {
        module_group *g = &c->list.groups[b->groups[i]];
        if (g->known) continue;
        g->known = true; /* until all are listed */
        b->groups[kept++] = b->groups[i];
    }
    for (size_t i = 0; i < kept; i++) c->list.groups[b->groups[i]].known = false;
    b->group_count = kept;
}

/* The pieces' errors in their order, so that sums do not depend on the threads. */
static void collect_errors(conversion *c, const batch *b)
{
    for (size_t i = 0; i < b->team.count; i++) {
        const write_piece *p = &b->team.pieces[i];
        if (p->module == SIZE_MAX) continue;
        module_error *e = &c->list.modules[p->module].error;
        e->error += p->error.error;
        e->square += p->error.square;
        e->saturated += p->error.saturated;
        e->rounded += p->error.rounded;
        if (p->error.worst > e->worst) e->worst = p->error.worst;
    }
}

static int run_batch(conversion *c, batch *b)
{
    work_trouble trouble = {.piece = INT64_MAX};
    keep_each_once(c, b);
    int code = find_globals(c, b->groups, b->group_count);
    if (code != EXIT_DONE) return code;
    if (!pieces_make_room(&b->team)) code = fail(EXIT_MACHINE, "no memory for pieces of tensors");
    else work_run(c->threads, &b->team.lanes, pieces_write, &b->team, &trouble);
    pieces_free_room(&b->team);
    if (trouble.piece != INT64_MAX) code = fail(trouble.code, "%s", trouble.sentence);
    if (code == EXIT_DONE) collect_errors(c, b);
    b->team = (piece_team){.c = c, .progress = b->team.progress, .pieces = b->team.pieces};
    b->group_count = 0;
    b->bytes = 0;
    return code;
}

/* Whether the tensor's numbers, one a part, are among the small ones written at the end. */
static bool is_numbers(const output_tensor *t)
{
    return t->kind == OUTPUT_GLOBAL || t->kind == OUTPUT_INPUT_SCALE;
}

static int write_numbers(const conversion *c, const open_output *o, const output_tensor *t)
{
    const bool reciprocal = c->format == FORMAT_COMPRESSED_TENSORS;
    for (size_t i = 0; i < t->part_count; i++) {
        const module *m = &c->list.modules[o->file->parts[t->first_part + i].module];
        const float given = reciprocal ? 1.0f / m->input_scale : m->input_scale;
        const float value = t->kind == OUTPUT_GLOBAL ? c->list.groups[m->group].global : given;
        const quern_status status =
            quern_file_write_at(o->out, t->offset + 4 * (int64_t)i, &value, sizeof value);
        if (status != QUERN_OK) return fail_status(status);
    }
    return EXIT_DONE;
}

/* A tensor that needs a module's codes_at and scales_at comes after both are known: positions first. */
static void place_scales(conversion *c, const output_file *f)
{
    for (size_t i = 0; i < f->count; i++) {
        const output_tensor *t = &f->tensors[i];
        for (size_t k = 0; k < t->part_count && t->kind == OUTPUT_SCALES; k++)
            c->list.modules[f->parts[t->first_part + k].module].scales_at = t->offset + (int64_t)k * t->bytes;
    }
}

/* Parts of the file from where an earlier batch ended, for `bytes` of their source. False without memory. */
static bool add_parts(conversion *c, batch *b, const open_output *o, position *at, int64_t bytes)
{
    const int64_t end = b->bytes + bytes;
    for (; at->tensor < o->file->count; at->tensor++, at->part = 0) {
        const output_tensor *t = &o->file->tensors[at->tensor];
        for (; at->part < t->part_count && !is_numbers(t); at->part++) {
            if (b->bytes >= end) return true;
            if (!add_part(c, b, o, t, at->part)) return false;
        }
    }
    return true;
}

int convert_files(conversion *c, const open_output *outputs, size_t count, progress *p)
{
    batch b = {.team = {.c = c, .progress = p}};
    position at[FILES_AT_ONCE] = {{0, 0}};
    b.groups = malloc((c->list.count + 1) * sizeof *b.groups);
    int code = b.groups != NULL ? EXIT_DONE : fail(EXIT_MACHINE, "no memory for pieces of tensors");
    for (size_t i = 0; i < count; i++) place_scales(c, outputs[i].file);
    for (bool more = true; more && code == EXIT_DONE;) {
        more = false;
        for (size_t i = 0; i < count && code == EXIT_DONE; i++) {
            if (!add_parts(c, &b, &outputs[i], &at[i], BATCH_BYTES / (int64_t)count))
                code = fail(EXIT_MACHINE, "no memory for pieces of tensors");
            b.team.lanes.ends[b.team.lanes.count++] = (int64_t)b.team.count;
            more = more || at[i].tensor < outputs[i].file->count;
        }
        if (code == EXIT_DONE) code = run_batch(c, &b);
    }
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < outputs[i].file->count && code == EXIT_DONE; k++)
            if (is_numbers(&outputs[i].file->tensors[k]))
                code = write_numbers(c, &outputs[i], &outputs[i].file->tensors[k]);
    free(b.team.pieces);
    free(b.groups);
    return code;
}
