/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_compressor.c - `quern bench csa-compress`, `hca-compress` and `csa-append`: DeepSeek-V4's compressors
 * with norm and RoPE, from projections or hidden states. Kernel and ceiling take turns; the fraction is the
 * median of the rounds'. From hidden states the peer, the projection alone by oneDNN, takes turns with
 * them. */
#include "bench.h"
#include "bench_core.h"
#include "bench_decode.h"
#include "command.h"
#include "machine.h"
#include "output.h"
#include "peer_product.h"
#include "team.h"
#include "values.h"

#include <quern/dsv4.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 9, ROPE = 64, LENGTHS_MAX = 16, MEMORY = 29 };

typedef struct compressor_bench {
    const char *n, *threads, *json;
    int64_t width, hidden, index_width, ring, rounds;
    int dtype, weights;
    bool backward;
} compressor_bench;

static const char *const dtype_choices[] = {"f32", "f16", "bf16", NULL}, *const weight_choices[] = {
                                                                             "floats", "fp8", "nvfp4", NULL};
enum { WEIGHTS_FLOATS, WEIGHTS_FP8, WEIGHTS_NVFP4 };
#define AT(member) offsetof(compressor_bench, member)
static const option_row rows[] = {
    {"n", OPTION_TEXT, AT(n), NULL, "tokens, such as 16k,64k"},
    {"width", OPTION_INT, AT(width), NULL, "C"},
    {"hidden", OPTION_INT, AT(hidden), NULL, "Dm: from hidden states; 0: from projections"},
    {"index-width", OPTION_INT, AT(index_width), NULL,
     "csa-compress: C_I of the indexer's compressor in the same call; 0: the main one alone"},
    {"weights", OPTION_CHOICE, AT(weights), weight_choices,
     "with --hidden: of the projection, in the dtype below or in bytes"},
    {"dtype", OPTION_CHOICE, AT(dtype), dtype_choices, "of the projections, or hidden states and weights"},
    {"backward", OPTION_FLAG, AT(backward), NULL, "the backward pass as well"},
    {"ring", OPTION_INT, AT(ring), NULL, "csa-append: rows that the state can take back"},
    {"rounds", OPTION_INT, AT(rounds), NULL, "in which kernel and ceiling take turns, at most 101"},
    {"threads", OPTION_TEXT, AT(threads), NULL,
     "thread counts, such as 1,2; 0: OMP_NUM_THREADS, else all CPUs"},
    {"json", OPTION_TEXT, AT(json), NULL, "write the results to this file"},
};
#undef AT

/* A call on random data. */
typedef struct subject_data {
    quern_dsv4_compress_params params;
    quern_dsv4_compress_tensors t;
    quern_tensor proj, b_a, b_b, norm, table, out, d_out, d_proj, d_b_a, d_b_b, d_norm, w, d_w;
    quern_tensor codes, scales, global; /* of w in bytes */
    struct {                            /* the indexer's */
        quern_tensor proj, w, b_a, b_b, norm, out, d_out, d_proj, d_w, d_b_a, d_b_b, d_norm;
    } index;
    void *memory[MEMORY], *workspace[2];
    size_t bytes[2];
    int64_t n, width, ratio, columns, entries, hidden, channels; /* columns, channels: of both */
    peer_product *peer;                                          /* from hidden states */
} subject_data;

static bool make(subject_data *d, int i, quern_tensor *t, quern_dtype dtype, int32_t ndim,
                 const int64_t *shape, bool random)
{
    int64_t count = 1;
    for (int32_t k = 0; k < ndim; k++) count *= shape[k];
    d->memory[i] = bench_allocate((size_t)count * quern_dtype_size(dtype));
    *t = quern_tensor_contiguous(d->memory[i], dtype, ndim, shape);
    if (d->memory[i] != NULL && random) fill_normal(t, (uint64_t)i + 1);
    return d->memory[i] != NULL;
}

