// AVX2 without VNNI: the dot product goes through 16 bits, |weights| times x with the weights' signs, which cannot
// saturate (128 * 127 * 2 < 2^15).
#include "vectors_256.h"

namespace sidecar::smallbatch {
namespace {

struct Avx2 : Vectors256 {
    static constexpr uint8_t x_offset = 0;

    static SMALLBATCH_INLINE ints start(bytes, bytes) { return _mm256_setzero_si256(); }
    static SMALLBATCH_INLINE ints add_ints(ints x, ints) { return x; }
    static SMALLBATCH_INLINE ints dot(ints sum, const uint8_t * x, bytes w) {
        const __m256i row = _mm256_load_si256(reinterpret_cast<const __m256i *>(x));
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(row, w));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
};

}  // namespace

const Kernels avx2_kernels = {All<Avx2>::kernels, All<Avx2>::n_kernels};

}  // namespace sidecar::smallbatch
