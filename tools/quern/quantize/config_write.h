/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* config_write.h - what tells a loader how the model is quantised. */
#ifndef QUERN_QUANTIZE_CONFIG_WRITE_H
#define QUERN_QUANTIZE_CONFIG_WRITE_H

#include "quantize/outputs.h"

/* Writes config.json and hf_quant_config.json of the format into the folder. Returns an exit code. */
int configs_write(const conversion *c, const char *folder);
/* Writes the index of the output files under its source's name, where there is one. */
int index_write(const conversion *c, const output_file *files, const char *folder);

#endif
