/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench.c - `quern bench WHAT`: times an operation at several lengths, beside the limit of the machine. */
#include "bench.h"
#include "bench_core.h"
#include "bench_decode.h"
#include "bench_experts.h"
#include "bench_layer.h"

#include "command.h"
#include "machine.h"
#include "output.h"
#include "peer_onednn.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

typedef struct bench_options {
    const char *n, *heads, *dim, *threads, *json, *svg, *profile;
    bench_case what;
    int64_t reps, rounds;
    bool no_peer;
} bench_options;

static const char *const data_choices[] = {"noise", "smooth", NULL};

#define AT(member) offsetof(bench_options, member)
static const option_row rows[] = {
    {"n", OPTION_TEXT, AT(n), NULL, "lengths, such as 4096,16384 or 4k,16k,1M"},
    {"heads", OPTION_TEXT, AT(heads), NULL, "H/Hkv"},
    {"dim", OPTION_TEXT, AT(dim), NULL, "D, or D/Dv"},
    {"documents", OPTION_INT, AT(what.documents), NULL,
     "a varlen batch of n tokens in so many documents; 0: sequences of n tokens"},
    {"threads", OPTION_TEXT, AT(threads), NULL,
     "thread counts, such as 1,2; 0: OMP_NUM_THREADS, else all CPUs"},
    {"data", OPTION_CHOICE, AT(what.data), data_choices,
     "independent N(0,1), or smoothed over 16 tokens along time"},
    {"seed", OPTION_INT, AT(what.seed), NULL, "of the data"},
    {"reps", OPTION_INT, AT(reps), NULL, "runs that are timed; 0: at least 3 and a second"},
    {"rounds", OPTION_INT, AT(rounds), NULL,
     "instead of reps: rounds of a moment each, in turns with the limits; medians of the rounds"},
    {"no-peer", OPTION_FLAG, AT(no_peer), NULL, "leave out dense attention (nsa), oneDNN (attention)"},
    {"json", OPTION_TEXT, AT(json), NULL, "write the results to this file"},
    {"svg", OPTION_TEXT, AT(svg), NULL, "draw time and speed-up against length to this file (gnuplot)"},
    {"profile", OPTION_TEXT, AT(profile), NULL, "NSA preset that is set before the other options: tile256"},
    {"device", OPTION_CHOICE, AT(what.device), device_choices, "where to compute"},
};
#undef AT
enum { ROWS = sizeof rows / sizeof *rows, LIST_MAX = 64 };

static const struct {
    const char *what, *op;
} subjects[] = {
    {"ceilings", NULL},       {"attention", "attention"}, {"nsa", "nsa"},    {"compress", "nsa-compress"},
    {"select", "nsa-select"}, {"gate", "nsa-gate"},       {"overhead", NULL}};
enum { SUBJECTS = sizeof subjects / sizeof *subjects };

/* Subjects with their own function. */
static const struct {
    const char *what;
    int (*run)(int argc, char **argv, const char *what);
} scenarios[] = {{"csa-compress", bench_compressor},
                 {"hca-compress", bench_compressor},
                 {"csa-append", bench_compressor},
                 {"v4-index", bench_core},
                 {"v4-attention", bench_core},
                 {"v4-layer", bench_layer},
                 {"nsa-decode", bench_decode},
                 {"attention-decode", bench_decode},
                 {"nvfp4-gemm", bench_experts},
                 {"nvfp4-quantize", bench_experts},
                 {"nvfp4-fused-quantize", bench_experts},
                 {"nvfp4-dequantize", bench_experts},
                 {"nvfp4-from-mxfp4", bench_experts},
                 {"nvfp4-swizzle", bench_experts},
                 {"nvfp4-interleave", bench_experts},
                 {"nvfp4-profiles", bench_profiles},
                 {"moe-prepack", bench_experts},
                 {"moe-route", bench_experts},
                 {"moe", bench_experts}};
enum { SCENARIOS = sizeof scenarios / sizeof *scenarios };

/* All subjects, one after the other. */
static const char *subject_names(const char *between)
{
    static char names[512];
    size_t used = 0;
    for (int i = 0; i < SUBJECTS + SCENARIOS; i++) {
        const int n = snprintf(names + used, sizeof names - used, "%s%s", i > 0 ? between : "",
                               i < SUBJECTS ? subjects[i].what : scenarios[i - SUBJECTS].what);
        used += n > 0 && (size_t)n < sizeof names - used ? (size_t)n : 0;
    }
    return names;
}

