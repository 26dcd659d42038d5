//! Access to directories and files, shared by saving and loading.

pub(crate) mod counts;
pub(crate) mod dir;
pub(crate) mod lock;
#[allow(unsafe_code)] // the derives that declare a page to be plain bytes
pub(crate) mod page_buffer;
pub(crate) mod parallel;
