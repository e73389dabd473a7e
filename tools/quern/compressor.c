/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* compressor.c - `quern run csa-compress` and `hca-compress`: a sequence in one call, or in pieces through a
 * state. */
#include "command.h"
#include "scenario.h"

#include <quern/dsv4.h>

#include <stdlib.h>
#include <string.h>

typedef struct compressor_options {
    int64_t ratio, ring, rollback;
    int format;
    const char *chunks;
} compressor_options;

static const char *const format_choices[] = {"input",     "f32", "bf16",   "fp8",
                                             "fp8-power", "fp4", "row584", NULL};
enum { FORMAT_INPUT, FORMAT_F32, FORMAT_BF16 };

#define AT(member) offsetof(compressor_options, member)
static const option_row rows[] = {
    {"ratio", OPTION_INT, AT(ratio), NULL, "r, tokens of a block; 0: the rows of the biases"},
    {"format", OPTION_CHOICE, AT(format), format_choices, "of out; input: the tokens' dtype"},
    {"chunks", OPTION_TEXT, AT(chunks), NULL,
     "3,1,7,...: append pieces of so many rows, T in all, to a state instead of one shot"},
    {"ring", OPTION_INT, AT(ring), NULL, "with --chunks: rows that the state can take back, 0 to 8"},
    {"rollback", OPTION_INT, AT(rollback), NULL,
     "with --chunks: rows taken back and appended again before each piece but the first, where held"},
};
#undef AT
enum { ROWS = sizeof rows / sizeof *rows, CHUNKS_MAX = 65536 };
static compressor_options options;

static quern_dsv4_compress_params params_of(const job *j)
{
    quern_dsv4_compress_params p;
    memcpy(&p, &j->params, sizeof p);
    return p;
}

static quern_dsv4_compress_tensors tensors_of(const job *j)
{
    quern_dsv4_compress_tensors t;
    memcpy(&t, &j->tensors, sizeof t);
    return t;
}

static int set_params(job *j)
{
    static const quern_dsv4_format formats[] = {QUERN_DSV4_ROWS,  QUERN_DSV4_ROWS,      QUERN_DSV4_ROWS,
                                                QUERN_DSV4_FP8,   QUERN_DSV4_FP8_POWER, QUERN_DSV4_FP4,
                                                QUERN_DSV4_ROW584};
    quern_dsv4_compress_params p = params_of(j);
    const quern_tensor *biases = tensors_of(j).b_a;
    p.ratio = options.ratio != 0 || biases == NULL || biases->ndim != 2 ? options.ratio : biases->shape[0];
    p.format = formats[options.format];
    memcpy(&j->params, &p, sizeof p);
    if (options.format == FORMAT_F32) j->dtype = QUERN_F32;
    if (options.format == FORMAT_BF16) j->dtype = QUERN_BF16;
    return EXIT_DONE;
}

/* Rows [first, first + count). */
static quern_tensor rows_of(const quern_tensor *t, int64_t first, int64_t count)
{
    quern_tensor v = *t;
    v.data = (char *)v.data + first * v.strides[0] * (int64_t)quern_dtype_size(v.dtype);
    v.shape[0] = count;
    return v;
}

/* A compressor of the file that takes the tokens in: the main one, or the indexer's. */
typedef struct stream_part {
    quern_dsv4_compress_params params;
    quern_dsv4_append_tensors t; /* whole; proj or x, out and pooled: those of all pieces */
    quern_dsv4_state *state;
    void *memory;
} stream_part;
enum { MAIN, INDEX, PARTS };

static stream_part part_of(const job *j, int which)
{
    const quern_dsv4_compress_tensors all = tensors_of(j);
    stream_part part = {.params = params_of(j), .t = QUERN_DSV4_APPEND_TENSORS_INIT};
    const bool index = which == INDEX;
    if (index) part.params.format = part.params.index_format;
    if (index) part.params.hadamard = part.params.index_hadamard;
    part.t.proj = index ? all.index_proj : all.proj;
    part.t.x = all.x;
    part.t.w = index ? all.index_w : all.w;
    part.t.w_fp8 = index ? all.index_w_fp8 : all.w_fp8;
    part.t.w_fp8_scales = index ? all.index_w_fp8_scales : all.w_fp8_scales;
    part.t.w_codes = index ? all.index_w_codes : all.w_codes;
    part.t.w_scales = index ? all.index_w_scales : all.w_scales;
    part.t.w_global = index ? all.index_w_global : all.w_global;
    part.t.b_a = index ? all.index_b_a : all.b_a;
    part.t.b_b = index ? all.index_b_b : all.b_b;
    part.t.prev_b = index ? all.index_prev_b : all.prev_b;
    part.t.norm_weight = index ? all.index_norm_weight : all.norm_weight;
    part.t.cos_sin = all.cos_sin;
    part.t.out = index ? all.index_out : all.out;
    part.t.pooled = index ? all.index_pooled : all.pooled;
    return part;
}

