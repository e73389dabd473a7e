/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "job.h"

#include "ceilings.h"
#include "command.h"
#include "values.h"

#include <quern/cuda.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

void job_init(job *j, const operation *op, const any_params *params)
{
    memset(j, 0, sizeof *j);
    j->op = op;
    j->params = *params;
    j->tensors = tensors_init(op->family);
}

static size_t slot_index(const job *j, const slot *s)
{
    return (size_t)(s - j->op->family->slots);
}

static bool packed(const job *j)
{
    const family *f = j->op->family;
    const slot *s = slot_named(f, f->packed_by, strlen(f->packed_by));
    return s != NULL && slot_get(&j->tensors, s) != NULL;
}

static const char *shape_of(const job *j, const slot *s)
{
    return s->packed != NULL && packed(j) ? s->packed : s->fixed;
}

/* The branch that a tensor belongs to, by its name: 0 where to none. */
static uint32_t branch_of(const slot *s)
{
    const size_t n = strlen(s->name);
    const char *end = n > 4 ? s->name + n - 4 : "";
    return strcmp(end, "_cmp") == 0   ? QUERN_NSA_BRANCH_CMP
           : strcmp(end, "_slc") == 0 ? QUERN_NSA_BRANCH_SLC
           : strcmp(end, "_win") == 0 ? QUERN_NSA_BRANCH_WIN
                                      : 0;
}

/* ---- symbols ---- */

static const int64_t *symbol_value(const job *j, const char *name)
{
    for (size_t i = 0; i < j->symbol_count; i++)
        if (strcmp(j->symbols[i].name, name) == 0) return &j->symbols[i].value;
    return NULL;
}

/* The first binding counts: whether the tensors agree is the library's to say. */
static void symbol_bind(job *j, const char *name, int64_t value)
{
    if (symbol_value(j, name) != NULL || j->symbol_count == SYMBOLS_MAX) return;
    snprintf(j->symbols[j->symbol_count].name, sizeof j->symbols->name, "%s", name);
    j->symbols[j->symbol_count++].value = value;
}

static int64_t symbol_or(const job *j, const char *name, int64_t otherwise)
{
    const int64_t *v = symbol_value(j, name);
    return v != NULL ? *v : otherwise;
}

/* Splits a shape into at most QUERN_MAX_DIMS words; returns how many. */
static int32_t shape_words(const char *shape, char words[QUERN_MAX_DIMS][8])
{
    int32_t n = 0;
    for (const char *at = shape; *at != '\0' && n < QUERN_MAX_DIMS; n++) {
        const size_t length = strcspn(at, " ");
        snprintf(words[n], 8, "%.*s", (int)length, at);
        at += length + (at[length] == ' ');
    }
    return n;
}

/* Binds the symbols of an input's shape. False where the number of dimensions is another. */
static bool bind_shape(job *j, const char *shape, const quern_tensor *t)
{
    char words[QUERN_MAX_DIMS][8];
    if (strpbrk(shape, "=|*") != NULL) return true;
    const int32_t n = shape_words(shape, words);
    int32_t skip = 0;
    if (strcmp(words[0], "...") == 0) {
        if (t->ndim < n - 1) return false;
        j->lead_count = t->ndim - (n - 1);
        memcpy(j->lead, t->shape, sizeof j->lead);
        skip = 1;
    } else if (t->ndim != n) {
        return false;
    }
    for (int32_t i = skip; i < n; i++) {
        const int64_t extent = t->shape[t->ndim - n + i];
        if (strcmp(words[i], "B+1") == 0) symbol_bind(j, "B", extent > 0 ? extent - 1 : 0);
        else symbol_bind(j, words[i], extent);
    }
    return true;
}

