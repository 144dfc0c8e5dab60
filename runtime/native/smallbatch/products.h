// The products, written once for every instruction set. Included by one set_*.cpp per set, each compiled with its own
// flags, so everything here is local to the file that includes it, and nothing of the standard library is instantiated:
// the linker must never pick a copy made with wider instructions for code that runs everywhere.
//
// An instruction set `I` is a struct of vector operations (set_portable.cpp is the plainest). Its vectors hold I::lanes
// 32-bit lanes. Quantised weights are taken in *packs* of I::lanes / 2 blocks of 32 values. A pack is four vectors: vector
// v holds values 8v .. 8v+7 of each block, so that a block has the same two lanes in all four. The four dot products are
// summed as integers before anything is converted or scaled:
//
//     lanes:    0 1   2 3       4 5   6 7       8 9   10 11     12 13   14 15
//     block:     0     G         1    G+1        2    G+2         3      G+3        with G = I::group = I::lanes / 4
//
// The order comes from how packs are made: 16 bytes of each of G blocks are gathered into a vector, those of the next
// G blocks into another, and the two are interleaved by 8 bytes.
//
// The rows of x are laid out in the same way when they are prepared: one signed byte a value, a scale per 32 values.
// Weights meet them as unsigned codes (which is what x86 multiplies with signed bytes, and a bit less work than signed
// weights elsewhere): a code is the weight plus an offset, and every sum begins with -offset * sum(x), kept in the row.
// Types whose weights are signed bytes go through I::from_signed, which makes codes of them where codes are needed.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "sets.h"

#define SMALLBATCH_INLINE inline __attribute__((always_inline))
#define SMALLBATCH_LAMBDA __attribute__((always_inline))

namespace sidecar::smallbatch {
namespace {

constexpr size_t k_block = 32;  // values under one scale of a prepared row
constexpr size_t k_super_block = 256;  // values in a block of the K types

constexpr size_t ceil_div(size_t n, size_t divisor) { return (n + divisor - 1) / divisor; }
constexpr size_t round_up(size_t n, size_t multiple) { return ceil_div(n, multiple) * multiple; }

// ---------------------------------------------------------------------------------------------------------------------
// Prepared rows

// What sums of products with a type's codes begin with: -offset times the sum of x, over a lane's values in all four vectors
// of a pack, or (`halves`) in the first two and in the last two.
struct Starts {
    int offset;
    bool halves;
};

// A prepared row of bytes: packs of {four vectors, scale of each lane, starts}, then (with `halves`, which the types with
// minima use) the sums of 8 blocks per super-block.
template <class I, int offset, bool halves>
struct Quantised {
    static constexpr size_t vector_bytes = 4 * I::lanes, n_starts = offset == 0 ? 0 : halves ? 2 : 1;
    static constexpr size_t scales_at = 4 * vector_bytes, starts_at = 5 * vector_bytes;
    static constexpr size_t pack_bytes = (5 + n_starts) * vector_bytes, pack_blocks = 2 * I::group;

    static size_t n_packs(size_t n_in) { return ceil_div(n_in / k_block, pack_blocks); }
    static size_t sums_offset(size_t n_in) { return n_packs(n_in) * pack_bytes; }
    static size_t n_bytes(size_t n_in) {
        return round_up(sums_offset(n_in) + (halves ? 4 * round_up(n_in / k_block, 8) : 0), 64);
    }

    static void prepare(const float * x, size_t n_in, uint8_t * prepared) {
        const size_t n_blocks = n_in / k_block, last = (n_packs(n_in) - 1) * pack_bytes;
        memset(prepared + last, 0, n_bytes(n_in) - last);
        for (size_t i = 0; i < n_blocks; ++i) quantise(x + i * k_block, lanes_of(i, prepared));
        for (size_t i = 0; i < n_packs(n_in); ++i) add_starts(prepared + i * pack_bytes);
        if constexpr (halves) {
            float * sums = reinterpret_cast<float *>(prepared + sums_offset(n_in));
            for (size_t i = 0; i < n_blocks; ++i) sums[i] = sum_of(lanes_of(i, prepared));
        }
    }

    // Where the two lanes of block i begin.
    static SMALLBATCH_INLINE uint8_t * lanes_of(size_t i, uint8_t * prepared) {
        return prepared + i / pack_blocks * pack_bytes + 4 * lane_of(i % pack_blocks);
    }
    // The first of them, of the i-th block of a pack.
    static SMALLBATCH_INLINE size_t lane_of(size_t i) { return i % I::group * 4 + i / I::group * 2; }

