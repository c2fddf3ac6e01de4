#include "trace/words.hpp"

namespace heddle::trace {

const char* name(Role role) {
  switch (role) {
    case Role::rank:
      return "rank";
    case Role::worker:
      return "worker";
    case Role::dispatch:
      return "dispatch";
    case Role::tasks:
      return "tasks";
    case Role::claim:
      return "claim";
    case Role::rows:
      return "rows";
    case Role::scales:
      return "scales";
    case Role::widen:
      return "widen";
    case Role::math:
      return "math";
  }
  return "unknown";
}

const char* name(Kind kind) {
  switch (kind) {
    case Kind::dispatch:
      return "dispatch";
    case Kind::move:
      return "move";
    case Kind::regroup:
      return "regroup";
    case Kind::products:
      return "products";
    case Kind::activation:
      return "activation";
    case Kind::epilogue:
      return "epilogue";
    case Kind::shared:
      return "shared expert";
    case Kind::combine:
      return "combine";
    case Kind::announce:
      return "announce";
    case Kind::count:
      return "count";
    case Kind::fetch:
      return "fetch";
    case Kind::claim:
      return "claim";
    case Kind::weights:
      return "weights";
    case Kind::rows:
      return "rows";
    case Kind::scales:
      return "scales";
    case Kind::widen:
      return "widen";
    case Kind::sum:
      return "sum";
    case Kind::next_task:
      return "next task";
    case Kind::wait:
      return "wait";
  }
  return "unknown";
}

const char* name(Product product) {
  switch (product) {
    case Product::none:
      return "";
    case Product::gemm1:
      return "gemm1";
    case Product::gemm2:
      return "gemm2";
    case Product::shared_gemm1:
      return "shared_gemm1";
    case Product::shared_gemm2:
      return "shared_gemm2";
  }
  return "";
}

std::string text_of(const Span& span) {
  if (span.kind == Kind::wait) return word_text(span.word.kind).word;
  std::string text = name(span.kind);
  if (span.task.product != Product::none) text += std::string(" of ") + name(span.task.product);
  return text;
}

std::array<const char*, summed_waits> waits_of(Kind kind) {
  switch (kind) {
    case Kind::claim:
      return {nullptr, "room for a task"};
    case Kind::weights:
      return {nullptr, "room for weights"};
    case Kind::rows:
    case Kind::scales:
      return {nullptr, "room for rows"};
    case Kind::widen:
      return {"weights", "room for operands"};
    case Kind::products:
      return {"weights", "rows"};
    default:
      return {nullptr, nullptr};
  }
}

}  // namespace heddle::trace
