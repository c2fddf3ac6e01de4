// The pickle format, protocol 2 (Python's pickletools documents the opcodes), as far as torch.save uses it for plain data.
#include "routing/torch_file.hpp"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <span>

#include "heddle/error.hpp"
#include "routing/archive.hpp"
#include "routing/file_bytes.hpp"

namespace heddle {

const TorchValue* TorchValue::find(const std::string& key) const {
  const auto* dictionary = std::get_if<std::shared_ptr<TorchDictionary>>(&value);
  if (dictionary == nullptr) return nullptr;
  for (const auto& [name, held] : **dictionary) {
    if (name == key) return &held;
  }
  return nullptr;
}

const NpyArray* TorchValue::tensor() const {
  const auto* array = std::get_if<std::shared_ptr<NpyArray>>(&value);
  return array == nullptr ? nullptr : array->get();
}

const TorchList* TorchValue::list() const {
  const auto* held = std::get_if<std::shared_ptr<TorchList>>(&value);
  return held == nullptr ? nullptr : held->get();
}

namespace {

/// The type of a storage's values, as NpyArray names it.
const char* type_of_storage(const std::string& global) {
  constexpr std::array<std::pair<const char*, const char*>, 7> known{{{"torch IntStorage", "i4"},
                                                                      {"torch LongStorage", "i8"},
                                                                      {"torch ShortStorage", "i2"},
                                                                      {"torch ByteStorage", "u1"},
                                                                      {"torch FloatStorage", "f4"},
                                                                      {"torch HalfStorage", "f2"},
                                                                      {"torch BFloat16Storage", "b2"}}};
  for (const auto& [name, type] : known) {
    if (global == name) return type;
  }
  return nullptr;
}

/// Runs the opcodes of data.pkl over a stack.
class Unpickler {
 public:
  Unpickler(const Archive& archive, std::string root, std::span<const char> code)
      : archive_(archive), root_(std::move(root)), code_(code) {}

  TorchValue run() {
    for (;;) {
      const char opcode = take<char>();
      if (opcode == '.') return pop();
      step(opcode);
    }
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw InputError(fmt::format("{}: byte {} of its data.pkl: {}", archive_.path(), at_, what));
  }

  template <class Value>
  Value take() {
    if (code_.size() - at_ < sizeof(Value)) fail("it ends early");
    at_ += sizeof(Value);
    return value_in<Value>(code_, at_ - sizeof(Value));
  }
  std::string take_text(std::size_t bytes) {
    if (code_.size() - at_ < bytes) fail("a text ends early");
    at_ += bytes;
    return {code_.data() + at_ - bytes, bytes};
  }
  std::string take_line() {
    std::string line;
    for (char c = take<char>(); c != '\n'; c = take<char>()) line += c;
    return line;
  }

  void push(TorchValue value) { stack_.push_back(std::move(value)); }
  template <class Value>
  void push_value(Value value) {
    push(TorchValue{std::move(value)});
  }
  TorchValue pop() {
    if (stack_.empty()) fail("its stack is empty");
    TorchValue value = std::move(stack_.back());
    stack_.pop_back();
    return value;
  }
  TorchValue& top() {
    if (stack_.empty()) fail("its stack is empty");
    return stack_.back();
  }
  /// What lies above the last mark.
  TorchList pop_marked() {
    if (marks_.empty() || marks_.back() > stack_.size()) fail("a mark is missing");
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    TorchList values(std::make_move_iterator(begin), std::make_move_iterator(stack_.end()));
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return values;
  }
  void push_tuple(std::size_t size) {
    auto tuple = std::make_shared<TorchList>(size);
    for (std::size_t i = size; i-- > 0;) (*tuple)[i] = pop();
    push_value(std::move(tuple));
  }

  void step(char opcode);
  void step_number(char opcode);
  void add_items(const TorchList& items);
  void append(TorchList items);
  void reduce();
  TorchValue storage_of(const TorchValue& id) const;
  TorchValue rebuilt(const TorchList& arguments) const;
  std::vector<std::size_t> sizes_of(const TorchValue& tuple) const;
  std::size_t size_of(const TorchValue& number) const;

