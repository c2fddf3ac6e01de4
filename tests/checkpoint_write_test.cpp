// The writer: all of a file or nothing of it.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "checkpoint/safetensors.hpp"
#include "checkpoint_checks.hpp"

namespace heddle::testing {
namespace {

std::size_t files_in(const TempFolder& folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder.path()), {}));
}

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string((std::istreambuf_iterator<char>(in)), {});
}

TEST(Write, ReadsBackAlignedAndReplaces) {
  const TempFolder folder;
  const std::string path = folder.file("out.safetensors");
  write_tensors(path, {});
  EXPECT_TRUE(checkpoint::SafetensorsFile::open(path)->tensors().empty());
  const std::vector<OwnedTensor> tensors{make_tensor("byte \"quoted\"", "U8", {3}, std::vector<std::uint8_t>{1, 2, 3}),
                                         make_tensor("half", "BF16", {1, 1}, std::vector<std::uint16_t>{0x3F80}),
                                         make_tensor("wide", "I64", {2}, std::vector<std::int64_t>{-1, 7}),
                                         make_tensor("scalar", "F32", {}, std::vector<float>{2.5f}),
                                         make_tensor("none", "F32", {0, 4}, std::vector<float>{})};
  write_tensors(path, tensors);
  EXPECT_EQ(files_in(folder), 1u);
  const auto file = checkpoint::SafetensorsFile::open(path);
  ASSERT_EQ(file->tensors().size(), tensors.size());
  for (const auto& expected : tensors) {
    const auto* seen = file->find(expected.name);
    ASSERT_NE(seen, nullptr) << expected.name;
    EXPECT_EQ(checkpoint::name(seen->dtype), expected.dtype);
    EXPECT_EQ(seen->shape, expected.shape);
    EXPECT_TRUE(std::equal(seen->bytes.begin(), seen->bytes.end(), expected.data.begin(), expected.data.end()));
    const auto alignment = static_cast<std::uintptr_t>(bits_per_value(seen->dtype) / 8);
    if (!seen->bytes.empty()) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(seen->bytes.data()) % alignment, 0u) << expected.name;
    }
  }
}

TEST(Write, RefusesWhatCannotBeWritten) {
  const TempFolder folder;
  const std::vector<float> two{1, 2};
  const auto write = [&](std::vector<OwnedTensor> tensors) {
    return [&folder, tensors] { write_tensors(folder.file("out"), tensors); };
  };
  expect_refusal(write({make_tensor("a", "F31", {2}, two)}), {"tensor 'a'", "'F31'", "F32"});
  expect_refusal(write({make_tensor("a", "F32", {3}, two)}), {"8 bytes given", "F32 [3] takes 12"});
  expect_refusal(write({make_tensor("a", "F32", {-2}, two)}), {"no whole number of bytes"});
  expect_refusal(write({make_tensor("a", "F32", {2}, two), make_tensor("a", "F32", {2}, two)}), {"'a'", "taken"});
  expect_refusal(write({make_tensor("\xff", "F32", {2}, two)}), {"UTF-8"});
  EXPECT_EQ(files_in(folder), 0u);
  expect_refusal([&] { write_tensors(folder.file("no/out"), {}); }, {"no/out", "No such file or directory"});
  std::filesystem::create_directory(folder.file("taken"));
  std::ofstream(folder.file("taken/inside")) << "x";
  expect_refusal([&] { write_tensors(folder.file("taken"), {}); }, {"taken", "renamed", "directory"});
  EXPECT_EQ(files_in(folder), 1u);
}

// The test's own pipe stands for devices too: a mistake here must not reach a device of the machine.
TEST(Write, APipeIsWrittenAndStays) {
  const TempFolder folder;
  const std::string pipe = folder.file("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  std::string read;
  std::thread reader([&] { read = read_text(pipe); });
  const std::vector<OwnedTensor> tensors{make_tensor("a", "F32", {2}, std::vector<float>{1, 2})};
  write_tensors(pipe, tensors);
  reader.join();
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  EXPECT_EQ(files_in(folder), 1u);
  write_tensors(folder.file("plain"), tensors);
  EXPECT_EQ(read, read_text(folder.file("plain")));
}

TEST(Write, ALinkStaysAndItsTargetIsReplaced) {
  const TempFolder folder;
  std::filesystem::create_directory(folder.file("inside"));
  write_tensors(folder.file("inside/target"), {});
  std::filesystem::create_symlink("inside/target", folder.file("link"));
  write_tensors(folder.file("link"), {make_tensor("a", "F32", {1}, std::vector<float>{1})});
  EXPECT_TRUE(std::filesystem::is_symlink(folder.file("link")));
  EXPECT_EQ(checkpoint::SafetensorsFile::open(folder.file("inside/target"))->tensors().size(), 1u);
  EXPECT_EQ(files_in(folder), 2u);
}

/// Runs `attempt` in a child process, so that its limits end with it; true if it returned true.
bool in_child(const std::function<bool()>& attempt) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(attempt() ? 0 : 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// A file size limit fails the write half-way, as a full disk does.
TEST(Write, NothingIsLeftWhenTheDiskIsFull) {
  const TempFolder folder;
  const std::string path = folder.file("out.safetensors");
  write_tensors(path, {make_tensor("old", "F32", {1}, std::vector<float>{1})});
  const std::string before = read_text(path);
  EXPECT_TRUE(in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{4096, 4096};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
    try {
      write_tensors(path, {make_tensor("new", "F32", {4096}, std::vector<float>(4096))});
    } catch (const InputError& error) {
      return std::string(error.what()) == path + ": cannot be written: File too large";
    }
    return false;
  }));
  EXPECT_EQ(files_in(folder), 1u);
  EXPECT_EQ(read_text(path), before);
}

}  // namespace
}  // namespace heddle::testing
