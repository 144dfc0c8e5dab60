// AVX-VNNI (256 bits; Alder Lake, Zen 5 and later): sums of four products of unsigned and signed bytes.
#include "vectors_256.h"

namespace sidecar::smallbatch {
namespace {

struct AvxVnni : Vectors256 {
    static constexpr uint8_t x_offset = 128;

    static SMALLBATCH_INLINE ints offset() { return _mm256_set1_epi8(char(x_offset)); }
    static SMALLBATCH_INLINE ints start(bytes a, bytes b) {
        const ints sum = _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), offset(), a);
        return _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_dpbusd_avx_epi32(sum, offset(), b));
    }
    static SMALLBATCH_INLINE ints add_ints(ints x, ints y) { return _mm256_add_epi32(x, y); }
    static SMALLBATCH_INLINE ints dot(ints sum, const uint8_t * x, bytes w) {
        return _mm256_dpbusd_avx_epi32(sum, _mm256_load_si256(reinterpret_cast<const __m256i *>(x)), w);
    }
};

}  // namespace

const Kernels avx_vnni_kernels = {All<AvxVnni>::kernels, All<AvxVnni>::n_kernels};

}  // namespace sidecar::smallbatch
