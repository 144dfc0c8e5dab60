// Feeds the native code that parses bytes with any bytes there are: the text stream (tokens' bytes, stop strings) and what is read
// of saved states. Checked besides memory and overflow (sanitizers): text comes out as UTF-8, the same however it is cut into pieces.
//
// With Clang this is a libFuzzer target; with any other compiler `main` below makes random inputs for so many seconds. Knows
// neither llama.cpp nor Python.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "../../../runtime/native/bytes.h"
#include "../../../runtime/native/draft_context.h"
#include "../../../runtime/native/text.h"

namespace {

using Bytes = std::vector<uint8_t>;

const Bytes * current = nullptr;  // the input that is being read

void require(bool is_so, const char * what) {
    if (is_so) return;
    std::fprintf(stderr, "fault: %s:", what);
    for (const uint8_t byte : *current) std::fprintf(stderr, " %02x", byte);
    std::fprintf(stderr, "\n");
    std::abort();
}

bool is_utf8(const std::string & text) {
    for (size_t i = 0; i < text.size();) {
        const auto lead = static_cast<unsigned char>(text[i]);
        const size_t n = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
        if (n == 0 || i + n > text.size()) return false;
        for (size_t j = 1; j < n; ++j) {
            const auto next = static_cast<unsigned char>(text[i + j]);
            const bool is_second = j == 1;
            const unsigned char least = is_second && lead == 0xE0 ? 0xA0 : is_second && lead == 0xF0 ? 0x90 : 0x80;
            const unsigned char most = is_second && lead == 0xED ? 0x9F : is_second && lead == 0xF4 ? 0x8F : 0xBF;
            if (next < least || next > most) return false;
        }
        i += n;
    }
    return true;
}

std::string written(const std::vector<std::string> & stops, const std::string & text, size_t piece) {
    sidecar::TextStream stream(stops);
    std::string out;
    for (size_t at = 0; at < text.size() && !stream.stopped(); at += piece) out += stream.push(text.substr(at, piece));
    return stream.stopped() ? out : out + stream.finish(false);
}

// The first bytes say how long the pieces and the two stop strings are.
void run_text(const Bytes & data) {
    if (data.size() < 4) return;
    std::string rest(data.begin() + 3, data.end());
    std::vector<std::string> stops;
    for (size_t i = 1; i < 3; ++i) {
        const size_t n = std::min<size_t>(data[i] % 5, rest.size());
        if (n > 0) stops.push_back(written({}, rest.substr(0, n), n));  // stop strings come from Python, as UTF-8
        rest.erase(0, n);
    }
    const std::string whole = written(stops, rest, rest.size() + 1);
    require(is_utf8(whole), "the text is no UTF-8");
    if (stops.size() > 1) return;  // of two that overlap, pieces decide which is whole first
    require(whole == written(stops, rest, 1), "the text depends on how it is cut into single bytes");
    require(whole == written(stops, rest, 1 + data[0] % 7), "the text depends on how it is cut into pieces");
}

void run_state(const Bytes & data) {
    try {
        sidecar::ByteReader in(data);
        sidecar::WaitingRows rows(4);
        std::vector<int32_t> tokens;
        std::vector<float> carry;
        uint64_t n = 0;
        rows.get(in);
        in.get(tokens);
        in.get(n);
        in.get(carry);
        in.finish();
        require(rows.end() >= rows.first(), "rows end before they begin");
        sidecar::ByteWriter out;
        rows.put(out);
        out.put(tokens);
        out.put(n);
        out.put(carry);
        require(out.take() == data, "what was read is not what is written");
    } catch (const std::invalid_argument &) {
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t n) {
    const Bytes bytes(data, data + n);
    current = &bytes;
    run_text(bytes);
    run_state(bytes);
    return 0;
}

#ifndef LIBFUZZER
int main(int argc, char ** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 10.0;
    std::mt19937_64 random(0);
    const auto below = [&](uint64_t n) { return random() % n; };
    // A saved state of two rows and three tokens, and text of every length of character, as what inputs are made of.
    const std::string text = "a\xC3\xA4\xE2\x82\xAC\xF0\x9F\x98\x80 stop<|end|>\xED\xA0\x80\xC0\x80\xF5";
    sidecar::ByteWriter out;
    out.put(int32_t(7));
    out.put(std::vector<float>(8, 1.0f));
    out.put(std::vector<int32_t>{1, 2, 3});
    out.put(uint64_t(0));
    out.put(std::vector<float>(4, 0.5f));
    const Bytes state = out.take();
    const uint8_t odd[] = {0, 1, 2, 3, 4, 8, 0x7F, 0x80, 0xBF, 0xC2, 0xE0, 0xED, 0xF0, 0xF4, 0xFE, 0xFF};
    unsigned long long n_inputs = 0;
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (n_inputs % 256 != 0 || std::chrono::steady_clock::now() < end) {
        Bytes data = below(2) ? state : Bytes{uint8_t(below(256)), uint8_t(below(256)), uint8_t(below(256))};
        for (uint64_t i = below(20); i > 0; --i) {
            const size_t start = below(text.size());
            data.insert(data.end() - ptrdiff_t(below(std::min<size_t>(data.size(), 8))), text.begin() + ptrdiff_t(start),
                        text.begin() + ptrdiff_t(start + below(text.size() - start) + 1));
        }
        for (uint64_t i = below(6); i > 0; --i) data[below(data.size())] = below(2) ? odd[below(sizeof odd)] : uint8_t(random());
        if (below(8) == 0) data.resize(below(data.size()) + 1);
        LLVMFuzzerTestOneInput(data.data(), data.size());
        ++n_inputs;
    }
    std::printf("%llu\n", n_inputs);
}
#endif
