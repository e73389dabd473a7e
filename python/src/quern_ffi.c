/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * quern_ffi.c - the C API as TVM-FFI functions: any operation of quern/op.h, or of direct.h, by its number,
 * on tensors of any framework that speaks DLPack. It uses TVM-FFI's C ABI alone, so that one build serves
 * every Python and every framework.
 *
 *   version() -> str
 *   operations() -> str            what there is, a line a fact; quern/_operations.py reads it
 *   parameters(op, preset, text) -> bytes          a params struct; text holds "name=value" lines
 *   settings(op, params) -> str                    all of its parameters as such lines
 *   expect(op, pass, params, asked, tensors) -> bytes     int64 role, dtype, ndim, shape[6] of each tensor
 *   run(op, pass, params, tensors)
 *
 * `tensors` are the remaining arguments, as many as the operation has tensors, None where one is absent.
 * `asked` is bytes of four int64 extents. Errors are those of the library: its sentence as ValueError,
 * NotImplementedError, MemoryError or RuntimeError.
 */
#include "direct.h"

#include <quern/dlpack.h>
#include <quern/op.h>

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <pthread.h>
#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static int fail(const char *kind, const char *sentence)
{
    TVMFFIErrorSetRaisedFromCStr(kind, sentence);
    return -1;
}

static int fail_as(quern_status status)
{
    const char *kind = "RuntimeError";
    if (status == QUERN_ERR_INVALID_ARGUMENT) kind = "ValueError";
    else if (status == QUERN_ERR_UNSUPPORTED || status == QUERN_ERR_DEVICE) kind = "NotImplementedError";
    else if (status == QUERN_ERR_OUT_OF_MEMORY) kind = "MemoryError";
    return fail(kind, quern_last_error(NULL));
}

/* ---- arguments and results ---- */

static const TVMFFIByteArray *cell(const TVMFFIAny *a)
{
    return (const TVMFFIByteArray *)((const char *)a->v_obj + sizeof(TVMFFIObject));
}

/* The bytes of a str or bytes argument, where it is one. */
static bool text_of(const TVMFFIAny *a, TVMFFIByteArray *text)
{
    switch (a->type_index) {
    case kTVMFFISmallStr:
    case kTVMFFISmallBytes: *text = (TVMFFIByteArray){a->v_bytes, a->small_str_len}; return true;
    case kTVMFFIRawStr: *text = (TVMFFIByteArray){a->v_c_str, strlen(a->v_c_str)}; return true;
    case kTVMFFIByteArrayPtr: *text = *(const TVMFFIByteArray *)a->v_ptr; return true;
    case kTVMFFIStr:
    case kTVMFFIBytes: *text = *cell(a); return true;
    default: return false;
    }
}

static int give_text(const char *data, size_t size, TVMFFIAny *result)
{
    const TVMFFIByteArray text = {data, size};
    return TVMFFIStringFromByteArray(&text, result);
}

static int give_bytes(const void *data, size_t size, TVMFFIAny *result)
{
    const TVMFFIByteArray bytes = {data, size};
    return TVMFFIBytesFromByteArray(&bytes, result);
}

/* The alignment of a params struct, which bytes of Python lack. */
typedef struct params_room {
    alignas(16) char bytes[QUERN_OP_PARAMS_BYTES];
} params_room;

/* An operation by its number: those of quern/op.h come first. */
typedef struct subject {
    const quern_op *op;      /* or */
    const direct_op *direct; /* one without a description */
    int32_t tensor_count;
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
    const direct_op *direct;
    for (size_t i = 0; (op = quern_op_at(i)) != NULL && subject_count < SUBJECTS_MAX; i++) {
        const int32_t count = quern_op_get(op, &info) == QUERN_OK ? info.tensor_count : 0;
        subjects[subject_count++] = (subject){op, NULL, count};
    }
    for (size_t i = 0; (direct = direct_at(i)) != NULL && subject_count < SUBJECTS_MAX; i++)
        subjects[subject_count++] = (subject){NULL, direct, direct_tensor_count(direct)};
}

static int find_subject(const TVMFFIAny *number, subject *s)
{
    (void)pthread_once(&subjects_once, list_subjects);
    if (number->type_index != kTVMFFIInt || number->v_int64 < 0 || (size_t)number->v_int64 >= subject_count)
        return fail("TypeError", "an operation's number is accepted");
    *s = subjects[number->v_int64];
    return 0;
}

/* What `expect` and `run` are asked. */
typedef struct request {
    subject subject;
    quern_op_pass pass;
    params_room params;
    quern_tensor storage[QUERN_OP_TENSORS_MAX];
    struct {
        size_t size;
        const quern_tensor *t[QUERN_OP_TENSORS_MAX];
    } tensors;
    const quern_tensor *first; /* the first tensor with a device of its own; NULL: there is none */
} request;

