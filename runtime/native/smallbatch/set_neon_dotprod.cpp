// NEON with the dot product of Armv8.2.
#include "row_ops.h"
#include "vectors_neon.h"

namespace sidecar::smallbatch {

const Kernels neon_dotprod_kernels = {All<Neon>::kernels, All<Neon>::n_kernels, RowVectors::all};

}  // namespace sidecar::smallbatch
