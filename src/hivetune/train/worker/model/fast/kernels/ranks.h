// The adapters of a merged matrix, as its products find them.
#pragma once
#include "units.h"

// Mirrored by native.MemberArguments.
struct Member {
    int64_t start, size, rank_at, rank;
    const void* up;  // [rank, size], already scaled
    float* d_down;   // [rank, inputs]; the members of a matrix lie one after the other
    float* d_up;     // [size, rank]
};
