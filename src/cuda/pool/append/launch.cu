/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - the pool_append stage: one launch for both compressors, two for calls of many tokens. Steps of
 * V4's own widths and formats have a kernel in which a sequence of one token goes straight on. */
#include "pool/append/one.cuh"
#include "variants.cuh"

__global__ void __launch_bounds__(APPEND_THREADS, 1) pool_append(const __grid_constant__ append_kernel a)
{
    append_sequence(a);
}

__global__ void __launch_bounds__(APPEND_THREADS, 1) pool_append_far(const __grid_constant__ append_kernel a)
{
    append_entries(a);
}

static bool aligned(const quern_tensor &t, int64_t channels)
{
    return !present(t) || rows_aligned(t, channels * bytes_of(t.dtype));
}

/* Whether all rows can be read and written four channels at a time. */
static bool is_wide(const pool_append_part &p)
{
    const int64_t channels = GROUP_CHANNELS;
    return p.width % channels == 0 && aligned(p.proj, channels) && aligned(p.bias_a, channels) &&
           aligned(p.bias_b, channels) && aligned(p.state, channels);
}

static append_part part_of(const pool_append_args *args, const pool_append_part &p, int first)
{
    const quern_tensor *const biases[] = {&p.bias_a, &p.bias_b};
    append_part k = {};
    k.width = (int)p.width;
    k.lanes = group_lanes(p.width);
    k.first = first;
    k.wide = is_wide(p);
    k.proj = (const char *)p.proj.data;
    k.dtype = p.proj.dtype;
    k.size = (int)bytes_of(p.proj.dtype);
    k.proj_row = p.proj.strides[0];
    for (int s = 0; s < 2; s++) {
        k.bias[s] = (const char *)biases[s]->data;
        k.bias_dtype[s] = biases[s]->dtype;
        k.bias_row[s] = biases[s]->strides[0];
    }
    k.state = (float *)p.state.data;
    k.state_row = p.state.strides[0];
    k.merged = (int32_t *)p.merged.data;
    k.merged_row = p.merged.strides[0];
    k.entry = entry_kernel_of(p.entry, p.width, args->ratio);
    k.pooled = (float *)p.pooled.data;
    k.pooled_row = p.pooled.strides[0];
    const int64_t size = bytes_of(p.out.dtype);
    k.out = (char *)p.out.data;
    k.out_dtype = p.out.dtype;
    k.out_row = p.out.strides[0] * size;
    k.rows = present(p.pooled) ? p.pooled.shape[0] : present(p.table) ? 0 : p.out.shape[0];
    if (!present(p.table)) return k;
    k.table = (const int32_t *)p.table.data;
    k.table_row = p.table.strides[0];
    k.table_column = p.table.strides[1];
    k.columns = (uint32_t)p.table.shape[1];
    k.pages = (uint32_t)p.out.shape[0];
    k.page = (uint32_t)p.page;
    k.page_by = fast_div_by(k.page);
    k.page_bytes = k.out_row;
    k.slot_bytes = p.out.ndim == 3 ? p.out.strides[1] * size : entry_data_bytes(p.entry.format, p.width);
    if (p.out.ndim == 3) return k;
    k.scales = p.page * k.slot_bytes;
    k.scale_bytes = p.out.shape[1] / p.page - k.slot_bytes;
    return k;
}

/* Of a compressor's group, whose threads begin at a multiple of their number. */
static int first_thread(const pool_append_args *args, int part)
{
    const int lanes = group_lanes(args->part[part].width);
    return part > 0 ? (group_lanes(args->part[0].width) + lanes - 1) / lanes * lanes : 0;
}

static int threads_of(const pool_append_args *args)
{
    const int last = args->part[1].width > 0 ? 1 : 0;
    return first_thread(args, last) + group_lanes(args->part[last].width);
}

