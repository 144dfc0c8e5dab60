// AVX512-BF16: BF16 weights times rows rounded to BF16, two products a lane and instruction. Nothing but BF16 weights.
#include <immintrin.h>

#include "products.h"

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
    struct Sums {
        __m512 even[R], odd[R];
    };

    static SMALLBATCH_INLINE __m512bh load(const uint8_t * p) { return __m512bh(_mm512_loadu_si512(p)); }

    static SMALLBATCH_INLINE void add(const uint8_t * w, const uint8_t * x, size_t x_bytes, Sums & sums) {
        const __m512bh even = load(w), odd = load(w + 64);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            sums.even[r] = _mm512_dpbf16_ps(sums.even[r], load(x + r * x_bytes), even);
            sums.odd[r] = _mm512_dpbf16_ps(sums.odd[r], load(x + r * x_bytes + 64), odd);
        }
    }

    static void multiply(const Product & p) {
        const size_t n_steps = p.n_in / step, n_rest = p.n_in % step;
        for (size_t o = p.begin; o < p.end; ++o) {
            const uint8_t * w = p.weights + o * p.row_bytes;
            const uint8_t * x = p.x;
            Sums sums = {};
            for (size_t i = 0; i < n_steps; ++i) {
                _mm_prefetch(reinterpret_cast<const char *>(w + 2048), _MM_HINT_T0);
                _mm_prefetch(reinterpret_cast<const char *>(w + 2048 + 64), _MM_HINT_T0);
                add(w, x, p.x_bytes, sums);
                w += 2 * step;
                x += 2 * step;
            }
            if (n_rest != 0) {
                uint8_t rest[2 * step] = {};
                memcpy(rest, w, 2 * n_rest);
                add(rest, x, p.x_bytes, sums);
            }
            for (int r = 0; r < R; ++r) p.out[r * p.out_stride + o] = sum(_mm512_add_ps(sums.even[r], sums.odd[r]));
        }
    }

    static SMALLBATCH_INLINE float sum(__m512 x) {
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
        const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
        const __m128 eighth = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
        return _mm_cvtss_f32(_mm_add_ss(eighth, _mm_movehdup_ps(eighth)));
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
