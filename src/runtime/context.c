/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "runtime/context.h"

#include "core/cpu_features.h"
#include "core/error.h"
#include "core/op.h"
#include "core/parallel.h"
#include "runtime/plugin.h"

#include <sched.h>
#include <stdlib.h>

enum { MAX_THREADS = 1024 };

static int32_t default_threads(void)
{
    const char *env = getenv("OMP_NUM_THREADS");
    if (env != NULL) {
        long n = strtol(env, NULL, 10);
        if (n >= 1 && n <= MAX_THREADS) return (int32_t)n;
    }
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    int n = CPU_COUNT(&set);
    return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n;
}

quern_status quern_context_create(const quern_context_params *params, quern_context **ctx)
{
    quern_context_params p = QUERN_CONTEXT_PARAMS_INIT;
    if (ctx == NULL) return error_argument("ctx is NULL: a place for the context is needed");
    if (params != NULL) {
        const quern_status status = op_struct(&p, params, "params", "QUERN_CONTEXT_PARAMS_INIT");
        if (status != QUERN_OK) return status;
    }
    if (p.threads < 0 || p.threads > MAX_THREADS)
        return error_argument("params.threads is %d: 0 (automatic) to %d is accepted", p.threads,
                              MAX_THREADS);
    quern_cpu_level level;
    const quern_status chosen = quern_host_backend->choose_level(p.cpu_level, &level);
    if (chosen != QUERN_OK) return chosen;
    quern_context *c = calloc(1, sizeof *c);
    void *kept = c != NULL ? quern_host_backend->open() : NULL;
    if (kept == NULL) {
        free(c);
        return error_set(QUERN_ERR_OUT_OF_MEMORY, "no memory for a context of %zu bytes", sizeof *c);
    }
    c->threads = p.threads > 0 ? p.threads : default_threads();
    c->parallel_for = p.parallel_for;
    c->parallel_for_arg = p.parallel_for_arg;
    c->forks = parallel_forks();
    c->cpu_level = level;
    c->prefetch_l2 = cpu_prefetches_into_l2();
    c->kept = kept;
    *ctx = c;
    return QUERN_OK;
}

void quern_context_destroy(quern_context *ctx)
{
    if (ctx != NULL) {
        quern_host_backend->close(ctx->kept);
        replays_close(&ctx->replays);
    }
    free(ctx);
}

int32_t quern_context_threads(const quern_context *ctx)
{
    return ctx != NULL ? ctx->threads : 0;
}

quern_cpu_level quern_context_cpu_level(const quern_context *ctx)
{
    return ctx != NULL ? ctx->cpu_level : QUERN_CPU_LEVEL_AUTO;
}

const quern_backend *context_backend_of(quern_device device, int32_t device_id)
{
    if (device != QUERN_CUDA) return quern_host_backend;
    const quern_cuda_plugin *plugin = plugin_for(device_id);
    return plugin != NULL ? plugin->backend : NULL;
}

const quern_backend *context_backend(quern_context *ctx, quern_device device, int32_t device_id, void *stream,
                                     stage_exec *exec)
{
    const quern_cuda_plugin *plugin = device == QUERN_CUDA ? plugin_for(device_id) : NULL;
    if (device == QUERN_CUDA && plugin == NULL) return NULL;
    *exec = (stage_exec){.device = device,
                         .device_id = device_id,
                         .threads = ctx->threads,
                         .parallel_for = ctx->parallel_for,
                         .parallel_for_arg = ctx->parallel_for_arg,
                         .forks = ctx->forks,
                         .cpu_level = ctx->cpu_level,
                         .prefetch_l2 = ctx->prefetch_l2,
                         .stream = stream,
                         .gemm = ctx->kept};
    if (plugin != NULL && plugin->properties(device_id, exec) != QUERN_OK) return NULL;
    return plugin != NULL ? plugin->backend : quern_host_backend;
}
