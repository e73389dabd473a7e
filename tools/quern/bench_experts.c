/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * bench_experts.c - `quern bench` of NVFP4's operations and of the mixture of experts. A subject is a row:
 * its inputs with shapes and contents, its least work as formulas, what stands beside it. Operation, limits
 * and what stands beside take turns; fractions are medians over rounds.
 *
 * In shapes and formulas: T rows of activations, E experts, M those with rows, K and N a weight's depth and
 * width (moe: of hidden states, and the experts' intermediate), k experts of a token, G whose scores have a
 * gradient, b bytes of an activation.
 */
#include "bench_experts.h"

#include "command.h"
#include "experts_inputs.h"
#include "output.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 9, LENGTHS_MAX = 16, INPUTS_MAX = 8, WORDS_MAX = 4 };

/* ---- subjects ---- */

typedef struct subject_row {
    const char *op, *help;
    const char *n;                     /* default lengths */
    int64_t experts, width, depth;     /* defaults */
    const char *tokens;                /* T */
    const char *initial[WORDS_MAX][2]; /* parameters before the command line */
    const char *follow[WORDS_MAX][2];  /* parameters that follow from extents */
    const char *flops[2], *bytes[2];   /* by pass; without flops bytes are copied */
    bool floats;                       /* products in f32 whatever the dtype */
    const experts_beside *beside;
    input_row inputs[INPUTS_MAX];
} subject_row;

static const subject_row subjects[] = {
    {.op = "nvfp4-gemm",
     .help = "experts' repacked weights [K, N] times n rows each",
     .n = "1,8,32,256",
     .experts = 16,
     .width = 4096,
     .depth = 4096,
     .tokens = "E*n",
     .follow = {{"n", "N"}},
     .flops = {"2*T*N*K", "2*T*N*K"},
     .bytes = {"9*E*N*K/16", "9*E*N*K/16"},
     .beside = &experts_onednn,
     .inputs = {{"A", "T K", NORMAL, OF_FLOATS, NULL, NULL},
                {"A_codes", "T K/2", CODES, OF_CODES, NULL, NULL},
                {"A_scales", "T K/16", SCALES, OF_CODES, NULL, NULL},
                {"B_repacked", "E bytes", REPACKED, ALWAYS, "K", "N"},
                {"offsets", "E", ENDS, ALWAYS, NULL, NULL},
                {"C_global", "", SMALL, WHERE_NEEDED, NULL, NULL},
                {"d_out", "T out", NORMAL, BACKWARD, NULL, NULL}}},
    {.op = "nvfp4-quantize",
     .help = "X [n, K] with a computed global: read twice",
     .n = "16k",
     .depth = 4096,
     .tokens = "n",
     .bytes = {"2*b*T*K + 9*T*K/16"},
     .inputs = {{"X", "T K", NORMAL, ALWAYS, NULL, NULL}}},
    {.op = "nvfp4-fused-quantize",
     .help = "SwiGLU of interleaved gate and up, X [n, 2 K]",
     .n = "16k",
     .depth = 2048,
     .tokens = "n",
     .initial = {{"activation", "swiglu"}},
     .bytes = {"2*b*T*K + 9*T*K/16"},
     .inputs = {{"X", "T 2*K", NORMAL, ALWAYS, NULL, NULL}, {"gate_global", "", SMALL, ALWAYS, NULL, NULL}}},
    {.op = "nvfp4-dequantize",
     .help = "codes of X [n, K] back to values",
     .n = "16k",
     .depth = 4096,
     .tokens = "n",
     .bytes = {"9*T*K/16 + b*T*K"},
     .inputs = {{"codes", "T K/2", CODES, ALWAYS, NULL, NULL},
                {"scales", "T K/16", SCALES, ALWAYS, NULL, NULL},
                {"global", "", SMALL, ALWAYS, NULL, NULL}}},
    {.op = "nvfp4-from-mxfp4",
     .help = "codes and exponents of X [n, K]",
     .n = "16k",
     .depth = 4096,
     .tokens = "n",
     .bytes = {"17*T*K/32 + 9*T*K/16"},
     .inputs = {{"codes", "T K/2", CODES, ALWAYS, NULL, NULL},
                {"exponents", "T K/32", POWERS, ALWAYS, NULL, NULL}}},
    {.op = "nvfp4-swizzle",
     .help = "scales [n, K]",
     .n = "16k",
     .depth = 4096,
     .tokens = "n",
     .bytes = {"2*T*K"},
     .inputs = {{"scales", "T K", SCALES, ALWAYS, NULL, NULL}}},
    {.op = "nvfp4-interleave",
     .help = "X [n, 2 K]",
     .n = "16k",
     .depth = 2048,
     .tokens = "n",
     .bytes = {"4*b*T*K"},
     .inputs = {{"X", "T 2*K", NORMAL, ALWAYS, NULL, NULL}}},
    {.op = "moe-prepack",
     .help = "experts' weights [K, N]",
     .n = "1",
     .experts = 16,
     .width = 4096,
     .depth = 4096,
     .tokens = "n",
     .bytes = {"9*E*N*K/8"},
     .inputs = {{"B_codes", "E K/2 N", CODES, ALWAYS, NULL, NULL},
                {"B_scales", "E K/16 N", SCALES, ALWAYS, NULL, NULL}}},
    {.op = "moe-route",
     .help = "the router of n tokens, hidden [n, K] and weight [E, K]",
     .n = "1,512",
     .experts = 256,
     .depth = 4096,
     .tokens = "n",
     .initial = {{"top-k", "8"}},
     .flops = {"2*T*E*K", "4*T*G*K"},
     .bytes = {"b*E*K + b*T*K", "2*b*T*K + b*E*K + 4*E*K"},
     .floats = true,
     .inputs = {{"hidden", "T K", NORMAL, ALWAYS, NULL, NULL},
                {"weight", "E K", NORMAL, ALWAYS, NULL, NULL},
                {"d_weights", "T k", NORMAL, BACKWARD, NULL, NULL}}},
    {.op = "moe",
     .help = "a layer with a shared expert, n tokens",
     .n = "1,8,64,512",
     .experts = 32,
     .width = 2880,
     .depth = 2880,
     .tokens = "n",
     .initial = {{"top-k", "4"}, {"renormalize", "true"}},
     .follow = {{"intermediate", "N"}, {"shared-intermediate", "N"}},
     .flops = {"6*T*k*N*K + 6*T*N*K", "10*T*k*N*K + 10*T*N*K"},
     .bytes = {"27*M*N*K/16 + 27*N*K/16", "45*M*N*K/16 + 45*N*K/16"},
     .beside = &experts_products,
     .inputs = {{"hidden", "T K", NORMAL, ALWAYS, NULL, NULL},
                {"weight", "E K", NORMAL, ALWAYS, NULL, NULL},
                {"gate_up_repacked", "E bytes", REPACKED, ALWAYS, "K", "2*N"},
                {"down_repacked", "E bytes", REPACKED, ALWAYS, "N", "K"},
                {"shared_gate_up_repacked", "bytes", REPACKED, ALWAYS, "K", "2*N"},
                {"shared_down_repacked", "bytes", REPACKED, ALWAYS, "N", "K"},
                {"d_out", "T K", NORMAL, BACKWARD, NULL, NULL}}},
};

/* ---- options ---- */

typedef struct experts_options {
    const char *n, *threads, *json;
    int64_t rounds;
    int dtype; /* of dtype_choices */
    bool no_peer;
    experts_case what;
} experts_options;

static const char *const dtype_choices[] = {"f32", "f16", "bf16", "nvfp4", NULL};
#define AT(member) offsetof(experts_options, member)
static const option_row rows[] = {
    {"n", OPTION_TEXT, AT(n), NULL, "rows, such as 1,512 or 16k; nvfp4-gemm: of each expert"},
    {"experts", OPTION_INT, AT(what.experts), NULL, "E"},
    {"width", OPTION_INT, AT(what.width), NULL, "N"},
    {"depth", OPTION_INT, AT(what.depth), NULL, "K"},
    {"dtype", OPTION_CHOICE, AT(dtype), dtype_choices, "of activations; nvfp4: nvfp4-gemm alone"},
    {"backward", OPTION_FLAG, AT(what.backward), NULL, "the backward pass as well"},
    {"no-peer", OPTION_FLAG, AT(no_peer), NULL, "leave out what stands beside: oneDNN, the layer's products"},
    {"rounds", OPTION_INT, AT(rounds), NULL, "in which operation and limits take turns, at most 101"},
    {"threads", OPTION_TEXT, AT(threads), NULL,
     "thread counts, such as 1,2; 0: OMP_NUM_THREADS, else all CPUs"},
    {"json", OPTION_TEXT, AT(json), NULL, "write the results to this file"},
};
#undef AT
enum { ROWS = sizeof rows / sizeof *rows };

/* The operation's parameters, without those whose names are options here and those that follow. */
static size_t params_of(const subject_row *s, const operation *op, option_row to[QUERN_OP_PARAMS_MAX])
{
    size_t n = 0;
    for (size_t i = 0; i < op->option_count; i++) {
        const char *name = op->options[i].name;
        bool taken = false;
        for (size_t k = 0; k < ROWS; k++) taken = taken || strcmp(name, rows[k].name) == 0;
        for (int k = 0; k < WORDS_MAX && s->follow[k][0] != NULL; k++)
            taken = taken || strcmp(name, s->follow[k][0]) == 0;
        if (!taken) to[n++] = op->options[i];
    }
    return n;
}

/* ---- extents ---- */

enum { SYMBOLS = 11 };

static bool param_is(const operation *op, const any_params *params, const char *name, const char *word)
{
    char text[64];
    for (int32_t i = 0; i < op->info.param_count; i++)
        if (strcmp(op->params[i].field, name) == 0 &&
            quern_op_text(op->op, params, i, text, sizeof text) == QUERN_OK)
            return strcmp(text, word) == 0;
    return false;
}

static double param_value(const operation *op, const any_params *params, const char *name)
{
    char text[64];
    for (int32_t i = 0; i < op->info.param_count; i++)
        if (strcmp(op->params[i].field, name) == 0 &&
            quern_op_text(op->op, params, i, text, sizeof text) == QUERN_OK)
            return atof(text);
    return 0;
}

/* `active`: experts that have rows. */
static void set_symbols(const experts_case *c, const subject_row *s, const operation *op, double active,
                        formula_symbol to[SYMBOLS])
{
    const bool swiglu = param_is(op, &c->params, "activation", "swiglu"),
               softmax = param_is(op, &c->params, "score", "softmax");
    const double k = param_value(op, &c->params, "top_k");
    const formula_symbol all[SYMBOLS] = {{"n", (double)c->rows},
                                         {"E", (double)c->experts},
                                         {"M", active},
                                         {"N", (double)c->width},
                                         {"K", (double)c->depth},
                                         {"k", k},
                                         {"G", softmax ? (double)c->experts : k},
                                         {"b", c->dtype == QUERN_F32 ? 4 : 2},
                                         {"out", (double)(swiglu ? c->width / 2 : c->width)},
                                         {"T", 0},
                                         {NULL, 0}};
    memcpy(to, all, sizeof all);
    to[SYMBOLS - 2].value = formula_value(s->tokens, all);
}

/* ---- inputs ---- */

static bool wanted(const input_row *row, const experts_case *c)
{
    switch (row->when) {
    case ALWAYS: return true;
    case OF_FLOATS: return c->dtype != QUERN_U8;
    case OF_CODES: return c->dtype == QUERN_U8;
    case BACKWARD: return c->backward;
    case WHERE_NEEDED: return false;
    }
    return false;
}

static int open_job(job *j, const experts_case *c, const subject_row *s, const operation *op,
                    const formula_symbol *symbols, quern_context *ctx)
{
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    int code = EXIT_DONE;
    job_init(j, op, &c->params);
    j->aside = op->info.aside != NULL;
    for (const input_row *row = s->inputs; row->tensor != NULL && code == EXIT_DONE; row++)
        if (wanted(row, c)) code = experts_input(j, c, row, symbols, ctx);
    if (code != EXIT_DONE) return code;
    const quern_status status = quern_op_roles(op->op, QUERN_OP_FORWARD, &j->params, &j->tensors, roles);
    if (status != QUERN_OK) return fail_status(status);
    for (const input_row *row = s->inputs; row->tensor != NULL && code == EXIT_DONE; row++)
        if (row->when == WHERE_NEEDED && roles[tensor_named(op, row->tensor)] == QUERN_OP_NEEDED)
            code = experts_input(j, c, row, symbols, ctx);
    j->dtype = c->dtype == QUERN_U8 ? JOB_DTYPE_USUAL : c->dtype;
    return code == EXIT_DONE ? job_prepare(j, ctx) : code;
}

/* ---- work ---- */

static ceiling limit_of(const experts_case *c, const subject_row *s, const operation *op,
                        quern_cpu_level level)
{
    if (s->flops[0] == NULL) return CEILING_COPY;
    if (s->floats) return bench_compute_limit(QUERN_F32, level);
    const bool integers = c->dtype == QUERN_U8 || param_is(op, &c->params, "a8", "true") ||
                          param_is(op, &c->params, "a4", "true");
    if (integers) return level >= QUERN_CPU_LEVEL_AVX512 ? CEILING_VNNI : CEILINGS;
    return bench_compute_limit(c->dtype, level);
}

/* Experts that have rows: of a layer as its router chose, which the first run has written. */
static double active_experts(const job *j, const experts_case *c)
{
    const int offsets = tensor_named(j->op, "offsets");
    int64_t active = 0;
    if (offsets < 0 || j->tensors.t[offsets] == NULL || j->input[offsets]) return (double)c->experts;
    const int32_t *ends = j->tensors.t[offsets]->data;
    for (int64_t e = 0; e < c->experts; e++) active += ends[e] > (e > 0 ? ends[e - 1] : 0);
    return (double)active;
}

static work work_of(const experts_case *c, const subject_row *s, const operation *op, int pass,
                    const formula_symbol *symbols, quern_cpu_level level)
{
    const bool backward = pass == 1;
    work w = {.limit = limit_of(c, s, op, level),
              .formula = s->flops[pass] != NULL ? s->flops[pass] : s->bytes[pass]};
    if (w.formula == NULL) return (work){.limit = CEILINGS, .formula = ""};
    /* the gradient of quantised activations passes through in the gradients' dtype */
    if (backward && w.limit == CEILING_VNNI) w.limit = bench_compute_limit(QUERN_BF16, level);
    w.flops = s->flops[pass] != NULL ? formula_value(s->flops[pass], symbols) : 0;
    w.bytes = s->bytes[pass] != NULL ? formula_value(s->bytes[pass], symbols) : 0;
    return w;
}

/* ---- results ---- */

static json_t *shape_json(const experts_case *c, const operation *op, bool backward)
{
    json_t *shape =
        json_pack("{s:I, s:I, s:I, s:I, s:b}", "n", (json_int_t)c->rows, "experts", (json_int_t)c->experts,
                  "width", (json_int_t)c->width, "depth", (json_int_t)c->depth, "backward", (int)backward);
    for (size_t i = 0; i < op->option_count; i++)
        json_object_set_new(shape, op->params[op->options[i].offset].field,
                            report_option(&op->options[i], &c->params));
    return shape;
}

static json_t *real_or_null(double x)
{
    return x > 0 ? json_real(x) : json_null();
}

static void report(const experts_case *c, const operation *op, bool backward, const work *w,
                   const measurement *m, const char *beside, quern_context *ctx, json_t *list)
{
    const char *dtype = c->dtype == QUERN_U8 ? "nvfp4" : quern_dtype_name((quern_dtype)c->dtype);
    const double ms = m->time.median, gflops = w->flops / ms * 1e-6, gbps = w->bytes / ms * 1e-6;
    const int threads = quern_context_threads(ctx);
    char size[48] = "", limit[48] = "", other[64] = "";
    if (c->experts > 0) snprintf(size, sizeof size, "%" PRId64 " x ", c->experts);
    snprintf(size + strlen(size), sizeof size - strlen(size),
             c->width > 0 ? "%" PRId64 " x %" PRId64 : "%" PRId64, c->depth, c->width);
    if (m->fraction > 0)
        snprintf(limit, sizeof limit, "  %5.3f of %s %.1f", m->fraction, ceiling_name(m->limit), m->ceiling);
    if (m->beside_ms > 0) snprintf(other, sizeof other, "  %.3fx %s", m->over_beside, beside);
    printf("%-20s %-8s n %7" PRId64
           "  %-16s %5s  threads %2d  %10.3f ms (p10 %.3f, p90 %.3f)  %7.1f G%s/s%s%s\n",
           op->name, backward ? "backward" : "", c->rows, size, dtype, threads, ms, m->time.p10, m->time.p90,
           w->flops > 0 ? gflops : gbps, w->flops > 0 ? "FLOP" : "B", limit, other);
    fflush(stdout);
    json_array_append_new(
        list,
        json_pack(
            "{s:s, s:o, s:s, s:s, s:i, s:i, s:f, s:f, s:f, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:s}",
            "op", op->name, "shape", shape_json(c, op, backward), "dtype", dtype, "level",
            quern_cpu_level_name(quern_context_cpu_level(ctx)), "threads", threads, "reps", m->time.reps,
            "ms_median", ms, "ms_p10", m->time.p10, "ms_p90", m->time.p90, "gflops", real_or_null(gflops),
            "gbps", real_or_null(gbps), "ceiling",
            m->fraction > 0 ? json_string(ceiling_name(m->limit)) : json_null(), "fraction",
            real_or_null(m->fraction), "read_fraction", real_or_null(m->of_read), "peer",
            m->beside_ms > 0 ? json_string(beside) : json_null(), "peer_ms", real_or_null(m->beside_ms),
            "over_peer", real_or_null(m->over_beside), "of_peer",
            real_or_null(m->over_beside > 0 ? 1 / m->over_beside : 0), "formula", w->formula));
}

/* ---- measuring ---- */

static int measure(const experts_case *c, const subject_row *s, const operation *op, const experts_options *o,
                   quern_context *ctx, json_t *list)
{
    formula_symbol symbols[SYMBOLS];
    const quern_cpu_level level = quern_context_cpu_level(ctx);
    measurement m[2];
    char label[80];
    job j;
    snprintf(label, sizeof label, "%s n %" PRId64, op->name, c->rows);
    progress("%s: data", label);
    set_symbols(c, s, op, (double)c->experts, symbols);
    int code = open_job(&j, c, s, op, symbols, ctx);
    if (code == EXIT_DONE) code = job_run(&j, ctx);
    if (code == EXIT_DONE) {
        set_symbols(c, s, op, active_experts(&j, c), symbols);
        const work w[2] = {work_of(c, s, op, 0, symbols, level), work_of(c, s, op, 1, symbols, level)};
        const experts_beside *b = o->no_peer ? NULL : s->beside;
        void *opened = b != NULL ? b->open(c, &j, ctx) : NULL;
        const bench_beside beside = {b != NULL ? b->name : "", b != NULL ? b->ms : NULL, opened};
        code = bench_measure(&j, w, opened != NULL ? &beside : NULL, ctx, (int)o->rounds, 0, label, m);
        for (int pass = 0; pass <= (int)j.backward && code == EXIT_DONE; pass++)
            report(c, op, pass == 1, &w[pass], &m[pass], beside.name, ctx, list);
        if (opened != NULL) b->close(opened);
    }
    progress_clear();
    job_free(&j);
    return code;
}

static int set_params(experts_case *c, const subject_row *s, const operation *op)
{
    formula_symbol symbols[SYMBOLS];
    set_symbols(c, s, op, (double)c->experts, symbols);
    for (int i = 0; i < WORDS_MAX && s->follow[i][0] != NULL; i++) {
        char text[32];
        snprintf(text, sizeof text, "%.0f", formula_value(s->follow[i][1], symbols));
        if (quern_op_set(op->op, &c->params, s->follow[i][0], text) != QUERN_OK)
            return fail(EXIT_USAGE, "%s", quern_last_error(NULL));
    }
    return EXIT_DONE;
}

static int bench(const experts_options *o, const subject_row *s, const operation *op)
{
    int64_t lengths[LENGTHS_MAX], threads[4];
    const int length_count = parse_integers(o->n, 1, INT32_MAX, lengths, LENGTHS_MAX),
              thread_count = parse_integers(o->threads, 0, 1024, threads, 4);
    experts_case c = o->what;
    const int64_t most = 1 << 20;
    if (length_count < 0 || thread_count < 0 || c.experts < 0 || c.width < 0 || c.depth < 0 ||
        c.experts > most || c.width > most || c.depth > most || o->rounds < 1 || o->rounds > BENCH_REPS_MAX)
        return fail(EXIT_USAGE,
                    "--n '%s' --threads '%s' --experts %" PRId64 " --width %" PRId64 " --depth %" PRId64
                    " --rounds %" PRId64 ": lists such as 1,512 and 1,2, extents from 0 to %" PRId64
                    ", and 1 to %d rounds are accepted",
                    o->n, o->threads, c.experts, c.width, c.depth, o->rounds, most, BENCH_REPS_MAX);
    c.dtype = strcmp(dtype_choices[o->dtype], "nvfp4") == 0 ? (int)QUERN_U8 : o->dtype;
    if (c.dtype == QUERN_U8 && s->inputs[0].when != OF_FLOATS)
        return fail(EXIT_USAGE, "--dtype nvfp4: f32, f16 or bf16 is accepted by %s", op->name);
    for (int i = 0; i < length_count; i++)
        if (strcmp(s->tokens, "E*n") == 0 && lengths[i] * c.experts > INT32_MAX)
            return fail(EXIT_USAGE, "--n %" PRId64 " --experts %" PRId64 ": below 2^31 rows are accepted",
                        lengths[i], c.experts);
    int code = set_params(&c, s, op);
    if (code == EXIT_DONE) code = output_check(o->json);
    json_t *list = json_array();
    quern_context *ctx = NULL;
    for (int i = 0; i < thread_count * length_count && code == EXIT_DONE; i++) {
        quern_context_destroy(ctx);
        ctx = NULL;
        code = open_context(&(machine_options){.threads = threads[i / length_count]}, &ctx);
        c.rows = lengths[i % length_count];
        if (code == EXIT_DONE) code = measure(&c, s, op, o, ctx, list);
    }
    for (int pass = 0; pass <= (int)c.backward && code == EXIT_DONE; pass++)
        if (s->bytes[pass] != NULL)
            printf("least work%s: %s%s%s bytes\n", pass == 1 ? " backward" : "",
                   s->flops[pass] != NULL ? s->flops[pass] : "",
                   s->flops[pass] != NULL ? " operations, " : "", s->bytes[pass]);
    if (code == EXIT_DONE && o->json != NULL) code = report_results(o->json, ctx, list);
    json_decref(list);
    quern_context_destroy(ctx);
    return code;
}

static const char usage[] =
    "usage: quern bench nvfp4-gemm|nvfp4-quantize|nvfp4-fused-quantize|nvfp4-dequantize|nvfp4-from-mxfp4|\n"
    "       nvfp4-swizzle|nvfp4-interleave|moe-prepack|moe-route|moe [--key value ...]\n\n"
    "Medians of rounds in which the operation, the machine's limits (arithmetic peak and memory, the slower\n"
    "counts) and what stands beside take turns: for nvfp4-gemm oneDNN's bf16 product on the same weights,\n"
    "dequantised, in its fastest weight format; for moe the layer's own products alone.\n\noptions:\n";

int bench_experts(int argc, char **argv, const char *subject)
{
    const subject_row *s = subjects;
    while (strcmp(s->op, subject) != 0) s++;
    const operation *op = operation_named(s->op);
    option_row params[QUERN_OP_PARAMS_MAX];
    int first;
    bool help;
    if (op == NULL) return fail(EXIT_MACHINE, "no memory for the description of %s", s->op);
    experts_options o = {.n = s->n,
                         .threads = "0",
                         .rounds = ROUNDS,
                         .dtype = QUERN_BF16,
                         .what = {.experts = s->experts, .width = s->width, .depth = s->depth}};
    o.what.params = params_init(op);
    for (int i = 0; i < WORDS_MAX && s->initial[i][0] != NULL; i++)
        (void)quern_op_set(op->op, &o.what.params, s->initial[i][0], s->initial[i][1]);
    const option_group groups[] = {{rows, ROWS, &o}, {params, params_of(s, op, params), &o.what.params}};
    const int code = parse_options(argc, argv, groups, 2, &first, &help);
    if (code != EXIT_DONE) return code;
    if (help) {
        printf("%s", usage);
        for (int i = 0; i < 2; i++) print_options(&groups[i]);
        return EXIT_DONE;
    }
    if (argc - first != 1)
        return fail(EXIT_USAGE, "%d words are given: one subject is accepted", argc - first);
    return bench(&o, s, op);
}
