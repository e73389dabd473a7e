/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* forward.cu - the router's kernels, and which of them a call launches; params.cuh says how they work. */
#include "route/params.cuh"
#include "variants.cuh"

#include <algorithm>
#include <type_traits>

/* An element as a float. T: the dtype of hidden states and weight; any_dtype: what they say. */
struct any_dtype {
};
template <typename T>
__device__ __forceinline__ float element_at(const void *p, quern_dtype dtype, int64_t at)
{
    if constexpr (std::is_same<T, any_dtype>::value) return value_at(p, dtype, at);
    else return to_float<T>(((const T *)p)[at]);
}

/* Adds to the sums of a tile of tokens and experts, over a share of the dimension. The shares' sums are added
 * in their order, a lane's first, so their bits do not depend on which warp has a share. AT_ONCE: elements of
 * each row that a lane asks for before it uses them, where their dtype is known. A row past the last is that
 * one again: no load waits for a branch. */
template <typename T, int AT_ONCE>
__device__ __forceinline__ void add_share(const route_params &a, int64_t t0, int64_t e0, int share,
                                          float (&sum)[ROUTE_TILE][ROUTE_TILE])
{
    enum { ROWS = ROUTE_TILE };
    const int64_t each = (a.dim + ROUTE_WARPS - 1) / ROUTE_WARPS, end = min(a.dim, (share + 1) * each);
    float own[ROWS][ROWS] = {};
#pragma unroll AT_ONCE
    for (int64_t d = share * each + threadIdx.x % 32; d < end; d += 32) {
        float h[ROWS], w[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int64_t t = min(t0 + i, a.tokens - 1), e = min(e0 + i, (int64_t)a.experts - 1);
            h[i] = element_at<T>(a.hidden, a.hidden_dtype, t * a.hidden_s + d);
            w[i] = element_at<T>(a.weight, a.weight_dtype, e * a.weight_s + d);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < ROWS; j++) own[i][j] = fmaf(h[i], w[j], own[i][j]);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < ROWS; j++) sum[i][j] += own[i][j];
}

/* A warp a tile, all shares one after the other. */
__global__ void __launch_bounds__(ROUTE_THREADS) route_logits(const __grid_constant__ route_params a)
{
    enum { ROWS = ROUTE_TILE };
    const int lane = threadIdx.x % 32;
    const int64_t warp = (int64_t)blockIdx.x * ROUTE_WARPS + threadIdx.x / 32,
                  across = (a.experts + ROWS - 1) / ROWS;
    const int64_t t0 = warp / across * ROWS, e0 = warp % across * ROWS;
    float sum[ROWS][ROWS] = {};
    if (t0 >= a.tokens) return;
    for (int share = 0; share < ROUTE_WARPS; share++) add_share<any_dtype, 4>(a, t0, e0, share, sum);
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            const float whole = warp_sum(sum[i][j]);
            if (lane == 0 && t0 + i < a.tokens && e0 + j < a.experts)
                a.computed[(t0 + i) * a.experts + e0 + j] = whole;
        }
}

/* A block a tile, a warp a share: of few tiles, which would not fill the device. */
__global__ void __launch_bounds__(ROUTE_THREADS) route_few_logits(const __grid_constant__ route_params a)
{
    enum { ROWS = ROUTE_TILE, SUMS = ROWS * ROWS };
    __shared__ float shares[ROUTE_WARPS][SUMS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t across = (a.experts + ROWS - 1) / ROWS, t0 = blockIdx.x / across * ROWS,
                  e0 = blockIdx.x % across * ROWS;
    float sum[ROWS][ROWS] = {};
    wait_for_before();
    let_next_start();
    if (a.hidden_dtype == QUERN_BF16 && a.weight_dtype == QUERN_BF16)
        add_share<bf16, 8>(a, t0, e0, warp, sum);
    else add_share<any_dtype, 4>(a, t0, e0, warp, sum);
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < ROWS; j++) shares[warp][i * ROWS + j][lane] = sum[i][j];
    __syncthreads();
    for (int at = warp; at < SUMS; at += ROUTE_WARPS) {
        float whole = 0.0f;
        for (int share = 0; share < ROUTE_WARPS; share++) whole += shares[share][at][lane];
        whole = warp_sum(whole);
        const int64_t token = t0 + at / ROWS, e = e0 + at % ROWS;
        if (lane == 0 && token < a.tokens && e < a.experts) a.computed[token * a.experts + e] = whole;
    }
}

