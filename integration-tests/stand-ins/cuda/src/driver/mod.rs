//! The state behind the driver API: devices, memory, queues, events, graphs, modules. No C types
//! here.

pub(crate) mod capture;
pub(crate) mod device;
pub(crate) mod event;
pub(crate) mod host_thread;
pub(crate) mod mapping;
pub(crate) mod memory;
pub(crate) mod op;
pub(crate) mod pages;
pub(crate) mod queue;
pub(crate) mod space;
pub(crate) mod stream;
