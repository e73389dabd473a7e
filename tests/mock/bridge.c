/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * bridge.c - runs the calls of a test on the mock device, though its tensors stand in host memory. Linked
 * with --wrap of the functions below, through which every call and plan of an operation goes. A call's
 * tensors, status word and workspace move to blocks of the device at the same alignment, and the tensors say
 * QUERN_CUDA; after the call what has changed is copied back, but for the workspace. Ranges that overlap on
 * the host share a block. What lies between a strided tensor's elements travels too, so the tests' own guards
 * see stray writes. A call made twice is a replay.
 *
 * Faults of data. The device sets a bit where a call of the CPU fails: the test gets that failure from a call
 * with its own tensors, which must fail. Where the device sets no such bit, the CPU's checks must accept the
 * data.
 *
 * A call stays on the host where a tensor spans more bytes than a test has memory for.
 */
#include "device.h"

#include "cmocka_c11.h"
#include "core/op.h"

#include <quern/cuda.h>
#include <quern/plan.h>

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PAGE = 4096, POISON = 0xff, POISONED = 1 << 22 /* bytes at most */ };
static const size_t most_workspace = (size_t)1 << 32; /* tests also give sizes that no memory has */
static const int64_t most_reach = (int64_t)1 << 26;   /* elements */

/* Bytes of the host, and where they stand on the device. */
typedef struct range {
    unsigned char *low, *high;
    unsigned char *block;
} range;

typedef struct ranges {
    int count;
    range range[OP_TENSORS_MAX + 1];
} ranges;

/* The bytes of a view from the first to the last; false where it has none, or no shape that a call accepts,
 * or too many. */
static bool bytes_of(const quern_tensor *t, unsigned char *data, range *r)
{
    int64_t low = 0, high = 0, reach;
    const int64_t size = (int64_t)quern_dtype_size(t->dtype);
    if (data == NULL || size == 0 || t->ndim < 0 || t->ndim > QUERN_MAX_DIMS) return false;
    for (int32_t i = 0; i < t->ndim; i++) {
        if (t->shape[i] <= 0 || __builtin_mul_overflow(t->shape[i] - 1, t->strides[i], &reach)) return false;
        if (t->shape[i] == 1) continue;
        if (__builtin_add_overflow(reach < 0 ? low : high, reach, reach < 0 ? &low : &high)) return false;
    }
    if (high > most_reach || low < -most_reach) return false;
    *r = (range){data + low * size, data + (high + 1) * size, NULL};
    return true;
}

static bool has_elements(const quern_tensor *t)
{
    bool some = t->ndim >= 0 && t->ndim <= QUERN_MAX_DIMS;
    for (int32_t i = 0; some && i < t->ndim; i++) some = t->shape[i] > 0;
    return some;
}

/* Adds a range; those that it overlaps become one with it. */
static void add(ranges *all, range r)
{
    for (int i = 0; i < all->count;) {
        range *other = &all->range[i];
        if (other->high <= r.low || r.high <= other->low) {
            i++;
            continue;
        }
        if (other->low < r.low) r.low = other->low;
        if (other->high > r.high) r.high = other->high;
        *other = all->range[--all->count];
        i = 0;
    }
    all->range[all->count++] = r;
}

static void send(ranges *all)
{
    for (int i = 0; i < all->count; i++) {
        range *r = &all->range[i];
        const size_t bytes = (size_t)(r->high - r->low);
        r->block = mock_allocate(bytes, (uintptr_t)r->low % PAGE);
        mock_copy(r->block, r->low, bytes);
    }
}

/* Copies back, where results are `wanted`, and frees. What a file's mapping holds cannot be written, and does
 * not change. */
static void fetch(ranges *all, bool wanted)
{
    for (int i = 0; i < all->count; i++) {
        const range *r = &all->range[i];
        if (wanted) mock_fetch(r->low, r->block, (size_t)(r->high - r->low));
        mock_free(r->block);
    }
}

/* Where an address of the host stands on the device; elsewhere it stays as it is. */
static void *moved(const ranges *all, void *data)
{
    unsigned char *at = data;
    for (int i = 0; i < all->count; i++)
        if (at >= all->range[i].low && at < all->range[i].high)
            return all->range[i].block + (at - all->range[i].low);
    return data;
}

/* ---- structs of tensors ---- */

