// AVX2 without VNNI: the dot product goes through 16 bits, which cannot saturate: codes are below 64, and of signed weights
// it takes |weights| times x with the weights' signs (63 * 127 * 2 and 128 * 127 * 2 are below 2^15).
#include "vectors_256.h"

namespace sidecar::smallbatch {
namespace {

struct Avx2 : Vectors256 {
    static constexpr int signed_offset = 0;

    static SMALLBATCH_INLINE bytes from_signed(bytes w) { return w; }
    static SMALLBATCH_INLINE ints dot(ints sum, const uint8_t * x, bytes codes) {
        return add_pairs(sum, _mm256_maddubs_epi16(codes, load_ints(x)));
    }
    static SMALLBATCH_INLINE ints dot_signed(ints sum, const uint8_t * x, bytes w) {
        return add_pairs(sum, _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(load_ints(x), w)));
    }
    static SMALLBATCH_INLINE ints add_pairs(ints sum, __m256i pairs) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
};

}  // namespace

const Kernels avx2_kernels = {All<Avx2>::kernels, All<Avx2>::n_kernels};

}  // namespace sidecar::smallbatch
