/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nvfp4_profiles.c - the error of NVFP4: the relative RMSE of every profile and choice of scales, with one
 * global over 2^18 values, on normal, Laplace and heavy-tailed data (Student's t, 3 degrees of freedom). The
 * targets are those of rne, four_over_six and search on normal data. Prints a line per figure; exit code 1 if
 * one misses.
 */
#include "program.h"

#include <quern/nvfp4.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { COUNT = 1 << 18 };
typedef enum data_kind { NORMAL, LAPLACE, HEAVY, KINDS } data_kind;

static double uniform(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return ((double)(*state >> 11) + 0.5) * 0x1p-53;
}

static double normal(uint64_t *state)
{
    const double r = sqrt(-2 * log(uniform(state))), angle = 6.283185307179586 * uniform(state);
    return r * cos(angle);
}

static double value(data_kind kind, uint64_t *state)
{
    if (kind == NORMAL) return normal(state);
    if (kind == LAPLACE) return (uniform(state) < 0.5 ? 1 : -1) * log(uniform(state));
    double squares = 0;
    for (int i = 0; i < 3; i++) {
        const double x = normal(state);
        squares += x * x;
    }
    return normal(state) / sqrt(squares / 3);
}

static double relative_rmse(quern_context *ctx, const float *x, int profile, int scales)
{
    static float back[COUNT];
    static uint8_t codes[COUNT / 2], block_scales[COUNT / 16];
    float global;
    const int64_t n = COUNT, half = COUNT / 2, blocks = COUNT / 16;
    const quern_tensor x_view = quern_tensor_contiguous((void *)(uintptr_t)x, QUERN_F32, 1, &n),
                       codes_view = quern_tensor_contiguous(codes, QUERN_U8, 1, &half),
                       scales_view = quern_tensor_contiguous(block_scales, QUERN_U8, 1, &blocks),
                       global_view = quern_tensor_contiguous(&global, QUERN_F32, 0, NULL),
                       back_view = quern_tensor_contiguous(back, QUERN_F32, 1, &n);
    quern_nvfp4_quantize_params p = QUERN_NVFP4_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_quantize_tensors t = QUERN_NVFP4_QUANTIZE_TENSORS_INIT;
    quern_nvfp4_dequantize_params dp = QUERN_NVFP4_DEQUANTIZE_PARAMS_INIT;
    quern_nvfp4_dequantize_tensors dt = QUERN_NVFP4_DEQUANTIZE_TENSORS_INIT;
    double error = 0, size = 0;
    size_t bytes;
    p.profile = dp.profile = (quern_nvfp4_profile)profile;
    p.scales = (quern_nvfp4_scales)scales;
    t.x = &x_view;
    t.codes = dt.codes = &codes_view;
    t.scales = dt.scales = &scales_view;
    t.global = dt.global = &global_view;
    dt.x = &back_view;
    check(quern_nvfp4_quantize_workspace(ctx, &p, &t, &bytes));
    void *workspace = malloc(bytes + 1);
    if (workspace == NULL) exit(4);
    check(quern_nvfp4_quantize(ctx, NULL, &p, &t, workspace, bytes));
    check(quern_nvfp4_dequantize(ctx, NULL, &dp, &dt, NULL, 0));
    free(workspace);
    for (int64_t i = 0; i < COUNT; i++) {
        const double d = (double)back[i] - (double)x[i];
        error += d * d;
        size += (double)x[i] * (double)x[i];
    }
    return sqrt(error / size);
}

int main(void)
{
    static const char *const profiles[] = {"rne", "halfstep", "modelopt", "compressed_tensors"},
                             *const choices[] = {"rne", "four_over_six", "search"},
                             *const data[] = {"normal", "Laplace", "heavy-tailed"};
    static const double targets[] = {0.09515, 0.08705, 0.0815}; /* of rne on normal data */
    static float x[COUNT];
    quern_context *ctx;
    bool passed = true;
    check(quern_context_create(NULL, &ctx));
    for (int kind = 0; kind < KINDS; kind++) {
        uint64_t state = 11 + (uint64_t)kind;
        for (int64_t i = 0; i < COUNT; i++) x[i] = (float)value((data_kind)kind, &state);
        for (int profile = 0; profile < 4; profile++)
            for (int scales = 0; scales < 3; scales++) {
                char line[80], target[24] = "";
                const bool judged = kind == NORMAL && profile == 0;
                if (profile == QUERN_NVFP4_PROFILE_HALFSTEP && scales > 0) continue;
                const double rmse = relative_rmse(ctx, x, profile, scales);
                const bool fine = !judged || rmse <= targets[scales];
                snprintf(line, sizeof line, "relative RMSE, %s data, %s, scales %s", data[kind],
                         profiles[profile], choices[scales]);
                if (judged) snprintf(target, sizeof target, "target <= %-8.4g", targets[scales]);
                printf("%-74s %-18s measured %-8.4g %-8s %s\n", line, target, rmse, "",
                       !judged ? ""
                       : fine  ? "PASS"
                               : "FAIL");
                passed = passed && fine;
            }
    }
    quern_context_destroy(ctx);
    return passed ? 0 : 1;
}
