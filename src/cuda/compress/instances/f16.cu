/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "compress/matrix/kernel.cuh"
#include "compress/mean/kernel.cuh"

const compress_parts compress_f16 = {means<f16>, spread<f16>, multiply<f16>, sum_pe<f16>, sum_g<f16>,
                                     d_pe<f16>,  d_mean<f16>, d_x<f16>,      d_w<f16>};
