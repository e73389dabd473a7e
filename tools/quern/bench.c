/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench.c - `quern bench WHAT`: the options of a subject, its lengths and thread counts, a measurement of
 * each. */
#include "bench_options.h"

#include "command.h"
#include "output.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTHS_MAX = 64 };

/* ---- a measurement ---- */

/* AMX's products with weights may exceed the dot product's ceiling, which bounds the level's others. */
ceiling bench_compute_limit(int dtype, quern_cpu_level level)
{
    if (level < QUERN_CPU_LEVEL_AVX2) return CEILINGS;
    if (level == QUERN_CPU_LEVEL_AVX2) return CEILING_FMA256;
    const bool dot = level == QUERN_CPU_LEVEL_AVX512BF16 || level == QUERN_CPU_LEVEL_AMX;
    return dtype == QUERN_BF16 && dot ? CEILING_BF16 : CEILING_FMA512;
}

static bool is_set(const bench_case *c, const char *option, const char *value)
{
    char text[16];
    for (int32_t i = 0; c->op != NULL && i < c->op->info.param_count; i++)
        if (strcmp(c->op->params[i].field, option) == 0 &&
            quern_op_text(c->op->op, &c->params, i, text, sizeof text) == QUERN_OK)
            return strcmp(text, value) == 0;
    return false;
}

/* The ceiling that a pass is measured against. Products of quantised activations are integers' on the way
 * forward. */
static ceiling limit_of(const bench_case *c, limit_kind kind, int pass, quern_cpu_level level)
{
    const bool integers = c->dtype == QUERN_U8 || is_set(c, "a8", "int8") || is_set(c, "a4", "true");
    switch (kind) {
    case LIMIT_F32: return bench_compute_limit(QUERN_F32, level);
    case LIMIT_READ: return CEILING_READ;
    case LIMIT_COPY: return CEILING_COPY;
    case LIMIT_WRITE: return CEILING_WRITE;
    case LIMIT_PRODUCTS: break;
    }
    if (integers && pass == 0) return level >= QUERN_CPU_LEVEL_AVX512 ? CEILING_VNNI : CEILINGS;
    return bench_compute_limit(integers ? QUERN_BF16 : c->dtype, level);
}

static work work_of(const bench_run *r, int pass, quern_cpu_level level)
{
    const bench_case *c = r->what;
    const work_row *row = c->subject->variant != NULL ? c->subject->variant(c, pass) : NULL;
    if (row == NULL) row = &c->subject->work[pass];
    const char *first = row->flops != NULL ? row->flops : row->bytes;
    return (work){.flops = row->flops != NULL ? formula_value(row->flops, &r->symbols) : 0,
                  .bytes = row->bytes != NULL ? formula_value(row->bytes, &r->symbols) : 0,
                  .limit = first != NULL ? limit_of(c, row->limit, pass, level) : CEILINGS,
                  .formula = first != NULL ? first : "",
                  .bytes_formula = row->flops != NULL && row->bytes != NULL ? row->bytes : ""};
}

static void set_symbols(bench_run *r, const job *ran)
{
    const bench_case *c = r->what;
    const bench_subject *s = c->subject;
    formula_symbols *to = &r->symbols;
    formula_set(to, "n", (double)c->n);
    formula_set(to, "b", c->dtype == QUERN_F32 ? 4 : 2);
    formula_set(to, "backward", c->backward);
    formula_set(to, "codes", c->dtype == QUERN_U8);
    formula_set(to, "values", c->dtype != QUERN_U8);
    if (s->heads != NULL) {
        formula_set(to, "H", (double)c->heads);
        formula_set(to, "Hkv", (double)c->kv_heads);
        formula_set(to, "D", (double)c->dim);
        formula_set(to, "Dv", (double)c->dim_v);
    }
    for (int i = 0; s->extents != NULL && s->extents[i].option != NULL; i++)
        formula_set(to, s->extents[i].symbol, (double)c->extent[i]);
    if (s->count != NULL) s->count(c, ran, to);
    for (int i = 0; i < WORDS_MAX && s->symbols[i][0] != NULL; i++)
        formula_set(to, s->symbols[i][0], formula_value(s->symbols[i][1], to));
}

