/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls Hopper's product of many rows takes, and in what passes: W is widened into at most
 * 40 MiB, which L2 holds for the most part, or 256 rows of it. */
#include "e4m3_gemm/sm90_large/kernel.cuh"
#include "e4m3_gemm/sm90_large/widen.cuh"
#include "variants.cuh"

#include <algorithm>

using namespace sm90_e4m3_large;

#define NAME "e4m3_gemm_sm90_large"
enum { SHARED_BYTES = 227 * 1024, WIDENED_MOST = 40 << 20, ROWS_FP8 = 256, ROWS_16 = 512 };
static_assert(sizeof(shared<false>) <= SHARED_BYTES && sizeof(shared<true>) <= SHARED_BYTES, "a block fits");

static int64_t up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static int64_t columns_of_group(const e4m3_gemm_args *args)
{
    return args->codes.shape[0] / args->groups;
}

/* Whether there are so many rows that this kernel is the fastest: by shape alone, as memory is asked for by
 * it. */
static bool is_large(const stage_exec *exec, const e4m3_gemm_args *args)
{
    const int64_t tokens = args->c.shape[0], pairs = up(tokens, CLUSTER * TOKENS) / (CLUSTER * TOKENS),
                  panels = up(columns_of_group(args), COLUMNS) / COLUMNS * args->groups;
    if (exec->compute != 90 || args->rows || tokens == 0 || pairs * panels > INT32_MAX / CLUSTER)
        return false;
    if (exec->variant != NULL && strcmp(exec->variant, NAME) == 0) return true;
    return tokens >= (args->round ? ROWS_FP8 : ROWS_16) &&
           4 * CLUSTER * pairs * panels >= 3 * (int64_t)exec->multiprocessors;
}

/* A half of a panel's columns has one scale in a run. */
static bool supports(const stage_exec *exec, const e4m3_gemm_args *args, char *)
{
    const bool one = args->scales.shape[0] * args->scales.shape[1] == 1;
    return exec->shared_bytes >= SHARED_BYTES && is_large(exec, args) && sm90_e4m3::tiles_take(args) &&
           (args->groups == 1 || one || columns_of_group(args) % HALF == 0) &&
           (args->round || sm90_e4m3::tiles_take_rows(args));
}

/* Rows of W that are widened at a time. */
static int64_t rows_at_once(const e4m3_gemm_args *args)
{
    const int64_t row = up(args->codes.shape[1], WIDEN_EACH) * 2,
                  most = WIDENED_MOST / row / COLUMNS * COLUMNS;
    return std::min(std::max(most, (int64_t)COLUMNS), args->codes.shape[0]);
}

/* Fills in where a's codes and scales stand; the bytes. */
static size_t place(const e4m3_gemm_args *args, void *memory, e4m3_round_params *r)
{
    const int64_t all = args->groups * (up(args->codes.shape[1], RUN) / RUN), tokens = args->c.shape[0];
    arena a = {NULL, 0};
    if (memory != NULL) a = arena_on(memory);
    r->out_row = all * RUN;
    r->scale_row = up(tokens, CLUSTER * TOKENS);
    r->out = arena_take(&a, (size_t)(tokens * r->out_row));
    r->scale = (float *)arena_take(&a, (size_t)(all * r->scale_row) * sizeof(float));
    return a.used + ARENA_ALIGN - 1;
}

static size_t workspace(const stage_exec *exec, const e4m3_gemm_args *args)
{
    e4m3_round_params r = {};
    if (!is_large(exec, args)) return 0;
    if (args->round) return place(args, NULL, &r);
    return room_for((size_t)(rows_at_once(args) * up(args->codes.shape[1], WIDEN_EACH)) * 2);
}

static large_params params_of(const stage_exec *exec, const e4m3_gemm_args *args)
{
    const e4m3_params p = e4m3_params_of(exec, args);
    large_params q = {};
    q.scales = p.scales;
    q.bias = p.bias;
    q.c = p.c;
    q.c_row = p.c_row;
    q.tokens = p.tokens;
    q.in = p.in;
    q.out = p.out;
    q.columns = p.out;
    q.groups = (int32_t)p.groups;
    q.panels = (int32_t)(up(p.out, COLUMNS) / COLUMNS);
    q.pairs = (int32_t)(up(p.tokens, CLUSTER * TOKENS) / (CLUSTER * TOKENS));
    q.runs = (int32_t)(up(p.in, RUN) / RUN);
    q.wide = rows_aligned(args->c, 16) && p.out % 8 == 0;
    q.status = p.status;
    return q;
}

