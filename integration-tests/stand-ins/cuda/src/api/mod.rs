//! The driver's functions, with C's names and types. Each looks up its handles and calls into
//! `driver`.

use std::ffi::{CStr, c_char, c_void};

use crate::driver::queue::is_in_host_function;
use crate::error::{Failure, Outcome, say};
use crate::settings::settings;

mod context;
mod device;
mod event;
mod graph;
mod host_memory;
mod memory;
mod module;
mod stand_in;
mod stream;
mod symbol;
#[cfg(test)]
pub(crate) mod tests;
mod transfer;
mod virtual_memory;

pub use {
    context::*, device::*, event::*, graph::*, host_memory::*, memory::*, module::*, stand_in::*,
    stream::*, symbol::*, transfer::*, virtual_memory::*,
};

/// A result pointer, null or valid for writing one `T`, as the caller of a driver function
/// guarantees.
#[derive(Debug)]
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> From<&mut T> for Out<T> {
    fn from(place: &mut T) -> Self {
        Self(place)
    }
}

impl<T> Out<T> {
    /// Writes the result; a null pointer is `InvalidValue`.
    fn put(&self, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(Failure::InvalidValue);
        }
        // SAFETY: not null, so valid for a write by the type's contract.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Reads an argument that the result replaces; the pointer is null or valid for that, too.
    fn get(&self) -> Outcome<T>
    where
        T: Copy,
    {
        In(self.0).get()
    }

    /// As `put`, but a null pointer is allowed.
    fn put_if_wanted(&self, value: T) {
        let _ = self.put(value);
    }
}

/// An argument passed by pointer: null, or valid for reading the number of `T`s in the function's
/// contract.
#[derive(Debug)]
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T: Copy> From<&T> for In<T> {
    fn from(place: &T) -> Self {
        Self(place)
    }
}

impl<T: Copy> From<&[T]> for In<T> {
    fn from(places: &[T]) -> Self {
        Self(places.as_ptr())
    }
}

impl<T: Copy> In<T> {
    fn get(&self) -> Outcome<T> {
        self.at(0)
    }

    fn at(&self, index: usize) -> Outcome<T> {
        if self.0.is_null() {
            return Err(Failure::InvalidValue);
        }
        let place = self.0.wrapping_add(index);
        // SAFETY: not null, so valid for the number of elements in the function's contract.
        Ok(unsafe { place.read_unaligned() })
    }
}

/// A C string, or null.
#[derive(Debug)]
#[repr(transparent)]
pub struct Text(*const c_char);

impl From<&'static CStr> for Text {
    fn from(text: &'static CStr) -> Self {
        Self(text.as_ptr())
    }
}

impl Text {
    fn get(&self) -> Outcome<String> {
        if self.0.is_null() {
            return Err(Failure::InvalidValue);
        }
        // SAFETY: not null, so a zero-terminated string by the type's contract.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str()
            .map(str::to_owned)
            .map_err(|_| Failure::InvalidValue)
    }
}

/// Runs a function's body; a panic becomes `Unknown`, and a call from a host function
/// `NotPermitted`.
fn guard(name: &str, body: impl FnOnce() -> Outcome) -> u32 {
    if is_in_host_function() {
        say!("{name} was called by a host function, which may not call the driver");
        return Failure::NotPermitted as u32;
    }
    let code = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(failure)) => failure as u32,
        Err(_) => {
            say!("{name}: the stand-in itself failed; its message is above");
            Failure::Unknown as u32
        }
    };
    if settings().trace {
        say!("{name}: {code}");
    }
    code
}

/// Defines driver functions, and `lookup`, which returns their addresses by name.
macro_rules! driver {
    ($($name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of the CUDA driver.")]
            ///
            /// # Safety
            /// Pointers are null or valid for the accesses in CUDA's documentation of the function.
            #[allow(non_snake_case)]
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> u32 {
                $crate::api::guard(stringify!($name), move || $body)
            }
        )*

        pub(super) fn lookup(name: &str) -> Option<*const std::ffi::c_void> {
            $(if name == stringify!($name) { return Some($name as *const std::ffi::c_void) })*
            None
        }
    };
}
use driver;

/// The address of the newest version of a function: that of `cuMemAlloc_v2` for `cuMemAlloc`.
fn address_of(name: &str) -> Option<*const c_void> {
    let tables = [
        context::lookup,
        device::lookup,
        event::lookup,
        graph::lookup,
        host_memory::lookup,
        memory::lookup,
        module::lookup,
        stream::lookup,
        symbol::lookup,
        transfer::lookup,
        virtual_memory::lookup,
    ];
    let names = [format!("{name}_v3"), format!("{name}_v2"), name.to_owned()];
    names
        .iter()
        .find_map(|name| tables.iter().find_map(|table| table(name)))
}
