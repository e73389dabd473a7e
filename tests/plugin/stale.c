/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stale.c - a libquern_cuda of another build: of this version and complete, but one field of a stage's
 * arguments stood elsewhere when it was compiled, so that its build id differs. Its functions end the
 * process. Compiled with QUERN_TEST_CURRENT it has this build's id instead and describes a device of its own.
 */
#include "runtime/build_id.h"

#include <stdlib.h>
#include <string.h>

static quern_status check_device(int32_t device)
{
#ifdef QUERN_TEST_CURRENT
    return device == 0 ? QUERN_OK : QUERN_ERR_DEVICE;
#else
    (void)device;
    abort();
#endif
}

static quern_status describe(int32_t device, quern_cuda_device *info)
{
    (void)device;
    strcpy(info->name, "of the test");
    info->compute_major = 9;
    info->l2_bytes = 7;
    return QUERN_OK;
}

quern_cuda_plugin_entry quern_cuda_backend;
const quern_cuda_plugin *quern_cuda_backend(quern_status (*set)(quern_status, const char *, ...))
{
    static const quern_backend backend;
    static quern_cuda_plugin plugin = {
        .version = "0.1.0", .backend = &backend, .check_device = check_device, .device = describe};
    (void)set;
#ifdef QUERN_TEST_CURRENT
    plugin.build_id = build_id();
#else
    plugin.build_id = build_id_add(build_id(), "window", 8, 8);
#endif
    return &plugin;
}