    // Eight values at a time, on whatever vectors the instruction set has.
    using Eight = float __attribute__((vector_size(32), aligned(4), may_alias));
    using EightInts = int32_t __attribute__((vector_size(32)));

    // Each block of 32 values becomes bytes -127 .. 127 and an F32 scale. Values that are not finite stay visible: they
    // make the block's scale NaN or infinite.
    static SMALLBATCH_INLINE void quantise(const float * x, uint8_t * lanes) {
        const Eight * values = reinterpret_cast<const Eight *>(x);
        EightInts magnitudes = {};  // they order as integers, NaN above all
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
            const EightInts magnitude = EightInts(values[v]) & 0x7fffffff;
            magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
        }
        int32_t m[8];
        memcpy(m, &magnitudes, sizeof m);
#pragma GCC unroll 3
        for (int n = 4; n > 0; n /= 2) {
#pragma GCC unroll 4
            for (int j = 0; j < n; ++j) m[j] = m[j] > m[j + n] ? m[j] : m[j + n];
        }
        float largest;
        memcpy(&largest, m, sizeof largest);
        const float inverse = largest < 1e-36f ? 0.0f : 127.0f / largest;  // below it 127 / largest would overflow
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
            const Eight rounded = values[v] * inverse + 12582912.0f;  // 1.5 * 2^23: the integer ends up in the low bits
            I::store_low_bytes(lanes + v * vector_bytes, EightInts(rounded));
        }
        const float scale = inverse == 0.0f ? largest * 0.0f : largest / 127.0f;
        const float scales[2] = {scale, scale};
        memcpy(lanes + scales_at, scales, sizeof scales);
    }

    static SMALLBATCH_INLINE void add_starts(uint8_t * pack) {
        const auto weights = I::fill(uint8_t(offset));
        const auto minus_sum = [&](size_t first, size_t n) SMALLBATCH_LAMBDA {
            auto sum = I::no_ints();
            for (size_t v = first; v < first + n; ++v) sum = I::dot(sum, pack + v * vector_bytes, weights);
            return I::negative(sum);
        };
        if constexpr (n_starts == 1) I::store_ints(pack + starts_at, minus_sum(0, 4));
        if constexpr (n_starts == 2) {
            I::store_ints(pack + starts_at, minus_sum(0, 2));
            I::store_ints(pack + starts_at + vector_bytes, minus_sum(2, 2));
        }
    }

