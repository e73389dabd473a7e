/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* inits.c - every _INIT macro as an initialiser, without a warning, in C11 and in C++17. */
#include <quern/attention.h>
#include <quern/cuda.h>
#include <quern/nsa.h>

#define CHECK(type, init)                                                                                    \
    do {                                                                                                     \
        type t = init;                                                                                       \
        static const type constant = init;                                                                   \
        wrong |= t.size != sizeof(type) || constant.size != t.size;                                          \
    } while (0)

int main(void)
{
    int wrong = 0;
    CHECK(quern_context_params, QUERN_CONTEXT_PARAMS_INIT);
    CHECK(quern_exec, QUERN_EXEC_INIT);
    CHECK(quern_attention_params, QUERN_ATTENTION_PARAMS_INIT);
    CHECK(quern_attention_tensors, QUERN_ATTENTION_TENSORS_INIT);
    CHECK(quern_nsa_params, QUERN_NSA_PARAMS_INIT);
    CHECK(quern_nsa_tensors, QUERN_NSA_TENSORS_INIT);
    CHECK(quern_nsa_list_params, QUERN_NSA_LIST_PARAMS_INIT);
    CHECK(quern_nsa_list_tensors, QUERN_NSA_LIST_TENSORS_INIT);
    CHECK(quern_cuda_device, QUERN_CUDA_DEVICE_INIT);
    return wrong;
}
