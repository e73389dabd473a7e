/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - attention over keys that are values at once (D 512) for few heads, on Hopper.
 *
 * The 64 rows of an item are eight tokens of up to eight heads each (four of 16, two of 32), which follow one
 * another. They walk the raw rows and entries that any of them sees, each once; a byte a key says which
 * tokens see it, and the others' scores are -inf. Otherwise an item goes the way of one token and 64 heads,
 * by the warpgroups of attend_mqa/sm90: a tile costs the same, and a key that several tokens chose is fetched
 * and multiplied once for all. Where a key's score is not finite the key is searched, since a weight of 0
 * does not undo NaN: what is not finite becomes 0 and the tokens that see it get NaN.
 *
 * Limit: 2048 clocks for 64 keys of the union, or 512 for a token's 64 keys if all share them.
 */
#ifndef QUERN_CUDA_ATTEND_MQA_SM90_TOKENS_KERNEL_CUH
#define QUERN_CUDA_ATTEND_MQA_SM90_TOKENS_KERNEL_CUH

#include "attend_mqa/sm90/kernel.cuh"
#include "attend_mqa/sm90_tokens/groups.cuh"
#include "hopper/nonfinite.cuh"

namespace sm90_mqa_tokens
{

using namespace sm90_mqa;

/* info.position is the group, info.head0 its tokens and, from bit 8 on, log2 of a token's rows. */
template <typename T> struct tokens_shared : shared<T> {
    uint8_t see[STAGES][KEYS]; /* of a stage with the first half of keys: the tokens that see each */
    uint8_t nonfinite[KEYS];
    const token_group *groups;
    int32_t head_bits;
};

/* A key of a group: its row in the source, or -1, and the tokens that see it. */
struct found_key {
    int row;
    uint32_t see;
};
__device__ __forceinline__ found_key find_key(const tokens_kernel &k, const token_group &g, int item,
                                              bool raw, int key)
{
    if (key >= (raw ? g.raw : g.entries)) return {-1, 0};
    if (!raw && k.lists != NULL) {
        const uint32_t x = __ldg(k.lists + item * k.list_row + key);
        return {(int)(x & ((1u << ENTRY_BITS) - 1)), x >> ENTRY_BITS};
    }
    const int row = (raw ? g.raw0 : g.entry0) + key;
    return {row, tokens_that_see(g, raw, row)};
}

/* Fills a stage for each half, of Q or keys, and publishes it. */
template <typename T>
__device__ __forceinline__ void fill_rows(tokens_shared<T> &m, ring_place<STAGES> &at, const char *row,
                                          bool wide, uint32_t see, const stage_info &info)
{
    const char *from[ROWS_A_THREAD];
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; i++) from[i] = passed(row, i);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        m.keys.wait_free(at);
        copy_rows<T>((char *)m.k[at.stage], from, half, wide);
        if (half == 0 && threadIdx.x % 32 < 16) m.see[at.stage][found_row()] = (uint8_t)see;
        if (threadIdx.x == 0) m.info[at.stage] = info;
        m.keys.give_copies(at);
        m.keys.give(at);
        at.advance();
    }
}

