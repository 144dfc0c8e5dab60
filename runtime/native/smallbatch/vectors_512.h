// Vector operations of AVX512 (F, BW, DQ, VL): eight blocks at a time. All but the dot product, which the sets add.
#pragma once

#include "vectors_x86.h"

namespace sidecar::smallbatch {
namespace {

struct Vectors512 : VectorsX86 {
    static constexpr int lanes = 16, group = 4;
    static constexpr int n_sums = 16;  // kept in registers

    using bytes = __m512i;
    using ints = __m512i;
    using floats = __m512;

    template <class F>
    static SMALLBATCH_INLINE bytes gather(F at) {
        __m512i result = _mm512_castsi128_si512(load16(at(0)));
        result = _mm512_inserti32x4(result, load16(at(1)), 1);
        result = _mm512_inserti32x4(result, load16(at(2)), 2);
        return _mm512_inserti32x4(result, load16(at(3)), 3);
    }
    static SMALLBATCH_INLINE bytes load_bytes(const uint8_t * p) { return _mm512_loadu_si512(p); }
    // Taken from all n_bytes that there are, at once.
    template <int n_bytes, class F>
    static SMALLBATCH_INLINE void words(const uint8_t * base, F at, bytes (&v)[4]) {
        const bytes first = load_bytes(base);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const auto word = [=](int b) { return at(b) / 8 + i; };
            const bytes order =
                _mm512_setr_epi64(word(0), word(4), word(1), word(5), word(2), word(6), word(3), word(7));
            v[i] = n_bytes == 64 ? _mm512_permutexvar_epi64(order, first)
                                 : _mm512_permutex2var_epi64(first, order, load_bytes(base + n_bytes - 64));
        }
    }
    template <class F>
    static SMALLBATCH_INLINE void gather32(F at, bytes & first, bytes & second) {
        const __m512i x = _mm512_inserti64x4(_mm512_castsi256_si512(load32(at(0))), load32(at(1)), 1);
        const __m512i y = _mm512_inserti64x4(_mm512_castsi256_si512(load32(at(2))), load32(at(3)), 1);
        first = _mm512_shuffle_i64x2(x, y, _MM_SHUFFLE(2, 0, 2, 0));
        second = _mm512_shuffle_i64x2(x, y, _MM_SHUFFLE(3, 1, 3, 1));
    }
    static SMALLBATCH_INLINE bytes fill16(const uint8_t * p) { return _mm512_broadcast_i32x4(load16(p)); }
    static SMALLBATCH_INLINE bytes fill8(const uint8_t * p) {
        return _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
    }
    static SMALLBATCH_INLINE bytes interleave_low(bytes x, bytes y) { return _mm512_unpacklo_epi64(x, y); }
    static SMALLBATCH_INLINE bytes interleave_high(bytes x, bytes y) { return _mm512_unpackhi_epi64(x, y); }
    static SMALLBATCH_INLINE bytes low_nibbles(bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
    static SMALLBATCH_INLINE bytes high_nibbles(bytes x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
    template <class F>
    static SMALLBATCH_INLINE bytes shift_right(bytes x, F n_bits) {
        const int n0 = n_bits(0), n1 = n_bits(1), n2 = n_bits(2), n3 = n_bits(3);
        const int n4 = n_bits(4), n5 = n_bits(5), n6 = n_bits(6), n7 = n_bits(7);
        return _mm512_srlv_epi32(x, _mm512_setr_epi32(n0, n0, n4, n4, n1, n1, n5, n5, n2, n2, n6, n6, n3, n3, n7, n7));
    }
    template <int mask, class F>
    static SMALLBATCH_INLINE bytes join_above(bytes x, bytes above, F n_bits) {
        const auto n = [=](int b) { return (n_bits(b) + 60) % 64; };  // rotated right, they lie above the nibble
        const bytes turned =
            _mm512_rorv_epi64(above, _mm512_setr_epi64(n(0), n(4), n(1), n(5), n(2), n(6), n(3), n(7)));
        return _mm512_ternarylogic_epi64(x, turned, _mm512_set1_epi8(mask << 4), 0xf8);  // x | (turned & mask)
    }
    static SMALLBATCH_INLINE bytes join_bits(bytes x, bytes words, int byte, int8_t value) {
        const bytes order =
            _mm512_add_epi8(_mm512_set1_epi8(char(byte)), _mm512_broadcast_i32x4(_mm_set_epi64x(each<8>, 0)));
        const __mmask64 is_set = _mm512_test_epi8_mask(_mm512_shuffle_epi8(words, order),
                                                       _mm512_set1_epi64(int64_t(0x8040201008040201)));
        return _mm512_mask_add_epi8(x, is_set, x, _mm512_set1_epi8(value));
    }
    static SMALLBATCH_INLINE bytes look_up(bytes table, bytes x) { return _mm512_shuffle_epi8(table, x); }

    static SMALLBATCH_INLINE ints no_ints() { return _mm512_setzero_si512(); }
    static SMALLBATCH_INLINE bytes fill(uint8_t n) { return _mm512_set1_epi8(char(n)); }
    static SMALLBATCH_INLINE ints negative(ints x) { return _mm512_sub_epi32(_mm512_setzero_si512(), x); }
    static SMALLBATCH_INLINE void store_ints(uint8_t * p, ints x) { _mm512_store_si512(p, x); }
    static SMALLBATCH_INLINE ints load_ints(const uint8_t * p) { return _mm512_load_si512(p); }
    static SMALLBATCH_INLINE floats masked(floats x, ints mask) { return _mm512_and_ps(x, _mm512_castsi512_ps(mask)); }
    static SMALLBATCH_INLINE floats to_floats(ints x) { return _mm512_cvtepi32_ps(x); }
    static SMALLBATCH_INLINE floats load(const float * p) { return _mm512_load_ps(p); }
    static SMALLBATCH_INLINE floats add(floats x, floats y) { return _mm512_add_ps(x, y); }
    static SMALLBATCH_INLINE floats multiply(floats x, floats y) { return _mm512_mul_ps(x, y); }
    static SMALLBATCH_INLINE floats multiply_add(floats x, floats y, floats sum) { return _mm512_fmadd_ps(x, y, sum); }
    static SMALLBATCH_INLINE float sum(floats x) { return sum8(halved(x)); }
    // The sums over the lanes of four vectors, added as `sum` adds them.
    static SMALLBATCH_INLINE __m128 sum_each(floats a, floats b, floats c, floats d) {
        return sum_each8(halved(a), halved(b), halved(c), halved(d));
    }
    static SMALLBATCH_INLINE floats8 halved(floats x) {
        return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    }
    template <class F>
    static SMALLBATCH_INLINE floats halves(F at) {
        return spread(_mm256_cvtph_ps(_mm_unpacklo_epi64(four_halves(at, 0), four_halves(at, 4))));
    }
    static SMALLBATCH_INLINE void scale_super_block(uint64_t scales, uint64_t minima, const uint8_t * two_halves,
                                                    floats * scale, floats8 & minimum) {
        const __m512 bytes = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_set_epi64x(int64_t(minima), int64_t(scales))));
        const __m512 factors = _mm512_castps128_ps512(_mm_cvtph_ps(_mm_cvtsi32_si128(int32_t(load_u32(two_halves)))));
        const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        const __m512 scaled = _mm512_mul_ps(_mm512_permutexvar_ps(which, factors), bytes);
        scale[0] = _mm512_permutexvar_ps(block_of_lane(), scaled);
        minimum = _mm512_extractf32x8_ps(scaled, 1);
    }
    static SMALLBATCH_INLINE __m512i block_of_lane() {
        return _mm512_setr_epi32(0, 0, 4, 4, 1, 1, 5, 5, 2, 2, 6, 6, 3, 3, 7, 7);
    }
    static SMALLBATCH_INLINE floats spread(const float * p) { return spread(_mm256_loadu_ps(p)); }
    static SMALLBATCH_INLINE floats spread(__m256 eight) {
        return _mm512_permutexvar_ps(block_of_lane(), _mm512_castps256_ps512(eight));
    }
    static SMALLBATCH_INLINE void scale_pairs(const uint8_t * bytes, float factor, floats & first, floats & second) {
        const __m512 scaled =
            _mm512_mul_ps(_mm512_set1_ps(factor), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(bytes))));
        const __m512i order = _mm512_setr_epi32(0, 0, 8, 8, 2, 2, 10, 10, 4, 4, 12, 12, 6, 6, 14, 14);
        first = _mm512_permutexvar_ps(order, scaled);
        second = _mm512_permutexvar_ps(_mm512_add_epi32(order, _mm512_set1_epi32(1)), scaled);
    }

    static SMALLBATCH_INLINE floats load_f32(const uint8_t * p) { return _mm512_loadu_ps(p); }
    static SMALLBATCH_INLINE floats load_f16(const uint8_t * p) { return _mm512_cvtph_ps(load32(p)); }
    static SMALLBATCH_INLINE floats load_bf16(const uint8_t * p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load32(p)), 16));
    }
};

}  // namespace
}  // namespace sidecar::smallbatch
