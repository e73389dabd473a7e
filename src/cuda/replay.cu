/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* replay.cu - a call's launches as one graph.
 *
 * The host pays for each launch: 3.5 to 5.5 us on a virtual machine with an H200, six in a row 20 to 33. A
 * graph costs 2.3 to 2.5 there, whatever it holds. So a call that is made again launches a graph:
 *   the addresses are those of a graph          the graph as it is             2.4 us for six launches
 *   they are others                             recorded, a graph updated      11 us
 *   others that come again, or other launches   recorded, a new graph made     100 us more
 * Recording captures a stream of the replay's own, so that the caller's stream sees nothing but the graph.
 *
 * Callers whose results live on while the next call is made take memory in turns, and layers of a model have
 * weights of their own: so addresses come again, but not at once. A replay keeps a graph for each of
 * GRAPHS_MAX - 1 sets of addresses that came twice; one more graph moves to those that are new. They are few,
 * for a graph takes about 0.9 MB of the host's memory and 0.2 MB of the device's.
 *
 * Launched one by one, as without a replay, are: runs that the caller captures; runs while another thread
 * uses the replay, for nobody waits here; what CUDA cannot record.
 */
#include "replay.cuh"

#include "common/calls.cuh"

#include <atomic>
#include <stdlib.h>
#include <string.h>

