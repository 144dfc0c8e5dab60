// The small-batch kernels as a ggml device of type ACCEL, which llama.cpp's scheduler uses by itself.
//
// The device computes products of 1 to 8 rows with weights that lie in a buffer type of its own (ordinary host memory, mapped files
// included), attention's products with the rows that come of them, and the operations on rows that stand between two of them.
// Everything else, longer prompts too, stays with the CPU backend, which reads the same memory.
// Weights come to lie there only when a model is loaded on a thread that is *placing*; for any other load the device
// shows the CPU's buffer type, so that nothing is placed and nothing is computed here.
//
// ggml has no way to take a device back: once registered it stays, in every context made from then on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ggml_abi.h"

namespace sidecar::smallbatch {

// Registers the device with the library that has this dlopen handle, once; later calls repeat the first one's answer.
// Returns why that is not possible (too old a processor, a ggml that differs from the tested one, no OpenMP), or nothing.
// Not thread-safe, against itself and against contexts being made.
std::string register_device(void * handle);

// The kernel set of the products of this type: the fastest that runs here, or the one that tests ask for. Null: none.
const char * set_for(int32_t type);

// Makes every later product use this set ("" for the fastest again). For tests, while nothing is computed.
void use_set(const std::string & name);

// From now on the models that this thread loads have their matrices of these ggml types placed with the device; with no
// types, none.
void set_placing(const std::vector<int32_t> & types);

// The device, where weights for it lie, and ggml as it was bound. Only after register_device() has succeeded.
ggml::Device * registered_device();
ggml::BufferType * weights_buffer_type();
const ggml::Library & bound_library();

}  // namespace sidecar::smallbatch
