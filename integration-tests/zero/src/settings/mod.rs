//! The settings of a run: where each one comes from, and its names.
//!
//! [`args::TrainArgs`] is the one struct of settings, of which any may be missing. The command line
//! parses it, a DeepSpeed configuration and `run.json` are translated to it in [`sources`], and the
//! first source that has a setting sets it: flags, the file, the resumed run, then the default. A
//! row of [`table`] has the names of a setting for the user.
//!
//! A topic is one file, with the function that turns the settings into the trainer's, their defaults
//! and what is refused. So a new setting touches at most five files:
//!
//! 1. `args.rs`: the flag and its help, and its name in [`args::TrainArgs::or`];
//! 2. `table.rs`: its row;
//! 3. `record.rs`: the field of `run.json`; `sources.rs`: a line that reads it, and another one if
//!    DeepSpeed has a key for it;
//! 4. the file of its topic, such as [`communication`]: the default and the use of the value;
//! 5. the code that obeys it, such as zero-trainer's `Settings`.
//!
//! The rest reads the table of all rows: the agreement of ranks ([`agreement`]), what a resumed run
//! reports as changed ([`changes`]), and the values of `"auto"` ([`autos`]).
//!
//! ```text
//! agreement  changes  autos        what the rows and run.json are used for
//!     resolve                      from the sources to the trainer's settings
//! communication mesh collectives quantise optimizer muon schedule offload batch epochs validation samples    the topics
//!     sources                      a configuration file and run.json as settings
//!  record    table                 run.json; the names of all settings
//!      args                        the flags
//! ```

pub(crate) mod agreement;
pub(crate) mod args;
pub(crate) mod autos;
pub(crate) mod batch;
pub(crate) mod changes;
pub(crate) mod collectives;
pub(crate) mod communication;
pub(crate) mod epochs;
pub(crate) mod formats_of_run;
pub(crate) mod lora;
pub(crate) mod mesh;
pub(crate) mod muon;
pub(crate) mod offload;
pub(crate) mod optimizer;
pub(crate) mod outputs;
pub(crate) mod quantise;
pub(crate) mod record;
pub(crate) mod resolve;
pub(crate) mod row;
pub(crate) mod samples;
pub(crate) mod schedule;
pub(crate) mod sources;
pub(crate) mod stage_choice;
pub(crate) mod table;
pub(crate) mod unused_keys;
pub(crate) mod validation;
