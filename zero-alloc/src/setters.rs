//! Builder methods named like the fields of an options struct.

/// Implements by-value setters for the fields `$field` of `$type`.
#[doc(hidden)]
#[macro_export]
macro_rules! setters {
    ($type:ty { $($field:ident: $value:ty),* $(,)? }) => {
        impl $type {
            $(
                #[doc = concat!("Sets `", stringify!($field), "`.")]
                #[must_use]
                pub fn $field(mut self, $field: $value) -> Self {
                    self.$field = $field.into();
                    self
                }
            )*
        }
    };
}
