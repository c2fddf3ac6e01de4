#include "group/directory_store.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string_view>
#include <thread>

#include "group/node_wait.hpp"
#include "heddle/error.hpp"

namespace heddle {

namespace {

constexpr std::array kinds{StoreKey::Kind::called, StoreKey::Kind::asked,    StoreKey::Kind::mask,
                           StoreKey::Kind::here,   StoreKey::Kind::finished, StoreKey::Kind::unheard};

const char* name_of_kind(StoreKey::Kind kind) {
  switch (kind) {
    case StoreKey::Kind::called:
      return "called";
    case StoreKey::Kind::asked:
      return "asked";
    case StoreKey::Kind::mask:
      return "mask";
    case StoreKey::Kind::here:
      return "here";
    case StoreKey::Kind::finished:
      return "finished";
    case StoreKey::Kind::unheard:
      return "unheard";
  }
  return "unknown";
}

int words_of(StoreKey::Kind kind, int ranks) {
  if (kind == StoreKey::Kind::called || kind == StoreKey::Kind::asked) return 1;
  return kind == StoreKey::Kind::mask ? (ranks + 31) / 32 : ranks;
}

std::string name_of_word(const StoreKey& key) { return fmt::format("{}.{}", name_of_kind(key.kind), key.index); }

/// For who depends on the store this is what a lost rank is: it cannot go on.
[[noreturn]] void fail(const std::filesystem::path& path, const char* what, int error) {
  throw Error(ErrorKind::fault, fmt::format("the store cannot be reached: {} {}: {}", what, path.string(), std::strerror(error)));
}

}  // namespace

DirectoryStore::DirectoryStore(std::filesystem::path directory, int ranks) : directory_(std::move(directory)), ranks_(ranks) {
  if (ranks < 1) throw InputError(fmt::format("a store for {} ranks; at least one is wanted", ranks));
  if (!is_there({})) make();
  check_ranks();
}

/// All words at once: made beside, and then renamed to the directory, which fails where another rank was first.
void DirectoryStore::make() const {
  std::random_device device;
  const std::filesystem::path beside = fmt::format("{}.{:x}.{:08x}{:08x}", directory_.string(), ::getpid(), device(), device());
  std::error_code error;
  std::filesystem::create_directory(beside, error);
  for (const StoreKey::Kind kind : kinds) {
    for (int index = 0; index < words_of(kind, ranks_) && !error; ++index) {
      const std::filesystem::path word = beside / name_of_word({kind, index});
      std::filesystem::create_directory(word, error);
      if (error) break;
      const int file = ::open((word / name_of({})).c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0666);
      if (file < 0) error = {errno, std::generic_category()};
      if (file >= 0) ::close(file);
    }
  }
  if (!error) std::filesystem::rename(beside, directory_, error);
  if (!error) return;
  std::error_code ignored;
  std::filesystem::remove_all(beside, ignored);
  if (!std::filesystem::exists(directory_ / "called.0", ignored)) {
    throw InputError(fmt::format("no store can be made in {}: {}; name a directory that is new or empty, where all ranks may write",
                                 directory_.string(), error.message()));
  }
}

bool DirectoryStore::is_there(const StoreKey& key) const {
  std::error_code error;
  const bool is = std::filesystem::exists(path_of(key), error);
  if (error) throw InputError(fmt::format("no store can be looked for in {}: {}", directory_.string(), error.message()));
  return is;
}

void DirectoryStore::check_ranks() const {
  int there = 0;
  while (is_there({StoreKey::Kind::here, there})) ++there;
  if (there != ranks_)
    throw InputError(fmt::format("the store in {} is one of {} ranks, not of {}", directory_.string(), there, ranks_));
}

std::string DirectoryStore::name_of(const Entry& entry) { return fmt::format("{}.{:016x}", entry.changes, entry.value); }

std::filesystem::path DirectoryStore::path_of(const StoreKey& key) const { return directory_ / name_of_word(key); }

// While the file is renamed a listing may have both names, of which the later one is meant, or neither.
constexpr int most_listings = 1000;
DirectoryStore::Entry DirectoryStore::read(const StoreKey& key) const {
  const std::filesystem::path word = path_of(key);
  for (int i = 0; i < most_listings; ++i) {
    const std::unique_ptr<DIR, int (*)(DIR*)> listing(::opendir(word.c_str()), ::closedir);
    if (listing == nullptr) fail(word, "reading", errno);
    std::optional<Entry> found;
    errno = 0;
    while (const dirent* file = ::readdir(listing.get())) {
      const std::string_view name = file->d_name;
      const auto dot = name.find('.');
      Entry entry;
      if (dot == 0 || dot == name.npos) continue;
      std::from_chars(name.data(), name.data() + dot, entry.changes);
      std::from_chars(name.data() + dot + 1, name.data() + name.size(), entry.value, 16);
      if (!found || entry.changes > found->changes) found = entry;
    }
    if (errno != 0) fail(word, "reading", errno);
    if (found) return *found;
    std::this_thread::yield();
  }
  throw Error(ErrorKind::fault, fmt::format("the store is damaged: {} has no value", word.string()));
}

std::uint64_t DirectoryStore::get(const StoreKey& key) const { return read(key).value; }

bool DirectoryStore::compare_set(const StoreKey& key, std::uint64_t& expected, std::uint64_t desired) {
  const std::filesystem::path word = path_of(key);
  for (;;) {
    const Entry now = read(key);
    if (now.value != expected) {
      expected = now.value;
      return false;
    }
    if (std::rename((word / name_of(now)).c_str(), (word / name_of({now.changes + 1, desired})).c_str()) == 0) return true;
    if (errno != ENOENT) fail(word, "changing", errno);
  }
}

bool DirectoryStore::wait(const std::function<bool()>& there, Clock::time_point end) {
  for (PollPause pause;; pause.rest()) {
    const bool last = Clock::now() >= end;
    if (there()) return true;
    if (last) return false;
  }
}

std::shared_ptr<Store> open_directory_store(const std::string& directory, int ranks) {
  return std::make_shared<DirectoryStore>(directory, ranks);
}

}  // namespace heddle
