/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_inputs.c - random inputs for an operation: what its options ask for, in which shapes. */
#include "bench.h"

#include "command.h"
#include "values.h"

#include <quern/cuda.h>

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const data_choices[] = {"noise", "smooth", NULL};
static const char *const dtype_choices[] = {"f32", "f16", "bf16", NULL};
static const char *const gate_choices[] = {"weights", "none", "given", NULL};
static const char *const project_choices[] = {"none", "k", "v", "both", NULL};
static const char *const separate_choices[] = {"none", "slc", "win", "both", NULL};
static const char *const weight_choices[] = {"f32", "input", NULL};
static const char *const list_choices[] = {"computed", "given", "indexed", NULL};

#define AT(member) offsetof(bench_case, member)
const option_row bench_case_rows[] = {
    {"dtype", OPTION_CHOICE, AT(dtype), dtype_choices, "of the activations"},
    {"backward", OPTION_FLAG, AT(backward), NULL, "the backward pass as well"},
    {"heads", OPTION_TEXT, AT(heads_text), NULL, "H/Hkv"},
    {"dim", OPTION_TEXT, AT(dim_text), NULL, "D, or D/Dv"},
    {"batch", OPTION_INT, AT(batch), NULL, "sequences"},
    {"gate", OPTION_CHOICE, AT(gate), gate_choices, "nsa, gate: gates by weights, 1/3 each, or handed in"},
    {"project", OPTION_CHOICE, AT(project), project_choices,
     "nsa, compress by mean: whose means are projected"},
    {"encodings", OPTION_BOOL, AT(encodings), NULL, "nsa, compress by linear: with pe_k, pe_v"},
    {"weights", OPTION_CHOICE, AT(weights), weight_choices,
     "dtype of weights: f32, or that of the activations"},
    {"separate", OPTION_CHOICE, AT(separate), separate_choices,
     "nsa: branches with keys and values of their own"},
    {"selection", OPTION_CHOICE, AT(selection), list_choices,
     "nsa: blocks (and groups) are computed, random lists handed in, or chosen by the block indexer"},
    {"documents", OPTION_INT, AT(documents), NULL,
     "a varlen batch of n tokens in so many documents; 0: sequences of n tokens"},
    {"data", OPTION_CHOICE, AT(data), data_choices,
     "independent N(0,1), or smoothed over 16 tokens along time"},
    {"seed", OPTION_INT, AT(seed), NULL, "of the data"},
};
#undef AT
_Static_assert(sizeof bench_case_rows / sizeof *bench_case_rows == CASE_ROWS, "bench.h counts the rows");

bench_case bench_case_init(const operation *op)
{
    bench_case c = {
        .op = op, .batch = 1, .seed = 1, .encodings = true, .heads_text = "8/2", .dim_text = "128"};
    c.params = params_init(op);
    return c;
}

int bench_case_check(bench_case *c)
{
    if (!parse_pair(c->heads_text, &c->heads, &c->kv_heads) || c->heads % c->kv_heads != 0)
        return fail(EXIT_USAGE, "--heads '%s': H/Hkv with H a multiple of Hkv is accepted", c->heads_text);
    if (!parse_pair(c->dim_text, &c->dim, &c->dim_v))
        return fail(EXIT_USAGE, "--dim '%s': D or D/Dv is accepted", c->dim_text);
    if (c->batch < 1 || c->batch > INT32_MAX)
        return fail(EXIT_USAGE, "--batch %" PRId64 ": 1 to 2^31 - 1 is accepted", c->batch);
    if (c->documents < 0 || (c->documents > 0 && c->batch != 1))
        return fail(EXIT_USAGE,
                    "--documents %" PRId64 " --batch %" PRId64 ": 0, or at least 1 with batch 1, is accepted",
                    c->documents, c->batch);
    if (c->documents > 0 && (c->n > INT32_MAX || c->documents > c->n))
        return fail(EXIT_USAGE,
                    "--n %" PRId64 " --documents %" PRId64
                    ": at most 2^31 - 1 tokens, and as many documents as tokens, are accepted",
                    c->n, c->documents);
    return EXIT_DONE;
}

