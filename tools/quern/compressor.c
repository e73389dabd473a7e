/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* compressor.c - `quern run csa-compress` and `hca-compress`. */
#include "compressor.h"

#include "command.h"
#include "output.h"

#include <quern/dsv4.h>
#include <quern/safetensors.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct compressor_options {
    int64_t ratio, start_token, start_abs_pos, ring, rollback;
    int rope_at, format;
    bool round_bf16, hadamard;
    float eps;
    const char *chunks;
} compressor_options;

static const char *const rope_choices[] = {"first", "last", NULL};
static const char *const format_choices[] = {"input", "f32", "bf16", "fp8", "fp8-power", "fp4", "row584", NULL};
enum { FORMAT_INPUT, FORMAT_F32, FORMAT_BF16, FORMAT_BYTES };

#define AT(member) offsetof(compressor_options, member)
static const option_row rows[] = {
    {"ratio", OPTION_INT, AT(ratio), NULL, "r, tokens of a block; 0: the rows of the biases"},
    {"start-token", OPTION_INT, AT(start_token), NULL, "row where the first block starts"},
    {"start-abs-pos", OPTION_INT, AT(start_abs_pos), NULL, "its position; a multiple of r unless rope-at is last"},
    {"rope-at", OPTION_CHOICE, AT(rope_at), rope_choices, "the token of a block whose position rotates its entry"},
    {"round-bf16", OPTION_BOOL, AT(round_bf16), NULL, "round pooled rows before the norm"},
    {"hadamard", OPTION_BOOL, AT(hadamard), NULL, "Walsh-Hadamard transform of the entries"},
    {"eps", OPTION_FLOAT, AT(eps), NULL, "of the norm"},
    {"format", OPTION_CHOICE, AT(format), format_choices, "of out; input: the tokens' dtype"},
    {"chunks", OPTION_TEXT, AT(chunks), NULL, "3,1,7,...: append pieces of so many rows, T in all, to a state instead of one shot"},
    {"ring", OPTION_INT, AT(ring), NULL, "with --chunks: rows that the state can take back, 0 to 8"},
    {"rollback", OPTION_INT, AT(rollback), NULL, "with --chunks: rows taken back and appended again before each piece but the first, where held"},
};
#undef AT
enum { ROWS = sizeof rows / sizeof *rows, CHUNKS_MAX = 65536, OUTPUTS_MAX = 8 };

static const struct {
    const char *name, *csa, *hca, *role, *dtype;
} tensors[] = {
    {"proj", "T 4C", "T 2C", "in, or X and W", "act"},
    {"X", "T Dm", "T Dm", "in, or proj", "act"},
    {"W", "Dm 4C", "Dm 2C", "in, or proj", "weight"},
    {"B_a", "r C", "", "in", "weight"},
    {"B_b", "r C", "", "in", "weight"},
    {"B", "", "r C", "in", "weight"},
    {"prev_b", "r 2C | B r 2C", "", "in, optional", "weight"},
    {"norm_weight", "C", "C", "in, optional", "weight"},
    {"cos_sin", "P R", "P R", "in, optional", "weight"},
    {"cu_seqlens", "B+1", "B+1", "in, optional", "i32"},
    {"d_out", "n C", "n C", "backward with", "act"},
    {"out", "n C", "n C", "out", "act"},
    {"pooled", "n C", "n C", "out", "f32"},
    {"d_proj", "=proj", "=proj", "out, backward", "act"},
    {"dX", "=X", "=X", "out, backward", "act"},
    {"dW", "=W", "=W", "out, backward", "f32"},
    {"dB_a", "=B_a", "", "out, backward", "f32"},
    {"dB_b", "=B_b", "", "out, backward", "f32"},
    {"dB", "", "=B", "out, backward", "f32"},
    {"dprev_b", "=prev_b", "", "out, backward", "weight"},
    {"dnorm_weight", "=norm_weight", "=norm_weight", "out, backward", "f32"},
};

bool compressor_asked(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "csa-compress") == 0 || strcmp(argv[i], "hca-compress") == 0) return true;
    return false;
}

