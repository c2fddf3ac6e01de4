// Scales of groups whose values many math warps have: each warp tells what it has found, and all take the least word.
#pragma once

#include <climits>
#include <cstdint>

#include <cutlass/arch/barrier.h>

#include "experts/activation/group_scale.hpp"
#include "experts/sm90/shared.cuh"
#include "signal/ptx.cuh"

namespace heddle::sm90 {

/// The scale of a magnitude as a word that is the less the larger the magnitude is, so that the least of a group's is its scale.
template <ScaleFormat format>
struct ScaleWord;

/// The inverse of the scale, which codes are made with: nothing is to be worked out where the word is read.
template <>
struct ScaleWord<ScaleFormat::ue8m0> {
  using Scale = GroupScale<ScaleFormat::ue8m0>;
  static constexpr std::int32_t nan = -0x400000;  ///< a NaN, too, and below all others

  __device__ static std::int32_t of(float largest) {
    const Scale scale = Scale::of(largest);
    return scale.byte == ue8m0_nan ? nan : static_cast<std::int32_t>(float_bits(scale.inverse));
  }
  __device__ static Scale scale(std::int32_t word) {
    return {static_cast<std::uint32_t>(254 - (word >> 23)), float_from_bits(static_cast<std::uint32_t>(word))};
  }
};

/// The magnitude's distance from the largest word.
template <>
struct ScaleWord<ScaleFormat::f32> {
  using Scale = GroupScale<ScaleFormat::f32>;

  __device__ static std::int32_t of(float largest) { return INT_MAX - static_cast<std::int32_t>(float_bits(largest)); }
  __device__ static Scale scale(std::int32_t word) {
    return Scale::of(float_from_bits(static_cast<std::uint32_t>(INT_MAX - word)));
  }
};

/// The words of a task, in two sets that take turns. All math threads meet twice in every task that has some: before the first
/// meeting words are told; between both they are read, and the set of the next task is emptied. So nobody tells before all of its
/// set is empty: the second meeting lies between. And nobody empties what is still read: that was before the second meeting of the
/// task before.
template <class Shape>
class SharedScales {
 public:
  /// Before the first task, by all math threads together.
  __device__ static void begin(Shared<Shape>& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) shared.activation.turn = 0;
    for_own_words(thread, [&](int, int word) { first_word(shared, 0)[word] = INT_MAX; });
    meet();
  }
  __device__ static void meet() { cutlass::arch::NamedBarrier::sync(Shape::math_threads, 1); }

  /// Before the first meeting. thread: of the math threads.
  __device__ SharedScales(Shared<Shape>& shared, int thread) : shared_(shared), thread_(thread), turn_(shared.activation.turn) {}

  __device__ void tell(int group, int token, std::int32_t word) {
    ptx::min_relaxed_cta(first_word(shared_, turn_) + group * Shape::most_tokens + token, word);
  }
  /// The words of a group's tokens from this one on.
  __device__ const std::int32_t* told(int group, int token) const {
    return first_word(shared_, turn_) + group * Shape::most_tokens + token;
  }

  /// Between both meetings, by all math threads: the next task's words are emptied.
  __device__ __forceinline__ void turn() {
    for_own_words(thread_, [&](int i, int word) {
      own_[i] = first_word(shared_, turn_)[word];
      first_word(shared_, turn_ ^ 1)[word] = INT_MAX;
    });
    if (thread_ == 0) shared_.activation.turn = turn_ ^ 1;
  }
  /// At any time behind it: each(group, token, word), each word by one thread.
  template <class Each>
  __device__ __forceinline__ void for_each(const Each& each) const {
    for_own_words(thread_, [&](int i, int word) {
      const int group = groups == 1 ? 0 : word / Shape::most_tokens;
      each(group, word - group * Shape::most_tokens, own_[i]);
    });
  }

 private:
  static constexpr int groups = ActivationMemory<Shape>::groups;
  static constexpr int words = groups * Shape::most_tokens;
  static constexpr int own_words = (words + Shape::math_threads - 1) / Shape::math_threads;  ///< of a thread

  /// work(i, word) for the thread's i-th word. The last threads have the first ones: others have more to store.
  template <class Work>
  __device__ __forceinline__ static void for_own_words(int thread, const Work& work) {
#pragma unroll
    for (int i = 0; i < own_words; ++i) {
      const int word = (i + 1) * Shape::math_threads - 1 - thread;
      if (word < words) work(i, word);
    }
  }
  __device__ static std::int32_t* first_word(Shared<Shape>& shared, int turn) { return shared.activation.scales[turn][0]; }

  Shared<Shape>& shared_;
  int thread_;
  int turn_;
  std::int32_t own_[own_words] = {};  ///< kept for for_each
};

/// Largest magnitudes of values of different tokens, on their way to one lane each.
template <int count>
struct Peaks {
  static constexpr int half = (count + 1) / 2;
  float of[count];

  /// Lanes so far apart have values of the same tokens. One goes on with the first half of them, the `upper` one with the others.
  /// NaN counts as nothing where the other is a number.
  __device__ __forceinline__ Peaks<half> meet(int distance, bool upper) const {
    Peaks<half> peaks;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float first = of[i];
      const float second = half + i < count ? of[half + i] : 0.0f;
      peaks.of[i] =
          largest_magnitude(fabsf(upper ? second : first), __shfl_xor_sync(0xFFFFFFFFu, upper ? first : second, distance));
    }
    return peaks;
  }
};

}  // namespace heddle::sm90
