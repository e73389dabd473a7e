/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* convert.c - files' modules by pieces, and the numbers and copies beside them. */
#include "quantize/convert.h"
#include "quantize/pieces.h"

#include "command.h"

#include <stdlib.h>

/* Bytes of the source whose pieces are listed at once, so that memory does not grow with the model; and of a
 * piece that is copied. */
enum { LISTED_BYTES = 1 << 30, COPY_BYTES = 4 << 20 };

/* Where the next list goes on in a file. */
typedef struct position {
    size_t tensor, part;
} position;

static bool add_piece(piece_team *team, write_piece piece)
{
    if (team->count == team->room) {
        const size_t room = 2 * team->room + 64;
        write_piece *grown = realloc(team->pieces, room * sizeof *grown);
        if (grown == NULL) return false;
        team->pieces = grown;
        team->room = room;
    }
    team->pieces[team->count++] = piece;
    return true;
}

/* Pieces of `step` out of `extent`. */
static bool add_range(piece_team *team, write_piece piece, int64_t extent, int64_t step)
{
    bool good = true;
    for (piece.first = 0; piece.first < extent && good; piece.first += step) {
        piece.count = extent - piece.first < step ? extent - piece.first : step;
        good = add_piece(team, piece);
    }
    return good;
}

static int no_memory(void)
{
    return fail(EXIT_MACHINE, "no memory for pieces of tensors");
}

/* The pieces of a part of a tensor, and of the first sweep that they need. */
static int add_part(conversion *c, piece_team *team, const open_output *o, const output_tensor *t,
                    size_t index)
{
    const output_part *part = &o->file->parts[t->first_part + index];
    const int64_t at = t->offset + (int64_t)index * t->bytes;
    write_piece piece = {.out = o->out, .module = part->module, .kind = t->kind};
    if (t->kind == OUTPUT_COPY) {
        piece.copied = part;
        piece.at = at;
        team->bytes += t->bytes;
        return add_range(team, piece, part->count, COPY_BYTES / part->element) ? EXIT_DONE : no_memory();
    }
    module *m = &c->list.modules[part->module];
    if (t->kind == OUTPUT_CODES || t->kind == OUTPUT_BLOCKS) m->codes_at = at;
    if (t->kind == OUTPUT_VALUES || t->kind == OUTPUT_VALUES_TURNED) m->values_at = at;
    if (t->kind == OUTPUT_SCALES || t->kind == OUTPUT_GLOBAL || t->kind == OUTPUT_INPUT_SCALE)
        return EXIT_DONE;
    m->error = (module_error){0};
    team->bytes += matrix_bytes(&m->weight);
    if (t->kind == OUTPUT_VALUES || t->kind == OUTPUT_VALUES_TURNED) {
        const bool turned = t->kind == OUTPUT_VALUES_TURNED;
        return add_range(team, piece, turned ? m->weight.columns : m->weight.rows,
                         turned ? columns_a_piece(&m->weight) : rows_a_piece(&m->weight, false))
                   ? EXIT_DONE
                   : no_memory();
    }
    const group_method method = group_method_of(&c->list, &c->list.groups[m->group]);
    const bool copied = method == METHOD_MXFP4 && t->kind == OUTPUT_CODES;
    if (!add_range(team, piece, m->weight.rows, rows_a_piece(&m->weight, copied))) return no_memory();
    return sweep_add(c, team->sweep, m->group, &team->values);
}

/* The pieces' errors in their order, so that sums do not depend on the threads. */
static void collect_errors(conversion *c, const piece_team *team)
{
    for (size_t i = 0; i < team->count; i++) {
        const write_piece *p = &team->pieces[i];
        if (p->module == SIZE_MAX) continue;
        module_error *e = &c->list.modules[p->module].error;
        e->error += p->error.error;
        e->square += p->error.square;
        e->saturated += p->error.saturated;
        e->rounded += p->error.rounded;
        if (p->error.worst > e->worst) e->worst = p->error.worst;
    }
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

/* Parts of the file from where an earlier list ended, for `bytes` of their source: a lane of the work. */
static int add_parts(conversion *c, piece_team *team, const open_output *o, position *at, int64_t bytes)
{
    const int64_t end = team->bytes + bytes;
    int code = EXIT_DONE;
    while (at->tensor < o->file->count && code == EXIT_DONE && team->bytes < end) {
        const output_tensor *t = &o->file->tensors[at->tensor];
        if (at->part < t->part_count && !is_numbers(t)) code = add_part(c, team, o, t, at->part++);
        else *at = (position){at->tensor + 1, 0};
    }
    team->lanes.ends[team->lanes.count++] = (int64_t)team->count;
    return code;
}

static int run_pieces(conversion *c, piece_team *team)
{
    team_trouble trouble = {.piece = INT64_MAX};
    int code = pieces_make_room(team) ? EXIT_DONE : no_memory();
    if (code == EXIT_DONE) team_run(c->threads, &team->lanes, pieces_write, team, &trouble);
    pieces_free_room(team);
    if (trouble.piece != INT64_MAX) code = fail(trouble.code, "%s", trouble.sentence);
    if (code == EXIT_DONE) collect_errors(c, team);
    sweep_begin(team->sweep);
    *team = (piece_team){
        .c = c, .progress = team->progress, .sweep = team->sweep, .pieces = team->pieces, .room = team->room};
    return code;
}

int convert_files(conversion *c, const open_output *outputs, size_t count, progress *p)
{
    piece_team team = {.c = c, .progress = p, .sweep = sweep_new(c)};
    position at[FILES_AT_ONCE] = {{0, 0}};
    int code = team.sweep != NULL ? EXIT_DONE : no_memory();
    for (size_t i = 0; i < count; i++) place_scales(c, outputs[i].file);
    for (bool more = true; more && code == EXIT_DONE;) {
        more = false;
        for (size_t i = 0; i < count && code == EXIT_DONE; i++) {
            code = add_parts(c, &team, &outputs[i], &at[i], LISTED_BYTES / (int64_t)count);
            more = more || at[i].tensor < outputs[i].file->count;
        }
        if (code == EXIT_DONE) code = run_pieces(c, &team);
    }
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < outputs[i].file->count && code == EXIT_DONE; k++)
            if (is_numbers(&outputs[i].file->tensors[k]))
                code = write_numbers(c, &outputs[i], &outputs[i].file->tensors[k]);
    sweep_free(team.sweep);
    free(team.pieces);
    return code;
}
