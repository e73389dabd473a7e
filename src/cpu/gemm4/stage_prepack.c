/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_prepack.c - the prepack stage, a panel a task. Limit: weights read and written once. */
#include "core/parallel.h"
#include "cpu/gemm4/panels.h"
#include "cpu/gemm4/stages.h"
#include "cpu/kernels/rows/views.h"
#include "cpu/kernels/formats/contents.h"

static void panel_task(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const prepack_args *args = arg;
    const int64_t panels = panels_of(args->n), units = units_of(args->k), expert = index / panels,
                  panel = index % panels;
    const weight_view w =
        weight_of(&args->codes, &args->scales, args->k_major, args->order, args->n, args->k, expert);
    uint8_t *packed = (uint8_t *)args->repacked.data + expert * args->repacked.strides[0] +
                      panel * units * GEMM4_UNIT_BYTES;
    if (!args->inverse) pack_units(&w, panel, 0, units, packed);
    for (int64_t u = 0; args->inverse && u < units; u++)
        unpack_unit(&w, panel, u, packed + u * GEMM4_UNIT_BYTES);
}

quern_status cpu_prepack(const stage_exec *exec, const prepack_args *args, void *workspace)
{
    (void)workspace;
    prepack_args copy = *args;
    if (!args->inverse) {
        const quern_status status = check_scale_bytes(exec, &args->scales, view_rows(&args->scales));
        if (status != QUERN_OK) return status;
    }
    parallel_for(exec, args->repacked.shape[0] * panels_of(args->n), panel_task, &copy);
    return QUERN_OK;
}

int64_t cpu_repacked_bytes(int64_t n, int64_t k)
{
    return panels_of(n) * units_of(k) * GEMM4_UNIT_BYTES;
}
