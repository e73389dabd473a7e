# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Quern's C calls on PyTorch's tensors, through ctypes: over the structs that quern/op.h describes."""

import ctypes as c

import torch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3, torch.uint8: 4}


class Tensor(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("dtype", c.c_int),
        ("device", c.c_int),
        ("device_id", c.c_int32),
        ("ndim", c.c_int32),
        ("shape", c.c_int64 * 6),
        ("strides", c.c_int64 * 6),
    ]


class Exec(c.Structure):
    _fields_ = [("size", c.c_size_t), ("stream", c.c_void_p), ("status", c.POINTER(Tensor))]


class OpInfo(c.Structure):
    _fields_ = (
        [(n, c.c_char_p) for n in "name help group".split()]
        + [("forward", c.c_int), ("backward", c.c_int)]
        + [(n, c.c_int32) for n in "tensor_count param_count varlen_by".split()]
        + [
            ("tensors_size", c.c_size_t),
            ("params_size", c.c_size_t),
            ("aside", c.c_char_p),
            ("aside_valued", c.c_bool),
            ("asked", c.c_char_p * 4),
        ]
    )


class OpTensor(c.Structure):
    _fields_ = (
        [(n, c.c_char_p) for n in "name field other_name dtype".split()]
        + [("gradient_of", c.c_int32)]
        + [(n, c.c_bool) for n in "needed input trigger".split()]
        + [("result", c.c_bool * 2), ("aside", c.c_bool)]
        + [("fixed", c.c_char * 64), ("varlen", c.c_char * 64)]
    )


class OpParam(c.Structure):
    _fields_ = [
        ("name", c.c_char * 32),
        ("field", c.c_char_p),
        ("help", c.c_char_p),
        ("value", c.c_char * 64),
        ("initial", c.c_char * 64),
        ("option", c.c_bool),
    ]


class Op:
    """An operation as quern/op.h lists it: its fields, its parameters and the words of these."""

    def __init__(self, quern, name):
        self.lib, self.check = quern.lib, quern._check
        self.op = self.lib.quern_op_named(name.encode())
        if not self.op:
            raise RuntimeError(f"there is no operation {name}")
        info = OpInfo()
        self.check(self.lib.quern_op_get(self.op, c.byref(info)))
        tensors, params = (OpTensor * info.tensor_count)(), (OpParam * info.param_count)()
        self.check(self.lib.quern_op_get_tensors(self.op, tensors))
        self.check(self.lib.quern_op_get_params(self.op, params))
        self.tensors = type(
            "Tensors",
            (c.Structure,),
            {"_fields_": [("size", c.c_size_t)] + [(t.field.decode(), c.POINTER(Tensor)) for t in tensors]},
        )
        self.params = {p.field.decode(): (i, p.value.decode()) for i, p in enumerate(params)}


class Params:
    """A params struct whose fields are read and set as numbers, as in C."""

    def __init__(self, op, preset=None, **values):
        self.__dict__.update(op=op, memory=(c.c_int64 * 64)())
        op.check(op.lib.quern_op_defaults(op.op, self.memory))
        if preset is not None:
            op.check(op.lib.quern_op_preset(op.op, self.memory, preset.encode()))
        for name, value in values.items():
            setattr(self, name, value)

    def _words(self, name):
        takes = self.op.params[name][1]
        bits = takes.startswith("all|")
        return (takes[4:].split(",") if bits else takes.split("|") if "|" in takes else None), bits

    def __setattr__(self, name, value):
        words, bits = self._words(name)
        if bits and isinstance(value, int):
            value = ",".join(w for i, w in enumerate(words) if value >> i & 1)
        elif words == ["true", "false"]:
            value = "true" if value else "false"
        elif words and isinstance(value, int):
            value = words[value]
        self.op.check(self.op.lib.quern_op_set(self.op.op, self.memory, name.encode(), str(value).encode()))

    def __getattr__(self, name):
        text = c.create_string_buffer(64)
        self.op.check(
            self.op.lib.quern_op_text(self.op.op, self.memory, self.op.params[name][0], text, len(text))
        )
        text, (words, bits) = text.value.decode(), self._words(name)
        if bits:
            return sum(1 << i for i, w in enumerate(words) if text == "all" or w in text.split(","))
        if words == ["true", "false"]:
            return text == "true"
        return words.index(text) if words else float(text) if "." in text or "e" in text else int(text)


class Quern:
    def __init__(self, path):
        self.lib = c.CDLL(path)
        self.lib.quern_last_error.restype = c.c_char_p
        self.lib.quern_op_named.restype = c.c_void_p
        for name in "get get_tensors get_params defaults preset set text".split():
            getattr(self.lib, "quern_op_" + name).argtypes = [c.c_void_p] + {
                "preset": [c.c_void_p, c.c_char_p],
                "set": [c.c_void_p, c.c_char_p, c.c_char_p],
                "text": [c.c_void_p, c.c_int32, c.c_char_p, c.c_size_t],
            }.get(name, [c.c_void_p])
        self.ops = {}
        self.contexts = [self._context(), self._context()]
        self.ctx = self.contexts[0]
        self._check(self.lib.quern_cuda_check(0))

    def _context(self):
        made = c.c_void_p()
        self._check(self.lib.quern_context_create(None, c.byref(made)))
        return made

    def _check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.quern_last_error(None).decode())

    def op(self, name):
        if name not in self.ops:
            self.ops[name] = Op(self, name)
        return self.ops[name]

    def params(self, name, **values):
        return Params(self.op(name), **values)

    def nsa_params(self, preset=None, **values):
        return Params(self.op("nsa"), preset, **values)

    def attention_params(self):
        return Params(self.op("attention"))

    def repacked_bytes(self, n, k):
        """Of a weight [k, n] in NVFP4 as the GPU repacks it."""
        size = c.c_int64()
        shape = c.c_int64(n), c.c_int64(k)
        self._check(self.lib.quern_nvfp4_repacked_bytes(self.ctx, 1, 0, *shape, c.byref(size)))
        return size.value

    def call(self, name, params, **tensors):
        """A function of no arguments that runs quern_<name> on the current stream; the workspace is taken
        here. Calls of one context that a graph records run beside each other where they need not wait; here
        they take two contexts in turn, so that a graph's time over its calls is that of one call."""
        kind = params.op.tensors
        t, keep = kind(c.sizeof(kind)), []
        for key, x in tensors.items():
            view = Tensor(x.data_ptr(), DTYPES[x.dtype], 1, x.device.index or 0, x.dim())
            for i in range(x.dim()):
                view.shape[i], view.strides[i] = x.shape[i], x.stride(i)
            keep.append((view, x))
            setattr(t, key, c.pointer(view))
        function = getattr(self.lib, "quern_" + name)
        size, execution = c.c_size_t(), Exec(c.sizeof(Exec))
        self._check(
            getattr(self.lib, "quern_" + name + "_workspace")(
                self.ctx, params.memory, c.byref(t), c.byref(size)
            )
        )
        memory = torch.empty(size.value + 256, dtype=torch.uint8, device="cuda")
        keep.append(memory)
        arguments = [
            c.byref(execution),
            params.memory,
            c.byref(t),
            c.c_void_p(memory.data_ptr()),
            size,
        ]

        def run(_keep=keep):
            execution.stream = torch.cuda.current_stream().cuda_stream
            if torch.cuda.is_current_stream_capturing():
                self.contexts.reverse()
            self._check(function(self.contexts[0], *arguments))

        return run
