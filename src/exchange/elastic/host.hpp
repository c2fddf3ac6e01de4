// elastic on the host. What reaches a rank, and how results go home, is left to be replaced where the group has several nodes.
#pragma once

#include "exchange/elastic/protocol.hpp"
#include "exchange/host_exchange.hpp"

namespace heddle {

class ElasticExchange : public HostExchange {
 public:
  ElasticExchange(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory);

  void dispatch_send(const ExchangeInput& input, const Step& step) override;
  Arrived dispatch_receive() override;
  void combine_send(const bf16* results) override;
  void combine_receive(const CombineOutput& output) override;

 protected:
  /// Waits until every source's rows are in this rank's regions and their numbers in scratch_.arrived.
  virtual void await_rows();
  /// Sends results home and counts them.
  virtual void send_results(const ElasticResults& results);
  /// Awaits results and sums them.
  virtual void collect(const CombineOutput& output);

  /// Rows that go home to a source, whose first row arrived as number `first`.
  std::int64_t rows_home(int source, int first) const;

  bool by_expert() const { return options_.arrived != ArrivedLayout::routed; }
  bool weighted() const { return options_.weight_at == WeightAt::combine; }

  ElasticLayout layout_;
  ElasticScratch scratch_;

 private:
  void reserve(std::size_t rows);
  Arrived describe_arrived(int room) const;

  HostNumbering sent_;
  Array<std::int32_t> arrived_, home_tokens_, local_ids_;
  Array<float> weights_;
  Array<std::byte> rows_;
  Array<bf16> sums_;
  ExpandedRows expanded_;
  int received_ = 0;
};

}  // namespace heddle
