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

    static SMALLBATCH_INLINE bytes load_bytes(const uint8_t * p) { return load32(p); }
    template <class F>
    static SMALLBATCH_INLINE bytes gather(F at) {
        const uint8_t *first = at(0), *second = at(1);
        if (__builtin_constant_p(first == second) && first == second) return fill16(first);
        return _mm256_inserti128_si256(_mm256_castsi128_si256(load16(first)), load16(second), 1);
    }
    template <int n_bytes, class F>
    static SMALLBATCH_INLINE void words(const uint8_t * base, F at, bytes (&v)[4]) {
        gather_words<Vectors256>(base, at, v);
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
    template <int mask, class F>
    static SMALLBATCH_INLINE bytes join_above(bytes x, bytes above, F n_bits) {
        const bytes bits = _mm256_and_si256(shift_right(above, n_bits), _mm256_set1_epi8(mask));
        return _mm256_or_si256(x, _mm256_slli_epi16(bits, 4));
    }
    static SMALLBATCH_INLINE bytes join_bits(bytes x, bytes words, int byte, int8_t value) {
        const __m256i order = _mm256_add_epi8(_mm256_set1_epi8(char(byte)), _mm256_set_epi64x(each<8>, 0, each<8>, 0));
        const __m256i one_bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
        const __m256i is_set =
            _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(words, order), one_bit), one_bit);
        return _mm256_or_si256(x, _mm256_and_si256(is_set, _mm256_set1_epi8(value)));
    }
    static SMALLBATCH_INLINE bytes look_up(bytes table, bytes x) { return _mm256_shuffle_epi8(table, x); }

    static SMALLBATCH_INLINE ints no_ints() { return _mm256_setzero_si256(); }
    static SMALLBATCH_INLINE bytes fill(uint8_t n) { return _mm256_set1_epi8(char(n)); }
    static SMALLBATCH_INLINE ints negative(ints x) { return _mm256_sub_epi32(_mm256_setzero_si256(), x); }
    static SMALLBATCH_INLINE void store_ints(uint8_t * p, ints x) {
        _mm256_store_si256(reinterpret_cast<__m256i *>(p), x);
    }
    static SMALLBATCH_INLINE ints load_ints(const uint8_t * p) {
        return _mm256_load_si256(reinterpret_cast<const __m256i *>(p));
    }
    static SMALLBATCH_INLINE floats masked(floats x, ints mask) { return _mm256_and_ps(x, _mm256_castsi256_ps(mask)); }
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
    static SMALLBATCH_INLINE void scale_super_block(uint64_t scales, uint64_t minima, const uint8_t * two_halves,
                                                    floats * scale, floats8 & minimum) {
        const __m256 scaled = scale_bytes(scales, half(two_halves));
        scale[0] = spread(_mm256_castps256_ps128(scaled));
        scale[1] = spread(_mm256_extractf128_ps(scaled, 1));
        minimum = scale_bytes(minima, half(two_halves + 2));
    }
    static SMALLBATCH_INLINE __m256 scale_bytes(uint64_t bytes, float factor) {
        const __m256i eight = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(bytes)));
        return _mm256_mul_ps(_mm256_set1_ps(factor), _mm256_cvtepi32_ps(eight));
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