__device__ __forceinline__ int64_t index_at(const void *p, bool wide, int64_t at)
{
    return wide ? ((const int64_t *)p)[at] : ((const int32_t *)p)[at];
}

/* The table's expert j of a token; -1: there is none. */
__device__ __forceinline__ int32_t table_expert(const route_params &a, int64_t token, int32_t j)
{
    const int64_t id = index_at(a.input_ids, a.ids64, token);
    if (id < 0 || id >= a.vocabulary) return -1;
    const int64_t e = index_at(a.table, a.table64, id * a.table_s + j);
    return e >= 0 && e < a.experts ? (int32_t)e : -1;
}

/* Writes the experts of the top_k best ranks to `list`, ascending. A lane holds every 32nd rank, EACH of
 * them; a rank that is taken becomes 0. */
template <int EACH>
__device__ __forceinline__ void choose_experts(const route_params &a, const uint32_t *rank, int32_t *list)
{
    const int lane = threadIdx.x % 32;
    uint32_t own[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) own[i] = i * 32 + lane < a.experts ? rank[i * 32 + lane] : 0;
    for (int32_t j = 0; j < a.top_k; j++) {
        uint32_t best = 0, at = 0xffffffff;
#pragma unroll
        for (int i = EACH - 1; i >= 0; i--) {
            at = own[i] >= best ? i * 32 + lane : at;
            best = max(best, own[i]);
        }
        const uint32_t most = __reduce_max_sync(~0u, best);
        at = __reduce_min_sync(~0u, best == most ? at : 0xffffffff);
#pragma unroll
        for (int i = 0; i < EACH; i++) own[i] = i * 32 + lane == at ? 0 : own[i];
    }
    int32_t before = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const bool taken = i * 32 + lane < a.experts && own[i] == 0;
        const unsigned bits = __ballot_sync(~0u, taken);
        if (taken) list[before + __popc(bits & ((1u << lane) - 1))] = i * 32 + lane;
        before += __popc(bits);
    }
    __syncwarp();
}

/* Copies a slot's given expert and weight; returns the expert. */
__device__ __forceinline__ int32_t copy_given(const route_params &a, int64_t slot)
{
    const int64_t token = slot / a.top_k, j = slot - token * a.top_k;
    const int32_t e = a.given_experts[token * a.given_experts_s + j];
    const bool good = e >= 0 && e < a.experts;
    if (!good) raise_status(a.status, QUERN_STATUS_BAD_ID);
    a.chosen[token * a.chosen_s + j] = good ? e : 0;
    a.weights[token * a.weights_s + j] = good ? a.given_weights[token * a.given_weights_s + j] : 0.0f;
    return good ? e : 0;
}

__global__ void __launch_bounds__(ROUTE_THREADS) route_copy(const __grid_constant__ route_params a)
{
    const int64_t slot = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (slot < a.tokens * a.top_k) copy_given(a, slot);
}

/* The sum of the chosen scores, in the list's order. */
__device__ __forceinline__ float sum_of_chosen(const route_params &a, const float *scores,
                                               const int32_t *list)
{
    float sum = 0.0f;
    for (int32_t first = 0; first < a.top_k; first += 32) {
        const int32_t j = first + threadIdx.x % 32, e = j < a.top_k ? list[j] : -1;
        const float own = e >= 0 ? scores[e] : 0.0f;
        for (int32_t i = 0; i < 32 && first + i < a.top_k; i++) sum += __shfl_sync(~0u, own, i);
    }
    return sum;
}

