/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_index_loss.c - the index_loss stage. Every list of a sequence is cut into chunks of queries by the
 * shape alone. A task owns a chunk: it inverts the chunk's lists and walks the blocks that they name twice,
 * upwards, each block with the queries that name it. The first walk gives the student's lse (and the
 * teacher's, where it is not handed in), the second the loss, d_q_index and d_keys_index, to which tasks add
 * in turns (turns.h).
 *
 * A block's keys are read once a chunk. A chunk has some 100 queries a block of the longest sequence, so that
 * adding d_keys_index to memory takes a twentieth of the time.
 */
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/kernels/attend/nonfinite.h"
#include "cpu/index_loss/index_loss.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"
#include "cpu/levels.h"

#include <math.h>
#include <string.h>

enum {
    QUERIES_A_BLOCK = 96, /* of a chunk */
    CHUNK_LEAST = 256,
    CHUNK_MOST = 1024,
    CHUNK_BYTES = 8 << 20, /* of its rows of q, unless that were fewer queries than CHUNK_LEAST / 8 */
    COUNT_QUERIES = 256    /* of a piece that counts rows */
};

typedef struct loss_thread {
    loss_chunk chunk;
    loss_tile tile;
    attend_lists lists;
} loss_thread;

typedef struct loss_job {
    loss_plan plan;
    int64_t chunk_tokens, slots; /* slots: chunks of one list, over all sequences */
    int64_t turns;               /* lists that share key_index */
    turn *turn_of;               /* [key heads][slots * turns] */
    turn *passed;                /* [key heads]: all tasks before this one have finished */
    int64_t count_pieces, *rows; /* of a sequence; [sequences * count_pieces]: rows with a token */
    int32_t *status;             /* the call's status word, or NULL */
    double *losses;              /* [Hs][rows of a sequence's view, over the batch] */
    loss_thread *threads;
} loss_job;

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void plan_carve(const stage_exec *exec, const index_loss_args *args, arena *a, loss_plan *p)
{
    p->args = args;
    p->teacher_args = (attend_args){.mask = ATTEND_RANGE,
                                    .seqs = args->seqs,
                                    .causal = true,
                                    .scale = args->scale,
                                    .query_offset = args->query_offset,
                                    .block_size = args->block_size,
                                    .tile = 1,
                                    .scope = LIST_BY_GROUP,
                                    .list = args->list,
                                    .q = args->q,
                                    .k = args->keys,
                                    .v = args->keys};
    p->student_args = p->teacher_args;
    p->student_args.list = (quern_tensor){.ndim = 0};
    p->student_args.scale = args->scale_index;
    p->student_args.q = args->q_index;
    p->student_args.k = p->student_args.v = args->keys_index;
    p->teacher = attend_plan_of(exec, &p->teacher_args);
    p->student = attend_plan_of(exec, &p->student_args);
    p->kernels = cpu_kernels_for(exec->cpu_level)->nsa;
    p->lists = p->teacher.units; /* 0 where there are no queries */
    p->group = p->teacher.group;
    p->shared = args->keys_index.shape[2] != args->q_index.shape[2];
    p->ld = (round_up(p->student.dim_k, 16) / 16 | 1) * 16;
    p->key_panel = attend_row_panel(&p->student, p->student.dim_k);
    const attend_plan *s = &p->student;
    const size_t teacher_rows = (size_t)(p->teacher.kv_heads * p->teacher.packed_rows),
                 rows = (size_t)(s->kv_heads * s->packed_rows);
    p->keys = arena_take(a, teacher_rows * (size_t)p->teacher.key_words * 4);
    p->index_keys = arena_take(a, rows * (size_t)s->key_words * 4);
    p->index_rows =
        arena_take(a, rows * (size_t)(attend_row_panels(s, s->dim_k) * p->key_panel) * (s->bf16 ? 2 : 4));
    p->nonfinite = arena_take(a, rows / KEY_ALIGN);
    p->d_keys = gradient_carve(&args->d_keys_index, a);
}

