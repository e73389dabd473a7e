/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "compress/matrix/kernel.cuh"
#include "compress/mean/kernel.cuh"

const compress_parts compress_bf16 = {means<bf16>, spread<bf16>, multiply<bf16>, sum_pe<bf16>, sum_g<bf16>,
                                      d_pe<bf16>,  d_mean<bf16>, d_x<bf16>,      d_w<bf16>};
