#include "generation.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>

namespace sidecar {

namespace {

constexpr std::chrono::milliseconds between_looks{100};

}  // namespace

Generation::Generation(Chooser & chooser, Pacing * pacing, Limits limits)
    : chooser_(chooser), pacing_(pacing), limits_(std::move(limits)), stream_(limits_.stop) {}

std::string Generation::begin(Session & session, llama_token first) {
    std::string shown;
    Round round;
    round.tokens = {first};
    take(session, round, Origin::plain, shown);
    return shown;
}

std::optional<std::string> Generation::rounds(Session & session, Turns & turns, double seconds, const std::function<void()> & look) {
    using Clock = std::chrono::steady_clock;
    const auto started = Clock::now();
    const auto ends = started + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e9)));
    auto now = started, looked = started;
    const Traffic before = session.traffic();
    const auto count = [&](const Traffic * from) {
        const std::lock_guard<std::mutex> lock(mutex_);
        counts_.traffic += session.traffic();
        counts_.traffic -= *from;
    };
    const std::unique_ptr<const Traffic, decltype(count)> counted(&before, count);
    std::optional<std::string> shown;
    bool goes_on = true;
    const std::function<void()> compute = [&] {
        do {
            const std::optional<std::string> more = round(session);
            if (more) (shown ? *shown : shown.emplace()) += *more;
            now = Clock::now();
            goes_on = more.has_value() && now < ends;
        } while (goes_on && now - looked < between_looks && !turns.is_over());
    };
    while (true) {
        turns.take();
        std::unique_ptr<Turns, void (*)(Turns *)> pass(&turns, [](Turns * turn) { turn->pass(); });
        turns.run(compute);
        if (!goes_on) {
            pass.release();
            break;
        }
        if (now - looked >= between_looks) {
            looked = now;
            pass.release();
            look();
        }
    }
    if (!shown) asked_for_context_ |= wants_plain_context_;
    return shown;
}

// No value when the text has ended or the round needs something first.
std::optional<std::string> Generation::round(Session & session) {
    wants_plain_context_ = false;
    if (end_ == End::none && session.cancelled) end_ = End::cancelled;
    if (end_ != End::none) return {};
    const int32_t n_room = limits_.n_ctx - session.n_past() - session.min_width();  // beside the last token, not decoded yet
    if (n_room < 0) {
        end_ = End::length;
        return {};
    }
    int32_t depth = std::min({limits_.depth, limits_.max_tokens - counts_.n_tokens - 1, n_room});
    Found found;
    int32_t n_found = 0;  // that this round verifies
    if (pacing_ != nullptr) {
        found = session.look_up(depth);
        if (!found.tokens.empty()) n_found = pacing_->depth_found(int32_t(found.tokens.size()), found.n_matched);
        depth = std::min(depth, pacing_->depth());
    }
    const bool plain = n_found == 0 && pacing_ != nullptr && !pacing_->drafting();
    if (plain && session.target().recurrent() && !session.has_plain_context() && !asked_for_context_) {
        wants_plain_context_ = true;
        return {};
    }

    whole_ = false;
    place(session, plain);
    const Round round = session.step(chooser_, depth, limits_.ignore_eog, {found.tokens.begin(), found.tokens.begin() + n_found});
    std::string shown;
    const int32_t n_used = take(session, round, n_found > 0 ? Origin::ngram : Origin::drafted, shown);
    if (n_used < int32_t(round.tokens.size())) session.keep(n_used);
    whole_ = true;

    const int32_t n_drafted = int32_t(round.drafts.size());
    if (n_drafted > 0) chooser_.observe(int32_t(round.tokens.size()), round.draft_s + round.verify_s + round.accept_s);
    if (n_found > 0) {
        pacing_->observe_found(n_drafted, round.n_accepted, round.verify_s);
    } else if (pacing_ != nullptr) {
        pacing_->observe(n_drafted, round.n_accepted, round.draft_s, round.verify_s);
    }
    if (found.n_matched > 0) compare(found, round.tokens);
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_.n_rounds += 1;
    counts_.n_drafted += n_drafted;
    counts_.n_accepted += round.n_accepted;
    if (n_found > 0) {
        counts_.n_ngram_rounds += 1;
        counts_.n_ngram_drafted += n_drafted;
        counts_.n_ngram_accepted += round.n_accepted;
    }
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
    if (!text_ends_.empty()) text_ends_.back() = std::max(text_ends_.back(), text_.size());
    finished_ = true;
    return tail;
}

std::vector<llama_token> Generation::tokens() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {chosen_.begin(), chosen_.begin() + counts_.n_tokens};
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

std::vector<Piece> Generation::pieces(size_t from) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Piece> pieces;
    for (size_t i = from; i < text_ends_.size() && (finished_ || text_ends_[i] <= text_.size()); ++i) {
        const size_t begin = std::min(i > 0 ? text_ends_[i - 1] : 0, text_.size());
        pieces.push_back({text_.substr(begin, text_ends_[i] - begin), chosen_[i], origins_[i]});
    }
    return pieces;
}

// Tells how far what was found is what the round emitted, whoever drafted.
void Generation::compare(const Found & found, const std::vector<llama_token> & emitted) {
    const size_t n = std::min(found.tokens.size(), emitted.size());
    size_t n_right = 0;
    while (n_right < n && found.tokens[n_right] == emitted[n_right]) n_right += 1;
    pacing_->compare_found(found.n_matched, int32_t(std::min(n_right + 1, n)), int32_t(n_right));
}

// Puts the sequence where its rounds are cheapest: a recurrent target's plain rounds, while pace does not draft, in the context
// without rollback slots.
void Generation::place(Session & session, bool plain) {
    const bool was_plain = session.is_plain();
    const auto started = std::chrono::steady_clock::now();
    session.use_plain(plain);
    if (pacing_ != nullptr && session.is_plain() != was_plain) {
        pacing_->switched(std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
    }
}

// Adds a round's tokens to the text; how many of them were used before it ended. `draft` is the origin of its drafts.
int32_t Generation::take(Session & session, const Round & round, Origin draft, std::string & shown) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Origin own = round.n_accepted < int32_t(round.drafts.size()) ? Origin::corrected : Origin::plain;
    int32_t n_used = 0;
    for (const llama_token token : round.tokens) {
        n_used += 1;
        chosen_.push_back(token);
        counts_.n_chosen += 1;
        counts_.n_known += session.see(token);
        if (!limits_.ignore_eog && session.is_eog(token)) {
            end_ = End::stop;
            break;
        }
        counts_.n_tokens += 1;
        shown += stream_.push(piece(session, token));
        origins_.push_back(n_used <= round.n_accepted ? draft : own);
        text_ends_.push_back(stream_.n_whole());
        if (stream_.stopped()) {
            end_ = End::stop;
            break;
        }
        if (counts_.n_tokens >= limits_.max_tokens) {
            end_ = End::length;
            break;
        }
    }
    text_ += shown;
    return n_used;
}

// The bytes of a token in this text.
const std::string & Generation::piece(Session & session, llama_token token) const {
    const std::string & bytes = session.piece(token);
    if (!bytes.empty()) return bytes;
    const auto found = limits_.preserved.find(token);
    return found == limits_.preserved.end() ? bytes : found->second;
}

}  // namespace sidecar