namespace
{

enum { GRAPHS_MAX = 8, SEEN_MAX = 32, RUNS_UNUSED = 16 * GRAPHS_MAX };

struct kept_graph {
    cudaGraphExec_t graph; /* NULL: none yet */
    uint64_t used;         /* the run that launched it last */
};

struct replay {
    std::atomic_flag busy;
    cudaStream_t recorder;
    size_t bytes;
    uint64_t runs;
    uint64_t seen[SEEN_MAX]; /* hashes of the addresses that were recorded last, in turn */
    uint32_t recorded;
    int32_t graphs, last;         /* how many there are; the one that was launched last */
    kept_graph graph[GRAPHS_MAX]; /* the first moves */
    unsigned char addresses[];    /* of each graph */
};

unsigned char *addresses_of(replay *r, int32_t graph)
{
    return r->addresses + (size_t)graph * r->bytes;
}

/* The graph with these addresses; -1: there is none. It is the last one or, where addresses take turns, the
 * next. */
int32_t find(replay *r, const void *addresses)
{
    for (int32_t i = 0; i < r->graphs; i++) {
        const int32_t at = (r->last + i) % r->graphs;
        if (r->graph[at].graph != NULL && memcmp(addresses_of(r, at), addresses, r->bytes) == 0) return at;
    }
    return -1;
}

/* Whether addresses come again that were recorded lately. From now on they do. */
bool come_again(replay *r, const void *addresses)
{
    uint64_t hash = 1, word;
    for (size_t at = 0; at + sizeof word <= r->bytes; at += sizeof word) {
        memcpy(&word, (const char *)addresses + at, sizeof word);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    for (int32_t i = 0; i < SEEN_MAX; i++)
        if (r->seen[i] == hash) return true;
    r->seen[r->recorded++ % SEEN_MAX] = hash;
    return false;
}

/* The graph that takes addresses which none has. */
int32_t choose(replay *r, const void *addresses)
{
    if (!come_again(r, addresses) || r->graphs == 0) {
        if (r->graphs == 0) r->graphs = 1;
        return 0;
    }
    if (r->graphs < GRAPHS_MAX) return r->graphs++;
    int32_t oldest = 1;
    for (int32_t i = 2; i < GRAPHS_MAX; i++)
        if (r->graph[i].used < r->graph[oldest].used) oldest = i;
    return r->runs - r->graph[oldest].used > RUNS_UNUSED ? oldest : 0;
}

/* Whether the stream takes a graph: a stream that is captured records launches instead. */
bool takes_graphs(cudaStream_t stream)
{
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status == cudaStreamCaptureStatusNone;
    (void)cudaGetLastError();
    return false;
}

/* Brings a graph to the launches that were recorded. */
cudaError_t adopt(cudaGraphExec_t *graph, cudaGraph_t recorded)
{
    cudaGraphExecUpdateResultInfo info;
    if (*graph != NULL) {
        if (cudaGraphExecUpdate(*graph, recorded, &info) == cudaSuccess) return cudaSuccess;
        (void)cudaGetLastError();
        (void)cudaGraphExecDestroy(*graph);
        *graph = NULL;
    }
    return cudaGraphInstantiate(graph, recorded, 0);
}

/* Records what `run` launches and brings the graph to it. False where CUDA or a stage refuses: nothing has
 * been launched then. */
bool record(replay *r, cudaGraphExec_t *graph, const stage_exec *exec, backend_run *run, const void *arg)
{
    stage_exec own = *exec;
    cudaGraph_t launches = NULL;
    own.stream = r->recorder;
    cudaError_t code = cudaStreamBeginCapture(r->recorder, cudaStreamCaptureModeRelaxed);
    const bool ran = code == cudaSuccess && run(arg, &own) == QUERN_OK;
    if (code == cudaSuccess) code = cudaStreamEndCapture(r->recorder, &launches);
    if (ran && code == cudaSuccess) code = adopt(graph, launches);
    if (launches != NULL) (void)cudaGraphDestroy(launches);
    if (code != cudaSuccess) (void)cudaGetLastError();
    return ran && code == cudaSuccess;
}

quern_status start(replay *r, const stage_exec *exec, const void *addresses, backend_run *run,
                   const void *arg)
{
    const device_scope scope(exec->device_id);
    if (scope.code != cudaSuccess) return cuda_report(scope.code, "choosing the device");
    if (!takes_graphs((cudaStream_t)exec->stream)) return run(arg, exec);
    int32_t at = find(r, addresses);
    if (at < 0) {
        at = choose(r, addresses);
        if (!record(r, &r->graph[at].graph, exec, run, arg)) return run(arg, exec);
        memcpy(addresses_of(r, at), addresses, r->bytes);
    }
    r->last = at;
    r->graph[at].used = ++r->runs;
    return cuda_report(cudaGraphLaunch(r->graph[at].graph, (cudaStream_t)exec->stream), "launching a graph");
}

} // namespace

void *replay_open(const stage_exec *exec, size_t bytes)
{
    const device_scope scope(exec->device_id);
    replay *r = (replay *)calloc(1, sizeof *r + GRAPHS_MAX * bytes);
    if (r == NULL) return NULL;
    r->bytes = bytes;
    if (scope.code == cudaSuccess &&
        cudaStreamCreateWithFlags(&r->recorder, cudaStreamNonBlocking) == cudaSuccess)
        return r;
    (void)cudaGetLastError();
    free(r);
    return NULL;
}

void replay_close(void *kept)
{
    replay *r = (replay *)kept;
    if (r == NULL) return;
    const relaxed_capture relaxed;
    /* CUDA keeps graphs that still run until their end. */
    for (int32_t i = 0; i < r->graphs; i++)
        if (r->graph[i].graph != NULL) (void)cudaGraphExecDestroy(r->graph[i].graph);
    (void)cudaStreamDestroy(r->recorder);
    free(r);
}

quern_status replay_run(void *kept, const stage_exec *exec, const void *addresses, backend_run *run,
                        const void *arg)
{
    replay *r = (replay *)kept;
    if (r->busy.test_and_set(std::memory_order_acquire)) return run(arg, exec);
    const quern_status status = start(r, exec, addresses, run, arg);
    r->busy.clear(std::memory_order_release);
    return status;
}

/* Launches to come wait for the last ones' nodes. Edges that say more than that are not read. */
bool capture_point(const stage_exec *exec, backend_point *point)
{
    const device_scope scope(exec->device_id);
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaGraphNode_t *node = NULL;
    unsigned long long id = 0;
    size_t count = 0;
    if (scope.code != cudaSuccess || takes_graphs(stream)) return false;
#if CUDART_VERSION >= 13000
    const cudaError_t code = cudaStreamGetCaptureInfo(stream, &status, &id, NULL, &node, NULL, &count);
#else
    const cudaError_t code = cudaStreamGetCaptureInfo_v2(stream, &status, &id, NULL, &node, &count);
#endif
    if (code != cudaSuccess) (void)cudaGetLastError();
    if (code != cudaSuccess || status != cudaStreamCaptureStatusActive || count > BACKEND_POINT_MOST)
        return false;
    point->count = (int32_t)count;
    point->recording = id;
    for (size_t i = 0; i < count; i++) point->after[i] = (void *)node[i];
    return true;
}

quern_status capture_resume(const stage_exec *exec, const backend_point *const *points, int32_t count)
{
    enum { MOST = 8 * BACKEND_POINT_MOST };
    const device_scope scope(exec->device_id);
    cudaGraphNode_t node[MOST];
    size_t nodes = 0;
    if (scope.code != cudaSuccess) return cuda_report(scope.code, "choosing the device");
    for (int32_t p = 0; p < count; p++)
        for (int32_t i = 0; i < points[p]->count && nodes < MOST; i++) {
            const cudaGraphNode_t x = (cudaGraphNode_t)points[p]->after[i];
            size_t known = 0;
            while (known < nodes && node[known] != x) known++;
            if (known == nodes) node[nodes++] = x;
        }
    return cuda_report(
#if CUDART_VERSION >= 13000
        cudaStreamUpdateCaptureDependencies((cudaStream_t)exec->stream, node, NULL, nodes,
                                            cudaStreamSetCaptureDependencies),
#else
        cudaStreamUpdateCaptureDependencies((cudaStream_t)exec->stream, node, nodes,
                                            cudaStreamSetCaptureDependencies),
#endif
        "a recorded stage beside others");
}
