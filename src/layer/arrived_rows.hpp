// From rows as they arrived to rows as the GEMMs take them.
#pragma once

#include <memory>

#include "exchange/host_exchange.hpp"
#include "experts/row_view.hpp"
#include "formats/row_format.hpp"
#include "heddle/exchange.hpp"
#include "heddle/experts.hpp"

namespace heddle {

/// Rows in activation format. Where the wire already has it (or is bf16, which the runner quantises
/// itself) arrived rows are used in place; otherwise the real ones are converted into a buffer. With
/// `own` rows behind them (a fused shared expert) everything moves into the buffer.
class ActivationRows {
 public:
  ActivationRows(int hidden, int topk, int local_experts, Wire wire, Activation activation, const Quantisation& quantisation);

  RowView prepare(const Arrived& arrived, const bf16* own, int own_rows, std::size_t own_begin);

 private:
  template <class Visit>
  void for_real_rows(const Arrived& arrived, Visit visit) const;
  void reserve(std::size_t rows);

  int topk_;
  int local_experts_;
  RowFormat wire_;
  RowFormat format_;
  Array<std::byte> buffer_;
  std::size_t room_ = 0;
};

}  // namespace heddle
