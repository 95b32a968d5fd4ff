// Behind a round of greedy rows: what the host would put into the block for the next one, by the host's own rule (drafts
// are accepted while they are the best candidate of the position before; the token behind them is the next one's last).
//
// A thread is a row. ids [rows, drafts + 1] the last token and the drafts; best [rows, drafts + 1, candidates], the best
// first. In place: a round's ids lie as far apart as its own drafts say, so all are read before any is written.
// next_start [.., slots] is filled for steps 1 .. next_drafts - 1; pairs [rows, width].
extern "C" __global__ void advance_rows(const int* slots, int* parity, int* start, int* commit, int* draft_start,
                                        int* last_row, int* next_start, int* pairs, int* ids, const int* best, int rows,
                                        int num_slots, int width, int drafts, int next_drafts, int candidates) {
  take_turn();
  const int b = threadIdx.x;
  int last = 0;
  if (b < rows) {
    const int *given = ids + b * (drafts + 1), *own = best + b * (drafts + 1) * candidates;
    int accepted = 0;
    while (accepted < drafts && given[accepted + 1] == own[accepted * candidates]) ++accepted;
    const int before = start[b], position = before + accepted + 1;
    for (int i = 0; i <= accepted; ++i) pairs[b * width + i] = own[i * candidates];
    for (int step = 1; step < next_drafts; ++step) next_start[step * num_slots + b] = position + step - 1;
    start[b] = position;
    commit[b] = accepted + 1;
    draft_start[b] = before;
    last_row[b] = accepted;
    parity[slots[b]] ^= 1;
    last = own[accepted * candidates];
  }
  __syncthreads();
  if (b < rows) ids[b * (next_drafts + 1)] = last;
}