static int take_tensor(request *r, int32_t i, const TVMFFIAny *a)
{
    const DLTensor *t;
    if (a->type_index == kTVMFFINone) return 0;
    if (a->type_index == kTVMFFIDLTensorPtr) t = a->v_ptr;
    else if (a->type_index == kTVMFFITensor)
        t = (const DLTensor *)((const char *)a->v_obj + sizeof(TVMFFIObject));
    else
        return fail("TypeError",
                    "an argument is no tensor: arrays and tensors that have __dlpack__ are accepted");
    const quern_status status = quern_tensor_from_dlpack(t, &r->storage[i]);
    if (status != QUERN_OK) return fail_as(status);
    r->tensors.t[i] = &r->storage[i];
    if (r->first == NULL || r->first->device == QUERN_CPU) r->first = &r->storage[i];
    return 0;
}

/* Reads the arguments from `op` on; `before` of them stand between params and the tensors. */
static int read_request(const TVMFFIAny *args, int32_t count, int32_t before, request *r)
{
    const int32_t tensors = 3 + before;
    TVMFFIByteArray params;
    memset(&r->tensors, 0, sizeof r->tensors);
    r->first = NULL;
    if (count < tensors || args[1].type_index != kTVMFFIInt || !text_of(&args[2], &params) ||
        params.size > sizeof r->params.bytes)
        return fail("TypeError", "an operation's number, a pass, params and tensors are accepted");
    if (find_subject(&args[0], &r->subject) != 0) return -1;
    r->pass = args[1].v_int64 != 0 ? QUERN_OP_BACKWARD : QUERN_OP_FORWARD;
    if (count - tensors != r->subject.tensor_count)
        return fail("TypeError", "as many tensors, or None, as the operation has are accepted");
    memset(r->params.bytes, 0, sizeof r->params.bytes);
    memcpy(r->params.bytes, params.data, params.size);
    r->tensors.size = sizeof r->tensors.size + (size_t)r->subject.tensor_count * sizeof(void *);
    for (int32_t i = 0; i < r->subject.tensor_count; i++)
        if (take_tensor(r, i, &args[tensors + i]) != 0) return -1;
    return 0;
}

/* ---- the context and workspace ---- */

static quern_context *context;
static quern_status context_status;
static pthread_once_t context_once = PTHREAD_ONCE_INIT;
static pthread_key_t kept_key;

/* Workspace that a thread keeps from call to call. */
typedef struct kept_memory {
    size_t bytes;
    void *data;
} kept_memory;
enum { KEPT_BYTES_MAX = 64 << 20 };

static void free_kept(void *p)
{
    free(((kept_memory *)p)->data);
    free(p);
}

static void create_context(void)
{
    context_status = quern_context_create(NULL, &context);
    if (pthread_key_create(&kept_key, free_kept) != 0) context_status = QUERN_ERR_OUT_OF_MEMORY;
}

static int need_context(void)
{
    (void)pthread_once(&context_once, create_context);
    return context_status == QUERN_OK ? 0 : fail_as(context_status);
}

/* Host memory for this call. *owned is what the caller frees afterwards. */
static void *host_memory(size_t bytes, void **owned)
{
    *owned = NULL;
    if (bytes > KEPT_BYTES_MAX) return *owned = malloc(bytes);
    kept_memory *kept = pthread_getspecific(kept_key);
    if (kept == NULL) {
        kept = calloc(1, sizeof *kept);
        if (kept == NULL || pthread_setspecific(kept_key, kept) != 0) {
            free(kept);
            return *owned = malloc(bytes);
        }
    }
    if (kept->bytes < bytes) {
        free(kept->data);
        kept->data = malloc(bytes);
        kept->bytes = kept->data != NULL ? bytes : 0;
    }
    return kept->data;
}

static quern_status workspace_of(const request *r, size_t *bytes)
{
    const subject *s = &r->subject;
    return s->direct != NULL ? s->direct->workspace(context, &r->params, &r->tensors, bytes)
                             : quern_op_workspace(context, s->op, r->pass, &r->params, &r->tensors, bytes);
}

static quern_status compute(const request *r, const quern_exec *exec, void *workspace, size_t bytes)
{
    const subject *s = &r->subject;
    return s->direct != NULL
               ? s->direct->run(context, exec, &r->params, &r->tensors, workspace, bytes)
               : quern_op_run(context, exec, s->op, r->pass, &r->params, &r->tensors, workspace, bytes);
}