/* The weight in bytes: random codes, scales of 2^-9 (FP8) or 2^-3 and a global of 1/64 (NVFP4). */
static bool open_bytes(subject_data *d, const compressor_bench *o)
{
    enum { FIRST = 26, BLOCK = 128, POWER = 127 - 9, SCALE = 0x20 };
    const bool fp8 = o->weights == WEIGHTS_FP8;
    const int64_t in = o->hidden, n = d->columns, fp8_codes[] = {n, in}, codes[] = {in / 2, n},
                  fp8_scales[] = {(n + BLOCK - 1) / BLOCK, (in + BLOCK - 1) / BLOCK}, scales[] = {in / 16, n};
    if (!make(d, FIRST, &d->codes, QUERN_U8, 2, fp8 ? fp8_codes : codes, false) ||
        !make(d, FIRST + 1, &d->scales, QUERN_U8, 2, fp8 ? fp8_scales : scales, false) ||
        !make(d, FIRST + 2, &d->global, QUERN_F32, 0, NULL, false))
        return false;
    uint8_t *bytes = d->codes.data;
    uint32_t random = 1;
    for (int64_t i = 0; i < d->codes.shape[0] * d->codes.shape[1]; i++) {
        random = random * 1664525u + 1013904223u;
        bytes[i] = (uint8_t)(random >> 24 & (fp8 ? 0xcf : 0xff)); /* no NaN */
    }
    memset(d->scales.data, fp8 ? POWER : SCALE, (size_t)(d->scales.shape[0] * d->scales.shape[1]));
    *(float *)d->global.data = 1.0f / 64.0f;
    d->t.w = NULL;
    d->t.d_w = NULL;
    if (fp8) {
        d->t.w_fp8 = &d->codes;
        d->t.w_fp8_scales = &d->scales;
    } else {
        d->t.w_codes = &d->codes;
        d->t.w_scales = &d->scales;
        d->t.w_global = &d->global;
    }
    return true;
}

/* The indexer's compressor beside the main one. */
static bool open_index(subject_data *d, const compressor_bench *o)
{
    const quern_dtype dtype = (quern_dtype)o->dtype;
    const int64_t width = o->index_width, columns = 4 * width, proj[] = {d->n, columns},
                  w[] = {o->hidden, columns}, bias[] = {d->ratio, width}, out[] = {d->entries, width};
    const bool project = o->hidden > 0;
    quern_dsv4_compress_tensors *t = &d->t;
    enum { FIRST = 13 };
    const struct {
        quern_tensor *own;
        const quern_tensor **field;
        quern_dtype dtype;
        int32_t ndim;
        const int64_t *shape;
        bool wanted, random;
    } made[] = {{&d->index.proj, &t->index_proj, dtype, 2, proj, !project, true},
                {&d->index.w, &t->index_w, dtype, 2, w, project, true},
                {&d->index.b_a, &t->index_b_a, QUERN_F32, 2, bias, true, true},
                {&d->index.b_b, &t->index_b_b, QUERN_F32, 2, bias, true, true},
                {&d->index.norm, &t->index_norm_weight, QUERN_F32, 1, &width, true, true},
                {&d->index.out, &t->index_out, dtype, 2, out, true, false},
                {&d->index.d_out, &t->index_d_out, dtype, 2, out, o->backward, true},
                {&d->index.d_proj, &t->index_d_proj, dtype, 2, proj, o->backward && !project, false},
                {&d->index.d_w, &t->index_d_w, QUERN_F32, 2, w, o->backward && project, false},
                {&d->index.d_b_a, &t->index_d_b_a, QUERN_F32, 2, bias, o->backward, false},
                {&d->index.d_b_b, &t->index_d_b_b, QUERN_F32, 2, bias, o->backward, false},
                {&d->index.d_norm, &t->index_d_norm_weight, QUERN_F32, 1, &width, o->backward, false}};
    for (int i = 0; i < (int)(sizeof made / sizeof *made); i++) {
        if (!made[i].wanted) continue;
        if (!make(d, FIRST + i, made[i].own, made[i].dtype, made[i].ndim, made[i].shape, made[i].random))
            return false;
        *made[i].field = made[i].own;
    }
    d->columns += columns;
    d->channels += width;
    return true;
}

