//! Unmodified models of candle-transformers under ZeRO, beside candle's own training.

mod blocks;
mod common;
mod copies;
mod failures;
mod losses;
mod models;
mod muon;
mod overlap;
mod seeded;
