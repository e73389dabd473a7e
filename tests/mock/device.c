/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * device.c - the mock device. Linked with --wrap=dlopen,--wrap=dlsym, by which the library finds the table
 * below where it looks for libquern_cuda.
 *
 * Every block is a mapping of its own between two pages that nothing may touch. What a block's pages hold
 * beside its bytes is a pattern, which is checked when the block is freed. A stage's run makes the blocks of
 * its views readable and writable, and the end of the last that is under way makes them PROT_NONE again: a
 * stage that follows a pointer which its list of views lacks ends the test, too.
 */
#include "device.h"

#include "cmocka_c11.h"
#include "core/op_stage.h"
#include "cpu/cpu.h"
#include "runtime/build_id.h"
#include "runtime/cuda_plugin.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, HUGE = 2 << 20, PATTERN = 0x5a };

/* ---- memory ---- */

typedef struct block {
    struct block *next;
    int open;             /* stages that are under way and may touch it */
    unsigned char *pages; /* the first that holds bytes */
    size_t past, bytes, mapped;
} block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block *blocks;
static long stages_run, stages_replayed;
static _Thread_local int faults;

static void protect(const block *b, int rights)
{
    if (mprotect(b->pages, b->mapped, rights) != 0) fail_msg("mprotect of %zu bytes failed", b->mapped);
}

/* New pages between two of guards. Large ones are huge pages where the system has them: to open and to close
 * these takes a step for each page that is there. */
static unsigned char *map_pages(size_t bytes)
{
    const size_t spare = bytes >= HUGE ? HUGE : PAGE, all = bytes + spare + PAGE;
    unsigned char *first = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (first == MAP_FAILED) fail_msg("no mapping of %zu bytes", bytes);
    unsigned char *pages = first + spare - (uintptr_t)first % spare, *end = pages + bytes + PAGE;
    if (pages - PAGE > first) munmap(first, (size_t)(pages - PAGE - first));
    if (end < first + all) munmap(end, (size_t)(first + all - end));
    if (bytes >= HUGE) (void)madvise(pages, bytes, MADV_HUGEPAGE);
    return pages;
}

void *mock_allocate(size_t bytes, size_t past)
{
    block *b = malloc(sizeof *b);
    if (b == NULL || past >= PAGE) fail_msg("no block of %zu bytes at %zu", bytes, past);
    b->past = past;
    b->bytes = bytes;
    b->mapped = (past + bytes + PAGE) / PAGE * PAGE;
    b->pages = map_pages(b->mapped);
    protect(b, PROT_READ | PROT_WRITE);
    memset(b->pages, PATTERN, past);
    memset(b->pages + past + bytes, PATTERN, b->mapped - past - bytes);
    b->open = 0;
    protect(b, PROT_NONE);
    pthread_mutex_lock(&lock);
    b->next = blocks;
    blocks = b;
    pthread_mutex_unlock(&lock);
    return b->pages + past;
}

/* Takes a block out of the list; NULL: there is none at p. */
static block *take(const void *p)
{
    pthread_mutex_lock(&lock);
    block **at = &blocks;
    while (*at != NULL && (*at)->pages + (*at)->past != p) at = &(*at)->next;
    block *found = *at;
    if (found != NULL) *at = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}

/* The first byte of first ... end - 1 that no longer holds the pattern; `end`: there is none. */
static size_t first_written(const block *b, size_t first, size_t end)
{
    while (first < end && b->pages[first] == PATTERN) first++;
    return first;
}

void mock_free(void *p)
{
    if (p == NULL) return;
    block *b = take(p);
    if (b == NULL) fail_msg("%p is no block of the device", p);
    protect(b, PROT_READ);
    const size_t end = b->past + b->bytes, before = first_written(b, 0, b->past),
                 behind = first_written(b, end, b->mapped);
    if (before < b->past || behind < b->mapped)
        fail_msg("byte %lld of a block of %zu was written",
                 (long long)(before < b->past ? before : behind) - (long long)b->past, b->bytes);
    munmap(b->pages - PAGE, b->mapped + 2 * PAGE);
    free(b);
}

/* The block that the address lies in; NULL: there is none. */
static block *block_at(const void *p)
{
    const unsigned char *at = p;
    block *b = blocks;
    while (b != NULL && (at < b->pages + b->past || at >= b->pages + b->past + b->bytes)) b = b->next;
    return b;
}

