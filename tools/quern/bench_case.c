/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_case.c - random inputs for an operation, its timing, and the work it must do at least. */
#include "bench.h"

#include "command.h"
#include "values.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- inputs ---- */

/* The inputs of a case, by what is asked for. */
static void input_names(const bench_case *c, char *names, size_t room)
{
    const bool nsa = strcmp(c->op->name, "nsa") == 0, select = strcmp(c->op->name, "nsa-select") == 0;
    const bool gate = strcmp(c->op->name, "nsa-gate") == 0;
    const bool linear = c->params.nsa.compress == QUERN_NSA_COMPRESS_LINEAR;
    const bool given = nsa && c->params.nsa.compress == QUERN_NSA_COMPRESS_GIVEN;
    const bool compresses = c->op->family == &family_nsa && !select && !gate && !given;
    snprintf(names, room, "%s%s%s%s%s%s%s", gate ? "Q O_cmp O_slc O_win" : c->op->needs, given ? " K_cmp V_cmp" : "",
             compresses && (linear || c->project) ? " W_k W_v" : "", compresses && linear ? " pe_k pe_v" : "",
             (nsa || gate) && c->gate == GATE_WEIGHTS ? " gate" : "", c->backward && *c->op->trigger != '\0' ? " " : "",
             c->backward ? c->op->trigger : "");
}

static void weight_shape(const bench_case *c, const slot *s, int64_t *shape, int32_t *ndim)
{
    const int64_t d = strcmp(s->name, "W_v") == 0 || strcmp(s->name, "pe_v") == 0 ? c->dim_v : c->dim;
    const int64_t l = c->params.nsa.compress == QUERN_NSA_COMPRESS_LINEAR ? c->params.nsa.block_size : 1;
    *ndim = 3;
    shape[0] = strcmp(s->name, "gate") == 0 ? c->heads : c->kv_heads;
    shape[1] = strcmp(s->name, "gate") == 0 ? 3 : *s->name == 'p' ? l : l * d;
    shape[2] = d;
}

static void scale_down(const quern_tensor *t, double factor)
{
    int64_t n = 1;
    for (int32_t i = 0; i < t->ndim; i++) n *= t->shape[i];
    for (int64_t i = 0; i < n; i++) ((float *)t->data)[i] *= (float)factor;
}

typedef struct filling {
    job *job;
    const bench_case *what;
    int code;
} filling;

static bool fill_input(void *arg, const slot *s)
{
    filling *f = arg;
    job *j = f->job;
    const size_t index = (size_t)(s - j->op->family->slots);
    const bool weight = s->dtype == SLOT_WEIGHT;
    const quern_dtype dtype = s->dtype == SLOT_ACT ? (quern_dtype)f->what->dtype : QUERN_F32;
    int64_t shape[QUERN_MAX_DIMS];
    int32_t ndim;
    if (weight) weight_shape(f->what, s, shape, &ndim);
    else if (!job_shape(j, s, shape, &ndim)) f->code = fail(EXIT_DEFECT, "no shape for input %s", s->name);
    if (f->code != EXIT_DONE) return false;
    size_t bytes = quern_dtype_size(dtype);
    for (int32_t i = 0; i < ndim; i++) bytes *= (size_t)shape[i];
    void *data = job_allocate(j, s, bytes);
    if (data == NULL) {
        f->code = fail(EXIT_MACHINE, "no memory for input %s of %zu bytes", s->name, bytes);
        return false;
    }
    const quern_tensor t = quern_tensor_contiguous(data, dtype, ndim, shape);
    const uint64_t seed = (uint64_t)f->what->seed * 1000 + index;
    if (j->plan) {
        job_bind(j, s, &t);
        return true;
    }
    if (f->what->data == DATA_SMOOTH && s->dtype == SLOT_ACT && ndim == 4) {
        if (!fill_smooth(&t, seed, 16)) {
            f->code = fail(EXIT_MACHINE, "no memory to smooth input %s", s->name);
            return false;
        }
    } else {
        fill_normal(&t, seed);
    }
    if (weight) scale_down(&t, 1 / sqrt((double)(*s->name == 'W' ? shape[1] : shape[2])));
    job_bind(j, s, &t);
    return true;
}

