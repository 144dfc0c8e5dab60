// Vector operations of NEON with the dot product of Armv8.2: two blocks at a time.
#pragma once

#include <arm_neon.h>

#include "products.h"

namespace sidecar::smallbatch {
namespace {

struct Neon {
    static constexpr int lanes = 4, group = 1;
    static constexpr int signed_offset = 0;
    static constexpr bool one_pass = true;
    static constexpr bool asks_either(Type) { return false; }
    static constexpr int n_sums = 16;  // kept in registers

    using bytes = uint8x16_t;
    using ints = int32x4_t;
    using floats = float32x4_t;
    struct floats8 {
        float32x4_t low, high;
    };

    template <size_t n_bytes, class Ahead>
    static SMALLBATCH_INLINE void prefetch(const uint8_t * p) {
        for (size_t i = 0; i < n_bytes; i += 64) __builtin_prefetch(p + i + Ahead::n_bytes);
    }

    template <class F>
    static SMALLBATCH_INLINE bytes gather(F at) {
        return vld1q_u8(at(0));
    }
    static SMALLBATCH_INLINE bytes load_bytes(const uint8_t * p) { return vld1q_u8(p); }
    template <int n_bytes, class F>
    static SMALLBATCH_INLINE void words(const uint8_t * base, F at, bytes (&v)[4]) {
        gather_words<Neon>(base, at, v);
    }
    template <class F>
    static SMALLBATCH_INLINE void gather32(F at, bytes & first, bytes & second) {
        first = vld1q_u8(at(0));
        second = vld1q_u8(at(0) + 16);
    }
    static SMALLBATCH_INLINE bytes fill16(const uint8_t * p) { return vld1q_u8(p); }
    static SMALLBATCH_INLINE bytes fill8(const uint8_t * p) { return vcombine_u8(vld1_u8(p), vld1_u8(p)); }
    static SMALLBATCH_INLINE bytes interleave_low(bytes x, bytes y) {
        return vcombine_u8(vget_low_u8(x), vget_low_u8(y));
    }
    static SMALLBATCH_INLINE bytes interleave_high(bytes x, bytes y) {
        return vcombine_u8(vget_high_u8(x), vget_high_u8(y));
    }
    static SMALLBATCH_INLINE bytes low_nibbles(bytes x) { return vandq_u8(x, vdupq_n_u8(15)); }
    static SMALLBATCH_INLINE bytes high_nibbles(bytes x) { return vshrq_n_u8(x, 4); }
    template <class F>
    static SMALLBATCH_INLINE bytes shift_right(bytes x, F n_bits) {
        return vshlq_u8(x, vcombine_s8(vdup_n_s8(int8_t(-n_bits(0))), vdup_n_s8(int8_t(-n_bits(1)))));
    }
    template <int mask, class F>
    static SMALLBATCH_INLINE bytes join_above(bytes x, bytes above, F n_bits) {
        const int8x16_t left = vcombine_s8(vdup_n_s8(int8_t(4 - n_bits(0))), vdup_n_s8(int8_t(4 - n_bits(1))));
        const bytes shifted = vshlq_u8(above, left);
        return vorrq_u8(x, vandq_u8(shifted, vdupq_n_u8(mask << 4)));
    }
    static SMALLBATCH_INLINE bytes join_bits(bytes x, bytes words, int byte, int8_t value) {
        const bytes order = vcombine_u8(vdup_n_u8(uint8_t(byte)), vdup_n_u8(uint8_t(8 + byte)));
        const bytes is_set =
            vtstq_u8(vqtbl1q_u8(words, order), vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201)));
        return vorrq_u8(x, vandq_u8(is_set, vdupq_n_u8(uint8_t(value))));
    }
    static SMALLBATCH_INLINE bytes look_up(bytes table, bytes x) { return vqtbl1q_u8(table, x); }

