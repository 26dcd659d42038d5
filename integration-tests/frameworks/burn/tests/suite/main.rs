//! An unmodified TransformerEncoder of burn under ZeRO, beside one AdamW over the whole batch.

mod checkpoints;
mod common;
mod copies;
mod failures;
mod losses;
mod memory;
mod muon;
mod overlap;
mod seeded;
