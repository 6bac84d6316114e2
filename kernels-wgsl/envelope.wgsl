// What every kernel has: the types it is specialised on, the batch, and the parameters.

override ACT: u32 = DTYPE_F32;
override WEIGHT: u32 = DTYPE_F32;

@group(0) @binding(0) var<storage, read> batch: array<u32>;
// At a dynamic offset, in a group of its own: the operands' group outlives a launch.
@group(1) @binding(0) var<uniform> envelope: Envelope;

// Of no launch, or of no token.
const NO_ROW: u32 = 0xffffffffu;

// Bytes from the start of storage binding `operand` to its first element.
fn origin(operand: u32) -> u32 {
    return envelope.origin[operand / 4u][operand % 4u];
}
