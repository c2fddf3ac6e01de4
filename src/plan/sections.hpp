// The plan's sections: names for programs, titles for people, formulas with the inputs filled in.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/plan.hpp"

namespace heddle::plan {

/// In the order of printing; a section without numbers is empty.
std::vector<Section> all_sections(const PlanRequest& request, const std::map<Way, LayoutBytes>& layouts);

/// Every region of the buffers that the articles describe, and for each way its `WAY.total`.
Section buffer_section(const PlanRequest& request);

/// The fused layer's regions, and `live.total` and `full.total`.
Section mega_section(const PlanRequest& request);

/// What the ways' own layouts report, under `name`.
Section layouts_section(std::string name, const PlanRequest& request, const std::map<Way, LayoutBytes>& layouts);

/// elastic over the request's nodes, direct against hybrid; empty for one node.
Section nodes_section(const PlanRequest& request);

/// What a rank does: grids, GEMMs, floors and the time model.
std::vector<Section> compute_sections(const PlanRequest& request);

/// Appends numbers of one unit to a section.
class Adder {
 public:
  Adder(Section& section, Unit unit) : section_(section), unit_(unit) {}
  void operator()(std::string name, std::string title, double value, std::string formula, std::string source) const {
    section_.quantities.push_back({std::move(name), std::move(title), value, unit_, std::move(formula), std::move(source)});
  }

 private:
  Section& section_;
  Unit unit_;
};

inline std::string exchange_article(std::string_view section) { return "exchange-ways article, " + std::string(section); }
inline std::string fused_article(std::string_view section) { return "fused-kernel article, " + std::string(section); }
inline std::string grid_article(std::string_view section) { return "persistent-grid article, " + std::string(section); }

}  // namespace heddle::plan
