/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - the norm_rope stages: how rows are cut into runs, and the sum of the runs' shares of the
 * weight's gradient. */
#include "common/sums.cuh"
#include "norm_rope/kernel.cuh"
#include "variants.cuh"

enum {
    BLOCK_LANES = 256,
    CHUNKS_MOST = 4,
    WIDTH_MOST = BLOCK_LANES * CHUNK * CHUNKS_MOST
};
enum { RUNS = 1056, RUN_ROWS = 4 }; /* runs with shares of d_weight; rows of others */

static int64_t rows_count(const norm_rope_args *args)
{
    const quern_tensor &t = present(args->x) ? args->x : args->d_out;
    return t.shape[0] * t.shape[1] * t.shape[2];
}

static int64_t run_rows_of(const norm_rope_args *args)
{
    const int64_t rows = rows_count(args), each = (rows + RUNS - 1) / RUNS;
    return present(args->d_weight)               ? (each > 0 ? each : 1)
           : rows < (int64_t)RUNS * 8 * RUN_ROWS ? 1
                                                 : RUN_ROWS;
}

static int64_t runs_of(const norm_rope_args *args)
{
    return (rows_count(args) + run_rows_of(args) - 1) / run_rows_of(args);
}

static bool supports(const stage_exec *, const norm_rope_args *args, char why[STAGE_WHY_BYTES])
{
    const quern_tensor &t = present(args->x) ? args->x : args->d_out;
    if (t.shape[3] <= WIDTH_MOST) return true;
    snprintf(why, STAGE_WHY_BYTES, "rows have %lld channels: the cuda backend takes up to %d",
             (long long)t.shape[3], WIDTH_MOST);
    return false;
}

static size_t workspace(const stage_exec *, const norm_rope_args *args)
{
    return present(args->d_weight)
               ? room_for((size_t)(runs_of(args) * args->d_weight.shape[0]) * sizeof(float))
               : 0;
}

static norm_rope_kernel kernel_of(const stage_exec *exec, const norm_rope_args *args, void *memory)
{
    const quern_tensor &like = present(args->x) ? args->x : args->d_out;
    norm_rope_kernel a = {};
    a.x = row_view_of(args->x);
    a.out = row_view_of(args->out);
    a.d_out = row_view_of(args->d_out);
    a.d_x = row_view_of(args->d_x);
    a.rows = rows_count(args);
    a.tokens = like.shape[1];
    a.heads = (int)like.shape[2];
    a.width = (int)like.shape[3];
    a.norm = args->norm;
    a.inverse = args->inverse;
    a.eps = args->eps;
    a.weight = any_floats_of(args->weight);
    a.angles = any_floats_of(args->cos_sin);
    if (present(args->cos_sin)) {
        a.rotated = (int)args->cos_sin.shape[1];
        a.angle_row = args->cos_sin.strides[0];
        a.angle_rows = args->cos_sin.shape[0];
    }
    if (present(args->positions)) {
        a.positions = (const int32_t *)args->positions.data;
        a.position_row = args->positions.strides[0];
    }
    a.run_rows = run_rows_of(args);
    a.lanes = 32;
    while (a.lanes < BLOCK_LANES && a.lanes * CHUNK < a.width) a.lanes *= 2;
    if (present(args->d_weight)) a.parts = room_at<float>(memory);
    a.status = exec->status;
    return a;
}

template <int CHUNKS>
static quern_status launch(const norm_rope_kernel &a, bool backward, int64_t runs, cudaStream_t stream)
{
    const launcher to = {stream, NULL};
    const int groups = NORM_THREADS / a.lanes;
    const bool split = a.rotated > 0 && (a.width - a.rotated) % 2 != 0;
    const size_t bytes = split ? (size_t)(groups * a.width) * sizeof(float) : 0;
    const dim3 grid(blocks_for(runs, groups));
    if (backward)
        return launch_shared(to, norm_rope_backward<CHUNKS>, grid, NORM_THREADS, bytes, "norm_rope", a);
    if (grid.x == 0) return QUERN_OK;
    return launch_behind(stream, norm_rope_forward<CHUNKS>, grid, NORM_THREADS, bytes, "norm_rope", a);
}

static quern_status run(const stage_exec *exec, const norm_rope_args *args, bool backward, void *memory)
{
    const norm_rope_kernel a = kernel_of(exec, args, memory);
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    const int64_t runs = runs_of(args);
    const int chunks = (a.width + a.lanes * CHUNK - 1) / (a.lanes * CHUNK);
    const quern_status status = chunks <= 1   ? launch<1>(a, backward, runs, stream)
                                : chunks == 2 ? launch<2>(a, backward, runs, stream)
                                              : launch<CHUNKS_MOST>(a, backward, runs, stream);
    if (status != QUERN_OK || !backward) return status;
    return sum_runs(a.parts, runs, a.width, args->d_weight, false, stream);
}

static quern_status forward_run(const stage_exec *exec, const norm_rope_args *args, void *)
{
    return run(exec, args, false, NULL);
}

static quern_status backward_run(const stage_exec *exec, const norm_rope_args *args, void *memory)
{
    return run(exec, args, true, memory);
}

extern const variant<norm_rope_args> norm_rope_forward_any = {"norm_rope_forward_any", supports, NULL,
                                                              forward_run};
extern const variant<norm_rope_args> norm_rope_backward_any = {"norm_rope_backward_any", supports, workspace,
                                                               backward_run};
