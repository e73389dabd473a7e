/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op_frame.c - symbolic pointers, and the addresses that replace them. */
#include "core/op.h"
#include "core/view.h"

#include <string.h>

enum { REGION_SHIFT = 48, WORKSPACE = OP_TENSORS_MAX, STATUS = OP_TENSORS_MAX + 1 };

/* Offsets may be negative (strides are): they count from the middle of a region. */
static const uint64_t middle = (uint64_t)1 << (REGION_SHIFT - 1), within = ((uint64_t)1 << REGION_SHIFT) - 1;

static void *symbolic(int32_t region, uint64_t offset)
{
    return (void *)(uintptr_t)(((uint64_t)region << REGION_SHIFT) + middle +
                               offset); // NOLINT(performance-no-int-to-ptr)
}

void *op_placed(const void *p, const op_frame *frame)
{
    const uint64_t at = (uint64_t)(uintptr_t)p;
    return (void *)(frame->base[at >> REGION_SHIFT] +
                    (uintptr_t)((at & within) - middle)); // NOLINT(performance-no-int-to-ptr)
}

/* What an address is past a multiple of OP_ALIGN_MOST, where no more than its class is known. */
static uint64_t residue(const op_call *call, int32_t tensor)
{
    return call->alignment[tensor] < OP_ALIGN_MOST ? call->alignment[tensor] : 0;
}

int32_t op_pointed(const op_call *call, const void *p, int64_t *bytes)
{
    const uint64_t at = (uint64_t)(uintptr_t)p;
    const int32_t tensor = (int32_t)(at >> REGION_SHIFT);
    *bytes = 0;
    if (tensor >= call->family->tensor_count) return OP_NONE;
    *bytes = (int64_t)((at & within) - middle - residue(call, tensor));
    return tensor;
}

quern_tensor op_view(const op_call *call, int32_t tensor, bool batch)
{
    quern_tensor t = {0};
    if (!op_uses(call, tensor)) return t;
    t = *call->given[tensor];
    view_make_canonical(&t);
    t.data = symbolic(tensor, residue(call, tensor));
    if (t.ndim == 0) {
        t.ndim = 1;
        t.shape[0] = 1;
        t.strides[0] = 1;
    }
    if (batch && call->varlen) t = view_with_batch(&t);
    return t;
}

arena op_workspace(void)
{
    return (arena){symbolic(WORKSPACE, 0), 0};
}

void op_workspace_end(op_call *call, const arena *a)
{
    call->bytes = arena_size(a);
}

void op_frame_of(const op_call *call, const quern_exec *exec, void *const *data, void *workspace,
                 op_frame *frame)
{
    static const char nothing[OP_ALIGN_MOST]
        __attribute__((aligned(OP_ALIGN_MOST))) = {0}; /* the address of no elements */
    frame->exec = call->exec;
    frame->exec.stream = exec->stream;
    frame->exec.status = exec->status != NULL ? exec->status->data : NULL;
    const int32_t count = call->family->tensor_count;
    for (int32_t i = 0; i < count; i++)
        frame->base[i] = call->alignment[i] > 0 ? (uintptr_t)data[i] - (uintptr_t)residue(call, i)
                                                : (uintptr_t)nothing;
    memset(frame->base + count, 0, (size_t)(OP_TENSORS_MAX - count) * sizeof *frame->base);
    frame->base[WORKSPACE] = (uintptr_t)arena_on(workspace).base;
    frame->base[STATUS] = (uintptr_t)frame->exec.status;
}
