// z[row][z_offset + r] = A^T[slot(row)][ids[row]][r], for r < rank; 0 where ids[row] is no row of A^T.
//
//   ids [rows] u32      A^T [in_features][a_stride] weight      z [rows][z_stride] f32
//   block  row; its threads take the ranks
#include "tokens.cuh"

template <class Act, class Weight>
DEVICE void embed_shrink(const u32* batch, const u32* tables, const unsigned char* weights, const u32* ids, float* z,
                         const Params& p) {
    const u64 row = block_index();
    if (row >= p.rows) return;
    const SiteParams& site = p.site[0];
    const Pair pair = pair_of(p, site, tables, (int)batch[2 * (p.row_first + row)]);
    if (pair.rank == 0) return;
    const u32 id = ids[row];
    const bool known = id < p.in_features;
    typedef typename Weight::Bits W;
    const W* a = reinterpret_cast<const W*>(weights + pair.offset) + (known ? (u64)id * p.a_stride : 0);
    float* to = z + (row * p.z_stride + site.z_offset);
    for (u32 r = threadIdx.x; r < pair.rank; r += THREADS) to[r] = known ? Weight::widen(a[r]) : 0.0f;
}

#define ENTRY(act, act_code, weight, weight_code) IDS_ENTRY(embed_shrink, float, act, act_code, weight, weight_code)
FOR_EACH_SPEC(ENTRY)
