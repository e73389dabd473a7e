/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * quern.hpp - the C API for C++17: owners of its handles, errors as exceptions, views of vectors. Header only; the
 * calls themselves are those of C.
 *
 *     quern::context ctx;
 *     quern_tensor q = quern::view(values, {1, n, heads, 128});   // std::vector<float> values
 *     quern::check(quern_attention_forward(ctx, nullptr, &params, &t, workspace.data(), workspace.size()));
 */
#ifndef QUERN_QUERN_HPP
#define QUERN_QUERN_HPP

#include <quern/checkpoint.h>
#include <quern/plan.h>
#include <quern/quern.h>
#include <quern/safetensors.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace quern
{

/* A call that failed: what() is the library's sentence. */
class error : public std::runtime_error
{
  public:
    error(quern_status status, const char *sentence) : std::runtime_error(sentence), status_(status) {}
    quern_status status() const noexcept { return status_; }

  private:
    quern_status status_;
};

inline void check(quern_status status)
{
    if (status != QUERN_OK) throw error(status, quern_last_error(nullptr));
}

/* Owns a handle of the C API and converts to it. It moves and does not copy. */
template <typename Handle, void (*destroy)(Handle *)> class owner
{
  public:
    explicit owner(Handle *handle) noexcept : handle_(handle) {}
    operator Handle *() const noexcept { return handle_.get(); }

  private:
    struct deleter {
        void operator()(Handle *handle) const noexcept { destroy(handle); }
    };
    std::unique_ptr<Handle, deleter> handle_;
};

namespace detail
{
template <typename Handle, typename... Parameters, typename... Arguments>
Handle *made(quern_status (*create)(Parameters...), Arguments... arguments)
{
    Handle *handle = nullptr;
    check(create(arguments..., &handle));
    return handle;
}
} /* namespace detail */

struct context : owner<quern_context, quern_context_destroy> {
    explicit context(const quern_context_params *params = nullptr)
        : owner(detail::made<quern_context>(quern_context_create, params))
    {
    }
};

/* `params` and `tensors` are the operation's own structs, as for quern_plan_create(). The context outlives the plan. */
struct plan : owner<quern_plan, quern_plan_destroy> {
    plan(const context &ctx, quern_operation operation, const void *params, const void *tensors)
        : owner(detail::made<quern_plan>(quern_plan_create, static_cast<quern_context *>(ctx), operation,
                                         params, tensors))
    {
    }
};

struct safetensors : owner<quern_safetensors, quern_safetensors_close> {
    explicit safetensors(const std::string &path)
        : owner(detail::made<quern_safetensors>(quern_safetensors_open, path.c_str()))
    {
    }
};

struct checkpoint : owner<quern_checkpoint, quern_checkpoint_close> {
    explicit checkpoint(const std::string &path)
        : owner(detail::made<quern_checkpoint>(quern_checkpoint_open, path.c_str()))
    {
    }
};

/* The dtype of a C++ type that has one of its own. Bytes are QUERN_U8; 16-bit floats have no type in C++17. */
template <typename T> constexpr quern_dtype dtype_of()
{
    using plain = std::remove_cv_t<T>;
    if constexpr (std::is_same_v<plain, float>) return QUERN_F32;
    else if constexpr (std::is_same_v<plain, double>) return QUERN_F64;
    else if constexpr (std::is_same_v<plain, int32_t>) return QUERN_I32;
    else if constexpr (std::is_same_v<plain, int64_t>) return QUERN_I64;
    else {
        static_assert(std::is_same_v<plain, uint8_t>,
                      "float, double, int32_t, int64_t and uint8_t have a dtype");
        return QUERN_U8;
    }
}

/* A contiguous CPU view of memory that the caller owns. */
inline quern_tensor view(void *data, quern_dtype dtype, std::initializer_list<int64_t> shape)
{
    if (shape.size() > QUERN_MAX_DIMS)
        throw std::invalid_argument("quern::view: " + std::to_string(shape.size()) + " dimensions: at most " +
                                    std::to_string(int(QUERN_MAX_DIMS)) + " are accepted");
    int64_t extents[QUERN_MAX_DIMS] = {};
    std::copy(shape.begin(), shape.end(), extents);
    return quern_tensor_contiguous(data, dtype, static_cast<int32_t>(shape.size()), extents);
}

/* The same of a vector, which has as many elements as the shape. */
template <typename T> quern_tensor view(std::vector<T> &values, std::initializer_list<int64_t> shape)
{
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    if (count < 0 || static_cast<uint64_t>(count) != values.size())
        throw std::invalid_argument("quern::view: the vector has " + std::to_string(values.size()) +
                                    " elements, the shape " + std::to_string(count));
    return view(values.data(), dtype_of<T>(), shape);
}

} /* namespace quern */

#endif
