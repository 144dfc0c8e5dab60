#pragma once

#include <nanobind/nanobind.h>

// Adds Pacing, which Python may implement, and Pace to the native module.
void bind_pace(nanobind::module_ & m);