/* Appends rows [first, first + count) of the file's tokens. */
static int append_piece(const stream_part *part, quern_context *ctx, int64_t first, int64_t count,
                        bool has_prev)
{
    const quern_dsv4_compress_params *p = &part->params;
    quern_dsv4_append_tensors t = part->t;
    quern_dsv4_state *state = part->state;
    int64_t position, entries;
    quern_status status = quern_dsv4_append_entries(&state, &count, 1, &entries);
    if (status == QUERN_OK) status = quern_dsv4_state_position(state, &position, NULL);
    if (status != QUERN_OK) return fail_status(status);
    const int64_t entry = (position - p->start_abs_pos) / p->ratio;
    const quern_tensor tokens = rows_of(t.proj != NULL ? t.proj : t.x, first, count),
                       out = rows_of(t.out, entry, entries), pooled = rows_of(t.pooled, entry, entries);
    quern_tensor prev_b;
    if (t.prev_b != NULL) {
        const int64_t shape[] = {1, t.prev_b->shape[0], t.prev_b->shape[1]};
        prev_b = quern_tensor_contiguous(t.prev_b->data, t.prev_b->dtype, 3, shape);
        t.prev_b = has_prev ? &prev_b : NULL;
    }
    if (t.proj != NULL) t.proj = &tokens;
    else t.x = &tokens;
    t.out = &out;
    t.pooled = &pooled;
    size_t bytes;
    status = quern_dsv4_append_workspace(ctx, p, &state, &count, 1, &t, &bytes);
    if (status != QUERN_OK) return fail_status(status);
    void *workspace = malloc(bytes + 1);
    if (workspace == NULL) return fail(EXIT_MACHINE, "no memory for a workspace of %zu bytes", bytes);
    status = quern_dsv4_append(ctx, NULL, p, &state, &count, 1, &t, workspace, bytes);
    free(workspace);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

static int append_pieces(const stream_part *part, quern_context *ctx, const int64_t *pieces, int count)
{
    const int64_t start = part->params.start_token;
    int64_t at = 0;
    int code = EXIT_DONE;
    for (int i = 0; i < count && code == EXIT_DONE; at += pieces[i++]) {
        const int64_t skipped = start > at ? start - at : 0, left = pieces[i] - skipped;
        int64_t held, back = 0;
        quern_status status = quern_dsv4_state_position(part->state, NULL, &held);
        if (status == QUERN_OK && i > 0) back = options.rollback < held ? options.rollback : held;
        if (status == QUERN_OK) status = quern_dsv4_state_rollback(part->state, back);
        if (status != QUERN_OK) code = fail_status(status);
        else if (left > 0 || i == 0)
            code = append_piece(part, ctx, at + (left > 0 ? skipped : 0) - back, (left > 0 ? left : 0) + back,
                                i == 0);
        else if (back > 0) code = append_piece(part, ctx, at - back, back, false);
    }
    return code;
}

/* The list of --chunks, checked against the tokens. */
static int read_pieces(const job *j, int64_t *pieces, int *count)
{
    const quern_dsv4_compress_tensors t = tensors_of(j);
    const quern_tensor *main = t.proj != NULL ? t.proj : t.x;
    int64_t sum = 0;
    *count = parse_integers(options.chunks, 0, INT32_MAX, pieces, CHUNKS_MAX);
    for (int i = 0; i < *count; i++) sum += pieces[i];
    if (t.cu_seqlens != NULL || main->ndim != 2)
        return fail(EXIT_INPUT, "--chunks: one sequence, [T, ..] without cu_seqlens, is accepted");
    if (*count < 1 || sum != main->shape[0])
        return fail(EXIT_USAGE, "--chunks '%s': a list of sizes that sum to the %lld tokens is accepted",
                    options.chunks, (long long)main->shape[0]);
    if (options.rollback < 0)
        return fail(EXIT_USAGE, "--rollback %lld: 0 or more rows are accepted", (long long)options.rollback);
    return EXIT_DONE;
}

static int stream_one(const job *j, quern_context *ctx, int which, const int64_t *pieces, int count)
{
    stream_part part = part_of(j, which);
    const int64_t width = part.t.b_a->shape[1];
    size_t bytes;
    quern_status status = quern_dsv4_state_size(&part.params, width, options.ring, &bytes);
    if (status == QUERN_OK && (part.memory = malloc(bytes + 1)) == NULL) status = QUERN_ERR_OUT_OF_MEMORY;
    if (status == QUERN_OK)
        status = quern_dsv4_state_create(&part.params, width, options.ring, part.memory, bytes, &part.state);
    const int code = status == QUERN_OK ? append_pieces(&part, ctx, pieces, count) : fail_status(status);
    free(part.memory);
    return code;
}

/* The tokens from start_token on, piece by piece. */
static int stream(const job *j, quern_context *ctx)
{
    int64_t *pieces = malloc(CHUNKS_MAX * sizeof *pieces);
    int count;
    if (pieces == NULL) return fail(EXIT_MACHINE, "no memory for the list of chunks");
    int code = read_pieces(j, pieces, &count);
    for (int which = MAIN; which < PARTS && code == EXIT_DONE; which++)
        if (which == MAIN || tensors_of(j).index_b_a != NULL) code = stream_one(j, ctx, which, pieces, count);
    free(pieces);
    return code;
}

static int compute(job *j, quern_context *ctx)
{
    int code = job_prepare(j, ctx);
    if (code != EXIT_DONE || options.chunks == NULL) return code == EXIT_DONE ? job_run(j, ctx) : code;
    code = stream(j, ctx);
    if (code != EXIT_DONE || !j->backward) return code;
    const quern_status status = job_pass(j, ctx, QUERN_OP_BACKWARD);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

#define COMPRESSOR(op_name)                                                                                  \
    {                                                                                                        \
        .name = (op_name), .op = (op_name), .rows = rows, .row_count = ROWS, .options = &options,            \
        .cpu_only = true, .set_params = set_params, .compute = compute                                       \
    }
const scenario scenario_csa_compress = COMPRESSOR("csa-compress");
const scenario scenario_hca_compress = COMPRESSOR("hca-compress");