/* Optional inputs that the options of the case ask for. */
static bool asked_for(const bench_case *c, const quern_op_tensor *t)
{
    const struct {
        const char *name;
        bool asked;
    } rows[] = {
        {"cu_seqlens", c->documents > 0},
        {"cu_seqlens_q", c->documents > 0},
        {"cu_seqlens_kv", c->documents > 0},
        {"gate", c->gate == GATE_WEIGHTS},
        {"gates", c->gate == GATE_GIVEN},
        {"W_k", (c->project & PROJECT_K) != 0},
        {"W_v", (c->project & PROJECT_V) != 0},
        {"pe_k", c->encodings},
        {"pe_v", c->encodings},
        {"K_slc", (c->separate & SEPARATE_SLC) != 0},
        {"V_slc", (c->separate & SEPARATE_SLC) != 0},
        {"K_win", (c->separate & SEPARATE_WIN) != 0},
        {"V_win", (c->separate & SEPARATE_WIN) != 0},
        {"block_idx", c->selection == SELECTION_GIVEN},
        {"group_idx", c->selection == SELECTION_GIVEN && c->params.nsa.max_compressed_groups > 0},
        {"q_I", c->selection == SELECTION_INDEXED},
        {"k_I", c->selection == SELECTION_INDEXED},
        {"O_cmp", true},
        {"O_slc", true},
        {"O_win", true},
    };
    if (t->trigger) return c->backward;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (t->input && strcmp(t->name, rows[i].name) == 0) return rows[i].asked;
    return false;
}

/* Chooses the tensors to give: those asked for that the parameters use, and those that are then needed. Sets
 * the parameters that follow from them. */
static int choose_inputs(const bench_case *c, job *j, bool chosen[QUERN_OP_TENSORS_MAX])
{
    static const quern_tensor something;
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    any_tensors there = tensors_init(c->op);
    for (int32_t i = 0; i < c->op->info.tensor_count; i++)
        there.t[i] = asked_for(c, &c->op->tensors[i]) ? &something : NULL;
    for (int round = 0; round < 2; round++) {
        quern_status status = quern_op_follow(c->op->op, &j->params, &there);
        if (status == QUERN_OK)
            status = quern_op_roles(c->op->op, QUERN_OP_FORWARD, &j->params, &there, roles);
        if (status != QUERN_OK) return fail_status(status);
        for (int32_t i = 0; i < c->op->info.tensor_count; i++) {
            const quern_op_tensor *t = &c->op->tensors[i];
            const bool follows = strcmp(t->name, "cu_seqlens_cmp") == 0,
                       used = roles[i] == QUERN_OP_NEEDED || roles[i] == QUERN_OP_OPTIONAL;
            chosen[i] = t->trigger ? there.t[i] != NULL
                                   : !follows && used && (there.t[i] != NULL || roles[i] == QUERN_OP_NEEDED);
            there.t[i] = chosen[i] ? &something : NULL;
        }
    }
    return EXIT_DONE;
}

/* Parameters come from the command line unchecked. The library refuses bad ones later; here they must do no
 * harm. */
static int64_t at_least_one(int64_t x)
{
    return x > 0 ? x : 1;
}