    // The sum of a block's values, from its starts.
    static SMALLBATCH_INLINE float sum_of(const uint8_t * lanes) {
        int32_t first[2], second[2];
        float scale;
        memcpy(first, lanes + starts_at, sizeof first);
        memcpy(second, lanes + starts_at + vector_bytes, sizeof second);
        memcpy(&scale, lanes + scales_at, sizeof scale);
        return scale * float(((first[0] + first[1]) + (second[0] + second[1])) / -offset);
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
// Weight types. A type's Unit is a pack of its blocks, or one super-block, and hands out packs. Where bytes and scales lie
// is said per block of the pack, so that each instruction set gathers in its own way.

template <class I>
struct Pack {
    typename I::bytes v[4];
    typename I::floats scale, scale_16;  // scale_16, of v[2] and v[3], only where 16 values have a scale of their own
};

inline uint32_t load_u32(const uint8_t * p) {
    uint32_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

// Two vectors of 4-bit codes, 16 bytes a block: values 0 .. 15 in the low nibbles and 16 .. 31 in the high ones.
template <class I>
SMALLBATCH_INLINE Pack<I> pack_of_codes(typename I::bytes first, typename I::bytes second, typename I::floats scale) {
    const auto low = I::interleave_low(first, second), high = I::interleave_high(first, second);
    return {{I::low_nibbles(low), I::low_nibbles(high), I::high_nibbles(low), I::high_nibbles(high)}, scale, scale};
}

// The signed values of the 4-bit codes of IQ4_NL and IQ4_XS (facts: ggml-common.h).
alignas(16) constexpr int8_t nonlinear_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                     1,    13,   25,  38,  53,  69,  89,  113};

template <class I>
SMALLBATCH_INLINE Pack<I> looked_up(Pack<I> pack) {
    const auto table = I::from_signed(I::fill16(reinterpret_cast<const uint8_t *>(nonlinear_values)));
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) pack.v[v] = I::look_up(table, pack.v[v]);
    return pack;
}

// What types are made of: unsigned codes that stand for code - `offset`, or signed bytes; one scale of a block, or two;
// minima beside the scales.
template <int offset_>
struct Codes {
    static constexpr bool is_signed = false, has_minima = false, two_scales = false;
    static constexpr int offset = offset_;
};
struct SignedBytes {
    static constexpr bool is_signed = true, has_minima = false, two_scales = false;
};
struct CodesWithMinima : Codes<32> {  // rows as for Q6_K, so that files which mix them prepare rows once
    static constexpr bool has_minima = true;
};

// The rows that products with weights of type W need.
template <class I, class W>
constexpr Starts starts_for() {
    if constexpr (W::is_signed) {
        return {I::signed_offset, false};
    } else {
        return {W::offset, W::has_minima || W::two_scales};
    }
}
template <class I, class W>
using RowsFor = Quantised<I, starts_for<I, W>().offset, starts_for<I, W>().halves>;

template <class I>
struct PackOfBlocks {
    static constexpr int n_blocks = 2 * I::group, n_packs = 1;
};

struct Q8_0 : SignedBytes {
    static constexpr Type type = Type::q8_0;
    template <class I>
    struct Unit : PackOfBlocks<I> {
        const uint8_t * w;
        SMALLBATCH_INLINE explicit Unit(const uint8_t * blocks) : w(blocks) {}
        SMALLBATCH_INLINE Pack<I> pack(int) const {
            const uint8_t * p = w;
            typename I::bytes a[2], b[2];  // values 0 .. 15 and 16 .. 31
#pragma GCC unroll 2
            for (int g = 0; g < 2; ++g) {
                I::gather32([=](int block) { return p + 34 * (I::group * g + block) + 2; }, a[g], b[g]);
            }
            const auto scale = I::halves([p](int block) { return p + 34 * block; });
            return {{I::from_signed(I::interleave_low(a[0], a[1])), I::from_signed(I::interleave_high(a[0], a[1])),
                     I::from_signed(I::interleave_low(b[0], b[1])), I::from_signed(I::interleave_high(b[0], b[1]))},
                    scale,
                    scale};
        }
    };
};

// Blocks of `n_bytes`: a half, and at the end 16 bytes of 4-bit codes.
template <class I, int n_bytes>
SMALLBATCH_INLINE Pack<I> pack_of_nibbles(const uint8_t * p) {
    return pack_of_codes<I>(I::gather([p](int b) { return p + n_bytes * (b + 1) - 16; }),
                            I::gather([p](int b) { return p + n_bytes * (I::group + b + 1) - 16; }),
                            I::halves([p](int b) { return p + n_bytes * b; }));
}

struct Q4_0 : Codes<8> {
    static constexpr Type type = Type::q4_0;
    template <class I>
    struct Unit : PackOfBlocks<I> {
        const uint8_t * w;
        SMALLBATCH_INLINE explicit Unit(const uint8_t * blocks) : w(blocks) {}
        SMALLBATCH_INLINE Pack<I> pack(int) const { return pack_of_nibbles<I, 18>(w); }
    };
};

// Q4_0 with a fifth bit: bit j of four bytes after the half belongs to value j.
struct Q5_0 : Codes<16> {
    static constexpr Type type = Type::q5_0;
    template <class I>
    struct Unit : PackOfBlocks<I> {
        const uint8_t * w;
        SMALLBATCH_INLINE explicit Unit(const uint8_t * blocks) : w(blocks) {}
        SMALLBATCH_INLINE Pack<I> pack(int) const {
            const uint8_t * p = w;
            Pack<I> result = pack_of_nibbles<I, 22>(p);
            const auto fifth = I::interleave_low(I::gather([p](int b) { return p + 22 * b + 2; }),
                                                 I::gather([p](int b) { return p + 22 * (I::group + b) + 2; }));
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) result.v[v] = I::join_bits(result.v[v], fifth, v, 16);
            return result;
        }
    };
};

struct IQ4_NL : SignedBytes {
    static constexpr Type type = Type::iq4_nl;
    template <class I>
    struct Unit : PackOfBlocks<I> {
        const uint8_t * w;
        SMALLBATCH_INLINE explicit Unit(const uint8_t * blocks) : w(blocks) {}
        SMALLBATCH_INLINE Pack<I> pack(int) const { return looked_up<I>(pack_of_nibbles<I, 18>(w)); }
    };
};