/* It may start before the kernel that made an operand has ended, and waits for it. */
template <typename T, bool FP8>
static quern_status launch(const stage_exec *exec, const large_params &q, const CUtensorMap &w,
                           const CUtensorMap &a)
{
    const int64_t tiles = (int64_t)q.groups * q.panels * q.pairs,
                  clusters = std::min(tiles, (int64_t)exec->multiprocessors / CLUSTER);
    return launch_cluster((cudaStream_t)exec->stream, e4m3_gemm_sm90_large<T, FP8>,
                          dim3((unsigned)(CLUSTER * clusters)), THREADS, sizeof(shared<FP8>), "e4m3_gemm",
                          CLUSTER, true, q, w, a);
}

static quern_status run_rounded(const stage_exec *exec, const e4m3_gemm_args *args, void *memory)
{
    const e4m3_params p = e4m3_params_of(exec, args);
    large_params q = params_of(exec, args);
    e4m3_round_params r = e4m3_round_params_of(p, args->a);
    CUtensorMap w, a;
    place(args, memory, &r);
    q.row_scale = r.scale;
    q.scale_row = r.scale_row;
    quern_status status = e4m3_round_rows(r, (cudaStream_t)exec->stream);
    if (status == QUERN_OK)
        status = sm90_e4m3::describe_bytes(&w, p.codes, args->codes.shape[0], args->codes.shape[1],
                                           p.code_row, HALF);
    if (status == QUERN_OK)
        status = sm90_e4m3::describe_bytes(&a, r.out, p.tokens, r.out_row, r.out_row, TOKENS);
    if (status != QUERN_OK) return status;
    return args->a.dtype == QUERN_BF16 ? launch<bf16, true>(exec, q, w, a) : launch<f16, true>(exec, q, w, a);
}

/* Widened rows of W in boxes of 128 by 128 bytes. */
static quern_status describe_widened(CUtensorMap *map, const widen_params &p, quern_dtype dtype)
{
    const tma_tensor t = {p.out,
                          dtype == QUERN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                          4,
                          {p.k, 1, p.rows, 1},
                          {16, p.out_row * 2, 16},
                          {64, 1, HALF, 1},
                          CU_TENSOR_MAP_SWIZZLE_128B};
    return tma_describe(map, t);
}

/* The groups and columns that q says. */
static quern_status run_pass(const stage_exec *exec, const e4m3_gemm_args *args, const large_params &q,
                             const CUtensorMap &a, void *memory)
{
    const widen_params p = {(const uint8_t *)args->codes.data +
                                (q.group * q.out + q.column) * args->codes.strides[0],
                            args->codes.strides[0],
                            q.groups * q.columns,
                            q.in,
                            room_at<char>(memory),
                            up(q.in, WIDEN_EACH)};
    CUtensorMap w;
    quern_status status = e4m3_widen_rows(p, args->a.dtype, (cudaStream_t)exec->stream);
    if (status == QUERN_OK) status = describe_widened(&w, p, args->a.dtype);
    if (status != QUERN_OK) return status;
    return args->a.dtype == QUERN_BF16 ? launch<bf16, false>(exec, q, w, a)
                                       : launch<f16, false>(exec, q, w, a);
}

static quern_status run_widened(const stage_exec *exec, const e4m3_gemm_args *args, void *memory)
{
    const int64_t rows = rows_at_once(args);
    const large_params all = params_of(exec, args);
    const int64_t groups = std::max(rows / all.out, (int64_t)1), columns = std::min(rows, all.out);
    CUtensorMap a;
    quern_status status = tma_describe(&a, sm90_e4m3::rows_of_a(args), 1, TOKENS);
    for (int64_t g = 0; g < all.groups; g += groups)
        for (int64_t first = 0; first < all.out && status == QUERN_OK; first += columns) {
            large_params q = all;
            q.group = g;
            q.groups = (int32_t)std::min(groups, all.groups - g);
            q.column = first;
            q.columns = std::min(columns, all.out - first);
            q.panels = (int32_t)(up(q.columns, COLUMNS) / COLUMNS);
            status = run_pass(exec, args, q, a, memory);
        }
    return status;
}

static quern_status run(const stage_exec *exec, const e4m3_gemm_args *args, void *memory)
{
    return args->round ? run_rounded(exec, args, memory) : run_widened(exec, args, memory);
}

extern const variant<e4m3_gemm_args> e4m3_gemm_sm90_large = {NAME, supports, workspace, run};
