# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Sourced by the checks of the GPU's kernels.

# kernel_names: lines that begin with a kernel's mangled name, with the last component of its name instead, without
# parameters and blanks, and dtypes as the code calls them; numbers may follow.
kernel_names() {
    c++filt | sed -E 's/^void //; s/\(anonymous namespace\):://g; s/\([^()]*\)(( [0-9]+)+)$/\1/; s/^([a-z_0-9]+::)+//
                      s/__nv_bfloat16/bf16/g; s/__half/f16/g; s/, /,/g'
}
