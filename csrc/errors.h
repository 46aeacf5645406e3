// Errors that reach Python as exceptions with these messages.
#pragma once

#include <stdexcept>
#include <string>

namespace gemm_workspace {

// What was asked for cannot be had here; the Python path serves instead.
class Refused : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A vendor library said no to a launch.
class LaunchFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace gemm_workspace
