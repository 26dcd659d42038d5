//! The settings of a run: where each one comes from, and its names.
//!
//! A setting is one row, a constant [`row::Setting`]: its flag, its key in a DeepSpeed
//! configuration, its name in `run.json`, its default, and the runs in which it is refused or has
//! no effect. Flags override the configuration file, which overrides the resumed run, which
//! overrides the default.
//!
//! A topic is one file. It has the rows, their part of `run.json`, and the function that turns
//! their values into the trainer's settings. So a new setting touches at most four files:
//!
//! 1. `args.rs`: the flag and its help;
//! 2. the file of its topic, such as [`communication`]: the row, the field of `run.json`, the use
//!    of the value;
//! 3. `config/`, if DeepSpeed has a key for it;
//! 4. the code that obeys it, such as zero-trainer's `Settings`.
//!
//! The rest reads the table of all rows: the agreement of ranks ([`agreement`]), what a resumed run
//! reports as changed ([`changes`]), and the values of `"auto"` ([`autos`]).
//!
//! ```text
//! agreement  changes  autos        what the rows and run.json are used for
//!      table                       the rows of all topics, in one order
//!     resolve                      from the sources to the trainer's settings
//!      record                      run.json
//! communication mesh collectives optimizer schedule offload batch epochs activations saving validation    the topics
//!       row                        Setting and Sources
//!      args                        the flags
//! ```

pub(crate) mod activations;
pub(crate) mod agreement;
pub(crate) mod args;
pub(crate) mod autos;
pub(crate) mod batch;
pub(crate) mod changes;
pub(crate) mod collectives;
pub(crate) mod communication;
pub(crate) mod epochs;
pub(crate) mod mesh;
pub(crate) mod offload;
pub(crate) mod optimizer;
pub(crate) mod outputs;
pub(crate) mod record;
pub(crate) mod resolve;
pub(crate) mod row;
pub(crate) mod samples;
pub(crate) mod saving;
pub(crate) mod schedule;
pub(crate) mod stage_choice;
pub(crate) mod table;
pub(crate) mod unused_keys;
pub(crate) mod validation;
