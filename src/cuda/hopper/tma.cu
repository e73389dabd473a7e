/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* tma.cu - descriptions of tensors for the copy engine. The encoder is the driver's; the runtime finds it. */
#include "hopper/tma.cuh"
#include "hopper/tma_tiles.cuh"

#include <atomic>

bool tma_can(const quern_tensor &t)
{
    if (t.ndim != 4 || t.data == NULL || ((uintptr_t)t.data & 15) != 0) return false;
    for (int i = 0; i < 4; i++)
        if (t.shape[i] < 1 || t.shape[i] > INT32_MAX) return false;
    for (int i = 0; i < 3; i++)
        if (t.shape[i] > 1 && (t.strides[i] < 1 || t.strides[i] % 8 != 0 || t.strides[i] >= (int64_t)1 << 38))
            return false;
    return true;
}

typedef CUresult tensor_map_encoder(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                    const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                    const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static cudaError_t find_encoder(tensor_map_encoder **encoder)
{
    static std::atomic<tensor_map_encoder *> known{NULL};
    *encoder = known.load(std::memory_order_relaxed);
    if (*encoder != NULL) return cudaSuccess;
    void *found = NULL;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t code =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (code != cudaSuccess) return code;
    if (result != cudaDriverEntryPointSuccess || found == NULL) return cudaErrorSymbolNotFound;
    *encoder = (tensor_map_encoder *)found;
    known.store(*encoder, std::memory_order_relaxed);
    return cudaSuccess;
}

quern_status tma_describe(CUtensorMap *map, const tma_tensor &t)
{
    tensor_map_encoder *encode;
    const cudaError_t code = find_encoder(&encode);
    if (code != cudaSuccess) return cuda_report(code, "looking for cuTensorMapEncodeTiled");
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    cuuint64_t shape[5], strides[4];
    cuuint32_t box[5];
    for (int i = 0; i < t.rank; i++) {
        shape[i] = (cuuint64_t)t.shape[i];
        box[i] = (cuuint32_t)t.box[i];
        if (i > 0) strides[i - 1] = t.shape[i] > 1 ? (cuuint64_t)t.strides[i - 1] : 16;
    }
    const CUresult result = encode(map, t.element, (cuuint32_t)t.rank, t.data, shape, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, t.swizzle,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return cuda_report(result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue,
                       "describing a tensor to the copy engine");
}

/* A [B, N, H, D] view, in boxes of `heads` heads by `rows` tokens by 128 bytes. */
static tma_tensor tensor_of(const quern_tensor &t, int heads, int rows)
{
    const int64_t size = t.dtype == QUERN_F32 ? 4 : 2;
    tma_tensor of = {t.data,
                     t.dtype == QUERN_F32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                     : t.dtype == QUERN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                     4,
                     {},
                     {},
                     {(int32_t)(128 / size), heads, rows, 1},
                     CU_TENSOR_MAP_SWIZZLE_128B};
    for (int i = 0; i < 4; i++) of.shape[i] = t.shape[3 - i];
    for (int i = 0; i < 3; i++) of.strides[i] = t.strides[2 - i] * size;
    return of;
}

quern_status tma_describe(CUtensorMap *map, const quern_tensor &t, int heads, int rows)
{
    return tma_describe(map, tensor_of(t, heads, rows));
}

/* The panels of 64 columns that a copy takes become a dim of their own. */
quern_status tma_describe_tiles(tma_tiles *tiles, const quern_tensor &t, int rows, int panels)
{
    tiles->at_once = t.shape[3] == panels * 64 ? panels : 1; /* what lies behind a row is no 0 */
    tma_tensor of = tensor_of(t, 1, rows);
    of.rank = 5;
    of.shape[4] = of.shape[3];
    of.strides[3] = of.strides[2];
    of.box[4] = 1;
    of.shape[0] /= tiles->at_once;
    of.shape[3] = of.box[3] = tiles->at_once;
    of.strides[2] = 128;
    return tma_describe(&tiles->map, of);
}
