/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_inputs.c - random inputs for an operation: what its options ask for, in which shapes. */
#include "bench.h"

#include "command.h"
#include "values.h"

#include <quern/cuda.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const dtype_choices[] = {"f32", "f16", "bf16", NULL};
static const char *const gate_choices[] = {"weights", "none", "given", NULL};
static const char *const project_choices[] = {"none", "k", "v", "both", NULL};
static const char *const separate_choices[] = {"none", "slc", "win", "both", NULL};
static const char *const weight_choices[] = {"f32", "input", NULL};
static const char *const list_choices[] = {"computed", "given", NULL};

#define AT(member) offsetof(bench_case, member)
const option_row bench_case_rows[] = {
    {"batch", OPTION_INT, AT(batch), NULL, "sequences"},
    {"dtype", OPTION_CHOICE, AT(dtype), dtype_choices, "of the activations"},
    {"backward", OPTION_FLAG, AT(backward), NULL, "the backward pass as well"},
    {"gate", OPTION_CHOICE, AT(gate), gate_choices, "nsa, gate: gates by weights, 1/3 each, or handed in"},
    {"project", OPTION_CHOICE, AT(project), project_choices, "nsa, compress by mean: whose means are projected"},
    {"encodings", OPTION_BOOL, AT(encodings), NULL, "nsa, compress by linear: with pe_k, pe_v"},
    {"weights", OPTION_CHOICE, AT(weights), weight_choices, "dtype of weights: f32, or that of the activations"},
    {"separate", OPTION_CHOICE, AT(separate), separate_choices, "nsa: branches with keys and values of their own"},
    {"selection", OPTION_CHOICE, AT(selection), list_choices, "nsa: blocks (and groups) are computed, or random lists handed in"},
};
#undef AT
const size_t bench_case_row_count = sizeof bench_case_rows / sizeof *bench_case_rows;

bench_case bench_case_init(const operation *op)
{
    bench_case c = {.op = op, .batch = 1, .seed = 1, .encodings = true};
    c.params = params_init(op != NULL ? op->family : &family_nsa);
    return c;
}

static void add(char *names, size_t room, const char *more)
{
    const size_t used = strlen(names);
    snprintf(names + used, room - used, "%s%s", used > 0 && *more != '\0' ? " " : "", more);
}

/* The inputs of a case, by what is asked for; borders first, for they decide the shapes of the others. */
static void input_names(const bench_case *c, char *names, size_t room)
{
    const quern_nsa_params *p = &c->params.nsa;
    const char *op = c->op->name;
    const bool nsa = strcmp(op, "nsa") == 0, gate = strcmp(op, "nsa-gate") == 0, dense = c->op->family == &family_attention;
    const bool compresses = (nsa || strcmp(op, "nsa-compress") == 0) && p->compress != QUERN_NSA_COMPRESS_GIVEN;
    const bool linear = p->compress == QUERN_NSA_COMPRESS_LINEAR;
    *names = '\0';
    if (c->documents > 0)
        add(names, room, dense ? "cu_seqlens_q cu_seqlens_kv" : strcmp(op, "nsa-select") == 0 ? "cu_seqlens cu_seqlens_cmp" : "cu_seqlens");
    add(names, room, gate ? "O_cmp O_slc O_win" : c->op->needs);
    if (gate && c->gate == GATE_WEIGHTS) add(names, room, "Q");
    if (nsa && p->compress == QUERN_NSA_COMPRESS_GIVEN) add(names, room, "K_cmp V_cmp");
    if (compresses && (linear || (c->project & PROJECT_K))) add(names, room, "W_k");
    if (compresses && (linear || (c->project & PROJECT_V))) add(names, room, "W_v");
    if (compresses && linear && c->encodings) add(names, room, "pe_k pe_v");
    if (nsa && (c->separate & SEPARATE_SLC)) add(names, room, "K_slc V_slc");
    if (nsa && (c->separate & SEPARATE_WIN)) add(names, room, "K_win V_win");
    if (nsa && c->selection == SELECTION_GIVEN) add(names, room, p->max_compressed_groups > 0 ? "block_idx group_idx" : "block_idx");
    if ((nsa || gate) && c->gate == GATE_WEIGHTS) add(names, room, "gate");
    if ((nsa || gate) && c->gate == GATE_GIVEN) add(names, room, "gates");
    if (c->backward) add(names, room, c->op->trigger);
}