static int run_on_host(const request *r, size_t bytes)
{
    void *owned;
    void *memory = host_memory(bytes, &owned);
    if (memory == NULL && bytes > 0) {
        char sentence[96];
        (void)snprintf(sentence, sizeof sentence, "no memory for %zu bytes of workspace", bytes);
        return fail("MemoryError", sentence);
    }
    const quern_status status = compute(r, NULL, memory, bytes);
    free(owned);
    return status == QUERN_OK ? 0 : fail_as(status);
}

/* On the framework's current stream, with memory from its allocator, which gives it to later work of that
 * stream. */
static int run_on_gpu(const request *r, size_t bytes)
{
    quern_exec exec = QUERN_EXEC_INIT;
    int64_t extent = (int64_t)bytes, stride = 1;
    DLTensor like = {.device = {kDLCUDA, r->first->device_id},
                     .ndim = 1,
                     .dtype = {kDLUInt, 8, 1},
                     .shape = &extent,
                     .strides = &stride};
    TVMFFIObjectHandle memory = NULL;
    void *data = NULL;
    exec.stream = TVMFFIEnvGetStream(kDLCUDA, r->first->device_id);
    if (bytes > 0) {
        if (TVMFFIEnvTensorAlloc(&like, &memory) != 0) return -1;
        const DLTensor *t = (const DLTensor *)((const char *)memory + sizeof(TVMFFIObject));
        data = (char *)t->data + t->byte_offset;
    }
    const quern_status status = compute(r, &exec, data, bytes);
    if (memory != NULL) (void)TVMFFIObjectDecRef(memory);
    return status == QUERN_OK ? 0 : fail_as(status);
}

/* ---- the functions ---- */

EXPORT int __tvm_ffi_version(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)
{
    (void)self, (void)args, (void)count;
    return give_text(quern_version(), strlen(quern_version()), result);
}

static void describe_operation(FILE *out, const quern_op *op)
{
    quern_op_info info;
    quern_op_tensor tensors[QUERN_OP_TENSORS_MAX];
    quern_op_param params[QUERN_OP_PARAMS_MAX];
    if (quern_op_get(op, &info) != QUERN_OK || quern_op_get_tensors(op, tensors) != QUERN_OK ||
        quern_op_get_params(op, params) != QUERN_OK)
        return;
    fprintf(out, "op\t%s\t%d", info.name, info.backward != 0);
    for (size_t i = 0; i < sizeof info.asked / sizeof *info.asked && info.asked[i] != NULL; i++)
        fprintf(out, "\t%s", info.asked[i]);
    fputc('\n', out);
    for (int32_t i = 0; i < info.tensor_count; i++)
        fprintf(out, "tensor\t%s\t%s\n", tensors[i].field, tensors[i].name);
    for (int32_t i = 0; i < info.param_count; i++) fprintf(out, "param\t%s\n", params[i].field);
}

EXPORT int __tvm_ffi_operations(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)
{
    (void)self, (void)args, (void)count;
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    if (out == NULL) return fail("MemoryError", "no memory for the list of operations");
    const quern_op *op;
    for (size_t i = 0; (op = quern_op_at(i)) != NULL; i++) describe_operation(out, op);
    const direct_op *direct;
    for (size_t i = 0; (direct = direct_at(i)) != NULL; i++) {
        fprintf(out, "op\t%s\t0\n", direct->name);
        for (int32_t t = 0; direct->tensors[t] != NULL; t++) fprintf(out, "tensor\t%s\n", direct->tensors[t]);
    }
    const bool whole = fclose(out) == 0;
    const int code =
        whole ? give_text(text, size, result) : fail("MemoryError", "no memory for the list of operations");
    free(text);
    return code;
}

static int set_param(const subject *s, void *params, const char *name, const char *text)
{
    if (s->direct == NULL) {
        const quern_status status = quern_op_set(s->op, params, name, text);
        return status == QUERN_OK ? 0 : fail_as(status);
    }
    if (direct_set(s->direct, params, name, text)) return 0;
    char sentence[160];
    (void)snprintf(sentence, sizeof sentence,
                   "'%.40s' for %.40s: a parameter of %s and a value that it takes are "
                   "accepted",
                   text, name, s->direct->name);
    return fail("ValueError", sentence);
}

/* Sets each "name=value" line of the text, which is changed. */
static int set_params(const subject *s, void *params, char *text)
{
    int code = 0;
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line != NULL && code == 0;
         line = strtok_r(NULL, "\n", &rest)) {
        char *value = strchr(line, '=');
        if (value == NULL) continue;
        *value++ = '\0';
        code = set_param(s, params, line, value);
    }
    return code;
}

