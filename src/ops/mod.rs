//! Applying adapters to a batch: check shapes, plan launches, encode them.
//!
//! Two ops compute the same formula. [`Op::Bgmv`] takes each row by itself: for decode, where a batch
//! is a row or a few for each of many adapters. [`Op::Sgmv`] takes tiles of neighbouring rows with one
//! slot: for prefill. The caller picks; an op is never switched behind its back, since the two round
//! in different orders.
//!
//! Embeddings read tokens' numbers instead of x: [`Applier::encode_embedding`]. Rows of an embedding or head that an
//! adapter replaces are put in their place by [`Applier::encode_token_rows`] and [`Applier::encode_logits`].

mod applier;
mod draft;
mod experts;
mod join;
mod matrix;
mod scratch;
mod tokens;

pub use applier::{Applier, Op, Output};
pub use experts::{ExpertApplier, ExpertInput, Experts, Routing};
pub use matrix::Matrix;
