/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cuh - launches with dynamic shared memory. A stage's `supports` goes the same way as its `run`, with
 * a launcher that only notes how much the kernels would take, so that what a smaller GPU cannot hold is
 * refused before anything is written. */
#ifndef QUERN_CUDA_LAUNCH_CUH
#define QUERN_CUDA_LAUNCH_CUH

#include "common/device.cuh"

struct launcher {
    cudaStream_t stream;
    size_t *most; /* not NULL: launch nothing, note the most bytes here */
};

/* Blocks of `threads` that hold n threads. */
static inline unsigned blocks_for(int64_t n, int threads)
{
    return (unsigned)((n + threads - 1) / threads);
}

/* Lets a kernel have `bytes` of dynamic shared memory on the current device. */
cudaError_t shared_allow(const void *kernel, size_t bytes);
template <typename K, typename... Args>
static quern_status launch_shared(const launcher &to, K kernel, dim3 grid, int threads, size_t bytes,
                                  const char *what, const Args &...args)
{
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return QUERN_OK;
    if (to.most != NULL) {
        if (bytes > *to.most) *to.most = bytes;
        return QUERN_OK;
    }
    const cudaError_t code = shared_allow((const void *)kernel, bytes);
    if (code != cudaSuccess) return cuda_report(code, what);
    kernel<<<grid, threads, bytes, to.stream>>>(args...);
    return LAUNCHED(what);
}

/* The same, of clusters of `cluster` blocks, which run at the same time; `early`: as launch_behind(). */
template <typename... Parameters, typename... Args>
static quern_status launch_cluster(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, int threads,
                                   size_t bytes, const char *what, unsigned cluster, bool early,
                                   const Args &...args)
{
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute wanted[2] = {};
    config.attrs = wanted;
    if (early) {
        wanted[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        wanted[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        wanted[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        wanted[config.numAttrs].val.clusterDim.x = cluster;
        wanted[config.numAttrs].val.clusterDim.y = 1;
        wanted[config.numAttrs++].val.clusterDim.z = 1;
    }
    config.gridDim = grid;
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    cudaError_t code = shared_allow((const void *)kernel, bytes);
    if (code == cudaSuccess) code = cudaLaunchKernelEx(&config, kernel, args...);
    return cuda_report(code, what);
}

/* The same, but the kernel may start as soon as all blocks of the one before it on the stream have called
 * let_next_start(), or ended. That one must be of this call, or a kernel that ends only once what came before
 * it has ended: all of the library's do. */
template <typename... Parameters, typename... Args>
static quern_status launch_behind(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, int threads,
                                  size_t bytes, const char *what, const Args &...args)
{
    return launch_cluster(stream, kernel, grid, threads, bytes, what, 1, true, args...);
}

/* Whether the device's blocks can have `bytes`; if not, says so. Kernels with dynamic shared memory have no
 * other. */
bool shared_fits(const stage_exec *exec, size_t bytes, const char *what, char why[STAGE_WHY_BYTES]);

#endif