void compressor_list(bool markdown)
{
    const compressor_options defaults = {.eps = 1e-6f};
    for (int hca = 0; hca < 2; hca++) {
        const char *name = hca ? "hca-compress" : "csa-compress";
        const char *help = "DeepSeek-V4's compressor, one shot or in pieces; with d_out also its backward. X and proj may have a leading batch "
                           "extent; with cu_seqlens n is floor(T / r)";
        if (markdown) printf("\n## %s\n\n%s.\n\n| tensor | | dtype | shape |\n| --- | --- | --- | --- |\n", name, help);
        else printf("%s: %s\n  tensors:\n", name, help);
        for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
            const char *shape = hca ? tensors[i].hca : tensors[i].csa, *bar = strchr(shape, '|');
            if (*shape == '\0') continue;
            if (markdown && bar != NULL)
                printf("| `%s` | %s | %s | `[%.*s\\%s]` |\n", tensors[i].name, tensors[i].role, tensors[i].dtype, (int)(bar - shape), shape, bar);
            else if (markdown) printf("| `%s` | %s | %s | `[%s]` |\n", tensors[i].name, tensors[i].role, tensors[i].dtype, shape);
            else printf("    %-16s %-14s %-7s [%s]\n", tensors[i].name, tensors[i].role, tensors[i].dtype, shape);
        }
    }
    printf(markdown ? "\n## Options of the compressors\n\n| option | value | default | |\n| --- | --- | --- | --- |\n" : "options of the compressors\n");
    for (size_t i = 0; i < ROWS; i++) {
        char value[100], now[60], escaped[160];
        size_t n = 0;
        option_value_text(&rows[i], value, sizeof value);
        option_current_text(&rows[i], &defaults, now, sizeof now);
        for (const char *c = value; *c != '\0' && n + 3 < sizeof escaped; c++) {
            if (markdown && *c == '|') escaped[n++] = '\\';
            escaped[n++] = *c;
        }
        escaped[n] = '\0';
        if (markdown) printf("| `--%s` | %s | %s | %s |\n", rows[i].name, escaped, now, rows[i].help);
        else printf("    --%s %s  %s (default %s)\n", rows[i].name, escaped, rows[i].help, now);
    }
}

/* Memory of a run. */
typedef struct block {
    struct block *next;
    max_align_t data[];
} block;

/* A run: the file's tensors, the call's, and what it makes. */
typedef struct run {
    const compressor_options *options;
    quern_context *ctx;
    quern_safetensors *file;
    bool csa;
    quern_dsv4_compress_params params;
    quern_dsv4_compress_tensors t;
    quern_tensor input[11], made[OUTPUTS_MAX];
    block *blocks;
    quern_safetensors_item items[OUTPUTS_MAX];
    size_t item_count;
} run;

static void *own(run *r, size_t bytes)
{
    block *b = calloc(1, sizeof *b + bytes + 1);
    if (b == NULL) return NULL;
    b->next = r->blocks;
    r->blocks = b;
    return b->data;
}

static int read_inputs(run *r)
{
    const struct {
        const char *name;
        const quern_tensor **place;
    } inputs[] = {{"proj", &r->t.proj}, {"X", &r->t.x}, {"W", &r->t.w}, {r->csa ? "B_a" : "B", &r->t.b_a}, {"B_b", r->csa ? &r->t.b_b : NULL},
                  {"prev_b", r->csa ? &r->t.prev_b : NULL}, {"norm_weight", &r->t.norm_weight}, {"cos_sin", &r->t.cos_sin},
                  {"cu_seqlens", &r->t.cu_seqlens}, {"d_out", &r->t.d_out}};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) {
        if (inputs[i].place == NULL || !quern_safetensors_has(r->file, inputs[i].name)) continue;
        if (quern_safetensors_get(r->file, inputs[i].name, &r->input[i]) != QUERN_OK) return fail(EXIT_INPUT, "%s", quern_last_error(NULL));
        *inputs[i].place = &r->input[i];
    }
    const quern_tensor *main = r->t.proj != NULL ? r->t.proj : r->t.x;
    if (main == NULL) return fail(EXIT_INPUT, "tensors proj and X are missing: one of them is accepted");
    if (r->t.proj != NULL && r->t.x != NULL) return fail(EXIT_INPUT, "the file holds both proj and X: one is accepted");
    if (r->t.b_a == NULL || r->t.b_a->ndim != 2)
        return fail(EXIT_INPUT, "tensor %s is missing, or has not 2 dimensions: [r, C] is accepted", r->csa ? "B_a" : "B");
    if (main->ndim < 2 || main->ndim > 3) return fail(EXIT_INPUT, "%s has %d dimensions: 2 or 3 are accepted", r->t.proj != NULL ? "proj" : "X", main->ndim);
    return EXIT_DONE;
}