/* A family's struct whose tensors are on the device. */
typedef struct on_device {
    op_tensors own;
    quern_tensor view[OP_TENSORS_MAX];
} on_device;

/* Whether calls of the family take tensors of any device: the others' state is the host's. */
static bool is_public(const op_family *family)
{
    for (size_t i = 0; quern_families[i] != NULL; i++)
        if (quern_families[i] == family) return true;
    return false;
}

/* The views of a struct that the library can read; returns how many there are, 0 where it is none or a tensor
 * is not the host's. */
static int views_of(const op_family *family, const void *tensors, on_device *d)
{
    size_t size = 0;
    if (tensors != NULL) memcpy(&size, tensors, sizeof size);
    if (!is_public(family) || size < sizeof size || size > sizeof d->own) return 0;
    memset(&d->own, 0, sizeof d->own);
    memcpy(&d->own, tensors, size);
    const int given = (int)(size / sizeof(void *)) - 1,
              count = given < family->tensor_count ? given : family->tensor_count;
    for (int i = 0; i < count; i++)
        if (d->own.t[i] != NULL && d->own.t[i]->device != QUERN_CPU) return 0;
    return count;
}

/* Makes the struct's tensors the device's, at the addresses that `all` says. */
static void move_views(on_device *d, int count, const ranges *all)
{
    for (int i = 0; i < count; i++) {
        if (d->own.t[i] == NULL) continue;
        d->view[i] = *d->own.t[i];
        d->own.t[i] = &d->view[i];
        d->view[i].device = QUERN_CUDA;
        if (all != NULL) d->view[i].data = moved(all, d->view[i].data);
    }
}

/* ---- a run's memory ---- */

/* The status word and the workspace of a run. A run without a status word gets one, as some faults are looked
 * for only where there is one. */
typedef struct run_room {
    quern_exec exec;
    quern_tensor status;
    void *own_status, *workspace;
} run_room;

static bool has_status(const quern_exec *exec)
{
    return exec != NULL && exec->size >= offsetof(quern_exec, status) + sizeof exec->status &&
           exec->size <= sizeof *exec && exec->status != NULL;
}

static void add_status(ranges *all, const quern_exec *exec)
{
    range r;
    if (has_status(exec) && exec->status->device == QUERN_CPU &&
        bytes_of(exec->status, exec->status->data, &r))
        add(all, r);
}

/* What the run gets in place of the caller's exec. */
static const quern_exec *exec_of(run_room *room, const quern_exec *exec, const ranges *all)
{
    const quern_exec none = QUERN_EXEC_INIT;
    const int64_t one = 1;
    room->own_status = NULL;
    if (exec == NULL) exec = &none;
    if (exec->size < offsetof(quern_exec, status) + sizeof exec->status || exec->size > sizeof *exec)
        return exec;
    memset(&room->exec, 0, sizeof room->exec);
    memcpy(&room->exec, exec, exec->size);
    if (exec->status == NULL) {
        room->own_status = mock_allocate(sizeof(int32_t), 0);
        mock_fill(room->own_status, 0, sizeof(int32_t));
        room->status = quern_tensor_contiguous(room->own_status, QUERN_I32, 1, &one);
        room->status.device = QUERN_CUDA;
    } else {
        room->status = *exec->status;
    }
    room->exec.status = &room->status;
    if (room->status.device == QUERN_CPU) {
        room->status.device = QUERN_CUDA;
        room->status.data = moved(all, room->status.data);
    }
    return &room->exec;
}

static void free_room(run_room *room)
{
    mock_free(room->workspace);
    mock_free(room->own_status);
}

static void *workspace_of(run_room *room, void *workspace, size_t bytes)
{
    room->workspace = NULL;
    if (workspace == NULL || bytes == 0 || bytes > most_workspace) return workspace;
    room->workspace = mock_allocate(bytes, (uintptr_t)workspace % PAGE);
    mock_fill(room->workspace, POISON, bytes < POISONED ? bytes : POISONED);
    return room->workspace;
}

/* ---- faults of data ---- */

/* Whether a call of the CPU has no results and looks at nothing. */
static bool is_empty(const op_call *call)
{
    return call->has_empty_result && !call->writes && !call->varlen;
}

/* Fails the test where a call of the CPU refuses data of which the device said nothing. */
static void check_accepted(const op_call *call, void *const *data)
{
    if (is_empty(call)) return;
    if (call->family->check_data != NULL && call->family->check_data(call, data) != QUERN_OK)
        fail_msg("%s: the device sets no bit: %s", call->family->operations[call->operation],
                 quern_last_error(NULL));
}

