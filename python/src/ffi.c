/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * ffi.c - arguments, results, errors and memory of the functions for Python.
 *
 *   report_to(word)          calls or their faults of data into int32 [1], on their device; None: into none
 *   fault_name(bits) -> str  what the lowest bit says
 */
#include "ffi.h"

#include <quern/cuda.h>
#include <quern/dlpack.h>

#include <tvm/ffi/extra/c_env_api.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

int fail(const char *kind, const char *sentence)
{
    TVMFFIErrorSetRaisedFromCStr(kind, sentence);
    return -1;
}

int fail_as(quern_status status)
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

bool text_of(const TVMFFIAny *a, TVMFFIByteArray *text)
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

/* Sets a field from the number that ends at `end`. */
static bool set_field(const named_field *field, const char *number, const char *end, void *to)
{
    char digits[24], *stop;
    const size_t size = (size_t)(end - number);
    if (size == 0 || size >= sizeof digits) return false;
    memcpy(digits, number, size);
    digits[size] = '\0';
    const int64_t value = strtoll(digits, &stop, 10);
    const int32_t narrow = (int32_t)value;
    const bool flag = value != 0;
    if (*stop != '\0' || (field->bytes == sizeof narrow && narrow != value)) return false;
    memcpy((char *)to + field->offset,
           field->bytes == sizeof value    ? (const void *)&value
           : field->bytes == sizeof narrow ? (const void *)&narrow
                                           : (const void *)&flag,
           field->bytes);
    return true;
}

bool read_fields(const TVMFFIAny *a, const named_field *fields, size_t count, void *to)
{
    TVMFFIByteArray text;
    if (!text_of(a, &text)) return false;
    for (const char *line = text.data, *last = line + text.size; line < last;) {
        const char *end = memchr(line, '\n', (size_t)(last - line));
        if (end == NULL) end = last;
        const char *equals = memchr(line, '=', (size_t)(end - line));
        if (equals == NULL) return false;
        const size_t size = (size_t)(equals - line);
        size_t i = 0;
        while (i < count && (strlen(fields[i].name) != size || memcmp(fields[i].name, line, size) != 0)) i++;
        if (i == count || !set_field(&fields[i], equals + 1, end, to)) return false;
        line = end + 1;
    }
    return true;
}

bool is_int(const TVMFFIAny *a)
{
    return a->type_index == kTVMFFIInt;
}

int give_nothing(TVMFFIAny *result)
{
    result->type_index = kTVMFFINone;
    result->v_int64 = 0;
    return 0;
}

int give_int(int64_t value, TVMFFIAny *result)
{
    result->type_index = kTVMFFIInt;
    result->v_int64 = value;
    return 0;
}

int give_text(const char *data, size_t size, TVMFFIAny *result)
{
    const TVMFFIByteArray text = {data, size};
    return TVMFFIStringFromByteArray(&text, result);
}

int give_bytes(const void *data, size_t size, TVMFFIAny *result)
{
    const TVMFFIByteArray bytes = {data, size};
    return TVMFFIBytesFromByteArray(&bytes, result);
}

bool read_params(const TVMFFIAny *a, params_room *params)
{
    TVMFFIByteArray bytes;
    if (!text_of(a, &bytes) || bytes.size > sizeof params->bytes) return false;
    memset(params, 0, sizeof *params);
    memcpy(params, bytes.data, bytes.size);
    return true;
}

static int take_tensor(tensor_list *to, int32_t i, const TVMFFIAny *a)
{
    const DLTensor *t;
    if (a->type_index == kTVMFFINone) return 0;
    if (a->type_index == kTVMFFIDLTensorPtr) t = a->v_ptr;
    else if (a->type_index == kTVMFFITensor)
        t = (const DLTensor *)((const char *)a->v_obj + sizeof(TVMFFIObject));
    else
        return fail("TypeError",
                    "an argument is no tensor: arrays and tensors that have __dlpack__ are accepted");
    const quern_status status = quern_tensor_from_dlpack(t, &to->storage[i]);
    if (status != QUERN_OK) return fail_as(status);
    to->tensors.t[i] = &to->storage[i];
    if (to->first == NULL || to->first->device == QUERN_CPU) to->first = &to->storage[i];
    return 0;
}

