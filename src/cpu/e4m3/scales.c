/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "cpu/e4m3/scales.h"

#include "cpu/kernels/formats/format_kernels.h"
#include "cpu/levels.h"

#include <math.h>

/* No code of up to 448 leaves f32 with a smaller scale. */
static const float large = 0x1p119f;

/* The largest magnitude among a block's codes. */
static float largest_of(const stage_exec *exec, const e4m3_gemm_args *args, int64_t down, int64_t across)
{
    enum { PIECE = 256 };
    const quern_tensor *codes = &args->codes;
    const int64_t row0 = down * args->block_rows, column0 = across * args->block_columns;
    const int64_t rows =
                      codes->shape[0] - row0 < args->block_rows ? codes->shape[0] - row0 : args->block_rows,
                  columns = codes->shape[1] - column0 < args->block_columns ? codes->shape[1] - column0
                                                                            : args->block_columns;
    float most = 0.0f, values[PIECE];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c += PIECE) {
            const int64_t n = columns - c < PIECE ? columns - c : PIECE;
            cpu_kernels_for(exec->cpu_level)
                ->formats->widen_e4m3(
                    (const uint8_t *)codes->data + (row0 + r) * codes->strides[0] + column0 + c, n, values);
            for (int64_t i = 0; i < n; i++) most = fabsf(values[i]) > most ? fabsf(values[i]) : most;
        }
    return most;
}

quern_status e4m3_check_scales(const stage_exec *exec, const e4m3_gemm_args *args)
{
    const quern_tensor *t = &args->scales;
    for (int64_t i = 0; i < t->shape[0]; i++)
        for (int64_t j = 0; j < t->shape[1]; j++) {
            const float scale = e4m3_scale_at(t, i, j);
            float most = 0.0f;
            if (fabsf(scale) <= large) continue;
            if (isfinite(scale)) most = largest_of(exec, args, i, j);
            if (isfinite(scale) && isfinite(most * scale)) continue;
            int64_t byte = 0xFE; /* the largest that the block's codes allow */
            while (byte > 0 && !isfinite(most * e8m0_value((uint8_t)byte))) byte--;
            return stage_report(exec,
                                (stage_fault){QUERN_STATUS_BAD_SCALE, t, i * t->shape[1] + j, .most = byte});
        }
    return QUERN_OK;
}
