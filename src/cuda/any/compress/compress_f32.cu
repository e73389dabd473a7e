/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "any/compress/compress_matrix_rows.cuh"
#include "any/compress/compress_rows.cuh"

const compress_parts compress_f32 = {means<float>,  spread<float>, multiply<float>,
                                     sum_pe<float>, sum_g<float>,  d_pe<float>,
                                     d_mean<float>, d_x<float>,    d_w<float>};
