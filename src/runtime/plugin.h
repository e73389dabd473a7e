/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* plugin.h - finds, loads and checks libquern_cuda. */
#ifndef QUERN_RUNTIME_PLUGIN_H
#define QUERN_RUNTIME_PLUGIN_H

#include "runtime/cuda_plugin.h"

/* The plugin, loaded by the first call, for a `device` that can compute; NULL with the error set where one is
 * missing. */
const quern_cuda_plugin *plugin_for(int32_t device);
/* Whether `p`, not NULL, is memory of the device that its tensor names. Host memory is looked at only once
 * the plugin is loaded. */
quern_status plugin_check_pointer(const void *p, quern_device device, int32_t device_id, const char *name);

#endif
