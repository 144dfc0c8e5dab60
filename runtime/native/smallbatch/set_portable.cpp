// Plain C++: runs anywhere, and shows what each vector operation means. Too slow to be offered as a device.
#include "products.h"

namespace sidecar::smallbatch {
namespace {

struct Portable {
    static constexpr int lanes = 4, group = 1;
    static constexpr int signed_offset = 0;
    static constexpr bool one_pass = false;
    static constexpr bool asks_either(Type) { return false; }
    static constexpr int n_sums = 1;  // kept in registers

    struct bytes {
        uint8_t v[16];
    };
    struct ints {
        int32_t v[4];
    };
    struct floats {
        float v[4];
    };
    struct floats8 {
        float v[8];
    };

    template <size_t n_bytes, class Ahead>
    static void prefetch(const uint8_t *) {}

    // Bytes. A gather loads 16 bytes for each of `group` blocks, from where `at(block)` says.
    template <class F>
    static bytes gather(F at) {
        bytes result;
        memcpy(result.v, at(0), 16);
        return result;
    }
    // As many bytes as a gather loads, all in a row.
    static bytes load_bytes(const uint8_t * p) {
        return gather([p](int) { return p; });
    }
    // Four vectors of 8 bytes a block, from base + at(block) on; the n_bytes from base on may all be read.
    template <int n_bytes, class F>
    static void words(const uint8_t * base, F at, bytes (&v)[4]) {
        gather_words<Portable>(base, at, v);
    }
    template <class F>
    static void gather32(F at, bytes & first, bytes & second) {
        memcpy(first.v, at(0), 16);
        memcpy(second.v, at(0) + 16, 16);
    }
    // The same bytes for each block.
    static bytes fill16(const uint8_t * p) {
        return gather([p](int) { return p; });
    }
    static bytes fill8(const uint8_t * p) { return interleave_low(fill16(p), fill16(p)); }
    // Eight bytes of x, eight of y, for each block of 16 bytes.
    static bytes interleave_low(const bytes & x, const bytes & y) {
        bytes result;
        memcpy(result.v, x.v, 8);
        memcpy(result.v + 8, y.v, 8);
        return result;
    }
    static bytes interleave_high(const bytes & x, const bytes & y) {
        bytes result;
        memcpy(result.v, x.v + 8, 8);
        memcpy(result.v + 8, y.v + 8, 8);
        return result;
    }
    template <class F>
    static bytes map(const bytes & x, F f) {
        bytes result;
        for (int i = 0; i < 16; ++i) result.v[i] = uint8_t(f(x.v[i], i));
        return result;
    }
    static bytes low_nibbles(const bytes & x) {
        return map(x, [](uint8_t v, int) { return v & 15; });
    }
    static bytes high_nibbles(const bytes & x) {
        return map(x, [](uint8_t v, int) { return v >> 4; });
    }
    // Shifts each block's bytes in a pack; bits of a neighbouring byte may come in above, so mask what is wanted.
    template <class F>
    static bytes shift_right(const bytes & x, F n_bits) {
        return map(x, [n_bits](uint8_t v, int i) { return v >> n_bits(i / 8); });
    }
    // x | ((above >> n_bits(block)) & mask) << 4.
    template <int mask, class F>
    static bytes join_above(const bytes & x, const bytes & above, F n_bits) {
        return map(x, [&](uint8_t v, int i) { return v | ((above.v[i] >> n_bits(i / 8)) & mask) << 4; });
    }
    // Adds `value` to byte j of each block's 8 where bit j of byte `byte` of the block's 8 in `words` is set.
    static bytes join_bits(const bytes & x, const bytes & words, int byte, int8_t value) {
        return map(x, [&](uint8_t v, int i) { return v + ((words.v[i / 8 * 8 + byte] >> i % 8) & 1) * value; });
    }
    static bytes look_up(const bytes & table, const bytes & x) {
        return map(x, [&table](uint8_t v, int) { return table.v[v]; });
    }

    // Sums of four products of bytes, x (in memory) times codes or signed weights.
    static bytes from_signed(const bytes & w) { return w; }
    static ints no_ints() { return {}; }
    static bytes fill(uint8_t n) {
        return map(bytes{}, [n](uint8_t, int) { return n; });
    }
    static ints negative(const ints & x) { return {{-x.v[0], -x.v[1], -x.v[2], -x.v[3]}}; }
    static void store_ints(uint8_t * p, const ints & x) { memcpy(p, x.v, sizeof x.v); }
    // The lowest byte of each.
    template <class EightInts>
    static SMALLBATCH_INLINE void store_low_bytes(uint8_t * p, const EightInts & x) {
        for (int i = 0; i < 8; ++i) p[i] = uint8_t(x[i]);
    }
    static ints load_ints(const uint8_t * p) {
        ints result;
        memcpy(result.v, p, sizeof result.v);
        return result;
    }
    static ints dot(const ints & sum, const uint8_t * x, const bytes & codes) {
        ints result = sum;
        for (int i = 0; i < 16; ++i) result.v[i / 4] += int8_t(x[i]) * codes.v[i];
        return result;
    }
    static ints dot_signed(const ints & sum, const uint8_t * x, const bytes & w) {
        ints result = sum;
        for (int i = 0; i < 16; ++i) result.v[i / 4] += int8_t(x[i]) * int8_t(w.v[i]);
        return result;
    }