/* Parameters are numbers as the command line gives them: those that the library will refuse only have to do no harm. */
static int64_t at_least_one(int64_t x)
{
    return x > 0 ? x : 1;
}

/* The product of two numbers > 0, or the largest there is: no tensor is as long. */
static int64_t times_most(int64_t a, int64_t b)
{
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

static void weight_shape(const bench_case *c, const slot *s, int64_t *shape, int32_t *ndim)
{
    const int64_t d = strcmp(s->name, "W_v") == 0 || strcmp(s->name, "pe_v") == 0 ? c->dim_v : c->dim;
    const int64_t l = c->params.nsa.compress == QUERN_NSA_COMPRESS_LINEAR ? at_least_one(c->params.nsa.block_size) : 1;
    *ndim = 3;
    shape[0] = strcmp(s->name, "gate") == 0 ? c->heads : c->kv_heads;
    shape[1] = strcmp(s->name, "gate") == 0 ? 3 : *s->name == 'p' ? l : times_most(l, d);
    shape[2] = d;
}

/* ---- contents ---- */

/* First token of a document. */
static int64_t document_start(const bench_case *c, int64_t document)
{
    return document * (c->n / c->documents) + (document < c->n % c->documents ? document : c->n % c->documents);
}

/* Borders of the documents, or of their compressed rows. */
static void fill_borders(const bench_case *c, bool compressed, int32_t *cu)
{
    const int64_t l = at_least_one(c->params.nsa.block_size), d = c->params.nsa.stride > 0 ? c->params.nsa.stride : l;
    cu[0] = 0;
    for (int64_t b = 0; b < c->documents; b++) {
        const int64_t n = document_start(c, b + 1) - document_start(c, b);
        cu[b + 1] = cu[b] + (int32_t)(!compressed ? n : n < l ? 0 : (n - l) / d + 1);
    }
}

/* Lists of random blocks, or groups of 128 entries, that a tile may see. An index that comes twice counts once. */
static void fill_lists(const bench_case *c, bool groups, const quern_tensor *t, uint64_t seed)
{
    const quern_nsa_params *p = &c->params.nsa;
    const int64_t l = at_least_one(p->block_size), d = p->stride > 0 ? p->stride : l, tile_rows = at_least_one(p->tile);
    const int64_t k = t->shape[t->ndim - 1], rows = t->shape[t->ndim - 2];
    const int64_t unit = groups ? times_most(128, d) : p->select_block > 0 ? p->select_block : l;
    const int64_t length = c->documents > 0 ? c->n / c->documents : c->n, tiles = length / tile_rows + (length % tile_rows != 0);
    int64_t lists = 1;
    for (int32_t i = 0; i < t->ndim - 1; i++) lists *= t->shape[i];
    int32_t *out = t->data;
    for (int64_t i = 0; i < lists; i++) {
        const int64_t tile = i % rows % (tiles > 0 ? tiles : 1), last = times_most(tile + 1, tile_rows) - 1;
        const int64_t seen = (p->causal && last < length ? last : length - 1) / unit + 1;
        for (int64_t j = 0; j < k; j++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            out[i * k + j] = j < seen ? (int32_t)(k >= seen ? (uint64_t)j : (seed >> 33) % (uint64_t)seen) : -1;
        }
    }
}

static void each_value(const quern_tensor *t, double factor, double offset)
{
    const int64_t n = value_count(t);
    for (int64_t i = 0; i < n; i++) value_set(t, i, (float)(value_at(t, i) * factor + offset));
}

typedef struct filling {
    job *job;
    const bench_case *what;
    int code;
} filling;

static int fill(const bench_case *c, const slot *s, quern_tensor t, uint64_t seed)
{
    const bool activation = s->dtype == SLOT_ACT;
    if (s->dtype == SLOT_I32) {
        if (strncmp(s->name, "cu_", 3) == 0)
            fill_borders(c, strcmp(s->name, "cu_seqlens_cmp") == 0, t.data);
        else
            fill_lists(c, *s->name == 'g', &t, seed);
        return EXIT_DONE;
    }
    if (activation && t.ndim == 3) t = quern_tensor_contiguous(t.data, t.dtype, 4, (int64_t[]){1, t.shape[0], t.shape[1], t.shape[2]});
    if (c->data == DATA_SMOOTH && activation) {
        if (!fill_smooth(&t, seed, 16)) return fail(EXIT_MACHINE, "no memory to smooth input %s", s->name);
    } else {
        fill_normal(&t, seed);
    }
    if (s->dtype == SLOT_WEIGHT) each_value(&t, 1 / sqrt((double)(*s->name == 'W' ? t.shape[1] : t.shape[2])), 0);
    if (strcmp(s->name, "gates") == 0) each_value(&t, 0.1, 0.5);
    return EXIT_DONE;
}

/* A device tensor gets its values through host memory; a large one of noise repeats a block of 2^25 - 39 values, whose
 * period meets no row or tile. */
static int fill_device(const bench_case *c, const slot *s, quern_tensor t, size_t bytes, uint64_t seed)
{
    const size_t size = quern_dtype_size(t.dtype), most = (((size_t)1 << 25) - 39) * size;
    const bool repeats = bytes > most && s->dtype == SLOT_ACT && c->data != DATA_SMOOTH;
    const size_t block = repeats ? most : bytes;
    char *to = t.data, *host = malloc(block + 1);
    if (host == NULL) return fail(EXIT_MACHINE, "no host memory for %zu bytes of input %s", block, s->name);
    const int64_t count = (int64_t)(block / size);
    quern_tensor part = t;
    if (repeats) part = quern_tensor_contiguous(host, t.dtype, 1, &count);
    part.data = host;
    int code = fill(c, s, part, seed);
    quern_status status = QUERN_OK;
    for (size_t at = 0; at < bytes && code == EXIT_DONE && status == QUERN_OK; at += block)
        status = quern_cuda_copy(0, to + at, host, bytes - at < block ? bytes - at : block, NULL);
    if (status == QUERN_OK && code == EXIT_DONE) status = quern_cuda_synchronize(0, NULL);
    free(host);
    return code == EXIT_DONE && status != QUERN_OK ? fail_status(status) : code;
}

static bool fill_input(void *arg, const slot *s)
{
    filling *f = arg;
    job *j = f->job;
    const size_t index = (size_t)(s - j->op->family->slots);
    const bool weight = s->dtype == SLOT_WEIGHT, as_input = s->dtype == SLOT_ACT || (weight && f->what->weights == WEIGHTS_INPUT);
    const quern_dtype dtype = as_input ? (quern_dtype)f->what->dtype : s->dtype == SLOT_I32 ? QUERN_I32 : QUERN_F32;
    int64_t shape[QUERN_MAX_DIMS];
    int32_t ndim;
    if (weight)
        weight_shape(f->what, s, shape, &ndim);
    else if (!job_shape(j, s, shape, &ndim))
        f->code = fail(EXIT_DEFECT, "no shape for input %s", s->name);
    if (f->code != EXIT_DONE) return false;
    size_t bytes;
    if (!job_bytes(dtype, ndim, shape, &bytes)) {
        f->code = fail(EXIT_INPUT, "input %s makes 2^63 bytes or more", s->name);
        return false;
    }
    void *data = job_allocate(j, s, bytes);
    if (data == NULL) {
        f->code = fail(EXIT_MACHINE, "no memory for input %s of %zu bytes", s->name, bytes);
        return false;
    }
    quern_tensor t = quern_tensor_contiguous(data, dtype, ndim, shape);
    const uint64_t seed = (uint64_t)f->what->seed * 1000 + index;
    if (!j->plan) f->code = j->device == QUERN_CUDA ? fill_device(f->what, s, t, bytes, seed) : fill(f->what, s, t, seed);
    t.device = (quern_device)j->device;
    job_bind(j, s, &t);
    return f->code == EXIT_DONE;
}

int bench_open(job *j, const bench_case *c, quern_context *ctx, bool plan)
{
    char names[256];
    filling f = {j, c, EXIT_DONE};
    job_init(j, c->op, &c->params);
    j->plan = plan;
    j->device = c->device;
    const symbol symbols[] = {{"B", c->documents > 0 ? c->documents : c->batch},
                              {"N", c->n},
                              {"Nq", c->n},
                              {"Nkv", c->n},
                              {"T", c->n},
                              {"Tq", c->n},
                              {"Tkv", c->n},
                              {"H", c->heads},
                              {"Hkv", c->kv_heads},
                              {"D", c->dim},
                              {"Dv", c->dim_v}};
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) job_symbol(j, symbols[i].name, symbols[i].value);
    input_names(c, names, sizeof names);
    list_each(c->op->family, names, fill_input, &f);
    return f.code == EXIT_DONE ? job_prepare(j, ctx) : f.code;
}
