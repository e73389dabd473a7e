/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * bridge.c - runs every stage of a test on the GPU, though its tensors stand in host memory. Linked with
 * --wrap=context_backend, so the library's drivers, and with them every test written for the CPU, get a stage
 * table whose stages
 *
 *   copy each tensor of their arguments to the device, at the same alignment, between guards;
 *   run the CUDA stage on a stream of its own with a poisoned workspace between guards: twice directly, then
 *   captured in a graph and replayed, each from the same starting bytes;
 *   fail the test unless the three results are the same bits, guards included, and copy the first back.
 *   QUERN_GPU_VARIANT names a variant to choose where its stage has it.
 *   QUERN_GPU_RUNS=1 leaves out the repetitions: the races that a tool looks for are in each of them.
 *
 * What lies between a strided tensor's elements travels too, so the tests' own guards see stray writes.
 */
#include "backend.h"
#include "runtime/build_id.h"
#include "cmocka_c11.h"
#include "runtime/context.h"
#include "core/error.h"

#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { GUARD = 512, PATTERN = 0x5a, RUNS = 3, MAX_TENSORS = 96 };
static const size_t most_bytes = (size_t)1
                                 << 30; /* of a tensor with its gaps; offsets_test.c has the large ones */

quern_cuda_plugin_entry quern_cuda_backend;
const quern_backend *__wrap_context_backend(const quern_context *ctx, quern_device device, int32_t device_id,
                                            void *stream, stage_exec *exec);
bool __wrap_cpu_has_level(quern_cpu_level level);

static const quern_backend *cuda;
static cudaStream_t stream;

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        const cudaError_t code_ = (call);                                                                    \
        if (code_ != cudaSuccess) fail_msg("%s: %s", #call, cudaGetErrorString(code_));                      \
    } while (0)

/* A GPU's context does not survive a fork: tests of it are the CPU's. */
pid_t fork(void)
{
    print_message("no fork here\n");
    skip();
}

/* One tensor, or the workspace, of a call. */
typedef struct image {
    char *host;              /* what travels, or NULL: poison */
    unsigned char *device;   /* guard, gap up to the same alignment, bytes, guard */
    unsigned char *start[2]; /* the buffer as it goes up; as the first run left it */
    size_t bytes, at, total;
} image;

static size_t span_of(const quern_tensor *t)
{
    int64_t last = 0;
    for (int32_t i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 0) return 0;
        last += (t->shape[i] - 1) * t->strides[i];
    }
    return (size_t)(last + 1) * quern_dtype_size(t->dtype);
}

static void *bytes_or_fail(size_t n)
{
    void *p = malloc(n + 1);
    if (p == NULL) fail_msg("the test is out of memory");
    return p;
}

static image image_make(void *host, size_t bytes, size_t alignment)
{
    image m = {host, NULL, {NULL, NULL}, bytes, GUARD + alignment, GUARD + alignment + bytes + GUARD};
    m.start[0] = bytes_or_fail(m.total);
    m.start[1] = bytes_or_fail(m.total);
    memset(m.start[0], PATTERN, m.total);
    if (host != NULL) memcpy(m.start[0] + m.at, host, bytes);
    else memset(m.start[0] + m.at, 0xff, bytes);
    CHECK(cudaMalloc((void **)&m.device, m.total));
    return m;
}

static void image_free(image *m)
{
    CHECK(cudaFree(m->device));
    free(m->start[0]);
    free(m->start[1]);
}