/* The product of two numbers > 0; on overflow the largest number, which no tensor reaches. */
static int64_t times_most(int64_t a, int64_t b)
{
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

/* Sets the extent of a word of a shape. */
static quern_status extent_of(const bench_case *c, const job *j, const char *word, int64_t *extent)
{
    const struct {
        const char *name;
        int64_t value;
    } known[] = {{"B", c->documents > 0 ? c->documents : c->batch},
                 {"B+1", (c->documents > 0 ? c->documents : c->batch) + 1},
                 {"N", c->n},
                 {"Nq", c->n},
                 {"Nkv", c->n},
                 {"T", c->n},
                 {"Tq", c->n},
                 {"Tkv", c->n},
                 {"H", c->heads},
                 {"Hkv", c->kv_heads},
                 {"D", c->dim},
                 {"D_I", c->dim},
                 {"Dv", c->dim_v}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].name, word) == 0) {
            *extent = known[i].value;
            return QUERN_OK;
        }
    *extent = *word - '0';
    return *word >= '0' && *word <= '9' && word[1] == '\0'
               ? QUERN_OK
               : quern_op_extent(c->op->op, &j->params, &j->tensors, word, extent);
}

static quern_status shape_of(const bench_case *c, const job *j, const quern_op_tensor *t, int64_t *shape,
                             int32_t *ndim)
{
    const char *at = c->documents > 0 && *t->varlen != '\0' ? t->varlen : t->fixed;
    const char *const end =
        at + (strstr(at, "...") != NULL ? strcspn(at, "|") : strlen(at)); /* the first form */
    for (*ndim = 0; at < end && *ndim < QUERN_MAX_DIMS; (*ndim)++) {
        char word[16];
        const size_t left = (size_t)(end - at), word_length = strcspn(at, " "),
                     length = word_length < left ? word_length : left;
        snprintf(word, sizeof word, "%.*s", (int)length, at);
        const quern_status status = extent_of(c, j, word, &shape[*ndim]);
        if (status != QUERN_OK) return status;
        at += length + (at[length] == ' ');
    }
    return QUERN_OK;
}

/* ---- contents ---- */

/* First token of a document. */
static int64_t document_start(const bench_case *c, int64_t document)
{
    const int64_t count = at_least_one(c->documents), longer = c->n % count;
    return document * (c->n / count) + (document < longer ? document : longer);
}

static void fill_starts(const bench_case *c, int32_t *cu)
{
    for (int64_t b = 0; b <= c->documents; b++) cu[b] = (int32_t)document_start(c, b);
}

/* Lists of random blocks, or groups of 128 entries, that a tile may see. An index that comes twice counts
 * once. */
static void fill_lists(const bench_case *c, bool groups, const quern_tensor *t, uint64_t seed)
{
    const quern_nsa_params *p = &c->params.nsa;
    const int64_t l = at_least_one(p->block_size), d = p->stride > 0 ? p->stride : l,
                  tile_rows = at_least_one(p->tile);
    const int64_t k = t->shape[t->ndim - 1], rows = at_least_one(t->shape[t->ndim - 2]);
    const int64_t unit = groups ? times_most(128, d) : p->select_block > 0 ? p->select_block : l;
    const int64_t length = c->documents > 0 ? c->n / c->documents : c->n,
                  tiles = length / tile_rows + (length % tile_rows != 0);
    int64_t lists = 1;
    for (int32_t i = 0; i < t->ndim - 1; i++) lists *= t->shape[i];
    int32_t *out = t->data;
    for (int64_t i = 0; i < lists; i++) {
        const int64_t tile = i % rows % (tiles > 0 ? tiles : 1), last = times_most(tile + 1, tile_rows) - 1;
        const int64_t seen = (p->causal && last < length ? last : length - 1) / unit + 1;
        for (int64_t j = 0; j < k; j++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            out[i * k + j] =
                j < seen ? (int32_t)(k >= seen ? (uint64_t)j : (seed >> 33) % (uint64_t)seen) : -1;
        }
    }
}

static void each_value(const quern_tensor *t, double factor, double offset)
{
    const int64_t n = value_count(t);
    for (int64_t i = 0; i < n; i++) value_set(t, i, (float)(value_at(t, i) * factor + offset));
}

static bool is_dtype(const quern_op_tensor *t, const char *word)
{
    return strcmp(t->dtype, word) == 0;
}

