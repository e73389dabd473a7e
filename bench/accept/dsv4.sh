#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# What DeepSeek-V4's attention must reach on the CPU. usage: dsv4.sh [BUILD_DIRECTORY]
"${1:-build/release}/quern" accept dsv4
