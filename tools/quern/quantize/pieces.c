/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "quantize/pieces.h"

#include "quantize/error_rows.h"
#include "quantize/mxfp4_rows.h"
#include "quantize/rows_nvfp4.h"

#include "command.h"
#include "core/half.h"
#include "core/mxfp4.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE_VALUES = 1 << 17, GGUF_BLOCK = 64, GGUF_BLOCK_BYTES = 36 };

int64_t columns_a_piece(const matrix *m)
{
    const int64_t columns = PIECE_VALUES / m->rows / MX_BLOCK * MX_BLOCK;
    return columns < MX_BLOCK ? MX_BLOCK : columns > m->columns ? m->columns : columns;
}

static int64_t values_of(const piece_team *team, const write_piece *p)
{
    if (p->kind == OUTPUT_COPY) return p->count * p->copied->element / (int64_t)sizeof(float) + 1;
    const matrix *m = &team->c->list.modules[p->module].weight;
    return p->count * (p->kind == OUTPUT_VALUES_TURNED ? m->rows : m->columns);
}

static bool make_buffers(const piece_team *team, piece_room *r)
{
    const size_t n = (size_t)team->values;
    r->values = malloc(n * sizeof(float));
    r->back = malloc(n * sizeof(float));
    r->codes = malloc(n);
    r->scales = malloc(n / 16 + 1);
    r->workspace = aligned_alloc(64, (team->workspace_bytes + 63) / 64 * 64 + 64);
    return r->values != NULL && r->back != NULL && r->codes != NULL && r->scales != NULL &&
           r->workspace != NULL;
}

bool pieces_make_room(piece_team *team)
{
    for (size_t i = 0; i < team->count; i++) {
        const write_piece *p = &team->pieces[i];
        const int64_t values = values_of(team, p);
        if (values > team->values) team->values = values;
        size_t bytes = 0;
        if (p->kind != OUTPUT_CODES && p->kind != OUTPUT_BLOCKS) continue;
        if (quantise_rows_bytes(team->c, p->count, team->c->list.modules[p->module].weight.columns, &bytes) !=
            QUERN_OK)
            return false;
        if (bytes > team->workspace_bytes) team->workspace_bytes = bytes;
    }
    team->rooms = calloc((size_t)team->c->threads, sizeof *team->rooms);
    team->room_count = team->rooms != NULL ? (size_t)team->c->threads : 0;
    bool good = team->rooms != NULL;
    for (size_t i = 0; i < team->room_count && good; i++) good = make_buffers(team, &team->rooms[i]);
    return good;
}

void pieces_free_room(piece_team *team)
{
    for (size_t i = 0; i < team->room_count; i++) {
        free(team->rooms[i].values);
        free(team->rooms[i].back);
        free(team->rooms[i].codes);
        free(team->rooms[i].scales);
        free(team->rooms[i].workspace);
    }
    free(team->rooms);
}

/* ---- sentences ---- */

static int library_error(const module *m, quern_status status, char sentence[1024])
{
    snprintf(sentence, 1024, "%s%s%s%s", m != NULL ? "tensor '" : "", m != NULL ? TEXT_NAME(m->name) : "",
             m != NULL ? "': " : "", quern_last_error(NULL));
    return status == QUERN_ERR_OUT_OF_MEMORY ? EXIT_MACHINE : EXIT_INPUT;
}

static int put(const write_piece *p, int64_t at, const void *bytes, int64_t size, char sentence[1024])
{
    const quern_status status = quern_file_write_at(p->out, at, bytes, (size_t)size);
    return status == QUERN_OK ? EXIT_DONE : library_error(NULL, status, sentence);
}

/* ---- NVFP4 ---- */

/* The bytes of type 40: 4 scales, then 32 bytes of which the four groups of 8 hold a block each: byte j its
 * values j (low) and j + 8. */
