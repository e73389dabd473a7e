/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * launch.cu - the pool stages, from projections and from hidden states.
 *
 * From hidden states x a product makes the projections x w of all tokens in f32, in the workspace; the
 * backward pass has their gradients there, too.
 */
#include "pool/params.cuh"
#include "common/sums.cuh"
#include "variants.cuh"

/* Runs of entries, each with sums of its own: what a GPU of 132 multiprocessors holds at a time. */
enum { RUN_BLOCKS = 528, LONG_BLOCKS = 528, SHORT_RATIO = 4, LONG_ROWS = 8 };

/* A matrix of floats or halves as contiguous floats. */
__global__ void pool_widen(any_floats from, int64_t row, int width, int64_t count, float *to)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = from.at(i / width * row + i % width);
}

/* What a call takes of the workspace. */
struct pool_space {
    pool_place *plan;
    float *bias[2]; /* in f32, where the kernels do not take the caller's */
    float *statistics, *parts, *norm_parts;
};

static bool widens(const pool_args *args)
{
    const quern_dtype a = args->bias_a.dtype, b = present(args->bias_b) ? args->bias_b.dtype : a;
    return a != b || (a != QUERN_F32 && a != args->proj.dtype);
}

static int64_t slots_of(const pool_args *args)
{
    return args->overlap ? 2 * args->ratio : args->ratio;
}

static bool is_long(const pool_args *args)
{
    return args->ratio > SHORT_RATIO;
}

static int64_t runs_of(const pool_args *args, int64_t blocks)
{
    const int64_t entries = pool_rows_of_entries(args), most = blocks * groups_of_block(args->width),
                  runs = entries < most ? entries : most;
    return runs > 0 ? runs : 1;
}

static int64_t bias_runs_of(const pool_args *args)
{
    const int64_t chunks = (slots_of(args) + LONG_ROWS - 1) / LONG_ROWS;
    if (!is_long(args)) return runs_of(args, RUN_BLOCKS);
    return runs_of(args, chunks < LONG_BLOCKS ? LONG_BLOCKS / chunks : 1);
}

static pool_space carve(const pool_args *args, bool backward, arena *w)
{
    pool_space s = {};
    const int64_t width = args->width, slots = slots_of(args);
    if (pool_needs_plan(args)) s.plan = (pool_place *)arena_take(w, pool_plan_bytes(args));
    for (int i = 0; i < 2 && widens(args); i++)
        s.bias[i] = (float *)arena_take(w, (size_t)(args->ratio * width) * sizeof(float));
    if (!backward) return s;
    if (is_long(args))
        s.statistics =
            (float *)arena_take(w, (size_t)(pool_rows_of_entries(args) * 3 * width) * sizeof(float));
    s.parts = (float *)arena_take(w, (size_t)(bias_runs_of(args) * slots * width) * sizeof(float));
    s.norm_parts = (float *)arena_take(
        w, (size_t)(runs_of(args, is_long(args) ? LONG_BLOCKS : RUN_BLOCKS) * width) * sizeof(float));
    return s;
}

/* Puts the space into the arguments, the biases in f32 into it. */
static quern_status fill(pool_kernel &a, const pool_args *args, const pool_space &s, cudaStream_t stream)
{
    enum { THREADS = 128 };
    const quern_tensor *const bias[] = {&args->bias_a, &args->bias_b};
    a.plan = s.plan;
    a.statistics = s.statistics;
    a.parts = s.parts;
    a.norm_parts = s.norm_parts;
    a.runs = bias_runs_of(args);
    a.norm_runs = runs_of(args, is_long(args) ? LONG_BLOCKS : RUN_BLOCKS);
    for (int i = 0; i < 2; i++) {
        if (s.bias[i] == NULL || !present(*bias[i])) continue;
        const int64_t count = args->ratio * args->width;
        pool_widen<<<blocks_for(count, THREADS), THREADS, 0, stream>>>(
            any_floats_of(*bias[i]), bias[i]->strides[0], (int)args->width, count, s.bias[i]);
        (i == 0 ? a.bias_a : a.bias_b) = s.bias[i];
        (i == 0 ? a.bias_a_row : a.bias_b_row) = args->width;
    }
    return LAUNCHED("pool's biases");
}

/* ---- from hidden states ---- */

/* A call on projections in the workspace: those, their gradients, and what products take. */
struct projected {
    pool_args inner;
    void *scratch;
};