int bench_open(job *j, const bench_case *c, quern_context *ctx, bool plan)
{
    char names[200];
    filling f = {j, c, EXIT_DONE};
    job_init(j, c->op, &c->params);
    j->plan = plan;
    const symbol symbols[] = {{"B", c->batch}, {"N", c->n},          {"Nq", c->n}, {"Nkv", c->n},
                              {"H", c->heads}, {"Hkv", c->kv_heads}, {"D", c->dim}, {"Dv", c->dim_v}};
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) job_symbol(j, symbols[i].name, symbols[i].value);
    input_names(c, names, sizeof names);
    list_each(c->op->family, names, fill_input, &f);
    return f.code == EXIT_DONE ? job_prepare(j, ctx) : f.code;
}

/* ---- time ---- */

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

timing timing_of(double *ms, int count)
{
    timing t = {count, 0, 0, 0};
    if (count == 0) return t;
    qsort(ms, (size_t)count, sizeof *ms, ascending);
    t.median = count % 2 == 1 ? ms[count / 2] : 0.5 * (ms[count / 2 - 1] + ms[count / 2]);
    t.p10 = ms[(count - 1) / 10];
    t.p90 = ms[(count - 1) * 9 / 10];
    return t;
}

void progress(const char *format, ...)
{
    if (!isatty(STDERR_FILENO)) return;
    va_list args;
    va_start(args, format);
    fputs("\r\033[K", stderr);
    vfprintf(stderr, format, args);
    va_end(args);
    fflush(stderr);
}

void progress_clear(void)
{
    if (isatty(STDERR_FILENO)) fputs("\r\033[K", stderr);
}

int bench_time(job *j, quern_context *ctx, int reps, const char *label, timing *forward, timing *backward)
{
    const double long_run = 8000, enough = 1000;
    double f[BENCH_REPS_MAX], b[BENCH_REPS_MAX];
    const double start = now_ms();
    progress("%s: warming up", label);
    int code = job_run(j, ctx), n = 0;
    const double first = now_ms() - start;
    const bool keep_first = reps == 0 && first > long_run;
    if (keep_first) {
        f[n] = j->forward_ms;
        b[n++] = j->backward_ms;
    }
    const double measured_from = now_ms();
    while (code == EXIT_DONE && !keep_first && n < BENCH_REPS_MAX &&
           (reps > 0 ? n < reps : n < 3 || now_ms() - measured_from < enough)) {
        if (now_ms() - start > 2000) progress("%s: run %d, %.0f s", label, n + 1, (now_ms() - start) / 1000);
        code = job_run(j, ctx);
        f[n] = j->forward_ms;
        b[n++] = j->backward_ms;
    }
    progress_clear();
    *forward = timing_of(f, n);
    *backward = timing_of(b, n);
    return code;
}

/* ---- work ---- */

/* Keys seen by all queries of a sequence: causal, each at most `most`. */
static double causal_pairs(double n, double most)
{
    return most <= 0 || most >= n ? n * n / 2 : most * (most + 1) / 2 + (n - most) * most;
}

static double attended_pairs(const bench_case *c)
{
    const double n = (double)c->n;
    if (c->op->family == &family_attention) {
        const quern_attention_params *p = &c->params.attention;
        if (p->causal) return causal_pairs(n, (double)p->window);
        return p->window > 0 && p->window < c->n ? n * (double)(p->window / 2 * 2 + 1) : n * n;
    }
    const quern_nsa_params *p = &c->params.nsa;
    const double l = (double)p->block_size, d = p->stride > 0 ? (double)p->stride : l, select = p->select_block > 0 ? (double)p->select_block : l;
    const double groups = (double)p->max_compressed_groups * 128, entries = n >= l ? (n - l) / d + 1 : 0;
    const double half = p->causal ? 0.5 : 1;
    double pairs = 0;
    if (p->branches & QUERN_NSA_BRANCH_CMP)
        pairs += groups > 0 && groups < entries ? groups * n - groups * groups * d / 2 : half * entries * n;
    if (p->branches & QUERN_NSA_BRANCH_SLC) pairs += causal_pairs(n, (double)p->num_selected * select);
    if (p->branches & QUERN_NSA_BRANCH_WIN) pairs += causal_pairs(n, (double)p->window);
    return pairs;
}

