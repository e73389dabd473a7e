/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "compress/matrix/kernel.cuh"
#include "compress/mean/kernel.cuh"

const compress_parts compress_f32 = {means<float>,  spread<float>, multiply<float>,
                                     sum_pe<float>, sum_g<float>,  d_pe<float>,
                                     d_mean<float>, d_x<float>,    d_w<float>};
