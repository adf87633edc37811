// Long rows of a CSR matrix in pieces, so that no thread walks more than `piece` entries.
//
// The entries are cut into chunks of `piece`. A row of more entries than that is long: wherever it
// begins, it reaches into the next chunk. So a chunk has at most two pieces of long rows: number
// 2 * chunk of a row that began before it, and 2 * chunk + 1 of one that begins in it. Nothing is
// prepared: a thread finds its piece from the number, in an indptr that may be filled again.

struct RowPiece {
    int row, begin, end;  // row < 0: there is no piece of this number
};

__device__ inline RowPiece piece_of(const int *indptr, int n_rows, unsigned number, int piece)
{
    const long long first = (long long)(number / 2) * piece;
    const long long total = indptr[n_rows];  // possibly fewer than there is room for
    RowPiece found = {-1, 0, 0};
    if (first >= total) return found;
    const long long after = first + piece < total ? first + piece : total;
    // A long row that begins in the chunk is the last one that does.
    const int row = segment_of(indptr, n_rows, number % 2 ? after - 1 : first);
    const int begin = indptr[row], end = indptr[row + 1];
    const bool begins_here = begin >= first;
    if (end - begin > piece && begins_here == (number % 2 == 1)) {
        found.row = row;
        found.begin = begins_here ? begin : first;
        found.end = end < after ? end : after;
    }
    return found;
}