static void chunk_carve(const loss_plan *p, int64_t tokens, arena *a, loss_chunk *c)
{
    const size_t n = (size_t)tokens, heads = n * (size_t)p->group;
    memset(c, 0, sizeof *c);
    c->teacher.q = arena_take(a, heads * (size_t)p->teacher.key_words * 4);
    c->q_index = arena_take(a, n * (size_t)p->student.key_words * 4);
    c->nonfinite = arena_take(a, n);
    c->seen = arena_take(a, heads * sizeof *c->seen);
    float **of_tokens[] = {&c->max, &c->sum, &c->lse};
    float **of_heads[] = {&c->teacher_max, &c->teacher_sum, &c->teacher_lse2};
    for (int i = 0; i < 3; i++) *of_tokens[i] = arena_take(a, n * sizeof(float));
    for (int i = 0; i < 3; i++) *of_heads[i] = arena_take(a, heads * sizeof(float));
    c->loss = arena_take(a, n * sizeof *c->loss);
    c->total = arena_take(a, n * sizeof *c->total);
    c->count = arena_take(a, n * sizeof *c->count);
    c->d_q = arena_take(a, n * (size_t)p->ld * sizeof *c->d_q);
}

static int64_t tokens_of_chunk(const loss_plan *p)
{
    const index_loss_args *args = p->args;
    const int64_t k = args->list.shape[3] > 0 ? args->list.shape[3] : 1;
    int64_t n = QUERIES_A_BLOCK * (args->seqs.n_kv / args->block_size + 1) / k;
    n = n < CHUNK_LEAST ? CHUNK_LEAST : n > CHUNK_MOST ? CHUNK_MOST : n;
    while (n > CHUNK_LEAST / 8 && n * p->group * p->teacher.key_words * 4 > CHUNK_BYTES) n /= 2;
    return n;
}

/* The job is not moved afterwards: its plan points into itself. */
static void carve(const stage_exec *exec, const index_loss_args *args, arena *a, loss_job *job)
{
    const int64_t batch = args->seqs.batch, n = args->seqs.n_q;
    memset(job, 0, sizeof *job);
    job->status = exec->status;
    loss_plan *p = &job->plan;
    plan_carve(exec, args, a, p);
    job->chunk_tokens = tokens_of_chunk(p);
    job->slots =
        args->seqs.cu_q.ndim > 0 ? n / job->chunk_tokens + batch : batch * mask_blocks(n, job->chunk_tokens);
    job->turns = p->shared ? p->lists : 1;
    job->turn_of = arena_take(a, sizeof(turn) * (size_t)(p->lists * job->slots));
    job->passed = arena_take(a, sizeof(turn) * (size_t)p->lists);
    job->count_pieces = mask_blocks(n, COUNT_QUERIES);
    job->rows = arena_take(a, sizeof *job->rows * (size_t)(batch * job->count_pieces));
    job->losses = arena_take(a, sizeof *job->losses * (size_t)(p->lists * args->q.shape[0] * n));
    job->threads = arena_take(a, sizeof *job->threads * (size_t)exec->threads);
    for (int32_t i = 0; i < exec->threads; i++) {
        loss_thread t;
        chunk_carve(p, job->chunk_tokens, a, &t.chunk);
        loss_tile_carve(p, a, &t.tile);
        attend_lists_carve(&p->teacher, job->chunk_tokens * p->group, a, &t.lists);
        if (a->base != NULL) job->threads[i] = t;
    }
}

/* How many of a piece's queries have a token in some list; flags entries out of range. */
static void count_rows(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    loss_job *job = arg;
    const loss_plan *p = &job->plan;
    const quern_tensor *list = &p->args->list;
    const attend_sequence seq = attend_sequence_at(&p->teacher, index / job->count_pieces);
    const int64_t first = index % job->count_pieces * COUNT_QUERIES,
                  end = least(first + COUNT_QUERIES, seq.nq), size = p->args->block_size,
                  blocks = mask_blocks(seq.nk, size);
    int64_t rows = 0;
    bool bad = false;
    for (int64_t t = first; t < end; t++) {
        int64_t lo, hi;
        bool any = false;
        attend_interval(&p->teacher_args, &seq, t, &lo, &hi);
        for (int64_t j = 0; j < p->lists; j++) {
            const int32_t *x = row_at(list, seq.view_b, j, seq.list_row0 + t);
            for (int64_t e = 0; e < list->shape[3]; e++) {
                bad |= x[e] < -1 || x[e] >= blocks;
                any |= x[e] >= 0 && x[e] < blocks && x[e] * size < hi;
            }
        }
        rows += any;
    }
    job->rows[index] = rows;
    if (bad && job->status != NULL) __atomic_fetch_or(job->status, QUERN_STATUS_BAD_INDEX, __ATOMIC_RELAXED);
}

