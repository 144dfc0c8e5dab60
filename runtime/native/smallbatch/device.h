// The small-batch kernels for llama.cpp: which weights they get, and which products they compute.
//
// Weights for them lie in a buffer type of their own (ordinary host memory, mapped files included), and the CPU backend computes
// products of 1 to 8 rows with those by them (graph_products.h), and attention's products with the rows that come of such.
// Everything else, longer prompts too, it computes as ever, from the same memory.
//
// llama.cpp's loader asks devices where weights may lie; so there is a device, of type ACCEL, that has this buffer type and
// computes nothing. Weights come to lie there only when a model is loaded on a thread that is *placing*; for any other load it
// shows the CPU's buffer type, so that nothing is placed, and no product is taken.
//
// ggml has no way to take a device back: once registered it stays, in every context made from then on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ggml_abi.h"
#include "kernels.h"

namespace sidecar::smallbatch {

// Registers the device with the library that has this dlopen handle, once; later calls repeat the first one's answer.
// Returns why that is not possible (too old a processor, a ggml that differs from the tested one), or nothing.
// Not thread-safe, against itself and against contexts being made.
std::string register_device(void * handle);

// The kernel set of the products of this type: the fastest that runs here, or the one that tests ask for. Null: none.
const char * set_for(int32_t type);

// Makes every later product use this set ("" for the fastest again). For tests, while nothing is computed.
void use_set(const std::string & name);

// From now on the models that this thread loads have their matrices of these ggml types placed for the kernels; with
// no types, none.
void set_placing(const std::vector<int32_t> & types);

// Where weights for the kernels lie, and ggml as it was bound. Only after register_device() has succeeded.
ggml::BufferType * weights_buffer_type();
const ggml::Library & bound_library();

// Whether the small-batch kernels compute this operation.
bool takes_product(const ggml::Tensor & op);
// Of an operation taken, whether it is a product by expert.
bool is_by_id(const ggml::Tensor & op);
// What the products of this type run on now; null: nothing.
const Kernel * kernel_in_use(int32_t type);

}  // namespace sidecar::smallbatch