static int start_list(tensor_list *to, int32_t count)
{
    if (count > QUERN_OP_TENSORS_MAX) return fail("TypeError", "fewer tensors are accepted");
    memset(&to->tensors, 0, sizeof to->tensors);
    to->first = NULL;
    to->tensors.size = sizeof to->tensors.size + (size_t)count * sizeof(void *);
    return 0;
}

int take_tensors(const TVMFFIAny *args, int32_t count, tensor_list *to)
{
    if (start_list(to, count) != 0) return -1;
    for (int32_t i = 0; i < count; i++)
        if (take_tensor(to, i, &args[i]) != 0) return -1;
    return 0;
}

int take_placed(const TVMFFIAny *args, const uint8_t *places, int32_t given, int32_t count, tensor_list *to)
{
    if (start_list(to, count) != 0) return -1;
    for (int32_t i = 0; i < given; i++) {
        if (places[i] >= count) return fail("TypeError", "a place of the operation's tensors is accepted");
        if (take_tensor(to, places[i], &args[i]) != 0) return -1;
    }
    return 0;
}

int read_memory(const TVMFFIAny *a, void **memory, size_t *bytes)
{
    tensor_list list;
    if (take_tensors(a, 1, &list) != 0) return -1;
    const quern_tensor *t = list.first;
    if (t == NULL || t->ndim != 1 || t->dtype != QUERN_U8 || (t->shape[0] > 1 && t->strides[0] != 1))
        return fail("TypeError", "contiguous uint8 [bytes] is accepted");
    if (t->device != QUERN_CPU)
        return fail("NotImplementedError", "memory on a GPU is given: that of the cpu is accepted");
    *memory = t->data;
    *bytes = (size_t)t->shape[0];
    return 0;
}

bool read_lists(const TVMFFIAny *args, batch_lists *lists)
{
    TVMFFIByteArray sequences, counts;
    if (!text_of(&args[0], &sequences) || !text_of(&args[1], &counts) ||
        counts.size != sequences.size / sizeof(int32_t) * sizeof(int64_t))
        return false;
    *lists = (batch_lists){.batch = (int64_t)(sequences.size / sizeof(int32_t)),
                           .sequences = (const int32_t *)(const void *)sequences.data,
                           .counts = (const int64_t *)(const void *)counts.data};
    return true;
}

/* ---- the context and workspace ---- */

static quern_context *context;
static quern_status context_status;
static pthread_once_t context_once = PTHREAD_ONCE_INIT;
static pthread_key_t kept_key;

/* Workspace that a thread keeps from call to call: the page faults of a large one that is new to every call
 * take some hundredths of the kernels' time. After a call the system may take back one of more than
 * OWN_BYTES_MAX. */
typedef struct kept_memory {
    size_t bytes;
    void *data;
} kept_memory;
enum { OWN_BYTES_MAX = 64 << 20, KEPT_BYTES_MAX = 1 << 30 };

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

quern_context *need_context(void)
{
    (void)pthread_once(&context_once, create_context);
    if (context_status != QUERN_OK) (void)fail_as(context_status);
    return context_status == QUERN_OK ? context : NULL;
}

enum { HUGE_PAGE = 2 << 20 };