static int open_data(subject_data *d, const compressor_bench *o, bool csa, int64_t n, quern_context *ctx)
{
    memset(d, 0, sizeof *d);
    d->params = (quern_dsv4_compress_params)QUERN_DSV4_COMPRESS_PARAMS_INIT;
    d->t = (quern_dsv4_compress_tensors)QUERN_DSV4_COMPRESS_TENSORS_INIT;
    d->params.kind = csa ? QUERN_DSV4_CSA : QUERN_DSV4_HCA;
    d->ratio = d->params.ratio = csa ? 4 : 128;
    d->n = n;
    d->width = d->channels = o->width;
    d->columns = (csa ? 4 : 2) * o->width;
    d->entries = n / d->ratio;
    const quern_dtype dtype = (quern_dtype)o->dtype;
    d->hidden = o->hidden;
    const int64_t proj[] = {n, o->hidden > 0 ? o->hidden : d->columns}, w[] = {o->hidden, d->columns},
                  bias[] = {d->ratio, o->width}, table[] = {n, o->width < ROPE ? o->width / 2 * 2 : ROPE};
    const int64_t out[] = {d->entries, o->width};
    if (!make(d, 0, &d->proj, dtype, 2, proj, true) || !make(d, 1, &d->b_a, QUERN_F32, 2, bias, true) ||
        !make(d, 2, &d->b_b, QUERN_F32, 2, bias, true) ||
        !make(d, 3, &d->norm, QUERN_F32, 1, &o->width, true) ||
        !make(d, 4, &d->table, QUERN_F32, 2, table, true) || !make(d, 5, &d->out, dtype, 2, out, false))
        return fail(EXIT_MACHINE, "no memory for %" PRId64 " tokens", n);
    if (o->hidden > 0 && !make(d, 11, &d->w, dtype, 2, w, true))
        return fail(EXIT_MACHINE, "no memory for weights of %" PRId64 " rows", o->hidden);
    d->t.proj = o->hidden > 0 ? NULL : &d->proj;
    d->t.x = o->hidden > 0 ? &d->proj : NULL;
    d->t.w = o->hidden > 0 ? &d->w : NULL;
    if (o->hidden > 0 && o->index_width == 0) d->peer = peer_product_open(&d->proj, &d->w);
    d->t.b_a = &d->b_a;
    d->t.b_b = csa ? &d->b_b : NULL;
    d->t.norm_weight = &d->norm;
    d->t.cos_sin = &d->table;
    d->t.out = &d->out;
    if (o->backward) {
        if (!make(d, 6, &d->d_out, dtype, 2, out, true) || !make(d, 7, &d->d_proj, dtype, 2, proj, false) ||
            !make(d, 8, &d->d_b_a, QUERN_F32, 2, bias, false) ||
            !make(d, 9, &d->d_b_b, QUERN_F32, 2, bias, false) ||
            !make(d, 10, &d->d_norm, QUERN_F32, 1, &o->width, false))
            return fail(EXIT_MACHINE, "no memory for the gradients of %" PRId64 " tokens", n);
        if (o->hidden > 0 && !make(d, 12, &d->d_w, QUERN_F32, 2, w, false))
            return fail(EXIT_MACHINE, "no memory for the gradient of the weights");
        d->t.d_out = &d->d_out;
        d->t.d_proj = o->hidden > 0 ? NULL : &d->d_proj;
        d->t.d_x = o->hidden > 0 ? &d->d_proj : NULL;
        d->t.d_w = o->hidden > 0 ? &d->d_w : NULL;
        d->t.d_b_a = &d->d_b_a;
        d->t.d_b_b = csa ? &d->d_b_b : NULL;
        d->t.d_norm_weight = &d->d_norm;
    }
    if (o->weights != WEIGHTS_FLOATS && !open_bytes(d, o))
        return fail(EXIT_MACHINE, "no memory for weights of %" PRId64 " rows", o->hidden);
    if (o->index_width > 0 && !open_index(d, o))
        return fail(EXIT_MACHINE, "no memory for the indexer's %" PRId64 " tokens", n);
    quern_status status = quern_dsv4_compress_workspace(ctx, &d->params, &d->t, &d->bytes[0]);
    if (status == QUERN_OK && o->backward)
        status = quern_dsv4_compress_backward_workspace(ctx, &d->params, &d->t, &d->bytes[1]);
    if (status != QUERN_OK) return fail_status(status);
    for (int i = 0; i < 2; i++) d->workspace[i] = bench_allocate(d->bytes[i] + 1);
    return d->workspace[0] != NULL && d->workspace[1] != NULL
               ? EXIT_DONE
               : fail(EXIT_MACHINE, "no memory for the workspace");
}

