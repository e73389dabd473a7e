/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "dsv4_states.h"

#include "cmocka_c11.h"
#include "tensor.h"

#include <stdlib.h>
#include <string.h>

dsv4_states dsv4_states_make(const quern_dsv4_compress_params *params, int64_t width, int64_t ring,
                             int64_t count)
{
    const bool csa = params->kind == QUERN_DSV4_CSA;
    dsv4_states s = {
        .params = *params, .count = count, .floats = ((csa ? 6 : 3) + (csa ? 4 : 2) * ring) * width};
    const size_t bytes = (size_t)(count * s.floats) * sizeof *s.rows;
    assert_true(count <= DSV4_STATES_MOST);
    if (s.params.ratio == 0) s.params.ratio = csa ? 4 : 128;
    s.rows = malloc(bytes + 1);
    memset(s.rows, 0xff, bytes);
    return s;
}

void dsv4_states_free(dsv4_states *s)
{
    free(s->rows);
}

int64_t dsv4_states_held(const dsv4_states *s, int32_t slot)
{
    return s->position[slot] - s->merged[slot];
}

quern_status dsv4_states_append(dsv4_states *s, quern_context *ctx, const int32_t *slots,
                                const int64_t *counts, int64_t batch, const quern_dsv4_append_tensors *t)
{
    const int64_t shape[] = {s->count, s->floats}, more = batch + 1;
    int32_t positions[DSV4_STATES_MOST], cu[DSV4_STATES_MOST + 1] = {0};
    for (int64_t b = 0; b < batch; b++) {
        positions[b] = s->position[slots[b]];
        cu[b + 1] = cu[b] + (int32_t)counts[b];
    }
    const quern_tensor views[] = {quern_tensor_contiguous((void *)(uintptr_t)slots, QUERN_I32, 1, &batch),
                                  quern_tensor_contiguous(positions, QUERN_I32, 1, &batch),
                                  quern_tensor_contiguous(cu, QUERN_I32, 1, &more),
                                  quern_tensor_contiguous(s->rows, QUERN_F32, 2, shape),
                                  quern_tensor_contiguous(s->merged, QUERN_I32, 1, shape)};
    quern_dsv4_append_tensors whole = *t;
    size_t bytes;
    whole.slots = &views[0];
    whole.positions = &views[1];
    whole.cu = &views[2];
    whole.states = &views[3];
    whole.merged = &views[4];
    quern_status status = quern_dsv4_append_step_workspace(ctx, &s->params, &whole, &bytes);
    if (status != QUERN_OK) return status;
    test_workspace w = test_workspace_make(bytes);
    status = quern_dsv4_append_step(ctx, NULL, &s->params, &whole, w.data, bytes);
    test_workspace_close(&w);
    for (int64_t b = 0; b < batch && status == QUERN_OK; b++) s->position[slots[b]] += (int32_t)counts[b];
    return status;
}
