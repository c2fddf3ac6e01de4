// The hash that ranks compare maps by and people see of tables: the published one of bytes, and different for what differs.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "group/fingerprint.hpp"

namespace heddle {
namespace {

std::uint64_t of_text(const std::string& text) { return fingerprint<char>(text); }
std::uint64_t of_numbers(const std::vector<int>& numbers) { return fingerprint<int>(numbers); }

TEST(Fingerprint, OfTextItIsThePublishedHash) {
  EXPECT_EQ(of_text(""), 0xcbf29ce484222325u);
  EXPECT_EQ(of_text("a"), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(of_text("foobar"), 0x85944171f73967e8u);
}

TEST(Fingerprint, BytesAbove127AreNoNegativeNumbers) { EXPECT_EQ(of_text("\xff"), (0xcbf29ce484222325u ^ 0xff) * 1099511628211u); }

TEST(Fingerprint, OrderAndLengthCount) {
  EXPECT_NE(of_numbers({0, 1}), of_numbers({1, 0}));
  EXPECT_NE(of_numbers({0}), of_numbers({0, 0}));
  EXPECT_EQ(of_numbers({3, 1, 2}), of_numbers({3, 1, 2}));
}

}  // namespace
}  // namespace heddle
