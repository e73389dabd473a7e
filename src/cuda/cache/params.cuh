/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - the stages over a cache's pages that others of them call. */
#ifndef QUERN_CUDA_CACHE_PARAMS_CUH
#define QUERN_CUDA_CACHE_PARAMS_CUH

#include "common/launch.cuh"
#include "common/step.cuh"

/* What a thread copies at once. */
template <int BYTES> struct unit_of;
template <> struct unit_of<16> {
    typedef uint4 type;
};
template <> struct unit_of<8> {
    typedef uint2 type;
};
template <> struct unit_of<4> {
    typedef uint32_t type;
};
template <> struct unit_of<2> {
    typedef uint16_t type;
};
template <> struct unit_of<1> {
    typedef uint8_t type;
};

quern_status cache_copy_run(const stage_exec *exec, const cache_copy_args *args, void *workspace);

#endif
