/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "nvfp4_case.h"

#include <math.h>
#include <stdlib.h>

oracle_profile nvfp4_case_profile(int index)
{
    return (oracle_profile)(index % ORACLE_PROFILES);
}

oracle_scales nvfp4_case_scales(int index)
{
    return (oracle_scales)(index / ORACLE_PROFILES);
}

bool nvfp4_case_accepted(int index)
{
    return nvfp4_case_profile(index) != ORACLE_HALFSTEP || nvfp4_case_scales(index) == ORACLE_SCALES_RNE;
}

static double largest_of(quern_dtype dtype)
{
    return dtype == QUERN_F16 ? 65504 : dtype == QUERN_BF16 ? 0x1.fep127 : 0x1.fffffep127;
}

static double value(test_random *random, quern_dtype dtype, double sigma, bool extreme)
{
    static const double ties[] = {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 4.5, 5, 5.25, 6, 0, -0.0};
    const double sign = test_random_one_in(random, 2) ? 1 : -1;
    if (test_random_one_in(random, 4)) return sign * ties[test_random_int(random, 0, 11)] * sigma;
    if (extreme && test_random_one_in(random, 40)) return sign * largest_of(dtype);
    if (extreme && test_random_one_in(random, 20))
        return sign * (dtype == QUERN_F16 ? 0x1p-24 : dtype == QUERN_BF16 ? 0x1p-133 : 0x1p-149);
    return sigma * test_random_normal(random);
}

void nvfp4_case_fill(test_tensor *t, test_random *random, bool extreme)
{
    const int64_t count = test_tensor_count(t);
    double *x = test_doubles(count), sigma = 1;
    for (int64_t i = 0; i < count; i++) {
        if (i % 16 == 0)
            sigma = test_random_one_in(random, 8) ? 0 : ldexp(1, (int)test_random_int(random, -12, 6));
        x[i] = value(random, t->view.dtype, sigma, extreme);
        if (fabs(x[i]) > largest_of(t->view.dtype)) x[i] = 1;
    }
    test_tensor_set(t, x);
    free(x);
}

float nvfp4_case_amax(const double *x, int64_t count)
{
    double most = 0;
    for (int64_t i = 0; i < count; i++) most = fmax(most, fabs(x[i]));
    return (float)most;
}
