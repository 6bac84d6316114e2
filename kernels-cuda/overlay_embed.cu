// y[row] = rows[slot(row)][j], rounded once, where ids[row] is the slot's id j; elsewhere y[row] keeps its bits.
//
//   ids [rows] u32      overlay: ids [max_rank] u32, rows [max_rank][a_stride] weight
//   y [rows][y_stride] act, in_features elements from y_offset on
//   block  row; each thread looks the id up, all with one result
#include "tokens.cuh"

template <class Act, class Weight>
DEVICE void overlay_embed(const u32* batch, const u32* tables, const unsigned char* weights, const u32* ids, void* y,
                          const Params& p) {
    typedef typename Act::Bits Y;
    typedef typename Weight::Bits W;
    const u64 row = block_index();
    if (row >= p.rows) return;
    const Overlay<W> overlay = overlay_of<W>(p, tables, weights, (int)batch[2 * (p.row_first + row)]);
    if (overlay.count == 0) return;
    const u32 id = ids[row];
    // The first j whose id is not below: in low..=high.
    u32 low = 0, high = overlay.count;
    while (low < high) {
        const u32 middle = low + (high - low) / 2;
        if (overlay.ids[middle] < id)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == overlay.count || overlay.ids[low] != id) return;
    const W* from = overlay.rows + (u64)low * p.a_stride;
    Y* to = reinterpret_cast<Y*>(y) + (p.site[0].y_offset + row * p.site[0].y_stride);
    for (u32 k = threadIdx.x; k < p.in_features; k += THREADS) to[k] = Act::narrow(Weight::widen(from[k]));
}

#define ENTRY(act, act_code, weight, weight_code) IDS_ENTRY(overlay_embed, void, act, act_code, weight, weight_code)
FOR_EACH_SPEC(ENTRY)
