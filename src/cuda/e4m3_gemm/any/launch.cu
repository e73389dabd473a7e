/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - products with e4m3 weights for any GPU: rows rounded first where that is asked for, then the
 * kernel for as many rows as there are. */
#include "e4m3_gemm/any/kernel.cuh"
#include "variants.cuh"

enum { TOKENS_MOST = 8 };

static bool supports(const stage_exec *, const e4m3_gemm_args *args, char why[STAGE_WHY_BYTES])
{
    return e4m3_takes(args, why);
}

static size_t workspace(const stage_exec *, const e4m3_gemm_args *args)
{
    return args->round ? room_for((size_t)(args->a.shape[0] * args->a.shape[1]) * sizeof(float)) : 0;
}

static quern_status round_a(e4m3_params *p, const e4m3_gemm_args *args, void *memory, cudaStream_t stream)
{
    e4m3_round_params r = e4m3_round_params_of(*p, args->a);
    r.out = room_at<float>(memory);
    r.out_row = p->groups * p->in;
    p->a = r.out;
    p->a_dtype = QUERN_F32;
    p->a_row = r.out_row;
    return e4m3_round_rows(r, stream);
}

template <int TOKENS> static quern_status launch(const e4m3_params &p, bool rows, cudaStream_t stream)
{
    const int64_t width = rows ? ACROSS_BLOCK : ALONG_BLOCK,
                  items = (p.out + width - 1) / width * p.groups * ((p.tokens + TOKENS - 1) / TOKENS);
    const unsigned grid = (unsigned)(items < INT32_MAX ? items : INT32_MAX);
    if (rows) e4m3_gemm_across<TOKENS><<<grid, ACROSS_THREADS, 0, stream>>>(p);
    else e4m3_gemm_along<TOKENS><<<grid, ALONG_THREADS, 0, stream>>>(p);
    return LAUNCHED("e4m3_gemm");
}

static quern_status run(const stage_exec *exec, const e4m3_gemm_args *args, void *memory)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    e4m3_params p = e4m3_params_of(exec, args);
    quern_status status = QUERN_OK;
    if (p.tokens == 0 || p.out == 0) return QUERN_OK;
    p.wide = p.in % (args->rows ? 4 : EACH_CODES) == 0 &&
             (args->rows || rows_aligned(args->codes, EACH_CODES)) &&
             (args->round || rows_aligned(args->a, 4 * bytes_of(args->a.dtype)));
    if (args->round) status = round_a(&p, args, memory, stream);
    if (status != QUERN_OK) return status;
    return p.tokens == 1   ? launch<1>(p, args->rows, stream)
           : p.tokens == 2 ? launch<2>(p, args->rows, stream)
           : p.tokens <= 4 ? launch<4>(p, args->rows, stream)
                           : launch<TOKENS_MOST>(p, args->rows, stream);
}

extern const variant<e4m3_gemm_args> e4m3_gemm_any = {"e4m3_gemm_any", supports, workspace, run};
