#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/describe.hpp"
#include "checkpoint/safetensors.hpp"
#include "heddle/checkpoint.hpp"
#include "heddle/error.hpp"

namespace heddle {

namespace {

using checkpoint::in_quotes;
using checkpoint::one_line;
using checkpoint::shape_text;

[[noreturn]] void refuse_errno(const std::string& path, std::string_view what) {
  const int number = errno;
  throw InputError(fmt::format("{}: {}: {}", one_line(path), what, std::strerror(number)));
}

/// A file beside its final name, removed again unless it was published.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::filesystem::path final_path) : final_path_(std::move(final_path)) {
    static std::atomic<unsigned> counter{0};
    const auto folder = final_path_.parent_path();
    do {  // exclusive creation: a left-over of a killed process is never reused
      const auto name = fmt::format(".{}.{}-{}.tmp", final_path_.filename().string(), ::getpid(), counter.fetch_add(1));
      path_ = folder / name;
      descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    } while (descriptor_ < 0 && errno == EEXIST);
    if (descriptor_ < 0) refuse_errno(final_path_, "cannot be written");
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (!published_) ::unlink(path_.c_str());
  }

  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) refuse_errno(final_path_, "cannot be written");
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
  }

  /// Flushes, closes and renames: from here on the final name holds all of it.
  void publish() {
    if (::fsync(descriptor_) != 0) refuse_errno(final_path_, "cannot be flushed to disk");
    const int closed = ::close(descriptor_);
    descriptor_ = -1;
    if (closed != 0) refuse_errno(final_path_, "cannot be closed");
    if (::rename(path_.c_str(), final_path_.c_str()) != 0) refuse_errno(final_path_, "cannot be renamed into place");
    published_ = true;
    flush_folder();
  }

 private:
  /// Makes the new name durable. The file itself is whole either way, so a folder that cannot be flushed is no error.
  void flush_folder() const {
    const auto folder = final_path_.has_parent_path() ? final_path_.parent_path() : std::filesystem::path(".");
    const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) return;
    ::fsync(descriptor);
    ::close(descriptor);
  }

  std::filesystem::path final_path_, path_;
  int descriptor_ = -1;
  bool published_ = false;
};

checkpoint::Dtype checked_dtype(const std::string& path, const TensorOut& tensor) {
  const auto where = fmt::format("{}: tensor {}", one_line(path), in_quotes(tensor.name));
  const auto dtype = checkpoint::dtype_from_name(tensor.dtype);
  if (!dtype) {
    throw InputError(fmt::format("{}: unknown dtype {}; known are {}", where, in_quotes(tensor.dtype), checkpoint::known_dtypes()));
  }
  const auto needed = checkpoint::tensor_bytes(*dtype, tensor.shape);
  if (!needed || *needed != tensor.data.size()) {
    throw InputError(fmt::format("{}: {} bytes given; {} {} takes {}", where, tensor.data.size(), tensor.dtype,
                                 shape_text(tensor.shape), needed ? fmt::to_string(*needed) : "no whole number of bytes"));
  }
  return *dtype;
}

}  // namespace

void write_safetensors(const std::string& path, std::span<const TensorOut> tensors) {
  struct Placed {
    const TensorOut* tensor;
    int bits;
  };
  std::vector<Placed> order;
  std::set<std::string_view> names{"__metadata__"};
  for (const TensorOut& tensor : tensors) {
    order.push_back({&tensor, bits_per_value(checked_dtype(path, tensor))});
    if (!names.insert(tensor.name).second) {
      throw InputError(
          fmt::format("{}: tensor {}: the name is taken; each tensor needs its own", one_line(path), in_quotes(tensor.name)));
    }
  }
  // Widest elements first: every tensor is then aligned to its element without gaps, which the format forbids.
  std::stable_sort(order.begin(), order.end(), [](const Placed& a, const Placed& b) { return a.bits > b.bits; });

  nlohmann::json header = nlohmann::json::object();
  std::uint64_t offset = 0;
  for (const Placed& placed : order) {
    const TensorOut& tensor = *placed.tensor;
    const std::uint64_t end = offset + tensor.data.size();
    header[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception&) {
    throw InputError(fmt::format("{}: a tensor's name is not UTF-8", one_line(path)));
  }
  constexpr std::size_t alignment = 64;  // of the data within the file
  constexpr std::size_t length_bytes = 8;
  text.append((alignment - (length_bytes + text.size()) % alignment) % alignment, ' ');
  std::byte length[length_bytes];
  for (std::size_t i = 0; i < length_bytes; ++i) length[i] = static_cast<std::byte>(std::uint64_t{text.size()} >> (8 * i));

  TemporaryFile file{std::filesystem::path(path)};
  file.write(length);
  file.write(std::as_bytes(std::span(text)));
  for (const Placed& placed : order) file.write(placed.tensor->data);
  file.publish();
}

}  // namespace heddle
