/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_gemm.c - the gemm stage: dense products by attention's micro-kernel.
 *
 * It does not use oneDNN, which would take full tiles and leave the tails to the micro-kernel: a row's bits
 * would then depend on the number of rows. Here each element of c is the sum over k in one order, whatever m.
 *
 * b is packed once into panels of 64 columns. A task is 192 rows by 256 columns: its tile of c (204 KiB)
 * and 256 columns of a (of bf16 512; 192 KiB) stay in L2 while the panels pass, 64 KiB of each at a time.
 * With fewer rows the panels, which come from L3 or memory, would pass too often. a is converted to f32 by
 * task, up to 96 rows once for all tasks, or multiplied as bf16 where b is bf16 too and the level has the
 * instruction. Up to 96 rows use each panel once: a task is then one panel, which it packs piece by piece
 * (32 KiB) as it multiplies, requesting the next, so that b is read from memory once and nothing is written
 * there. So many rows read a transposed b of f32, or one of bf16 like theirs, in place (in_place.h), and few
 * rows an f32 b with contiguous rows.
 * Limit: FMA, or with few rows the bandwidth of reading b.
 */
#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/in_place.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"
#include "cpu/levels.h"

#include <string.h>

enum {
    TILE_ROWS = 192,
    TILE_COLUMNS = 256,
    TILE_STRIDE = TILE_COLUMNS + 16,
    BLOCKS = 2,
    DEPTH = 128,
    FEW_ROWS = 32,
    ONCE_ROWS = 96,
    ROWS_BETWEEN = 12, /* of a, a multiple of the micro-kernel's */
    PIECE = 64 * DEPTH
};

typedef struct gemm_job {
    const gemm_args *args;
    const attention_kernels *kernels;
    int64_t m, n, k, tiles_n, tile_columns;
    int64_t depth; /* columns of a that a product takes in: DEPTH words */
    bool pairs;    /* bf16 products */
    bool once;     /* one tile of rows: panels are packed by the tasks */
    bool across;   /* b is read in place by across_weights_bf16 */
    float *rows;   /* a in f32, for the tasks of all panels; NULL: each converts what it reads */
    int64_t ld_rows;
    const float *b; /* panels, or the caller's rows */
    float *packed;  /* NULL: b is the caller's */
    int64_t ldb, panel_stride;
    bool in_place; /* b is read in place by in_place.h */
    in_place_product product;
    int64_t outputs, tasks; /* columns of c of a task of that; its tasks */
    int64_t runs;           /* of tasks, one after the other: as many as there are threads */
    char *scratch;          /* a thread's: a tile of c, rows of a, with `once` a piece of a panel */
    size_t scratch_bytes;
} gemm_job;

/* A thread's: it packs a's rows for itself, since what another core has packed takes longer to arrive. */
typedef struct in_place_scratch {
    bool packed;
    float sums[IN_PLACE_FLOATS] __attribute__((aligned(64)));
    float columns[];
} in_place_scratch;

static row_source rows_of(const quern_tensor *t)
{
    return (row_source){t->data, t->dtype, t->strides[0], t->shape[0], t->shape[1]};
}

/* Fewer outputs a task where threads would have none. */
static int64_t outputs_of(int64_t n, int32_t threads)
{
    enum { TASKS_A_THREAD = 4, FEWEST = 16 };
    int64_t outputs = IN_PLACE_OUTPUTS;
    while (outputs > FEWEST && n < outputs * TASKS_A_THREAD * threads) outputs /= 2;
    return outputs;
}

/* The weight's address decides too, but not how much memory is planned. */
static void plan_in_place(const stage_exec *exec, gemm_job *job)
{
    const row_source rows = rows_of(&job->args->a), weight = rows_of(&job->args->b);
    if (!job->args->b_transposed || !in_place_takes(job->kernels, &rows, &weight)) return;
    job->product = in_place_of(job->kernels, &rows, &weight);
    job->in_place = in_place_aligned(&weight);
    job->outputs = outputs_of(job->n, exec->threads);
    job->tasks = (job->n + job->outputs - 1) / job->outputs;
    job->runs = exec->threads < job->tasks ? exec->threads : job->tasks;
    const size_t floats = (size_t)round_up16((int64_t)in_place_floats(&job->product)),
                 bytes = sizeof(in_place_scratch) + floats * sizeof(float);
    if (bytes > job->scratch_bytes) job->scratch_bytes = bytes;
}

