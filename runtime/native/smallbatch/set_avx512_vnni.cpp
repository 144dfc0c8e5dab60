// AVX512-VNNI: sums of four products of unsigned and signed bytes.
#include "vectors_512.h"

namespace sidecar::smallbatch {
namespace {

struct Avx512Vnni : Vectors512 {
    static constexpr uint8_t x_offset = 128;

    static SMALLBATCH_INLINE ints offset() { return _mm512_set1_epi8(char(x_offset)); }
    static SMALLBATCH_INLINE ints start(bytes a, bytes b) {
        const ints sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), offset(), a);
        return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_dpbusd_epi32(sum, offset(), b));
    }
    static SMALLBATCH_INLINE ints add_ints(ints x, ints y) { return _mm512_add_epi32(x, y); }
    static SMALLBATCH_INLINE ints dot(ints sum, const uint8_t * x, bytes w) {
        return _mm512_dpbusd_epi32(sum, _mm512_load_si512(x), w);
    }
};

}  // namespace

const Kernels avx512_vnni_kernels = {All<Avx512Vnni>::kernels, All<Avx512Vnni>::n_kernels};

}  // namespace sidecar::smallbatch