/* What the host says of data that the device has set a bit for. */
static quern_status need_refused(const op_call *call, quern_status status, int bits)
{
    if (status == QUERN_OK && !is_empty(call))
        fail_msg("%s: the device sets bits 0x%x, the CPU refuses nothing",
                 call->family->operations[call->operation], (unsigned)bits);
    return status;
}

/* A program none of whose calls came to the device has tested nothing here. */
__attribute__((destructor)) static void need_stages(void)
{
    if (mock_stages_run() > 0) return;
    printf("no stage ran on the mock device\n");
    fflush(stdout);
    _exit(1);
}

/* ---- the library's functions ---- */

quern_status __wrap_op_workspace_of(const op_family *family, int32_t operation, quern_context *ctx,
                                    const void *params, const void *tensors, size_t *bytes);
quern_status __real_op_workspace_of(const op_family *family, int32_t operation, quern_context *ctx,
                                    const void *params, const void *tensors, size_t *bytes);
quern_status __wrap_op_run(const op_family *family, int32_t operation, quern_context *ctx,
                           const quern_exec *exec, const void *params, const void *tensors, void *workspace,
                           size_t bytes);
quern_status __real_op_run(const op_family *family, int32_t operation, quern_context *ctx,
                           const quern_exec *exec, const void *params, const void *tensors, void *workspace,
                           size_t bytes);
quern_status __wrap_op_prepare(op_call *call, const op_family *family, int32_t operation, quern_context *ctx,
                               const void *params, const void *tensors, op_looks looks);
quern_status __real_op_prepare(op_call *call, const op_family *family, int32_t operation, quern_context *ctx,
                               const void *params, const void *tensors, op_looks looks);
quern_status __wrap_quern_plan_describe(const quern_plan *plan, char *text, size_t bytes);
quern_status __real_quern_plan_describe(const quern_plan *plan, char *text, size_t bytes);
quern_status __wrap_op_run_at(const op_call *call, const quern_exec *exec, void *const *data, void *workspace,
                              size_t bytes);
quern_status __real_op_run_at(const op_call *call, const quern_exec *exec, void *const *data, void *workspace,
                              size_t bytes);

quern_status __wrap_op_workspace_of(const op_family *family, int32_t operation, quern_context *ctx,
                                    const void *params, const void *tensors, size_t *bytes)
{
    on_device d;
    const int count = views_of(family, tensors, &d);
    move_views(&d, count, NULL);
    return __real_op_workspace_of(family, operation, ctx, params, count > 0 ? &d.own : tensors, bytes);
}

/* Adds the ranges of the struct's tensors; false where one is too large to move. */
static bool add_views(ranges *all, const on_device *d, int count)
{
    for (int i = 0; i < count; i++) {
        const quern_tensor *t = d->own.t[i];
        range r;
        if (t == NULL || t->data == NULL) continue;
        if (bytes_of(t, t->data, &r)) add(all, r);
        else if (has_elements(t)) return false;
    }
    return true;
}

quern_status __wrap_op_run(const op_family *family, int32_t operation, quern_context *ctx,
                           const quern_exec *exec, const void *params, const void *tensors, void *workspace,
                           size_t bytes)
{
    on_device d;
    ranges all = {.count = 0};
    run_room room = {.workspace = NULL};
    void *data[OP_TENSORS_MAX] = {NULL};
    const int count = views_of(family, tensors, &d);
    if (count == 0 || !add_views(&all, &d, count))
        return __real_op_run(family, operation, ctx, exec, params, tensors, workspace, bytes);
    for (int i = 0; i < count; i++) data[i] = d.own.t[i] != NULL ? d.own.t[i]->data : NULL;
    add_status(&all, exec);
    send(&all);
    move_views(&d, count, &all);
    (void)mock_take_faults();
    quern_status status = __real_op_run(family, operation, ctx, exec_of(&room, exec, &all), params, &d.own,
                                        workspace_of(&room, workspace, bytes), bytes);
    const int bits = mock_take_faults();
    op_call *call = malloc(family->call_size);
    assert_non_null(call);
    bool known = status == QUERN_OK || bits != 0;
    if (known)
        known = __real_op_prepare(call, family, operation, ctx, params, &d.own, OP_AT_SHAPES) == QUERN_OK;
    if (known && bits == 0) check_accepted(call, data); /* of what was there before the run */
    fetch(&all, status == QUERN_OK && bits == 0);
    free_room(&room);
    if (bits != 0) {
        status = __real_op_run(family, operation, ctx, exec, params, tensors, workspace, bytes);
        if (known) status = need_refused(call, status, bits);
    }
    free(call);
    return status;
}