/* In huge pages where the system has them. */
static void *allocate(size_t bytes)
{
    void *p;
    if (bytes < HUGE_PAGE) return malloc(bytes);
    if (posix_memalign(&p, HUGE_PAGE, bytes) != 0) return NULL;
    (void)madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

/* Host memory for this call. *owned is what the caller frees afterwards. */
static void *host_memory(size_t bytes, void **owned)
{
    *owned = NULL;
    if (bytes > KEPT_BYTES_MAX) return *owned = allocate(bytes);
    kept_memory *kept = pthread_getspecific(kept_key);
    if (kept == NULL) {
        kept = calloc(1, sizeof *kept);
        if (kept == NULL || pthread_setspecific(kept_key, kept) != 0) {
            free(kept);
            return *owned = allocate(bytes);
        }
    }
    if (kept->bytes < bytes) {
        free(kept->data);
        kept->data = allocate(bytes);
        kept->bytes = kept->data != NULL ? bytes : 0;
    }
    return kept->data;
}

/* ---- the status word ---- */

/* Of the process, for frameworks run backward passes on threads of their own. ndim 0: there is none. */
static quern_tensor status_word;
static pthread_mutex_t status_lock = PTHREAD_MUTEX_INITIALIZER;

FUNCTION(report_to)
{
    (void)self;
    tensor_list list;
    const quern_tensor none = {0};
    if (count != 1 || take_tensors(args, 1, &list) != 0) return -1;
    if (list.first != NULL && list.first->ndim == 0)
        return fail("ValueError", "word has no dimensions: [1] is accepted");
    (void)pthread_mutex_lock(&status_lock);
    status_word = list.first != NULL ? *list.first : none;
    (void)pthread_mutex_unlock(&status_lock);
    return give_nothing(result);
}

FUNCTION(fault_name)
{
    (void)self;
    if (count != 1 || !is_int(&args[0])) return fail("TypeError", "a word's bits are accepted");
    const char *name = quern_cuda_fault_name((int32_t)args[0].v_int64);
    return give_text(name, strlen(name), result);
}

/* How a call on this stream runs; *word is room for what exec points to. */
static quern_exec exec_on(void *stream, quern_tensor *word)
{
    quern_exec exec = QUERN_EXEC_INIT;
    (void)pthread_mutex_lock(&status_lock);
    *word = status_word;
    (void)pthread_mutex_unlock(&status_lock);
    exec.stream = stream;
    exec.status = word->ndim > 0 ? word : NULL;
    return exec;
}

/* ---- calls ---- */

static int on_host(size_t bytes, computation *compute, const void *what)
{
    void *owned;
    void *memory = host_memory(bytes, &owned);
    if (memory == NULL && bytes > 0) {
        char sentence[96];
        (void)snprintf(sentence, sizeof sentence, "no memory for %zu bytes of workspace", bytes);
        return fail("MemoryError", sentence);
    }
    quern_tensor word;
    const quern_exec exec = exec_on(NULL, &word);
    const quern_status status = compute(what, &exec, memory, bytes);
    if (owned == NULL && bytes > OWN_BYTES_MAX)
        (void)madvise(memory, bytes / HUGE_PAGE * HUGE_PAGE, MADV_FREE); /* not what shares its last page */
    free(owned);
    return status == QUERN_OK ? 0 : fail_as(status);
}

static quern_status on_stream(int32_t device, void *memory, size_t bytes, computation *compute,
                              const void *what)
{
    quern_tensor word;
    const quern_exec exec = exec_on(TVMFFIEnvGetStream(kDLCUDA, device), &word);
    return compute(what, &exec, memory, bytes);
}

/* Memory of the framework's allocator, which gives it to later work of the stream. */
static int with_framework_memory(int32_t device, size_t bytes, computation *compute, const void *what)
{
    int64_t extent = (int64_t)bytes, stride = 1;
    DLTensor like = {.device = {kDLCUDA, device},
                     .ndim = 1,
                     .dtype = {kDLUInt, 8, 1},
                     .shape = &extent,
                     .strides = &stride};
    TVMFFIObjectHandle memory = NULL;
    if (TVMFFIEnvTensorAlloc(&like, &memory) != 0) return -1;
    const DLTensor *t = (const DLTensor *)((const char *)memory + sizeof(TVMFFIObject));
    const quern_status status = on_stream(device, (char *)t->data + t->byte_offset, bytes, compute, what);
    (void)TVMFFIObjectDecRef(memory);
    return status == QUERN_OK ? 0 : fail_as(status);
}

static int on_gpu(int32_t device, size_t bytes, computation *compute, const void *what)
{
    void *memory = NULL;
    if (bytes > 0 && TVMFFIEnvGetDLPackManagedTensorAllocator() != NULL)
        return with_framework_memory(device, bytes, compute, what);
    quern_status status = bytes > 0 ? quern_cuda_allocate(device, bytes, &memory) : QUERN_OK;
    if (status == QUERN_OK) status = on_stream(device, memory, bytes, compute, what);
    const int code = status == QUERN_OK ? 0 : fail_as(status);
    if (memory != NULL) (void)quern_cuda_free(device, memory); /* waits for the device */
    return code;
}

int with_memory(const quern_tensor *first, size_t bytes, computation *compute, const void *what)
{
    return first != NULL && first->device == QUERN_CUDA ? on_gpu(first->device_id, bytes, compute, what)
                                                        : on_host(bytes, compute, what);
}

void *stream_of(const quern_tensor *first)
{
    return first != NULL && first->device == QUERN_CUDA ? TVMFFIEnvGetStream(kDLCUDA, first->device_id)
                                                        : NULL;
}