static void pack_blocks(const uint8_t *codes, const uint8_t *scales, int64_t blocks, uint8_t *to)
{
    for (int64_t b = 0; b < blocks; b++, codes += GGUF_BLOCK / 2, scales += 4, to += GGUF_BLOCK_BYTES) {
        memcpy(to, scales, 4);
        for (int k = 0; k < 4; k++) {
            const uint8_t *in = codes + 8 * k;
            uint8_t *out = to + 4 + 8 * k;
            for (int j = 0; j < 8; j += 2) {
                out[j] = (uint8_t)((in[j / 2] & 15) | (in[4 + j / 2] & 15) << 4);
                out[j + 1] = (uint8_t)(in[j / 2] >> 4 | (in[4 + j / 2] & 0xf0));
            }
        }
    }
}

/* Writes codes and scales of the piece's rows where the format wants them. */
static int put_nvfp4(const piece_team *team, const write_piece *p, const uint8_t *codes,
                     const uint8_t *scales, uint8_t *packed, char sentence[1024])
{
    const module *m = &team->c->list.modules[p->module];
    const int64_t columns = m->weight.columns, values = p->count * columns;
    if (p->kind == OUTPUT_BLOCKS) {
        const int64_t row_bytes = columns / GGUF_BLOCK * GGUF_BLOCK_BYTES;
        pack_blocks(codes, scales, values / GGUF_BLOCK, packed);
        return put(p, m->codes_at + p->first * row_bytes, packed, p->count * row_bytes, sentence);
    }
    const int code = put(p, m->codes_at + p->first * columns / 2, codes, values / 2, sentence);
    return code != EXIT_DONE ? code
                             : put(p, m->scales_at + p->first * columns / 16, scales, values / 16, sentence);
}

/* What codes and scales under the group's global lose of x. */
static void note_errors(const piece_team *team, write_piece *p, const matrix_values *x, const uint8_t *codes,
                        const uint8_t *scales)
{
    const module *m = &team->c->list.modules[p->module];
    const module_group *g = &team->c->list.groups[m->group];
    const coded_rows coded = {.codes = codes,
                              .scales = scales,
                              .global = g->global,
                              .reciprocal = team->c->format == FORMAT_COMPRESSED_TENSORS,
                              .largest = g->amax,
                              .any_scale = team->c->options->scales != QUERN_NVFP4_SCALES_RNE ||
                                           m->weight.encoding == ENCODING_NVFP4};
    add_errors(x, &coded, p->count, m->weight.columns, &p->error);
}

static int quantise_piece(const piece_team *team, write_piece *p, piece_room *r, char sentence[1024])
{
    const module *m = &team->c->list.modules[p->module];
    const matrix_values x = matrix_read(&m->weight, p->first, p->count, r->values);
    const quern_status status =
        quantise_rows(team->c, &x, p->count, m->weight.columns, team->c->list.groups[m->group].global,
                      r->codes, r->scales, r->workspace, team->workspace_bytes);
    if (status != QUERN_OK) return library_error(m, status, sentence);
    note_errors(team, p, &x, r->codes, r->scales);
    return put_nvfp4(team, p, r->codes, r->scales, (uint8_t *)r->back, sentence);
}

/* The codes of the piece's rows next to each other: where they stand, or in the buffer. */
static const uint8_t *gather(const matrix *m, int64_t first, int64_t count, bool copy, uint8_t *buffer)
{
    const int64_t bytes = m->columns / 2;
    if (!copy && m->row_bytes == bytes) return m->data + first * bytes;
    for (int64_t r = 0; r < count; r++)
        memcpy(buffer + r * bytes, m->data + (first + r) * m->row_bytes, (size_t)bytes);
    return buffer;
}

/* Scales of MXFP4 blocks, by exponent byte: 2^8 for `largest`, the least below the range. */
static void scale_table(int largest, uint8_t table[256])
{
    for (int e = 0; e < 256; e++) {
        const int power = e - largest + MX_LARGEST_POWER;
        table[e] = power > MX_LARGEST_POWER ? 0 : power < MX_LEAST_POWER ? 1 : mx_scale_of(power);
    }
}

