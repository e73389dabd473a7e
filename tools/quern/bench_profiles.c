/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * bench_profiles.c - nvfp4-profiles: the error of NVFP4, as the relative RMSE of every profile
 * and choice of scales, with one global over 2^18 values, on normal, Laplace and heavy-tailed data (Student's
 * t, 3 degrees of freedom).
 */
#include "bench.h"

#include "command.h"

#include <quern/nvfp4.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { COUNT = 1 << 18 };
typedef enum data_kind { GAUSSIAN, LAPLACE, HEAVY, KINDS } data_kind;

static const char *const kind_names[] = {"normal", "laplace", "heavy-tailed"};

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
    if (kind == GAUSSIAN) return normal(state);
    if (kind == LAPLACE) return (uniform(state) < 0.5 ? 1 : -1) * log(uniform(state));
    double squares = 0;
    for (int i = 0; i < 3; i++) {
        const double x = normal(state);
        squares += x * x;
    }
    return normal(state) / sqrt(squares / 3);
}

/* Values, and what they become. */
typedef struct round_trip {
    float x[COUNT], back[COUNT], global;
    uint8_t codes[COUNT / 2], scales[COUNT / 16];
} round_trip;

static quern_status run_trip(round_trip *r, quern_nvfp4_profile profile, quern_nvfp4_scales scales,
                             quern_context *ctx)
{
    const int64_t n = COUNT, half = COUNT / 2, blocks = COUNT / 16;
    const quern_tensor x = quern_tensor_contiguous(r->x, QUERN_F32, 1, &n),
                       back = quern_tensor_contiguous(r->back, QUERN_F32, 1, &n),
                       codes = quern_tensor_contiguous(r->codes, QUERN_U8, 1, &half),
                       bytes = quern_tensor_contiguous(r->scales, QUERN_U8, 1, &blocks),
                       global = quern_tensor_contiguous(&r->global, QUERN_F32, 0, NULL);
    quern_nvfp4_quantize_params p = QUERN_NVFP4_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_quantize_tensors t = QUERN_NVFP4_QUANTIZE_TENSORS_INIT;
    quern_nvfp4_dequantize_params dp = QUERN_NVFP4_DEQUANTIZE_PARAMS_INIT;
    quern_nvfp4_dequantize_tensors dt = QUERN_NVFP4_DEQUANTIZE_TENSORS_INIT;
    size_t needed;
    p.profile = dp.profile = profile;
    p.scales = scales;
    t.x = &x;
    t.codes = dt.codes = &codes;
    t.scales = dt.scales = &bytes;
    t.global = dt.global = &global;
    dt.x = &back;
    quern_status status = quern_nvfp4_quantize_workspace(ctx, &p, &t, &needed);
    void *workspace = status == QUERN_OK ? malloc(needed + 1) : NULL;
    if (status == QUERN_OK && workspace == NULL) status = QUERN_ERR_OUT_OF_MEMORY;
    if (status == QUERN_OK) status = quern_nvfp4_quantize(ctx, NULL, &p, &t, workspace, needed);
    free(workspace);
    return status == QUERN_OK ? quern_nvfp4_dequantize(ctx, NULL, &dp, &dt, NULL, 0) : status;
}

static double relative_rmse(const round_trip *r)
{
    double error = 0, size = 0;
    for (int64_t i = 0; i < COUNT; i++) {
        const double x = (double)r->x[i], d = (double)r->back[i] - x;
        error += d * d;
        size += x * x;
    }
    return sqrt(error / size);
}

static quern_status measure(round_trip *r, const bench_case *c, quern_context *ctx, bench_results *to)
{
    static const char *const profiles[] = {"rne", "halfstep", "modelopt", "compressed-tensors"},
                             *const choices[] = {"rne", "four-over-six", "search"};
    for (int kind = 0; kind < KINDS; kind++) {
        uint64_t state = 11 + (uint64_t)kind;
        for (int64_t i = 0; i < COUNT; i++) r->x[i] = (float)value((data_kind)kind, &state);
        for (int profile = 0; profile < 4; profile++)
            for (int scales = 0; scales < 3; scales++) {
                if (profile == QUERN_NVFP4_PROFILE_HALFSTEP && scales > 0) continue;
                const quern_status status =
                    run_trip(r, (quern_nvfp4_profile)profile, (quern_nvfp4_scales)scales, ctx);
                if (status != QUERN_OK) return status;
                const double rmse = relative_rmse(r);
                printf("%-14s %-20s scales %-14s relative RMSE %.5f\n", kind_names[kind], profiles[profile],
                       choices[scales], rmse);
                bench_result *row = bench_add(to, c, ctx, "nvfp4-profiles");
                row->value = rmse;
                snprintf(row->label, sizeof row->label, "%s %s %s", kind_names[kind], profiles[profile],
                         choices[scales]);
                row->extra = json_pack("{s:s, s:s, s:s, s:f}", "data", kind_names[kind], "profile",
                                       profiles[profile], "scales", choices[scales], "relative_rmse", rmse);
            }
    }
    return QUERN_OK;
}

int bench_profiles(const bench_case *c, quern_context *ctx, bench_results *to)
{
    round_trip *r = need_memory(sizeof *r);
    const quern_status status = measure(r, c, ctx, to);
    free(r);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}
