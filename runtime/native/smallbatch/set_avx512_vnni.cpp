// AVX512-VNNI: sums of four products of unsigned and signed bytes.
#include "vectors_512.h"

namespace sidecar::smallbatch {
namespace {

struct Avx512Vnni : Vectors512 {
    static constexpr int signed_offset = 128;
    static constexpr bool asks_either(Type type) { return type == Type::q8_0; }  // AMD's have AVX512-BF16, too

    static SMALLBATCH_INLINE bytes from_signed(bytes w) { return _mm512_xor_si512(w, _mm512_set1_epi8(char(128))); }
    static SMALLBATCH_INLINE ints dot(ints sum, const uint8_t * x, bytes codes) {
        return _mm512_dpbusd_epi32(sum, codes, _mm512_load_si512(x));
    }
    static SMALLBATCH_INLINE ints dot_signed(ints sum, const uint8_t * x, bytes w) { return dot(sum, x, w); }
};

}  // namespace

const Kernels avx512_vnni_kernels = {All<Avx512Vnni>::kernels, All<Avx512Vnni>::n_kernels};

}  // namespace sidecar::smallbatch
