// How much memory a heap may take, as the kernel's files tell it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "group/memory.hpp"

namespace heddle {
namespace {

class AvailableMemory : public testing::Test {
 protected:
  AvailableMemory() { std::filesystem::create_directories(folder_); }
  ~AvailableMemory() override { std::filesystem::remove_all(folder_); }
  void write(const std::string& name, const std::string& text) const { std::ofstream(folder_ / name) << text; }
  std::size_t available() const { return available_memory((folder_ / "meminfo").string(), folder_.string()); }

  const std::filesystem::path folder_ = std::filesystem::path(testing::TempDir()) / ("memory." + std::to_string(getpid()));
};

TEST_F(AvailableMemory, IsTheMachinesWithoutALimit) {
  write("meminfo", "MemTotal:       9000 kB\nMemFree:        100 kB\nMemAvailable:    5000 kB\n");
  EXPECT_EQ(available(), 5000u * 1024);
  write("memory.max", "max\n");
  write("memory.current", "4000\n");
  EXPECT_EQ(available(), 5000u * 1024);
}

TEST_F(AvailableMemory, IsWhatTheContainersLimitLeaves) {
  write("meminfo", "MemAvailable: 5000 kB\n");
  write("memory.max", "10000\n");
  write("memory.current", "9000\n");
  EXPECT_EQ(available(), 1000u);
  write("memory.current", "12000\n");
  EXPECT_EQ(available(), 0u);
}

TEST_F(AvailableMemory, CountsCachedFilesAsFree) {
  write("meminfo", "MemAvailable: 5000 kB\n");
  write("memory.max", "10000\n");
  write("memory.current", "9990\n");
  write("memory.stat",
        "anon 1000\nfile 8000\nshmem 900\ninactive_anon 1500\nactive_anon 400\ninactive_file 4000\nactive_file 3000\n");
  EXPECT_EQ(available(), 10000u - (9990u - 7000u));
  write("memory.current", "6000\n");  // read at another moment than its parts
  EXPECT_EQ(available(), 10000u);
}

TEST_F(AvailableMemory, IsUnknownAndSoUnlimitedWithoutTheFiles) { EXPECT_GT(available(), std::size_t{1} << 50); }

TEST_F(AvailableMemory, IsThereOnThisMachine) { EXPECT_GT(available_memory(), 0u); }

}  // namespace
}  // namespace heddle
