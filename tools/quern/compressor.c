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
enum { ROWS = sizeof rows / sizeof *rows, CHUNKS_MAX = 65536, RING_MOST = 8 };
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
    const quern_tensor *prev_b;
    /* Its state is one slot, which counts rows from those of prev_b on, and a table of as many angles. */
    quern_tensor states, cos_sin;
    int32_t position, merged, before;
    void *memory[2];
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
    part.prev_b = index ? all.index_prev_b : all.prev_b;
    part.t.norm_weight = index ? all.index_norm_weight : all.norm_weight;
    part.t.cos_sin = all.cos_sin;
    part.t.out = index ? all.index_out : all.out;
    part.t.pooled = index ? all.index_pooled : all.pooled;
    return part;
}

/* Appends rows of projections or hidden states; the entries of a block before are not kept. */
static int append_rows(stream_part *part, quern_context *ctx, quern_dsv4_append_tensors t,
                       const quern_tensor *given)
{
    const int64_t ratio = part->params.ratio, one = 1, two = 2, count = given->shape[0],
                  first = (part->position - part->before) / ratio,
                  made = (part->position + count) / ratio - part->position / ratio;
    const bool kept = part->position >= part->before;
    int32_t slot = 0, cu[] = {0, (int32_t)count};
    const quern_tensor slots = quern_tensor_contiguous(&slot, QUERN_I32, 1, &one),
                       positions = quern_tensor_contiguous(&part->position, QUERN_I32, 1, &one),
                       merged = quern_tensor_contiguous(&part->merged, QUERN_I32, 1, &one),
                       offsets = quern_tensor_contiguous(cu, QUERN_I32, 1, &two);
    quern_tensor results[] = {*t.out, *t.pooled};
    size_t bytes, row[2];
    for (int i = 0; i < 2; i++) {
        row[i] = (size_t)results[i].strides[0] * quern_dtype_size(results[i].dtype);
        results[i].shape[0] = count / ratio + 1;
    }
    char *made_rows = malloc((size_t)results[0].shape[0] * (row[0] + row[1]));
    if (made_rows == NULL)
        return fail(EXIT_MACHINE, "no memory for the entries of %lld rows", (long long)count);
    results[1].data = made_rows; /* floats */
    results[0].data = made_rows + (size_t)results[0].shape[0] * row[1];
    const quern_tensor *const whole[] = {t.out, t.pooled};
    if (t.proj != NULL) t.proj = given;
    else t.x = given;
    t.out = &results[0];
    t.pooled = &results[1];
    t.slots = &slots;
    t.positions = &positions;
    t.cu = &offsets;
    t.states = &part->states;
    t.merged = &merged;
    quern_status status = quern_dsv4_append_step_workspace(ctx, &part->params, &t, &bytes);
    void *workspace = status == QUERN_OK ? malloc(bytes + 1) : NULL;
    if (status == QUERN_OK && workspace == NULL) status = QUERN_ERR_OUT_OF_MEMORY;
    if (status == QUERN_OK) status = quern_dsv4_append_step(ctx, NULL, &part->params, &t, workspace, bytes);
    const int64_t left = whole[0]->shape[0] - first, copied = made < left ? made : left; /* of n_blocks */
    for (int i = 0; i < 2 && status == QUERN_OK && kept && copied > 0; i++)
        memcpy((char *)whole[i]->data + (size_t)first * row[i], results[i].data, (size_t)copied * row[i]);
    part->position += status == QUERN_OK ? (int32_t)count : 0;
    free(workspace), free(made_rows);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

static int append_piece(stream_part *part, quern_context *ctx, int64_t first, int64_t count)
{
    const quern_tensor given = rows_of(part->t.proj != NULL ? part->t.proj : part->t.x, first, count);
    return append_rows(part, ctx, part->t, &given);
}

/* The rows of the block before: 0, but for series b. */
static int append_before(stream_part *part, quern_context *ctx)
{
    const quern_tensor *prev = part->prev_b;
    if (prev == NULL) return EXIT_DONE;
    const int64_t shape[] = {prev->shape[0], 2 * prev->shape[1]};
    const size_t half = (size_t)prev->shape[1] * quern_dtype_size(prev->dtype);
    char *data = calloc((size_t)shape[0], 2 * half);
    if (data == NULL) return fail(EXIT_MACHINE, "no memory for the block before");
    for (int64_t i = 0; i < shape[0]; i++)
        memcpy(data + (size_t)(2 * i + 1) * half, (const char *)prev->data + (size_t)i * half, half);
    const quern_tensor given = quern_tensor_contiguous(data, prev->dtype, 2, shape);
    quern_dsv4_append_tensors t = part->t;
    t.x = t.w = t.w_fp8 = t.w_fp8_scales = t.w_codes = t.w_scales = t.w_global = NULL;
    t.proj = &given;
    const int code = append_rows(part, ctx, t, &given);
    free(data);
    return code;
}

static int append_pieces(stream_part *part, quern_context *ctx, const int64_t *pieces, int count)
{
    const int64_t start = part->params.start_token;
    int64_t at = 0;
    int code = append_before(part, ctx);
    for (int i = 0; i < count && code == EXIT_DONE; at += pieces[i++]) {
        const int64_t skipped = start > at ? start - at : 0,
                      left = pieces[i] > skipped ? pieces[i] - skipped : 0,
                      had = part->position - part->before, ring = part->position - part->merged,
                      held = ring < had ? ring : had,
                      back = options.rollback < held ? options.rollback : held;
        part->position -= (int32_t)back;
        if (left + back > 0) code = append_piece(part, ctx, start + had - back, left + back);
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
    if (options.ring < 0 || options.ring > RING_MOST)
        return fail(EXIT_USAGE, "--ring %lld: 0 to %d rows are accepted", (long long)options.ring, RING_MOST);
    return EXIT_DONE;
}

/* An empty state and its table; one before the file's has rows that no entry is kept of. */
static bool open_part(stream_part *part, const quern_tensor *table)
{
    const bool csa = part->params.kind == QUERN_DSV4_CSA;
    const int64_t shape[] = {1, ((csa ? 6 : 3) + (csa ? 4 : 2) * options.ring) * part->t.b_a->shape[1]};
    part->before = part->prev_b != NULL ? (int32_t)part->params.ratio : 0;
    part->memory[0] = malloc((size_t)shape[1] * sizeof(float) + 1);
    part->states = quern_tensor_contiguous(part->memory[0], QUERN_F32, 2, shape);
    if (part->memory[0] == NULL || table == NULL) return part->memory[0] != NULL;
    const int64_t first = part->params.start_abs_pos - part->before, missing = first < 0 ? -first : 0,
                  angles = table->shape[0] > first ? table->shape[0] - first : 0;
    const size_t row = (size_t)table->shape[1] * quern_dtype_size(table->dtype);
    part->memory[1] = calloc((size_t)angles + 1, row);
    if (part->memory[1] == NULL) return false;
    memcpy((char *)part->memory[1] + (size_t)missing * row,
           (const char *)table->data + (size_t)(first + missing) * row,
           (size_t)(angles > missing ? angles - missing : 0) * row);
    part->cos_sin =
        quern_tensor_contiguous(part->memory[1], table->dtype, 2, (const int64_t[]){angles, table->shape[1]});
    part->t.cos_sin = &part->cos_sin;
    return true;
}

static int stream_one(const job *j, quern_context *ctx, int which, const int64_t *pieces, int count)
{
    stream_part part = part_of(j, which);
    const int code = open_part(&part, part.t.cos_sin) ? append_pieces(&part, ctx, pieces, count)
                                                      : fail(EXIT_MACHINE, "no memory for a state");
    free(part.memory[0]), free(part.memory[1]);
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
