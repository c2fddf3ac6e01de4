// Marks a host function whose loops are compiled for wider vectors as well and chosen at load time.
// Lanes do the same operations in any width and nothing is contracted, so bits do not depend on the
// machine. Sanitizers start too late for such a choice and get the plain function.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(HEDDLE_SANITIZED)
#define HEDDLE_WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HEDDLE_WIDE
#endif