template <typename T> __device__ __forceinline__ void feed_groups(const tokens_kernel &k, tokens_shared<T> &m)
{
    const mqa_kernel &a = k.a;
    ring_place<STAGES> at;
    const int mine = found_row(), token = mine >> k.head_bits, head = mine & ((1 << k.head_bits) - 1);
    for (int item = blockIdx.x; item < k.items; item += gridDim.x) {
        const token_group &g = k.groups[item];
        const T *const row =
            (const T *)a.q.p + g.sequence * a.q.s[0] + (g.row + token) * a.q.s[1] + head * a.q.s[2];
        fill_rows(m, at, token < g.tokens && head < a.heads ? (const char *)row : NULL, a.q_wide, 0,
                  {QUERY, 0, 0, 0, g.sequence, g.row, item, g.tokens});
        const int raw_stages = (g.raw + KEYS - 1) / KEYS, some = raw_stages + (g.entries + KEYS - 1) / KEYS,
                  stages = some > 0 ? some : 1;
        found_key next = find_key(k, g, item, raw_stages > 0, mine);
        for (int s = 0; s < stages; s++) {
            const bool raw = s < raw_stages;
            const found_key here = next;
            const int ahead = s + 1 - (s + 1 < raw_stages ? 0 : raw_stages);
            next = find_key(k, g, item, s + 1 < raw_stages, ahead * KEYS + mine);
            const row_source &source = raw ? a.raw : a.entries;
            fill_rows(m, at,
                      here.row < 0 ? NULL : source.p + g.sequence * source.page + here.row * source.row,
                      source.wide, here.see,
                      {KEYS_HERE, KEYS, s + 1 == stages, raw && s + 1 == raw_stages, 0, 0, 0, 0});
        }
    }
    fill_rows(m, at, NULL, true, 0, {END, 0, 0, 0, 0, 0, 0, 0});
}

/* Whether `yes` holds for any thread of the warpgroup of scores; a barrier of it. */
__device__ __forceinline__ bool any_score(bool yes)
{
    uint32_t any;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, 2, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
        : "=r"(any)
        : "r"((uint32_t)yes)
        : "memory");
    return any != 0;
}

/* Clears what is not finite in a tile's two stages, from `stage` on, and notes the keys that have any; two
 * threads a key. */
template <typename T> __device__ __forceinline__ void clear_keys(tokens_shared<T> &m, int stage)
{
    const int key = threadIdx.x % 128 / 2, half = threadIdx.x % 2, of = (stage + half) % STAGES;
    uint32_t most = 0;
#pragma unroll 1
    for (int i = 0; i < HALF * 8; i++) {
        uint16_t *const x = (uint16_t *)((char *)m.k[of] + i / 8 * PANEL_BYTES + key * 128 + i % 8 * 16);
        most = largest_bits(most, *(const uint4 *)x);
        for (int j = 0; j < 8; j++) clear_nonfinite<T>(x + j);
    }
    const bool found = is_nonfinite<T>(most), other = __shfl_xor_sync(~0u, (int)found, 1) != 0;
    if (half == 0) m.nonfinite[key] = found || other;
    async_fence();
    named_sync(2, 128);
}

