/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "select/sm90/kernel.cuh"

quern_status sm90_select_f16_64(const select_kernel &s, const sm90_select_call &call)
{
    return sm90_select_softmax::run<f16, 64>(s, call);
}
