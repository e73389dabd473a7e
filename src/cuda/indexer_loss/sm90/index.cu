/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* index.cu - the sums of an entry's rows of partials, in the order of the queries; the last slice's are
 * rounded. A block has SUM_RANGE entries: it turns the queries' choices of these, in shared memory, then its
 * warps take an entry at a time. Limit: reads. */
#include "common/scan.cuh"
#include "indexer_loss/losses.cuh"
#include "indexer_loss/sm90/params.cuh"

namespace sm90_loss
{

enum { SUM_THREADS = 512, SUM_WARPS = SUM_THREADS / 32, SUM_WORDS = SUM_QUERIES / 32, AT_ONCE = 8 };
static_assert(SUM_RANGE == 64, "a query's choices of a range are a word");
static_assert(SUM_WORDS == 32, "a lane has a word of queries");

struct sums_shared {
    uint64_t entries[SUM_QUERIES];            /* those of the range that a query chose */
    int32_t row[SUM_QUERIES];                 /* of the first of them */
    uint32_t chose[SUM_RANGE][SUM_WORDS + 1]; /* the queries that chose an entry */
    uint16_t queries[SUM_WARPS][SUM_QUERIES]; /* of a warp's entry, in turn */
    int next;                                 /* entry that no warp has taken */
};

/* Of 32 words, one a lane: bit j of lane i becomes bit i of lane j. */
__device__ __forceinline__ uint32_t turn_words(uint32_t x)
{
    const int lane = threadIdx.x % 32;
    uint32_t low = 0x0000ffff;
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        const uint32_t other = __shfl_xor_sync(~0u, x, by);
        x = lane & by ? (x & ~low) | (other >> by & low) : (x & low) | (other << by & ~low);
        low ^= low << by / 2;
    }
    return x;
}

/* Which entries of the range the queries chose, and which queries the entries. */
__device__ __forceinline__ void index_range(const slice &s, sums_shared &m, int64_t range)
{
    enum { EACH = SUM_QUERIES / SUM_THREADS };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint4 c[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = threadIdx.x + k * SUM_THREADS;
        c[k] = i < s.count ? s.choices[range * s.count + i] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = threadIdx.x + k * SUM_THREADS;
        m.entries[i] = (uint64_t)c[k].y << 32 | c[k].x;
        m.row[i] = i * (int)s.of.listed + (int)c[k].z;
        m.chose[lane][k * SUM_WARPS + warp] = turn_words(c[k].x);
        m.chose[32 + lane][k * SUM_WARPS + warp] = turn_words(c[k].y);
    }
    if (threadIdx.x == 0) m.next = 0;
    __syncthreads();
}

/* The queries that chose the range's entry, into `queries`; how many they are. */
__device__ __forceinline__ int list_queries(const sums_shared &m, uint16_t *queries, int entry)
{
    const int lane = threadIdx.x % 32;
    uint32_t chose = m.chose[entry][lane];
    const int own = __popc(chose), sum = sum_to_lane(own);
    __syncwarp(); /* the last entry's have been read */
    for (uint16_t *to = queries + sum - own; chose != 0; chose &= chose - 1)
        *to++ = (uint16_t)(lane * 32 + __ffs((int)chose) - 1);
    __syncwarp();
    return __shfl_sync(~0u, sum, 31);
}

/* Sums of a partial's 16 bytes become those of eight columns that follow one another. */
__device__ __forceinline__ void turn_sums(float (&sum)[8])
{
    uint32_t even[4], odd[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        even[k] = __float_as_uint(sum[k * 2]), odd[k] = __float_as_uint(sum[k * 2 + 1]);
    transpose_by_four(even);
    transpose_by_four(odd);
#pragma unroll
    for (int k = 0; k < 4; k++)
        sum[k * 2] = __uint_as_float(even[k]), sum[k * 2 + 1] = __uint_as_float(odd[k]);
}

/* Half a warp reads a row; the first half those of even numbers. */
__device__ __forceinline__ void sum_entry(const slice &s, const sums_shared &m, const uint16_t *queries,
                                          int count, int range, int in_range)
{
    const int lane = threadIdx.x % 32, column = lane % 16 * 8;
    const uint64_t below = ((uint64_t)1 << in_range) - 1;
    const bf16 *const rows = s.partials + column;
    float sum[8] = {};
    int next = -1;
    for (int i = 0; i < count; i += 2 * AT_ONCE) {
        uint4 part[AT_ONCE];
        if (i % 32 == 0) {
            next = -1;
            if (i + lane < count) {
                const int query = queries[i + lane];
                next = m.row[query] + __popcll(m.entries[query] & below);
            }
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int row = __shfl_sync(~0u, next, i % 32 + j * 2 + lane / 16);
            part[j] =
                row >= 0 ? __ldcs((const uint4 *)(rows + (int64_t)row * WIDTH)) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const uint32_t words[4] = {part[j].x, part[j].y, part[j].z, part[j].w};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 x = unpack2<bf16>(words[k]);
                sum[k * 2] += x.x;
                sum[k * 2 + 1] += x.y;
            }
        }
    }
#pragma unroll
    for (int k = 0; k < 8; k++) sum[k] += __shfl_xor_sync(~0u, sum[k], 16);
    turn_sums(sum);
    if (lane >= 16 || column >= s.of.width) return;
    const int64_t entry = (int64_t)range * SUM_RANGE + in_range;
    float *const kept = s.sums + entry * s.of.width + column;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        if (s.adds) sum[k] += kept[k];
        if (!s.last) kept[k] = sum[k];
    }
    if (!s.last) return;
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; k++) words[k] = pack2<bf16>(sum[k * 2], sum[k * 2 + 1]);
    store_eight((bf16 *)s.of.d_keys_index.p + s.b * s.of.d_keys_index.s[0] + entry * s.of.d_keys_index.s[1] +
                    column,
                words, s.d_keys_wide);
}

__global__ void __launch_bounds__(SUM_THREADS, 2) loss_sum_rows(const __grid_constant__ slice s)
{
    extern __shared__ __align__(16) char memory[];
    sums_shared &m = *(sums_shared *)memory;
    const int range = (int)blockIdx.x;
    uint16_t *const queries = m.queries[threadIdx.x / 32];
    if (range == s.ranges) {
        sum_losses<SUM_THREADS>(s.of, 0);
        return;
    }
    index_range(s, m, range);
    const int here = (int)min(s.of.entries - (int64_t)range * SUM_RANGE, (int64_t)SUM_RANGE);
    for (;;) {
        const int own = threadIdx.x % 32 == 0 ? atomicAdd(&m.next, 1) : 0, entry = __shfl_sync(~0u, own, 0);
        if (entry >= here) return;
        sum_entry(s, m, queries, list_queries(m, queries, entry), range, entry);
    }
}

quern_status sum_rows(const slice &s, cudaStream_t stream)
{
    return launch_shared({stream, NULL}, loss_sum_rows, dim3((unsigned)s.ranges + s.gives_loss), SUM_THREADS,
                         sizeof(sums_shared), "indexer_loss, sums of partials", s);
}

} // namespace sm90_loss
