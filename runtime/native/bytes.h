// Values as bytes, one behind another, for states that are kept in files. In the machine's own order.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace sidecar {

class ByteWriter {
  public:
    template <class T>
    void put(const T & value) {
        static_assert(std::is_arithmetic_v<T>);
        put_raw(&value, sizeof(T));
    }
    template <class T>
    void put(const std::vector<T> & values) {
        static_assert(std::is_arithmetic_v<T>);
        put(uint64_t(values.size()));
        put_raw(values.data(), values.size() * sizeof(T));
    }
    std::vector<uint8_t> take() { return std::move(bytes_); }

  private:
    void put_raw(const void * data, size_t n) {
        const uint8_t * start = static_cast<const uint8_t *>(data);
        bytes_.insert(bytes_.end(), start, start + n);
    }

    std::vector<uint8_t> bytes_;
};

// Reads in the order of writing; throws std::invalid_argument where there is less than is asked for.
class ByteReader {
  public:
    explicit ByteReader(const std::vector<uint8_t> & bytes) : bytes_(bytes) {}

    template <class T>
    void get(T & value) {
        std::memcpy(&value, next(sizeof(T)), sizeof(T));
    }
    template <class T>
    void get(std::vector<T> & values) {
        uint64_t n = 0;
        get(n);
        if (n > (bytes_.size() - at_) / sizeof(T)) fail();
        values.resize(size_t(n));
        if (n > 0) std::memcpy(values.data(), next(size_t(n) * sizeof(T)), size_t(n) * sizeof(T));
    }
    // To be called at the end: nothing may be left.
    void finish() const {
        if (at_ != bytes_.size()) fail();
    }

  private:
    const uint8_t * next(size_t n) {
        if (n > bytes_.size() - at_) fail();
        const uint8_t * found = bytes_.data() + at_;
        at_ += n;
        return found;
    }
    [[noreturn]] static void fail() { throw std::invalid_argument("a saved state is not as long as it says"); }

    const std::vector<uint8_t> & bytes_;
    size_t at_ = 0;
};

}  // namespace sidecar
