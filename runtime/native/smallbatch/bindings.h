#pragma once

#include <nanobind/nanobind.h>

// Adds the small-batch kernels and their device to the native module.
void bind_smallbatch(nanobind::module_ & m);
