// NEON with the matrix products of bytes of Armv8.6 (Apple M2, Neoverse V1, Snapdragon X and later): quantised weights alone.
#include "vectors_neon.h"

namespace sidecar::smallbatch {
namespace {

// The product for a pair of outputs A, B and a pair of rows r, s at a time: one instruction multiplies eight bytes of each and adds
// to the sums A r, A s, B r, B s. The last of an odd number of rows is paired with itself, so that a row's sum has the same terms in
// the same order whatever is beside it.
template <class I, class W, int R>
struct PairedProduct {
    using Unit = typename W::template Unit<I>;
    using Rows = RowsFor<I, W>;
    static constexpr size_t vector_bytes = Rows::vector_bytes, unit_bytes = Rows::pack_bytes * Unit::n_packs;  // of a row of x
    static constexpr int N = W::has_minima ? 2 : 4, n_pairs = (R + 1) / 2;

    // The first or the second block of both outputs, as signed bytes, and its scales.
    struct Blocks {
        int8x16_t v[4];
        float32x4_t scale, scale_16;
    };

    static SMALLBATCH_INLINE int8x16_t values(uint8x16_t v) {
        const int8x16_t codes = vreinterpretq_s8_u8(v);
        if constexpr (W::is_signed || W::has_minima) {
            return codes;
        } else {
            return vsubq_s8(codes, vdupq_n_s8(W::offset));
        }
    }

    static SMALLBATCH_INLINE int8x16_t first_of(int8x16_t x, int8x16_t y) {
        return vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(x), vreinterpretq_s64_s8(y)));
    }
    static SMALLBATCH_INLINE int8x16_t second_of(int8x16_t x, int8x16_t y) {
        return vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(x), vreinterpretq_s64_s8(y)));
    }
    static SMALLBATCH_INLINE float32x4_t first_of(float32x4_t x, float32x4_t y) {
        return vcombine_f32(vget_low_f32(x), vget_low_f32(y));
    }
    static SMALLBATCH_INLINE float32x4_t second_of(float32x4_t x, float32x4_t y) {
        return vcombine_f32(vget_high_f32(x), vget_high_f32(y));
    }

    // Adds a block of both outputs, times that of both rows.
    static SMALLBATCH_INLINE float32x4_t add_block(const Blocks & w, const int8x16_t (&x)[4], float32x4_t scales,
                                                   float32x4_t products) {
        const int32x4_t first = vmmlaq_s32(vmmlaq_s32(I::no_ints(), w.v[0], x[0]), w.v[1], x[1]);
        if constexpr (W::two_scales) {
            const int32x4_t second = vmmlaq_s32(vmmlaq_s32(I::no_ints(), w.v[2], x[2]), w.v[3], x[3]);
            const float32x4_t scaled =
                I::multiply_add(I::to_floats(second), w.scale_16, I::multiply(I::to_floats(first), w.scale));
            return I::multiply_add(scaled, scales, products);
        } else {
            const int32x4_t dot = vmmlaq_s32(vmmlaq_s32(first, w.v[2], x[2]), w.v[3], x[3]);
            return I::multiply_add(I::to_floats(dot), I::multiply(w.scale, scales), products);
        }
    }

    // Adds one unit of both outputs' weights: products of the pairs of rows, and minima of A's rows and then B's.
    static SMALLBATCH_INLINE void add(const uint8_t * w_a, const uint8_t * w_b, const uint8_t * x, const float * x_sums,
                                      size_t x_bytes, typename I::floats * products, typename I::floats8 * minima) {
        const Unit a{w_a}, b{w_b};
        if constexpr (W::has_minima) {
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const auto sums =
                    I::load8(reinterpret_cast<const float *>(reinterpret_cast<const uint8_t *>(x_sums) + r * x_bytes));
                minima[r] = I::multiply_add8(a.minimum, sums, minima[r]);
                minima[R + r] = I::multiply_add8(b.minimum, sums, minima[R + r]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < Unit::n_packs; ++i) {
            const Pack<I> pack_a = a.pack(i), pack_b = b.pack(i);
            Blocks first, second;
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) {
                const int8x16_t v_a = values(pack_a.v[v]), v_b = values(pack_b.v[v]);
                first.v[v] = first_of(v_a, v_b);
                second.v[v] = second_of(v_a, v_b);
            }
            first.scale = first_of(pack_a.scale, pack_b.scale);
            second.scale = second_of(pack_a.scale, pack_b.scale);
            first.scale_16 = first_of(pack_a.scale_16, pack_b.scale_16);
            second.scale_16 = second_of(pack_a.scale_16, pack_b.scale_16);
#pragma GCC unroll 4
            for (int pair = 0; pair < n_pairs; ++pair) {
                const uint8_t * r = x + i * Rows::pack_bytes + 2 * pair * x_bytes;
                const uint8_t * s = 2 * pair + 1 < R ? r + x_bytes : r;
                int8x16_t x_first[4], x_second[4];
#pragma GCC unroll 4
                for (int v = 0; v < 4; ++v) {
                    const int8x16_t x_r = vreinterpretq_s8_u8(vld1q_u8(r + v * vector_bytes));
                    const int8x16_t x_s = vreinterpretq_s8_u8(vld1q_u8(s + v * vector_bytes));
                    x_first[v] = first_of(x_r, x_s);
                    x_second[v] = second_of(x_r, x_s);
                }
                const auto scales_r = I::load(reinterpret_cast<const float *>(r + Rows::scales_at));
                const auto scales_s = I::load(reinterpret_cast<const float *>(s + Rows::scales_at));
                products[pair] = add_block(first, x_first, vzip1q_f32(scales_r, scales_s), products[pair]);
                products[pair] = add_block(second, x_second, vzip2q_f32(scales_r, scales_s), products[pair]);
            }
        }
    }

    static void multiply(const Product & p) {
        const float * x_sums = reinterpret_cast<const float *>(p.x + Rows::sums_offset(p.n_in));
        in_streams<N>(p, [&](const size_t(&outputs)[N]) SMALLBATCH_LAMBDA {
            typename I::floats products[N / 2 * n_pairs] = {};
            typename I::floats8 minima[W::has_minima ? N * R : 1] = {};
            each_unit<I, W::type, Unit::n_blocks, unit_bytes, 2>(
                p, outputs, [&](size_t u, const uint8_t * x, int j, const uint8_t * const * w) SMALLBATCH_LAMBDA {
                    add(w[0], w[1], x, x_sums + 8 * u, p.x_bytes, products + j / 2 * n_pairs, minima);
                });
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) {
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    float sum = products[j / 2 * n_pairs + r / 2][j % 2 * 2 + r % 2];
                    if constexpr (W::has_minima) sum -= I::sum8(minima[j * R + r]);
                    p.out[r * p.out_stride + outputs[j]] = sum;
                }
            }
        });
    }
};

template <class W>
constexpr Kernel paired() {
    return kernel_for<PairedProduct, RowsFor<Neon, W>, Neon, W>();
}

constexpr Kernel kernels[] = {paired<Q8_0>(), paired<Q4_0>(), paired<Q5_0>(),   paired<Q4_K>(),
                              paired<Q5_K>(), paired<Q6_K>(), paired<IQ4_NL>(), paired<IQ4_XS>()};

}  // namespace

const Kernels neon_i8mm_kernels = {kernels, sizeof kernels / sizeof kernels[0]};

}  // namespace sidecar::smallbatch
