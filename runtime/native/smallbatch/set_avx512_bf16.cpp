// AVX512-BF16: BF16 weights times rows rounded to BF16, two products a lane and instruction, which count subnormal numbers as 0.
// Nothing but BF16 weights.
#include "vectors_512.h"

namespace sidecar::smallbatch {
namespace {

constexpr size_t vector_values = 32, step = 2 * vector_values;

// A prepared row of BF16, rounded to nearest even, with zeros up to a whole step.
struct Rounded {
    static size_t n_bytes(size_t n_in) { return round_up(2 * round_up(n_in, step), 64); }
    static void prepare(const float * x, size_t n_in, uint8_t * prepared) {
        memset(prepared, 0, n_bytes(n_in));
        for (size_t i = 0; i < n_in; i += 16) {
            const __mmask16 mask = n_in - i < 16 ? __mmask16((1u << (n_in - i)) - 1) : __mmask16(0xffff);
            const __m256i rounded = __m256i(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + i)));
            _mm256_mask_storeu_epi16(prepared + 2 * i, mask, rounded);
        }
    }
};

template <int R>
struct Bf16Product {
    static constexpr int N = n_streams<Vectors512, 2 * R>();

    static SMALLBATCH_INLINE __m512bh load(const uint8_t * p) { return __m512bh(_mm512_loadu_si512(p)); }

    static SMALLBATCH_INLINE void add(const uint8_t * w, const uint8_t * x, size_t x_bytes, __m512 * evens,
                                      __m512 * odds) {
        const __m512bh even = load(w), odd = load(w + 64);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            evens[r] = _mm512_dpbf16_ps(evens[r], load(x + r * x_bytes), even);
            odds[r] = _mm512_dpbf16_ps(odds[r], load(x + r * x_bytes + 64), odd);
        }
    }

    static void multiply(const Product & p) {
        asking_ahead<true, R>(p, [&](auto ahead) SMALLBATCH_LAMBDA { multiply_asking<decltype(ahead)>(p); });
    }

    template <class Ahead>
    static SMALLBATCH_INLINE void multiply_asking(const Product & p) {
        in_streams<N>(p, [&](const size_t(&outputs)[N]) SMALLBATCH_LAMBDA {
            __m512 evens[N * R] = {}, odds[N * R] = {};
            each_unit<Vectors512, Type::bf16, step, 2 * step, 1, Ahead>(
                p, outputs, [&](size_t, const uint8_t * x, int j, const uint8_t * const * w) SMALLBATCH_LAMBDA {
                    add(w[0], x, p.x_bytes, evens + j * R, odds + j * R);
                });
#pragma GCC unroll 16
            for (int i = 0; i < N * R; ++i) evens[i] = _mm512_add_ps(evens[i], odds[i]);
            store_sums<Vectors512, R>(p, outputs, evens);
        });
    }
};

constexpr Kernel kernels[] = {
    {Type::bf16,
     {&Rounded::n_bytes, &Rounded::prepare},
     {&Bf16Product<1>::multiply, &Bf16Product<2>::multiply, &Bf16Product<3>::multiply, &Bf16Product<4>::multiply,
      &Bf16Product<5>::multiply, &Bf16Product<6>::multiply, &Bf16Product<7>::multiply, &Bf16Product<8>::multiply}}};

}  // namespace

const Kernels avx512_bf16_kernels = {kernels, sizeof kernels / sizeof kernels[0]};

}  // namespace sidecar::smallbatch