static int run_job(bench_run *r, quern_context *ctx, double ms[2])
{
    int code = job_flush(&r->job);
    if (code == EXIT_DONE) code = job_run(&r->job, ctx);
    ms[0] = r->job.forward_ms;
    ms[1] = r->job.backward ? r->job.backward_ms : 0;
    return code;
}

static int open_job(bench_run *r, quern_context *ctx)
{
    const bench_case *c = r->what;
    const bench_subject *s = c->subject;
    job *j = &r->job;
    any_params params = c->params;
    for (int i = 0; i < WORDS_MAX && s->follow[i][0] != NULL; i++) {
        char text[32];
        if (*s->follow[i][1] == '\0') continue;
        snprintf(text, sizeof text, "%.0f", formula_value(s->follow[i][1], &r->symbols));
        if (quern_op_set(c->op->op, &params, s->follow[i][0], text) != QUERN_OK)
            return fail(EXIT_USAGE, "%s", quern_last_error(NULL));
    }
    job_init(j, c->op, &params);
    j->device = c->device;
    j->without = s->without;
    r->once = run_job;
    int code = s->inputs != NULL ? bench_row_inputs(j, c, &r->symbols, ctx) : bench_inputs(j, c);
    if (code == EXIT_DONE && s->prepare != NULL) code = s->prepare(r, ctx);
    if (s->inputs != NULL) {
        j->aside = s->count_again;
        j->dtype = c->dtype == QUERN_U8 ? JOB_DTYPE_USUAL : c->dtype;
    }
    if (code == EXIT_DONE) code = job_prepare(j, ctx);
    r->passes = j->backward ? 2 : 1;
    if (code != EXIT_DONE || !s->count_again) return code;
    code = job_run(j, ctx);
    if (code == EXIT_DONE) set_symbols(r, j);
    return code;
}

static void close_run(bench_run *r)
{
    if (r->peer_data != NULL) r->peer->close(r->peer_data);
    if (r->close != NULL) r->close(r);
    if (r->what->subject->open == NULL) job_free(&r->job);
    for (int i = 0; i < 2; i++) row_cache_free(&r->cache[i]);
    free(r);
}

static void add_passes(const bench_run *r, const work w[2], const measurement m[2], quern_context *ctx,
                       bench_results *results)
{
    const bench_case *c = r->what;
    for (int p = 0; p < r->passes; p++) {
        char op[48];
        snprintf(op, sizeof op, "%s%s", c->op != NULL ? c->op->name : c->subject->name,
                 p == 1 ? "-backward" : "");
        bench_result *row = bench_add(results, c, ctx, op);
        row->pass = p;
        row->measured = m[p];
        row->work = w[p];
        row->peer = m[p].beside_ms > 0 ? r->peer->name : NULL;
        row->workspace_bytes = r->job.workspace_bytes;
        row->value = m[p].fraction;
        snprintf(row->label, sizeof row->label, "n %" PRId64, c->n);
        if (p == 0 && c->subject->extra != NULL) row->extra = c->subject->extra(r, c, ctx);
        for (int t = 0; t < results->thread_counts; t++)
            if (results->threads[t] == row->threads && m[p].limit < CEILINGS)
                results->ceilings[m[p].limit][t] = m[p].ceiling;
        report_row(results, row);
    }
}

