/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * params.cuh - what the pooling kernels have in common: their arguments, and where the blocks of a call
 * stand.
 *
 * An entry pools S rows of the projections: the series b of the block before (overlap) and then the series a
 * of its own, S = 2 r or r. Of both series together each element belongs to one entry alone.
 */
#ifndef QUERN_CUDA_POOL_PARAMS_CUH
#define QUERN_CUDA_POOL_PARAMS_CUH

#include "common/entry.cuh"
#include "common/launch.cuh"

/* A sequence, where cu_seqlens or tensors of starts say more than the numbers of the call. */
struct pool_place {
    int64_t view_b, row0, rows, token0, entry0, entries, blocks, position;
    bool prev;
};

struct pool_kernel {
    int64_t ratio, batch, rows, entries; /* rows and entries of a sequence, or of all */
    int64_t start, position, blocks;     /* of every sequence; blocks < 0: all that are whole */
    int width;
    bool overlap, continued, followed, rope_last;
    bool wide; /* rows can be read four channels at a time */
    const int32_t *cu, *starts, *positions, *counts, *has_prev;
    int64_t starts_row, positions_row, counts_row, has_prev_row;
    pool_place *plan; /* [batch], or NULL: all sequences are alike */
    int32_t *cu_entries;
    const void *proj;
    int64_t proj_b, proj_row; /* strides in elements */
    const void *bias_a, *bias_b;
    int64_t bias_a_row, bias_b_row;
    const void *prev;
    quern_dtype prev_dtype;
    int64_t prev_b, prev_row;
    entry_kernel entry;
    float *pooled;
    int64_t pooled_b, pooled_row;
    void *out;
    quern_dtype out_dtype;
    int64_t out_b, out_row;
    int32_t *status;
    /* Backward. */
    const void *d_out;
    quern_dtype d_out_dtype;
    int64_t d_out_b, d_out_row;
    void *d_proj; /* proj's dtype, or f32 where the projections are */
    int64_t d_proj_b, d_proj_row;
    void *d_prev;
    quern_dtype d_prev_dtype;
    int64_t d_prev_b, d_prev_row;
    float *statistics; /* [entries, 3, width]: shift, pooled, scale; of long blocks */
    /* Shares of the gradients of biases [runs, slots, width] and of the norm's weight [norm_runs, width]. */
    float *parts, *norm_parts;
    int64_t runs, norm_runs;
};

__device__ __forceinline__ int64_t pool_value(const int32_t *p, int64_t row, int64_t b, int64_t otherwise)
{
    return p != NULL ? p[b * row] : otherwise;
}

/* Entry e of all: which sequence, and which of its blocks. */
struct pool_entry {
    int64_t e;
    int32_t b, i;
};

__device__ __forceinline__ pool_entry pool_entry_at(const pool_kernel &a, int64_t e)
{
    if (a.plan == NULL) {
        const int64_t b = a.batch > 1 ? e / a.entries : 0;
        return {e, (int32_t)b, (int32_t)(e - b * a.entries)};
    }
    int32_t low = 0, high = (int32_t)a.batch; /* the last sequence that starts at e or before */
    while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        if (a.plan[middle].entry0 <= e) low = middle;
        else high = middle;
    }
    return {e, low, (int32_t)(e - a.plan[low].entry0)};
}

/* What a kernel wants to know of an entry when it reads or writes. */
struct pool_facts {
    int64_t view_b, n;      /* its row of out */
    int64_t row, position;  /* of the block's first token */
    bool live, ghost, last; /* a block of the sequence; the one after the call's blocks; the last one */
    bool before, prev;      /* series b of the block before is in proj; in prev_b */
};

__device__ __forceinline__ pool_facts pool_facts_of(const pool_kernel &a, const pool_entry &x)
{
    pool_facts f;
    int64_t blocks = a.blocks, token0 = a.start, position = a.position;
    bool prev = a.prev != NULL;
    if (a.plan != NULL) {
        const pool_place &s = a.plan[x.b];
        blocks = x.i < s.entries ? s.blocks : 0;
        token0 = s.token0;
        position = s.position;
        prev = s.prev;
    }
    f.view_b = a.cu != NULL ? 0 : x.b;
    f.n = a.cu != NULL ? x.e : x.i;
    f.row = token0 + x.i * a.ratio;
    f.position = position + x.i * a.ratio;
    f.live = x.i < blocks;
    f.ghost = a.followed && x.i == blocks;
    f.last = x.i + 1 == blocks;
    f.before = a.overlap && (x.i > 0 || a.continued);
    f.prev = prev && x.i == 0 && !f.before && f.live;
    return f;
}

/* Rows of a pooled entry. */
__device__ __forceinline__ int pool_slots(const pool_kernel &a)
{
    return (int)(a.overlap ? 2 * a.ratio : a.ratio);
}

/* The kernels' arguments but for the workspace; whether the sequences need a plan. */
pool_kernel pool_kernel_of(const stage_exec *exec, const pool_args *args);
bool pool_needs_plan(const pool_args *args);
/* Bytes of the plan. */
size_t pool_plan_bytes(const pool_args *args);
quern_status pool_plan_run(const pool_kernel &a, cudaStream_t stream);
/* Clears what no block writes: rows of d_proj, and d_prev_b of sequences without a block before. */
quern_status pool_clear_run(const pool_kernel &a, quern_dtype proj, cudaStream_t stream);
/* Sums the runs' shares of the gradients of biases and of the norm's weight. */
quern_status pool_sum_gradients(const pool_kernel &a, const pool_args *args, cudaStream_t stream);
/* All rows of `out` and the like. */
static inline int64_t pool_rows_of_entries(const pool_args *args)
{
    const quern_tensor &t = present(args->out)      ? args->out
                            : present(args->pooled) ? args->pooled
                                                    : args->d_out;
    return t.ndim > 0 ? t.shape[0] * t.shape[1] : 0;
}
/* The instances of a dtype: projections of T, biases of B. */
typedef quern_status pool_part(const pool_kernel &a, int64_t entries, int multiprocessors,
                               cudaStream_t stream);
extern pool_part pool_forward_f32, pool_forward_bf16, pool_forward_bf16_f32, pool_forward_f16,
    pool_forward_f16_f32;
extern pool_part pool_backward_f32, pool_backward_bf16, pool_backward_bf16_f32, pool_backward_f16,
    pool_backward_f16_f32;
/* The same for entries of 512 channels on Hopper, of long blocks and of short ones, and whether they take a
 * call; f32 has no short ones. */
extern pool_part pool_sm90_forward_long_f32, pool_sm90_forward_long_bf16, pool_sm90_forward_long_bf16_f32,
    pool_sm90_forward_long_f16, pool_sm90_forward_long_f16_f32;
extern pool_part pool_sm90_forward_short_bf16, pool_sm90_forward_short_bf16_f32, pool_sm90_forward_short_f16,
    pool_sm90_forward_short_f16_f32;
bool pool_sm90_takes_long(const stage_exec *exec, const pool_args *args, const pool_kernel &a,
                          quern_dtype bias);
bool pool_sm90_takes_short(const stage_exec *exec, const pool_args *args, const pool_kernel &a);
/* The one of a call. */
static inline pool_part *pool_part_of(quern_dtype proj, quern_dtype bias, pool_part *const (&parts)[5])
{
    if (proj == QUERN_F32) return parts[0];
    return parts[(proj == QUERN_BF16 ? 1 : 3) + (bias == QUERN_F32 ? 1 : 0)];
}

#endif
