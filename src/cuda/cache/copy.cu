/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* copy.cu - a step's rows to their pages and back: a warp a row of one head, its key and its value. Limit:
 * the copy rate. */
#include "cache/params.cuh"
#include "variants.cuh"

enum { THREADS = 128, WARPS = THREADS / 32 };

struct copy_kernel {
    step_view step;
    plane_view plane;
    view4 k, v;
    int64_t size; /* bytes of an element */
    bool from_cache;
    int32_t *status;
};

template <int BYTES>
__device__ __forceinline__ void copy_row(const copy_kernel &a, char *row, char *page, int bytes)
{
    typedef typename unit_of<BYTES>::type U;
    U *const to = (U *)(a.from_cache ? row : page);
    const U *const from = (const U *)(a.from_cache ? page : row);
    for (int i = threadIdx.x % 32; i < bytes / (int)sizeof(U); i += 32) to[i] = from[i];
}

template <int BYTES>
__global__ void __launch_bounds__(THREADS) cache_copy(const __grid_constant__ copy_kernel a)
{
    const int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, t = i / a.plane.heads;
    const int head = (int)(i - t * a.plane.heads);
    if (blockIdx.x == 0) step_check(a.step, a.status);
    if (t >= a.step.total) return;
    const int b = step_sequence_of(a.step, t);
    if (b < 0) return;
    const step_rows r = step_rows_at(a.step, b);
    if (r.first < 0 || !plane_holds(a.plane, r.first + r.count, r.count, 0, 0)) {
        if (threadIdx.x % 32 == 0) raise_status(a.status, QUERN_STATUS_BAD_POSITION);
        return;
    }
    const plane_row page = plane_row_at(a.plane, b, head, r.first + t - r.row, a.status);
    if (page.key == NULL) return;
    const auto at = [&](const view4 &x) { return (char *)x.p + (t * x.s[1] + head * x.s[2]) * a.size; };
    copy_row<BYTES>(a, at(a.k), page.key, a.plane.key);
    copy_row<BYTES>(a, at(a.v), page.key + page.value, a.plane.value);
}

quern_status cache_copy_run(const stage_exec *exec, const cache_copy_args *args, void *)
{
    const copy_kernel a = {step_view_of(args->step, args->k.shape[1]),
                           plane_view_of(args->plane),
                           view4_of(args->k),
                           view4_of(args->v),
                           bytes_of(args->k.dtype),
                           args->from_cache,
                           exec->status};
    const int64_t rows = a.step.total * a.plane.heads;
    if (rows == 0 || a.step.batch == 0) return QUERN_OK;
    const unsigned grid = blocks_for(rows, WARPS);
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    if (plane_aligned(a.plane, 16) && rows_aligned(args->k, 16) && rows_aligned(args->v, 16))
        cache_copy<16><<<grid, THREADS, 0, stream>>>(a);
    else if (a.size == 4) cache_copy<4><<<grid, THREADS, 0, stream>>>(a);
    else cache_copy<2><<<grid, THREADS, 0, stream>>>(a);
    return LAUNCHED("rows of a step");
}

extern const variant<cache_copy_args> cache_copy_any = {"cache_copy_any", NULL, NULL, cache_copy_run};