/* One case on one context. */
static int measure(const bench_options *o, const bench_case *c, quern_context *ctx, bench_results *results)
{
    const bench_subject *s = c->subject;
    const quern_cpu_level level = quern_context_cpu_level(ctx);
    measurement m[2];
    char label[80];
    if (s->measure != NULL) return s->measure(c, ctx, results);
    bench_run *r = need_memory(sizeof *r);
    memset(r, 0, sizeof *r);
    r->what = c;
    r->passes = 1;
    snprintf(label, sizeof label, "%s n %" PRId64, s->name, c->n);
    progress("%s: data", label);
    set_symbols(r, NULL);
    int code = s->open != NULL ? s->open(r, ctx) : open_job(r, ctx);
    if (code == EXIT_DONE && s->peer != NULL && !o->no_peer) {
        r->peer = s->peer;
        r->peer_data = s->peer->open(c, &r->job, ctx);
    }
    const work w[2] = {work_of(r, 0, level), work_of(r, 1, level)};
    if (code == EXIT_DONE) {
        const int rounds = o->reps > 0 && o->rounds == bench_default_rounds(s) ? 0 : (int)o->rounds;
        code = bench_measure(r, w, ctx, rounds, (int)o->reps, label, m);
    }
    progress_clear();
    if (code == EXIT_DONE) add_passes(r, w, m, ctx, results);
    close_run(r);
    return code;
}

/* ---- the command ---- */

static int check_options(const bench_options *o)
{
    const bench_case *c = &o->what;
    const bench_extent *e = c->subject->extents;
    const int least = !c->subject->by_reps && o->reps == 0 ? 1 : 0;
    if (o->reps < 0 || o->reps > BENCH_REPS_MAX || o->rounds < least || o->rounds > BENCH_REPS_MAX)
        return fail(EXIT_USAGE,
                    "--reps %" PRId64 " --rounds %" PRId64 ": 0, and %d, to %d of these is accepted", o->reps,
                    o->rounds, least, BENCH_REPS_MAX);
    for (int i = 0; e != NULL && e[i].option != NULL; i++)
        if (c->extent[i] < e[i].least || c->extent[i] > e[i].most)
            return fail(EXIT_USAGE, "--%s %" PRId64 ": %" PRId64 " to %" PRId64 " is accepted", e[i].option,
                        c->extent[i], e[i].least, e[i].most);
    if (c->device == QUERN_CUDA && c->subject->cpu)
        return fail(EXIT_MACHINE, "--device cuda: %s runs on the cpu", c->subject->name);
    if (o->svg != NULL && !have_program("gnuplot"))
        return fail(EXIT_MACHINE, "--svg needs gnuplot, which is not on the PATH");
    int code = output_check(o->json);
    return code == EXIT_DONE ? output_check(o->svg) : code;
}

/* The cases, one a length; their number, or -1 after a message. */
static int make_cases(const bench_options *o, bench_case cases[LENGTHS_MAX])
{
    int64_t lengths[LENGTHS_MAX] = {0};
    const bench_subject *s = o->what.subject;
    const int64_t most = s->attention ? (int64_t)1 << 40 : INT32_MAX;
    const int count = s->n != NULL ? parse_integers(o->n, 1, most, lengths, LENGTHS_MAX) : 1;
    if (count < 0)
        (void)fail(EXIT_USAGE,
                   "--n '%s': a list such as 4096,16384 or 4k,1M, at most %d lengths, is accepted", o->n,
                   LENGTHS_MAX);
    for (int i = 0; i < count; i++) {
        cases[i] = o->what;
        cases[i].n = lengths[i];
        if (s->heads != NULL && bench_case_check(&cases[i]) != EXIT_DONE) return -1;
        if (o->what.dtype > QUERN_BF16) cases[i].dtype = QUERN_U8; /* the word nvfp4 */
        if (s->check != NULL && s->check(&cases[i]) != EXIT_DONE) return -1;
    }
    return count;
}

/* One subject with the options that it has in `quern bench all`. */
static int measure_page(const bench_subject *s, const bench_case *all, quern_context *ctx,
                        bench_results *results)
{
    enum { WORDS = 32 };
    bench_case cases[LENGTHS_MAX];
    option_tables *t = need_memory(sizeof *t);
    bench_options o = bench_default_options(s);
    char words[160], *argv[WORDS] = {words}, *rest = NULL;
    int argc = 1, first, count = 0;
    bool help;
    snprintf(words, sizeof words, "%s %s", s->name, s->all[all->device]);
    for (char *word = strtok_r(words, " ", &rest); word != NULL && argc < WORDS;
         word = strtok_r(NULL, " ", &rest))
        argv[argc++] = word;
    bench_make_tables(s, &o, t);
    int code = parse_options(argc, argv, t->groups, 3, &first, &help);
    free(t);
    o.what.device = all->device;
    o.no_peer = true;
    if (code == EXIT_DONE && (count = make_cases(&o, cases)) < 0) code = EXIT_USAGE;
    for (int i = 0; i < count && code == EXIT_DONE; i++) code = measure(&o, &cases[i], ctx, results);
    return code;
}