static append_kernel kernel_of(const stage_exec *exec, const pool_append_args *args)
{
    append_kernel a = {};
    a.ratio = (uint32_t)args->ratio;
    a.ring = (uint32_t)args->ring;
    a.ring_by = fast_div_by(a.ring > 0 ? a.ring : 1);
    a.series = args->overlap ? 2 : 1;
    for (int i = 0; i < POOL_PARTS && args->part[i].width > 0; i++) {
        a.part[i] = part_of(args, args->part[i], first_thread(args, i));
        a.careful = a.careful || args->part[i].entry.format != ENTRY_ROWS;
        a.counts = a.counts || a.part[i].rows > 0;
        a.parts = i + 1;
    }
    a.slots = args->step.slots.data;
    a.slots_i64 = args->step.slots.dtype == QUERN_I64;
    a.slots_row = args->step.slots.strides[0];
    a.positions = (const int32_t *)args->step.positions.data;
    a.positions_row = args->step.positions.strides[0];
    a.rows = (const int32_t *)args->step.rows.data;
    a.rows_row = args->step.rows.strides[0];
    a.rows_next = args->step.rows.strides[1];
    a.batch = (int)args->step.slots.shape[0];
    a.tokens = args->part[0].proj.shape[0];
    a.states = args->part[0].state.shape[0];
    if (present(args->fault)) {
        a.fault = (int32_t *)args->fault.data;
        a.fault_row = args->fault.strides[0];
    }
    a.status = exec->status;
    return a;
}

static bool supports(const stage_exec *, const pool_append_args *args, char why[STAGE_WHY_BYTES])
{
    enum { WIDTH_MOST = APPEND_THREADS * GROUP_CHANNELS };
    for (int i = 0; i < POOL_PARTS; i++) {
        if (args->part[i].width <= WIDTH_MOST && threads_of(args) <= APPEND_THREADS) continue;
        snprintf(why, STAGE_WHY_BYTES,
                 "entries have %lld and %lld channels: the cuda backend takes up to %d of both",
                 (long long)args->part[0].width, (long long)args->part[1].width, WIDTH_MOST);
        return false;
    }
    return true;
}

/* Whether the entries of a call's tokens are worth blocks of their own: more than a few a sequence. */
static bool is_long(const pool_append_args *args)
{
    enum { FEW_TOKENS = 8 };
    return args->part[0].proj.shape[0] > FEW_TOKENS * args->step.slots.shape[0];
}

static size_t workspace(const stage_exec *, const pool_append_args *args)
{
    return is_long(args) ? room_for((size_t)args->step.slots.shape[0] * sizeof(int32_t)) : 0;
}

static quern_status make_far(const stage_exec *exec, const append_kernel &a, int threads, size_t bytes)
{
    const int64_t blocks = 4, limit = 65535; /* of a multiprocessor; of a grid */
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    const int64_t entries = a.tokens / a.ratio, shares = blocks * exec->multiprocessors / a.batch + 1,
                  most = shares < entries ? shares : entries;
    const cudaError_t code = cudaMemsetAsync(a.refused, 0, (size_t)a.batch * sizeof(int32_t), stream);
    if (code != cudaSuccess) return cuda_report(code, "pool_append's refusals");
    if (most < 1) return QUERN_OK;
    const dim3 grid((unsigned)a.batch, (unsigned)(most < limit ? most : limit));
    pool_append_far<<<grid, threads, bytes, stream>>>(a);
    return LAUNCHED("pool_append of many tokens");
}

static quern_status run(const stage_exec *exec, const pool_append_args *args, void *memory)
{
    append_kernel a = kernel_of(exec, args);
    const int threads = threads_of(args);
    const size_t bytes = (size_t)(threads * GROUP_CHANNELS) * sizeof(float);
    quern_status status = QUERN_OK;
    if (a.batch == 0) return status;
    if (is_long(args)) {
        a.refused = room_at<int32_t>(memory);
        status = make_far(exec, a, threads, bytes);
    }
    if (status != QUERN_OK) return status;
    pool_append<<<(unsigned)a.batch, threads, bytes, (cudaStream_t)exec->stream>>>(a);
    return LAUNCHED("pool_append");
}

