#include "kernels.h"

#include <cstring>

#include "sets.h"

#if defined(SMALLBATCH_NEON_DOTPROD) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(SMALLBATCH_NEON_I8MM) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace sidecar::smallbatch {

#ifdef SMALLBATCH_NEON_DOTPROD
static bool has_dotprod() {
#ifdef __linux__
    return (getauxval(AT_HWCAP) & (1UL << 20)) != 0;  // HWCAP_ASIMDDP
#else
    return true;  // every Apple processor
#endif
}
#endif

#ifdef SMALLBATCH_NEON_I8MM
static bool has_i8mm() {
#ifdef __linux__
    return (getauxval(AT_HWCAP2) & (1UL << 13)) != 0;  // HWCAP2_I8MM
#else
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, nullptr, 0) == 0 && has != 0;
#endif
}
#endif

bool second_level_first() {
#if defined(__x86_64__)
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}

const KernelSet * kernel_sets(size_t & n_sets) {
    static const KernelSet sets[] = {
#ifdef SMALLBATCH_AVX512_BF16
        {"avx512-bf16",
         [] {
             return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
         },
         avx512_bf16_kernels.first, avx512_bf16_kernels.n},
#endif
#ifdef SMALLBATCH_AVX512_VNNI
        {"avx512-vnni",
         [] {
             return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
         },
         avx512_vnni_kernels.first, avx512_vnni_kernels.n},
#endif
#ifdef SMALLBATCH_AVX_VNNI
        {"avx-vnni",
         [] {
             return __builtin_cpu_supports("avxvnni") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
         },
         avx_vnni_kernels.first, avx_vnni_kernels.n},
#endif
#ifdef SMALLBATCH_AVX2
        {"avx2",
         [] {
             return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
         },
         avx2_kernels.first, avx2_kernels.n},
#endif
#ifdef SMALLBATCH_NEON_I8MM
        {"neon-i8mm", has_i8mm, neon_i8mm_kernels.first, neon_i8mm_kernels.n},
#endif
#ifdef SMALLBATCH_NEON_DOTPROD
        {"neon-dotprod", has_dotprod, neon_dotprod_kernels.first, neon_dotprod_kernels.n},
#endif
        {"portable", [] { return true; }, portable_kernels.first, portable_kernels.n},
    };
    n_sets = sizeof sets / sizeof sets[0];
    return sets;
}

const Kernel * find_kernel(Type type, const char * set_name) {
    size_t n_sets;
    const KernelSet * sets = kernel_sets(n_sets);
    for (const KernelSet * set = sets; set != sets + n_sets; ++set) {
        if (!set->runs_here() || (set_name != nullptr && std::strcmp(set->name, set_name) != 0)) continue;
        for (const Kernel * kernel = set->kernels; kernel != set->kernels + set->n_kernels; ++kernel) {
            if (kernel->type == type) return kernel;
        }
    }
    return nullptr;
}

const char * set_of(const Kernel & kernel) {
    size_t n_sets;
    const KernelSet * set = kernel_sets(n_sets);
    while (&kernel < set->kernels || &kernel >= set->kernels + set->n_kernels) ++set;
    return set->name;
}

}  // namespace sidecar::smallbatch
