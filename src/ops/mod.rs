//! Batched shrink and expand.
