/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "any/compress/compress_matrix_rows.cuh"
#include "any/compress/compress_rows.cuh"

const compress_parts compress_f16 = {means<f16>, spread<f16>, multiply<f16>, sum_pe<f16>, sum_g<f16>,
                                     d_pe<f16>,  d_mean<f16>, d_x<f16>,      d_w<f16>};
