// Multiplies by one kernel set, or says which sets there are and of which types: built for another processor and run under an emulator by
// foreign_kernels.py. Arguments: set, type, outputs, bytes of a row of weights, values in, rows; weights and rows of F32 on
// standard input, (rows, outputs) of F32 on standard output, once for each number of rows from 1 up.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.h"

using namespace sidecar::smallbatch;

int main(int argc, char ** argv) {
    if (argc == 1) {
        size_t n_sets;
        const KernelSet * sets = kernel_sets(n_sets);
        for (size_t i = 0; i < n_sets; ++i) {
            if (!sets[i].runs_here()) continue;
            std::printf("%s", sets[i].name);
            for (size_t k = 0; k < sets[i].n_kernels; ++k) std::printf(" %d", int(sets[i].kernels[k].type));
            std::printf("\n");
        }
        return 0;
    }
    const auto number = [argv](int i) { return size_t(std::strtoull(argv[i], nullptr, 10)); };
    const Kernel * kernel = argc == 7 ? find_kernel(Type(number(2)), argv[1]) : nullptr;
    if (kernel == nullptr) return 1;
    const size_t n_out = number(3), row_bytes = number(4), n_in = number(5), n_rows = number(6);
    std::vector<uint8_t> weights(n_out * row_bytes);
    std::vector<float> x(n_rows * n_in), out(n_rows * n_out);
    if (std::fread(weights.data(), 1, weights.size(), stdin) != weights.size() ||
        std::fread(x.data(), 4, x.size(), stdin) != x.size()) {
        return 1;
    }
    const size_t x_bytes = kernel->format.n_bytes(n_in);
    uint8_t * rows = static_cast<uint8_t *>(std::aligned_alloc(64, n_rows * x_bytes));
    for (size_t r = 0; r < n_rows; ++r) kernel->format.prepare(x.data() + r * n_in, n_in, rows + r * x_bytes);
    for (size_t n = 1; n <= n_rows; ++n) {
        kernel->multiply[n - 1](
            {weights.data(), row_bytes, n_in, rows, x_bytes, out.data(), n_out, int(n), 0, n_out});
        std::fwrite(out.data(), 4, n * n_out, stdout);
    }
    std::free(rows);
    return 0;
}