    // Floats
    // x where the mask is -1, 0 where it is 0.
    static floats masked(const floats & x, const ints & mask) {
        floats result;
        for (int i = 0; i < 4; ++i) result.v[i] = mask.v[i] != 0 ? x.v[i] : 0.0f;
        return result;
    }
    static floats to_floats(const ints & x) {
        floats result;
        for (int i = 0; i < 4; ++i) result.v[i] = float(x.v[i]);
        return result;
    }
    static floats load(const float * p) {
        floats result;
        memcpy(result.v, p, sizeof result.v);
        return result;
    }
    static floats add(const floats & x, const floats & y) {
        floats result;
        for (int i = 0; i < 4; ++i) result.v[i] = x.v[i] + y.v[i];
        return result;
    }
    static floats multiply(const floats & x, const floats & y) {
        floats result;
        for (int i = 0; i < 4; ++i) result.v[i] = x.v[i] * y.v[i];
        return result;
    }
    static floats multiply_add(const floats & x, const floats & y, const floats & sum) {
        return add(multiply(x, y), sum);
    }
    static float sum(const floats & x) { return (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]); }

    static floats sum_each(const floats & a, const floats & b, const floats & c, const floats & d) {
        return {{sum(a), sum(b), sum(c), sum(d)}};
    }
    static floats sum_each8(const floats8 & a, const floats8 & b, const floats8 & c, const floats8 & d) {
        return {{sum8(a), sum8(b), sum8(c), sum8(d)}};
    }
    static floats subtract4(const floats & x, const floats & y) {
        floats result;
        for (int i = 0; i < 4; ++i) result.v[i] = x.v[i] - y.v[i];
        return result;
    }
    static void store4(float * p, const floats & x) { memcpy(p, x.v, sizeof x.v); }

    static floats8 load8(const float * p) {
        floats8 result;
        memcpy(result.v, p, sizeof result.v);
        return result;
    }
    static floats8 multiply_add8(const floats8 & x, const floats8 & y, const floats8 & sum) {
        floats8 result;
        for (int i = 0; i < 8; ++i) result.v[i] = x.v[i] * y.v[i] + sum.v[i];
        return result;
    }
    static float sum8(const floats8 & x) {
        floats half;
        for (int i = 0; i < 4; ++i) half.v[i] = x.v[i] + x.v[4 + i];
        return sum(half);
    }

    // Scales: one number per block of a pack, in its two lanes.
    static float half(const uint8_t * p) {
        const uint32_t h = uint32_t(p[0]) | uint32_t(p[1]) << 8;
        const uint32_t sign = (h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
        if (exponent == 0) {
            const float magnitude = float(fraction) * 5.9604644775390625e-8f;  // subnormal: units of 2^-24
            return sign ? -magnitude : magnitude;
        }
        return from_bits(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13);
    }
    template <class F>
    static floats halves(F at) {
        const float two[2] = {half(at(0)), half(at(1))};
        return spread(two);
    }
    static floats spread(const float * p) { return {{p[0], p[0], p[1], p[1]}}; }
    // Eight bytes of scales and eight of minima, times a half each: the scales by packs.
    static void scale_super_block(uint64_t scales, uint64_t minima, const uint8_t * two_halves, floats * scale,
                                  floats8 & minimum) {
        float scaled[8];
        for (int i = 0; i < 8; ++i) {
            scaled[i] = half(two_halves) * float((scales >> 8 * i) & 255);
            minimum.v[i] = half(two_halves + 2) * float((minima >> 8 * i) & 255);
        }
        for (int i = 0; i < 4; ++i) scale[i] = spread(scaled + 2 * i);
    }

    // Two signed bytes per block of a pack, times the factor: the first of each and the second of each.
    static void scale_pairs(const uint8_t * bytes, float factor, floats & first, floats & second) {
        float four[4];
        for (int i = 0; i < 4; ++i) four[i] = factor * float(int8_t(bytes[i]));
        first = {{four[0], four[0], four[2], four[2]}};
        second = {{four[1], four[1], four[3], four[3]}};
    }

    static floats load_f32(const uint8_t * p) {
        floats result;
        memcpy(result.v, p, sizeof result.v);
        return result;
    }
    static floats load_f16(const uint8_t * p) {
        floats result;
        for (int i = 0; i < 4; ++i) result.v[i] = half(p + 2 * i);
        return result;
    }
    static floats load_bf16(const uint8_t * p) {
        floats result;
        for (int i = 0; i < 4; ++i) result.v[i] = from_bits(uint32_t(p[2 * i]) << 16 | uint32_t(p[2 * i + 1]) << 24);
        return result;
    }

  private:
    static float from_bits(uint32_t bits) {
        float value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
};

}  // namespace

const Kernels portable_kernels = {All<Portable>::kernels, All<Portable>::n_kernels};

}  // namespace sidecar::smallbatch
