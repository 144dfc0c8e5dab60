// What the x86 sets have in common: AVX2, FMA and F16C on 16 and 32 bytes, whatever the width of their vectors.
#pragma once

#include <immintrin.h>

#include "products.h"

namespace sidecar::smallbatch {
namespace {

struct VectorsX86 {
    static constexpr bool one_pass = true;

    using floats8 = __m256;
    template <int64_t n>
    static constexpr int64_t each = n * 0x0101010101010101;  // the same in every byte

    static constexpr bool asks_either(Type) { return false; }

    template <size_t n_bytes, class Ahead>
    static SMALLBATCH_INLINE void prefetch(const uint8_t * p) {
        for (size_t i = 0; i < n_bytes; i += 64)
            _mm_prefetch(reinterpret_cast<const char *>(p + i + Ahead::n_bytes), Ahead::into_second ? _MM_HINT_T1 : _MM_HINT_T0);
    }

    static SMALLBATCH_INLINE __m128i load16(const uint8_t * p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    }
    static SMALLBATCH_INLINE __m256i load32(const uint8_t * p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    }

    static SMALLBATCH_INLINE floats8 load8(const float * p) { return _mm256_loadu_ps(p); }
    static SMALLBATCH_INLINE floats8 multiply_add8(floats8 x, floats8 y, floats8 sum) {
        return _mm256_fmadd_ps(x, y, sum);
    }
    static SMALLBATCH_INLINE float sum8(floats8 x) {
        const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
    }
    // The sums over the lanes of four vectors, added as `sum8` adds them.
    static SMALLBATCH_INLINE __m128 sum_each8(floats8 a, floats8 b, floats8 c, floats8 d) {
        const __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
        const __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
        const __m256 sums = _mm256_add_ps(_mm256_unpacklo_ps(ab, cd), _mm256_unpackhi_ps(ab, cd));  // a c a c, b d b d
        const __m128 ac = _mm256_castps256_ps128(sums), bd = _mm256_extractf128_ps(sums, 1);
        return _mm_add_ps(_mm_unpacklo_ps(ac, bd), _mm_unpackhi_ps(ac, bd));
    }
    template <class EightInts>
    static SMALLBATCH_INLINE void store_low_bytes(uint8_t * p, const EightInts & x) {
        const __m256i fours = _mm256_shuffle_epi8(__m256i(x), _mm256_set1_epi32(0x0c080400));
        const __m128i eight = _mm_unpacklo_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i *>(p), eight);
    }
    static SMALLBATCH_INLINE __m128 subtract4(__m128 x, __m128 y) { return _mm_sub_ps(x, y); }
    static SMALLBATCH_INLINE void store4(float * p, __m128 x) { _mm_storeu_ps(p, x); }

    static SMALLBATCH_INLINE uint64_t load_half(const uint8_t * p) {
        uint16_t value;
        memcpy(&value, p, sizeof value);
        return value;
    }
    static SMALLBATCH_INLINE float half(const uint8_t * p) { return _cvtsh_ss(uint16_t(load_half(p))); }
    // The halves of four blocks, from `first` on.
    template <class F>
    static SMALLBATCH_INLINE __m128i four_halves(F at, int first) {
        return _mm_cvtsi64_si128(int64_t(load_half(at(first)) | load_half(at(first + 1)) << 16 |
                                         load_half(at(first + 2)) << 32 | load_half(at(first + 3)) << 48));
    }
};

}  // namespace
}  // namespace sidecar::smallbatch
