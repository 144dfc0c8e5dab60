// NEON with the dot product of Armv8.2.
#include "vectors_neon.h"

namespace sidecar::smallbatch {

const Kernels neon_dotprod_kernels = {All<Neon>::kernels, All<Neon>::n_kernels};

}  // namespace sidecar::smallbatch
