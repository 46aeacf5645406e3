// The least that a test needs. A failed check says where and ends the program with status 1.
#pragma once

#include <cstdlib>
#include <iostream>
#include <string>

#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) {                                                               \
      std::cerr << __FILE__ << ":" << __LINE__ << ": not so: " << #condition << "\n"; \
      std::exit(1);                                                                   \
    }                                                                                 \
  } while (false)

#define CHECK_EQUAL(left, right)                                                               \
  do {                                                                                         \
    const auto left_ = (left);                                                                 \
    const auto right_ = (right);                                                               \
    if (!(left_ == right_)) {                                                                  \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " << #left << " is " << left_ << ", not " \
                << right_ << "\n";                                                             \
      std::exit(1);                                                                            \
    }                                                                                          \
  } while (false)

// That `call` throws `Error` with `part` in its message.
template <typename Error, typename Call>
void check_throws(Call call, const std::string& part) {
  try {
    call();
  } catch (const Error& error) {
    if (std::string(error.what()).find(part) != std::string::npos) return;
    std::cerr << "thrown: " << error.what() << ", wanted: " << part << "\n";
    std::exit(1);
  }
  std::cerr << "nothing thrown, wanted: " << part << "\n";
  std::exit(1);
}
