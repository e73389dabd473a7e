/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * group_ring.cuh - stages of shared memory that groups of warps use in turn: use number u is group
 * u % GROUPS's. Parity tells a barrier's phase from the next alone, and copies land in any order, so a group
 * has to wait for every phase of a full barrier. Each full barrier is of one stage and one group: there are
 * as many as uses until the same stage and group meet again. Where STAGES is a multiple of GROUPS that is one
 * a stage, as in a ring.
 */
#ifndef QUERN_CUDA_HOPPER_GROUP_RING_CUH
#define QUERN_CUDA_HOPPER_GROUP_RING_CUH

#include "hopper/ring.cuh"

template <int STAGES> __device__ __forceinline__ void advance_by(ring_place<STAGES> &at, int uses)
{
    at.stage += uses;
    if (at.stage < STAGES) return;
    at.stage -= STAGES;
    at.parity ^= 1;
}

/* The least common multiple. */
constexpr int full_barriers(int groups, int stages)
{
    int n = stages;
    while (n % groups != 0) n += stages;
    return n;
}

/* A use's place in the ring, and that of its full barrier. */
template <int GROUPS, int STAGES, int FULL = full_barriers(GROUPS, STAGES)>
struct group_place : ring_place<STAGES> {
    ring_place<FULL> full;

    __device__ __forceinline__ void advance()
    {
        ring_place<STAGES>::advance();
        full.advance();
    }
    /* At most STAGES uses. */
    __device__ __forceinline__ void advance_by(int uses)
    {
        ::advance_by<STAGES>(*this, uses);
        ::advance_by(full, uses);
    }
    __device__ __forceinline__ const ring_place<FULL> &filled() const { return full; }
};

/* Where they are the same. */
template <int GROUPS, int STAGES> struct group_place<GROUPS, STAGES, STAGES> : ring_place<STAGES> {
    __device__ __forceinline__ void advance_by(int uses) { ::advance_by<STAGES>(*this, uses); }
    __device__ __forceinline__ const ring_place<STAGES> &filled() const { return *this; }
};

template <int GROUPS, int STAGES> struct group_ring {
    enum { FULL = full_barriers(GROUPS, STAGES) };
    typedef group_place<GROUPS, STAGES> place;
    stage_barriers<FULL> full;
    stage_barriers<STAGES> free;

    /* As a ring's. */
    __device__ __forceinline__ void init(uint32_t fillers, uint32_t users)
    {
        full.init(fillers);
        free.init(users);
    }
    /* Of use number `use`. */
    static __device__ __forceinline__ ring_place<FULL> full_at(int use) { return ring_place<FULL>::of(use); }
    static __device__ __forceinline__ ring_place<STAGES> free_at(int use)
    {
        return ring_place<STAGES>::of(use);
    }
    __device__ __forceinline__ void wait_free(const place &at) { free.wait_before(at); }
    __device__ __forceinline__ void wait_full(const place &at) { full.wait(at.filled()); }
    __device__ __forceinline__ uint32_t expect(const place &at, uint32_t bytes)
    {
        return full.expect(at.filled(), bytes);
    }
    __device__ __forceinline__ void give_back(const ring_place<STAGES> &at) { free.arrive(at); }
};

#endif