/* A warp's rows of shared memory, of all experts each: scores, what experts are chosen by, the chosen. */
struct choice_rows {
    float *scores;
    uint32_t *rank;
    int32_t *list;
    __device__ __forceinline__ choice_rows(const route_params &a, float *memory, int warp)
        : scores(memory + warp * 3 * a.experts), rank((uint32_t *)scores + a.experts),
          list((int32_t *)rank + a.experts)
    {
    }
    static size_t bytes(const route_params &a)
    {
        return 3 * ROUTE_WARPS * (size_t)a.experts * sizeof(float);
    }
};

/* Routes a token; a warp calls. picked: the experts of all slots, or NULL. */
__device__ __forceinline__ void choose_for(const route_params &a, int64_t token, const choice_rows &m,
                                           int32_t *picked)
{
    const int lane = threadIdx.x % 32;
    float *const scores = m.scores;
    uint32_t *const rank = m.rank;
    int32_t *const list = m.list;
    make_scores(a, token, scores);
    if (a.table == NULL) {
        for (int32_t e = lane; e < a.experts; e += 32)
            rank[e] = rank_of(a.bias != NULL ? scores[e] + a.bias[e] : scores[e]);
        __syncwarp();
        if (a.experts <= 256) choose_experts<8>(a, rank, list);
        else choose_experts<ROUTE_MOST_EXPERTS / 32>(a, rank, list);
    } else {
        for (int32_t j = lane; j < a.top_k; j += 32) list[j] = table_expert(a, token, j);
        __syncwarp();
    }
    const float sum = sum_of_chosen(a, scores, list);
    for (int32_t j = lane; j < a.top_k; j += 32) {
        const float s = list[j] >= 0 ? scores[list[j]] : 0.0f;
        if (list[j] < 0) raise_status(a.status, QUERN_STATUS_BAD_ID);
        a.weights[token * a.weights_s + j] = (a.renormalize ? s / (sum + 1e-20f) : s) * a.scale;
        a.chosen[token * a.chosen_s + j] = list[j] >= 0 ? list[j] : 0;
        if (picked != NULL) picked[token * a.top_k + j] = list[j] >= 0 ? list[j] : 0;
    }
    __syncwarp();
}

__global__ void __launch_bounds__(ROUTE_THREADS) route_choose(const __grid_constant__ route_params a)
{
    extern __shared__ float memory[];
    const int warp = threadIdx.x / 32;
    const int64_t token = (int64_t)blockIdx.x * ROUTE_WARPS + warp;
    let_next_start();
    wait_for_before();
    if (token < a.tokens) choose_for(a, token, choice_rows(a, memory, warp), NULL);
}

__device__ __forceinline__ int32_t expert_of_slot(const route_params &a, int64_t slot)
{
    return a.chosen[slot / a.top_k * a.chosen_s + slot % a.top_k];
}

__global__ void __launch_bounds__(ROUTE_THREADS) route_count(const __grid_constant__ route_params a)
{
    extern __shared__ int32_t here[];
    const int64_t first = (int64_t)blockIdx.x * ROUTE_CHUNK, slots = a.tokens * a.top_k;
    for (int32_t e = threadIdx.x; e < a.experts; e += ROUTE_THREADS) here[e] = 0;
    __syncthreads();
    for (int64_t s = first + threadIdx.x; s < slots && s < first + ROUTE_CHUNK; s += ROUTE_THREADS)
        atomicAdd(&here[expert_of_slot(a, s)], 1);
    __syncthreads();
    for (int32_t e = threadIdx.x; e < a.experts; e += ROUTE_THREADS)
        a.counts[(int64_t)blockIdx.x * a.experts + e] = here[e];
}

/* Turns each chunk's counts into the rows where its slots begin, and writes the experts' ends to offsets. One
 * block, a thread an expert. */