/* ---- plans ---- */

/* The views with which a plan was made, by its place in memory. */
typedef struct kept_plan {
    struct kept_plan *next;
    const op_call *call;
    op_call *host; /* the same plan of tensors in the host's memory; NULL where that is refused */
    bool there[OP_TENSORS_MAX];
    quern_tensor view[OP_TENSORS_MAX];
} kept_plan;
static kept_plan *plans;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static kept_plan *plan_of(const op_call *call)
{
    pthread_mutex_lock(&lock);
    kept_plan *p = plans;
    while (p != NULL && p->call != call) p = p->next;
    pthread_mutex_unlock(&lock);
    return p;
}

static kept_plan *keep_plan(const op_call *call, const on_device *d, int count)
{
    kept_plan *p = plan_of(call);
    if (p == NULL) {
        p = calloc(1, sizeof *p);
        if (p == NULL) fail_msg("the test is out of memory");
        p->call = call;
        pthread_mutex_lock(&lock);
        p->next = plans;
        plans = p;
        pthread_mutex_unlock(&lock);
    }
    for (int i = 0; i < OP_TENSORS_MAX; i++) p->there[i] = i < count && d->own.t[i] != NULL;
    memcpy(p->view, d->view, sizeof p->view);
    free(p->host);
    p->host = NULL;
    return p;
}

quern_status __wrap_op_prepare(op_call *call, const op_family *family, int32_t operation, quern_context *ctx,
                               const void *params, const void *tensors, op_looks looks)
{
    on_device d;
    memset(&d, 0, sizeof d);
    const int count = views_of(family, tensors, &d);
    move_views(&d, count, NULL);
    if (looks == OP_AT_ALIGNMENT && count > 0) {
        kept_plan *p = keep_plan(call, &d, count);
        op_call *host = malloc(family->call_size);
        if (host == NULL) fail_msg("the test is out of memory");
        if (__real_op_prepare(host, family, operation, ctx, params, tensors, looks) == QUERN_OK)
            p->host = host;
        else free(host);
    }
    return __real_op_prepare(call, family, operation, ctx, params, count > 0 ? &d.own : tensors, looks);
}

/* A plan says what the CPU's would do. */
quern_status __wrap_quern_plan_describe(const quern_plan *plan, char *text, size_t bytes)
{
    const kept_plan *p = plan_of((const op_call *)plan);
    return __real_quern_plan_describe(p != NULL && p->host != NULL ? (const quern_plan *)p->host : plan, text,
                                      bytes);
}

quern_status __wrap_op_run_at(const op_call *call, const quern_exec *exec, void *const *data, void *workspace,
                              size_t bytes)
{
    const kept_plan *p = plan_of(call);
    ranges all = {.count = 0};
    run_room room = {.workspace = NULL};
    range r;
    void *used[OP_TENSORS_MAX] = {NULL}, *there[OP_TENSORS_MAX] = {NULL};
    if (p == NULL || call->like.device != QUERN_CUDA || data == NULL)
        return __real_op_run_at(call, exec, data, workspace, bytes);
    for (int i = 0; i < call->given_count; i++)
        if (call->alignment[i] > 0) {
            used[i] = data[i];
            if (p->there[i] && bytes_of(&p->view[i], data[i], &r)) add(&all, r);
        }
    add_status(&all, exec);
    send(&all);
    for (int i = 0; i < call->given_count; i++) there[i] = moved(&all, used[i]);
    (void)mock_take_faults();
    const quern_status status = __real_op_run_at(call, exec_of(&room, exec, &all), there,
                                                 workspace_of(&room, workspace, bytes), bytes);
    const int bits = mock_take_faults();
    if (status == QUERN_OK && bits == 0) check_accepted(call, used); /* of what was there before the run */
    fetch(&all, status == QUERN_OK && bits == 0);
    free_room(&room);
    if (bits != 0) return need_refused(call, __real_op_run_at(p->host, exec, data, workspace, bytes), bits);
    return status;
}
