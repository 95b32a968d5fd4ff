// Behind a round of greedy rows: what the host would put into the block for the next one, by the host's own rule (drafts
// are accepted while they are the best candidate of the position before; the token behind them is the next one's last).
//
// A thread is a row. ids [rows, drafts + 1] the last token and the drafts; best [rows, drafts + 1, candidates], the best
// first. In place: rows may change places, and a round's ids lie as far apart as its own drafts say, so all is read
// before any is written. next_start [.., slots] is filled for steps 1 .. next_drafts - 1; pairs [rows, width].
//
// Where rows left or joined, row b of the next round had the place places[b], or it is new and starts from new_start,
// new_commit and its first new_count of new_pairs. Null: the rows are the same.
extern "C" __global__ void advance_rows(int* slots, int* parity, int* start, int* commit, int* draft_start,
                                        int* last_row, int* next_start, int* pairs, int* ids, const int* places,
                                        const int* new_slots, const int* new_start, const int* new_commit,
                                        const int* new_count, const int* new_pairs, const int* best, int rows,
                                        int next_rows, int num_slots, int width, int drafts, int next_drafts,
                                        int candidates) {
  take_turn();
  const int b = threadIdx.x;
  const int* emitted = 0;  // count of them, the last at `position`
  int count = 0, position = 0, folded = 0;
  if (b < next_rows) {
    const int place = places ? places[b] : b;
    if (place >= 0) {
      const int* given = ids + place * (drafts + 1);
      const int* own = best + place * (drafts + 1) * candidates;
      int accepted = 0;
      while (accepted < drafts && given[accepted + 1] == own[accepted * candidates]) ++accepted;
      emitted = own;
      folded = count = accepted + 1;
      position = start[place] + count;
    } else {
      emitted = new_pairs + b * width;
      count = new_count[b], position = new_start[b], folded = new_commit[b];
    }
  }
  if (b < rows) parity[slots[b]] ^= 1;
  __syncthreads();
  if (b >= next_rows) return;
  const int step = places && places[b] < 0 ? 1 : candidates;
  if (places) slots[b] = new_slots[b];
  for (int i = 0; i < count; ++i) pairs[b * width + i] = emitted[i * step];
  for (int next = 1; next < next_drafts; ++next) next_start[next * num_slots + b] = position + next - 1;
  start[b] = position;
  commit[b] = folded;
  draft_start[b] = position - count;
  last_row[b] = count - 1;
  ids[b * (next_drafts + 1)] = emitted[(count - 1) * step];
}