static void copy_text(char *to, size_t bytes, const TVMFFIByteArray *from)
{
    const size_t size = from->size < bytes ? from->size : bytes - 1;
    memcpy(to, from->data, size);
    to[size] = '\0';
}

EXPORT int __tvm_ffi_parameters(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)
{
    (void)self;
    TVMFFIByteArray preset, text;
    char preset_text[64], lines[4096];
    params_room params = {{0}};
    if (count != 3 || !text_of(&args[1], &preset) || !text_of(&args[2], &text) || text.size >= sizeof lines)
        return fail("TypeError", "an operation's number, a preset and name=value lines are accepted");
    subject s;
    if (find_subject(&args[0], &s) != 0) return -1;
    copy_text(preset_text, sizeof preset_text, &preset);
    copy_text(lines, sizeof lines, &text);
    quern_status status = QUERN_OK;
    if (s.direct != NULL) memcpy(params.bytes, s.direct->defaults, s.direct->params_size);
    else if ((status = quern_op_defaults(s.op, &params)) == QUERN_OK && preset.size > 0)
        status = quern_op_preset(s.op, &params, preset_text);
    if (status != QUERN_OK) return fail_as(status);
    if (set_params(&s, &params, lines) != 0) return -1;
    return give_bytes(params.bytes, sizeof params.bytes, result);
}

EXPORT int __tvm_ffi_settings(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)
{
    (void)self;
    TVMFFIByteArray bytes;
    params_room params = {{0}};
    quern_op_info info;
    quern_op_param described[QUERN_OP_PARAMS_MAX];
    char lines[4096] = "", value[64];
    size_t used = 0;
    const quern_op *op =
        count == 2 && args[0].type_index == kTVMFFIInt ? quern_op_at((size_t)args[0].v_int64) : NULL;
    if (op == NULL || !text_of(&args[1], &bytes) || bytes.size > sizeof params.bytes)
        return fail("TypeError", "the number of an operation of quern/op.h and its params are accepted");
    memcpy(params.bytes, bytes.data, bytes.size);
    quern_status status = quern_op_get(op, &info);
    if (status == QUERN_OK) status = quern_op_get_params(op, described);
    for (int32_t i = 0; status == QUERN_OK && i < info.param_count; i++) {
        status = quern_op_text(op, &params, i, value, sizeof value);
        if (status == QUERN_OK)
            used += (size_t)snprintf(lines + used, sizeof lines - used, "%s=%s\n", described[i].field, value);
    }
    return status == QUERN_OK ? give_text(lines, used, result) : fail_as(status);
}

EXPORT int __tvm_ffi_expect(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)
{
    (void)self;
    enum { FIELDS = 3 + QUERN_MAX_DIMS };
    request r;
    TVMFFIByteArray asked_bytes;
    int64_t asked[4] = {0}, rows[QUERN_OP_TENSORS_MAX][FIELDS];
    quern_tensor expected[QUERN_OP_TENSORS_MAX];
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    if (read_request(args, count, 1, &r) != 0) return -1;
    if (!text_of(&args[3], &asked_bytes) || asked_bytes.size > sizeof asked)
        return fail("TypeError", "asked: the bytes of at most four int64 are accepted");
    memcpy(asked, asked_bytes.data, asked_bytes.size);
    if (r.subject.direct != NULL) return fail("TypeError", "this operation's results are handed in");
    const quern_op *op = r.subject.op;
    quern_status status = quern_op_roles(op, r.pass, &r.params, &r.tensors, roles);
    if (status == QUERN_OK) status = quern_op_expect(op, r.pass, &r.params, &r.tensors, asked, expected);
    if (status != QUERN_OK) return fail_as(status);
    for (int32_t i = 0; i < r.subject.tensor_count; i++) {
        rows[i][0] = roles[i];
        rows[i][1] = expected[i].dtype;
        rows[i][2] = expected[i].ndim;
        memcpy(&rows[i][3], expected[i].shape, sizeof expected[i].shape);
    }
    return give_bytes(rows, (size_t)r.subject.tensor_count * sizeof *rows, result);
}

EXPORT int __tvm_ffi_run(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)
{
    (void)self;
    request r;
    size_t bytes = 0;
    result->type_index = kTVMFFINone;
    result->v_int64 = 0;
    if (need_context() != 0 || read_request(args, count, 0, &r) != 0) return -1;
    const quern_status status = workspace_of(&r, &bytes);
    if (status != QUERN_OK) return fail_as(status);
    return r.first != NULL && r.first->device == QUERN_CUDA ? run_on_gpu(&r, bytes) : run_on_host(&r, bytes);
}
