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
    /* Where the use number `use` is. */
    static __device__ __forceinline__ ring_place of(int use)
    {
        return {use % STAGES, (uint32_t)(use / STAGES & 1)};
    }
};

/* The address of one of an array's elements: of the array, and an offset in 32 bits. Where ptxas finds it in
 * 64, accumulators and addresses no longer fit, and no products overlap. */
template <typename X, int N> __device__ __forceinline__ uint32_t stage_address(X (&stages)[N], int stage)
{
    return smem_address(stages) + stage * (uint32_t)sizeof(X);
}

/* A barrier a stage. */
template <int STAGES> struct stage_barriers {
    uint64_t of[STAGES];

    /* As a ring's. */
    __device__ __forceinline__ void init(uint32_t arrivals)
    {
        for (int i = 0; i < STAGES; i++) mbar_init(smem_address(&of[i]), arrivals);
    }
    __device__ __forceinline__ void wait(const ring_place<STAGES> &at)
    {
        mbar_wait(smem_address(of) + at.stage * 8, at.parity);
    }
    __device__ __forceinline__ bool test(const ring_place<STAGES> &at)
    {
        return mbar_test(smem_address(of) + at.stage * 8, at.parity);
    }
    /* The same of the stage's use before that; before its first a wait ends at once. */
    __device__ __forceinline__ void wait_before(const ring_place<STAGES> &at)
    {
        mbar_wait(smem_address(of) + at.stage * 8, at.parity ^ 1);
    }
    __device__ __forceinline__ bool test_before(const ring_place<STAGES> &at)
    {
        return mbar_test(smem_address(of) + at.stage * 8, at.parity ^ 1);
    }
    __device__ __forceinline__ uint32_t expect(const ring_place<STAGES> &at, uint32_t bytes)
    {
        const uint32_t bar = smem_address(of) + at.stage * 8;
        mbar_expect(bar, bytes);
        return bar;
    }
    /* An arrival knows no parity: a stage's number will do. */
    __device__ __forceinline__ void arrive(int stage)
    {
        mbar_arrive(smem_address(of) + stage * 8);
    }
    __device__ __forceinline__ void arrive(const ring_place<STAGES> &at)
    {
        arrive(at.stage);
    }
    /* Once this thread's cp.async so far have landed. */
    __device__ __forceinline__ void arrive_copies(const ring_place<STAGES> &at)
    {
        mbar_arrive_copies(smem_address(of) + at.stage * 8);
    }
    /* The barrier of block `rank` of the cluster; the wait for such arrivals. */
    __device__ __forceinline__ void arrive_at(uint32_t rank, const ring_place<STAGES> &at)
    {
        cluster_arrive(cluster_address(smem_address(of) + at.stage * 8, rank));
    }
    __device__ __forceinline__ void wait_cluster(const ring_place<STAGES> &at)
    {
        cluster_wait(smem_address(of) + at.stage * 8, at.parity);
    }
    /* Of stages of which some uses are not waited for: `parities` has a bit a stage, of its next wait. */
    __device__ __forceinline__ void wait_next(int stage, uint32_t *parities)
    {
        mbar_wait(stage_address(of, stage), *parities >> stage & 1);
        *parities ^= 1u << stage;
    }
};

/* The same of barriers at OFFSET in shared memory that begins at `base`: for kernels that compute addresses
 * in 32 bits from there. */
template <int OFFSET, int STAGES> struct barriers_at {
    typedef ring_place<STAGES> place;
    static __device__ __forceinline__ uint32_t barrier(uint32_t base, const place &at)
    {
        return base + OFFSET + 8 * at.stage;
    }
    static __device__ __forceinline__ void init(uint32_t base, int stage, uint32_t arrivals)
    {
        mbar_init(base + OFFSET + 8 * stage, arrivals);
    }
    static __device__ __forceinline__ void wait(uint32_t base, const place &at)
    {
        mbar_wait(barrier(base, at), at.parity);
    }
    static __device__ __forceinline__ bool test(uint32_t base, const place &at)
    {
        return mbar_test(barrier(base, at), at.parity);
    }
    static __device__ __forceinline__ void wait_before(uint32_t base, const place &at)
    {
        mbar_wait(barrier(base, at), at.parity ^ 1);
    }
    static __device__ __forceinline__ bool test_before(uint32_t base, const place &at)
    {
        return mbar_test(barrier(base, at), at.parity ^ 1);
    }
    static __device__ __forceinline__ void arrive(uint32_t base, const place &at)
    {
        mbar_arrive(barrier(base, at));
    }
    static __device__ __forceinline__ uint32_t expect(uint32_t base, const place &at, uint32_t bytes)
    {
        mbar_expect(barrier(base, at), bytes);
        return barrier(base, at);
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
    /* Not by stage_address(): from there ptxas finds barriers in 64 bits. */
    __device__ __forceinline__ void wait_free(const ring_place<STAGES> &at)
    {
        mbar_wait(smem_address(free) + at.stage * 8, at.parity ^ 1);
    }
    /* Until this use itself is given back. */
    __device__ __forceinline__ void wait_used(const ring_place<STAGES> &at)
    {
        mbar_wait(smem_address(free) + at.stage * 8, at.parity);
    }
    __device__ __forceinline__ void wait_full(const ring_place<STAGES> &at)
    {
        mbar_wait(smem_address(full) + at.stage * 8, at.parity);
    }
    __device__ __forceinline__ bool test_full(const ring_place<STAGES> &at)
    {
        return mbar_test(smem_address(full) + at.stage * 8, at.parity);
    }
    /* The barrier that copies into a stage name. */
    __device__ __forceinline__ uint32_t barrier(const ring_place<STAGES> &at)
    {
        return smem_address(full) + at.stage * 8;
    }
    /* One arrival, and `bytes` that copies will bring. */
    __device__ __forceinline__ uint32_t expect(const ring_place<STAGES> &at, uint32_t bytes)
    {
        mbar_expect(barrier(at), bytes);
        return barrier(at);
    }
    __device__ __forceinline__ void give(const ring_place<STAGES> &at)
    {
        mbar_arrive(smem_address(full) + at.stage * 8);
    }
    /* One arrival more, once this thread's cp.async so far have landed. */
    __device__ __forceinline__ void give_copies(const ring_place<STAGES> &at)
    {
        mbar_arrive_copies(smem_address(full) + at.stage * 8);
    }
    /* A return knows no parity: a stage's number will do. */
    __device__ __forceinline__ void give_back(int stage)
    {
        mbar_arrive(smem_address(free) + stage * 8);
    }
    __device__ __forceinline__ void give_back(const ring_place<STAGES> &at)
    {
        give_back(at.stage);
    }
};

#endif