static double *loss_of(const loss_job *job, const loss_chunk *c, int64_t token)
{
    const int64_t n = job->plan.args->seqs.n_q, batches = job->plan.args->q.shape[0];
    return job->losses + (c->list * batches + c->seq.view_b) * n + c->seq.q0 + token;
}

static bool lse_is_given(const loss_plan *p, float lse)
{
    return is_present(&p->args->lse) && !lse_is_coarse(lse, p->args->q.dtype);
}

static void load(const loss_plan *p, loss_chunk *c)
{
    const attend_plan *s = &p->student;
    const index_loss_args *args = p->args;
    const quern_dtype dtype = s->bf16 ? QUERN_BF16 : QUERN_F32;
    const row_source rows = rows_at(&args->q_index, c->seq.view_b, c->seq.q0 + c->token0, c->list, c->tokens);
    if (s->bf16) s->kernels->pack_rows_bf16(&rows, (uint16_t *)c->q_index, 2 * s->key_words);
    else s->kernels->pack_rows_f32(&rows, 1.0f, (float *)c->q_index, s->key_words);
    c->weighs_teacher = false;
    for (int64_t t = 0; t < c->tokens; t++) {
        int64_t lo, hi;
        attend_interval(&p->teacher_args, &c->seq, c->token0 + t, &lo, &hi);
        c->nonfinite[t] = any_nonfinite(c->q_index + t * s->key_words, dtype, s->dim_k);
        c->max[t] = -INFINITY;
        c->sum[t] = 0;
        c->loss[t] = c->total[t] = 0;
        c->count[t] = 0;
        for (int64_t h = 0; h < p->group; h++) {
            const int64_t at = t * p->group + h;
            const float *lse =
                is_present(&args->lse)
                    ? row_at(&args->lse, c->seq.view_b, c->list * p->group + h, c->seq.q0 + c->token0 + t)
                    : NULL;
            c->seen[at] = (int32_t)hi;
            c->teacher_lse2[at] = lse != NULL ? *lse : INFINITY;
            c->weighs_teacher |= !lse_is_given(p, c->teacher_lse2[at]);
            c->teacher_max[at] = -INFINITY;
            c->teacher_sum[at] = 0;
        }
    }
    memset(c->d_q, 0, (size_t)(c->tokens * p->ld) * sizeof *c->d_q);
}

/* After the first walk: what `divergence` and `add_probabilities` take. One key has T = P = 1, whatever their
 * rounding: its query is left out of the second walk. */
static void settle(const loss_plan *p, const loss_chunk *c)
{
    const double ln2 = 0.69314718055994530942;
    for (int64_t t = 0; t < c->tokens; t++) {
        const double lse = (double)c->max[t] * (double)p->args->scale_index + log((double)c->sum[t]);
        bool finite = isfinite(lse);
        c->lse[t] = (float)lse;
        if (finite) c->loss[t] = lse - (double)c->lse[t]; /* what rounding adds to every log P */
        for (int64_t at = t * p->group; at < (t + 1) * p->group; at++) {
            const double given = (double)c->teacher_lse2[at] / ln2,
                         own = (double)c->teacher_max[at] * (double)p->teacher.scale2 +
                               log2((double)c->teacher_sum[at]);
            c->teacher_lse2[at] = (float)(lse_is_given(p, c->teacher_lse2[at]) ? given : own);
            finite &= (bool)isfinite(c->teacher_lse2[at]);
        }
        if (c->count[t] == 1 && finite) c->count[t] = 0;
    }
}

/* T sums to 1, whatever its rounding: the loss of T / sum T. */
static double loss_at(const loss_chunk *c, int64_t t)
{
    return c->count[t] == 0 ? 0.0 : c->loss[t] / c->total[t] - log(c->total[t]);
}

/* One task while it runs. */
typedef struct loss_task {
    loss_job *job;
    loss_thread *own;
    turn *turns;
    int64_t first, self; /* indices into turns: the first task of this sequence and key head, and this task */
    bool weighs;         /* the first walk */
} loss_task;

