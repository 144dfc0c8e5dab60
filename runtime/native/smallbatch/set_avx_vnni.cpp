// AVX-VNNI (256 bits; Alder Lake, Zen 5 and later): sums of four products of unsigned and signed bytes.
#include "vectors_256.h"

namespace sidecar::smallbatch {
namespace {

struct AvxVnni : Vectors256 {
    static constexpr int signed_offset = 128;

    static SMALLBATCH_INLINE bytes from_signed(bytes w) { return _mm256_xor_si256(w, _mm256_set1_epi8(char(128))); }
    static SMALLBATCH_INLINE ints dot(ints sum, const uint8_t * x, bytes codes) {
        return _mm256_dpbusd_avx_epi32(sum, codes, load_ints(x));
    }
    static SMALLBATCH_INLINE ints dot_signed(ints sum, const uint8_t * x, bytes w) { return dot(sum, x, w); }
};

}  // namespace

const Kernels avx_vnni_kernels = {All<AvxVnni>::kernels, All<AvxVnni>::n_kernels};

}  // namespace sidecar::smallbatch
