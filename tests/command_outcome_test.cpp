// Which rank of a failed job the command believes: the one that knows the cause, whatever its number.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../tools/heddle/outcome.hpp"

namespace heddle::tool {
namespace {

void repeats(int other) { throw FaultError({other, 0, "dispatch", "a word", 1, 0}); }

/// What the command says when these ranks end so; empty: nothing.
std::string said_of(const std::vector<std::function<void()>>& parts, ErrorKind kind = ErrorKind::fault) {
  std::vector<RankOutcome> outcomes(parts.size());
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank]) attempt(outcomes[rank], static_cast<int>(rank), parts[rank]);
  }
  try {
    throw_failure(outcomes);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  return "";
}

TEST(CommandOutcome, NothingIsSaidOfRanksThatAreDone) {
  EXPECT_EQ(said_of({[] {}, [] {}}), "");
}

TEST(CommandOutcome, ARanksOwnFaultIsBeforeThoseThatRepeatIt) {
  const std::string text = said_of({[] { repeats(2); }, [] { throw std::runtime_error("gone"); }, [] { repeats(2); }});
  EXPECT_EQ(text, FaultError({2, 0, "dispatch", "a word", 1, 0}).what());
  EXPECT_NE(said_of({[] { throw std::runtime_error("the first"); }, [] { repeats(0); }}).find("the first"), std::string::npos);
}

TEST(CommandOutcome, BadInputIsBeforeTheFaultsItLeadsTo) {
  EXPECT_EQ(said_of({[] { repeats(0); }, [] { throw InputError("rank 1 brings 9 tokens"); }, [] {}}, ErrorKind::input),
            "rank 1 brings 9 tokens");
}

TEST(CommandOutcome, ARankThatSaysNothingIsNamedWhereNobodyElseSpeaks) {
  EXPECT_NE(said_of({[] {}, nullptr}).find("rank 1"), std::string::npos);
  EXPECT_NE(said_of({nullptr, [] { repeats(1); }}).find("a word"), std::string::npos);
}

}  // namespace
}  // namespace heddle::tool
