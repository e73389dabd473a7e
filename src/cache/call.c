/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* call.c - what the calls over a cache share: they check a batch, build a program, and write what the cache's
 * books say of its sequences into the workspace, where the program's steps read it. */
#include "cache/cache.h"

#include "core/error.h"
#include "core/float_state.h"
#include "core/view.h"
#include "runtime/context.h"

quern_status cache_begin(cache_call *call, quern_context *ctx, const quern_exec *exec,
                         const quern_cache *cache, const quern_cache_batch *batch, bool appends)
{
    quern_exec how;
    call->cache = cache;
    call->appends = appends;
    if (ctx == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "ctx is NULL: create one with quern_context_create()");
    const quern_status status = cache_check_batch(cache, batch, appends, call);
    return status == QUERN_OK ? op_exec(exec, &how) : status;
}

quern_status cache_build(cache_call *call, quern_context *ctx, const op_family *family, const char *name,
                         const quern_tensor *like)
{
    op_call *head = &call->head;
    if (like->device != QUERN_CPU)
        return error_set(QUERN_ERR_UNSUPPORTED, "%s is on device %d: the cpu keeps caches", name,
                         (int)like->device);
    head->family = family;
    head->operation = 0;
    head->like = *like;
    head->backend = context_backend(ctx, QUERN_CPU, 0, NULL, &head->exec);
    return head->backend != NULL ? op_program_build(head) : error_status();
}

stage_step cache_step(op_build *b)
{
    cache_call *c = (cache_call *)b->call;
    const int64_t batch = c->batch.batch, more = batch + 1;
    c->slots = op_room(b, QUERN_I32, 1, &batch);
    c->positions = op_room(b, QUERN_I32, 1, &batch);
    c->cu = op_room(b, QUERN_I32, 1, &more);
    return (stage_step){c->slots, c->positions, view_ranges(&c->cu)};
}

void cache_write_step(const op_call *call, const op_frame *frame)
{
    const cache_call *c = (const cache_call *)call;
    int32_t *slots = op_placed(c->slots.data, frame), *positions = op_placed(c->positions.data, frame),
            *cu = op_placed(c->cu.data, frame);
    cu[0] = 0;
    for (int64_t i = 0; i < c->batch.batch; i++) {
        const int64_t count = c->batch.counts[i], tokens = c->cache->sequences[c->batch.sequences[i]].tokens;
        slots[i] = c->batch.sequences[i];
        positions[i] = (int32_t)(c->appends ? tokens : tokens - count);
        cu[i + 1] = (int32_t)(cu[i] + count);
    }
}

cache_plane cache_steps_plane(const cache_call *call, cache_kind kind)
{
    cache_plane plane = cache_plane_of(call->cache, kind, call->batch.table);
    plane.blocks.data = op_address(plane.blocks.data);
    if (plane.table.ndim > 0) plane.table.data = op_address(plane.table.data);
    return plane;
}

quern_status cache_workspace(const cache_call *call, size_t *bytes)
{
    if (bytes == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "bytes is NULL: a place for the size is needed");
    *bytes = call->head.bytes;
    return QUERN_OK;
}

quern_status cache_check_run(const cache_call *call, const void *workspace, size_t bytes)
{
    const quern_status status = view_check_workspace(workspace, bytes, call->head.bytes, &call->head.like);
    return status == QUERN_OK ? cache_check_pages(call) : status;
}

quern_status cache_run(const cache_call *call, void *workspace)
{
    const quern_exec how = QUERN_EXEC_INIT;
    const op_frame frame = op_frame_of(&call->head, &how, NULL, workspace);
    return call->tokens > 0 ? op_program_run(&call->head, &frame) : QUERN_OK;
}