/* ---- steps of a token a sequence ---- */

static bool is_aligned(const quern_tensor &t, int64_t bytes)
{
    return ((uint64_t)(uintptr_t)t.data | (uint64_t)(t.strides[0] * bytes_of(t.dtype))) % bytes == 0;
}

/* Entries as rows of f32, or as bytes of `format` in pages. */
static bool has_one_target(const pool_append_part &p, entry_format format)
{
    if (present(p.pooled) || p.entry.format != format) return false;
    return format == ENTRY_ROWS ? !present(p.table) && p.out.dtype == QUERN_F32
                                : present(p.table) && p.out.ndim == 2 && (uintptr_t)p.out.data % 4 == 0 &&
                                      p.out.strides[0] % 4 == 0 && p.page <= INT32_MAX;
}

/* Whether a compressor is one of V4's, with the norm's weights of 16 bits that the main one has. */
static bool is_one_part(const pool_append_args *args, int part, entry_format format)
{
    const pool_append_part &p = args->part[part];
    const quern_tensor &norm = p.entry.norm_weight, &angles = p.entry.cos_sin;
    return p.width == (part == 0 ? ONE_WIDTH : ONE_INDEX_WIDTH) && is_wide(p) &&
           p.proj.dtype == args->part[0].proj.dtype && p.bias_a.dtype == QUERN_F32 &&
           p.bias_b.dtype == QUERN_F32 && present(norm) && norm.strides[0] == 1 &&
           norm.dtype == args->part[0].entry.norm_weight.dtype && (uintptr_t)norm.data % 8 == 0 &&
           present(angles) && angles.dtype == QUERN_F32 && angles.shape[1] == ONE_ROTATED &&
           is_aligned(angles, 8) && (part == 1 || !p.entry.hadamard) && has_one_target(p, format);
}

static bool are_one(const pool_append_args *args, entry_format main, entry_format index)
{
    return is_one_part(args, 0, main) && (args->part[1].width == 0 || is_one_part(args, 1, index));
}

static bool has_rows(const pool_append_args *args)
{
    return are_one(args, ENTRY_ROWS, ENTRY_ROWS);
}

/* Projections in f32 to rows, or in the dtype of the norms' weights to bytes. */
static bool one_supports(const stage_exec *, const pool_append_args *args, char *)
{
    const quern_dtype dtype = args->part[0].proj.dtype, weights = args->part[0].entry.norm_weight.dtype;
    return args->ratio == ONE_RATIO && args->overlap && args->ring >= 1 && args->ring <= ONE_RING &&
           args->step.slots.dtype == QUERN_I32 && !is_long(args) &&
           (weights == QUERN_BF16 || weights == QUERN_F16) &&
           (has_rows(args) ? dtype == QUERN_F32
                           : dtype == weights && are_one(args, ENTRY_ROW584, ENTRY_FP8));
}

template <typename W> static quern_status one_run_of(const stage_exec *exec, const pool_append_args *args)
{
    const append_kernel a = kernel_of(exec, args);
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    return has_rows(args) ? launch_one<float, W, ENTRY_ROWS, ENTRY_ROWS>(a, stream)
                          : launch_one<W, W, ENTRY_ROW584, ENTRY_FP8>(a, stream);
}

static quern_status one_run(const stage_exec *exec, const pool_append_args *args, void *)
{
    return args->part[0].entry.norm_weight.dtype == QUERN_BF16 ? one_run_of<bf16>(exec, args)
                                                               : one_run_of<f16>(exec, args);
}

extern const variant<pool_append_args> pool_append_one = {"pool_append_one", one_supports, NULL, one_run};
extern const variant<pool_append_args> pool_append_any = {"pool_append_any", supports, workspace, run};