bool mock_owns(const void *p)
{
    pthread_mutex_lock(&lock);
    const bool found = block_at(p) != NULL;
    pthread_mutex_unlock(&lock);
    return found;
}

/* Opens the block that an address lies in, which may be open, or closes it (`by` is 1 or -1). */
static void turn(const void *p, int by)
{
    block *b = block_at(p);
    if (b == NULL) return;
    const bool was_open = b->open > 0;
    b->open += by;
    if (was_open != (b->open > 0)) protect(b, b->open > 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
}

static void turn_both(const void *p, const void *q, int by)
{
    turn(p, by);
    turn(q, by);
}

void mock_copy(void *to, const void *from, size_t bytes)
{
    pthread_mutex_lock(&lock);
    turn_both(to, from, 1);
    memmove(to, from, bytes);
    turn_both(to, from, -1);
    pthread_mutex_unlock(&lock);
}

void mock_fetch(void *to, const void *from, size_t bytes)
{
    pthread_mutex_lock(&lock);
    turn(from, 1);
    if (memcmp(to, from, bytes) != 0) memcpy(to, from, bytes);
    turn(from, -1);
    pthread_mutex_unlock(&lock);
}

void mock_fill(void *to, int value, size_t bytes)
{
    pthread_mutex_lock(&lock);
    turn(to, 1);
    memset(to, value, bytes);
    turn(to, -1);
    pthread_mutex_unlock(&lock);
}

/* ---- stages ---- */

/* Opens or closes the blocks that a stage may touch: its views', the workspace's and the status word's. */
static void turn_stage(const stage_exec *exec, op_stage stage, const void *args, const void *workspace,
                       int by)
{
    op_view_list list[OP_VIEW_LISTS];
    const int32_t lists = op_stage_views(stage, list);
    pthread_mutex_lock(&lock);
    for (int32_t n = 0; n < lists; n++)
        for (int32_t i = 0; i < list[n].count; i++) turn(op_stage_view(args, &list[n], i)->data, by);
    turn_both(workspace, exec->status, by);
    pthread_mutex_unlock(&lock);
}

/* Runs a stage of the CPU. A fault becomes a bit of the status word, and the stage's results stay as they
 * were. */
static quern_status run_now(const stage_exec *given, op_stage stage, const void *args, void *workspace)
{
    stage_fault fault = {0};
    stage_exec exec = *given;
    exec.device = QUERN_CPU;
    exec.fault = &fault;
    turn_stage(&exec, stage, args, workspace, 1);
    __atomic_fetch_add(&stages_run, 1, __ATOMIC_RELAXED);
    quern_status status = op_stage_run(&quern_backend_cpu, stage, &exec, args, workspace);
    if (fault.kind != 0) {
        faults |= fault.kind;
        if (exec.status != NULL) __atomic_fetch_or(exec.status, fault.kind, __ATOMIC_RELAXED);
        status = QUERN_OK;
    }
    turn_stage(&exec, stage, args, workspace, -1);
    return status;
}

/* A stage of a recording: what it is called with, and the stages that it waits for. */
enum { MOST_STAGES = 2048, MOST_WAITS = 64 };
typedef struct recorded_stage {
    stage_exec exec;
    op_stage stage;
    void *args, *workspace;
    int waits, after[MOST_WAITS];
} recorded_stage;

struct mock_recording {
    uint64_t number; /* no two have one */
    int count;
    int waits, after[MOST_WAITS]; /* of the next stage */
    recorded_stage stage[MOST_STAGES];
};

static _Thread_local mock_recording *recorder;

void mock_record(void)
{
    if (recorder != NULL) fail_msg("a recording is under way");
    static atomic_uint_fast64_t numbers;
    recorder = calloc(1, sizeof *recorder);
    if (recorder == NULL) fail_msg("the test is out of memory");
    recorder->number = ++numbers;
}

mock_recording *mock_recorded(void)
{
    mock_recording *made = recorder;
    recorder = NULL;
    return made;
}

void mock_forget(mock_recording *r)
{
    for (int i = 0; r != NULL && i < r->count; i++) free(r->stage[i].args);
    free(r);
}

static quern_status write_down(const stage_exec *exec, op_stage stage, const void *args, void *workspace)
{
    mock_recording *r = recorder;
    if (r->count == MOST_STAGES) fail_msg("more than %d stages in a recording", MOST_STAGES);
    recorded_stage *s = &r->stage[r->count];
    *s = (recorded_stage){*exec, stage, malloc(op_stage_bytes(stage)), workspace, r->waits, {0}};
    if (s->args == NULL) fail_msg("the test is out of memory");
    memcpy(s->args, args, op_stage_bytes(stage));
    memcpy(s->after, r->after, sizeof s->after);
    r->waits = 1;
    r->after[0] = r->count++;
    return QUERN_OK;
}

void mock_replay(const mock_recording *r)
{
    bool done[MOST_STAGES] = {false};
    for (int ran = 0; ran < r->count; ran++) {
        int next = r->count - 1; /* the last that may run */
        for (; next >= 0; next--) {
            const recorded_stage *s = &r->stage[next];
            bool ready = !done[next];
            for (int i = 0; i < s->waits; i++) ready = ready && done[s->after[i]];
            if (ready) break;
        }
        if (next < 0) fail_msg("stages of a recording wait for each other");
        const recorded_stage *s = &r->stage[next];
        if (run_now(&s->exec, s->stage, s->args, s->workspace) != QUERN_OK)
            fail_msg("a stage of a recording fails");
        done[next] = true;
        __atomic_fetch_add(&stages_replayed, 1, __ATOMIC_RELAXED);
    }
}

int mock_take_faults(void)
{
    const int taken = faults;
    faults = 0;
    return taken;
}

long mock_stages_run(void)
{
    return stages_run;
}

long mock_stages_replayed(void)
{
    return stages_replayed;
}

#define STAGE(stage, name)                                                                                   \
    static quern_status stage##_run(const stage_exec *exec, const name##_args *args, void *workspace)        \
    {                                                                                                        \
        return recorder != NULL ? write_down(exec, OP_##stage, args, workspace)                              \
                                : run_now(exec, OP_##stage, args, workspace);                                \
    }
BACKEND_STAGES(STAGE, STAGE)

/* ---- replays of calls that are made again ---- */

typedef struct replay {
    pthread_mutex_t busy;
    mock_recording *recording; /* NULL: none yet */
    size_t bytes;
    unsigned char addresses[]; /* those of the recording */
} replay;

static void *replay_open(const stage_exec *exec, size_t bytes)
{
    (void)exec;
    replay *r = calloc(1, sizeof *r + bytes);
    if (r == NULL) return NULL;
    r->bytes = bytes;
    if (pthread_mutex_init(&r->busy, NULL) == 0) return r;
    free(r);
    return NULL;
}

static void replay_close(void *kept)
{
    replay *r = kept;
    mock_forget(r->recording);
    pthread_mutex_destroy(&r->busy);
    free(r);
}

static quern_status replay_run(void *kept, const stage_exec *exec, const void *addresses, backend_run *run,
                               const void *arg)
{
    replay *r = kept;
    quern_status status = QUERN_OK;
    if (recorder != NULL) return run(arg, exec);
    pthread_mutex_lock(&r->busy);
    if (r->recording == NULL || memcmp(r->addresses, addresses, r->bytes) != 0) {
        mock_forget(r->recording);
        mock_record();
        status = run(arg, exec);
        r->recording = mock_recorded();
        memcpy(r->addresses, addresses, r->bytes);
    }
    if (status == QUERN_OK) mock_replay(r->recording);
    pthread_mutex_unlock(&r->busy);
    return status;
}

/* A point has the numbers of the stages, from 1 on, that what comes next waits for. */
static bool point(const stage_exec *exec, backend_point *at)
{
    (void)exec;
    if (recorder == NULL || recorder->waits > BACKEND_POINT_MOST) return false;
    at->count = recorder->waits;
    at->recording = recorder->number;
    for (int i = 0; i < recorder->waits; i++) at->after[i] = (char *)NULL + 1 + recorder->after[i];
    return true;
}

static quern_status resume(const stage_exec *exec, const backend_point *const *points, int32_t count)
{
    (void)exec;
    recorder->waits = 0;
    for (int32_t i = 0; i < count; i++)
        for (int32_t k = 0; k < points[i]->count; k++) {
            if (recorder->waits == MOST_WAITS) fail_msg("a stage waits for more than %d others", MOST_WAITS);
            recorder->after[recorder->waits++] = (int)((char *)points[i]->after[k] - (char *)NULL) - 1;
        }
    return QUERN_OK;
}

/* ---- the table ---- */

static quern_status (*report)(quern_status status, const char *format, ...);

static quern_status check_device(int32_t device)
{
    return device == 0 ? QUERN_OK : report(QUERN_ERR_DEVICE, "the mock has no device %d", device);
}

static quern_status properties(int32_t device, stage_exec *exec)
{
    (void)device;
    (void)exec;
    return QUERN_OK;
}

static quern_status check_pointer(const void *p, quern_device device, int32_t device_id, const char *name)
{
    (void)device_id;
    if (mock_owns(p) == (device == QUERN_CUDA)) return QUERN_OK;
    return report(QUERN_ERR_INVALID_ARGUMENT, "%s is %p: memory of the tensors' device is accepted", name, p);
}

static quern_status count_devices(int32_t *count)
{
    *count = 1;
    return QUERN_OK;
}

static quern_status describe(int32_t device, quern_cuda_device *info)
{
    (void)device;
    strcpy(info->name, "mock");
    return QUERN_OK;
}

static quern_status allocate(int32_t device, size_t bytes, void **p)
{
    (void)device;
    *p = mock_allocate(bytes, 0);
    return QUERN_OK;
}

static quern_status release(int32_t device, void *p)
{
    (void)device;
    mock_free(p);
    return QUERN_OK;
}

static quern_status copy(int32_t device, void *to, const void *from, size_t bytes, void *stream)
{
    (void)device;
    (void)stream;
    mock_copy(to, from, bytes);
    return QUERN_OK;
}

static quern_status fill(int32_t device, void *to, uint8_t value, size_t bytes, void *stream)
{
    (void)device;
    (void)stream;
    mock_fill(to, value, bytes);
    return QUERN_OK;
}

/* What a call does is done when it returns: any address is a stream. */
static quern_status create(int32_t device, void **made)
{
    static char stream;
    (void)device;
    *made = &stream;
    return QUERN_OK;
}

static quern_status use(int32_t device, void *made)
{
    (void)device;
    (void)made;
    return QUERN_OK;
}

static quern_status query(int32_t device, void *stream, bool *done)
{
    (void)device;
    (void)stream;
    *done = true;
    return QUERN_OK;
}

static quern_status record_event(int32_t device, void *event, void *stream)
{
    (void)stream;
    return use(device, event);
}

static quern_status elapsed(int32_t device, void *from, void *to, double *ms)
{
    (void)from;
    (void)to;
    *ms = 0;
    return use(device, NULL);
}

static quern_backend mock = {.name = "mock",
                             .replay_open = replay_open,
                             .replay_close = replay_close,
                             .replay = replay_run,
                             .point = point,
                             .resume = resume};
#define ROW(stage, name)                                                                                     \
    if (quern_backend_cpu.stage.run != NULL)                                                                 \
        mock.stage = (name##_stage){quern_backend_cpu.stage.supports, quern_backend_cpu.stage.workspace,     \
                                    stage##_run, quern_backend_cpu.stage.kernel};

static const quern_cuda_plugin *plugin(quern_status (*set)(quern_status, const char *, ...))
{
    static quern_cuda_plugin table = {.backend = &mock,
                                      .check_device = check_device,
                                      .properties = properties,
                                      .check_pointer = check_pointer,
                                      .count = count_devices,
                                      .device = describe,
                                      .allocate = allocate,
                                      .release = release,
                                      .copy = copy,
                                      .fill = fill,
                                      .stream_create = create,
                                      .stream_destroy = use,
                                      .synchronize = use,
                                      .query = query,
                                      .event_create = create,
                                      .event_destroy = use,
                                      .event_record = record_event,
                                      .event_elapsed = elapsed};
    report = set;
    table.build_id = build_id();
    table.version = quern_version();
    mock.repacked_bytes = quern_backend_cpu.repacked_bytes;
    BACKEND_STAGES(ROW, ROW)
    return &table;
}

/* ---- the loader ---- */

void *__wrap_dlopen(const char *name, int flags);
void *__wrap_dlsym(void *library, const char *symbol);
void *__real_dlopen(const char *name, int flags);
void *__real_dlsym(void *library, const char *symbol);
static char handle;

void *__wrap_dlopen(const char *name, int flags)
{
    return name != NULL && strstr(name, "libquern_cuda") != NULL ? &handle : __real_dlopen(name, flags);
}

void *__wrap_dlsym(void *library, const char *symbol)
{
    quern_cuda_plugin_entry *const entry = plugin;
    void *address;
    if (library != &handle || strcmp(symbol, QUERN_CUDA_PLUGIN_SYMBOL) != 0)
        return __real_dlsym(library, symbol);
    memcpy(&address, &entry, sizeof address); /* ISO C has no cast from a function's pointer to an object's */
    return address;
}
