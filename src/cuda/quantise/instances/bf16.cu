/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "quantise/kernel.cuh"

quern_status quantise_bf16(quantise_params a, fp4_kind kind, bool columns, bool computed, int sms,
                           cudaStream_t stream)
{
    return quantise_as<bf16>(a, kind, columns, computed, sms, stream);
}
