// The products, written once for every instruction set. Included by one set_*.cpp per set, each compiled with its own
// flags, so everything here is local to the file that includes it, and nothing of the standard library is instantiated:
// the linker must never pick a copy made with wider instructions for code that runs everywhere.
//
// An instruction set `I` is a struct of vector operations (set_portable.cpp is the plainest). Its vectors hold I::lanes
// 32-bit lanes. Quantised weights are taken in *groups* of I::group = lanes / 4 blocks of 32 values: vector `a` holds
// the first 16 values of each block, vector `b` the other 16, so that each block has the same four lanes in both. The two
// dot products are then summed as integers, and a group costs one conversion and one multiply-add:
//
//     lane:      0 .. 3       4 .. 7       8 .. 11      12 .. 15
//     a          block 0      block 1      block 2      block 3        values 0 .. 15 of each
//     b          block 0      block 1      block 2      block 3        values 16 .. 31 of each
//     scale      d0 d0 d0 d0  d1 d1 d1 d1  ...
//
// The rows of x are laid out in the same way when they are prepared: one signed byte a value, a scale per 32 values.
// Instruction sets whose dot product wants unsigned bytes (x86) get x + 128, and take 128 * sum(weights) off again, which
// is computed once for all rows.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "sets.h"

#define SMALLBATCH_INLINE inline __attribute__((always_inline))

namespace sidecar::smallbatch {
namespace {

constexpr size_t k_block = 32;        // values under one scale of a prepared row
constexpr size_t k_super_block = 256;  // values in a block of the K types

constexpr size_t ceil_div(size_t n, size_t divisor) { return (n + divisor - 1) / divisor; }
constexpr size_t round_up(size_t n, size_t multiple) { return ceil_div(n, multiple) * multiple; }

// ---------------------------------------------------------------------------------------------------------------------
// Prepared rows

// A prepared row of bytes: groups of {a, b, scale of each lane}, then the sums of 8 blocks per super-block.
template <class I>
struct Quantised {
    static constexpr size_t vector_bytes = 4 * I::lanes;
    static constexpr size_t group_bytes = 3 * vector_bytes;

    static size_t n_groups(size_t n_in) { return ceil_div(n_in / k_block, I::group); }
    static size_t sums_offset(size_t n_in) { return n_groups(n_in) * group_bytes; }
    static size_t n_bytes(size_t n_in) {
        return round_up(sums_offset(n_in) + 4 * round_up(n_in / k_block, 8), 64);
    }

    // Each block of 32 values becomes bytes -127 .. 127 and an F32 scale. Values that are not finite stay visible: they
    // make the block's scale NaN or infinite.
    static void prepare(const float * x, size_t n_in, uint8_t * prepared) {
        const size_t n_blocks = n_in / k_block;
        memset(prepared, 0, n_bytes(n_in));
        float * sums = reinterpret_cast<float *>(prepared + sums_offset(n_in));
        for (size_t i = 0; i < n_blocks; ++i) {
            uint8_t * group = prepared + i / I::group * group_bytes;
            const size_t lane = i % I::group * 4;
            int8_t q[k_block];
            int32_t sum;
            const float scale = quantise(x + i * k_block, q, sum);
            for (size_t j = 0; j < 16; ++j) {
                group[4 * lane + j] = uint8_t(q[j]) ^ I::x_offset;
                group[vector_bytes + 4 * lane + j] = uint8_t(q[16 + j]) ^ I::x_offset;
            }
            float * scales = reinterpret_cast<float *>(group + 2 * vector_bytes) + lane;
            for (size_t j = 0; j < 4; ++j) scales[j] = scale;
            sums[i] = scale * float(sum);
        }
    }

