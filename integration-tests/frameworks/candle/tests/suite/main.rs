//! Unmodified models of candle-transformers under ZeRO, beside candle's own training.

mod common;
mod copies;
mod failures;
mod losses;
mod overlap;
mod seeded;
