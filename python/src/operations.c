/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * operations.c - any operation of quern/op.h, by its number, on tensors of any framework that speaks DLPack.
 *
 *   version() -> str
 *   operations() -> str            what there is, a line a fact; quern/_operations.py reads it
 *   parameters(op, text) -> bytes  a params struct; text holds "name=value" lines, "preset=name" first
 *   roles(op, pass, params, present) -> bytes      a role for each tensor; present holds a byte for each
 *   expect(op, pass, params, asked, tensors) -> bytes     int64 role, dtype, ndim, shape[6] of each tensor
 *   expect_of(op, pass, params, asked, views) -> bytes    the same of tensors without data: views holds int64
 *                                                  dtype (-1: absent), device, ndim, shape[6] of each
 *   check(op, pass, params, tensors)               refuses what run() refuses of shapes and dtypes
 *   run(op, pass, params, tensors)
 *   call(named, params, tensors)   run() of a forward by those tensors alone that are there. named: the bytes
 *                                  of op and of each tensor's place among the operation's
 *
 * `tensors` are the remaining arguments; but for call() they are as many as the operation has tensors, None
 * where one is absent.
 * `asked` is bytes of four int64 extents.
 */
#include "ffi.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* An operation by its number. */
typedef struct subject {
    const quern_op *op;
    int32_t tensor_count;
    size_t params_size;
    quern_operation operation[2]; /* by pass; 0: there is none */
} subject;

enum { SUBJECTS_MAX = 128 };
static subject subjects[SUBJECTS_MAX];
static size_t subject_count;
static pthread_once_t subjects_once = PTHREAD_ONCE_INIT;

/* Finding an operation by its number goes through the families' lists: once is enough. */
static void list_subjects(void)
{
    quern_op_info info;
    const quern_op *op;
    for (size_t i = 0; (op = quern_op_at(i)) != NULL && subject_count < SUBJECTS_MAX; i++) {
        if (quern_op_get(op, &info) == QUERN_OK)
            subjects[subject_count++] =
                (subject){op, info.tensor_count, info.params_size, {info.forward, info.backward}};
    }
}

static int find_subject(int64_t number, subject *s)
{
    (void)pthread_once(&subjects_once, list_subjects);
    if (number < 0 || (size_t)number >= subject_count)
        return fail("TypeError", "an operation's number is accepted");
    *s = subjects[number];
    return 0;
}

/* What the functions are asked. */
typedef struct request {
    subject subject;
    quern_op_pass pass;
    params_room params;
    tensor_list list;
} request;

/* Reads the operation, the pass and the params. */
static int read_head(const TVMFFIAny *args, int32_t count, request *r)
{
    if (count < 3 || !is_int(&args[1]) || !read_params(&args[2], &r->params))
        return fail("TypeError", "an operation's number, a pass and params are accepted");
    r->pass = args[1].v_int64 != 0 ? QUERN_OP_BACKWARD : QUERN_OP_FORWARD;
    return find_subject(is_int(&args[0]) ? args[0].v_int64 : -1, &r->subject);
}

static int read_tensors(const TVMFFIAny *args, int32_t count, request *r)
{
    if (count != r->subject.tensor_count)
        return fail("TypeError", "as many tensors, or None, as the operation has are accepted");
    return take_tensors(args, count, &r->list);
}

/* ---- what there is ---- */

FUNCTION(version)
{
    (void)self, (void)args, (void)count;
    return give_text(quern_version(), strlen(quern_version()), result);
}

static void describe_operation(FILE *out, const quern_op *op)
{
    quern_op_info info;
    quern_op_tensor tensors[QUERN_OP_TENSORS_MAX];
    if (quern_op_get(op, &info) != QUERN_OK || quern_op_get_tensors(op, tensors) != QUERN_OK) return;
    fprintf(out, "op\t%s\t%d\t%d", info.name, info.backward != 0, info.varlen_by);
    for (size_t i = 0; i < sizeof info.asked / sizeof *info.asked && info.asked[i] != NULL; i++)
        fprintf(out, "\t%s", info.asked[i]);
    fputc('\n', out);
    for (int32_t i = 0; i < info.tensor_count; i++) {
        const quern_op_tensor *t = &tensors[i];
        fprintf(out, "tensor\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%s\t%s\n", t->field, t->name, t->dtype,
                t->gradient_of, t->input, t->trigger, t->result[0], t->result[1], t->updated, t->fixed,
                t->varlen);
    }
}