template <class I>
struct SuperBlock {
    static constexpr int n_blocks = 1, n_packs = 4 / I::group;
    static constexpr int pack_blocks = 2 * I::group;
};

// {d, scales_h (2 bits x 8), scales_l (4 bits x 8), 128 bytes of codes, 16 a block}
struct IQ4_XS : SignedBytes {
    static constexpr Type type = Type::iq4_xs;
    template <class I>
    struct Unit : SuperBlock<I> {
        const uint8_t * w;
        float scale[8];
        SMALLBATCH_INLINE explicit Unit(const uint8_t * block) : w(block) {
            const float d = I::half(w);
            const uint32_t high = load_u32(w) >> 16, low = load_u32(w + 4);
            for (int j = 0; j < 8; ++j) {
                scale[j] = d * float(int(((low >> (4 * j)) & 15) | (((high >> (2 * j)) & 3) << 4)) - 32);
            }
        }
        SMALLBATCH_INLINE Pack<I> pack(int i) const {
            const uint8_t * p = w + 8 + 16 * this->pack_blocks * i;
            return looked_up<I>(pack_of_codes<I>(I::load_bytes(p), I::load_bytes(p + 16 * I::group),
                                                 I::spread(scale + this->pack_blocks * i)));
        }
    };
};

// Eight 6-bit scales and eight 6-bit minima in 12 bytes, as Q4_K and Q5_K pack them; and their nibbles: blocks 2j and
// 2j+1 are the low and the high ones of bytes 32j .. 32j+31.
template <class I>
struct SuperBlockWithMinima : SuperBlock<I> {
    typename I::floats scale[SuperBlock<I>::n_packs];
    typename I::floats8 minimum;

    SMALLBATCH_INLINE explicit SuperBlockWithMinima(const uint8_t * block) {
        const uint64_t p = load_u32(block + 4), q = load_u32(block + 8), r = load_u32(block + 12);
        const uint64_t scales = (p & 0x3f3f3f3f) | ((r & 0x0f0f0f0f) | ((p >> 2) & 0x30303030)) << 32;
        const uint64_t minima = (q & 0x3f3f3f3f) | (((r >> 4) & 0x0f0f0f0f) | ((q >> 2) & 0x30303030)) << 32;
        I::scale_super_block(scales, minima, block, scale, minimum);
    }

    // The nibbles of pack i, and its scales.
    SMALLBATCH_INLINE Pack<I> pack_of(const uint8_t * p, int i) const {
        const int first = this->pack_blocks * i;
        Pack<I> result;
        I::template words<128>(p, [=](int b) { return (first + b) / 2 * 32; }, result.v);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
            result.v[v] = I::low_nibbles(I::shift_right(result.v[v], [=](int b) { return (first + b) % 2 * 4; }));
        }
        result.scale = result.scale_16 = scale[i];
        return result;
    }
};

struct Q4_K : CodesWithMinima {
    static constexpr Type type = Type::q4_k;
    template <class I>
    struct Unit : SuperBlockWithMinima<I> {
        const uint8_t * w;
        SMALLBATCH_INLINE explicit Unit(const uint8_t * block) : SuperBlockWithMinima<I>(block), w(block) {}
        SMALLBATCH_INLINE Pack<I> pack(int i) const { return this->pack_of(w + 16, i); }
    };
};

// Q4_K with a fifth bit: bit j of byte l belongs to value l of block j.
struct Q5_K : CodesWithMinima {
    static constexpr Type type = Type::q5_k;
    template <class I>
    struct Unit : SuperBlockWithMinima<I> {
        const uint8_t * w;
        SMALLBATCH_INLINE explicit Unit(const uint8_t * block) : SuperBlockWithMinima<I>(block), w(block) {}
        SMALLBATCH_INLINE Pack<I> pack(int i) const {
            const int first = this->pack_blocks * i;
            Pack<I> result = this->pack_of(w + 48, i);
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) {
                result.v[v] = I::template join_above<1>(result.v[v], I::fill8(w + 16 + 8 * v),
                                                        [=](int b) { return first + b; });
            }
            return result;
        }
    };
};

