#include "generation.h"

#include <algorithm>
#include <chrono>

namespace sidecar {

Generation::Generation(Session & session, Chooser & chooser, Pacing * pacing, Limits limits)
    : session_(session), chooser_(chooser), pacing_(pacing), limits_(std::move(limits)), stream_(limits_.stop) {}

void Generation::see(const std::vector<llama_token> & tokens) {
    seen_.insert(seen_.end(), tokens.begin(), tokens.end());
    for (const llama_token token : tokens) lacks_rows_ |= !session_.knows(token);
}

std::string Generation::begin(llama_token first) {
    std::string shown;
    take({first}, shown);
    return shown;
}

std::optional<std::string> Generation::round() {
    need_ = Need::nothing;
    if (end_ == End::none && session_.cancelled) end_ = End::cancelled;
    if (end_ != End::none) return {};
    const int32_t n_room = limits_.n_ctx - session_.n_past() - 1;  // beside the last token, which is not decoded yet
    if (n_room < 0) {
        end_ = End::length;
        return {};
    }
    int32_t depth = std::min({limits_.depth, limits_.max_tokens - int32_t(n_tokens_) - 1, n_room});
    const bool plain = pacing_ != nullptr && !pacing_->drafting();
    if (pacing_ != nullptr) depth = std::min(depth, pacing_->depth());
    if (plain && session_.target().recurrent() && !session_.has_plain_context() && !asked_for_context_) {
        asked_for_context_ = true;
        need_ = Need::plain_context;
        return {};
    }
    if (depth > 0 && lacks_rows_) {  // reading rows takes longer than all else here: not while decoding plainly
        need_ = Need::rows;
        return {};
    }

    whole_ = false;
    place(plain);
    const Round round = session_.step(chooser_, depth, limits_.ignore_eog);
    std::string shown;
    const int32_t n_used = take(round.tokens, shown);
    if (n_used < int32_t(round.tokens.size())) session_.keep(n_used);
    whole_ = true;

    const int32_t n_drafted = int32_t(round.drafts.size());
    if (pacing_ != nullptr) pacing_->observe(n_drafted, round.n_accepted, round.draft_s, round.verify_s);
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_.n_rounds += 1;
    counts_.n_drafted += n_drafted;
    counts_.n_accepted += round.n_accepted;
    if (n_drafted > int32_t(counts_.drafted_at.size())) {
        counts_.drafted_at.resize(size_t(n_drafted));
        counts_.accepted_at.resize(size_t(n_drafted));
    }
    for (int32_t i = 0; i < n_drafted; ++i) {
        counts_.drafted_at[size_t(i)] += 1;
        counts_.accepted_at[size_t(i)] += i < round.n_accepted;
    }
    counts_.draft_s += round.draft_s;
    counts_.verify_s += round.verify_s;
    counts_.accept_s += round.accept_s;
    return shown;
}

std::string Generation::finish() {
    std::string tail = stream_.finish(end_ != End::stop);
    const std::lock_guard<std::mutex> lock(mutex_);
    text_ += tail;
    return tail;
}

std::vector<llama_token> Generation::take_seen() {
    std::vector<llama_token> seen;
    seen.swap(seen_);
    lacks_rows_ = false;
    return seen;
}

std::vector<llama_token> Generation::tokens_from(size_t n) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto begin = chosen_.begin();
    return {begin + ptrdiff_t(std::min(n, n_tokens_)), begin + ptrdiff_t(n_tokens_)};
}

std::vector<llama_token> Generation::chosen() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return chosen_;
}

std::string Generation::text() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return text_;
}

Counts Generation::counts() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counts_;
}

// Puts the sequence where its rounds are cheapest: a recurrent target's plain rounds, while pace does not draft, in the context
// without rollback slots.
void Generation::place(bool plain) {
    const bool was_plain = session_.is_plain();
    const auto started = std::chrono::steady_clock::now();
    session_.use_plain(plain);
    if (pacing_ != nullptr && session_.is_plain() != was_plain) {
        pacing_->switched(std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
    }
}

// Adds emitted tokens to the text; how many of them were used before it ended.
int32_t Generation::take(const std::vector<llama_token> & tokens, std::string & shown) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int32_t n_used = 0;
    for (const llama_token token : tokens) {
        n_used += 1;
        chosen_.push_back(token);
        seen_.push_back(token);
        const bool known = session_.knows(token);
        counts_.n_chosen += 1;
        counts_.n_known += known;
        lacks_rows_ |= !known;
        if (!limits_.ignore_eog && session_.is_eog(token)) {
            end_ = End::stop;
            break;
        }
        n_tokens_ += 1;
        shown += stream_.push(session_.piece(token));
        if (stream_.stopped()) {
            end_ = End::stop;
            break;
        }
        if (int32_t(n_tokens_) >= limits_.max_tokens) {
            end_ = End::length;
            break;
        }
    }
    text_ += shown;
    return n_used;
}

}  // namespace sidecar