/* The sum of two numbers >= 0, or the largest there is: no tensor is as long. */
static int64_t add_most(int64_t a, int64_t b)
{
    return a > INT64_MAX - b ? INT64_MAX : a + b;
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

/* Binds what follows from inputs and parameters. Parameters that the library will refuse only have to
 * do no harm here. */
static void derive_symbols(job *j)
{
    if (j->op->family == &family_list) {
        const quern_nsa_list_params *p = &j->params.list;
        const bool expands = p->to >= 1 && p->from > p->to;
        int64_t k = symbol_or(j, "k", 0);
        if (expands && __builtin_mul_overflow(k, p->from / p->to, &k)) k = 0;
        symbol_bind(j, "k_out", k);
    }
    if (j->op->family != &family_nsa) return;
    const quern_nsa_params *p = &j->params.nsa;
    const int64_t l = p->block_size > 0 ? p->block_size : 1, d = p->stride > 0 ? p->stride : l;
    const int64_t tile = p->tile > 0 ? p->tile : 1, n = symbol_or(j, "N", 0), total = symbol_or(j, "T", 0);
    symbol_bind(j, "Nc", n >= l ? (n - l) / d + 1 : 0);
    symbol_bind(j, "Tc", total / d);
    symbol_bind(j, "tiles", ceil_div(n, tile));
    symbol_bind(j, "rows", add_most(total / tile, symbol_or(j, "B", 0)));
    symbol_bind(j, "Hs", p->scope == QUERN_NSA_SCOPE_HEAD ? symbol_or(j, "H", 0) : symbol_or(j, "Hkv", 0));
    symbol_bind(j, "k", p->num_selected > 0 ? p->num_selected : 0);
    symbol_bind(j, "c", p->max_compressed_groups > 0 ? p->max_compressed_groups : 0);
}

/* ---- inputs ---- */

static bool is_input(const operation *op, const char *name)
{
    return list_has(op->needs, name) || list_has(op->takes, name) || list_has(op->trigger, name);
}

bool job_bind(job *j, const slot *s, const quern_tensor *t)
{
    const size_t i = slot_index(j, s);
    if (!is_input(j->op, s->name)) return false;
    j->storage[i] = *t;
    j->input[i] = true;
    slot_set(&j->tensors, s, &j->storage[i]);
    if (list_has(j->op->trigger, s->name)) j->backward = true;
    return true;
}

/* Tensors that the parameters leave aside, though the operation could read them. */
static bool left_aside(const job *j, const slot *s)
{
    if (j->op->family != &family_nsa) return false;
    const quern_nsa_params *p = &j->params.nsa;
    if (strcmp(j->op->name, "nsa") == 0 && branch_of(s) == QUERN_NSA_BRANCH_CMP && p->compress != QUERN_NSA_COMPRESS_GIVEN) {
        fprintf(stderr, "quern run: note: %s of the file is not read: --compress given reads it\n", s->name);
        return true;
    }
    return list_has("dO_cmp dO_slc dO_win", s->name) && (p->branches & branch_of(s)) == 0;
}

int job_read(job *j, const quern_safetensors *file, const char *path, const char *without)
{
    const family *f = j->op->family;
    char ignored[512];
    snprintf(ignored, sizeof ignored, "%s", without != NULL ? without : "");
    for (char *c = ignored; *c != '\0'; c++)
        if (*c == ',') *c = ' ';
    for (size_t i = 0; i < f->slot_count; i++) {
        const slot *s = &f->slots[i];
        if (!is_input(j->op, s->name)) continue;
        quern_tensor view;
        if (!quern_safetensors_has(file, s->name) || list_has(ignored, s->name)) {
            if (list_has(j->op->needs, s->name))
                return fail(EXIT_INPUT, "tensor %s is missing from '%s': %s needs %s", s->name, path, j->op->name, j->op->needs);
            continue;
        }
        if (left_aside(j, s)) continue;
        const quern_status status = quern_safetensors_get(file, s->name, &view);
        if (status != QUERN_OK) return fail(EXIT_INPUT, "%s", quern_last_error(NULL));
        if (j->device == QUERN_CUDA) {
            const size_t bytes = (size_t)value_count(&view) * quern_dtype_size(view.dtype);
            const void *from = view.data;
            view.data = job_allocate(j, s, bytes);
            view.device = QUERN_CUDA;
            if (view.data == NULL) return fail_status(QUERN_ERR_OUT_OF_MEMORY);
            const quern_status copied = quern_cuda_copy(0, view.data, from, bytes, NULL);
            if (copied != QUERN_OK) return fail_status(copied);
        }
        job_bind(j, s, &view);
    }
    return EXIT_DONE;
}

/* ---- outputs ---- */

static bool given(const job *j, const char *name)
{
    const slot *s = slot_named(j->op->family, name, strlen(name));
    return s != NULL && j->input[slot_index(j, s)];
}

static int set_modes(job *j)
{
    if (j->op->family != &family_nsa) return EXIT_DONE;
    quern_nsa_params *p = &j->params.nsa;
    if (given(j, "gate") && given(j, "gates"))
        return fail(EXIT_INPUT, "the file holds both gate and gates: one is accepted; --without gate or --without gates picks");
    p->gate = given(j, "gates")  ? QUERN_NSA_GATE_GIVEN
              : given(j, "gate") ? QUERN_NSA_GATE_WEIGHTS
                                 : QUERN_NSA_GATE_NONE;
    p->selection = given(j, "block_idx") ? QUERN_NSA_LIST_GIVEN : QUERN_NSA_LIST_COMPUTED;
    p->groups = given(j, "group_idx") ? QUERN_NSA_LIST_GIVEN : QUERN_NSA_LIST_COMPUTED;
    return EXIT_DONE;
}

/* Is this output asked for? */
static bool wanted(const job *j, const slot *s)
{
    const char *shape = shape_of(j, s);
    if (*shape == '=' && !given(j, shape + 1)) return false; /* a gradient of an absent input */
    if (j->op->family != &family_nsa) return true;
    const quern_nsa_params *p = &j->params.nsa;
    const bool whole = strcmp(j->op->name, "nsa") == 0;
    const uint32_t branch = branch_of(s);
    if (list_has("O_cmp O_slc O_win lse_cmp lse_slc lse_win dK_slc dV_slc dK_win dV_win", s->name) &&
        (p->branches & branch) == 0)
        return false;
    if (list_has("O_cmp O_slc O_win", s->name)) return !whole || j->save_branches || j->backward;
    const bool entries = !whole || (p->branches & (QUERN_NSA_BRANCH_CMP | QUERN_NSA_BRANCH_SLC)) != 0;
    if (list_has("K_cmp V_cmp", s->name)) return entries && p->compress != QUERN_NSA_COMPRESS_GIVEN;
    if (list_has("block_idx block_count", s->name))
        return !whole || ((p->branches & QUERN_NSA_BRANCH_SLC) != 0 && p->selection == QUERN_NSA_LIST_COMPUTED);
    if (strcmp(s->name, "group_idx") == 0) return p->max_compressed_groups > 0 && (!whole || (p->branches & QUERN_NSA_BRANCH_CMP) != 0);
    if (strcmp(s->name, "cu_seqlens_cmp") == 0) return packed(j) && entries;
    if (strcmp(j->op->name, "nsa-gate") == 0 && strcmp(s->name, "dQ") == 0) return p->gate == QUERN_NSA_GATE_WEIGHTS;
    if (strcmp(j->op->name, "nsa-attend") == 0) {
        if (list_has("dK dV", s->name)) return (p->branches & (QUERN_NSA_BRANCH_SLC | QUERN_NSA_BRANCH_WIN)) != 0;
        if (list_has("dK_cmp dV_cmp", s->name)) return (p->branches & branch) != 0;
    }
    return true;
}

/* The dtype of the first activation handed in. */
static quern_dtype activation_dtype(const job *j)
{
    const family *f = j->op->family;
    for (size_t i = 0; i < f->slot_count; i++)
        if (j->input[i] && f->slots[i].dtype == SLOT_ACT) return j->storage[i].dtype;
    return QUERN_F32;
}

static bool output_shape(const job *j, const slot *s, int64_t *shape, int32_t *ndim)
{
    const char *text = shape_of(j, s);
    if (*text == '=') {
        const slot *like = slot_named(j->op->family, text + 1, strlen(text + 1));
        const quern_tensor *t = slot_get(&j->tensors, like);
        if (t == NULL) return output_shape(j, like, shape, ndim);
        memcpy(shape, t->shape, sizeof t->shape);
        *ndim = t->ndim;
        return true;
    }
    char words[QUERN_MAX_DIMS][8];
    const int32_t n = shape_words(text, words);
    *ndim = 0;
    for (int32_t i = 0; i < n; i++) {
        if (strcmp(words[i], "...") == 0) {
            memcpy(shape, j->lead, sizeof j->lead);
            *ndim = j->lead_count;
            continue;
        }
        const int64_t *v = symbol_value(j, strcmp(words[i], "B+1") == 0 ? "B" : words[i]);
        if (v == NULL && strcmp(words[i], "3") != 0) return false;
        shape[(*ndim)++] = v == NULL ? 3 : add_most(*v, words[i][1] == '+');
    }
    return true;
}

bool job_bytes(quern_dtype dtype, int32_t ndim, const int64_t *shape, size_t *bytes)
{
    int64_t product = (int64_t)quern_dtype_size(dtype); /* of the extents > 0: a stride counts them all */
    bool empty = false;
    for (int32_t i = 0; i < ndim; i++) {
        empty = empty || shape[i] == 0;
        if (shape[i] != 0 && __builtin_mul_overflow(product, shape[i], &product)) return false;
    }
    *bytes = empty ? 0 : (size_t)product;
    return true;
}

/* Zeroed memory, huge pages where it is large; a reservation of addresses for a plan. */
static void *take(job *j, size_t bytes)
{
    const size_t rounded = (bytes + 64) & ~(size_t)63, large = (size_t)4 << 20;
    void *p;
    if (bytes > SIZE_MAX / 4) return NULL;
    if (j->plan) {
        p = mmap(NULL, rounded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) p = NULL;
    } else if (j->device == QUERN_CUDA) {
        if (quern_cuda_allocate(0, rounded, &p) != QUERN_OK) p = NULL;
        else if (quern_cuda_fill(0, p, 0, rounded, NULL) != QUERN_OK) (void)quern_cuda_free(0, p), p = NULL;
    } else if (bytes >= large) {
        p = bench_allocate(bytes);
    } else if ((p = aligned_alloc(64, rounded)) != NULL) {
        memset(p, 0, rounded);
    }
    if (p != NULL) j->total_bytes += bytes;
    return p;
}

static void give_back(const job *j, void *p, size_t bytes)
{
    if (p != NULL && j->plan) munmap(p, (bytes + 64) & ~(size_t)63);
    else if (j->device == QUERN_CUDA) (void)quern_cuda_free(0, p);
    else free(p);
}

void *job_allocate(job *j, const slot *s, size_t bytes)
{
    const size_t i = slot_index(j, s);
    j->owned[i] = take(j, bytes);
    j->owned_bytes[i] = bytes;
    return j->owned[i];
}

void job_symbol(job *j, const char *name, int64_t value)
{
    symbol_bind(j, name, value);
}

bool job_shape(job *j, const slot *s, int64_t shape[QUERN_MAX_DIMS], int32_t *ndim)
{
    derive_symbols(j);
    return output_shape(j, s, shape, ndim);
}

typedef struct allocation {
    job *j;
    int code;
} allocation;

static bool allocate_output(void *arg, const slot *s)
{
    allocation *a = arg;
    job *j = a->j;
    const size_t i = slot_index(j, s);
    int64_t shape[QUERN_MAX_DIMS];
    int32_t ndim;
    if (slot_get(&j->tensors, s) != NULL || !wanted(j, s)) return true;
    if (!output_shape(j, s, shape, &ndim)) {
        a->code = fail(EXIT_INPUT, "the shape [%s] of output %s does not follow from the tensors of the file: %s takes %s %s",
                       shape_of(j, s), s->name, j->op->name, j->op->needs, j->op->takes);
        return false;
    }
    const quern_dtype dtype = s->dtype == SLOT_ACT ? activation_dtype(j) : s->dtype == SLOT_I32 ? QUERN_I32 : QUERN_F32;
    size_t bytes;
    const bool fits = job_bytes(dtype, ndim, shape, &bytes);
    if (!fits || job_allocate(j, s, bytes) == NULL) {
        a->code = fits ? fail(EXIT_MACHINE, "no memory for output %s of %zu bytes", s->name, bytes)
                       : fail(EXIT_INPUT, "output %s: its shape [%s] makes 2^63 bytes or more", s->name, shape_of(j, s));
        return false;
    }
    j->storage[i] = quern_tensor_contiguous(j->owned[i], dtype, ndim, shape);
    j->storage[i].device = (quern_device)j->device;
    slot_set(&j->tensors, s, &j->storage[i]);
    return true;
}

static int bind_inputs(job *j)
{
    const family *f = j->op->family;
    for (size_t i = 0; i < f->slot_count; i++) {
        const char *shape = shape_of(j, &f->slots[i]);
        if (!j->input[i] || bind_shape(j, shape, &j->storage[i])) continue;
        return fail(EXIT_INPUT, "tensor %s has %d dimensions: %s is accepted", f->slots[i].name, j->storage[i].ndim, shape);
    }
    return EXIT_DONE;
}

int job_prepare(job *j, quern_context *ctx)
{
    int code = set_modes(j);
    if (code == EXIT_DONE) code = bind_inputs(j);
    if (code != EXIT_DONE) return code;
    derive_symbols(j);
    allocation a = {j, EXIT_DONE};
    list_each(j->op->family, j->op->gives, allocate_output, &a);
    if (a.code == EXIT_DONE && j->backward) list_each(j->op->family, j->op->gradients, allocate_output, &a);
    if (a.code != EXIT_DONE) return a.code;
    size_t forward = 0, backward = 0;
    quern_status status = pass_size(&j->op->forward, ctx, &j->params, &j->tensors, &forward);
    if (status == QUERN_OK && j->backward)
        status = pass_size(&j->op->backward, ctx, &j->params, &j->tensors, &backward);
    if (status != QUERN_OK) return fail_status(status);
    j->workspace_bytes = forward > backward ? forward : backward;
    j->workspace = take(j, j->workspace_bytes);
    if (j->workspace == NULL) return fail(EXIT_MACHINE, "no memory for a workspace of %zu bytes", j->workspace_bytes);
    return job_fill_borders(j);
}

int job_run(job *j, quern_context *ctx)
{
    if (j->device == QUERN_CUDA) {
        const quern_status done = job_run_cuda(j, ctx);
        return done == QUERN_OK ? EXIT_DONE : fail_status(done);
    }
    const double start = now_ms();
    quern_status status = pass_run(&j->op->forward, ctx, &j->params, &j->tensors, j->workspace, j->workspace_bytes);
    j->forward_ms = now_ms() - start;
    if (status == QUERN_OK && j->backward) {
        status = pass_run(&j->op->backward, ctx, &j->params, &j->tensors, j->workspace, j->workspace_bytes);
        j->backward_ms = now_ms() - start - j->forward_ms;
    }
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

typedef struct collection {
    const job *j;
    quern_safetensors_item items[SLOTS_MAX];
    size_t count;
} collection;

static bool collect(void *arg, const slot *s)
{
    collection *c = arg;
    const quern_tensor *t = slot_get(&c->j->tensors, s);
    const bool internal = strcmp(c->j->op->name, "nsa") == 0 && list_has("O_cmp O_slc O_win", s->name) && !c->j->save_branches;
    if (t != NULL && !internal) c->items[c->count++] = (quern_safetensors_item){s->name, t};
    return true;
}

/* Replaces device tensors by copies in host memory, one after another in *memory. */
static quern_status download(collection *c, quern_tensor copies[SLOTS_MAX], char **memory)
{
    size_t sizes[SLOTS_MAX], total = 0;
    for (size_t i = 0; i < c->count; i++) {
        copies[i] = *c->items[i].tensor;
        sizes[i] = (size_t)value_count(&copies[i]) * quern_dtype_size(copies[i].dtype);
        total += (sizes[i] + 63) & ~(size_t)63;
    }
    *memory = malloc(total + 1);
    if (*memory == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    quern_status status = QUERN_OK;
    char *at = *memory;
    for (size_t i = 0; i < c->count && status == QUERN_OK; i++) {
        status = quern_cuda_copy(0, at, copies[i].data, sizes[i], NULL);
        copies[i].data = at, copies[i].device = QUERN_CPU;
        c->items[i].tensor = &copies[i];
        at += (sizes[i] + 63) & ~(size_t)63;
    }
    return status == QUERN_OK ? quern_cuda_synchronize(0, NULL) : status;
}

int job_write(const job *j, const char *path)
{
    collection c = {.j = j};
    quern_tensor copies[SLOTS_MAX];
    char *memory = NULL;
    list_each(j->op->family, j->op->gives, collect, &c);
    if (j->backward) list_each(j->op->family, j->op->gradients, collect, &c);
    const quern_safetensors_pair metadata[] = {{"quern", quern_version()}, {"op", j->op->name}};
    quern_status status = j->device == QUERN_CUDA ? download(&c, copies, &memory) : QUERN_OK;
    if (status == QUERN_OK) status = quern_safetensors_save(path, c.items, c.count, metadata, 2);
    free(memory);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

void job_free(job *j)
{
    for (size_t i = 0; i < SLOTS_MAX; i++) give_back(j, j->owned[i], j->owned_bytes[i]);
    give_back(j, j->workspace, j->workspace_bytes);
    for (int i = 0; i < 3; i++) (void)quern_cuda_event_destroy(0, j->events[i]);
    (void)quern_cuda_free(0, j->flush);
    memset(j->events, 0, sizeof j->events);
    j->workspace = j->flush = NULL;
    memset(j->owned, 0, sizeof j->owned);
}