/* Rounds the codes of blocks below the range; returns how many blocks. */
static int64_t lower_blocks(const matrix *w, int64_t row, int largest, uint8_t *codes)
{
    const uint8_t *exponents = w->scales + row * w->scales_row_bytes;
    int64_t rounded = 0;
    for (int64_t b = 0; b < w->columns / MX_BLOCK; b++, codes += MX_BYTES) {
        const int power = exponents[b] - largest + MX_LARGEST_POWER;
        if (power >= MX_LEAST_POWER || mx_is_zero(codes)) continue;
        mx_lower_block(codes, MX_LEAST_POWER - power);
        rounded++;
    }
    return rounded;
}

static int mxfp4_piece(const piece_team *team, write_piece *p, piece_room *r, char sentence[1024])
{
    const module *m = &team->c->list.modules[p->module];
    const module_group *g = &team->c->list.groups[m->group];
    const matrix *w = &m->weight;
    const int64_t blocks = w->columns / MX_BLOCK, row_bytes = w->columns / 2;
    uint8_t table[256];
    scale_table(g->largest, table);
    const uint8_t *codes = gather(w, p->first, p->count, g->below, r->codes);
    for (int64_t row = 0; row < p->count; row++) {
        mxfp4_scales(g->zeros ? codes + row * row_bytes : NULL,
                     w->scales + (p->first + row) * w->scales_row_bytes, blocks, table,
                     r->scales + row * 2 * blocks);
        if (g->below)
            p->error.rounded += lower_blocks(w, p->first + row, g->largest, r->codes + row * row_bytes);
    }
    if (g->below) { /* else nothing is lost */
        const matrix_values x = matrix_read(w, p->first, p->count, r->values);
        note_errors(team, p, &x, codes, r->scales);
    }
    return put_nvfp4(team, p, codes, r->scales, (uint8_t *)r->back, sentence);
}

/* Scales times what the globals' ratio asks for; to the nearest, saturating. */
static void rescale(uint8_t *scales, int64_t count, float ratio)
{
    uint8_t table[256];
    for (int i = 0; i < 256; i++) {
        const float wanted = e4m3_byte_value((uint8_t)(i & 0x7f)) * ratio;
        int best = 0;
        for (int k = 1; k < 0x7f; k++) { /* ties go to the even byte */
            const float old = fabsf(e4m3_byte_value((uint8_t)best) - wanted),
                        now = fabsf(e4m3_byte_value((uint8_t)k) - wanted);
            if (now < old || (now == old && k % 2 == 0)) best = k;
        }
        table[i] = i >= 0x7f ? (uint8_t)i : (uint8_t)best;
    }
    for (int64_t i = 0; i < count; i++) scales[i] = table[scales[i]];
}

static int nvfp4_piece(const piece_team *team, write_piece *p, piece_room *r, char sentence[1024])
{
    module *m = &team->c->list.modules[p->module];
    const matrix *w = &m->weight;
    const float to = team->c->list.groups[m->group].global;
    const bool reciprocal = team->c->format == FORMAT_COMPRESSED_TENSORS;
    const float own = w->reciprocal == reciprocal ? w->global : 1.0f / w->global;
    const uint8_t *codes = gather(w, p->first, p->count, false, r->codes);
    const int64_t blocks = w->columns / 16;
    for (int64_t row = 0; row < p->count; row++)
        memcpy(r->scales + row * blocks, w->scales + (p->first + row) * w->scales_row_bytes, (size_t)blocks);
    if (own != to) {
        matrix rows = *w;
        rows.data += p->first * w->row_bytes;
        rows.scales += p->first * w->scales_row_bytes;
        const quern_status status = dequantise_rows(team->c, &rows, p->count, r->values, QUERN_F32);
        if (status != QUERN_OK) return library_error(m, status, sentence);
        rescale(r->scales, p->count * blocks, reciprocal ? to / own : own / to);
        const matrix_values x = {r->values, QUERN_F32, w->columns};
        note_errors(team, p, &x, codes, r->scales);
    }
    return put_nvfp4(team, p, codes, r->scales, (uint8_t *)r->back, sentence);
}