/* `repeated`: cpu_gemm_repeated()'s, whose workspace keeps panels of b from call to call. */
static gemm_job carve(const stage_exec *exec, const gemm_args *args, bool repeated, arena *a)
{
    const quern_tensor *b = &args->b;
    gemm_job job = {.args = args, .kernels = cpu_kernels_for(exec->cpu_level)->attention};
    job.m = args->c.shape[0];
    job.n = args->c.shape[1];
    job.k = args->a_transposed ? args->a.shape[0] : args->a.shape[1];
    job.pairs = job.kernels->mm_bf16 != NULL && args->a.dtype == QUERN_BF16 && b->dtype == QUERN_BF16 &&
                !args->a_transposed && job.k % 2 == 0;
    job.tile_columns = TILE_COLUMNS;
    job.depth = job.pairs ? ACROSS_DEPTH : DEPTH;
    job.across = job.pairs && args->b_transposed && job.m <= ACROSS_ROWS;
    job.scratch_bytes = (TILE_ROWS * TILE_STRIDE + BLOCKS * TILE_ROWS * DEPTH + PIECE) * sizeof(float);
    if (!job.across && !repeated) plan_in_place(exec, &job);
    /* First, so that calls with few rows leave the panels of others in place. */
    job.scratch = arena_take(a, job.scratch_bytes * (size_t)exec->threads);
    if (job.m <= FEW_ROWS && b->dtype == QUERN_F32 && !args->b_transposed && job.n % 16 == 0) {
        job.b = b->data;
        job.ldb = b->strides[0];
        job.panel_stride = job.kernels->panel;
        job.tiles_n = (job.n + job.tile_columns - 1) / job.tile_columns;
        return job;
    }
    if (job.m <= ONCE_ROWS) {
        job.once = true;
        job.ldb = job.tile_columns = job.kernels->panel;
        job.ld_rows = round_up16(job.k) + 16; /* so that rows do not share the cache's sets */
        if (!job.pairs && !repeated && args->a.dtype != QUERN_F32 && !args->a_transposed)
            job.rows = arena_take(a, (size_t)(job.m * job.ld_rows) * sizeof(float));
    } else {
        job.ldb = job.kernels->panel;
        job.panel_stride = round_up(job.pairs ? job.k / 2 : job.k, 64) * job.kernels->panel;
        job.b = job.packed = arena_take(
            a, (size_t)(round_up(job.n, job.kernels->panel) / job.kernels->panel * job.panel_stride) *
                   sizeof(float));
    }
    job.tiles_n = (job.n + job.tile_columns - 1) / job.tile_columns;
    return job;
}

static const char *element(const quern_tensor *t, int64_t row, int64_t column)
{
    return (const char *)t->data + (row * t->strides[0] + column) * (int64_t)quern_dtype_size(t->dtype);
}

/* Packs rows p ... p + depth - 1 of b's columns [first, first + columns), which make one panel of b^T and any
 * number of panels of b, panel_stride apart. */
static void pack(const gemm_job *job, int64_t p, int64_t depth, int64_t first, int64_t columns, float *to)
{
    const quern_tensor *b = &job->args->b;
    const int32_t panel = job->kernels->panel;
    const bool across = job->args->b_transposed;
    const row_source src = {across ? element(b, first, p) : element(b, p, first), b->dtype, b->strides[0],
                            across ? columns : depth, across ? depth : columns};
    if (across && job->pairs) job->kernels->pack_keys_bf16(&src, panel, (uint32_t *)(void *)to);
    else if (across) job->kernels->pack_keys_f32(&src, panel, to);
    else if (job->pairs)
        job->kernels->pack_values_bf16(&src, panel, (uint32_t *)(void *)to, job->panel_stride);
    else job->kernels->pack_values_f32(&src, panel, to, job->panel_stride);
}

static int64_t depth_at(const gemm_job *job, int64_t p)
{
    return job->k - p < job->depth ? job->k - p : job->depth;
}

/* Packs `depth` rows of b: into one panel for b^T, else into all panels. */
static void pack_part(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const gemm_job *job = arg;
    const int64_t panel = job->kernels->panel, pieces = (job->k + job->depth - 1) / job->depth,
                  p = index % pieces * job->depth, first = index / pieces * panel;
    const int64_t depth = depth_at(job, p),
                  columns = job->args->b_transposed && job->n - first > panel ? panel : job->n - first;
    pack(job, p, depth, first, columns,
         job->packed + index / pieces * job->panel_stride + (job->pairs ? p / 2 : p) * panel);
}

/* The address and strides (in 4-byte words) at which the product reads columns p ... p + depth - 1 of `rows`
 * rows of a.
 */
typedef struct operand {
    const void *data;
    int64_t row, k;
} operand;

