// Damaged safetensors files: each is refused with one line that says what is wrong.
#include <gtest/gtest.h>

#include "checkpoint/safetensors.hpp"
#include "checkpoint_checks.hpp"

namespace heddle::testing {
namespace {

using checkpoint::SafetensorsFile;

/// A file's bytes from a header text and so many bytes of data.
std::string file_of(const std::string& header, std::size_t data_bytes) {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(header.size() >> (8 * i));
  return file + header + std::string(data_bytes, '\x11');
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

void expect_damage(const std::string& bytes, std::initializer_list<std::string> parts) {
  const std::vector<char> exact(bytes.begin(), bytes.end());  // no room behind the last byte for an unnoticed read
  expect_refusal([&] { SafetensorsFile::from_bytes("damaged", std::as_bytes(std::span(exact))); }, parts);
}

void expect_damaged_header(const std::string& header, std::size_t data_bytes, std::initializer_list<std::string> parts) {
  expect_damage(file_of(header, data_bytes), parts);
}

TEST(SafetensorsHeader, GoodFileIsRead) {
  const std::string bytes = file_of("{\"__metadata__\":{\"format\":\"pt\"}," + entry("b", "I8", "[]", "[8,9]") + "," +
                                        entry("a", "F32", "[2,1]", "[0,8]") + "," + entry("none", "F16", "[0,7]", "[9,9]") + "} ",
                                    9);
  const auto file = SafetensorsFile::from_bytes("good", std::as_bytes(std::span(bytes)));
  ASSERT_EQ(file->tensors().size(), 3u);
  const auto* a = file->find("a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->dtype, checkpoint::Dtype::f32);
  EXPECT_EQ(a->shape, (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(a->bytes.size(), 8u);
  EXPECT_TRUE(file->find("none")->bytes.empty());
  EXPECT_EQ(file->find("c"), nullptr);
}

TEST(SafetensorsHeader, Lengths) {
  expect_damage("", {"damaged: has 0 bytes"});
  expect_damage("abc", {"has 3 bytes", "8 bytes of header length"});
  expect_damage(std::string(8, '\xff'), {"header of 18446744073709551615 bytes", "at most 100000000"});
  expect_damage(file_of("{}", 0).substr(0, 9), {"header of 2 bytes but has 1", "truncated"});
  expect_damage(file_of("{" + entry("a", "F32", "[2]", "[0,8]") + "}", 7),
                {"tensor 'a'", "[0, 8]", "7 bytes of data", "truncated"});
  expect_damage(file_of("{" + entry("a", "F32", "[2]", "[0,8]") + "}", 9), {"end at data byte 8", "the file at 9"});
}

TEST(SafetensorsHeader, Json) {
  expect_damaged_header("", 0, {"header: is not JSON"});
  expect_damaged_header("{\"a\":", 0, {"header: is not JSON", "byte"});
  expect_damaged_header("{} x", 0, {"header: is not JSON"});
  expect_damaged_header("[]", 0, {"not a JSON object"});
  expect_damaged_header("{\"\xc3(\":1}", 0, {"not JSON"});
  expect_damaged_header(std::string(200000, '['), 0, {"nested more than 64 deep"});
  expect_damaged_header("{\"a\":" + std::string(70, '[') + std::string(70, ']') + "}", 0, {"nested more than 64 deep"});
  expect_damaged_header("{" + entry("a", "U8", "[1]", "[0,1]") + "," + entry("a", "U8", "[1]", "[1,2]") + "}", 2,
                        {"'a' appears twice"});
  expect_damaged_header("{\"a\":7}", 0, {"tensor 'a'", "JSON object"});
  expect_damaged_header("{\"a\\nb\":7}", 0, {"tensor 'a?b'"});
}

TEST(SafetensorsHeader, Dtype) {
  expect_damaged_header("{" + entry("a", "BF17", "[1]", "[0,2]") + "}", 2, {"tensor 'a'", "'BF17'", "BF16"});
  expect_damaged_header(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1, {"tensor 'a'", "no dtype"});
  expect_damaged_header(R"({"a":{"dtype":3,"shape":[1],"data_offsets":[0,1]}})", 1, {"no dtype"});
}

TEST(SafetensorsHeader, Shape) {
  expect_damaged_header("{" + entry("a", "U8", "[-1]", "[0,1]") + "}", 1, {"size 0 of its shape is -1"});
  expect_damaged_header("{" + entry("a", "U8", "[1.5]", "[0,1]") + "}", 1, {"is 1.5"});
  expect_damaged_header("{" + entry("a", "U8", "[1,18446744073709551615]", "[0,1]") + "}", 1,
                        {"size 1 of its shape is 18446744073709551615"});
  expect_damaged_header("{" + entry("a", "U8", "[4294967296,4294967296]", "[0,0]") + "}", 0,
                        {"4294967296, 4294967296", "below 2^64"});
  expect_damaged_header("{" + entry("a", "U8", "[1e400]", "[0,1]") + "}", 1, {"number"});
  expect_damaged_header("{" + entry("a", "F4", "[3]", "[0,1]") + "}", 1, {"F4 [3]", "whole number of bytes"});
  expect_damaged_header(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1, {"no shape"});
  expect_damaged_header("{" + entry("a", "F32", "[2]", "[0,4]") + "}", 4, {"give 4 bytes", "F32 [2] takes 8"});
}

TEST(SafetensorsHeader, Offsets) {
  expect_damaged_header(R"({"a":{"dtype":"U8","shape":[1]}})", 1, {"no data_offsets"});
  expect_damaged_header("{" + entry("a", "U8", "[1]", "[0]") + "}", 1, {"no data_offsets"});
  expect_damaged_header("{" + entry("a", "U8", "[1]", "[-1,0]") + "}", 1, {"no data_offsets"});
  expect_damaged_header("{" + entry("a", "U8", "[1]", "[1,0]") + "}", 1, {"[1, 0] run backwards"});
  expect_damaged_header("{" + entry("a", "U8", "[1]", "[18446744073709551614,18446744073709551615]") + "}", 1,
                        {"outside the file"});
  expect_damaged_header("{" + entry("a", "U8", "[4]", "[0,4]") + "," + entry("b", "U8", "[4]", "[3,7]") + "}", 7,
                        {"tensor 'b'", "byte 3", "'a'", "ends at 4", "overlapping"});
  expect_damaged_header("{" + entry("a", "U8", "[4]", "[0,4]") + "," + entry("b", "U8", "[4]", "[0,4]") + "}", 4, {"overlapping"});
  expect_damaged_header("{" + entry("a", "U8", "[4]", "[0,4]") + "," + entry("b", "U8", "[4]", "[6,10]") + "}", 10,
                        {"bytes 4 to 6 belong to no tensor"});
}

TEST(SafetensorsHeader, EveryTruncationOfALayerIsRefused) {
  LayerFileSpec spec;
  spec.shape = {64, 64, 1, 1, {}};
  const LayerFile file = write_layer(spec);
  std::ifstream in(file.path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(in)), {});
  for (std::size_t length = 0; length < bytes.size(); length += length < 1200 ? 1 : 997) {
    expect_damage(bytes.substr(0, length), {"damaged"});
  }
}

TEST(SafetensorsHeader, FilesThatCannotBeMapped) {
  const TempFolder folder;
  expect_refusal([&] { SafetensorsFile::open(folder.file("absent")); }, {"absent", "No such file"});
  expect_refusal([&] { SafetensorsFile::open(folder.path().string()); }, {"not a regular file"});
  std::ofstream(folder.file("empty"));
  expect_refusal([&] { SafetensorsFile::open(folder.file("empty")); }, {"has 0 bytes"});
}

}  // namespace
}  // namespace heddle::testing