static void set_params(run *r)
{
    const compressor_options *o = r->options;
    static const quern_dsv4_format formats[] = {QUERN_DSV4_ROWS,      QUERN_DSV4_ROWS, QUERN_DSV4_ROWS,  QUERN_DSV4_FP8,
                                                QUERN_DSV4_FP8_POWER, QUERN_DSV4_FP4,  QUERN_DSV4_ROW584};
    r->params = (quern_dsv4_compress_params)QUERN_DSV4_COMPRESS_PARAMS_INIT;
    r->params.kind = r->csa ? QUERN_DSV4_CSA : QUERN_DSV4_HCA;
    r->params.ratio = o->ratio != 0 ? o->ratio : r->t.b_a->shape[0];
    r->params.start_token = o->start_token;
    r->params.start_abs_pos = o->start_abs_pos;
    r->params.rope_last = o->rope_at == 1;
    r->params.round_bf16 = o->round_bf16;
    r->params.hadamard = o->hadamard;
    r->params.eps = o->eps;
    r->params.format = formats[o->format];
}

/* A new tensor of the result; false without memory. */
static const quern_tensor *make(run *r, const char *name, quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    int64_t count = 1;
    for (int32_t i = 0; i < ndim; i++) count *= shape[i];
    quern_tensor *t = &r->made[r->item_count];
    *t = quern_tensor_contiguous(own(r, (size_t)count * quern_dtype_size(dtype)), dtype, ndim, shape);
    r->items[r->item_count++] = (quern_safetensors_item){name, t};
    return t;
}

static const quern_tensor *make_like(run *r, const char *name, const quern_tensor *like, bool f32)
{
    return like != NULL ? make(r, name, f32 ? QUERN_F32 : like->dtype, like->ndim, like->shape) : NULL;
}

static int64_t row_width(const run *r)
{
    const int64_t c = r->t.b_a->shape[1];
    switch (r->params.format) {
    case QUERN_DSV4_FP8:
    case QUERN_DSV4_FP8_POWER: return c + 4;
    case QUERN_DSV4_FP4: return c / 2 + c / 32;
    case QUERN_DSV4_ROW584: return 584;
    case QUERN_DSV4_ROWS: break;
    }
    return c;
}

/* out and pooled. Numbers that the library will refuse only have to do no harm here. */
static int make_outputs(run *r)
{
    const quern_tensor *main = r->t.proj != NULL ? r->t.proj : r->t.x;
    const int32_t lead = main->ndim - 2;
    const int64_t ratio = r->params.ratio > 0 ? r->params.ratio : 1, tokens = main->shape[lead], start = r->params.start_token;
    const int64_t n = r->t.cu_seqlens != NULL ? tokens / ratio : start >= 0 && start <= tokens ? (tokens - start) / ratio : 0;
    int64_t shape[] = {lead > 0 ? main->shape[0] : n, lead > 0 ? n : row_width(r), row_width(r)};
    const quern_dtype dtype = r->options->format == FORMAT_INPUT  ? main->dtype
                              : r->options->format == FORMAT_F32  ? QUERN_F32
                              : r->options->format == FORMAT_BF16 ? QUERN_BF16
                                                                  : QUERN_U8;
    r->t.out = make(r, "out", dtype, 2 + lead, shape);
    shape[1 + lead] = r->t.b_a->shape[1];
    r->t.pooled = make(r, "pooled", QUERN_F32, 2 + lead, shape);
    return r->t.out->data != NULL && r->t.pooled->data != NULL ? EXIT_DONE : fail(EXIT_MACHINE, "no memory for the entries");
}

typedef quern_status one_shot_size(quern_context *, const quern_dsv4_compress_params *, const quern_dsv4_compress_tensors *, size_t *);
typedef quern_status one_shot_call(quern_context *, const quern_exec *, const quern_dsv4_compress_params *, const quern_dsv4_compress_tensors *, void *,
                                   size_t);

