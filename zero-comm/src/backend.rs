//! For back ends, and for wrappers around one: a [`Group`] of ranks checks the arguments of a collective and makes a
//! [`Checked`] call, which [`Communicator::enqueue`](crate::Communicator::enqueue) runs. Programs that only call collectives need none of this.

pub use crate::call::{Call, Checked, Group, Segments};
