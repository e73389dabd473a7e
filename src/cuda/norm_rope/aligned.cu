/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * aligned.cu - norm_rope's forward pass of rows that can be read 16 bytes at a time, in f32 or in the
 * result's dtype: few registers, as dtypes are known, so that the rows of a step are under way at once.
 * Threads, sums and roundings are those of kernel.cuh. Limit: a step's rows: latency; more: the copy rate.
 */
#include "norm_rope/params.cuh"
#include "variants.cuh"

enum { ALIGNED_THREADS = 256, ALIGNED_BLOCKS = 5 };

struct aligned_kernel {
    const void *x;
    void *out;
    int64_t x_s[3], out_s[3];
    fast_div heads, tokens, lanes;
    uint32_t rows;
    int32_t width, rotated;
    bool norm, inverse, half; /* half: weight is of 16 bits */
    float eps;
    const void *weight; /* or NULL */
    const float *angles;
    int64_t angle_row, angle_rows, position_row;
    const int32_t *positions;
    int32_t *status;
};

template <typename T> __device__ __forceinline__ chunk weight_chunk(const aligned_kernel &a, int channel)
{
    return a.half ? load_chunk<T>((const T *)a.weight + channel, true)
                  : load_chunk<float>((const float *)a.weight + channel, true);
}

/* X: of x; T: of the result; W: of a weight of 16 bits. */
template <typename X, typename T, typename W>
__global__ void __launch_bounds__(ALIGNED_THREADS, ALIGNED_BLOCKS)
    norm_rope_forward_aligned(const __grid_constant__ aligned_kernel a)
{
    __shared__ float parts[PARTS];
    const group g(parts, (int)a.lanes.d);
    const uint32_t row = blockIdx.x * (ALIGNED_THREADS / a.lanes.d) + (uint32_t)g.index;
    const int channel = g.lane * CHUNK, start = a.width - a.rotated;
    let_next_start();
    wait_for_before();
    if (row >= a.rows) return;
    const uint32_t token = quotient(row, a.heads), b = quotient(token, a.tokens), n = token - b * a.tokens.d,
                   head = row - token * a.heads.d;
    const bool here = channel < a.width, turns = here && channel >= start && a.rotated > 0;
    int64_t position = n;
    if (a.positions != NULL) position = a.positions[n * a.position_row];
    chunk x = {}, w;
    if (here)
        x = load_chunk<X, true>((const X *)a.x + b * a.x_s[0] + n * a.x_s[1] + head * a.x_s[2] + channel,
                                true);
    const bool weighs = here && a.weight != NULL;
    if (weighs) w = weight_chunk<W>(a, channel);
    const bool some = a.rotated == 0 || (position >= 0 && position < a.angle_rows);
    if (!some) raise_status(a.status, QUERN_STATUS_BAD_POSITION);
    float4 cosine = {}, sine = {};
    if (turns && some) {
        const float *const at = a.angles + position * a.angle_row + (channel - start) / 2;
        cosine = *(const float4 *)at;
        sine = *(const float4 *)(at + a.rotated / 2);
    }
    if (a.norm) {
        const float scale = 1.0f / sqrtf(g.sum(dot_of(x, x)) / (float)a.width + a.eps);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) x.x[i] = x.x[i] * scale * (weighs ? w.x[i] : 1.0f);
    }
    if (turns)
#pragma unroll
        for (int i = 0; i < CHUNK; i += 2) {
            const float c = (&cosine.x)[i / 2], s = a.inverse ? -(&sine.x)[i / 2] : (&sine.x)[i / 2],
                        first = x.x[i], second = x.x[i + 1];
            x.x[i] = first * c - second * s;
            x.x[i + 1] = first * s + second * c;
        }
    if (!some) x = {};
    if (here)
        store_chunk<T>((T *)a.out + b * a.out_s[0] + n * a.out_s[1] + head * a.out_s[2] + channel, x, true);
}

static int lanes_of(int64_t width)
{
    int lanes = 32;
    while (lanes < ALIGNED_THREADS && lanes * CHUNK < width) lanes *= 2;
    return lanes;
}

static bool supports(const stage_exec *, const norm_rope_args *args, char *)
{
    const quern_tensor &x = args->x, &w = args->weight, &angles = args->cos_sin, &out = args->out;
    const int64_t width = x.shape[3], rows = x.shape[0] * x.shape[1] * x.shape[2];
    if (x.dtype != QUERN_F32 && x.dtype != out.dtype) return false;
    if (width % CHUNK != 0 || width > ALIGNED_THREADS * CHUNK || rows > INT32_MAX) return false;
    if (!rows_aligned16(x) || !rows_aligned16(out)) return false;
    if (present(w) && (w.strides[0] != 1 || (uintptr_t)w.data % 16 != 0 ||
                       (w.dtype != QUERN_F32 && out.dtype != QUERN_F32 && w.dtype != out.dtype)))
        return false;
    return !present(angles) || (angles.dtype == QUERN_F32 && angles.shape[1] % (2 * CHUNK) == 0 &&
                                (uintptr_t)angles.data % 16 == 0 && angles.strides[0] % 4 == 0);
}

template <typename X, typename T, typename W>
static quern_status launch(const aligned_kernel &a, cudaStream_t stream)
{
    const int groups = ALIGNED_THREADS / (int)a.lanes.d;
    return launch_behind(stream, norm_rope_forward_aligned<X, T, W>, dim3(blocks_for(a.rows, groups)),
                         ALIGNED_THREADS, 0, "norm_rope", a);
}

static quern_status run(const stage_exec *exec, const norm_rope_args *args, void *)
{
    const quern_tensor &x = args->x;
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    aligned_kernel a = {};
    a.x = x.data;
    a.out = args->out.data;
    for (int i = 0; i < 3; i++) {
        a.x_s[i] = x.strides[i];
        a.out_s[i] = args->out.strides[i];
    }
    a.rows = (uint32_t)(x.shape[0] * x.shape[1] * x.shape[2]);
    if (a.rows == 0) return QUERN_OK;
    a.heads = fast_div_by((uint32_t)x.shape[2]);
    a.tokens = fast_div_by((uint32_t)x.shape[1]);
    a.width = (int32_t)x.shape[3];
    a.lanes = fast_div_by((uint32_t)lanes_of(a.width));
    a.norm = args->norm;
    a.inverse = args->inverse;
    a.eps = args->eps;
    if (present(args->weight)) {
        a.weight = args->weight.data;
        a.half = args->weight.dtype != QUERN_F32;
    }
    if (present(args->cos_sin)) {
        a.angles = (const float *)args->cos_sin.data;
        a.rotated = (int32_t)args->cos_sin.shape[1];
        a.angle_row = args->cos_sin.strides[0];
        a.angle_rows = args->cos_sin.shape[0];
    }
    if (present(args->positions)) {
        a.positions = (const int32_t *)args->positions.data;
        a.position_row = args->positions.strides[0];
    }
    a.status = exec->status;
    if (x.dtype == QUERN_BF16) return launch<bf16, bf16, bf16>(a, stream);
    if (x.dtype == QUERN_F16) return launch<f16, f16, f16>(a, stream);
    if (args->out.dtype == QUERN_BF16) return launch<float, bf16, bf16>(a, stream);
    if (args->out.dtype == QUERN_F16) return launch<float, f16, f16>(a, stream);
    return a.half && args->weight.dtype == QUERN_F16 ? launch<float, float, f16>(a, stream)
                                                     : launch<float, float, bf16>(a, stream);
}

extern const variant<norm_rope_args> norm_rope_aligned = {"norm_rope_aligned", supports, NULL, run};