// {128 bytes of low nibbles, 64 bytes of two high bits, 16 signed scales (of 16 values each), d}. In each half of 128
// values, blocks 0 .. 3 are: low nibbles of bytes 0 .. 31, of 32 .. 63, high nibbles of the same; high bits 2b, 2b+1.
struct Q6_K : Codes<32> {
    static constexpr Type type = Type::q6_k;
    static constexpr bool two_scales = true;
    template <class I>
    struct Unit : SuperBlock<I> {
        const uint8_t * w;
        float d;
        SMALLBATCH_INLINE explicit Unit(const uint8_t * block) : w(block), d(I::half(block + 208)) {}
        SMALLBATCH_INLINE Pack<I> pack(int i) const {
            const int first = this->pack_blocks * i;
            Pack<I> result;
            typename I::bytes above[4];
            I::template words<128>(
                w, [=](int b) { return (first + b) / 4 * 64 + (first + b) % 2 * 32; }, result.v);
            I::template words<64>(w + 128, [=](int b) { return (first + b) / 4 * 32; }, above);
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) {
                const auto nibbles = I::low_nibbles(
                    I::shift_right(result.v[v], [=](int b) { return (first + b) % 4 / 2 * 4; }));
                result.v[v] =
                    I::template join_above<3>(nibbles, above[v], [=](int b) { return (first + b) % 4 * 2; });
            }
            I::scale_pairs(w + 192 + 2 * first, d, result.scale, result.scale_16);
            return result;
        }
    };
};

// Eight bytes of each block of a pack, from base + at(block) on, then the eight bytes after those, and so on: four vectors.
// For sets that gather 16 bytes at a time.
template <class I, class F>
SMALLBATCH_INLINE void gather_words(const uint8_t * base, F at, typename I::bytes (&v)[4]) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        const auto a = I::gather([=](int b) { return base + at(b) + 16 * half; });
        const auto b = I::gather([=](int j) { return base + at(I::group + j) + 16 * half; });
        v[2 * half] = I::interleave_low(a, b);
        v[2 * half + 1] = I::interleave_high(a, b);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Outputs, several at a time

// How many outputs of R rows are computed at once: as many streams of weights as leave their sums in registers. Memory
// answers several streams faster than one, and the rows of x are then loaded once for all of them.
template <class I, int n_sums>
constexpr int n_streams() {
    return 4 * n_sums <= I::n_sums ? 4 : 2 * n_sums <= I::n_sums ? 2 : 1;
}

// Calls compute(outputs) with N outputs at a time, one of each Nth part of the range, until all of it is done. Where N does
// not divide the range, its last output is computed again.
template <int N, class F>
SMALLBATCH_INLINE void in_streams(const Product & p, F compute) {
    const size_t per_stream = ceil_div(p.end - p.begin, N);
    for (size_t i = 0; i < per_stream; ++i) {
        size_t outputs[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) {
            const size_t output = p.begin + j * per_stream + i;
            outputs[j] = output < p.end ? output : p.end - 1;
        }
        compute(outputs);
    }
}

// How far ahead of their use weights are asked for, and whether into the second-level cache (`second_level_first`).
template <size_t n_bytes_, bool into_second_>
struct Ahead {
    static constexpr size_t n_bytes = n_bytes_;
    static constexpr bool into_second = into_second_;
};
using InFirst = Ahead<2048, false>;
template <int R>
using InSecond = Ahead<R <= 2 ? 1024 : 3072, true>;

// Calls multiply(ahead) as the processor likes it, where the set has code for both (`either`) and up to five rows: with many rows,
// weights of less than a byte a value, or without AVX512, computing counts more than memory.
template <bool either, int R, class F>
SMALLBATCH_INLINE void asking_ahead(const Product & p, F multiply) {
    if constexpr (either && R <= 5) {
        if (p.into_second) return multiply(InSecond<R>{});
    }
    multiply(InFirst{});
}

// Goes through the weights of N outputs side by side, a unit of blocks of each at a time: add(u, x, j, w) adds unit u of output j,
// whose weights w[0] points at, and of as many outputs after it as are taken `together`, at w[1] and so on; x is where the first
// prepared row has its x_bytes for that unit. What is no whole unit in the end is left to add_rest(u, x, j, w, n_blocks).
template <class I, Type type, size_t unit_blocks, size_t x_bytes, int together, class Ahead, int N, class F, class Rest>
SMALLBATCH_INLINE void each_unit(const Product & p, const size_t (&outputs)[N], F add, Rest add_rest) {
    constexpr Block block = block_of(type);
    constexpr size_t unit_bytes = unit_blocks * block.n_bytes;
    const size_t n_blocks = p.n_in / block.n_values, n_units = n_blocks / unit_blocks, n_rest = n_blocks % unit_blocks;
    const uint8_t * w[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) w[j] = p.weights + outputs[j] * p.row_bytes;
    const uint8_t * x = p.x;
    for (size_t u = 0; u < n_units; ++u) {
#pragma GCC unroll 4
        for (int j = 0; j < N; j += together) {
#pragma GCC unroll 2
            for (int k = j; k < j + together; ++k) I::template prefetch<unit_bytes, Ahead>(w[k]);
            add(u, x, j, w + j);
#pragma GCC unroll 2
            for (int k = j; k < j + together; ++k) w[k] += unit_bytes;
        }
        x += x_bytes;
    }
    if (n_rest == 0) return;
#pragma GCC unroll 4
    for (int j = 0; j < N; j += together) add_rest(n_units, x, j, w + j, n_rest);
}