static bench_options default_options(const operation *op)
{
    bench_options o = {.n = "4096,16384", .heads = "8/2", .dim = "128", .threads = "0"};
    o.what = bench_case_init(op);
    return o;
}

/* op NULL: without the options of an operation. */
static void print_help(const operation *op)
{
    const bench_options defaults = default_options(op);
    printf("usage: quern bench %s [--key value ...]\n\n", subject_names("|"));
    printf(
        "Medians of repeated runs on random data, the fraction of the machine's limit that was measured "
        "beside\n"
        "them (f32 multiply-add, bf16 dot product, read, copy or write bandwidth), for nsa also the speed-up "
        "over\n"
        "dense attention, for attention that over matmul and softmax of oneDNN. Parameters of the operation "
        "are\n"
        "options too: quern bench WHAT --help. overhead is the time of calls beside their kernels; it takes\n"
        "--device, --threads and --json.\n\noptions:\n");
    print_options(&(option_group){rows, ROWS, (void *)(uintptr_t)&defaults});
    print_options(&(option_group){bench_case_rows, bench_case_row_count, (void *)(uintptr_t)&defaults.what});
    if (op != NULL)
        print_options(
            &(option_group){op->options, op->option_count, (void *)(uintptr_t)&defaults.what.params});
    printf("\nexamples:\n  quern bench ceilings --threads 1,2\n"
           "  quern bench attention --n 4096 --heads 8/8 --threads 1,2 --backward\n"
           "  quern bench nsa --n 4k,16k,64k --tile 64 --metric mean-logit --svg nsa.svg --json nsa.json\n"
           "  quern bench compress --n 32k --block-size 32 --stride 16 --backward\n\n"
           "exit codes: 0 done, 2 wrong command line, 3 a parameter or a file is not accepted, 4 the machine "
           "lacks\n"
           "what is needed, 5 a defect.\n");
}

typedef struct results {
    bench_row rows[4 * LIST_MAX * 4];
    bench_case cases[LIST_MAX];
    size_t count;
    double ceilings[CEILINGS][LIST_MAX]; /* by thread list index */
} results;

static int time_peer(const bench_case *c, quern_context *ctx, int reps, timing *forward, timing *backward)
{
    job j;
    bench_case dense = *c;
    dense.op = operation_named("attention");
    dense.params = params_init(dense.op);
    dense.params.attention.causal = c->params.nsa.causal;
    dense.params.attention.scale = c->params.nsa.scale;
    int code = bench_open(&j, &dense, ctx, false);
    if (code == EXIT_DONE) code = bench_time(&j, ctx, reps, "dense attention", forward, backward);
    job_free(&j);
    return code;
}

/* Times one case on one context; adds one or two rows. */
static int measure(results *r, const bench_case *c, quern_context *ctx, size_t slot_of_threads,
                   const bench_options *o)
{
    job j;
    char label[80];
    const int threads = quern_context_threads(ctx);
    const char *peer = strcmp(c->op->name, "nsa") == 0 && !o->no_peer ? "dense" : NULL;
    measurement measured[2];
    timing peer_time[2] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    snprintf(label, sizeof label, "%s N %" PRId64, c->op->name, c->n);
    const quern_cpu_level level = quern_context_cpu_level(ctx);
    const work w[2] = {bench_work(c, false, level), bench_work(c, true, level)};
    progress("%s: data", label);
    int code = bench_open(&j, c, ctx, false);
    if (code == EXIT_DONE)
        code = bench_measure(&j, w, NULL, ctx, (int)o->rounds, (int)o->reps, label, measured);
    const double allowed = code == EXIT_DONE ? bench_workspace(&j, c, ctx) : 0;
    const size_t workspace_bytes = j.workspace_bytes;
    const int passes = j.backward ? 2 : 1;
    job_free(&j);
    if (code == EXIT_DONE && peer != NULL)
        code = time_peer(c, ctx, (int)o->reps, &peer_time[0], &peer_time[1]);
    if (code == EXIT_DONE && !o->no_peer && c->device == QUERN_CPU && strcmp(c->op->name, "attention") == 0 &&
        peer_onednn(c, threads, (int)o->reps, &peer_time[0]))
        peer = "oneDNN";
    for (int p = 0; p < passes && code == EXIT_DONE; p++) {
        if (r->count == 0) report_header();
        bench_row *row = &r->rows[r->count++];
        *row = (bench_row){.what = c,
                           .backward = p == 1,
                           .threads = threads,
                           .measured = measured[p],
                           .work = w[p],
                           .peer = peer_time[p].reps > 0 ? peer : NULL,
                           .peer_ms = peer_time[p].median,
                           .workspace_bytes = workspace_bytes,
                           .workspace_fraction = p == 0 ? allowed : 0};
        const ceiling limit = row->work.limit;
        if (limit < CEILINGS && measured[p].ceiling > r->ceilings[limit][slot_of_threads])
            r->ceilings[limit][slot_of_threads] = measured[p].ceiling;
        report_row(row);
    }
    return code;
}

