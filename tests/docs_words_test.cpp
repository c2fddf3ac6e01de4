// The protocol pages against the code: every word has its row, every function of a layout that places a
// word is named with the place it computes, and the sizes that the docs print are the code's. In all pages
// sources that are named exist and links lead somewhere.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "exchange/all_gather.hpp"
#include "exchange/elastic/layout.hpp"
#include "exchange/gather/layout.hpp"
#include "exchange/low_latency/layout.hpp"
#include "exchange/normal/layout.hpp"
#include "exchange/one_sided/layout.hpp"
#include "heddle/error.hpp"
#include "heddle/exchange.hpp"
#include "heddle/plan.hpp"
#include "mega/layout.hpp"
#include "signal/fault.hpp"
#include "signal/words.hpp"

namespace heddle {
namespace {

namespace fs = std::filesystem;

const fs::path root = fs::path(HEDDLE_TEST_DATA).parent_path().parent_path();

std::string text_of(const fs::path& file) {
  std::ifstream stream(root / file, std::ios::binary);
  EXPECT_TRUE(stream.is_open()) << "cannot open " << file;
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::vector<fs::path> pages() {
  std::vector<fs::path> files{"README.md", "CHANGELOG.md", "CONTRIBUTING.md"};
  for (const auto& entry : fs::recursive_directory_iterator(root / "docs")) {
    if (entry.path().extension() == ".md") files.push_back(fs::relative(entry.path(), root));
  }
  return files;
}

/// Every first group of `pattern` in a text.
std::vector<std::string> found_in(const std::string& text, const std::string& pattern) {
  const std::regex expression(pattern);
  std::vector<std::string> found;
  for (auto i = std::sregex_iterator(text.begin(), text.end(), expression); i != std::sregex_iterator(); ++i)
    found.push_back((*i)[1]);
  return found;
}

/// The enumerators of WordKind, in order, from the header itself.
std::vector<std::string> kinds() {
  const std::string header = text_of("src/signal/words.hpp");
  const std::size_t begin = header.find("enum class WordKind");
  const std::string body = header.substr(begin, header.find("};", begin) - begin);
  return found_in(body, "\n  (\\w+),");
}

/// The page of a word: of the way whose name its kind begins with, else what all pages share.
fs::path page_of(const std::string& kind) {
  for (const char* page : {"gather", "normal", "low_latency", "elastic", "one_sided", "all_gather", "mega"}) {
    if (kind.rfind(fmt::format("{}_", page), 0) == 0) return fmt::format("docs/protocols/{}.md", page);
  }
  return "docs/protocols/README.md";
}

bool has_row(const std::string& page, const std::string& begin) {
  for (const std::string& line : lines_of(page)) {
    if (line.rfind(begin, 0) == 0) return true;
  }
  return false;
}

/// 1234567 as "1,234,567", as the docs print it.
std::string grouped(std::size_t value) {
  return value < 1000 ? fmt::format("{}", value) : fmt::format("{},{:03}", grouped(value / 1000), value % 1000);
}

TEST(DocsWords, EveryWordHasARowWithItsTextOnThePageOfItsWay) {
  const std::vector<std::string> names = kinds();
  ASSERT_GT(names.size(), 1u);
  ASSERT_EQ(names[0], "none");
  for (std::size_t i = 1; i < names.size(); ++i) {
    const WordText text = word_text(static_cast<WordKind>(i));
    const std::string row = fmt::format("| `{}` | {}: {} |", names[i], text.phase, text.word);
    const fs::path page = page_of(names[i]);
    EXPECT_TRUE(has_row(text_of(page), row)) << page << " has no row that begins with\n" << row;
  }
  EXPECT_STREQ(word_text(static_cast<WordKind>(names.size())).phase, "unknown phase")
      << "the header's list was not read to its end";
}

TEST(DocsWords, EveryFunctionThatPlacesAWordIsNamed) {
  for (const std::string way : {"gather", "normal", "low_latency", "elastic", "one_sided", "all_gather", "mega"}) {
    const std::string layout = way == "all_gather" ? "src/exchange/all_gather.hpp"
                               : way == "mega"     ? "src/mega/layout.hpp"
                                                   : fmt::format("src/exchange/{}/layout.hpp", way);
    const std::string page = text_of(fmt::format("docs/protocols/{}.md", way));
    const auto functions = found_in(text_of(layout), "std::size_t (\\w+_word)\\(int");
    EXPECT_FALSE(functions.empty()) << layout;
    for (const std::string& function : functions) {
      EXPECT_NE(page.find(fmt::format("`{}(", function)), std::string::npos) << way << ".md does not name " << function;
    }
  }
}

/// A function of a layout as its page names it, with the place that it computes: "`tail_word(s)`, place 4R + s".
template <class Offset>
void expect_place(const char* way, const char* function, const char* peer, Offset offset) {
  ExchangeShape shape;
  shape.ranks = 7;
  constexpr std::size_t place_bytes = sizeof(Word) * most_squads;
  const auto from_words = [&](int number) { return offset(shape, number) - Areas{}.words; };
  const std::size_t row = from_words(0) / (7 * place_bytes);
  EXPECT_LT(row, static_cast<std::size_t>(word_rows)) << way << ": " << function;
  for (const int peer_number : {0, 1, 6}) {
    EXPECT_EQ(from_words(peer_number), (row * 7 + static_cast<std::size_t>(peer_number)) * place_bytes) << way << ": " << function;
  }
  const std::string base = row == 0 ? "" : row == 1 ? "R + " : fmt::format("{}R + ", row);
  const std::string text = fmt::format("`{}({})`, place {}{} ", function, peer, base, peer);
  const std::string page = text_of(fmt::format("docs/protocols/{}.md", way));
  EXPECT_NE(page.find(text), std::string::npos) << way << ".md does not say: " << text;
}

/// Binds a member function of a layout that takes a peer.
template <class Layout>
auto places(std::size_t (Layout::*function)(int) const) {
  return [function](const ExchangeShape& shape, int peer) {
    Layout layout;
    layout.shape = shape;
    return (layout.*function)(peer);
  };
}

TEST(DocsWords, PlacesAreTheLayouts) {
  expect_place("gather", "count_word", "s", places(&GatherLayout::count_word));
  expect_place("gather", "arrived_word", "s", places(&GatherLayout::arrived_word));
  expect_place("gather", "reduced_word", "s", places(&GatherLayout::reduced_word));
  expect_place("gather", "partial_word", "w", places(&GatherLayout::partial_word));
  expect_place("normal", "count_word", "s", places(&NormalLayout::count_word));
  expect_place("normal", "tail_word", "s", places(&NormalLayout::tail_word));
  expect_place("normal", "head_word", "d", places(&NormalLayout::head_word));
  expect_place("normal", "return_tail_word", "w", places(&NormalLayout::return_tail_word));
  expect_place("normal", "return_head_word", "h", places(&NormalLayout::return_head_word));
  expect_place("low_latency", "arrived_word", "s", places(&LowLatencyLayout::arrived_word));
  expect_place("low_latency", "returned_word", "w", places(&LowLatencyLayout::returned_word));
  expect_place("elastic", "count_word", "s", places(&ElasticLayout::count_word));
  expect_place("elastic", "returned_word", "w", places(&ElasticLayout::returned_word));
  expect_place("one_sided", "arrived_word", "s", places(&OneSidedLayout::arrived_word));
  expect_place("one_sided", "ready_word", "w", places(&OneSidedLayout::ready_word));
  expect_place("all_gather", "arrived_word", "s", places(&AllGatherLayout::arrived_word));
  expect_place("mega", "announced_word", "s", places(&MegaLayout::announced_word));
  expect_place("mega", "ready_word", "w", places(&MegaLayout::ready_word));
}

TEST(DocsWords, CountsOfLowLatencyEndItsDispatchArea) {
  const std::string page = text_of("docs/protocols/low_latency.md");
  EXPECT_NE(page.find("then `[L][R]` counts (i32), `count(e, s)` | `L R (C (row + 8) + 4)` |"), std::string::npos);
  LowLatencyLayout layout;
  layout.shape.ranks = 7;
  layout.shape.max_local_experts = 5;
  layout.shape.cap = 3;
  layout.wire = {Wire::bf16, 64, {}, 1.0f};
  layout.areas.dispatch = 4096;
  const std::size_t counts = 4096 + 5 * 7 * 3 * (layout.wire.row_bytes() + 8);
  for (const int e : {0, 1, 4}) EXPECT_EQ(layout.count(e, 6), counts + 4 * static_cast<std::size_t>(e * 7 + 6)) << e;
  EXPECT_EQ(layout.dispatch_bytes(), counts + 4 * 5 * 7 - 4096);
}

TEST(DocsWords, WordAreaIsAsLargeAsThePagesSay) {
  EXPECT_TRUE(has_row(text_of("docs/protocols/README.md"), "| words | `7,680 R` |"));
  EXPECT_NE(text_of("docs/ways.md").find("`128 + 7,680 R`"), std::string::npos);
  for (const int ranks : {1, 7, 32}) EXPECT_EQ(word_area_bytes(ranks), 7680 * static_cast<std::size_t>(ranks));
  const std::string place =
      fmt::format("*Place* n begins at `words + {} n` and has {} words", grouped(sizeof(Word) * most_squads), most_squads);
  EXPECT_NE(text_of("docs/protocols/README.md").find(place), std::string::npos) << place;
}

TEST(DocsWords, SourcesAndPagesThatAreNamedExist) {
  for (const fs::path& page : pages()) {
    const std::string text = text_of(page);
    for (const std::string& file : found_in(text, "`((?:src|include|tests|tools)/[\\w/]+\\.[chpu]+)`")) {
      EXPECT_TRUE(fs::exists(root / file)) << page << " names " << file;
    }
    for (const std::string& link : found_in(text, "\\]\\(([\\w./]+)[#)]")) {
      EXPECT_TRUE(fs::exists(root / page.parent_path() / link)) << page << " links to " << link;
    }
  }
}

/// A heading as a link names it: lower case, spaces as hyphens, punctuation left out.
std::string anchor_of(const std::string& heading) {
  std::string anchor;
  for (const char c : heading) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-') {
      anchor += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    } else if (c == ' ') {
      anchor += '-';
    }
  }
  return anchor;
}

TEST(DocsWords, LinksIntoAPageMeetAHeading) {
  for (const fs::path& page : pages()) {
    for (const std::string& link : found_in(text_of(page), "\\]\\(([\\w./]*#[\\w-]+)\\)")) {
      const std::string file = link.substr(0, link.find('#'));
      const fs::path target = file.empty() ? page : page.parent_path() / file;
      std::vector<std::string> anchors;
      for (const std::string& heading : found_in(text_of(target), "\n#+ ([^\n]+)")) anchors.push_back(anchor_of(heading));
      EXPECT_NE(std::find(anchors.begin(), anchors.end(), link.substr(link.find('#') + 1)), anchors.end())
          << page << " links to " << link;
    }
  }
}

TEST(DocsWords, HeaderFieldsLieWhereThePageSays) {
  const std::string page = text_of("docs/protocols/README.md");
  const auto expect_field = [&page](const std::string& name, std::size_t offset, std::size_t bytes) {
    const std::string row = fmt::format("| `{}` | {} | {} |", name, offset, bytes);
    EXPECT_TRUE(has_row(page, row)) << "docs/protocols/README.md has no row that begins with\n" << row;
  };
  expect_field("abort", offsetof(HeapHeader, abort), sizeof(HeapHeader::abort));
  expect_field("epoch", offsetof(HeapHeader, epoch), sizeof(HeapHeader::epoch));
  expect_field("call", offsetof(HeapHeader, call), sizeof(HeapHeader::call));
  expect_field("team", offsetof(HeapHeader, team), sizeof(HeapHeader::team));
  expect_field("arrivals", offsetof(HeapHeader, arrivals), sizeof(HeapHeader::arrivals));
  expect_field("doorbell", offsetof(HeapHeader, doorbell), sizeof(HeapHeader::doorbell));
  expect_field("sleepers", offsetof(HeapHeader, sleepers), sizeof(HeapHeader::sleepers));
  expect_field("fault", offsetof(HeapHeader, fault), sizeof(HeapHeader::fault));
  EXPECT_TRUE(has_row(page, fmt::format("| header | {} |", heap_header_bytes)));
}

TEST(DocsWords, SizesAreTheCodes) {
  const std::string page = text_of("docs/ways.md");
  const std::vector<int> caps{128, 1024, 4096};
  ASSERT_TRUE(has_row(page, "| way | C = 128 | C = 1,024 | C = 4,096 |"));
  const auto memory = [](Way way, Reduce reduce, int cap) {
    ExchangeOptions options;
    options.way = way;
    options.reduce = reduce;
    options.hidden = 4096;
    options.topk = 6;
    options.cap = cap;
    options.placement = Placement::contiguous(256, 8);
    options.arrived = default_layout(way);
    return exchange_memory(options);
  };
  const auto expect_sizes = [&](const std::string& name, Way way, Reduce reduce) {
    std::string row = fmt::format("| {} |", name);
    for (const int cap : caps) {
      const ExchangeMemory needed = memory(way, reduce, cap);
      row += fmt::format(" {} |", grouped(needed.dispatch + needed.combine));
    }
    EXPECT_TRUE(has_row(page, row)) << "docs/ways.md has no row\n" << row;
  };
  for (const Way way : {Way::gather, Way::normal, Way::low_latency, Way::elastic, Way::one_sided}) {
    expect_sizes(fmt::format("`{}`", name(way)), way, Reduce::rank);
  }
  expect_sizes("`elastic`, `reduce = home`", Way::elastic, Reduce::home);
  std::string outputs = "| outputs, beside any of them |";
  for (const int cap : caps) {
    outputs += fmt::format(" {} |", grouped(memory(Way::gather, Reduce::rank, cap).outputs));
  }
  EXPECT_TRUE(has_row(page, outputs)) << "docs/ways.md has no row\n" << outputs;
}

TEST(DocsWords, RegionsOfTheFusedLayerAreAsLargeAsItsPageSays) {
  const std::string page = text_of("docs/protocols/mega.md");
  EXPECT_NE(page.find("| `C (row + routing)` |"), std::string::npos);
  EXPECT_NE(page.find("| `L R (4 C + 4)`, up to a multiple of 128 |"), std::string::npos);
  EXPECT_NE(page.find("| `P B (row + 12)`, up to a multiple of 128 |"), std::string::npos);
  EXPECT_NE(page.find("| `P B (pad16(D) + 4 ceil(D / 128))` with fp8 and ue8m0, up to a multiple of 128 |"), std::string::npos);
  EXPECT_NE(page.find("| `C k back`, and `2 C H` |"), std::string::npos);
  EXPECT_NE(page.find("| `384 + 8 P (2 + ceil(D / 128))` |"), std::string::npos);
  MegaLayout layout;
  layout.shape = {7, 35, 5, 3, 11};
  layout.wire = {Wire::fp8, 192, {}, 1.0f};
  layout.returned = {Wire::bf16, 192, {}, 1.0f};
  layout.activated = {320, Activation::fp8, {}};
  layout.block_rows = 8;
  layout.ring_blocks = 9;
  const std::size_t row = layout.wire.row_bytes();
  EXPECT_EQ(layout.dispatch_bytes(), align_up(11 * (row + 32) + 5 * 7 * (4 * 11 + 4), 128) + align_up(72 * (row + 12), 128) +
                                         align_up(72 * (320 + 4 * 3), 128));
  EXPECT_EQ(layout.combine_bytes(), 11u * 3 * 384);
  EXPECT_EQ(layout.word_bytes(), 384u + 8 * 9 * (2 + 3));
  layout.has_shared = true;
  layout.shared = layout.activated;
  EXPECT_EQ(layout.combine_bytes(), 11u * 4 * 384);
  layout.returned.wire = Wire::nvfp4;
  EXPECT_EQ(layout.combine_bytes(), 11u * 3 * layout.returned.row_bytes() + 11 * 384);
  EXPECT_EQ(layout.sum_bytes(), 0u);
  layout.adds = true;
  EXPECT_EQ(layout.combine_bytes(), 11u * 384);
  EXPECT_EQ(layout.sum_bytes(), 11u * 384);
}

TEST(DocsWords, SizesOfTheFusedLayerAreTheLayouts) {
  const std::string page = text_of("docs/planning.md");
  const auto expect_row = [&page](const char* begin, int ranks, int cap, int shared_experts) {
    PlanRequest request;
    request.shape = find_preset("deepseek-v4-flash").shape;
    request.weights = WeightKind::mxfp4;
    request.wire = Wire::fp8;
    request.ranks = ranks;
    request.cap = cap;
    request.shared_experts = shared_experts;
    request.machine = find_machine("h200");
    const std::string row = fmt::format("{} {} | {} |", begin, grouped(mega_buffer(request, RingSize::live).bytes()),
                                        grouped(mega_buffer(request, RingSize::full).bytes()));
    EXPECT_TRUE(has_row(page, row)) << "docs/planning.md has no row\n" << row;
  };
  expect_row("| 8, 8,192 | 4.5 GB |", 8, 8192, 0);
  expect_row("| 8, 8,192, shared expert inside | 4.7 GB |", 8, 8192, 1);
  expect_row("| 8, 4,096 | 0.35 GB (a ring) |", 8, 4096, 0);
  expect_row("| 64, 8,192 | 22 GB; 0.6 GB with a ring |", 64, 8192, 0);
}

TEST(DocsWords, TheTokenBudgetsExampleIsThePlans) {
  const std::string page = text_of("docs/planning.md");
  PlanRequest request;
  const ModelPreset& preset = find_preset("deepseek-v4-flash");
  request.shape = preset.shape;
  request.weights = preset.weights.at(0);
  request.shared_experts = preset.shared_experts.value();
  request.wire = Wire::fp8;
  request.ranks = 8;
  request.machine = find_machine("h200");
  const TokenBudget budget{{1, 2, 4, 8, 16, 32, 64}, 1, 4, 65536, 8};
  const Plan plan = make_budget_plan(budget, request);
  const auto section = [&plan](const char* name) {
    return std::find_if(plan.sections.begin(), plan.sections.end(), [&](const Section& one) { return one.name == name; })
        ->quantities;
  };
  for (const Quantity& bound : section("budget")) {
    const std::string line = fmt::format("{}  {}", grouped(static_cast<std::size_t>(bound.value)), bound.formula);
    EXPECT_NE(page.find(line), std::string::npos) << "docs/planning.md has no line with\n" << line;
  }
  const std::vector<Quantity> whole = section("own_layouts"), decode = section("decode_layouts");
  ASSERT_EQ(whole.size(), decode.size());
  for (std::size_t way = 0; way < whole.size(); ++way) {
    const std::string row = fmt::format("| `{}` | {} | {} |", whole[way].name, grouped(static_cast<std::size_t>(whole[way].value)),
                                        grouped(static_cast<std::size_t>(decode[way].value)));
    EXPECT_TRUE(has_row(page, row)) << "docs/planning.md has no row\n" << row;
  }
  try {
    check_cap(budget, 4096);
    FAIL() << "a cap below the bound was taken";
  } catch (const InputError& error) {
    EXPECT_NE(page.find(fmt::format("heddle: {}\n", error.what())), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace heddle