// The same where zeros are put in the place of the blocks that are missing of the last unit: the rows have zeros there, too.
template <class I, Type type, size_t unit_blocks, size_t x_bytes, int together = 1, class Ahead = InFirst, int N, class F>
SMALLBATCH_INLINE void each_unit(const Product & p, const size_t (&outputs)[N], F add) {
    const auto add_rest = [&](size_t u, const uint8_t * x, int j, const uint8_t * const * w, size_t n_blocks) SMALLBATCH_LAMBDA {
        constexpr size_t block_bytes = block_of(type).n_bytes;
        uint8_t rest[together][unit_blocks * block_bytes] = {};
        const uint8_t * filled_up[together];
#pragma GCC unroll 2
        for (int k = 0; k < together; ++k) {
            memcpy(rest[k], w[k], n_blocks * block_bytes);
            filled_up[k] = rest[k];
        }
        add(u, x, j, filled_up);
    };
    each_unit<I, type, unit_blocks, x_bytes, together, Ahead>(p, outputs, add, add_rest);
}

// Stores the sums of N streams of R rows, [j * R + r] of output j in row r: `one(i)` and `four(i, i1, i2, i3)` add up sums i over
// their lanes. Taken alone or four at a time, each is the same tree of additions.
template <class I, int R, int N, class One, class Four>
SMALLBATCH_INLINE void store_each(const Product & p, const size_t (&outputs)[N], One one, Four four) {
    const auto at = [&](int i) -> float & { return p.out[i % R * p.out_stride + outputs[i / R]]; };
    if constexpr (N * R == 1) {
        at(0) = one(0);
    } else {
#pragma GCC unroll 8
        for (int i = 0; i < N * R; i += 4) {
            const auto or_first = [=](int j) { return j < N * R ? j : i; };
            float values[4];
            I::store4(values, four(i, or_first(i + 1), or_first(i + 2), or_first(i + 3)));
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                if (i + j < N * R) at(i + j) = values[j];
            }
        }
    }
}

template <class I, int R, int N>
SMALLBATCH_INLINE void store_sums(const Product & p, const size_t (&outputs)[N], const typename I::floats * x) {
    store_each<I, R, N>(
        p, outputs, [=](int i) { return I::sum(x[i]); },
        [=](int a, int b, int c, int d) { return I::sum_each(x[a], x[b], x[c], x[d]); });
}

template <class I, int R, int N>
SMALLBATCH_INLINE void store_differences(const Product & p, const size_t (&outputs)[N], const typename I::floats * x,
                                         const typename I::floats8 * y) {
    store_each<I, R, N>(
        p, outputs, [=](int i) { return I::sum(x[i]) - I::sum8(y[i]); },
        [=](int a, int b, int c, int d) {
            return I::subtract4(I::sum_each(x[a], x[b], x[c], x[d]), I::sum_each8(y[a], y[b], y[c], y[d]));
        });
}

// ---------------------------------------------------------------------------------------------------------------------
// The product with quantised weights

template <class I, class W, int R>
struct QuantisedProduct {
    using Unit = typename W::template Unit<I>;
    using Rows = RowsFor<I, W>;
    static constexpr size_t vector_bytes = Rows::vector_bytes, unit_bytes = Rows::pack_bytes * Unit::n_packs;  // of a row of x
    static constexpr int N = n_streams<I, W::has_minima ? 2 * R : R>();