static int write_json(const results *r, const int64_t *threads, int thread_counts, quern_context *ctx,
                      const char *path)
{
    json_t *ceilings = json_object(), *list = json_array();
    for (int c = 0; c < CEILINGS; c++) {
        json_t *by_threads = json_pack("{s:s}", "unit", ceiling_unit((ceiling)c));
        bool any = false;
        for (int i = 0; i < thread_counts; i++) {
            char name[16];
            if (r->ceilings[c][i] <= 0) continue;
            snprintf(name, sizeof name, "%" PRId64, threads[i]);
            json_object_set_new(by_threads, name, json_real(r->ceilings[c][i]));
            any = true;
        }
        if (any) json_object_set(ceilings, ceiling_name((ceiling)c), by_threads);
        json_decref(by_threads);
    }
    for (size_t i = 0; i < r->count; i++) json_array_append_new(list, report_json(&r->rows[i]));
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    json_t *root =
        json_pack("{s:i, s:s, s:s, s:o, s:s, s:o, s:o, s:I}", "schema", 1, "version", quern_version(),
                  "commit", machine_commit(), "machine", machine_json(ctx), "device",
                  r->count > 0 && r->rows[0].what->device == QUERN_CUDA ? "cuda" : "cpu", "ceilings",
                  ceilings, "results", list, "peak_bytes", (json_int_t)usage.ru_maxrss * 1024);
    const int code = output_json(path, root, JSON_INDENT(1) | JSON_REAL_PRECISION(9));
    json_decref(root);
    return code;
}

static int bench(const bench_options *o, bool only_ceilings)
{
    int64_t lengths[LIST_MAX], threads[LIST_MAX];
    bench_case base = o->what;
    const int length_count = parse_integers(o->n, 1, (int64_t)1 << 40, lengths, LIST_MAX);
    const int thread_counts = parse_integers(o->threads, 0, 1024, threads, 4);
    if (length_count < 0)
        return fail(EXIT_USAGE,
                    "--n '%s': a list such as 4096,16384 or 4k,1M, at most %d lengths, is accepted", o->n,
                    LIST_MAX);
    if (thread_counts < 0)
        return fail(EXIT_USAGE,
                    "--threads '%s': a list such as 1,2, at most 4 counts from 0 to 1024, is accepted",
                    o->threads);
    if (!parse_pair(o->heads, &base.heads, &base.kv_heads) || base.heads % base.kv_heads != 0)
        return fail(EXIT_USAGE, "--heads '%s': H/Hkv with H a multiple of Hkv is accepted", o->heads);
    if (!parse_pair(o->dim, &base.dim, &base.dim_v))
        return fail(EXIT_USAGE, "--dim '%s': D or D/Dv is accepted", o->dim);
    if (base.batch < 1 || base.batch > INT32_MAX || o->reps < 0 || o->reps > BENCH_REPS_MAX ||
        o->rounds < 0 || o->rounds > BENCH_REPS_MAX)
        return fail(EXIT_USAGE,
                    "--batch %" PRId64 " --reps %" PRId64 " --rounds %" PRId64
                    ": 1 to 2^31 - 1, and 0 to %d of these, is accepted",
                    base.batch, o->reps, o->rounds, BENCH_REPS_MAX);
    if (base.documents < 0 || (base.documents > 0 && base.batch != 1))
        return fail(EXIT_USAGE,
                    "--documents %" PRId64 " --batch %" PRId64 ": 0, or at least 1 with batch 1, is accepted",
                    base.documents, base.batch);
    for (int i = 0; i < length_count && base.documents > 0; i++)
        if (lengths[i] > INT32_MAX || base.documents > lengths[i])
            return fail(EXIT_USAGE,
                        "--n %" PRId64 " --documents %" PRId64
                        ": at most 2^31 - 1 tokens, and as many documents as tokens, are accepted",
                        lengths[i], base.documents);
    if (o->svg != NULL && only_ceilings) return fail(EXIT_USAGE, "--svg: ceilings have no chart");
    if (o->svg != NULL && !have_program("gnuplot"))
        return fail(EXIT_MACHINE, "--svg needs gnuplot, which is not on the PATH");
    int code = output_check(o->json);
    if (code == EXIT_DONE) code = output_check(o->svg);
    if (code != EXIT_DONE) return code;
    results *r = calloc(1, sizeof *r);
    if (r == NULL) return fail(EXIT_MACHINE, "no memory for the results");
    quern_context *ctx = NULL;
    for (int t = 0; t < thread_counts && code == EXIT_DONE; t++) {
        quern_context_destroy(ctx);
        ctx = NULL;
        code = open_context(&(machine_options){.threads = threads[t], .device = base.device}, &ctx);
        if (code != EXIT_DONE) break;
        threads[t] = quern_context_threads(ctx);
        for (int c = 0; c < CEILINGS && only_ceilings; c++) {
            progress("ceiling %s", ceiling_name((ceiling)c));
            const double rate = ceiling_measure((ceiling)c, (int)threads[t]);
            progress_clear();
            r->ceilings[c][t] = rate;
            if (rate > 0)
                printf("%-8s %2" PRId64 " threads %10.1f %s\n", ceiling_name((ceiling)c), threads[t], rate,
                       ceiling_unit((ceiling)c));
        }
        if (only_ceilings && r->ceilings[CEILING_READ][t] <= 0)
            code = fail(EXIT_MACHINE, "no memory for the ceilings, or no %" PRId64 " threads", threads[t]);
        for (int i = 0; i < length_count && code == EXIT_DONE && !only_ceilings; i++) {
            r->cases[i] = base;
            r->cases[i].n = lengths[i];
            code = measure(r, &r->cases[i], ctx, (size_t)t, o);
        }
    }
    if (code == EXIT_DONE) report_formulas(r->rows, r->count);
    if (code == EXIT_DONE && o->json != NULL) code = write_json(r, threads, thread_counts, ctx, o->json);
    if (code == EXIT_DONE && o->svg != NULL) code = report_svg(o->svg, r->rows, r->count);
    quern_context_destroy(ctx);
    free(r);
    return code;
}