int bench_all(const bench_case *c, quern_context *ctx, bench_results *to)
{
    int code = EXIT_DONE;
    to->page = true;
    for (const bench_subject *s = bench_subjects; s->name != NULL && code == EXIT_DONE; s++)
        if (s->all[c->device] != NULL) code = measure_page(s, c, ctx, to);
    return code;
}

static int bench(const bench_options *o)
{
    bench_case cases[LENGTHS_MAX];
    bench_results r = {.rows = NULL};
    quern_context *ctx = NULL;
    const int count = make_cases(o, cases);
    if (count < 0) return EXIT_USAGE;
    r.thread_counts = parse_integers(o->threads, 0, 1024, r.threads, BENCH_THREADS_MAX);
    if (r.thread_counts < 0)
        return fail(EXIT_USAGE,
                    "--threads '%s': a list such as 1,2, at most %d counts from 0 to 1024, is accepted",
                    o->threads, BENCH_THREADS_MAX);
    int code = check_options(o);
    for (int t = 0; t < r.thread_counts && code == EXIT_DONE; t++) {
        quern_context_destroy(ctx);
        ctx = NULL;
        code = open_context(&(machine_options){.threads = r.threads[t], .device = o->what.device}, &ctx);
        if (code == EXIT_DONE) r.threads[t] = quern_context_threads(ctx);
        for (int i = 0; i < count && code == EXIT_DONE; i++) code = measure(o, &cases[i], ctx, &r);
    }
    if (code == EXIT_DONE && !r.page) report_formulas(&r);
    if (code == EXIT_DONE && o->json != NULL) code = report_json(o->json, &r, &o->what, ctx);
    if (code == EXIT_DONE && o->svg != NULL) code = report_svg(o->svg, &r);
    if (code == EXIT_DONE && r.page)
        printf("written: %s %s\n", o->json, o->svg != NULL ? o->svg : "(no gnuplot, no chart)");
    quern_context_destroy(ctx);
    bench_free(&r);
    return code;
}

/* The subject that the command line names; NULL: none. */
static const bench_subject *subject_of(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        for (const bench_subject *s = bench_subjects; s->name != NULL; s++)
            if (strcmp(argv[i], s->name) == 0) return s;
    return NULL;
}

int verb_bench(int argc, char **argv)
{
    const bench_subject *s = subject_of(argc, argv);
    int first = 0;
    bool help = argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0);
    if (s == NULL && !help)
        return fail(EXIT_USAGE, "'%s' is no subject: one of %s is accepted; see quern bench --help",
                    argc > 1 ? argv[1] : "", bench_subject_names(", "));
    if (s == NULL) {
        bench_print_help(NULL, NULL);
        return EXIT_DONE;
    }
    option_tables *t = need_memory(sizeof *t);
    bench_options o = bench_default_options(s);
    bench_make_tables(s, &o, t);
    int code = parse_options(argc, argv, t->groups, 3, &first, &help);
    if (code == EXIT_DONE && help) {
        o = bench_default_options(s);
        bench_print_help(s, t);
    } else if (code == EXIT_DONE && argc - first != 1) {
        code = fail(EXIT_USAGE, "%d words are given: one subject is accepted", argc - first);
    } else if (code == EXIT_DONE && o.profile != NULL) { /* first the preset, then the options over it */
        const char *profile = o.profile;
        o = bench_default_options(s);
        code = params_preset(o.what.op, &o.what.params, profile);
        if (code == EXIT_DONE) code = parse_options(argc, argv, t->groups, 3, &first, &help);
    }
    free(t);
    return code == EXIT_DONE && !help ? bench(&o) : code;
}