__global__ void __launch_bounds__(ROUTE_MOST_EXPERTS) route_scan(const __grid_constant__ route_params a)
{
    __shared__ int32_t warps[32];
    const int e = threadIdx.x, lane = e % 32;
    int32_t total = 0;
    for (int64_t c = 0; e < a.experts && c < a.chunks; c++) total += a.counts[c * a.experts + e];
    int32_t end = total;
    for (int delta = 1; delta < 32; delta *= 2) {
        const int32_t lower = __shfl_up_sync(~0u, end, delta);
        if (lane >= delta) end += lower;
    }
    if (lane == 31) warps[e / 32] = end;
    __syncthreads();
    for (int w = 0; w < e / 32; w++) end += warps[w];
    if (e >= a.experts) return;
    a.offsets[e] = end;
    int32_t begin = end - total;
    for (int64_t c = 0; c < a.chunks; c++) {
        const int32_t n = a.counts[c * a.experts + e];
        a.counts[c * a.experts + e] = begin;
        begin += n;
    }
}

/* Writes slots from `first` on to their rows, in order; a warp calls. own: the row of its next slot of each
 * expert. */
__device__ __forceinline__ void place_slots(const route_params &a, int64_t first, int64_t count, int32_t *own)
{
    const int lane = threadIdx.x % 32;
    const int64_t end = min(a.tokens * a.top_k, first + count);
    for (int64_t s = first; s < end; s += 32) {
        const int32_t e = s + lane < end ? expert_of_slot(a, s + lane) : -1;
        const unsigned same = __match_any_sync(~0u, e), below = same & ((1u << lane) - 1);
        if (e >= 0) a.permutation[own[e] + __popc(below)] = (int32_t)(s + lane);
        __syncwarp();
        if (e >= 0 && below == 0) own[e] += __popc(same);
        __syncwarp();
    }
}

__global__ void __launch_bounds__(ROUTE_THREADS) route_place(const __grid_constant__ route_params a)
{
    extern __shared__ int32_t at[]; /* [warps][E]: the row of a warp's next slot of an expert */
    enum { PER_WARP = ROUTE_CHUNK / ROUTE_WARPS };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t slots = a.tokens * a.top_k, first = (int64_t)blockIdx.x * ROUTE_CHUNK + warp * PER_WARP;
    int32_t *own = at + warp * a.experts;
    for (int32_t i = threadIdx.x; i < ROUTE_WARPS * a.experts; i += ROUTE_THREADS) at[i] = 0;
    __syncthreads();
    for (int64_t s = first + lane; s < slots && s < first + PER_WARP; s += 32)
        atomicAdd(&own[expert_of_slot(a, s)], 1);
    __syncthreads();
    for (int32_t e = threadIdx.x; e < a.experts; e += ROUTE_THREADS) {
        int32_t begin = a.counts[(int64_t)blockIdx.x * a.experts + e];
        for (int w = 0; w < ROUTE_WARPS; w++) {
            const int32_t n = at[w * a.experts + e];
            at[w * a.experts + e] = begin;
            begin += n;
        }
    }
    __syncthreads();
    place_slots(a, first, PER_WARP, own);
}

/* Sorts up to a block's threads of slots; of experts there are no more either. */
__global__ void __launch_bounds__(ROUTE_MOST_EXPERTS) route_order(const __grid_constant__ route_params a)
{
    extern __shared__ int32_t at[]; /* [warps][E]: a warp's slots, then those before; [E]: the first row */
    __shared__ int32_t ends[32];
    const int slot = threadIdx.x, lane = slot % 32, warps = blockDim.x / 32, all = a.experts;
    int32_t *const own = at + slot / 32 * all, *const begin = at + warps * all;
    let_next_start();
    for (int32_t i = slot; i < warps * all; i += blockDim.x) at[i] = 0;
    wait_for_before();
    const int32_t e = slot < a.tokens * a.top_k ? expert_of_slot(a, slot) : -1;
    const unsigned same = __match_any_sync(~0u, e), below = same & ((1u << lane) - 1);
    __syncthreads();
    if (e >= 0 && below == 0) own[e] = __popc(same);
    __syncthreads();
    int32_t total = 0;
    for (int w = 0; slot < all && w < warps; w++) {
        const int32_t n = at[w * all + slot];
        at[w * all + slot] = total;
        total += n;
    }
    int32_t end = total;
    for (int delta = 1; delta < 32; delta *= 2) {
        const int32_t lower = __shfl_up_sync(~0u, end, delta);
        if (lane >= delta) end += lower;
    }
    if (lane == 31) ends[slot / 32] = end;
    __syncthreads();
    for (int w = 0; w < slot / 32; w++) end += ends[w];
    if (slot < all) {
        a.offsets[slot] = end;
        begin[slot] = end - total;
    }
    __syncthreads();
    if (e >= 0) a.permutation[begin[e] + own[e] + __popc(below)] = slot;
}

