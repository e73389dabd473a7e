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

/* Boxes of `heads` heads by `rows` tokens. panels: of each box, which become a dim of their own; 0: none. */
static quern_status describe(CUtensorMap *map, const quern_tensor &t, int heads, int rows, int panels)
{
    tensor_map_encoder *encode;
    const cudaError_t code = find_encoder(&encode);
    if (code != cudaSuccess) return cuda_report(code, "looking for cuTensorMapEncodeTiled");
    const int64_t size = t.dtype == QUERN_F32 ? 4 : 2;
    const CUtensorMapDataType type = t.dtype == QUERN_F32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : t.dtype == QUERN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const cuuint32_t rank = panels > 0 ? 5 : 4, steps[5] = {1, 1, 1, 1, 1};
    const cuuint64_t columns = (cuuint64_t)t.shape[3], heads_of = (cuuint64_t)t.shape[2],
                     tokens = (cuuint64_t)t.shape[1], batch = (cuuint64_t)t.shape[0];
    cuuint64_t shape[5] = {columns, heads_of, tokens, batch}, strides[4];
    cuuint32_t box[5] = {(cuuint32_t)(128 / size), (cuuint32_t)heads, (cuuint32_t)rows, 1};
    for (int i = 0; i < 3; i++)
        strides[i] = t.shape[2 - i] > 1 ? (cuuint64_t)(t.strides[2 - i] * size)
                                        : 16; /* the stride of a dim of 1 means nothing */
    if (panels > 0) {
        shape[0] = columns / (cuuint64_t)panels;
        shape[4] = batch;
        shape[3] = box[3] = (cuuint32_t)panels;
        box[4] = 1;
        strides[3] = strides[2];
        strides[2] = 128;
    }
    const CUresult result = encode(map, type, rank, t.data, shape, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return cuda_report(result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue,
                       "describing a tensor to the copy engine");
}

quern_status tma_describe(CUtensorMap *map, const quern_tensor &t, int heads, int rows)
{
    return describe(map, t, heads, rows, 0);
}

quern_status tma_describe_tiles(tma_tiles *tiles, const quern_tensor &t, int rows, int panels)
{
    tiles->at_once = t.shape[3] == panels * 64 ? panels : 1; /* what lies behind a row is no 0 */
    return describe(&tiles->map, t, 1, rows, tiles->at_once);
}