    static SMALLBATCH_INLINE bytes from_signed(bytes w) { return w; }
    static SMALLBATCH_INLINE ints no_ints() { return vdupq_n_s32(0); }
    static SMALLBATCH_INLINE bytes fill(uint8_t n) { return vdupq_n_u8(n); }
    static SMALLBATCH_INLINE ints negative(ints x) { return vnegq_s32(x); }
    static SMALLBATCH_INLINE void store_ints(uint8_t * p, ints x) { vst1q_u8(p, vreinterpretq_u8_s32(x)); }
    template <class EightInts>
    static SMALLBATCH_INLINE void store_low_bytes(uint8_t * p, const EightInts & x) {
        using EightBytes = uint8_t __attribute__((vector_size(8)));
        const EightBytes bytes = __builtin_convertvector(x, EightBytes);
        memcpy(p, &bytes, sizeof bytes);
    }
    static SMALLBATCH_INLINE ints load_ints(const uint8_t * p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
    static SMALLBATCH_INLINE ints dot(ints sum, const uint8_t * x, bytes codes) {  // codes are below 128
        return vdotq_s32(sum, vreinterpretq_s8_u8(vld1q_u8(x)), vreinterpretq_s8_u8(codes));
    }
    static SMALLBATCH_INLINE ints dot_signed(ints sum, const uint8_t * x, bytes w) { return dot(sum, x, w); }

    static SMALLBATCH_INLINE floats masked(floats x, ints mask) {
        return vreinterpretq_f32_s32(vandq_s32(vreinterpretq_s32_f32(x), mask));
    }
    static SMALLBATCH_INLINE floats to_floats(ints x) { return vcvtq_f32_s32(x); }
    static SMALLBATCH_INLINE floats load(const float * p) { return vld1q_f32(p); }
    static SMALLBATCH_INLINE floats add(floats x, floats y) { return vaddq_f32(x, y); }
    static SMALLBATCH_INLINE floats multiply(floats x, floats y) { return vmulq_f32(x, y); }
    static SMALLBATCH_INLINE floats multiply_add(floats x, floats y, floats sum) { return vfmaq_f32(sum, x, y); }
    static SMALLBATCH_INLINE float32x2_t halved(floats x) { return vadd_f32(vget_low_f32(x), vget_high_f32(x)); }
    static SMALLBATCH_INLINE float sum(floats x) { return vpadds_f32(halved(x)); }
    // The sums over the lanes of four vectors, added as `sum` adds them.
    static SMALLBATCH_INLINE floats sum_each(floats a, floats b, floats c, floats d) {
        return vpaddq_f32(vcombine_f32(halved(a), halved(b)), vcombine_f32(halved(c), halved(d)));
    }
    static SMALLBATCH_INLINE floats subtract4(floats x, floats y) { return vsubq_f32(x, y); }
    static SMALLBATCH_INLINE void store4(float * p, floats x) { vst1q_f32(p, x); }

    static SMALLBATCH_INLINE floats8 load8(const float * p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
    static SMALLBATCH_INLINE floats8 multiply_add8(floats8 x, floats8 y, floats8 sum) {
        return {vfmaq_f32(sum.low, x.low, y.low), vfmaq_f32(sum.high, x.high, y.high)};
    }
    static SMALLBATCH_INLINE floats quarters(floats8 x) { return vaddq_f32(x.low, x.high); }
    static SMALLBATCH_INLINE float sum8(floats8 x) { return sum(quarters(x)); }
    static SMALLBATCH_INLINE floats sum_each8(floats8 a, floats8 b, floats8 c, floats8 d) {
        return sum_each(quarters(a), quarters(b), quarters(c), quarters(d));
    }

    static SMALLBATCH_INLINE float half(const uint8_t * p) {
        __fp16 value;
        memcpy(&value, p, sizeof value);
        return float(value);
    }
    template <class F>
    static SMALLBATCH_INLINE floats halves(F at) {
        return vcombine_f32(vdup_n_f32(half(at(0))), vdup_n_f32(half(at(1))));
    }
    static SMALLBATCH_INLINE floats spread(const float * p) {
        return vcombine_f32(vdup_n_f32(p[0]), vdup_n_f32(p[1]));
    }
    static SMALLBATCH_INLINE void scale_super_block(uint64_t scales, uint64_t minima, const uint8_t * two_halves,
                                                    floats * scale, floats8 & minimum) {
        const floats8 scaled = scale_bytes(scales, half(two_halves));
        scale[0] = vzip1q_f32(scaled.low, scaled.low);
        scale[1] = vzip2q_f32(scaled.low, scaled.low);
        scale[2] = vzip1q_f32(scaled.high, scaled.high);
        scale[3] = vzip2q_f32(scaled.high, scaled.high);
        minimum = scale_bytes(minima, half(two_halves + 2));
    }
    static SMALLBATCH_INLINE floats8 scale_bytes(uint64_t bytes, float factor) {
        const uint16x8_t eight = vmovl_u8(vcreate_u8(bytes));
        return {vmulq_n_f32(vcvtq_f32_u32(vmovl_u16(vget_low_u16(eight))), factor),
                vmulq_n_f32(vcvtq_f32_u32(vmovl_u16(vget_high_u16(eight))), factor)};
    }
    static SMALLBATCH_INLINE void scale_pairs(const uint8_t * bytes, float factor, floats & first, floats & second) {
        const int16x8_t eight = vmovl_s8(vcreate_s8(load_u32(bytes)));
        const float32x4_t scaled = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(eight))), factor);
        first = vtrn1q_f32(scaled, scaled);
        second = vtrn2q_f32(scaled, scaled);
    }

    static SMALLBATCH_INLINE floats load_f32(const uint8_t * p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }
    static SMALLBATCH_INLINE floats load_f16(const uint8_t * p) {
        return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
    }
    static SMALLBATCH_INLINE floats load_bf16(const uint8_t * p) {
        return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
    }
};

}  // namespace
}  // namespace sidecar::smallbatch
