// Vector operations of AVX2, FMA and F16C: four blocks at a time. All but the dot product, which the sets add.
#pragma once

#include "vectors_x86.h"

namespace sidecar::smallbatch {
namespace {

struct Vectors256 : VectorsX86 {
    static constexpr int lanes = 8, group = 2;
    static constexpr int n_sums = 8;  // kept in registers

    using bytes = __m256i;
    using ints = __m256i;
    using floats = __m256;

    template <class F>
    static SMALLBATCH_INLINE bytes gather(F at) {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(load16(at(0))), load16(at(1)), 1);
    }
    template <class F>
    static SMALLBATCH_INLINE bytes gather_pairs(F at) {
        return fill16(at(0));
    }
    template <class F>
    static SMALLBATCH_INLINE void gather32(F at, bytes & first, bytes & second) {
        first = gather(at);
        second = gather([at](int b) { return at(b) + 16; });
    }
    static SMALLBATCH_INLINE bytes fill16(const uint8_t * p) { return _mm256_broadcastsi128_si256(load16(p)); }
    static SMALLBATCH_INLINE bytes fill8(const uint8_t * p) {
        return _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
    }
    static SMALLBATCH_INLINE bytes interleave_low(bytes x, bytes y) { return _mm256_unpacklo_epi64(x, y); }
    static SMALLBATCH_INLINE bytes interleave_high(bytes x, bytes y) { return _mm256_unpackhi_epi64(x, y); }
    static SMALLBATCH_INLINE bytes low_nibbles(bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
    static SMALLBATCH_INLINE bytes high_nibbles(bytes x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
    template <class F>
    static SMALLBATCH_INLINE bytes shift_right(bytes x, F n_bits) {
        const int n0 = n_bits(0), n1 = n_bits(1), n2 = n_bits(2), n3 = n_bits(3);
        return _mm256_srlv_epi32(x, _mm256_setr_epi32(n0, n0, n2, n2, n1, n1, n3, n3));
    }
    static SMALLBATCH_INLINE bytes bits_above_nibble(bytes x, uint8_t mask) {
        return _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi8(char(mask))), 4);
    }
    static SMALLBATCH_INLINE bytes join(bytes x, bytes y) { return _mm256_or_si256(x, y); }
    static SMALLBATCH_INLINE bytes subtract(bytes x, int8_t n) { return _mm256_sub_epi8(x, _mm256_set1_epi8(n)); }
    static SMALLBATCH_INLINE bytes look_up(const int8_t * table, bytes x) {
        const __m128i values = _mm_load_si128(reinterpret_cast<const __m128i *>(table));
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), x);
    }

    static SMALLBATCH_INLINE floats to_floats(ints x) { return _mm256_cvtepi32_ps(x); }
    static SMALLBATCH_INLINE floats load(const float * p) { return _mm256_load_ps(p); }
    static SMALLBATCH_INLINE floats add(floats x, floats y) { return _mm256_add_ps(x, y); }
    static SMALLBATCH_INLINE floats multiply(floats x, floats y) { return _mm256_mul_ps(x, y); }
    static SMALLBATCH_INLINE floats multiply_add(floats x, floats y, floats sum) { return _mm256_fmadd_ps(x, y, sum); }
    static SMALLBATCH_INLINE float sum(floats x) { return sum8(x); }
    static SMALLBATCH_INLINE __m128 sum_each(floats a, floats b, floats c, floats d) { return sum_each8(a, b, c, d); }

    template <class F>
    static SMALLBATCH_INLINE floats halves(F at) {
        return spread(_mm_cvtph_ps(four_halves(at, 0)));
    }
    static SMALLBATCH_INLINE floats spread(const float * p) { return spread(_mm_loadu_ps(p)); }
    static SMALLBATCH_INLINE floats spread(__m128 four) {
        return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(four), _mm256_setr_epi32(0, 0, 2, 2, 1, 1, 3, 3));
    }
    static SMALLBATCH_INLINE void scale_pairs(const uint8_t * bytes, float factor, floats & first, floats & second) {
        const __m256i eight = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(bytes)));
        const __m256 scaled = _mm256_mul_ps(_mm256_set1_ps(factor), _mm256_cvtepi32_ps(eight));
        first = _mm256_permutevar8x32_ps(scaled, _mm256_setr_epi32(0, 0, 4, 4, 2, 2, 6, 6));
        second = _mm256_permutevar8x32_ps(scaled, _mm256_setr_epi32(1, 1, 5, 5, 3, 3, 7, 7));
    }

    static SMALLBATCH_INLINE floats load_f32(const uint8_t * p) {
        return _mm256_loadu_ps(reinterpret_cast<const float *>(p));
    }
    static SMALLBATCH_INLINE floats load_f16(const uint8_t * p) { return _mm256_cvtph_ps(load16(p)); }
    static SMALLBATCH_INLINE floats load_bf16(const uint8_t * p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p)), 16));
    }
};

}  // namespace
}  // namespace sidecar::smallbatch
