/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - pooling's gradients on Hopper: entries of 512 channels, 16-bit projections, r 4 with both
 * series or r 128 with one. */
#include "hopper/tma.cuh"
#include "pool/sm90/params.cuh"
#include "variants.cuh"

static bool is_short(const pool_args *args)
{
    return args->overlap && args->ratio == SHORT_RATIO;
}

static bool is_long(const pool_args *args)
{
    return !args->overlap && args->ratio == LONG_RATIO;
}

/* Whether the copy engine can take boxes of rows. */
static bool has_boxes(const quern_tensor &t)
{
    quern_tensor rows = t;
    if (!present(t)) return true;
    rows.ndim = 4;
    rows.shape[2] = 1;
    rows.shape[3] = t.shape[2];
    return tma_can(rows);
}

static bool takes(const pool_args *args)
{
    return is_short(args) || (is_long(args) && has_boxes(args->proj) && has_boxes(args->d_proj));
}

static bool supports(const stage_exec *exec, const pool_args *args, char[STAGE_WHY_BYTES])
{
    const quern_dtype dtype = args->proj.dtype;
    const entry_args &e = args->entry;
    const int64_t rotated = present(e.cos_sin) ? e.cos_sin.shape[1] : 0;
    return exec->compute == 90 && exec->shared_bytes >= POOL_SM90_SHARED && args->width == WIDTH &&
           present(args->proj) && (dtype == QUERN_BF16 || dtype == QUERN_F16) && !present(args->prev_b) &&
           takes(args) && !e.hadamard && rotated % 2 == 0 && rows_aligned(args->proj, 16) &&
           (!present(args->d_proj) || rows_aligned(args->d_proj, 16)) && args->d_out.dtype == dtype &&
           rows_aligned(args->d_out, 16) && pool_rows_of_entries(args) > 0;
}

struct pool_space {
    pool_place *plan;
    float *parts, *norm_parts;
};

static int64_t runs_of(const pool_args *args)
{
    const int64_t entries = pool_rows_of_entries(args), most = is_short(args) ? SHORT_RUNS : LONG_RUNS,
                  runs = entries < most ? entries : most;
    return runs > 0 ? runs : 1;
}

static pool_space carve(const pool_args *args, arena *w)
{
    pool_space s = {};
    const int64_t runs = runs_of(args), rows = is_short(args) ? ROWS : LONG_RATIO;
    if (pool_needs_plan(args)) s.plan = (pool_place *)arena_take(w, pool_plan_bytes(args));
    s.parts = (float *)arena_take(w, (size_t)(runs * rows * args->width) * sizeof(float));
    s.norm_parts = (float *)arena_take(w, (size_t)(runs * args->width) * sizeof(float));
    return s;
}

static size_t bytes_for(const stage_exec *, const pool_args *args)
{
    arena w = {NULL, 0};
    if (args->width != WIDTH || !(is_short(args) || is_long(args))) return 0;
    carve(args, &w);
    return arena_size(&w);
}

static quern_status run(const stage_exec *exec, const pool_args *args, void *workspace)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    arena w = arena_on(workspace);
    const pool_space s = carve(args, &w);
    pool_gradients_kernel k = {};
    pool_kernel &a = k.pool;
    a = pool_kernel_of(exec, args);
    a.plan = s.plan;
    a.parts = s.parts;
    a.norm_parts = s.norm_parts;
    a.runs = a.norm_runs = runs_of(args);
    k.bias_a = any_floats_of(args->bias_a);
    k.bias_b = any_floats_of(args->bias_b);
    k.entries = pool_rows_of_entries(args);
    k.stores = a.d_proj != NULL;
    static pool_sm90_launch *const launches[2][2] = {{pool_sm90_short_bf16, pool_sm90_short_f16},
                                                     {pool_sm90_long_bf16, pool_sm90_long_f16}};
    pool_sm90_launch *const launch = launches[is_long(args)][args->proj.dtype != QUERN_BF16];
    quern_status status = pool_plan_run(a, stream);
    if (status == QUERN_OK) status = pool_clear_run(a, args->proj.dtype, stream);
    if (status == QUERN_OK) status = launch(k, args, stream);
    return status == QUERN_OK ? pool_sum_gradients(a, args, stream) : status;
}

extern const variant<pool_args> pool_backward_sm90 = {"pool_backward_sm90", supports, bytes_for, run};