static quern_tensor all_columns(const pool_args *args, arena *w)
{
    const int64_t shape[] = {args->x.shape[0], args->x.shape[1], (args->overlap ? 4 : 2) * args->width};
    quern_tensor t = {};
    t.data = arena_take(w, (size_t)(shape[0] * shape[1] * shape[2]) * sizeof(float));
    t.dtype = QUERN_F32;
    t.device = args->x.device;
    t.device_id = args->x.device_id;
    t.ndim = 3;
    for (int i = 0; i < 3; i++) t.shape[i] = shape[i];
    t.strides[0] = shape[1] * shape[2];
    t.strides[1] = shape[2];
    t.strides[2] = 1;
    return t;
}

/* Sequence b of [B, rows, columns] as a matrix; all of them where they follow one another. */
static quern_tensor matrix_of(const quern_tensor &t, int64_t b, bool all)
{
    quern_tensor m = t;
    m.ndim = 2;
    m.shape[0] = all ? t.shape[0] * t.shape[1] : t.shape[1];
    m.shape[1] = t.shape[2];
    m.strides[0] = t.strides[1];
    m.strides[1] = 1;
    if (t.data != NULL) m.data = (char *)t.data + b * t.strides[0] * bytes_of(t.dtype);
    return m;
}

static bool follows(const quern_tensor &t)
{
    return !present(t) || t.shape[0] == 1 || t.strides[0] == t.shape[1] * t.strides[1];
}

/* The products of a call, sequence by sequence where need be: number 0 is x w, 1 d_x, 2 d_w. */
enum { PRODUCTS = 3 };
static gemm_args product_of(const pool_args *args, const pool_args &inner, int which, int64_t b, bool all)
{
    gemm_args g = {};
    const quern_tensor x = matrix_of(args->x, b, all), proj = matrix_of(inner.proj, b, all);
    if (which == 0) {
        g.a = x;
        g.b = args->w;
        g.c = proj;
        return g;
    }
    const quern_tensor d_proj = matrix_of(inner.d_proj, b, all);
    if (which == 1) {
        g.a = d_proj;
        g.b = args->w;
        g.c = matrix_of(args->d_x, b, all);
        g.b_transposed = true;
        g.accumulate = args->accumulate_x;
    } else {
        g.a = x;
        g.b = d_proj;
        g.c = args->d_w;
        g.a_transposed = true;
        g.accumulate = b > 0;
    }
    return g;
}

static bool wanted(const pool_args *args, int which)
{
    return which == 0 || present(which == 1 ? args->d_x : args->d_w);
}

static projected carve_projected(const stage_exec *exec, const pool_args *args, bool backward, arena *w)
{
    projected p = {*args, NULL};
    if (!present(args->x)) return p;
    p.inner.proj = all_columns(args, w);
    p.inner.x = p.inner.w = p.inner.d_x = p.inner.d_w = {};
    if (backward) p.inner.d_proj = all_columns(args, w);
    size_t most = 0;
    for (int i = 0; i < (backward ? PRODUCTS : 1); i++) {
        if (!wanted(args, i)) continue;
        for (int all = 0; all < 2; all++) {
            const gemm_args g = product_of(args, p.inner, i, 0, all != 0);
            const size_t bytes = gemm_variants.workspace(exec, &g);
            most = bytes > most ? bytes : most;
        }
    }
    p.scratch = arena_take(w, most);
    return p;
}

static quern_status multiply(const stage_exec *exec, const pool_args *args, const projected &p, int which)
{
    quern_status status = QUERN_OK;
    if (!wanted(args, which)) return status;
    const bool all = follows(which == 1 ? args->d_x : args->x);
    for (int64_t b = 0; b < (all ? 1 : args->x.shape[0]) && status == QUERN_OK; b++) {
        const gemm_args g = product_of(args, p.inner, which, b, all);
        status = gemm_variants.run(exec, &g, p.scratch);
    }
    return status;
}

/* ---- the stages ---- */

static bool supports(const stage_exec *, const pool_args *args, char why[STAGE_WHY_BYTES])
{
    enum { WIDTH_MOST = GROUP_MOST * GROUP_CHANNELS };
    if (args->width <= WIDTH_MOST) return true;
    snprintf(why, STAGE_WHY_BYTES, "entries have %lld channels: the cuda backend takes up to %d",
             (long long)args->width, WIDTH_MOST);
    return false;
}

static size_t bytes_for(const stage_exec *exec, const pool_args *args, bool backward)
{
    arena w = {NULL, 0};
    const projected p = carve_projected(exec, args, backward, &w);
    carve(&p.inner, backward, &w);
    return arena_size(&w);
}