static int one_shot(run *r, one_shot_size *size, one_shot_call *call)
{
    size_t bytes;
    quern_status status = size(r->ctx, &r->params, &r->t, &bytes);
    if (status != QUERN_OK) return fail_status(status);
    void *workspace = malloc(bytes + 1);
    if (workspace == NULL) return fail(EXIT_MACHINE, "no memory for a workspace of %zu bytes", bytes);
    status = call(r->ctx, NULL, &r->params, &r->t, workspace, bytes);
    free(workspace);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

/* Appends rows [first, first + count) of the file's tokens. */
static int append_piece(run *r, quern_dsv4_state *state, int64_t first, int64_t count, const quern_tensor *prev_b)
{
    int64_t position, entries;
    quern_status status = quern_dsv4_append_entries(&state, &count, 1, &entries);
    if (status == QUERN_OK) status = quern_dsv4_state_position(state, &position, NULL);
    if (status != QUERN_OK) return fail_status(status);
    const int64_t entry = (position - r->params.start_abs_pos) / r->params.ratio;
    quern_dsv4_append_tensors t = QUERN_DSV4_APPEND_TENSORS_INIT;
    quern_tensor views[4] = {r->t.proj != NULL ? *r->t.proj : *r->t.x, *r->t.out, *r->t.pooled};
    const int64_t from[] = {first, entry, entry}, counts[] = {count, entries, entries};
    for (int i = 0; i < 3; i++) {
        views[i].data = (char *)views[i].data + from[i] * views[i].strides[0] * (int64_t)quern_dtype_size(views[i].dtype);
        views[i].shape[0] = counts[i];
    }
    if (prev_b != NULL) {
        const int64_t shape[] = {1, prev_b->shape[0], prev_b->shape[1]};
        views[3] = quern_tensor_contiguous(prev_b->data, prev_b->dtype, 3, shape);
        t.prev_b = &views[3];
    }
    t.proj = r->t.proj != NULL ? &views[0] : NULL, t.x = r->t.x != NULL ? &views[0] : NULL, t.w = r->t.w;
    t.b_a = r->t.b_a, t.b_b = r->t.b_b, t.norm_weight = r->t.norm_weight, t.cos_sin = r->t.cos_sin, t.out = &views[1], t.pooled = &views[2];
    size_t bytes;
    status = quern_dsv4_append_workspace(r->ctx, &r->params, &state, &count, 1, &t, &bytes);
    if (status != QUERN_OK) return fail_status(status);
    void *workspace = malloc(bytes + 1);
    if (workspace == NULL) return fail(EXIT_MACHINE, "no memory for a workspace of %zu bytes", bytes);
    status = quern_dsv4_append(r->ctx, NULL, &r->params, &state, &count, 1, &t, workspace, bytes);
    free(workspace);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

/* The tokens from start_token on, piece by piece. */
static int stream(run *r)
{
    const compressor_options *o = r->options;
    const quern_tensor *main = r->t.proj != NULL ? r->t.proj : r->t.x;
    quern_dsv4_state *state = NULL;
    int64_t *pieces = malloc(CHUNKS_MAX * sizeof *pieces), sum = 0, at = 0, held;
    size_t bytes;
    if (pieces == NULL) return fail(EXIT_MACHINE, "no memory for the list of chunks");
    const int count = parse_integers(o->chunks, 0, INT32_MAX, pieces, CHUNKS_MAX);
    for (int i = 0; i < count; i++) sum += pieces[i];
    int code = EXIT_DONE;
    if (r->t.cu_seqlens != NULL || main->ndim != 2) code = fail(EXIT_INPUT, "--chunks: one sequence, [T, ..] without cu_seqlens, is accepted");
    else if (count < 1 || sum != main->shape[0])
        code = fail(EXIT_USAGE, "--chunks '%s': a list of sizes that sum to the %lld tokens is accepted", o->chunks, (long long)main->shape[0]);
    else if (o->rollback < 0) code = fail(EXIT_USAGE, "--rollback %lld: 0 or more rows are accepted", (long long)o->rollback);
    quern_status status = code == EXIT_DONE ? quern_dsv4_state_size(&r->params, r->t.b_a->shape[1], o->ring, &bytes) : QUERN_OK;
    if (code == EXIT_DONE && status == QUERN_OK) {
        void *memory = own(r, bytes);
        status = memory != NULL ? quern_dsv4_state_create(&r->params, r->t.b_a->shape[1], o->ring, memory, bytes, &state) : QUERN_ERR_OUT_OF_MEMORY;
    }
    if (code == EXIT_DONE && status != QUERN_OK) code = fail_status(status);
    for (int i = 0; i < count && code == EXIT_DONE; at += pieces[i++]) {
        const int64_t skipped = r->params.start_token > at ? r->params.start_token - at : 0, left = pieces[i] - skipped;
        int64_t back = 0;
        if ((status = quern_dsv4_state_position(state, NULL, &held)) == QUERN_OK && i > 0) back = o->rollback < held ? o->rollback : held;
        if (status == QUERN_OK) status = quern_dsv4_state_rollback(state, back);
        if (status != QUERN_OK) code = fail_status(status);
        else if (left > 0 || i == 0) code = append_piece(r, state, at + (left > 0 ? skipped : 0) - back, (left > 0 ? left : 0) + back, i == 0 ? r->t.prev_b : NULL);
        else if (back > 0) code = append_piece(r, state, at - back, back, NULL);
    }
    free(pieces);
    return code;
}

static int backward(run *r)
{
    r->t.d_proj = make_like(r, "d_proj", r->t.proj, false);
    r->t.d_x = make_like(r, "dX", r->t.x, false);
    r->t.d_w = make_like(r, "dW", r->t.x != NULL ? r->t.w : NULL, true);
    r->t.d_b_a = make_like(r, r->csa ? "dB_a" : "dB", r->t.b_a, true);
    r->t.d_b_b = make_like(r, "dB_b", r->t.b_b, true);
    r->t.d_prev_b = make_like(r, "dprev_b", r->t.prev_b, false);
    r->t.d_norm_weight = make_like(r, "dnorm_weight", r->t.norm_weight, true);
    for (size_t i = 0; i < r->item_count; i++)
        if (r->items[i].tensor->data == NULL) return fail(EXIT_MACHINE, "no memory for output %s", r->items[i].name);
    return one_shot(r, quern_dsv4_compress_backward_workspace, quern_dsv4_compress_backward);
}

static int compute(const compressor_options *options, const machine_options *machine, const char *op, const char *in, const char *out)
{
    run r = {.options = options, .csa = strcmp(op, "csa-compress") == 0, .t = QUERN_DSV4_COMPRESS_TENSORS_INIT};
    if (machine->device != QUERN_CPU) return fail(EXIT_INPUT, "--device cuda: %s is computed on the cpu", op);
    int code = output_check(out);
    if (code == EXIT_DONE) code = open_context(machine, &r.ctx);
    if (code != EXIT_DONE) return code;
    if (quern_safetensors_open(in, &r.file) != QUERN_OK) code = fail(EXIT_INPUT, "%s: %s", TEXT_NAME(in), quern_last_error(NULL));
    if (code == EXIT_DONE) code = read_inputs(&r);
    if (code == EXIT_DONE) {
        set_params(&r);
        code = make_outputs(&r);
    }
    if (code == EXIT_DONE) code = options->chunks != NULL ? stream(&r) : one_shot(&r, quern_dsv4_compress_workspace, quern_dsv4_compress);
    if (code == EXIT_DONE && r.t.d_out != NULL) code = backward(&r);
    if (code == EXIT_DONE) {
        const quern_safetensors_pair metadata[] = {{"quern", quern_version()}, {"op", op}};
        const quern_status status = quern_safetensors_save(out, r.items, r.item_count, metadata, 2);
        if (status != QUERN_OK) code = fail_status(status);
    }
    for (block *b = r.blocks, *next; b != NULL; b = next) {
        next = b->next;
        free(b);
    }
    quern_safetensors_close(r.file);
    quern_context_destroy(r.ctx);
    return code;
}

int compressor_run(int argc, char **argv)
{
    compressor_options options = {.eps = 1e-6f};
    machine_options machine = {0};
    const option_group groups[] = {{rows, ROWS, &options}, {machine_rows, machine_row_count, &machine}};
    int first;
    bool help;
    const int code = parse_options(argc, argv, groups, 2, &first, &help);
    if (code != EXIT_DONE) return code;
    if (help) {
        printf("usage: quern run csa-compress|hca-compress IN.safetensors OUT.safetensors [--key value ...]\n\noptions:\n");
        print_options(&groups[0]);
        print_options(&groups[1]);
        printf("\nexit codes: 0 done, 2 wrong command line, 3 a file, tensor or parameter is not accepted,\n"
               "4 the machine lacks what is needed, 5 a defect.\n");
        return EXIT_DONE;
    }
    if (argc - first != 3) return fail(EXIT_USAGE, "%d words are given: OP IN OUT is accepted; see quern run --help", argc - first);
    if (strcmp(argv[first], "csa-compress") != 0 && strcmp(argv[first], "hca-compress") != 0)
        return fail(EXIT_USAGE, "operation '%s' is unknown; quern run --list prints those there are", argv[first]);
    return compute(&options, &machine, argv[first], argv[first + 1], argv[first + 2]);
}
