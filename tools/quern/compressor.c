/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* compressor.c - `quern run csa-compress` and `hca-compress`: a sequence in one call, or in pieces through a
 * state. */
#include "command.h"
#include "device.h"
#include "scenario.h"

#include <quern/cuda.h>
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
    job *j;
    quern_dsv4_compress_params params;
    quern_dsv4_append_tensors t; /* whole; proj or x, out and pooled: those of all pieces */
    const quern_tensor *prev_b;
    /* Its state is one slot, which counts rows from those of prev_b on, and a table of as many angles. */
    quern_tensor states, cos_sin, books; /* books: i32, as below */
    int32_t position, merged, before;
    void *memory[3];
} stream_part;
enum { MAIN, INDEX, PARTS };
enum { BOOK_SLOT, BOOK_POSITION, BOOK_MERGED, BOOK_CU, BOOKS = BOOK_CU + 2 };

static stream_part part_of(job *j, int which)
{
    const quern_dsv4_compress_tensors all = tensors_of(j);
    stream_part part = {.j = j, .params = params_of(j), .t = QUERN_DSV4_APPEND_TENSORS_INIT};
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

static quern_tensor book(const stream_part *part, int first, int64_t count)
{
    return rows_of(&part->books, first, count);
}

/* The call's results of `most` entries, into memory of theirs; NULL without memory. */
static char *make_results(const stream_part *part, const quern_tensor *const whole[2], int64_t most,
                          quern_tensor results[2])
{
    size_t row[2];
    for (int i = 0; i < 2; i++) {
        results[i] = *whole[i];
        results[i].shape[0] = most;
        row[i] = (size_t)results[i].strides[0] * quern_dtype_size(results[i].dtype);
    }
    char *made = device_take(part->j->device, (size_t)most * (row[0] + row[1]));
    results[1].data = made; /* floats */
    results[0].data = made != NULL ? made + (size_t)most * row[1] : NULL;
    return made;
}

/* The call itself, with a workspace. */
static quern_status append_call(const stream_part *part, quern_context *ctx,
                                const quern_dsv4_append_tensors *t)
{
    const quern_exec exec = job_exec(part->j);
    size_t bytes;
    quern_status status = quern_dsv4_append_step_workspace(ctx, &part->params, t, &bytes);
    if (status != QUERN_OK) return status;
    void *workspace = device_take(part->j->device, bytes + 1);
    if (workspace == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    status = quern_dsv4_append_step(ctx, &exec, &part->params, t, workspace, bytes);
    if (status == QUERN_OK && part->j->device == QUERN_CUDA) status = quern_cuda_synchronize(0, NULL);
    device_free(part->j->device, workspace);
    return status;
}

/* Appends rows of projections or hidden states; the entries of a block before are not kept. */
static int append_rows(stream_part *part, quern_context *ctx, quern_dsv4_append_tensors t,
                       const quern_tensor *given)
{
    const int device = part->j->device;
    const int64_t ratio = part->params.ratio, count = given->shape[0],
                  first = (part->position - part->before) / ratio,
                  made = (part->position + count) / ratio - part->position / ratio;
    const bool kept = part->position >= part->before;
    int32_t numbers[BOOKS] = {
        [BOOK_POSITION] = part->position, [BOOK_MERGED] = part->merged, [BOOK_CU + 1] = (int32_t)count};
    const quern_tensor slots = book(part, BOOK_SLOT, 1), positions = book(part, BOOK_POSITION, 1),
                       merged = book(part, BOOK_MERGED, 1), offsets = book(part, BOOK_CU, 2);
    const quern_tensor *const whole[] = {t.out, t.pooled};
    quern_tensor results[2];
    char *made_rows = make_results(part, whole, count / ratio + 1, results);
    if (made_rows == NULL)
        return fail(EXIT_MACHINE, "no memory for the entries of %lld rows", (long long)count);
    if (t.proj != NULL) t.proj = given;
    else t.x = given;
    t.out = &results[0];
    t.pooled = &results[1];
    t.slots = &slots;
    t.positions = &positions;
    t.cu = &offsets;
    t.states = &part->states;
    t.merged = &merged;
    quern_status status = device_copy(device, part->books.data, numbers, sizeof numbers);
    if (status == QUERN_OK) status = append_call(part, ctx, &t);
    const int64_t left = whole[0]->shape[0] - first, copied = made < left ? made : left; /* of n_blocks */
    for (int i = 0; i < 2 && status == QUERN_OK && kept && copied > 0; i++) {
        const size_t row = (size_t)whole[i]->strides[0] * quern_dtype_size(whole[i]->dtype);
        status = device_copy(device, (char *)whole[i]->data + (size_t)first * row, results[i].data,
                             (size_t)copied * row);
    }
    if (status == QUERN_OK) status = device_copy(device, &part->merged, merged.data, sizeof part->merged);
    part->position += status == QUERN_OK ? (int32_t)count : 0;
    device_free(device, made_rows);
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
    const int device = part->j->device;
    if (prev == NULL) return EXIT_DONE;
    const int64_t shape[] = {prev->shape[0], 2 * prev->shape[1]};
    const size_t half = (size_t)prev->shape[1] * quern_dtype_size(prev->dtype);
    char *data = device_take(device, (size_t)(2 * shape[0]) * half);
    if (data == NULL) return fail(EXIT_MACHINE, "no memory for the block before");
    quern_status status = QUERN_OK;
    for (int64_t i = 0; i < shape[0] && status == QUERN_OK; i++)
        status = device_copy(device, data + (size_t)(2 * i + 1) * half,
                             (const char *)prev->data + (size_t)i * half, half);
    const quern_tensor given = device_tensor(device, data, prev->dtype, 2, shape);
    quern_dsv4_append_tensors t = part->t;
    t.x = t.w = t.w_fp8 = t.w_fp8_scales = t.w_codes = t.w_scales = t.w_global = NULL;
    t.proj = &given;
    const int code = status == QUERN_OK ? append_rows(part, ctx, t, &given) : fail_status(status);
    device_free(device, data);
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
    const int device = part->j->device;
    const bool csa = part->params.kind == QUERN_DSV4_CSA;
    const int64_t books = BOOKS,
                  shape[] = {1, ((csa ? 6 : 3) + (csa ? 4 : 2) * options.ring) * part->t.b_a->shape[1]};
    part->before = part->prev_b != NULL ? (int32_t)part->params.ratio : 0;
    part->memory[0] = device_take(device, (size_t)shape[1] * sizeof(float) + 1);
    part->memory[2] = device_take(device, BOOKS * sizeof(int32_t));
    part->states = device_tensor(device, part->memory[0], QUERN_F32, 2, shape);
    part->books = device_tensor(device, part->memory[2], QUERN_I32, 1, &books);
    if (part->memory[0] == NULL || part->memory[2] == NULL) return false;
    if (table == NULL) return true;
    const int64_t first = part->params.start_abs_pos - part->before, missing = first < 0 ? -first : 0,
                  angles = table->shape[0] > first ? table->shape[0] - first : 0;
    const size_t row = (size_t)table->shape[1] * quern_dtype_size(table->dtype);
    part->memory[1] = device_take(device, ((size_t)angles + 1) * row);
    if (part->memory[1] == NULL) return false;
    part->cos_sin = device_tensor(device, part->memory[1], table->dtype, 2,
                                  (const int64_t[]){angles, table->shape[1]});
    part->t.cos_sin = &part->cos_sin;
    return angles <= missing ||
           device_copy(device, (char *)part->memory[1] + (size_t)missing * row,
                       (const char *)table->data + (size_t)(first + missing) * row,
                       (size_t)(angles - missing) * row) == QUERN_OK;
}

static int stream_one(job *j, quern_context *ctx, int which, const int64_t *pieces, int count)
{
    stream_part part = part_of(j, which);
    const int code = open_part(&part, part.t.cos_sin) ? append_pieces(&part, ctx, pieces, count)
                                                      : fail(EXIT_MACHINE, "no memory for a state");
    for (int i = 0; i < 3; i++) device_free(j->device, part.memory[i]);
    return code;
}

/* The tokens from start_token on, piece by piece. */
static int stream(job *j, quern_context *ctx)
{
    int64_t *pieces = malloc(CHUNKS_MAX * sizeof *pieces);
    int count;
    if (pieces == NULL) return fail(EXIT_MACHINE, "no memory for the list of chunks");
    int code = read_pieces(j, pieces, &count);
    if (code == EXIT_DONE) code = job_watch(j);
    for (int which = MAIN; which < PARTS && code == EXIT_DONE; which++)
        if (which == MAIN || tensors_of(j).index_b_a != NULL) code = stream_one(j, ctx, which, pieces, count);
    free(pieces);
    return job_faults(j, code);
}

static int compute(job *j, quern_context *ctx)
{
    int code = job_prepare(j, ctx);
    if (code != EXIT_DONE || options.chunks == NULL) return code == EXIT_DONE ? job_run(j, ctx) : code;
    code = stream(j, ctx);
    if (code != EXIT_DONE || !j->backward) return code;
    code = job_watch(j);
    if (code != EXIT_DONE) return code;
    const quern_status status = job_pass(j, ctx, QUERN_OP_BACKWARD);
    return job_faults(j, status == QUERN_OK ? EXIT_DONE : fail_status(status));
}

#define COMPRESSOR(op_name)                                                                                  \
    {                                                                                                        \
        .name = (op_name), .op = (op_name), .rows = rows, .row_count = ROWS, .options = &options,            \
        .set_params = set_params, .compute = compute                                                         \
    }
const scenario scenario_csa_compress = COMPRESSOR("csa-compress");
const scenario scenario_hca_compress = COMPRESSOR("hca-compress");
