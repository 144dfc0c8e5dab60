// What each set_*.cpp hands out: data alone, so that none of its code runs before the processor has been asked.
#pragma once

#include "kernels.h"

namespace sidecar::smallbatch {

struct Kernels {
    const Kernel * first;
    size_t n;
};

extern const Kernels avx512_bf16_kernels, avx512_vnni_kernels, avx_vnni_kernels, avx2_kernels, neon_i8mm_kernels,
    neon_dotprod_kernels, portable_kernels;

}  // namespace sidecar::smallbatch
