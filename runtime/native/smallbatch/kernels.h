// Matrix products of 1 to 8 rows, out(r, o) = sum over i of weights(o, i) * x(r, i).
// Pure C++, knows nothing of ggml but its block layouts.
//
// A row of x is prepared once (quantised, or rounded to BF16) and then serves every product with weights of the same
// kernel set and format. The weights are read and unpacked once for all rows.
//
// Bits: an output is computed whole by one call, by the same operations in the same order whatever the number of rows,
// the range of outputs and the thread. So 1 to 8 rows agree to the bit; kernel sets may differ from each other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sidecar::smallbatch {

constexpr int max_rows = 8;

// The weight types that have kernels, by ggml's numbers.
enum class Type : int32_t {
    f32 = 0,
    f16 = 1,
    q4_0 = 2,
    q5_0 = 6,
    q8_0 = 8,
    q4_k = 12,
    q5_k = 13,
    q6_k = 14,
    iq4_nl = 20,
    iq4_xs = 23,
    bf16 = 30,
};

struct Block {
    size_t n_values;  // 0: the type has no kernels
    size_t n_bytes;
};

constexpr Block block_of(Type type) {
    switch (type) {
        case Type::f32:
            return {1, 4};
        case Type::f16:
            return {1, 2};
        case Type::bf16:
            return {1, 2};
        case Type::q4_0:
            return {32, 18};
        case Type::q5_0:
            return {32, 22};
        case Type::iq4_nl:
            return {32, 18};
        case Type::q8_0:
            return {32, 34};
        case Type::q4_k:
            return {256, 144};
        case Type::q5_k:
            return {256, 176};
        case Type::q6_k:
            return {256, 210};
        case Type::iq4_xs:
            return {256, 136};
    }
    return {0, 0};
}

// Outputs begin .. end-1 of a product with n_rows rows.
struct Product {
    const uint8_t * weights;  // (n_out, n_in) in blocks, rows contiguous; any alignment
    const uint8_t * weights_end;  // behind the last row: what lies before it may be read
    size_t row_bytes;  // of one row of weights
    size_t n_in;  // a multiple of the type's block
    const uint8_t * x;  // (n_rows,) prepared rows, 64-byte aligned
    size_t x_bytes;  // of one prepared row
    float * out;  // (n_rows, out_stride)
    size_t out_stride;
    int n_rows;
    size_t begin, end;
    bool into_second;  // weights are prefetched into the second-level cache (`second_level_first`)
};

// Whether this processor reads weights faster if they are prefetched into its second-level cache: AMD's, whose first-level cache
// of 32 KiB the rows of x need, and which waits for prefetches into it.
bool second_level_first();

// Writes one prepared row.
using Prepare = void (*)(const float * x, size_t n_in, uint8_t * prepared);
using Multiply = void (*)(const Product &);

// How rows must be prepared for a weight type. Formats are the same when `prepare` is.
struct Format {
    size_t (*n_bytes)(size_t n_in);  // of a prepared row, a multiple of 64
    Prepare prepare;
};

// What one kernel set has for one type; `multiply[r-1]` takes products of r rows.
struct Kernel {
    Type type;
    Format format;
    Multiply multiply[max_rows];
};

// The kernels of one instruction set, and where they run.
struct KernelSet {
    const char * name;
    bool (*runs_here)();
    const Kernel * kernels;
    size_t n_kernels;
};

// All sets compiled in, fastest first. The last is portable C++ and runs anywhere.
const KernelSet * kernel_sets(size_t & n_sets);

// The kernel for `type` in the named set, or with no name in the fastest set that runs here; null where there is none.
const Kernel * find_kernel(Type type, const char * set_name = nullptr);

// The name of the set that a kernel belongs to.
const char * set_of(const Kernel & kernel);

}  // namespace sidecar::smallbatch