  const Archive& archive_;
  std::string root_;
  std::span<const char> code_;
  std::size_t at_ = 0;
  TorchList stack_;
  std::vector<std::size_t> marks_;
  std::map<std::uint32_t, TorchValue> memory_;
};

void Unpickler::step(char opcode) {
  switch (opcode) {
    case '\x80':  // protocol
      if (const int protocol = take<std::uint8_t>(); protocol < 2 || protocol > 5) fail(fmt::format("protocol {}", protocol));
      return;
    case '(':
      return marks_.push_back(stack_.size());
    case '}':
      return push_value(std::make_shared<TorchDictionary>());
    case ']':
    case ')':
      return push_value(std::make_shared<TorchList>());
    case 't':
      return push_value(std::make_shared<TorchList>(pop_marked()));
    case '\x85':
    case '\x86':
    case '\x87':
      return push_tuple(static_cast<std::size_t>(static_cast<unsigned char>(opcode) - 0x84));
    case 'q':
      memory_[take<std::uint8_t>()] = top();
      return;
    case 'r':
      memory_[take<std::uint32_t>()] = top();
      return;
    case 'h':
      return push(memory_[take<std::uint8_t>()]);
    case 'j':
      return push(memory_[take<std::uint32_t>()]);
    case 'X':
      return push_value(take_text(take<std::uint32_t>()));
    case 'c': {
      std::string module = take_line();
      return push_value(TorchGlobal{module + " " + take_line()});
    }
    case 'Q':
      return push(storage_of(pop()));
    case 'R':
      return reduce();
    case 's': {
      TorchList item(2);
      item[1] = pop();
      item[0] = pop();
      return add_items(item);
    }
    case 'u':
      return add_items(pop_marked());
    case 'a':
      return append({pop()});
    case 'e':
      return append(pop_marked());
    default:
      return step_number(opcode);
  }
}

void Unpickler::step_number(char opcode) {
  switch (opcode) {
    case 'N':
      return push_value(std::monostate{});
    case '\x88':
      return push_value(true);
    case '\x89':
      return push_value(false);
    case 'K':
      return push_value(std::int64_t{take<std::uint8_t>()});
    case 'M':
      return push_value(std::int64_t{take<std::uint16_t>()});
    case 'J':
      return push_value(std::int64_t{take<std::int32_t>()});
    case '\x8a': {  // a whole number of so many bytes
      const std::size_t bytes = take<std::uint8_t>();
      if (bytes > sizeof(std::int64_t)) fail("a number of more than 64 bits");
      const std::string text = take_text(bytes);
      std::int64_t number = !text.empty() && (text.back() & 0x80) != 0 ? -1 : 0;
      std::memcpy(&number, text.data(), bytes);
      return push_value(number);
    }
    case 'G': {  // big-endian
      std::uint64_t bits = 0;
      for (int i = 0; i < 8; ++i) bits = bits << 8 | take<std::uint8_t>();
      return push_value(std::bit_cast<double>(bits));
    }
    default:
      fail(fmt::format("opcode {:#04x}, which plain data does not need", static_cast<unsigned char>(opcode)));
  }
}

void Unpickler::add_items(const TorchList& items) {
  auto* dictionary = std::get_if<std::shared_ptr<TorchDictionary>>(&top().value);
  if (dictionary == nullptr || items.size() % 2 != 0) fail("items of what is no dictionary");
  for (std::size_t i = 0; i < items.size(); i += 2) {
    const auto* key = std::get_if<std::string>(&items[i].value);
    if (key == nullptr) fail("a dictionary's key that is no text");
    (*dictionary)->emplace_back(*key, items[i + 1]);
  }
}

void Unpickler::append(TorchList items) {
  auto* list = std::get_if<std::shared_ptr<TorchList>>(&top().value);
  if (list == nullptr) fail("items of what is no list");
  for (TorchValue& item : items) (*list)->push_back(std::move(item));
}

void Unpickler::reduce() {
  const TorchValue arguments = pop(), function = pop();
  const auto* global = std::get_if<TorchGlobal>(&function.value);
  if (global == nullptr || arguments.list() == nullptr) fail("a call of what is no function");
  if (global->name == "collections OrderedDict") return push_value(std::make_shared<TorchDictionary>());
  if (global->name == "torch._utils _rebuild_tensor_v2") return push(rebuilt(*arguments.list()));
  fail(fmt::format("a {}, which is not read here", global->name));
}

/// ('storage', class, key, device, values): all of its bytes.
TorchValue Unpickler::storage_of(const TorchValue& id) const {
  const TorchList* parts = id.list();
  if (parts == nullptr || parts->size() < 3) fail("a storage without a name");
  const auto* global = std::get_if<TorchGlobal>(&(*parts)[1].value);
  const auto* key = std::get_if<std::string>(&(*parts)[2].value);
  const char* type = global == nullptr ? nullptr : type_of_storage(global->name);
  if (type == nullptr || key == nullptr)
    fail(fmt::format("a {}, which is not read here", global == nullptr ? "storage" : global->name));
  const auto found = archive_.members().find(root_ + "data/" + *key);
  if (found == archive_.members().end()) fail(fmt::format("storage {} is not in the file", *key));
  auto array = std::make_shared<NpyArray>();
  array->path = fmt::format("{}, storage {}", archive_.path(), *key);
  array->type = type;
  array->data.resize(found->second.size());
  std::memcpy(array->data.data(), found->second.data(), found->second.size());
  return TorchValue{std::move(array)};
}

std::size_t Unpickler::size_of(const TorchValue& number) const {
  const auto* value = std::get_if<std::int64_t>(&number.value);
  if (value == nullptr || *value < 0) fail("a size that is no number");
  return static_cast<std::size_t>(*value);
}

std::vector<std::size_t> Unpickler::sizes_of(const TorchValue& tuple) const {
  if (tuple.list() == nullptr) fail("a shape that is no tuple");
  std::vector<std::size_t> sizes;
  for (const TorchValue& one : *tuple.list()) sizes.push_back(size_of(one));
  return sizes;
}

/// (storage, offset, shape, strides, ...), all in values: a copy in C order.
TorchValue Unpickler::rebuilt(const TorchList& arguments) const {
  if (arguments.size() < 4 || arguments[0].tensor() == nullptr) fail("a tensor without a storage");
  const NpyArray& storage = *arguments[0].tensor();
  const std::size_t value_bytes = static_cast<std::size_t>(storage.type.back() - '0'), offset = size_of(arguments[1]);
  const std::vector<std::size_t> strides = sizes_of(arguments[3]);
  auto tensor = std::make_shared<NpyArray>();
  tensor->path = storage.path;
  tensor->type = storage.type;
  tensor->shape = sizes_of(arguments[2]);
  if (strides.size() != tensor->shape.size()) fail("a tensor of other strides than its shape");
  const std::size_t stored = storage.data.size() / value_bytes;
  std::size_t values = 1, last = offset;
  for (std::size_t axis = 0; axis < strides.size(); ++axis) {
    const std::size_t size = tensor->shape[axis];
    if (size > stored + 1 || strides[axis] > stored || values > stored) fail("a tensor that is larger than its storage");
    values *= size;
    last += size == 0 ? 0 : (size - 1) * strides[axis];
  }
  if (values > stored || (values > 0 && last >= stored)) fail("a tensor that is larger than its storage");
  tensor->data.resize(values * value_bytes);
  std::vector<std::size_t> index(strides.size(), 0);
  for (std::size_t i = 0; i < values; ++i) {
    std::size_t from = offset;
    for (std::size_t axis = 0; axis < strides.size(); ++axis) from += index[axis] * strides[axis];
    std::memcpy(tensor->data.data() + i * value_bytes, storage.data.data() + from * value_bytes, value_bytes);
    for (std::size_t axis = strides.size(); axis-- > 0 && ++index[axis] == tensor->shape[axis];) index[axis] = 0;
  }
  return TorchValue{std::move(tensor)};
}

}  // namespace

TorchValue read_torch_file(const std::string& path) {
  const Archive archive = Archive::open(path);
  constexpr std::string_view code = "data.pkl";
  for (const auto& [name, bytes] : archive.members()) {
    if (!name.ends_with(code)) continue;
    return Unpickler(archive, name.substr(0, name.size() - code.size()), bytes).run();
  }
  throw InputError(fmt::format("{}: no file of torch.save: it has no data.pkl", path));
}

}  // namespace heddle
