// Feeds the native code that parses bytes with any bytes there are: the text stream (tokens' bytes, stop strings) and what is read
// of saved states. Checked besides memory and overflow (sanitizers): text comes out as UTF-8, the same however it is cut into pieces.
//
// With Clang this is a libFuzzer target; with any other compiler `main` below makes inputs for so many seconds, and goes on from
// those that reach new edges where the compiler reports edges (GCC's -fsanitize-coverage=trace-pc). Knows neither llama.cpp nor
// Python.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
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
namespace {

// The edges of all inputs so far, by a hash of where one leads from and to.
bool edges[1 << 16];
size_t n_edges = 0;
uintptr_t last = 0;
bool is_running = false, has_new = false;

// A saved state of two rows and three tokens.
Bytes sound_state() {
    sidecar::ByteWriter out;
    out.put(int32_t(7));
    out.put(std::vector<float>(8, 1.0f));
    out.put(std::vector<int32_t>{1, 2, 3});
    out.put(uint64_t(0));
    out.put(std::vector<float>(4, 0.5f));
    return out.take();
}

struct Mutator {
    std::mt19937_64 random{std::random_device{}()};

    size_t below(size_t n) { return size_t(random() % n); }

    // Pieces of a text with characters of every length put in, bytes changed, and the end cut off.
    Bytes changed(Bytes data) {
        static const std::string text = "a\xC3\xA4\xE2\x82\xAC\xF0\x9F\x98\x80 stop<|end|>\xED\xA0\x80\xC0\x80\xF5";
        static const uint8_t odd[] = {0, 1, 2, 3, 4, 8, 0x7F, 0x80, 0xBF, 0xC2, 0xE0, 0xED, 0xF0, 0xF4, 0xFE, 0xFF};
        if (below(2)) {
            for (size_t i = below(20); i > 0 && data.size() < 4096; --i) {
                const size_t start = below(text.size());
                data.insert(data.end() - ptrdiff_t(below(std::min<size_t>(data.size(), 8) + 1)), text.begin() + ptrdiff_t(start),
                            text.begin() + ptrdiff_t(start + below(text.size() - start) + 1));
            }
        }
        for (size_t i = below(6); i > 0 && !data.empty(); --i) data[below(data.size())] = below(2) ? odd[below(sizeof odd)] : uint8_t(random());
        if (below(8) == 0) data.resize(below(data.size() + 1));
        return data;
    }
};

// Kept under a hash of it, so that twice the same is one file.
void keep(const std::filesystem::path & folder, const Bytes & data) {
    char name[17];
    std::snprintf(name, sizeof name, "%016zx", std::hash<std::string>()(std::string(data.begin(), data.end())));
    std::ofstream(folder / name, std::ios::binary).write(reinterpret_cast<const char *>(data.data()), std::streamsize(data.size()));
}

}  // namespace

// GCC calls it at the beginning of every block; it calls nothing, since what it called would call it.
extern "C" __attribute__((no_sanitize_coverage, no_sanitize("address", "undefined"))) void __sanitizer_cov_trace_pc() {
    if (!is_running) return;
    const auto here = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
    const size_t edge = (here ^ last) % sizeof edges;
    last = here >> 1;
    if (edges[edge]) return;
    edges[edge] = has_new = true;
    ++n_edges;
}

// SECONDS FOLDER: prints how many inputs there were and how many edges they reached.
int main(int argc, char ** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 10.0;
    const std::filesystem::path folder = argc > 2 ? argv[2] : ".";
    std::vector<Bytes> kept;
    for (const auto & entry : std::filesystem::directory_iterator(folder)) {
        std::ifstream file(entry.path(), std::ios::binary);
        kept.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    kept.push_back(sound_state());
    kept.push_back({3, 1, 2, 'a', 's', 't', 'a'});
    Mutator mutator;
    unsigned long long n_inputs = 0;
    const auto run = [&](const Bytes & data) {
        has_new = false;
        last = 0;
        is_running = true;
        LLVMFuzzerTestOneInput(data.data(), data.size());
        is_running = false;
        ++n_inputs;
    };
    for (const Bytes & data : kept) run(data);
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (n_inputs % 256 != 0 || std::chrono::steady_clock::now() < end) {
        const Bytes data = mutator.changed(kept[mutator.below(kept.size())]);
        run(data);
        if (!has_new) continue;
        kept.push_back(data);
        keep(folder, data);
    }
    std::printf("%llu inputs, %zu edges\n", n_inputs, n_edges);
}
#endif
