/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * pool.c - plans, on a program's own threads. An engine that has a thread pool hands it to the library as an
 * executor; a plan made once then runs for every request with other pointers. The numbers are
 * those of the library's own threads.
 *
 *   cc pool.c $(pkg-config --cflags --libs quern) -pthread -o pool
 */
#define _POSIX_C_SOURCE 200809L
#include <quern/attention.h>
#include <quern/plan.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORKERS = 3, REQUESTS = 4, N = 300, H = 4, HKV = 2, D = 64 };
enum { Q_SIZE = N * H * D, KV_SIZE = N * HKV * D };

/* A pool: workers wait at `start` for a loop, take its indices one by one, and meet the caller at `end`. */
typedef struct pool {
    pthread_barrier_t start, end;
    pthread_t workers[WORKERS];
    void (*body)(void *arg, int64_t index, int32_t thread); /* NULL: the workers end */
    void *arg;
    int64_t count;
    atomic_llong next;
    atomic_int names;
} pool;

static void take_indices(pool *p, int32_t thread)
{
    for (int64_t i; (i = atomic_fetch_add(&p->next, 1)) < p->count;) p->body(p->arg, i, thread);
}

static void *work(void *arg)
{
    pool *p = arg;
    const int32_t thread = 1 + atomic_fetch_add(&p->names, 1); /* 0 calls the loop */
    while (pthread_barrier_wait(&p->start), p->body != NULL) {
        take_indices(p, thread);
        pthread_barrier_wait(&p->end);
    }
    return NULL;
}

/* The executor, as quern_context_params.parallel_for wants it. `threads` is what the context was told. */
static void parallel_for(void *of, int32_t threads, int64_t n, void (*body)(void *, int64_t, int32_t),
                         void *arg)
{
    pool *p = of;
    (void)threads;
    p->body = body, p->arg = arg, p->count = n;
    atomic_store(&p->next, 0);
    pthread_barrier_wait(&p->start);
    take_indices(p, 0);
    pthread_barrier_wait(&p->end);
}

static void need(quern_status status)
{
    if (status == QUERN_OK) return;
    fprintf(stderr, "%s\n", quern_last_error(NULL));
    exit(1);
}

/* Attends all requests by one plan of this context. */
static void attend(const quern_context_params *how, float *q, float *kv, float *o)
{
    quern_context *ctx;
    quern_plan *plan;
    size_t bytes;
    need(quern_context_create(how, &ctx));
    const quern_tensor tq = quern_tensor_contiguous(q, QUERN_F32, 4, (int64_t[]){1, N, H, D});
    const quern_tensor tk = quern_tensor_contiguous(kv, QUERN_F32, 4, (int64_t[]){1, N, HKV, D});
    const quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    quern_attention_tensors t = QUERN_ATTENTION_TENSORS_INIT;
    t.q = &tq, t.k = &tk, t.v = &tk, t.o = &tq;
    need(quern_plan_create(ctx, QUERN_OP_ATTENTION_FORWARD, &params, &t, &plan));
    need(quern_plan_workspace(plan, &bytes));
    void *workspace = malloc(bytes);
    for (int r = 0; r < REQUESTS; r++) {
        /* The addresses in the order of the struct's pointers: q, k, v, two offsets, o. */
        float *keys = kv + r * KV_SIZE; /* and values */
        void *data[sizeof t / sizeof(void *)] = {q + r * Q_SIZE, keys, keys, NULL, NULL, o + r * Q_SIZE};
        need(quern_plan_run(plan, NULL, data, workspace, bytes));
    }
    free(workspace);
    quern_plan_destroy(plan);
    quern_context_destroy(ctx);
}

int main(void)
{
    enum { ALL = REQUESTS * Q_SIZE };
    static float q[ALL], kv[REQUESTS * KV_SIZE], own[ALL], theirs[ALL];
    static pool p;
    pthread_barrier_init(&p.start, NULL, WORKERS + 1);
    pthread_barrier_init(&p.end, NULL, WORKERS + 1);
    for (int i = 0; i < ALL; i++) q[i] = 2 * (float)rand() / (float)RAND_MAX - 1;
    memcpy(kv, q, sizeof kv);
    for (int i = 0; i < WORKERS; i++) pthread_create(&p.workers[i], NULL, work, &p);
    quern_context_params how = QUERN_CONTEXT_PARAMS_INIT;
    attend(&how, q, kv, theirs);
    how.threads = WORKERS + 1, how.parallel_for = parallel_for, how.parallel_for_arg = &p;
    attend(&how, q, kv, own);
    p.body = NULL;
    pthread_barrier_wait(&p.start);
    for (int i = 0; i < WORKERS; i++) pthread_join(p.workers[i], NULL);
    int other = 0;
    for (int i = 0; i < ALL; i++) other += own[i] != theirs[i];
    printf("%d requests on %d threads: %d other numbers\n", REQUESTS, WORKERS + 1, other);
    return other != 0;
}