/* Checks the run's bytes against the first run's; keeps the first run's. The workspace may differ. */
static void image_take(image *m, int run, const char *stage)
{
    unsigned char *now = bytes_or_fail(m->total);
    CHECK(cudaMemcpyAsync(now, m->device, m->total, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (size_t i = 0; i < m->total; i++)
        if ((i < m->at || i >= m->at + m->bytes) && now[i] != PATTERN)
            fail_msg("%s: byte %lld of a buffer of %zu was written", stage, (long long)i - (long long)m->at,
                     m->bytes);
    if (run == 0) {
        memcpy(m->start[1], now, m->total);
    } else if (m->host != NULL) {
        for (size_t i = 0; i < m->total; i++)
            if (now[i] != m->start[1][i])
                fail_msg("%s: byte %zu of a buffer of %zu differs in %s", stage, i - m->at, m->bytes,
                         run == 1 ? "the second run" : "the replayed graph");
    }
    free(now);
}

/* Bytes of the host that tensors of a call stand in. */
typedef struct extent {
    char *from, *to;
} extent;

/* Adds a tensor's bytes, joined with those that they overlap: views of one tensor, its columns, say. */
static size_t join(extent *all, size_t count, extent e)
{
    for (size_t i = 0; i < count;) {
        if (e.from >= all[i].to || all[i].from >= e.to) {
            i++;
            continue;
        }
        e.from = all[i].from < e.from ? all[i].from : e.from;
        e.to = all[i].to > e.to ? all[i].to : e.to;
        all[i] = all[--count];
        i = 0;
    }
    all[count] = e;
    return count + 1;
}

/* Images of the bytes that a call's tensors stand in, to which the tensors move. Returns their number. */
static size_t carry(void *args, const size_t *offsets, size_t count, image *images)
{
    extent all[MAX_TENSORS];
    size_t held = 0, made;
    for (size_t i = 0; i < count; i++) {
        const quern_tensor *t = (const quern_tensor *)((char *)args + offsets[i]);
        if (held == MAX_TENSORS) fail_msg("more than %d tensors", MAX_TENSORS);
        if (t->ndim > 0 && t->data != NULL && span_of(t) > 0)
            held = join(all, held, (extent){(char *)t->data, (char *)t->data + span_of(t)});
    }
    for (made = 0; made < held; made++)
        images[made] = image_make(all[made].from, (size_t)(all[made].to - all[made].from),
                                  (uintptr_t)all[made].from % 256);
    for (size_t i = 0; i < count; i++) {
        quern_tensor *t = (quern_tensor *)((char *)args + offsets[i]);
        size_t at = 0;
        if (t->ndim == 0 || (t->data == NULL && span_of(t) > 0)) continue; /* absent, or not wanted */
        t->device = QUERN_CUDA;
        if (span_of(t) > 0) {
            while ((char *)t->data < all[at].from || (char *)t->data >= all[at].to) at++;
            t->data = images[at].device + images[at].at + ((char *)t->data - all[at].from);
            continue;
        }
        if (made == MAX_TENSORS) fail_msg("more than %d tensors", MAX_TENSORS);
        images[made] = image_make((char *)"", 0, (uintptr_t)t->data % 256);
        t->data = images[made].device + images[made].at;
        made++;
    }
    return made;
}

typedef quern_status stage_call(const stage_exec *exec, const void *args, void *workspace);

static quern_status bridge(const char *stage, const stage_exec *given, void *args, const size_t *offsets,
                           size_t count, size_t workspace_bytes, stage_call *call)
{
    image images[MAX_TENSORS + 2];
    stage_exec exec = *given;
    exec.device = QUERN_CUDA;
    exec.stream = stream;
    for (size_t i = 0; i < count; i++) {
        const quern_tensor *t = (const quern_tensor *)((char *)args + offsets[i]);
        if (t->data != NULL && span_of(t) > most_bytes) {
            print_message("%s: a tensor over %zu bytes is not carried\n", stage, span_of(t));
            skip();
        }
    }
    size_t made = carry(args, offsets, count, images);
    if (given->status != NULL) {
        images[made] = image_make(given->status, sizeof *given->status, (uintptr_t)given->status % 256);
        exec.status = (int32_t *)(void *)(images[made].device + images[made].at);
        made++;
    }
    images[made] = image_make(NULL, workspace_bytes, 1);
    void *workspace = workspace_bytes > 0 ? images[made].device + images[made].at : NULL;
    made++;
    const char *fewer = getenv("QUERN_GPU_RUNS");
    const int runs = fewer != NULL && atoi(fewer) > 0 && atoi(fewer) < RUNS ? atoi(fewer) : RUNS;
    quern_status status = QUERN_OK;
    for (int run = 0; run < runs && status == QUERN_OK; run++) {
        cudaGraph_t graph;
        cudaGraphExec_t replay;
        for (size_t i = 0; i < made; i++)
            CHECK(cudaMemcpyAsync(images[i].device, images[i].start[0], images[i].total,
                                  cudaMemcpyHostToDevice, stream));
        CHECK(cudaStreamSynchronize(stream));
        if (run == 2) CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        status = call(&exec, args, workspace);
        if (status != QUERN_OK) fail_msg("%s: %s", stage, quern_last_error(NULL));
        if (run == 2) {
            CHECK(cudaStreamEndCapture(stream, &graph));
            CHECK(cudaGraphInstantiate(&replay, graph, 0));
            CHECK(cudaGraphLaunch(replay, stream));
            CHECK(cudaStreamSynchronize(stream));
            CHECK(cudaGraphExecDestroy(replay));
            CHECK(cudaGraphDestroy(graph));
        }
        const cudaError_t code = cudaStreamSynchronize(stream);
        if (code != cudaSuccess) fail_msg("%s: %s", stage, cudaGetErrorString(code));
        for (size_t i = 0; i < made; i++) image_take(&images[i], run, stage);
    }
    for (size_t i = 0; i < made; i++) {
        /* What a file's mapping holds cannot be written, and does not change. */
        const unsigned char *now = images[i].start[1] + images[i].at;
        if (images[i].host != NULL && memcmp(images[i].host, now, images[i].bytes) != 0)
            memcpy(images[i].host, now, images[i].bytes);
        image_free(&images[i]);
    }
    return status;
}

/* Where the views of a stage's arguments stand; returns how many there are. */
#define AT(member) offsetof(fields_of, member),
#define VIEWS(name, NAME)                                                                                    \
    static size_t name##_views(const size_t **offsets)                                                       \
    {                                                                                                        \
        typedef name##_args fields_of;                                                                       \
        static const size_t all[] = {NAME##_TENSORS(AT, AT, AT)};                                            \
        *offsets = all;                                                                                      \
        return sizeof all / sizeof *all;                                                                     \
    }
BACKEND_ARGS(VIEWS)

/* Those of its members. */
static size_t attend_gate_views(const size_t **offsets)
{
    static const size_t at[] = {offsetof(attend_gate_args, branch[0]), offsetof(attend_gate_args, branch[1]),
                                offsetof(attend_gate_args, branch[2]), offsetof(attend_gate_args, select),
                                offsetof(attend_gate_args, gate)};
    static size_t (*const views[])(const size_t **) = {attend_views, attend_views, attend_views, select_views,
                                                       gate_views};
    static size_t all[MAX_TENSORS];
    size_t count = 0;
    for (size_t m = 0; m < sizeof at / sizeof *at; m++) {
        const size_t *own, most = views[m](&own);
        if (count + most > MAX_TENSORS) fail_msg("attend_gate: more than %d tensors", MAX_TENSORS);
        for (size_t i = 0; i < most; i++) all[count++] = at[m] + own[i];
    }
    *offsets = all;
    return count;
}

#define STAGE_BRIDGE(stage, name)                                                                            \
    static bool stage##_supports(const stage_exec *exec, const name##_args *args, char why[STAGE_WHY_BYTES]) \
    {                                                                                                        \
        return STAGE_TAKES(cuda->stage, exec, args, why);                                                    \
    }                                                                                                        \
    static size_t stage##_workspace(const stage_exec *exec, const name##_args *args)                         \
    {                                                                                                        \
        return STAGE_WORKSPACE(cuda->stage, exec, args);                                                     \
    }                                                                                                        \
    static quern_status stage##_call(const stage_exec *exec, const void *args, void *workspace)              \
    {                                                                                                        \
        return cuda->stage.run(exec, args, workspace);                                                       \
    }                                                                                                        \
    static quern_status stage##_run(const stage_exec *exec, const name##_args *args, void *workspace)        \
    {                                                                                                        \
        name##_args copy = *args;                                                                            \
        const size_t *offsets = NULL, count = name##_views(&offsets);                                        \
        (void)workspace;                                                                                     \
        return bridge(#stage, exec, &copy, offsets, count, stage##_workspace(exec, args), stage##_call);     \
    }
BACKEND_STAGES(STAGE_BRIDGE, STAGE_BRIDGE)

static quern_backend bridged = {.name = "cuda, from host memory"};
#define ROW(stage, name)                                                                                     \
    if (cuda->stage.run != NULL)                                                                             \
        bridged.stage = (name##_stage){stage##_supports, stage##_workspace, stage##_run, cuda->stage.kernel};

const quern_backend *__wrap_context_backend(const quern_context *ctx, quern_device device, int32_t device_id,
                                            void *ignored, stage_exec *exec)
{
    (void)device;
    (void)ignored;
    const quern_cuda_plugin *plugin = quern_cuda_backend(error_set);
    if (cuda == NULL) {
        if (plugin->build_id != build_id()) fail_msg("the plugin is of another build");
        if (plugin->check_device(0) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        cuda = plugin->backend;
        BACKEND_STAGES(ROW, ROW)
        bridged.repacked_bytes = cuda->repacked_bytes;
    }
    *exec = (stage_exec){
        .device = QUERN_CPU, .device_id = device_id, .threads = ctx->threads, .cpu_level = ctx->cpu_level};
    if (plugin->properties(0, exec) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    const char *variant = getenv("QUERN_GPU_VARIANT");
    exec->variant = variant != NULL && *variant != '\0' ? variant : NULL;
    return &bridged;
}

/* One level is enough: the CPU's kernels do not run. */
bool __wrap_cpu_has_level(quern_cpu_level level)
{
    return level == QUERN_CPU_LEVEL_PORTABLE;
}