static void close_data(subject_data *d)
{
    for (int i = 0; i < MEMORY; i++) free(d->memory[i]);
    peer_product_close(d->peer);
    for (int i = 0; i < 2; i++) free(d->workspace[i]);
}

/* One line of results. */
typedef struct result {
    const char *op;
    bool backward;
    int64_t n;
    int threads;
    timing time;
    double work, ceiling, fraction; /* bytes, or from hidden states products; ceiling 0: none */
    ceiling limit;
    double peer_ms, peer_ratio; /* ratio: of this to the peer, median of the rounds; 0: no peer */
} result;

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, by_value);
    return x[n / 2];
}

/* The least work of a pass and its limit. */
static void set_work(const subject_data *d, bool backward, quern_cpu_level level, result *out)
{
    const double size = (double)quern_dtype_size(d->proj.dtype),
                 rows_bytes = (double)(d->n * d->columns) * size;
    out->limit = backward ? CEILING_COPY : CEILING_READ;
    out->work = (backward ? 2 : 1) * rows_bytes + (double)(d->entries * d->channels) * size;
    if (d->hidden == 0) return;
    out->work = (backward ? 6 : 2) * (double)(d->n * d->columns) * (double)d->hidden;
    out->limit = level == QUERN_CPU_LEVEL_AVX512BF16 && d->proj.dtype == QUERN_BF16 && !backward
                     ? CEILING_BF16
                 : level >= QUERN_CPU_LEVEL_AVX512 ? CEILING_FMA512
                                                   : CEILING_FMA256;
}

/* Runs of about a tenth of a second: milliseconds of one. */
static quern_status time_pass(subject_data *d, bool backward, quern_context *ctx, double *ms)
{
    int runs = 0;
    const double start = now_ms();
    do {
        const quern_status status =
            backward
                ? quern_dsv4_compress_backward(ctx, NULL, &d->params, &d->t, d->workspace[1], d->bytes[1])
                : quern_dsv4_compress(ctx, NULL, &d->params, &d->t, d->workspace[0], d->bytes[0]);
        if (status != QUERN_OK) return status;
        runs++;
    } while (now_ms() - start < 100);
    *ms = (now_ms() - start) / runs;
    return QUERN_OK;
}

static double time_peer(subject_data *d, int threads)
{
    int runs = 0;
    if (openmp_team(threads) < threads) return 0;
    const double start = now_ms();
    do {
        if (!peer_product_run(d->peer, threads)) return 0;
        runs++;
    } while (now_ms() - start < 100);
    return (now_ms() - start) / runs;
}

/* One pass in turns with its ceiling and its peer. */
static int measure(subject_data *d, bool backward, int rounds, quern_context *ctx, result *out)
{
    double ms[BENCH_REPS_MAX], fraction[BENCH_REPS_MAX], rate[BENCH_REPS_MAX], peer[BENCH_REPS_MAX],
        ratio[BENCH_REPS_MAX];
    set_work(d, backward, quern_context_cpu_level(ctx), out);
    for (int i = -1; i < rounds; i++) {
        double now;
        const quern_status status = time_pass(d, backward, ctx, &now);
        if (status != QUERN_OK) return fail_status(status);
        const double other = d->peer != NULL && !backward ? time_peer(d, out->threads) : 0;
        if (i < 0) continue;
        ms[i] = now;
        peer[i] = other;
        ratio[i] = other > 0 ? now / other : 0;
        rate[i] = ceiling_measure(out->limit, out->threads);
        fraction[i] = out->work / now * 1e-6 / rate[i];
    }
    out->time = timing_of(ms, rounds);
    out->fraction = median(fraction, rounds);
    out->ceiling = median(rate, rounds);
    out->peer_ms = median(peer, rounds);
    out->peer_ratio = median(ratio, rounds);
    return EXIT_DONE;
}

