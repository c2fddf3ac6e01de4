// What recovery is on either engine: steps that are run again, roll calls, and the times of all that. Engines say how a call under
// way is ended and how everything is made for a new mask.
#pragma once

#include <functional>
#include <vector>

#include "heddle/recovery.hpp"
#include "recovery/agreement.hpp"

namespace heddle {

class RecoveryDriver {
 public:
  struct Engine {
    /// Ends the calls of all ranks that still work with the present mask. May be called where nothing has been built.
    std::function<void()> interrupt;
    /// Collective over the members: makes everything for them, from a meeting that nobody passes before all have left what was
    /// there. Fills in the times.
    std::function<void(const Members&, Interruption&)> rebuild;
    /// The member that brought a rank of the layers' workspace, which errors of a step name.
    std::function<int(int)> member_of;
  };
  RecoveryDriver(Group& group, const RecoveryOptions& options, Engine engine);

  void start(Entry entry);
  void step(const std::function<void()>& body);
  void rejoin();

  const Members& members() const { return agreement_.members(); }
  std::uint32_t steps() const { return agreement_.finished(); }
  const std::vector<Interruption>& interruptions() const { return interruptions_; }
  int rank() const { return group_.rank(); }

 private:
  struct Trouble;
  std::optional<Trouble> attempt(const std::function<void()>& body);
  void recover(Trouble trouble);
  bool rebuild(Interruption& interruption, Trouble& trouble);
  void wait_after_vain_returns();
  std::vector<bool> suspects(int member) const;
  Patience patience() const;

  Group& group_;
  RecoveryOptions options_;
  Engine engine_;
  Agreement agreement_;
  bool is_built_ = false;
  std::uint32_t idle_roll_calls_ = 0;  ///< in a row, of this step: they have lost and brought back nobody
  int vain_returns_ = 0;               ///< how often this rank came back since it last ended a step
  std::vector<Interruption> interruptions_;
};

}  // namespace heddle