static operand rows_of_a(const gemm_job *job, int64_t row, int64_t rows, int64_t p, int64_t depth,
                         float *copy)
{
    const quern_tensor *a = &job->args->a;
    const bool across = job->args->a_transposed;
    const char *first = across ? element(a, p, row) : element(a, row, p);
    if (job->rows != NULL) return (operand){job->rows + row * job->ld_rows + p, job->ld_rows, 1};
    if (job->pairs && job->once && a->strides[0] % 2 == 0 && (uintptr_t)first % sizeof(float) == 0)
        return (operand){first, a->strides[0] / 2, 1}; /* one panel gains less than a copy costs */
    if (job->pairs) {
        const row_source src = {first, a->dtype, a->strides[0], rows, depth};
        job->kernels->pack_rows_bf16(&src, (uint16_t *)(void *)copy, 2 * DEPTH);
        return (operand){copy, DEPTH, 1};
    }
    if (a->dtype == QUERN_F32)
        return (operand){first, across ? 1 : a->strides[0], across ? a->strides[0] : 1};
    const int64_t lines = across ? depth : rows, n = across ? rows : depth,
                  step = a->strides[0] * (int64_t)quern_dtype_size(a->dtype);
    const int64_t ld = across ? TILE_ROWS : DEPTH;
    for (int64_t i = 0; i < lines; i++)
        job->kernels->rows->convert(first + i * step, a->dtype, copy + i * ld, QUERN_F32, n);
    return (operand){copy, across ? 1 : ld, across ? ld : 1};
}

static void convert_row(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const gemm_job *job = arg;
    const quern_tensor *a = &job->args->a;
    job->kernels->rows->convert(element(a, index, 0), a->dtype, job->rows + index * job->ld_rows, QUERN_F32,
                                job->k);
}

static void store_tile(const gemm_job *job, const float *tile, int64_t ld, int64_t row, int64_t rows,
                       int64_t column, int64_t columns)
{
    const quern_tensor *c = &job->args->c;
    for (int64_t i = 0; i < rows; i++) {
        char *to = (char *)(uintptr_t)element(c, row + i, column);
        const float *from = tile + i * ld;
        if (job->args->accumulate) job->kernels->rows->add_scaled((float *)(void *)to, from, 1.0f, columns);
        else job->kernels->rows->convert(from, QUERN_F32, to, c->dtype, columns);
    }
}

/* b's rows p ... p + depth - 1 of the panel that begins at `column`. */
static const float *panel_of(const gemm_job *job, int64_t column, int64_t p, int64_t depth, float *piece)
{
    const int64_t panel = job->kernels->panel;
    if (!job->once) return job->b + column / panel * job->panel_stride + (job->pairs ? p / 2 : p) * job->ldb;
    pack(job, p, depth, column, job->n - column < panel ? job->n - column : panel, piece);
    return piece;
}

/* Requests part `part` of `parts` of the rows of b^T that these columns of c take next. */
static void request(const gemm_job *job, int64_t column, int64_t columns, int64_t p, int64_t part,
                    int64_t parts)
{
    const quern_tensor *b = &job->args->b;
    const int64_t bytes = depth_at(job, p) * (int64_t)quern_dtype_size(b->dtype);
    for (int64_t j = columns * part / parts; j < columns * (part + 1) / parts; j++)
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(element(b, column + j, p) + at, 0, 2);
}

/* A piece of a panel that is used once, packed, times all rows, between which the piece that follows is
 * requested: all of it at once would be more lines than can be in flight. */
static void multiply_once(const gemm_job *job, mm_kernel *mm, operand a, int64_t rows, int64_t column,
                          int64_t columns, int64_t q, float *piece, float *tile)
{
    const int64_t depth = depth_at(job, q), words = job->pairs ? depth / 2 : depth, next = q + depth;
    const float *b = panel_of(job, column, q, depth, piece);
    for (int64_t i = 0; i < rows; i += ROWS_BETWEEN) {
        const int64_t n = rows - i < ROWS_BETWEEN ? rows - i : ROWS_BETWEEN;
        if (job->args->b_transposed && next < job->k)
            request(job, column, columns, next, i / ROWS_BETWEEN, (rows + ROWS_BETWEEN - 1) / ROWS_BETWEEN);
        mm(n, columns, words, (const float *)a.data + i * a.row, a.row, a.k, b, job->ldb,
           tile + i * TILE_STRIDE, TILE_STRIDE, q > 0);
    }
}