/* Appends tokens one by one to a state; times those that complete a block separately. */
static int measure_append(subject_data *d, int64_t ring, quern_context *ctx, result out[2])
{
    enum { TOKENS = 4096 };
    size_t state_bytes, bytes = 0, most = 1 << 20;
    double *ms[2] = {malloc(TOKENS * sizeof **ms), malloc(TOKENS * sizeof **ms)};
    int counts[2] = {0, 0};
    quern_dsv4_state *state = NULL;
    void *memory = NULL, *workspace = malloc(most);
    quern_status status = quern_dsv4_state_size(&d->params, d->width, ring, &state_bytes);
    if (status == QUERN_OK) memory = malloc(state_bytes);
    int code = status != QUERN_OK ? fail_status(status)
               : memory == NULL || workspace == NULL || ms[0] == NULL || ms[1] == NULL
                   ? fail(EXIT_MACHINE, "no memory for a state")
                   : EXIT_DONE;
    if (code == EXIT_DONE)
        status = quern_dsv4_state_create(&d->params, d->width, ring, memory, state_bytes, &state);
    quern_dsv4_append_tensors t = QUERN_DSV4_APPEND_TENSORS_INIT;
    quern_tensor proj = d->proj, row = d->out;
    t.proj = &proj;
    t.out = &row;
    t.b_a = d->t.b_a;
    t.b_b = d->t.b_b;
    t.norm_weight = d->t.norm_weight;
    t.cos_sin = d->t.cos_sin;
    const int64_t one = 1;
    proj.shape[0] = 1;
    for (int64_t i = 0; i < TOKENS && i < d->n && code == EXIT_DONE && status == QUERN_OK; i++) {
        const bool commit = (i + 1) % d->ratio == 0;
        proj.data = (char *)d->proj.data + i * d->columns * (int64_t)quern_dtype_size(proj.dtype);
        row.shape[0] = commit;
        if (i < 2 * d->ratio)
            status = quern_dsv4_append_workspace(ctx, &d->params, &state, &one, 1, &t, &bytes);
        if (status != QUERN_OK || bytes > most) break;
        const double start = now_ms();
        status = quern_dsv4_append(ctx, NULL, &d->params, &state, &one, 1, &t, workspace, most);
        ms[commit][counts[commit]++] = now_ms() - start;
    }
    if (code == EXIT_DONE && status != QUERN_OK) code = fail_status(status);
    for (int i = 0; i < 2 && code == EXIT_DONE; i++) out[i].time = timing_of(ms[i], counts[i]);
    free(ms[0]), free(ms[1]), free(memory), free(workspace);
    return code;
}

static void print_result(const result *r)
{
    printf("%-14s %-9s N %8" PRId64 "  threads %2d  %10.4f ms (p10 %.4f, p90 %.4f)", r->op,
           r->backward ? "backward" : "", r->n, r->threads, r->time.median, r->time.p10, r->time.p90);
    if (r->ceiling > 0)
        printf("  %7.1f G/s  %5.3f of %s %.1f", r->work / r->time.median * 1e-6, r->fraction,
               ceiling_name(r->limit), r->ceiling);
    if (r->peer_ratio > 0) printf("  %5.3f of oneDNN's product alone, %.3f ms", r->peer_ratio, r->peer_ms);
    printf("\n");
}

static json_t *result_json(const result *r, const compressor_bench *o)
{
    json_t *shape = json_pack("{s:I, s:I, s:I, s:I, s:b}", "n", (json_int_t)r->n, "width",
                              (json_int_t)o->width, "hidden", (json_int_t)o->hidden, "index_width",
                              (json_int_t)o->index_width, "backward", (int)r->backward);
    json_t *j = json_pack("{s:s, s:o, s:s, s:i, s:i, s:f, s:f, s:f}", "op", r->op, "shape", shape, "dtype",
                          dtype_choices[o->dtype], "threads", r->threads, "reps", r->time.reps, "ms_median",
                          r->time.median, "ms_p10", r->time.p10, "ms_p90", r->time.p90);
    if (r->ceiling > 0) {
        const bool products = o->hidden > 0;
        json_object_set_new(j, products ? "gflops" : "gbps", json_real(r->work / r->time.median * 1e-6));
        json_object_set_new(j, "ceiling", json_string(ceiling_name(r->limit)));
        json_object_set_new(j, "fraction", json_real(r->fraction));
        json_object_set_new(j, "formula",
                            json_string(products && r->backward ? "6 for a token and a weight"
                                        : products              ? "2 for a token and a weight"
                                        : r->backward
                                            ? "projections read and their gradients written, d_out read"
                                            : "projections read, entries written"));
    }
    if (r->peer_ratio > 0) {
        json_object_set_new(j, "peer", json_string("oneDNN's product alone"));
        json_object_set_new(j, "peer_ms", json_real(r->peer_ms));
        json_object_set_new(j, "peer_ratio", json_real(r->peer_ratio));
    }
    return j;
}