    // Adds one unit of weights to the sums of R rows; `x` and `x_sums` are where the first row's values for it begin. With `kept`,
    // a mask of lanes, only those blocks count, whatever the others hold: there the rows have zeros.
    static SMALLBATCH_INLINE void add(const uint8_t * w, const uint8_t * x, const float * x_sums, size_t x_bytes,
                                      typename I::floats * products, typename I::floats8 * minima, const uint8_t * kept = nullptr) {
        const Unit unit{w};
        if constexpr (W::has_minima) {
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const auto row =
                    reinterpret_cast<const float *>(reinterpret_cast<const uint8_t *>(x_sums) + r * x_bytes);
                minima[r] = I::multiply_add8(unit.minimum, I::load8(row), minima[r]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < Unit::n_packs; ++i) {
            Pack<I> pack = unit.pack(i);
            if (kept != nullptr) pack.scale = I::masked(pack.scale, I::load_ints(kept));
            const uint8_t * x_pack = x + i * Rows::pack_bytes;
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const uint8_t * row = x_pack + r * x_bytes;
                const auto scales = I::load(reinterpret_cast<const float *>(row + Rows::scales_at));
                if constexpr (W::two_scales) {
                    const auto first = dot2(start(row, 0), row, pack.v);
                    const auto second = dot2(start(row, 1), row + 2 * vector_bytes, pack.v + 2);
                    const auto scaled = I::multiply_add(I::to_floats(second), pack.scale_16,
                                                        I::multiply(I::to_floats(first), pack.scale));
                    products[r] = I::multiply_add(scaled, scales, products[r]);
                } else {
                    const auto dot = dot2(dot2(start(row, 0), row, pack.v), row + 2 * vector_bytes, pack.v + 2);
                    products[r] = I::multiply_add(I::to_floats(dot), I::multiply(pack.scale, scales), products[r]);
                }
            }
        }
    }

    static SMALLBATCH_INLINE typename I::ints start(const uint8_t * row, int half) {
        if constexpr (W::has_minima || Rows::n_starts == 0) {
            return I::no_ints();
        } else {
            return I::load_ints(row + Rows::starts_at + half * vector_bytes);
        }
    }

    static SMALLBATCH_INLINE typename I::ints dot2(typename I::ints sum, const uint8_t * x,
                                                   const typename I::bytes * w) {
        return dot(dot(sum, x, w[0]), x + vector_bytes, w[1]);
    }

    static SMALLBATCH_INLINE typename I::ints dot(typename I::ints sum, const uint8_t * x, typename I::bytes w) {
        if constexpr (W::is_signed) {
            return I::dot_signed(sum, x, w);
        } else {
            return I::dot(sum, x, w);
        }
    }

    static void multiply(const Product & p) {
        asking_ahead<I::asks_either(W::type), R>(p, [&](auto ahead) SMALLBATCH_LAMBDA { multiply_asking<decltype(ahead)>(p); });
    }