/* A row is a head of one of the group's tokens. */
template <typename T> struct heads_of_tokens {
    /* A score stays where its token sees the key. `see`: of this thread's first two keys. */
    static __device__ __forceinline__ bool sees(const uint8_t *see, int i, int c, const uint32_t (&tokens)[2])
    {
        return (*(const uint16_t *)(see + i * 8) & tokens[c / 2] & 0xffu << c % 2 * 8) != 0;
    }
    static __device__ __forceinline__ void mask(const mqa_kernel &, tokens_shared<T> &m,
                                                float (&s)[KEYS / 8][4], int stage, int)
    {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
        const uint32_t tokens[2] = {0x101u << (row >> m.head_bits), 0x101u << (row + 8 >> m.head_bits)};
        const uint8_t *const see = m.see[stage] + lane % 4 * 2;
        float probe[4] = {}; /* sums of their own: one would be a chain of 32 */
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int c = 0; c < 4; c++) probe[c] = fmaf(s[i][c], 0.0f, probe[c]);
        const bool search = any_score(probe[0] + probe[1] + probe[2] + probe[3] != 0.0f);
        if (search) clear_keys(m, stage);
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (!sees(see, i, c, tokens)) s[i][c] = -INFINITY;
        if (!search) return;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (m.nonfinite[i * 8 + lane % 4 * 2 + c % 2] && sees(see, i, c, tokens)) s[i][c] = NAN;
    }
    static __device__ __forceinline__ void finish(const mqa_kernel &a, const tokens_shared<T> &m,
                                                  const stage_info &item, const softmax_rows &all,
                                                  const softmax_rows &window, float *factor, int row0)
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float sum = row_sum(all.sum[h]), raw = row_sum(window.sum[h]),
                        lse = mqa_log_sum(all.base[h], sum);
            const int row = row0 + h * 8, token = row >> m.head_bits, head = row & ((1 << m.head_bits) - 1);
            if (threadIdx.x % 4 != 0) continue;
            if (head >= a.heads || token >= item.head0) continue;
            factor[row] = mqa_factor(a.sink != NULL ? __ldg(a.sink + head) : -INFINITY, lse, sum);
            int b = item.sequence, n = item.row + token;
            asm volatile(""
                         : "+r"(b), "+r"(n)); /* addresses are not to be kept from the item's beginning on */
            if (a.lse.p != NULL) a.lse.p[b * a.lse.s[0] + head * a.lse.s[1] + n * a.lse.s[2]] = lse;
            if (a.lse_win.p != NULL)
                a.lse_win.p[b * a.lse_win.s[0] + head * a.lse_win.s[1] + n * a.lse_win.s[2]] =
                    mqa_log_sum(window.base[h], raw);
        }
    }
    static __device__ __forceinline__ void prefetch(const mqa_kernel &, const stage_info &) {}

    static __device__ __forceinline__ void store(const mqa_kernel &a, const tokens_shared<T> &m,
                                                 const stage_info &item, float (&o)[32][4],
                                                 const float (&factor)[2], int row0, int column0)
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = row0 + h * 8, token = row >> m.head_bits, head = row & ((1 << m.head_bits) - 1);
            const bool here = token < item.head0 && head < a.heads;
#pragma unroll
            for (int i = 0; i < 32; i++) {
                asm volatile("mul.f32 %0, %0, %1;" : "+f"(o[i][h * 2]) : "f"(factor[h]));
                asm volatile("mul.f32 %0, %0, %1;" : "+f"(o[i][h * 2 + 1]) : "f"(factor[h]));
            }
            if (MQA_DIM - a.rotation.dim < column0 + 256) {
                const int position = m.groups[item.position].of[token].position;
                if (a.rotation.dtype == QUERN_F32)
                    rotate_values<float>(a.rotation, position, o, column0, h, h + 1);
                else rotate_values<T>(a.rotation, position, o, column0, h, h + 1);
            }
            T *const to = (T *)a.o.p + item.sequence * a.o.s[0] + (item.row + token) * a.o.s[1] +
                          head * a.o.s[2] + column0 + threadIdx.x % 4 * 8;
            store_row(to, o, h, here, a.o_wide);
        }
    }
};

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) attend_mqa_sm90_tokens(const __grid_constant__ tokens_kernel k)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    tokens_shared<T> &m = *(tokens_shared<T> *)memory;
    if (threadIdx.x == 0) {
        m.keys.init(KEY_FILLERS, KEY_USERS);
        m.weights.init(WEIGHT_FILLERS, WEIGHT_USERS);
        m.groups = k.groups;
        m.head_bits = k.head_bits;
        mbar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        registers_down<FEED_REGISTERS>();
        feed_groups<T>(k, m);
    } else {
        registers_up<COMPUTE_REGISTERS>();
        if (group == 1) score<heads_of_tokens<T>>(k.a, m);
        else values<heads_of_tokens<T>>(k.a, m, group - 2);
    }
#endif
}

template <typename T> static quern_status launch_tokens(const stage_exec *exec, const tokens_kernel &k)
{
    const unsigned grid = (unsigned)(k.items < exec->multiprocessors ? k.items : exec->multiprocessors);
    return launch_shared({(cudaStream_t)exec->stream, NULL}, attend_mqa_sm90_tokens<T>, dim3(grid), THREADS,
                         sizeof(tokens_shared<T>), "attention over entries", k);
}

} // namespace sm90_mqa_tokens

#endif