static void product_tile(void *arg, int64_t index, int32_t thread)
{
    const gemm_job *job = arg;
    const int64_t row = index / job->tiles_n * TILE_ROWS, column = index % job->tiles_n * job->tile_columns,
                  panel = job->kernels->panel;
    const int64_t rows = job->m - row < TILE_ROWS ? job->m - row : TILE_ROWS,
                  columns = job->n - column < job->tile_columns ? job->n - column : job->tile_columns;
    float *tile = (float *)(void *)(job->scratch + (size_t)thread * job->scratch_bytes),
          *copy = tile + TILE_ROWS * TILE_STRIDE, *piece = copy + BLOCKS * TILE_ROWS * DEPTH;
    mm_kernel *mm = job->pairs ? job->kernels->mm_weights_bf16 : job->kernels->mm_f32;
    if (job->across) {
        const quern_tensor *a = &job->args->a, *b = &job->args->b;
        const row_source src = {element(b, column, 0), b->dtype, b->strides[0], columns, job->k};
        job->kernels->across_weights_bf16(rows, a->data, a->strides[0], &src, tile, TILE_STRIDE);
        store_tile(job, tile, TILE_STRIDE, row, rows, column, columns);
        return;
    }
    for (int64_t p = 0; p == 0 || p < job->k; p += BLOCKS * job->depth) {
        operand a[BLOCKS];
        int64_t blocks = 0;
        for (int64_t q = p; blocks == 0 || (blocks < BLOCKS && q < job->k); q += job->depth, blocks++)
            a[blocks] = rows_of_a(job, row, rows, q, depth_at(job, q), copy + blocks * TILE_ROWS * DEPTH);
        for (int64_t j = 0; j < columns; j += panel)
            for (int64_t i = 0; i < blocks; i++) {
                const int64_t q = p + i * job->depth, depth = depth_at(job, q);
                if (job->once) {
                    multiply_once(job, mm, a[i], rows, column, columns, q, piece, tile);
                    continue;
                }
                mm(rows, columns - j < panel ? columns - j : panel, job->pairs ? depth / 2 : depth, a[i].data,
                   a[i].row, a[i].k, panel_of(job, column + j, q, depth, piece), job->ldb, tile + j,
                   TILE_STRIDE, q > 0);
            }
    }
    store_tile(job, tile, TILE_STRIDE, row, rows, column, columns);
}

static in_place_scratch *in_place_scratch_of(const gemm_job *job, int32_t thread)
{
    return (in_place_scratch *)(void *)(job->scratch + (size_t)thread * job->scratch_bytes);
}

static void product_outputs(void *arg, int64_t index, int32_t thread)
{
    const gemm_job *job = arg;
    /* A run of tasks: its thread has requested the weights that follow, and no other thread writes the
     * columns beside its own meanwhile. */
    const int64_t first = parallel_in_runs(job->tasks, job->runs, index) * job->outputs,
                  left = job->n - first, panel = job->kernels->panel,
                  n = left < job->outputs ? left : job->outputs;
    in_place_scratch *s = in_place_scratch_of(job, thread);
    if (!s->packed) in_place_pack(&job->product, s->columns);
    s->packed = true;
    in_place_multiply(&job->product, s->columns, first, n, s->sums);
    for (int64_t j = 0; j < n; j += panel)
        store_tile(job, s->sums + j * job->m, panel, 0, job->m, first + j, n - j < panel ? n - j : panel);
}

size_t cpu_gemm_workspace(const stage_exec *exec, const gemm_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, false, &a);
    return arena_size(&a);
}

static void multiply(const stage_exec *exec, gemm_job *job, bool *packed)
{
    const int64_t panels =
        job->args->b_transposed ? (job->n + job->kernels->panel - 1) / job->kernels->panel : 1;
    if (job->packed != NULL && !*packed) {
        parallel_for(exec, panels * ((job->k + job->depth - 1) / job->depth), pack_part, job);
        *packed = true;
    }
    if (job->rows != NULL) parallel_for(exec, job->m, convert_row, job);
    parallel_for(exec, (job->m + TILE_ROWS - 1) / TILE_ROWS * job->tiles_n, product_tile, job);
}

void cpu_gemm_repeated(const stage_exec *exec, const gemm_args *args, void *workspace, bool *packed)
{
    arena a = arena_on(workspace);
    gemm_job job = carve(exec, args, true, &a);
    multiply(exec, &job, packed);
}

static void clear_others(const gemm_args *args)
{
    const quern_tensor *c = &args->c, *live = &args->live;
    for (int64_t i = 0; is_present(live) && i < c->shape[0]; i++)
        if (((const int64_t *)live->data)[i * live->strides[0]] < 0)
            memset((char *)(uintptr_t)element(c, i, 0), 0, (size_t)c->shape[1] * quern_dtype_size(c->dtype));
}

quern_status cpu_gemm(const stage_exec *exec, const gemm_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    gemm_job job = carve(exec, args, false, &a);
    bool packed = false;
    if (job.in_place) {
        for (int32_t i = 0; i < exec->threads; i++) in_place_scratch_of(&job, i)->packed = false;
        parallel_for(exec, job.tasks, product_outputs, &job);
    } else {
        multiply(exec, &job, &packed);
    }
    clear_others(args);
    return QUERN_OK;
}
