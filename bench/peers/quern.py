# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Quern's C calls on PyTorch's tensors, through ctypes: the structs of attention.h and nsa.h, field by field."""
import ctypes as c

import torch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3}


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("dtype", c.c_int), ("device", c.c_int), ("device_id", c.c_int32), ("ndim", c.c_int32),
                ("shape", c.c_int64 * 6), ("strides", c.c_int64 * 6)]


class AttentionParams(c.Structure):
    _fields_ = [("size", c.c_size_t), ("causal", c.c_bool), ("window", c.c_int64), ("scale", c.c_float), ("query_offset", c.c_int64)]


class NsaParams(c.Structure):
    _fields_ = ([("size", c.c_size_t)]
                + [(n, c.c_int64) for n in "block_size stride select_block num_selected tile window".split()]
                + [(n, c.c_int) for n in "compress scope metric compressed_visibility".split()]
                + [(n, c.c_int64) for n in "forced_first forced_local max_compressed_groups".split()]
                + [("causal", c.c_bool), ("scale", c.c_float), ("branches", c.c_uint32), ("gate", c.c_int), ("selection", c.c_int),
                   ("groups", c.c_int)])


class Exec(c.Structure):
    _fields_ = [("size", c.c_size_t), ("stream", c.c_void_p), ("status", c.POINTER(Tensor))]


def _tensors(names):
    class Tensors(c.Structure):
        _fields_ = [("size", c.c_size_t)] + [(n, c.POINTER(Tensor)) for n in names.split()]
    return Tensors


ATTENTION = _tensors("q k v cu_seqlens_q cu_seqlens_kv o lse d_o d_q d_k d_v")
NSA = _tensors("q k v k_slc v_slc k_win v_win k_cmp v_cmp cu_seqlens cu_seqlens_cmp w_k w_v pe_k pe_v w_gate gates block_idx "
               "block_count group_idx o o_cmp o_slc o_win lse_cmp lse_slc lse_win d_o d_o_cmp d_o_slc d_o_win d_q d_k d_v d_k_slc "
               "d_v_slc d_k_win d_v_win d_k_cmp d_v_cmp d_w_k d_w_v d_pe_k d_pe_v d_w_gate d_gates")


class Quern:
    def __init__(self, path):
        self.lib = c.CDLL(path)
        self.lib.quern_last_error.restype = c.c_char_p
        self.ctx = c.c_void_p()
        self._check(self.lib.quern_context_create(None, c.byref(self.ctx)))
        self._check(self.lib.quern_cuda_check(0))

    def _check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.quern_last_error(None).decode())

    def nsa_params(self, preset=None, **values):
        p = NsaParams(c.sizeof(NsaParams), 64, 0, 0, 16, 1, 512, 0, 0, 0, 0, 1, 2, 0, True, 0.0, 7, 0, 0, 0)
        if preset is not None:
            self._check(self.lib.quern_nsa_params_preset(c.byref(p), preset.encode()))
        for name, value in values.items():
            setattr(p, name, value)
        return p

    def attention_params(self):
        return AttentionParams(c.sizeof(AttentionParams), True, 0, 0.0, -1)

    def call(self, name, params, **tensors):
        """A function of no arguments that runs quern_<name> on the current stream; the workspace is taken here."""
        kind = ATTENTION if name.startswith("attention") else NSA
        t, keep = kind(c.sizeof(kind)), []
        for key, x in tensors.items():
            view = Tensor(x.data_ptr(), DTYPES[x.dtype], 1, x.device.index or 0, x.dim())
            for i in range(x.dim()):
                view.shape[i], view.strides[i] = x.shape[i], x.stride(i)
            keep.append((view, x))
            setattr(t, key, c.pointer(view))
        function = getattr(self.lib, "quern_" + name)
        size, execution = c.c_size_t(), Exec(c.sizeof(Exec))
        self._check(getattr(self.lib, "quern_" + name + "_workspace")(self.ctx, c.byref(params), c.byref(t), c.byref(size)))
        memory = torch.empty(size.value + 256, dtype=torch.uint8, device="cuda")
        keep.append(memory)
        arguments = [self.ctx, c.byref(execution), c.byref(params), c.byref(t), c.c_void_p(memory.data_ptr()), size]

        def run(_keep=keep):
            execution.stream = torch.cuda.current_stream().cuda_stream
            self._check(function(*arguments))
        return run