static int fill(const bench_case *c, const quern_op_tensor *s, quern_tensor t, uint64_t seed)
{
    const bool activation = is_dtype(s, "act");
    if (is_dtype(s, "i32")) {
        if (strncmp(s->name, "cu_", 3) == 0) fill_starts(c, t.data);
        else fill_lists(c, *s->name == 'g', &t, seed);
        return EXIT_DONE;
    }
    if (activation && t.ndim == 3)
        t = quern_tensor_contiguous(t.data, t.dtype, 4, (int64_t[]){1, t.shape[0], t.shape[1], t.shape[2]});
    if (c->data == DATA_SMOOTH && activation) {
        if (!fill_smooth(&t, seed, 16)) return fail(EXIT_MACHINE, "no memory to smooth input %s", s->name);
    } else {
        fill_normal(&t, seed);
    }
    if (is_dtype(s, "weight"))
        each_value(&t, 1 / sqrt((double)(*s->name == 'W' ? t.shape[1] : t.shape[2])), 0);
    if (strcmp(s->name, "gates") == 0) each_value(&t, 0.1, 0.5);
    return EXIT_DONE;
}

/* A device tensor gets its values through host memory; a large one of noise repeats a block of 2^25 - 39
 * values, whose period meets no row or tile. */
static int fill_device(const bench_case *c, const quern_op_tensor *s, quern_tensor t, size_t bytes,
                       uint64_t seed)
{
    const size_t size = quern_dtype_size(t.dtype), most = (((size_t)1 << 25) - 39) * size;
    const bool repeats = bytes > most && is_dtype(s, "act") && c->data != DATA_SMOOTH;
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

static int make_input(job *j, const bench_case *c, int tensor)
{
    const quern_op_tensor *s = &c->op->tensors[tensor];
    const bool as_input = is_dtype(s, "act") || (is_dtype(s, "weight") && c->weights == WEIGHTS_INPUT);
    const quern_dtype dtype = as_input ? (quern_dtype)c->dtype : is_dtype(s, "i32") ? QUERN_I32 : QUERN_F32;
    int64_t shape[QUERN_MAX_DIMS];
    int32_t ndim;
    size_t bytes;
    const quern_status status = shape_of(c, j, s, shape, &ndim);
    if (status != QUERN_OK) return fail_status(status);
    if (!job_bytes(dtype, ndim, shape, &bytes))
        return fail(EXIT_INPUT, "input %s makes 2^63 bytes or more", s->name);
    void *data = job_allocate(j, tensor, bytes);
    if (data == NULL) return fail(EXIT_MACHINE, "no memory for input %s of %zu bytes", s->name, bytes);
    quern_tensor t = quern_tensor_contiguous(data, dtype, ndim, shape);
    const uint64_t seed = (uint64_t)c->seed * 1000 + (uint64_t)tensor;
    int code = EXIT_DONE;
    if (!j->plan) code = j->device == QUERN_CUDA ? fill_device(c, s, t, bytes, seed) : fill(c, s, t, seed);
    t.device = (quern_device)j->device;
    job_bind(j, tensor, &t);
    return code;
}

int bench_inputs(job *j, const bench_case *c)
{
    bool chosen[QUERN_OP_TENSORS_MAX] = {false};
    int code = choose_inputs(c, j, chosen);
    for (int pass = 0; pass < 2; pass++) /* cu_seqlens decides the shapes of the others */
        for (int32_t i = 0; i < c->op->info.tensor_count && code == EXIT_DONE; i++)
            if (chosen[i] && (strncmp(c->op->tensors[i].name, "cu_", 3) == 0) == (pass == 0))
                code = make_input(j, c, i);
    return code;
}

int bench_open(job *j, const bench_case *c, quern_context *ctx, bool plan)
{
    job_init(j, c->op, &c->params);
    j->plan = plan;
    j->device = c->device;
    const int code = bench_inputs(j, c);
    return code == EXIT_DONE ? job_prepare(j, ctx) : code;
}
