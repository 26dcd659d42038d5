#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| zero_comm::world::testing::fuzz::coordinator(data));