/* Waits for the task's turn and adds the tile's d_keys to memory. */
static void end_keys(const loss_task *t)
{
    const loss_plan *p = &t->job->plan;
    const loss_tile *tile = &t->own->tile;
    const loss_chunk *c = &t->own->chunk;
    const int64_t head = p->shared ? 0 : c->list;
    if (t->weighs || p->d_keys.data == NULL || tile->fresh) return;
    turn_wait(t->turns, &t->job->passed[head], t->first, t->self, tile->key1);
    for (int64_t key = tile->key0; key < tile->key1; key++)
        p->kernels->rows->add_scaled(gradient_at(&p->d_keys, c->seq.view_b, c->seq.k0 + key, head),
                                     tile->d_keys + (key - tile->base) * p->ld, p->gradient_scale,
                                     p->student.dim_k);
    turn_pass(&t->turns[t->self], tile->key1);
}

static void walk(const loss_task *t)
{
    const loss_plan *p = &t->job->plan;
    const loss_chunk *c = &t->own->chunk;
    loss_tile *tile = &t->own->tile;
    const int32_t *start = t->own->lists.start, *entries = t->own->lists.entries;
    const int64_t size = p->args->block_size;
    for (int64_t x = 0; x < mask_blocks(c->seq.nk, size); x++) {
        const int64_t end = least((x + 1) * size, c->seq.nk);
        for (int64_t key = x * size; start[x] < start[x + 1] && key < end; key = tile->key1) {
            tile->key0 = key;
            tile->base = key & ~(int64_t)15;
            tile->key1 = least(tile->base + LOSS_KEYS, end);
            tile->columns = (int32_t)((tile->key1 - tile->base + 15) & ~(int64_t)15);
            tile->fresh = true;
            for (int32_t e = start[x]; e < start[x + 1];) {
                for (tile->tokens = 0; e < start[x + 1] && tile->tokens < LOSS_TOKENS; e++)
                    if (c->seen[entries[e] * p->group] > key && (t->weighs || c->count[entries[e]] > 0))
                        tile->token[tile->tokens++] = entries[e];
                if (tile->tokens == 0) break;
                if (t->weighs) loss_tile_weigh(p, c, tile);
                else loss_tile_run(p, c, tile);
            }
            end_keys(t);
        }
    }
}

static void store(const loss_job *job, const loss_chunk *c)
{
    const loss_plan *p = &job->plan;
    const index_loss_args *args = p->args;
    for (int64_t t = 0; t < c->tokens; t++) {
        const int64_t token = c->token0 + t;
        *loss_of(job, c, token) = loss_at(c, t);
        if (is_present(&args->row_loss))
            *(float *)row_at(&args->row_loss, c->seq.view_b, c->list, c->seq.list_row0 + token) =
                (float)loss_at(c, t);
        if (!is_present(&args->d_q_index)) continue;
        float *d_q = c->d_q + t * p->ld;
        p->student.kernels->scale_row(d_q, p->gradient_scale, p->student.dim_k);
        p->kernels->rows->convert(d_q, QUERN_F32,
                                  row_at(&args->d_q_index, c->seq.view_b, c->seq.q0 + token, c->list),
                                  args->d_q_index.dtype, p->student.dim_k);
    }
}

/* The first slot of sequence b. */
static int64_t slot_of(const loss_job *job, int64_t b)
{
    const stage_seqs *seqs = &job->plan.args->seqs;
    if (seqs->cu_q.data == NULL) return b * (job->slots / seqs->batch);
    return ((const int32_t *)seqs->cu_q.data)[b] / job->chunk_tokens + b;
}

static void run_task(void *arg, int64_t index, int32_t thread)
{
    loss_job *job = arg;
    const loss_plan *p = &job->plan;
    const int64_t slot = job->slots - 1 - index / p->lists;
    loss_task t = {.job = job, .own = &job->threads[thread]};
    loss_chunk *c = &t.own->chunk;
    int64_t low = 0, high = p->args->seqs.batch; /* the sequence: slot_of(low) <= slot < slot_of(high) */
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (slot_of(job, middle) <= slot) low = middle;
        else high = middle;
    }
    c->seq = attend_sequence_at(&p->teacher, low);
    c->list = (int32_t)(index % p->lists);
    t.turns = job->turn_of + (p->shared ? 0 : c->list) * job->slots * job->turns;
    t.self = (job->slots - 1 - slot) * job->turns + c->list % job->turns;
    const int64_t next = low + 1 < p->args->seqs.batch ? slot_of(job, low + 1) : job->slots;
    t.first = (job->slots - next) * job->turns;
    c->token0 = (slot - slot_of(job, low)) * job->chunk_tokens;
    c->tokens = least(c->seq.nq - c->token0, job->chunk_tokens);
    if (c->tokens > 0) {
        const int64_t row0 = c->token0 * p->group, rows = c->tokens * p->group;
        attend_chunk_begin(&p->teacher, low, c->list, row0, (int32_t)rows, &c->teacher);
        load(p, c);
        const bool listed = attend_list_length(&p->teacher) > 0;
        if (listed)
            attend_lists_invert(&p->teacher, &c->seq, c->list, row0, (int32_t)rows, c->seen, &t.own->lists);
        for (int pass = 0; pass < 2 && listed; pass++) {
            t.weighs = pass == 0;
            walk(&t);
            if (t.weighs) settle(p, c);
        }
        store(job, c);
    }
    turn_pass(&t.turns[t.self], TURN_DONE);
}

