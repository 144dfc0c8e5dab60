// What a context's decodes move between the host and the devices that compute, and how often the host waits for them.
//
// Counted where this code calls llama.cpp, from shapes: after a decode llama.cpp copies every output row's logits and every hidden
// row that it was told to hand out, whether or not anybody reads them. On the CPU nothing has to cross, and the counts are the
// same, so that a trip too many shows without a GPU.
//
// It does not know what llama.cpp moves by itself: token ids, positions and masks (some KB a decode), and whatever its
// backends exchange where a graph runs on several of them.
#pragma once

#include <cstdint>

namespace sidecar {

struct Traffic {
    int64_t n_decodes = 0;
    int64_t n_graphs_reused = 0;  // of these: llama.cpp had the graph from the decode before, and a backend its recording of it
    int64_t n_syncs = 0;          // calls that wait until the backend is idle
    int64_t logits_bytes = 0;     // to the host; token ids beside them where the backend picks
    int64_t hidden_bytes = 0;     // to the host: hidden rows handed out
    int64_t fed_bytes = 0;        // to the device: hidden rows in the drafter's batches
    int64_t state_bytes = 0;      // either way: a sequence's state, for checkpoints and moves between contexts

    Traffic & operator+=(const Traffic & other) { return add(other, 1); }
    Traffic & operator-=(const Traffic & other) { return add(other, -1); }

  private:
    Traffic & add(const Traffic & other, int64_t sign) {
        n_decodes += sign * other.n_decodes;
        n_graphs_reused += sign * other.n_graphs_reused;
        n_syncs += sign * other.n_syncs;
        logits_bytes += sign * other.logits_bytes;
        hidden_bytes += sign * other.hidden_bytes;
        fed_bytes += sign * other.fed_bytes;
        state_bytes += sign * other.state_bytes;
        return *this;
    }
};

}  // namespace sidecar