FUNCTION(operations)
{
    (void)self, (void)args, (void)count;
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    if (out == NULL) return fail("MemoryError", "no memory for the list of operations");
    const quern_op *op;
    for (size_t i = 0; (op = quern_op_at(i)) != NULL; i++) describe_operation(out, op);
    const bool whole = fclose(out) == 0;
    const int code =
        whole ? give_text(text, size, result) : fail("MemoryError", "no memory for the list of operations");
    free(text);
    return code;
}

/* ---- parameters ---- */

FUNCTION(parameters)
{
    (void)self;
    TVMFFIByteArray text;
    char lines[4096];
    params_room params = {{0}};
    subject s = {.op = NULL};
    if (count != 2 || !text_of(&args[1], &text) || text.size >= sizeof lines)
        return fail("TypeError", "an operation's number and name=value lines are accepted");
    if (find_subject(is_int(&args[0]) ? args[0].v_int64 : -1, &s) != 0) return -1;
    memcpy(lines, text.data, text.size);
    lines[text.size] = '\0';
    quern_status status = quern_op_defaults(s.op, &params);
    char *rest = NULL;
    for (char *line = strtok_r(lines, "\n", &rest); line != NULL && status == QUERN_OK;
         line = strtok_r(NULL, "\n", &rest)) {
        char *value = strchr(line, '=');
        if (value == NULL) continue;
        *value++ = '\0';
        status = strcmp(line, "preset") == 0 ? quern_op_preset(s.op, &params, value)
                                             : quern_op_set(s.op, &params, line, value);
    }
    if (status != QUERN_OK) return fail_as(status);
    return give_bytes(params.bytes, sizeof params.bytes, result);
}

/* ---- what a call expects ---- */

FUNCTION(roles)
{
    (void)self;
    request r;
    TVMFFIByteArray present;
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    char bytes[QUERN_OP_TENSORS_MAX];
    memset(&r.list, 0, sizeof r.list);
    if (read_head(args, count, &r) != 0) return -1;
    if (count != 4 || !text_of(&args[3], &present) || present.size != (size_t)r.subject.tensor_count)
        return fail("TypeError", "an operation and a byte for each of its tensors are accepted");
    r.list.tensors.size = sizeof r.list.tensors.size + present.size * sizeof(void *);
    for (size_t i = 0; i < present.size; i++)
        if (present.data[i] != 0) r.list.tensors.t[i] = &r.list.storage[i];
    const quern_status status = quern_op_roles(r.subject.op, r.pass, &r.params, &r.list.tensors, roles);
    if (status != QUERN_OK) return fail_as(status);
    for (size_t i = 0; i < present.size; i++) bytes[i] = (char)roles[i];
    return give_bytes(bytes, present.size, result);
}

enum { FIELDS = 3 + QUERN_MAX_DIMS };

static int give_expected(const request *r, const TVMFFIAny *extents, TVMFFIAny *result)
{
    TVMFFIByteArray asked_bytes;
    int64_t asked[4] = {0}, rows[QUERN_OP_TENSORS_MAX][FIELDS];
    quern_tensor expected[QUERN_OP_TENSORS_MAX];
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    const quern_op *op = r->subject.op;
    if (!text_of(extents, &asked_bytes) || asked_bytes.size > sizeof asked)
        return fail("TypeError", "asked: the bytes of at most four int64 are accepted");
    memcpy(asked, asked_bytes.data, asked_bytes.size);
    quern_status status = quern_op_roles(op, r->pass, &r->params, &r->list.tensors, roles);
    if (status == QUERN_OK)
        status = quern_op_expect(op, r->pass, &r->params, &r->list.tensors, asked, expected);
    if (status != QUERN_OK) return fail_as(status);
    for (int32_t i = 0; i < r->subject.tensor_count; i++) {
        rows[i][0] = roles[i];
        rows[i][1] = expected[i].dtype;
        rows[i][2] = expected[i].ndim;
        memcpy(&rows[i][3], expected[i].shape, sizeof expected[i].shape);
    }
    return give_bytes(rows, (size_t)r->subject.tensor_count * sizeof *rows, result);
}

FUNCTION(expect)
{
    (void)self;
    request r;
    if (read_head(args, count, &r) != 0) return -1;
    if (count < 4) return fail("TypeError", "extents and tensors are accepted");
    return read_tensors(&args[4], count - 4, &r) == 0 ? give_expected(&r, &args[3], result) : -1;
}

/* A contiguous tensor without data. */
static quern_tensor described(const int64_t row[FIELDS])
{
    quern_tensor t = {.dtype = (quern_dtype)row[0], .device = (quern_device)row[1], .ndim = (int32_t)row[2]};
    int64_t stride = 1;
    for (int32_t d = t.ndim - 1; d >= 0; d--) {
        t.shape[d] = row[3 + d];
        t.strides[d] = stride;
        stride *= t.shape[d] > 0 ? t.shape[d] : 1;
    }
    return t;
}