    static float quantise(const float * x, int8_t * q, int32_t & sum) {
        uint32_t bits[k_block];
        memcpy(bits, x, sizeof bits);
        uint32_t largest_bits = 0;  // magnitudes order as integers, NaN above all
        for (uint32_t b : bits) {
            const uint32_t magnitude = b & 0x7fffffff;
            largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
        }
        float largest;
        memcpy(&largest, &largest_bits, sizeof largest);
        const float inverse = largest < 1e-36f ? 0.0f : 127.0f / largest;  // below it 127 / largest would overflow
        sum = 0;
        for (size_t j = 0; j < k_block; ++j) {
            const float rounded = x[j] * inverse + 12582912.0f;  // 1.5 * 2^23: the integer ends up in the low bits
            int32_t integer;
            memcpy(&integer, &rounded, sizeof integer);
            q[j] = int8_t(integer);
            sum += q[j];
        }
        return inverse == 0.0f ? largest * 0.0f : largest / 127.0f;
    }
};

// A prepared row of floats, with zeros up to a whole step of the dense products.
template <class I>
struct Floats {
    static constexpr size_t step = 2 * I::lanes;
    static size_t n_bytes(size_t n_in) { return round_up(4 * round_up(n_in, step), 64); }
    static void prepare(const float * x, size_t n_in, uint8_t * prepared) {
        memcpy(prepared, x, 4 * n_in);
        memset(prepared + 4 * n_in, 0, n_bytes(n_in) - 4 * n_in);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Weight types. A type's Unit reads I::group blocks of 32 values, or one super-block, and hands out groups. Pointers and
// shifts are given per block of the group, so that each instruction set gathers in its own way.

template <class I>
struct Group {
    typename I::bytes a, b;
    typename I::floats scale_a, scale_b;  // scale_b only where the two halves of a block have scales of their own
};

template <class I>
SMALLBATCH_INLINE Group<I> one_scale(typename I::bytes a, typename I::bytes b, typename I::floats scale) {
    return {a, b, scale, scale};
}

inline uint32_t load32(const uint8_t * p) {
    uint32_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

// The signed values of the 4-bit codes of IQ4_NL and IQ4_XS (facts: ggml-common.h).
alignas(16) constexpr int8_t nonlinear_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                     1,    13,   25,  38,  53,  69,  89,  113};

struct Q8_0 {
    static constexpr Type type = Type::q8_0;
    static constexpr bool has_minima = false, two_scales = false;
    template <class I>
    struct Unit {
        static constexpr int n_blocks = I::group, n_groups = 1;
        const uint8_t * w;
        SMALLBATCH_INLINE Group<I> group(int) const {
            const uint8_t * p = w;
            return one_scale<I>(I::gather([p](int b) { return p + 34 * b + 2; }), I::gather([p](int b) { return p + 34 * b + 18; }),
                    I::halves([p](int b) { return p + 34 * b; }));
        }
    };
};

// 4-bit codes of 32 values: the low nibbles are the first 16, the high ones the other 16.
struct Q4_0 {
    static constexpr Type type = Type::q4_0;
    static constexpr bool has_minima = false, two_scales = false;
    template <class I>
    struct Unit {
        static constexpr int n_blocks = I::group, n_groups = 1;
        const uint8_t * w;
        SMALLBATCH_INLINE Group<I> group(int) const {
            const uint8_t * p = w;
            const auto codes = I::gather([p](int b) { return p + 18 * b + 2; });
            return one_scale<I>(I::subtract(I::low_nibbles(codes), 8), I::subtract(I::high_nibbles(codes), 8),
                    I::halves([p](int b) { return p + 18 * b; }));
        }
    };
};

struct IQ4_NL {
    static constexpr Type type = Type::iq4_nl;
    static constexpr bool has_minima = false, two_scales = false;
    template <class I>
    struct Unit {
        static constexpr int n_blocks = I::group, n_groups = 1;
        const uint8_t * w;
        SMALLBATCH_INLINE Group<I> group(int) const {
            const uint8_t * p = w;
            const auto codes = I::gather([p](int b) { return p + 18 * b + 2; });
            return one_scale<I>(I::look_up(nonlinear_values, I::low_nibbles(codes)),
                    I::look_up(nonlinear_values, I::high_nibbles(codes)),
                    I::halves([p](int b) { return p + 18 * b; }));
        }
    };
};

// {d, scales_h (2 bits x 8), scales_l (4 bits x 8), 128 bytes of codes, 16 a block}
struct IQ4_XS {
    static constexpr Type type = Type::iq4_xs;
    static constexpr bool has_minima = false, two_scales = false;
    template <class I>
    struct Unit {
        static constexpr int n_blocks = 1, n_groups = 8 / I::group;
        const uint8_t * w;
        float scale[8];
        SMALLBATCH_INLINE explicit Unit(const uint8_t * block) : w(block) {
            const float d = I::half(w);
            const uint32_t high = load32(w) >> 16, low = load32(w + 4);
            for (int j = 0; j < 8; ++j) {
                scale[j] = d * float(int(((low >> (4 * j)) & 15) | (((high >> (2 * j)) & 3) << 4)) - 32);
            }
        }
        SMALLBATCH_INLINE Group<I> group(int g) const {
            const uint8_t * p = w + 8 + 16 * I::group * g;
            const auto codes = I::gather([p](int b) { return p + 16 * b; });
            return one_scale<I>(I::look_up(nonlinear_values, I::low_nibbles(codes)),
                    I::look_up(nonlinear_values, I::high_nibbles(codes)), I::spread(scale + I::group * g));
        }
    };
};

// Eight 6-bit scales and eight 6-bit minima in 12 bytes, as Q4_K and Q5_K pack them.
template <class I>
struct ScalesAndMinima {
    float scale[8], minimum[8];
    SMALLBATCH_INLINE explicit ScalesAndMinima(const uint8_t * block) {
        const uint32_t p = load32(block + 4), q = load32(block + 8), r = load32(block + 12);
        const uint32_t scales[2] = {p & 0x3f3f3f3f, (r & 0x0f0f0f0f) | ((p >> 2) & 0x30303030)};
        const uint32_t minima[2] = {q & 0x3f3f3f3f, ((r >> 4) & 0x0f0f0f0f) | ((q >> 2) & 0x30303030)};
        I::scale_bytes(scales, I::half(block), scale);
        I::scale_bytes(minima, I::half(block + 2), minimum);
    }
};

// Blocks 2j and 2j+1 are the low and the high nibbles of bytes 32j .. 32j+31.
struct Q4_K {
    static constexpr Type type = Type::q4_k;
    static constexpr bool has_minima = true, two_scales = false;
    template <class I>
    struct Unit : ScalesAndMinima<I> {
        static constexpr int n_blocks = 1, n_groups = 8 / I::group;
        const uint8_t * w;
        SMALLBATCH_INLINE explicit Unit(const uint8_t * block) : ScalesAndMinima<I>(block), w(block) {}
        SMALLBATCH_INLINE typename I::bytes codes(int g, int half) const {
            const uint8_t * p = w + 16 + 16 * half;
            const int first = I::group * g;
            const auto bytes = I::gather([=](int b) { return p + (first + b) / 2 * 32; });
            return I::low_nibbles(I::shift_right(bytes, [=](int b) { return (first + b) % 2 * 4; }));
        }
        SMALLBATCH_INLINE Group<I> group(int g) const {
            return one_scale<I>(codes(g, 0), codes(g, 1), I::spread(this->scale + I::group * g));
        }
    };
};

// Q4_K with a fifth bit: bit j of byte l belongs to value l of block j.
struct Q5_K {
    static constexpr Type type = Type::q5_k;
    static constexpr bool has_minima = true, two_scales = false;
    template <class I>
    struct Unit : ScalesAndMinima<I> {
        static constexpr int n_blocks = 1, n_groups = 8 / I::group;
        const uint8_t * w;
        SMALLBATCH_INLINE explicit Unit(const uint8_t * block) : ScalesAndMinima<I>(block), w(block) {}
        SMALLBATCH_INLINE typename I::bytes codes(int g, int half) const {
            const uint8_t * low = w + 48 + 16 * half;
            const uint8_t * high = w + 16 + 16 * half;
            const int first = I::group * g;
            const auto nibbles = I::gather([=](int b) { return low + (first + b) / 2 * 32; });
            const auto fifth = I::shift_right(I::gather([=](int) { return high; }), [=](int b) { return first + b; });
            return I::join(I::low_nibbles(I::shift_right(nibbles, [=](int b) { return (first + b) % 2 * 4; })),
                           I::bits_above_nibble(fifth, 1));
        }
        SMALLBATCH_INLINE Group<I> group(int g) const {
            return one_scale<I>(codes(g, 0), codes(g, 1), I::spread(this->scale + I::group * g));
        }
    };
};

// {128 bytes of low nibbles, 64 bytes of two high bits, 16 signed scales (of 16 values each), d}. In each half of 128
// values, blocks 0 .. 3 are: low nibbles of bytes 0 .. 31, of 32 .. 63, high nibbles of the same; high bits 2b, 2b+1.
struct Q6_K {
    static constexpr Type type = Type::q6_k;
    static constexpr bool has_minima = false, two_scales = true;
    template <class I>
    struct Unit {
        static constexpr int n_blocks = 1, n_groups = 8 / I::group;
        const uint8_t * w;
        float scale[2][8];  // of the first and of the other 16 values of each block
        SMALLBATCH_INLINE explicit Unit(const uint8_t * block) : w(block) {
            const float d = I::half(w + 208);
            const int8_t * scales = reinterpret_cast<const int8_t *>(w + 192);
            for (int j = 0; j < 8; ++j) {
                scale[0][j] = d * float(scales[2 * j]);
                scale[1][j] = d * float(scales[2 * j + 1]);
            }
        }
        SMALLBATCH_INLINE typename I::bytes codes(int g, int half) const {
            const int first = I::group * g;
            const uint8_t * low = w + first / 4 * 64 + 16 * half;
            const uint8_t * high = w + 128 + first / 4 * 32 + 16 * half;
            const auto nibbles = I::gather([=](int b) { return low + (first + b) % 2 * 32; });
            const auto above = I::shift_right(I::gather([=](int) { return high; }), [=](int b) { return (first + b) % 4 * 2; });
            return I::subtract(
                I::join(I::low_nibbles(I::shift_right(nibbles, [=](int b) { return (first + b) % 4 / 2 * 4; })),
                        I::bits_above_nibble(above, 3)),
                32);
        }
        SMALLBATCH_INLINE Group<I> group(int g) const {
            return {codes(g, 0), codes(g, 1), I::spread(scale[0] + I::group * g), I::spread(scale[1] + I::group * g)};
        }
    };
};

// ---------------------------------------------------------------------------------------------------------------------
// The product with quantised weights

template <class I, class W, int R>
struct QuantisedProduct {
    using Unit = typename W::template Unit<I>;
    static constexpr size_t block_bytes = block_of(W::type).n_bytes, block_values = block_of(W::type).n_values;
    static constexpr size_t unit_bytes = block_bytes * Unit::n_blocks;

    struct Sums {
        typename I::floats products[R];
        typename I::floats8 minima[W::has_minima ? R : 1];
    };

    // Adds one unit of weights to every row's sums; `x` and `x_sums` are where the first row's values for it begin.
    static SMALLBATCH_INLINE void add(const uint8_t * w, const uint8_t * x, const float * x_sums, size_t x_bytes, Sums & sums) {
        const Unit unit{w};
        if constexpr (W::has_minima) {
            const auto minima = I::load8(unit.minimum);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const auto row = reinterpret_cast<const float *>(reinterpret_cast<const uint8_t *>(x_sums) + r * x_bytes);
                sums.minima[r] = I::multiply_add8(minima, I::load8(row), sums.minima[r]);
            }
        }
#pragma GCC unroll 8
        for (int g = 0; g < Unit::n_groups; ++g) {
            const Group<I> group = unit.group(g);
            const uint8_t * x_group = x + g * Quantised<I>::group_bytes;
            if constexpr (W::two_scales) {
                const auto start_a = I::start(group.a), start_b = I::start(group.b);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const uint8_t * row = x_group + r * x_bytes;
                    const auto dot_a = I::dot(start_a, row, group.a);
                    const auto dot_b = I::dot(start_b, row + Quantised<I>::vector_bytes, group.b);
                    const auto scaled = I::multiply_add(I::to_floats(dot_b), group.scale_b,
                                                        I::multiply(I::to_floats(dot_a), group.scale_a));
                    sums.products[r] = I::multiply_add(scaled, scales_of(row), sums.products[r]);
                }
            } else {
                const auto start = I::start(group.a, group.b);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const uint8_t * row = x_group + r * x_bytes;
                    const auto dot = I::dot(I::dot(start, row, group.a), row + Quantised<I>::vector_bytes, group.b);
                    sums.products[r] =
                        I::multiply_add(I::to_floats(dot), I::multiply(group.scale_a, scales_of(row)), sums.products[r]);
                }
            }
        }
    }