static void sum_losses(const loss_job *job, int64_t rows)
{
    const index_loss_args *args = job->plan.args;
    const int64_t n = args->seqs.n_q, batches = args->q.shape[0], lists = job->plan.lists;
    double sum = 0;
    for (int64_t i = 0; i < lists * batches; i++)
        for (int64_t t = 0; t < token_rows(&args->seqs); t++) sum += job->losses[i * n + t];
    const double parts = (double)(lists > 0 ? lists : 1) * (double)(rows > 0 ? rows : 1);
    if (is_present(&args->loss)) *(float *)args->loss.data = (float)((double)args->lambda * sum / parts);
}

/* Rows of a varlen batch past its last sequence. */
static void fill_unused(const index_loss_args *args)
{
    const int64_t first = token_rows(&args->seqs);
    if (is_present(&args->d_q_index)) zero_rows(&args->d_q_index, first);
    if (!is_present(&args->row_loss)) return;
    for (int64_t r = first; r < args->row_loss.shape[2]; r++)
        for (int64_t j = 0; j < args->row_loss.shape[1]; j++)
            *(float *)row_at(&args->row_loss, 0, j, r) = 0.0f;
}

void cpu_index_loss_kernel(const stage_exec *exec, const index_loss_args *args, char text[STAGE_NAME_BYTES])
{
    arena a = {NULL, 0};
    loss_job job;
    carve(exec, args, &a, &job);
    cpu_name_kernels(text, "index_loss", job.plan.teacher.bf16, job.plan.teacher.kernels->level);
}

size_t cpu_index_loss_workspace(const stage_exec *exec, const index_loss_args *args)
{
    arena a = {NULL, 0};
    loss_job job;
    carve(exec, args, &a, &job);
    return arena_size(&a);
}

quern_status cpu_index_loss(const stage_exec *exec, const index_loss_args *args, void *workspace)
{
    const quern_status status = check_seqs(exec, &args->seqs);
    if (status != QUERN_OK) return status;
    arena a = arena_on(workspace);
    loss_job job;
    carve(exec, args, &a, &job);
    loss_plan *p = &job.plan;
    int64_t rows = 0;
    parallel_for(exec, args->seqs.batch * job.count_pieces, count_rows, &job);
    for (int64_t i = 0; i < args->seqs.batch * job.count_pieces; i++) rows += job.rows[i];
    p->gradient_scale = (float)((double)args->lambda * (double)args->scale_index /
                                ((double)(p->lists > 0 ? p->lists : 1) * (double)(rows > 0 ? rows : 1)));
    gradient_clear(exec, &args->d_keys_index, &p->d_keys);
    const attend_pack_target teacher = {&args->keys, p->keys, NULL, NULL, 0},
                             student = {&args->keys_index, p->index_keys, p->index_rows, p->nonfinite,
                                        p->key_panel};
    attend_pack_all(exec, &p->teacher, &teacher, 1);
    attend_pack_all(exec, &p->student, &student, 1);
    for (int64_t i = 0; i < p->lists * job.slots; i++) atomic_init(&job.turn_of[i], 0);
    for (int64_t i = 0; i < p->lists; i++) atomic_init(&job.passed[i], 0);
    parallel_for(exec, job.slots * p->lists, run_task, &job);
    gradient_write(exec, &args->d_keys_index, &p->d_keys, p->kernels->rows);
    sum_losses(&job, rows);
    if (args->seqs.cu_q.data != NULL) fill_unused(args);
    return QUERN_OK;
}