FUNCTION(expect_of)
{
    (void)self;
    request r;
    TVMFFIByteArray views;
    int64_t row[FIELDS];
    memset(&r.list.tensors, 0, sizeof r.list.tensors);
    if (read_head(args, count, &r) != 0) return -1;
    const size_t tensors = (size_t)r.subject.tensor_count;
    if (count != 5 || !text_of(&args[4], &views) || views.size != tensors * sizeof row)
        return fail("TypeError", "extents and the bytes of nine int64 for each tensor are accepted");
    r.list.tensors.size = sizeof r.list.tensors.size + tensors * sizeof(void *);
    for (size_t i = 0; i < tensors; i++) {
        memcpy(row, views.data + i * sizeof row, sizeof row);
        if (row[0] < 0 || row[2] < 0 || row[2] > QUERN_MAX_DIMS) continue;
        r.list.storage[i] = described(row);
        r.list.tensors.t[i] = &r.list.storage[i];
    }
    return give_expected(&r, &args[3], result);
}

/* ---- the call ---- */

typedef struct planned_call {
    const quern_plan *plan;
    void *data[QUERN_OP_TENSORS_MAX];
} planned_call;

static quern_status compute_planned(const void *what, const quern_exec *exec, void *workspace, size_t bytes)
{
    const planned_call *c = what;
    return quern_plan_run(c->plan, exec, c->data, workspace, bytes);
}

static int run_planned(const quern_plan *plan, const request *r)
{
    planned_call c;
    size_t bytes = 0;
    const quern_status status = quern_plan_workspace(plan, &bytes);
    if (status != QUERN_OK) return fail_as(status);
    c.plan = plan;
    for (int32_t i = 0; i < r->subject.tensor_count; i++)
        c.data[i] = r->list.tensors.t[i] != NULL ? r->list.tensors.t[i]->data : NULL;
    return with_memory(r->list.first, bytes, compute_planned, &c);
}

static quern_status compute(const void *what, const quern_exec *exec, void *workspace, size_t bytes)
{
    const request *r = what;
    return quern_op_run(need_context(), exec, r->subject.op, r->pass, &r->params, &r->list.tensors, workspace,
                        bytes);
}

static int read_request(const TVMFFIAny *args, int32_t count, request *r)
{
    return read_head(args, count, r) == 0 ? read_tensors(&args[3], count - 3, r) : -1;
}

FUNCTION(check)
{
    (void)self;
    request r;
    size_t bytes = 0;
    quern_context *context = need_context();
    if (context == NULL || read_request(args, count, &r) != 0) return -1;
    const quern_status status =
        quern_op_workspace(context, r.subject.op, r.pass, &r.params, &r.list.tensors, &bytes);
    return status == QUERN_OK ? give_nothing(result) : fail_as(status);
}

static int run_request(quern_context *context, const request *r)
{
    size_t bytes = 0;
    const plan_request asked = {context,
                                r->subject.operation[r->pass],
                                &r->params,
                                r->subject.params_size,
                                &r->list,
                                r->subject.tensor_count,
                                stream_of(r->list.first)};
    const quern_plan *plan = plan_of(&asked);
    if (plan != NULL) return run_planned(plan, r);
    const quern_status status =
        quern_op_workspace(context, r->subject.op, r->pass, &r->params, &r->list.tensors, &bytes);
    if (status != QUERN_OK) return fail_as(status);
    return with_memory(r->list.first, bytes, compute, r);
}

FUNCTION(run)
{
    (void)self;
    request r;
    quern_context *context = need_context();
    if (context == NULL || read_request(args, count, &r) != 0) return -1;
    (void)give_nothing(result);
    return run_request(context, &r);
}

/* Reads the operation and the places of the tensors that follow, and takes these. */
static int read_call(const TVMFFIAny *args, int32_t count, request *r)
{
    TVMFFIByteArray named;
    if (count < 2 || !text_of(&args[0], &named) || named.size != (size_t)count - 1 ||
        !read_params(&args[1], &r->params))
        return fail("TypeError", "an operation's number, a place for each tensor, and params are accepted");
    const uint8_t *bytes = (const uint8_t *)named.data;
    r->pass = QUERN_OP_FORWARD;
    return find_subject(bytes[0], &r->subject) == 0
               ? take_placed(&args[2], bytes + 1, count - 2, r->subject.tensor_count, &r->list)
               : -1;
}

FUNCTION(call)
{
    (void)self;
    request r;
    quern_context *context = need_context();
    if (context == NULL || read_call(args, count, &r) != 0) return -1;
    (void)give_nothing(result);
    return run_request(context, &r);
}
