#include "checkpoint/whole_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "checkpoint/describe.hpp"
#include "heddle/error.hpp"

namespace heddle::checkpoint {

namespace {

bool is_device_or_pipe(const std::filesystem::path& path) {
  std::error_code ignored;
  const auto status = std::filesystem::status(path, ignored);
  return std::filesystem::exists(status) && !std::filesystem::is_regular_file(status) && !std::filesystem::is_directory(status);
}

/// What a symbolic link leads to: the link stays. Where that has no name (a pipe behind /dev/stdout) the link itself.
std::filesystem::path behind_links(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_symlink(path, error)) return path;
  const auto target = std::filesystem::canonical(path, error);
  return error ? path : target;
}

}  // namespace

WholeFile::WholeFile(const std::filesystem::path& final_path) : final_path_(behind_links(final_path)) {
  if (is_device_or_pipe(final_path_)) {
    path_ = final_path_;
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
  } else {
    create_beside();
  }
  if (descriptor_ < 0) fail("cannot be written");
}

void WholeFile::create_beside() {
  static std::atomic<unsigned> counter{0};
  do {  // exclusive creation: a left-over of a killed process is never reused
    const auto name = fmt::format(".{}.{}-{}.tmp", final_path_.filename().string(), ::getpid(), counter.fetch_add(1));
    path_ = final_path_.parent_path() / name;
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (descriptor_ < 0 && errno == EEXIST);
}

WholeFile::~WholeFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!published_ && path_ != final_path_) ::unlink(path_.c_str());
}

void WholeFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("cannot be written");
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void WholeFile::publish() {
  const bool beside = path_ != final_path_;
  if (beside && ::fsync(descriptor_) != 0) fail("cannot be flushed to disk");
  const int closed = ::close(descriptor_);
  descriptor_ = -1;
  if (closed != 0) fail("cannot be closed");
  if (beside && ::rename(path_.c_str(), final_path_.c_str()) != 0) fail("cannot be renamed into place");
  published_ = true;
  if (beside) flush_folder();
}

/// Makes the new name durable. The file itself is whole either way, so a folder that cannot be flushed is no error.
void WholeFile::flush_folder() const {
  const auto folder = final_path_.has_parent_path() ? final_path_.parent_path() : std::filesystem::path(".");
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  ::fsync(descriptor);
  ::close(descriptor);
}

void WholeFile::fail(const char* what) const {
  const int reason = errno;
  throw InputError(fmt::format("{}: {}: {}", one_line(final_path_.string()), what, std::strerror(reason)));
}

}  // namespace heddle::checkpoint