static int bench(const compressor_bench *o, const char *subject)
{
    const bool append = strcmp(subject, "csa-append") == 0, csa = strcmp(subject, "hca-compress") != 0;
    int64_t lengths[LENGTHS_MAX], threads[4];
    const int length_count = parse_integers(o->n, 1, INT32_MAX, lengths, LENGTHS_MAX),
              thread_count = parse_integers(o->threads, 0, 1024, threads, 4);
    if (length_count < 0 || thread_count < 0 || o->width < 1 || o->hidden < 0 || (append && o->hidden > 0) ||
        o->rounds < 1 || o->rounds > BENCH_REPS_MAX || o->index_width < 0 ||
        (o->index_width > 0 && (append || !csa)) || (o->weights != WEIGHTS_FLOATS && o->hidden == 0))
        return fail(
            EXIT_USAGE,
            "--n '%s' --threads '%s' --width %" PRId64 " --hidden %" PRId64 " --index-width %" PRId64
            " --rounds %" PRId64 ": lists such as 16k,64k and 1,2, 1 or more channels, hidden states "
            "(csa-append: 0), an indexer's "
            "channels (csa-compress alone), --weights with hidden states, and 1 to %d rounds are accepted",
            o->n, o->threads, o->width, o->hidden, o->index_width, o->rounds, BENCH_REPS_MAX);
    json_t *list = json_array();
    quern_context *ctx = NULL;
    int code = output_check(o->json);
    for (int i = 0; i < thread_count * length_count && code == EXIT_DONE; i++) {
        subject_data d;
        quern_context_destroy(ctx);
        ctx = NULL;
        if ((code = open_context(&(machine_options){.threads = threads[i / length_count]}, &ctx)) !=
            EXIT_DONE)
            break;
        result r[2] = {{.op = append ? "csa-append" : subject,
                        .n = lengths[i % length_count],
                        .threads = quern_context_threads(ctx)}};
        r[1] = r[0];
        r[1].backward = !append;
        if (append) r[1].op = "csa-append+commit";
        code = open_data(&d, o, csa, r[0].n, ctx);
        if (code == EXIT_DONE)
            code =
                append ? measure_append(&d, o->ring, ctx, r) : measure(&d, false, (int)o->rounds, ctx, &r[0]);
        if (code == EXIT_DONE && o->backward && !append) code = measure(&d, true, (int)o->rounds, ctx, &r[1]);
        for (int k = 0; k < (append || o->backward ? 2 : 1) && code == EXIT_DONE; k++) {
            print_result(&r[k]);
            json_array_append_new(list, result_json(&r[k], o));
        }
        close_data(&d);
    }
    if (code == EXIT_DONE && o->json != NULL) code = report_results(o->json, ctx, list);
    json_decref(list);
    quern_context_destroy(ctx);
    return code;
}

int bench_compressor(int argc, char **argv, const char *subject)
{
    compressor_bench o = {.n = "16k", .threads = "0", .width = 512, .rounds = ROUNDS};
    const option_group groups[] = {{rows, sizeof rows / sizeof *rows, &o}};
    bool help;
    const int code = scenario_options(
        argc, argv, groups,
        "usage: quern bench csa-compress|hca-compress|csa-append [--key value ...]\n\n"
        "DeepSeek-V4's compressors from projections, with norm and RoPE, as a fraction of the read "
        "bandwidth (backward:\n"
        "of the copy bandwidth) that is measured in turns with them; from hidden states of the arithmetic "
        "peak, and "
        "beside\n"
        "oneDNN's product alone; csa-append: one token, without and with an entry.\n\noptions:\n",
        &help);
    if (code != EXIT_DONE || help) return code;
    return bench(&o, subject);
}