static size_t forward_bytes(const stage_exec *exec, const pool_args *args)
{
    return bytes_for(exec, args, false);
}

static size_t backward_bytes(const stage_exec *exec, const pool_args *args)
{
    return bytes_for(exec, args, true);
}

static quern_dtype bias_dtype(const pool_args *args, const pool_space &s)
{
    return s.bias[0] != NULL ? QUERN_F32 : args->bias_a.dtype;
}

static pool_part *forward_part(const stage_exec *exec, const pool_args *args, const pool_kernel &a,
                               quern_dtype bias)
{
    static pool_part *const any[] = {pool_forward_f32, pool_forward_bf16, pool_forward_bf16_f32,
                                     pool_forward_f16, pool_forward_f16_f32};
#ifdef QUERN_SM90
    static pool_part *const long_sm90[] = {pool_sm90_forward_long_f32, pool_sm90_forward_long_bf16,
                                           pool_sm90_forward_long_bf16_f32, pool_sm90_forward_long_f16,
                                           pool_sm90_forward_long_f16_f32};
    static pool_part *const short_sm90[] = {NULL, pool_sm90_forward_short_bf16,
                                            pool_sm90_forward_short_bf16_f32, pool_sm90_forward_short_f16,
                                            pool_sm90_forward_short_f16_f32};
    if (pool_sm90_takes_long(exec, args, a, bias)) return pool_part_of(args->proj.dtype, bias, long_sm90);
    if (pool_sm90_takes_short(exec, args, a)) return pool_part_of(args->proj.dtype, bias, short_sm90);
#endif
    return pool_part_of(args->proj.dtype, bias, any);
}

static quern_status forward_run(const stage_exec *exec, const pool_args *given, void *workspace)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    arena w = arena_on(workspace);
    const projected p = carve_projected(exec, given, false, &w);
    const pool_args *const args = &p.inner;
    const pool_space s = carve(args, false, &w);
    pool_kernel a = pool_kernel_of(exec, args);
    quern_status status = present(given->x) ? multiply(exec, given, p, 0) : QUERN_OK;
    if (status == QUERN_OK) status = fill(a, args, s, stream);
    if (status == QUERN_OK) status = pool_plan_run(a, stream);
    if (status != QUERN_OK) return status;
    return forward_part(exec, args, a, bias_dtype(args, s))(a, pool_rows_of_entries(args),
                                                            exec->multiprocessors, stream);
}

quern_status pool_sum_gradients(const pool_kernel &a, const pool_args *args, cudaStream_t stream)
{
    const int64_t width = args->width, run = slots_of(args) * width;
    const float *const series_a = a.parts + (args->overlap ? args->ratio * width : 0);
    const run_shares shares[] = {{series_a, a.runs, run, args->d_bias_a},
                                 {a.parts, a.runs, run, args->d_bias_b},
                                 {a.norm_parts, a.norm_runs, width, args->d_norm_weight}};
    return sum_runs(shares, 3, args->accumulate, stream);
}

static quern_status backward_run(const stage_exec *exec, const pool_args *given, void *workspace)
{
    static pool_part *const parts[] = {pool_backward_f32, pool_backward_bf16, pool_backward_bf16_f32,
                                       pool_backward_f16, pool_backward_f16_f32};
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    arena w = arena_on(workspace);
    const projected p = carve_projected(exec, given, true, &w);
    const pool_args *const args = &p.inner;
    const pool_space s = carve(args, true, &w);
    pool_kernel a = pool_kernel_of(exec, args);
    quern_status status = present(given->x) ? multiply(exec, given, p, 0) : QUERN_OK;
    if (status == QUERN_OK) status = fill(a, args, s, stream);
    if (status == QUERN_OK) status = pool_plan_run(a, stream);
    if (status == QUERN_OK) status = pool_clear_run(a, args->proj.dtype, stream);
    if (status != QUERN_OK) return status;
    pool_part *const part = pool_part_of(args->proj.dtype, bias_dtype(args, s), parts);
    status = part(a, pool_rows_of_entries(args), exec->multiprocessors, stream);
    if (status == QUERN_OK) status = pool_sum_gradients(a, args, stream);
    for (int i = 1; i < PRODUCTS && status == QUERN_OK && present(given->x); i++)
        status = multiply(exec, given, p, i);
    return status;
}

extern const variant<pool_args> pool_forward_any = {"pool_forward_any", supports, forward_bytes, forward_run};
extern const variant<pool_args> pool_backward_any = {"pool_backward_any", supports, backward_bytes,
                                                     backward_run};