    static SMALLBATCH_INLINE typename I::floats scales_of(const uint8_t * row) {
        return I::load(reinterpret_cast<const float *>(row + 2 * Quantised<I>::vector_bytes));
    }

    static void multiply(const Product & p) {
        const size_t n_blocks = p.n_in / block_values;
        const size_t n_units = n_blocks / Unit::n_blocks, n_rest = n_blocks % Unit::n_blocks;
        const size_t sums_offset = Quantised<I>::sums_offset(p.n_in);
        for (size_t o = p.begin; o < p.end; ++o) {
            const uint8_t * w = p.weights + o * p.row_bytes;
            const uint8_t * x = p.x;
            const float * x_sums = reinterpret_cast<const float *>(p.x + sums_offset);
            Sums sums = {};
            for (size_t u = 0; u < n_units; ++u) {
                I::template prefetch<unit_bytes>(w);
                add(w, x, x_sums, p.x_bytes, sums);
                w += unit_bytes;
                x += Unit::n_groups * Quantised<I>::group_bytes;
                x_sums += 8;  // only read for types whose unit is a super-block
            }
            if (n_rest != 0) {  // zeros stand for the blocks that are not there: the row's scales are 0 there
                uint8_t rest[unit_bytes] = {};
                memcpy(rest, w, n_rest * block_bytes);
                add(rest, x, x_sums, p.x_bytes, sums);
            }
            for (int r = 0; r < R; ++r) {
                float value = I::sum(sums.products[r]);
                if constexpr (W::has_minima) value -= I::sum8(sums.minima[r]);
                p.out[r * p.out_stride + o] = value;
            }
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The product with weights that are numbers themselves

struct F32 {
    static constexpr Type type = Type::f32;
    template <class I>
    static SMALLBATCH_INLINE typename I::floats load(const uint8_t * w) { return I::load_f32(w); }
};
struct F16 {
    static constexpr Type type = Type::f16;
    template <class I>
    static SMALLBATCH_INLINE typename I::floats load(const uint8_t * w) { return I::load_f16(w); }
};
struct BF16 {
    static constexpr Type type = Type::bf16;
    template <class I>
    static SMALLBATCH_INLINE typename I::floats load(const uint8_t * w) { return I::load_bf16(w); }
};

// Two sums per row, so that a row of weights already in the cache does not wait for the adder.
template <class I, class W, int R>
struct DenseProduct {
    static constexpr size_t value_bytes = block_of(W::type).n_bytes;
    static constexpr size_t step = Floats<I>::step;

    struct Sums {
        typename I::floats even[R], odd[R];
    };

    static SMALLBATCH_INLINE void add(const uint8_t * w, const float * x, size_t x_bytes, Sums & sums) {
        const auto even = W::template load<I>(w), odd = W::template load<I>(w + I::lanes * value_bytes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const auto row = reinterpret_cast<const float *>(reinterpret_cast<const uint8_t *>(x) + r * x_bytes);
            sums.even[r] = I::multiply_add(even, I::load(row), sums.even[r]);
            sums.odd[r] = I::multiply_add(odd, I::load(row + I::lanes), sums.odd[r]);
        }
    }

    static void multiply(const Product & p) {
        const size_t n_steps = p.n_in / step, n_rest = p.n_in % step;
        for (size_t o = p.begin; o < p.end; ++o) {
            const uint8_t * w = p.weights + o * p.row_bytes;
            const float * x = reinterpret_cast<const float *>(p.x);
            Sums sums = {};
            for (size_t i = 0; i < n_steps; ++i) {
                I::template prefetch<step * value_bytes>(w);
                add(w, x, p.x_bytes, sums);
                w += step * value_bytes;
                x += step;
            }
            if (n_rest != 0) {
                uint8_t rest[step * value_bytes] = {};
                memcpy(rest, w, n_rest * value_bytes);
                add(rest, x, p.x_bytes, sums);
            }
            for (int r = 0; r < R; ++r) p.out[r * p.out_stride + o] = I::sum(I::add(sums.even[r], sums.odd[r]));
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------

// A product of R rows as one kernel or, where compact code matters more than speed, as R kernels of one row.
template <template <class, class, int> class P, class I, class W, int R>
void multiply_rows(const Product & p) {
    if constexpr (I::one_pass) {
        P<I, W, R>::multiply(p);
    } else {
        for (int r = 0; r < R; ++r) {
            Product row = p;
            row.x += r * p.x_bytes;
            row.out += r * p.out_stride;
            P<I, W, 1>::multiply(row);
        }
    }
}

template <template <class, class, int> class P, template <class> class X, class I, class W>
constexpr Kernel kernel_for() {
    return {W::type,
            {&X<I>::n_bytes, &X<I>::prepare},
            {&multiply_rows<P, I, W, 1>, &multiply_rows<P, I, W, 2>, &multiply_rows<P, I, W, 3>, &multiply_rows<P, I, W, 4>,
             &multiply_rows<P, I, W, 5>, &multiply_rows<P, I, W, 6>, &multiply_rows<P, I, W, 7>, &multiply_rows<P, I, W, 8>}};
}

// Every type, for one instruction set.
template <class I>
struct All {
    template <class W>
    static constexpr Kernel quantised() { return kernel_for<QuantisedProduct, Quantised, I, W>(); }
    template <class W>
    static constexpr Kernel dense() { return kernel_for<DenseProduct, Floats, I, W>(); }

    static constexpr Kernel kernels[] = {
        quantised<Q8_0>(),   quantised<Q4_0>(),   quantised<Q4_K>(), quantised<Q5_K>(), quantised<Q6_K>(),
        quantised<IQ4_NL>(), quantised<IQ4_XS>(), dense<BF16>(),     dense<F16>(),      dense<F32>(),
    };
    static constexpr size_t n_kernels = sizeof kernels / sizeof kernels[0];
};

}  // namespace
}  // namespace sidecar::smallbatch