int verb_bench(int argc, char **argv)
{
    int subject = SUBJECTS;
    for (int i = 1; i < argc; i++)
        for (int s = 0; s < SCENARIOS; s++)
            if (strcmp(argv[i], scenarios[s].what) == 0)
                return scenarios[s].run(argc, argv, scenarios[s].what);
    for (int i = 1; i < argc && subject == SUBJECTS; i++)
        for (int s = 0; s < SUBJECTS; s++)
            if (strcmp(argv[i], subjects[s].what) == 0) subject = s;
    const operation *op =
        subject < SUBJECTS && subjects[subject].op != NULL ? operation_named(subjects[subject].op) : NULL;
    bench_options options = default_options(op);
    const option_group groups[] = {
        {rows, ROWS, &options},
        {bench_case_rows, bench_case_row_count, &options.what},
        {op != NULL ? op->options : NULL, op != NULL ? op->option_count : 0, &options.what.params}};
    int first;
    bool help;
    int code = parse_options(argc, argv, groups, op != NULL ? 3 : 2, &first, &help);
    if (code != EXIT_DONE) return code;
    if (help) {
        print_help(op);
        return EXIT_DONE;
    }
    if (argc - first != 1 || subject == SUBJECTS || strcmp(argv[first], subjects[subject].what) != 0)
        return fail(EXIT_USAGE, "one of %s is accepted; see quern bench --help", subject_names(", "));
    if (options.profile != NULL) { /* first the preset, then the options over it */
        if (op == NULL || strcmp(op->info.group, "nsa") != 0)
            return fail(EXIT_USAGE, "--profile: only operations of the nsa family have presets");
        const char *profile = options.profile;
        options = default_options(op);
        code = params_preset(op, &options.what.params, profile);
        if (code == EXIT_DONE) code = parse_options(argc, argv, groups, 3, &first, &help);
        if (code != EXIT_DONE) return code;
    }
    if (strcmp(subjects[subject].what, "overhead") == 0) {
        int64_t threads;
        if (parse_integers(options.threads, 0, 1024, &threads, 1) != 1)
            return fail(EXIT_USAGE, "--threads '%s': one count from 0 to 1024 is accepted", options.threads);
        return bench_overhead(options.what.device, threads, options.json);
    }
    return bench(&options, op == NULL);
}