static ceiling compute_limit(int dtype, quern_cpu_level level)
{
    if (level < QUERN_CPU_LEVEL_AVX2) return CEILINGS;
    if (level == QUERN_CPU_LEVEL_AVX2) return CEILING_FMA256;
    return dtype == QUERN_BF16 && level == QUERN_CPU_LEVEL_AVX512BF16 ? CEILING_BF16 : CEILING_FMA512;
}

work bench_work(const bench_case *c, bool backward, quern_cpu_level level)
{
    const double element = (double)quern_dtype_size((quern_dtype)c->dtype), rows = (double)c->batch * (double)c->n;
    const double d = (double)c->dim, dv = (double)c->dim_v, h = (double)c->heads, kv = (double)c->kv_heads;
    work w = {0, 0, CEILINGS, ""};
    if (strcmp(c->op->name, "attention") == 0 || strcmp(c->op->name, "nsa") == 0) {
        const double heads = (double)c->batch * h * attended_pairs(c);
        w.flops = heads * (backward ? 2 * (3 * d + 2 * dv) : 2 * (d + dv));
        w.limit = compute_limit(c->dtype, level);
        w.formula = backward ? "2 (3 D + 2 Dv) B H pairs" : "2 (D + Dv) B H pairs";
    } else if (strcmp(c->op->name, "nsa-select") == 0) {
        const quern_nsa_params *p = &c->params.nsa;
        const double l = (double)p->block_size, stride = p->stride > 0 ? (double)p->stride : l;
        const bool mean = p->metric == QUERN_NSA_METRIC_MEAN_LOGIT;
        const double lists = p->scope == QUERN_NSA_SCOPE_HEAD ? h : kv, scorers = mean ? lists / (double)p->tile : 2 * h;
        w.flops = 2 * d * scorers * rows * (double)c->n / stride * (p->causal ? 0.5 : 1);
        w.limit = compute_limit(c->dtype, level);
        w.formula = mean ? "2 D B (N / Tq) Hs Nc / 2" : "2 passes of 2 D B N H Nc / 2";
    } else if (strcmp(c->op->name, "nsa-compress") == 0) {
        const double stride = c->params.nsa.stride > 0 ? (double)c->params.nsa.stride : (double)c->params.nsa.block_size;
        const double tokens = rows * kv * (d + dv) * element;
        w.bytes = tokens * (1 + 1 / stride);
        w.limit = backward ? CEILING_WRITE : CEILING_READ;
        w.formula = backward ? "dK, dV written, dK_cmp, dV_cmp read" : "K, V read, K_cmp, V_cmp written";
    } else {
        const double query = rows * h * d * element, value = rows * h * dv * element, gates = rows * h * 3 * 4;
        const bool weights = c->gate == GATE_WEIGHTS;
        w.bytes = backward ? 7 * value + (weights ? 2 * query : 0) + gates : 4 * value + (weights ? query : 0) + gates;
        w.limit = CEILING_COPY;
        w.formula = backward ? "Q, dO, O_b, gates read, dO_b, dQ written" : "Q, O_b read, O, gates written";
    }
    return w;
}

double row_rate(const bench_row *row)
{
    return (row->work.flops > 0 ? row->work.flops : row->work.bytes) / row->time.median * 1e-6;
}

double row_fraction(const bench_row *row)
{
    return row->ceiling > 0 ? row_rate(row) / row->ceiling : 0;
}
