// What a set_*.cpp has of operations on single rows: vectors that the compiler maps to the instructions of its file.
#pragma once

#include <cmath>
#include <cstring>
#include <initializer_list>

#include "kernels.h"

namespace sidecar::smallbatch {
namespace {

struct RowVectors {
    static constexpr size_t lanes = 16;
    typedef float floats __attribute__((vector_size(4 * lanes)));
    typedef int32_t ints __attribute__((vector_size(4 * lanes)));

    // out = f(x, y), 16 values at a time; what is left over at the end is filled up with zeros.
    template <class F>
    static void each(const float * x, const float * y, float * out, size_t n, const F & f) {
        for (size_t i = 0; i < n; i += lanes) {
            const size_t n_bytes = 4 * (n - i < lanes ? n - i : lanes);
            floats a = {}, b = {};
            if (n_bytes == sizeof a) {
                memcpy(&a, x + i, sizeof a);
                memcpy(&b, y + i, sizeof b);
                f(a, b);
                memcpy(out + i, &a, sizeof a);
            } else {
                memcpy(&a, x + i, n_bytes);
                memcpy(&b, y + i, n_bytes);
                f(a, b);
                memcpy(out + i, &a, n_bytes);
            }
        }
    }

    static void add(const float * x, const float * y, float * out, size_t n, float) {
        each(x, y, out, n, [](floats & a, const floats & b) { a += b; });
    }

    static void multiply(const float * x, const float * y, float * out, size_t n, float) {
        each(x, y, out, n, [](floats & a, const floats & b) { a *= b; });
    }

    // x over the root of the mean of its squares and epsilon; the squares are summed up in doubles, in 16 parts.
    static void rms_norm(const float * x, const float *, float * out, size_t n, float epsilon) {
        double parts[lanes] = {};
        for (size_t i = 0; i + lanes <= n; i += lanes) {
            for (size_t j = 0; j < lanes; ++j) parts[j] += double(x[i + j]) * double(x[i + j]);
        }
        for (size_t i = n / lanes * lanes; i < n; ++i) parts[i % lanes] += double(x[i]) * double(x[i]);
        double sum = 0;
        for (size_t j = 0; j < lanes; ++j) sum += parts[j];
        const float scale = 1.0f / std::sqrt(float(sum / double(n)) + epsilon);
        each(x, x, out, n, [scale](floats & a, const floats &) { a *= scale; });
    }

    // silu(x) y = x / (1 + exp(-x)) y. exp(t) is 2^k exp(r) with r = t - k log 2 in the middle half, by its series.
    static void swiglu(const float * x, const float * y, float * out, size_t n, float) {
        each(x, y, out, n, [](floats & a, const floats & b) {
            constexpr float most = 87.0f, per_log2 = 1.44269504f;
            constexpr float log2_high = 0.693359375f, log2_low = -2.12194440e-4f;
            constexpr float to_integer = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer in its low bits
            constexpr int32_t integer_bits = 0x4b400000;
            floats t = -a;
            const ints is_beyond = t > most;
            t = is_beyond ? floats{} + most : t;
            t = t < -most ? floats{} - most : t;
            const floats rounded = t * per_log2 + to_integer;
            const floats k = rounded - to_integer;
            const floats r = t - k * log2_high - k * log2_low;
            floats series = floats{} + 1.0f / 5040;
            for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) series = series * r + c;
            ints power;
            memcpy(&power, &rounded, sizeof power);
            power = (power - integer_bits + 127) << 23;
            floats scale;
            memcpy(&scale, &power, sizeof scale);
            const floats divisor = is_beyond ? floats{} + INFINITY : 1.0f + series * scale;
            a = a / divisor * b;
        });
    }

    static constexpr RowOp all[n_row_ops] = {&add, &multiply, &rms_norm, &swiglu};
};

}  // namespace
}  // namespace sidecar::smallbatch
