/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* ring.cuh - stages of shared memory that some warps fill and others use, in turn. A ring holds a full and a
 * free barrier a stage; each side keeps a place of its own, which knows the stage and the parity. */
#ifndef QUERN_CUDA_HOPPER_RING_CUH
#define QUERN_CUDA_HOPPER_RING_CUH

#include "hopper/barrier.cuh"
#include "common/mma.cuh"

template <int STAGES> struct ring_place {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance()
    {
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

template <int STAGES> struct ring {
    uint64_t full[STAGES], free[STAGES];

    /* One thread; a mbar_init_done() and a __syncthreads() follow. Arrivals a stage and use. */
    __device__ __forceinline__ void init(uint32_t fillers, uint32_t users)
    {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(smem_address(&full[i]), fillers);
            mbar_init(smem_address(&free[i]), users);
        }
    }
    __device__ __forceinline__ void wait_free(const ring_place<STAGES> &at)
    {
        mbar_wait(smem_address(&free[at.stage]), at.parity ^ 1);
    }
    __device__ __forceinline__ void wait_full(const ring_place<STAGES> &at)
    {
        mbar_wait(smem_address(&full[at.stage]), at.parity);
    }
    __device__ __forceinline__ void give(const ring_place<STAGES> &at)
    {
        mbar_arrive(smem_address(&full[at.stage]));
    }
    /* One arrival more, once this thread's cp.async so far have landed. */
    __device__ __forceinline__ void give_copies(const ring_place<STAGES> &at)
    {
        asm volatile(
            "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(&full[at.stage]))
            : "memory");
    }
    __device__ __forceinline__ void give_back(const ring_place<STAGES> &at)
    {
        mbar_arrive(smem_address(&free[at.stage]));
    }
};

#endif
