// The vocabulary of a compact head: which of the target's tokens it has rows for, now.
//
// A token without a row can neither be drafted nor be told to the head, and a text uses its tokens again: names in code, words of a
// language that the head was not cut for. So some rows are spare. A token that turns up and has no row gets the spare one that was
// used least recently: its weights are read from the head's source and written over those in memory. That changes how much is
// accepted, never what.
//
// Shared by the sessions of a model: adopt() in the model's turn, when nothing computes; the others in the turn, too, or while
// nobody adopts.
#pragma once

#include <cstdint>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "llama_api.h"

namespace sidecar {

class DraftVocab {
  public:
    // A matrix with a row per token: its name in the loaded head, and where its source's rows lie.
    struct Matrix {
        std::string name, path;
        uint64_t offset, row_bytes;  // of the first row in the file; of each row there
        int32_t type, own_type;      // ggml's: in the file, in the loaded head
        int64_t width;               // elements of a row
    };

    // `ids` has the token of each row; `spare` those rows that may be given away, the next one first. The head's weights must lie in
    // memory of their own (not mapped, not repacked) and outlive all but the last adopt(). Where the library does not show weights,
    // or a source cannot be opened, rows stay as they are. Throws std::invalid_argument.
    DraftVocab(const llama_model * head, int32_t n_vocab, std::vector<llama_token> ids, const std::vector<int32_t> & spare,
               std::vector<Matrix> matrices);
    DraftVocab(const DraftVocab &) = delete;
    DraftVocab & operator=(const DraftVocab &) = delete;

    const std::vector<llama_token> & ids() const { return ids_; }
    bool has(llama_token token) const { return row_of_[size_t(token)] >= 0; }

    // What the token is fed as: without a row of its own it is row 0, which costs acceptance and nothing else.
    int32_t row_of(llama_token token) const { return has(token) ? row_of_[size_t(token)] : 0; }

    // Gives a row to each of these tokens that has none, as far as there are spare ones, the last ones first. Once a source cannot
    // be read any more, nothing changes.
    void adopt(const std::vector<llama_token> & tokens);

    // For tests: the token's row of a matrix as the head would have it; nothing where it cannot be read.
    std::vector<uint8_t> read(const std::string & name, llama_token token) const;

  private:
    // A file that is open for reading, while it lives; -1 where it cannot be.
    class File {
      public:
        explicit File(const std::string & path);
        File(File && other) noexcept : number_(std::exchange(other.number_, -1)) {}
        ~File();
        int number() const { return number_; }

      private:
        int number_;
    };
    struct Source {
        Matrix matrix;
        File file;
        std::vector<ggml_tensor *> tensors;  // a matrix that is embeddings and output has two in some backends' memory
        size_t own_row_bytes;
    };

    std::vector<uint8_t> read(const Source & source, llama_token token) const;

    std::vector<llama_token> ids_;
    std::vector<int32_t> row_of_;                        // (n_vocab,): -1 for none
    std::list<int32_t> spare_;                           // rows, the next to be given away first
    std::vector<std::list<int32_t>::iterator> place_of_;  // (n_rows,) in spare_; its end for rows that stay
    std::vector<Source> sources_;
    bool can_give_ = true;
};

}  // namespace sidecar