    template <class Ahead>
    static SMALLBATCH_INLINE void multiply_asking(const Product & p) {
        constexpr size_t weights_bytes = Unit::n_blocks * block_of(W::type).n_bytes;  // of a unit
        const float * x_sums = reinterpret_cast<const float *>(p.x + Rows::sums_offset(p.n_in));
        alignas(64) int32_t kept[I::lanes] = {};
        if constexpr (Unit::n_blocks > 1) {
            for (size_t i = 0; i < p.n_in / k_block % Unit::n_blocks; ++i) {
                const size_t lane = Rows::lane_of(i);
                kept[lane] = kept[lane + 1] = -1;
            }
        }
        in_streams<N>(p, [&](const size_t(&outputs)[N]) SMALLBATCH_LAMBDA {
            typename I::floats products[N * R] = {};
            typename I::floats8 minima[W::has_minima ? N * R : 1] = {};
            const auto add_unit = [&](size_t u, const uint8_t * x, int j, const uint8_t * const * w) SMALLBATCH_LAMBDA {
                add(w[0], x, x_sums + 8 * u, p.x_bytes, products + j * R, minima + j * R);
            };
            // The last blocks of a row are read together with the first ones of the next; behind the last row zeros follow.
            const auto add_rest = [&](size_t, const uint8_t * x, int j, const uint8_t * const * w, size_t n) SMALLBATCH_LAMBDA {
                alignas(64) uint8_t filled_up[weights_bytes];
                const uint8_t * from = w[0];
                if (size_t(p.weights_end - from) < weights_bytes) {
                    memset(filled_up, 0, weights_bytes);
                    from = static_cast<const uint8_t *>(memcpy(filled_up, from, n * block_of(W::type).n_bytes));
                }
                add(from, x, x_sums, p.x_bytes, products + j * R, minima + j * R, reinterpret_cast<const uint8_t *>(kept));
            };
            each_unit<I, W::type, Unit::n_blocks, unit_bytes, 1, Ahead>(p, outputs, add_unit, add_rest);
            if constexpr (W::has_minima) {
                store_differences<I, R>(p, outputs, products, minima);
            } else {
                store_sums<I, R>(p, outputs, products);
            }
        });
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The product with weights that are numbers themselves

struct F32 {
    static constexpr Type type = Type::f32;
    template <class I>
    static SMALLBATCH_INLINE typename I::floats load(const uint8_t * w) {
        return I::load_f32(w);
    }
};
struct F16 {
    static constexpr Type type = Type::f16;
    template <class I>
    static SMALLBATCH_INLINE typename I::floats load(const uint8_t * w) {
        return I::load_f16(w);
    }
};
struct BF16 {
    static constexpr Type type = Type::bf16;
    template <class I>
    static SMALLBATCH_INLINE typename I::floats load(const uint8_t * w) {
        return I::load_bf16(w);
    }
};

// Two sums per row and output, so that weights already in the cache do not wait for the adder.
template <class I, class W, int R>
struct DenseProduct {
    static constexpr size_t value_bytes = block_of(W::type).n_bytes;
    static constexpr size_t step = Floats<I>::step;
    static constexpr int N = n_streams<I, 2 * R>();

    static SMALLBATCH_INLINE void add(const uint8_t * w, const uint8_t * x, size_t x_bytes, typename I::floats * evens,
                                      typename I::floats * odds) {
        const auto even = W::template load<I>(w), odd = W::template load<I>(w + I::lanes * value_bytes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const auto row = reinterpret_cast<const float *>(x + r * x_bytes);
            evens[r] = I::multiply_add(even, I::load(row), evens[r]);
            odds[r] = I::multiply_add(odd, I::load(row + I::lanes), odds[r]);
        }
    }

    static void multiply(const Product & p) {
        asking_ahead<I::asks_either(W::type), R>(p, [&](auto ahead) SMALLBATCH_LAMBDA { multiply_asking<decltype(ahead)>(p); });
    }

    template <class Ahead>
    static SMALLBATCH_INLINE void multiply_asking(const Product & p) {
        in_streams<N>(p, [&](const size_t(&outputs)[N]) SMALLBATCH_LAMBDA {
            typename I::floats evens[N * R] = {}, odds[N * R] = {};
            each_unit<I, W::type, step, 4 * step, 1, Ahead>(
                p, outputs, [&](size_t, const uint8_t * x, int j, const uint8_t * const * w) SMALLBATCH_LAMBDA {
                    add(w[0], x, p.x_bytes, evens + j * R, odds + j * R);
                });
#pragma GCC unroll 16
            for (int i = 0; i < N * R; ++i) evens[i] = I::add(evens[i], odds[i]);
            store_sums<I, R>(p, outputs, evens);
        });
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

template <template <class, class, int> class P, class Rows, class I, class W>
constexpr Kernel kernel_for() {
    return {W::type,
            {&Rows::n_bytes, &Rows::prepare},
            {&multiply_rows<P, I, W, 1>, &multiply_rows<P, I, W, 2>, &multiply_rows<P, I, W, 3>,
             &multiply_rows<P, I, W, 4>, &multiply_rows<P, I, W, 5>, &multiply_rows<P, I, W, 6>,
             &multiply_rows<P, I, W, 7>, &multiply_rows<P, I, W, 8>}};
}

// Every type, for one instruction set.
template <class I>
struct All {
    template <class W>
    static constexpr Kernel quantised() {
        return kernel_for<QuantisedProduct, RowsFor<I, W>, I, W>();
    }
    template <class W>
    static constexpr Kernel dense() {
        return kernel_for<DenseProduct, Floats<I>, I, W>();
    }

    static constexpr Kernel kernels[] = {
        quantised<Q8_0>(), quantised<Q4_0>(),   quantised<Q5_0>(),   quantised<Q4_K>(), quantised<Q5_K>(),
        quantised<Q6_K>(), quantised<IQ4_NL>(), quantised<IQ4_XS>(), dense<BF16>(),     dense<F16>(),
        dense<F32>(),
    };
    static constexpr size_t n_kernels = sizeof kernels / sizeof kernels[0];
};

}  // namespace
}  // namespace sidecar::smallbatch