/* ---- values and copies ---- */

/* f32 to bf16 in place; false where a value is none. */
static bool narrow(float *values, int64_t count, uint16_t *to)
{
    uint16_t any = 0;
    for (int64_t i = 0; i < count; i++) {
        to[i] = bf16_from_float(values[i]);
        any |= (uint16_t)((to[i] & 0x7f80) == 0x7f80);
    }
    return any == 0;
}

/* Rows, or with `turned` columns, as bf16. */
static int values_piece(const piece_team *team, const write_piece *p, piece_room *r, char sentence[1024])
{
    const module *m = &team->c->list.modules[p->module];
    const bool turned = p->kind == OUTPUT_VALUES_TURNED;
    matrix w = m->weight;
    if (turned) {
        w.data += p->first / 2;
        w.scales += p->first / MX_BLOCK;
        w.columns = p->count;
    }
    const int64_t first = turned ? 0 : p->first, rows = turned ? w.rows : p->count, count = rows * w.columns;
    uint16_t *to = (uint16_t *)r->back;
    if (w.encoding == ENCODING_NVFP4) {
        w.data += first * w.row_bytes;
        w.scales += first * w.scales_row_bytes;
        const quern_status status = dequantise_rows(team->c, &w, rows, to, QUERN_BF16);
        if (status != QUERN_OK) return library_error(m, status, sentence);
    } else {
        matrix_read(&w, first, rows, r->values);
        if (!narrow(r->values, count, to)) {
            snprintf(sentence, 1024, "tensor '%s.weight': a value is beyond bf16, or no number",
                     TEXT_NAME(m->name));
            return EXIT_INPUT;
        }
    }
    if (!turned) return put(p, m->values_at + p->first * w.columns * 2, to, count * 2, sentence);
    uint16_t *across = r->values;
    for (int64_t k = 0; k < w.columns; k++)
        for (int64_t n = 0; n < rows; n++) across[k * rows + n] = to[n * w.columns + k];
    return put(p, m->values_at + p->first * rows * 2, across, count * 2, sentence);
}

static int copy_piece(const write_piece *p, piece_room *r, char sentence[1024])
{
    const output_part *c = p->copied;
    const uint8_t *from = c->data + p->first * c->step;
    if (c->step != c->element) {
        uint8_t *to = r->values;
        for (int64_t i = 0; i < p->count; i++)
            memcpy(to + i * c->element, from + i * c->step, (size_t)c->element);
        from = to;
    }
    return put(p, p->at + p->first * c->element, from, p->count * c->element, sentence);
}

int pieces_write(void *arg, int64_t index, int thread, char sentence[1024])
{
    piece_team *team = arg;
    write_piece *p = &team->pieces[index];
    piece_room *r = &team->rooms[thread];
    const module *m = p->module != SIZE_MAX ? &team->c->list.modules[p->module] : NULL;
    int code;
    int64_t bytes;
    if (p->kind == OUTPUT_COPY) {
        code = copy_piece(p, r, sentence);
        bytes = p->count * p->copied->element;
    } else if (p->kind == OUTPUT_VALUES || p->kind == OUTPUT_VALUES_TURNED) {
        code = values_piece(team, p, r, sentence);
        bytes = matrix_bytes(&m->weight) / (p->kind == OUTPUT_VALUES ? m->weight.rows : m->weight.columns) *
                p->count;
    } else {
        const group_method method = group_method_of(&team->c->list, &team->c->list.groups[m->group]);
        code = sweep_find(team->c, team->sweep, m->group, r->values, sentence);
        if (code == EXIT_DONE)
            code = method == METHOD_MXFP4   ? mxfp4_piece(team, p, r, sentence)
                   : method == METHOD_NVFP4 ? nvfp4_piece(team, p, r, sentence)
                                            : quantise_piece(team, p, r, sentence);
        bytes = matrix_bytes(&m->weight) / m->weight.rows * p->count;
    }
    if (code == EXIT_DONE) progress_add(team->progress, bytes, thread == 0);
    return code;
}
