/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - pooling's gradients with rows in shared memory: sizes, and what kernels take beside a call's
 * arguments. */
#ifndef QUERN_CUDA_POOL_SM90_PARAMS_CUH
#define QUERN_CUDA_POOL_SM90_PARAMS_CUH

#include "pool/params.cuh"

/* Two 16-bit numbers, and -inf. */
template <typename T> struct pairs_of;
template <> struct pairs_of<bf16> {
    typedef __nv_bfloat162 type;
    static constexpr uint32_t NONE = 0xff80; /* -inf */
};
template <> struct pairs_of<__half> {
    typedef __half2 type;
    static constexpr uint32_t NONE = 0xfc00;
};

template <typename T> __device__ __forceinline__ uint32_t least2(uint32_t a, uint32_t b)
{
    typedef typename pairs_of<T>::type pair;
    const pair least = __hmin2(*(const pair *)&a, *(const pair *)&b);
    return *(const uint32_t *)&least;
}

/* Channels of an entry; of CSA rows of a thread and a series, of HCA rows of an entry; runs of entries that
 * keep sums: blocks that a GPU of 132 multiprocessors holds, and clusters of eight, of which it holds 15, as
 * some of its parts have fewer multiprocessors than others: a sixteenth would take as long again. */
enum { WIDTH = 512, ROWS = 8, SHORT_RATIO = 4, LONG_RATIO = 128 };
enum { SHORT_RUNS = 132, LONG_RUNS = 15, LONG_CLUSTER = 8 };

struct pool_gradients_kernel {
    pool_kernel pool;
    any_floats bias_a, bias_b;
    int64_t entries;
    bool stores; /* there is d_proj */
};

typedef quern_status pool_sm90_launch(const pool_gradients_kernel &a, const pool_args *args,
                                      cudaStream_t stream);
extern pool_sm90_launch pool_sm90_short_bf16, pool_sm90_short_f16, pool_sm90_long_bf16, pool_sm90_long_f16;
/* Bytes of shared memory of the largest. */
enum { POOL_SM90_SHARED = 227 * 1024 };

#endif
