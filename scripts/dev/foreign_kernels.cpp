// Runs one kernel set: built for another processor and run in an emulator by foreign_kernels.py. F32 on standard input and output.
//     sets                                                     each set, its types
//     multiply SET TYPE N_OUT ROW_BYTES N_IN N_ROWS            weights and rows in; (rows, N_OUT) out for 1 .. N_ROWS rows
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.h"

using namespace sidecar::smallbatch;

static void list_sets() {
    size_t n_sets;
    const KernelSet * sets = kernel_sets(n_sets);
    for (size_t i = 0; i < n_sets; ++i) {
        if (!sets[i].runs_here()) continue;
        std::printf("%s", sets[i].name);
        for (size_t k = 0; k < sets[i].n_kernels; ++k) std::printf(" %d", int(sets[i].kernels[k].type));
        std::printf("\n");
    }
}

template <typename T>
static std::vector<T> read(size_t n) {
    std::vector<T> values(n);
    if (std::fread(values.data(), sizeof(T), n, stdin) != n) std::exit(1);
    return values;
}

static void multiply(const Kernel & kernel, size_t n_out, size_t row_bytes, size_t n_in, size_t n_rows) {
    const auto weights = read<uint8_t>(n_out * row_bytes);
    const auto x = read<float>(n_rows * n_in);
    std::vector<float> out(n_rows * n_out);
    const size_t x_bytes = kernel.format.n_bytes(n_in);
    uint8_t * rows = static_cast<uint8_t *>(std::aligned_alloc(64, n_rows * x_bytes));
    for (size_t r = 0; r < n_rows; ++r) kernel.format.prepare(x.data() + r * n_in, n_in, rows + r * x_bytes);
    for (size_t n = 1; n <= n_rows; ++n) {
        kernel.multiply[n - 1]({weights.data(), weights.data() + weights.size(), row_bytes, n_in, rows, x_bytes, out.data(), n_out,
                                int(n), 0, n_out});
        std::fwrite(out.data(), sizeof(float), n * n_out, stdout);
    }
    std::free(rows);
}

int main(int argc, char ** argv) {
    const auto number = [argv](int i) { return size_t(std::strtoull(argv[i], nullptr, 10)); };
    const auto is = [argc, argv](const char * name, int n) { return argc == n && std::strcmp(argv[1], name) == 0; };
    if (is("sets", 2)) {
        list_sets();
        return 0;
    }
    if (is("multiply", 8)) {
        const Kernel * kernel = find_kernel(Type(number(3)), argv[2]);
        if (kernel == nullptr) return 1;
        multiply(*kernel, number(4), number(5), number(6), number(7));
        return 0;
    }
    return 1;
}
