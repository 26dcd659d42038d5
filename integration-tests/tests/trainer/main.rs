//! The trainer as a whole: PyTorch's numbers, the same bits at every stage, memory and traffic by the formulas,
//! resume, overflow, and failures.
//!
//! One test program, so that the whole workspace is linked once.

mod ends;
mod failures;
mod identical;
mod model;
#[path = "../common/oracle.rs"]
mod oracle;
mod overflow;
#[path = "../common/place.rs"]
mod place;
mod pytorch;
mod resume;
mod support;
mod timeline;
mod toy;
mod volumes;