/* Routes and sorts few tokens in one block. */
__global__ void __launch_bounds__(ROUTE_THREADS) route_few(const __grid_constant__ route_params a)
{
    extern __shared__ float memory[];
    __shared__ int32_t picked[ROUTE_FEW_SLOTS];
    const int warp = threadIdx.x / 32, slots = (int)a.tokens * a.top_k;
    let_next_start();
    wait_for_before();
    if (a.given_experts != NULL)
        for (int s = threadIdx.x; s < slots; s += ROUTE_THREADS) picked[s] = copy_given(a, s);
    for (int64_t token = warp; a.given_experts == NULL && token < a.tokens; token += ROUTE_WARPS)
        choose_for(a, token, choice_rows(a, memory, warp), picked);
    __syncthreads();
    for (int32_t e = threadIdx.x; e < a.experts; e += ROUTE_THREADS) {
        int32_t end = 0;
        for (int s = 0; s < slots; s++) end += picked[s] <= e;
        a.offsets[e] = end;
    }
    for (int s = threadIdx.x; s < slots; s += ROUTE_THREADS) {
        int32_t row = 0;
        for (int o = 0; o < slots; o++) row += picked[o] < picked[s] || (picked[o] == picked[s] && o < s);
        a.permutation[row] = s;
    }
}

route_params route_params_of(const route_args *args)
{
    route_params a = {};
    const bool given = present(args->logits);
    a.score = args->score;
    a.top_k = (int32_t)args->top_k;
    a.renormalize = args->renormalize;
    a.scale = args->scale;
    const bool routed = present(args->given_experts);
    a.tokens = routed ? args->given_experts.shape[0] : given ? args->logits.shape[0] : args->hidden.shape[0];
    a.experts = (int32_t)(routed  ? args->offsets.shape[0]
                          : given ? args->logits.shape[1]
                                  : args->weight.shape[0]);
    a.dim = given || routed ? 0 : args->hidden.shape[1];
    a.logits = args->logits.data;
    a.logits_dtype = args->logits.dtype;
    a.logits_s = args->logits.strides[0];
    a.hidden = args->hidden.data;
    a.hidden_dtype = args->hidden.dtype;
    a.hidden_s = args->hidden.strides[0];
    a.weight = args->weight.data;
    a.weight_dtype = args->weight.dtype;
    a.weight_s = args->weight.strides[0];
    a.bias = present(args->bias) ? (const float *)args->bias.data : NULL;
    if (present(args->tid2eid)) {
        a.input_ids = args->input_ids.data;
        a.ids64 = args->input_ids.dtype == QUERN_I64;
        a.table = args->tid2eid.data;
        a.table64 = args->tid2eid.dtype == QUERN_I64;
        a.vocabulary = args->tid2eid.shape[0];
        a.table_s = args->tid2eid.strides[0];
    }
    if (routed) {
        a.given_experts = (const int32_t *)args->given_experts.data;
        a.given_experts_s = args->given_experts.strides[0];
        a.given_weights = (const float *)args->given_weights.data;
        a.given_weights_s = args->given_weights.strides[0];
    }
    a.chosen = (int32_t *)args->experts.data;
    a.chosen_s = args->experts.strides[0];
    a.weights = (float *)args->weights.data;
    a.weights_s = args->weights.strides[0];
    a.offsets = (int32_t *)args->offsets.data;
    a.permutation = (int32_t *)args->permutation.data;
    a.chunks = (a.tokens * a.top_k + ROUTE_CHUNK - 1) / ROUTE_CHUNK;
    return a;
}

