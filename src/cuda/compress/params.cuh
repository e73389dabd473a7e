/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - what the compress stages share: the parameters of a side (K or V), and which sequence and
 * entry a compressed row is. */
#ifndef QUERN_CUDA_COMPRESS_PARAMS_CUH
#define QUERN_CUDA_COMPRESS_PARAMS_CUH

#include "common/device.cuh"

struct compress_side { /* K or V */
    view4 x, cmp, d_cmp, d_x;
    float *mean, *d_mean; /* contiguous [rows][heads][dim], with a projection of the mean only */
    int dim;
    bool vec, vec_out, vec_d, d_cmp_f32, d_x_f32;
};

struct compress_kernel {
    seqs sq;
    compress_side side[2];
    int heads;
    int64_t l, d, rows; /* rows: compressed rows of one batch view */
    bool add;
};

/* The sequence of compressed row `row` of batch view `vb`, and the entry within it; false for a row past
 * the last. */
__device__ __forceinline__ bool entry_at(const compress_kernel &a, int64_t vb, int64_t row, sequence *seq,
                                         int64_t *entry)
{
    if (a.sq.cu_q == NULL) {
        *seq = sequence_at(a.sq, vb);
        *entry = row;
        return true;
    }
    int64_t lo = 0, hi = a.sq.batch; /* the last sequence that starts at or before row, empty ones skipped */
    while (hi - lo > 1) {
        const int64_t mid = (lo + hi) / 2;
        if (a.sq.cu_kv[mid] <= row) lo = mid;
        else hi = mid;
    }
    if (a.sq.batch < 1 || row >= a.sq.cu_kv[a.sq.batch]) return false;
    *seq = sequence_at(a.sq, lo);
    *entry = row - a.sq.cu_kv[lo];
    return true;
}

#endif