static size_t carve(route_params &a, const route_args *args, void *workspace)
{
    arena room = arena_on(workspace);
    a.counts = (int32_t *)arena_take(&room, (size_t)(a.chunks * a.experts) * sizeof(int32_t));
    if (!present(args->logits) && !present(args->given_experts))
        a.computed = (float *)arena_take(&room, (size_t)(a.tokens * a.experts) * sizeof(float));
    return arena_size(&room);
}

quern_status route_make_logits(const launcher &to, const route_params &a)
{
    const int64_t tiles =
        (a.tokens + ROUTE_TILE - 1) / ROUTE_TILE * ((a.experts + ROUTE_TILE - 1) / ROUTE_TILE);
    if (tiles > 0 && tiles <= ROUTE_FEW_TILES && to.most == NULL)
        return launch_behind(to.stream, route_few_logits, dim3((unsigned)tiles), ROUTE_THREADS, 0,
                             "route, logits of few tokens", a);
    return launch_shared(to, route_logits, dim3(blocks_for(tiles, ROUTE_WARPS)), ROUTE_THREADS, 0,
                         "route, logits", a);
}

static bool route_any_supports(const stage_exec *, const route_args *args, char why[STAGE_WHY_BYTES])
{
    const route_params a = route_params_of(args);
    if (a.experts <= ROUTE_MOST_EXPERTS) return true;
    snprintf(why, STAGE_WHY_BYTES, "%d experts: the cuda backend takes up to %d", (int)a.experts,
             (int)ROUTE_MOST_EXPERTS);
    return false;
}

static size_t route_any_bytes(const stage_exec *, const route_args *args)
{
    route_params a = route_params_of(args);
    return carve(a, args, NULL);
}

static quern_status route_any_run(const stage_exec *exec, const route_args *args, void *workspace)
{
    route_params a = route_params_of(args);
    a.status = exec->status;
    carve(a, args, workspace);
    const launcher to = {(cudaStream_t)exec->stream, NULL};
    const size_t row = (size_t)a.experts * sizeof(int32_t);
    if (a.experts == 0) return QUERN_OK;
    quern_status status = QUERN_OK;
    if (a.computed != NULL) status = route_make_logits(to, a);
    const bool few = a.tokens > 0 && a.tokens <= ROUTE_FEW && a.tokens * a.top_k <= ROUTE_FEW_SLOTS;
    if (status == QUERN_OK && few)
        return launch_behind(to.stream, route_few, dim3(1), ROUTE_THREADS, choice_rows::bytes(a),
                             "route, few", a);
    const int64_t slots = a.tokens * a.top_k;
    if (status == QUERN_OK && a.given_experts != NULL)
        status = launch_shared(to, route_copy, dim3(blocks_for(slots, ROUTE_THREADS)), ROUTE_THREADS, 0,
                               "route, copy", a);
    else if (status == QUERN_OK && a.tokens > 0)
        status = launch_behind(to.stream, route_choose, dim3(blocks_for(a.tokens, ROUTE_WARPS)),
                               ROUTE_THREADS, choice_rows::bytes(a), "route, choose", a);
    const int64_t warps = (std::max(slots, (int64_t)a.experts) + 31) / 32;
    const size_t room = (size_t)(warps + 1) * row;
    if (status == QUERN_OK && slots <= ROUTE_MOST_EXPERTS && room <= ROUTE_ORDER_BYTES)
        return launch_behind(to.stream, route_order, dim3(1), (int)warps * 32, room, "route, order", a);
    if (status == QUERN_OK)
        status =
            launch_shared(to, route_count, dim3((unsigned)a.chunks), ROUTE_THREADS, row, "route, count", a);
    if (status == QUERN_OK)
        status = launch_shared(to, route_scan, dim3(1), ROUTE_MOST_EXPERTS, 0, "route, scan", a);
    if (status == QUERN_OK)
        status = launch_shared(to, route_place, dim3((unsigned)a.chunks), ROUTE_THREADS, ROUTE_WARPS * row,
                               "route, place", a);
    return status;
}

extern const variant<route_args> route_forward_any = {"route_forward_any", route_any_supports,
                                                      route_any_bytes, route_any_run};
