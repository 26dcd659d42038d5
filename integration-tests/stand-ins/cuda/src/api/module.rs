//! Modules, functions and launches.

use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::device::{SHARED_BYTES, SHARED_OPTIN_BYTES};
use super::{In, Out, Text, driver};
use crate::counts;
use crate::driver::device::{Device, current};
use crate::driver::op::Op;
use crate::driver::stream::stream;
use crate::error::{Failure, Outcome, say};
use crate::exec::block::LaunchShape;
use crate::exec::grid::run_grid;
use crate::exec::program::Program;
use crate::exec::sample::run_sample;
use crate::ptx::module::{Kernels, load};
use crate::settings::settings;
use stand_in_shared::{Handles, fresh_number};

static MODULES: Handles<Kernels> = Handles::new();
static FUNCTIONS: Handles<Function> = Handles::new();

/// A kernel of a module, valid as long as the module.
struct Function {
    module: usize,
    device: &'static Device,
    program: Arc<Program>,
    /// Maximum dynamic shared memory of a launch.
    dynamic_limit: AtomicU32,
}

/// The options `CU_JIT_ERROR_LOG_BUFFER` and `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
const ERROR_LOG: u32 = 5;
const ERROR_LOG_BYTES: u32 = 6;

/// The text of an image, which must be zero-terminated PTX. Machine code is rejected.
fn text_of(image: *const u8) -> Outcome<&'static str> {
    let first: [u8; 4] = In(image.cast::<[u8; 4]>()).get()?;
    if first == *b"\x7fELF" || first == 0xba55_ed50u32.to_le_bytes() {
        say!("the image is machine code, and this device takes PTX only");
        return Err(Failure::NoBinaryForGpu);
    }
    // SAFETY: the caller guarantees that an image that is not machine code is a zero-terminated
    // string.
    let text = unsafe { CStr::from_ptr(image.cast()) };
    text.to_str().map_err(|_| Failure::InvalidImage)
}

fn load_module(found: &Out<usize>, image: *const u8, log: Option<(*mut u8, usize)>) -> Outcome {
    current()?;
    match load(text_of(image)?) {
        Ok(kernels) => found.put(MODULES.insert(fresh_number(), Arc::new(kernels))),
        Err(mistake) => {
            say!("PTX, {mistake}");
            if let Some((buffer, room)) = log.filter(|(_, room)| *room > 0) {
                let text = format!("cuda stand-in: PTX, {mistake}");
                let kept = text.bytes().take(room - 1).chain([0]);
                kept.enumerate()
                    .try_for_each(|(index, byte)| Out(buffer.wrapping_add(index)).put(byte))?;
            }
            Err(Failure::InvalidPtx)
        }
    }
}

/// The buffer for compiler errors and its size, if the options have one.
fn error_log(
    count: u32,
    options: &In<u32>,
    values: &In<usize>,
) -> Outcome<Option<(*mut u8, usize)>> {
    let mut buffer = 0;
    let mut room = 0;
    for index in 0..count as usize {
        match options.at(index)? {
            ERROR_LOG => buffer = values.at(index)?,
            // The value is passed in place of a pointer.
            ERROR_LOG_BYTES => room = values.at(index)? & 0xffff_ffff,
            _ => {}
        }
    }
    Ok((buffer != 0).then_some((buffer as *mut u8, room)))
}

/// The kernel's parameter block, copied from a pointer to each argument.
fn arguments(program: &Program, values: &In<*const u8>) -> Outcome<Vec<u8>> {
    let mut bytes = Vec::new();
    for (index, &(offset, size)) in program.params.iter().enumerate() {
        bytes.resize(offset, 0);
        let value = values.at(index)?;
        for byte in 0..size {
            bytes.push(In(value.wrapping_add(byte)).get()?);
        }
    }
    Ok(bytes)
}

impl Function {
    fn check(&self, grid: [u32; 3], block: [u32; 3], dynamic: u32) -> Outcome {
        let bad = |what: &str| {
            say!(
                "launch of {}: {what} (grid {grid:?}, block {block:?}, {dynamic} B dynamic)",
                self.program.name
            );
            Err(Failure::InvalidValue)
        };

        if grid.contains(&0) || grid[0] > i32::MAX as u32 || grid[1] > 65535 || grid[2] > 65535 {
            return bad("the grid is empty or too large");
        }
        let threads = block
            .iter()
            .try_fold(1u32, |all, &n| all.checked_mul(n))
            .unwrap_or(u32::MAX);
        if block.contains(&0) || block[2] > 64 || threads > self.program.max_threads {
            return bad("the block is empty or too large");
        }

        if self
            .program
            .required_block
            .is_some_and(|required| required != block)
        {
            return bad("the kernel requires another block");
        }
        if dynamic > self.dynamic_limit.load(Ordering::Relaxed) {
            return bad("more dynamic shared memory than allowed");
        }

        Ok(())
    }
}

fn attribute(function: &Function, number: u32) -> Outcome<i32> {
    let program = &function.program;
    Ok(match number {
        0 => program.max_threads as i32,
        1 => program.shared_bytes as i32,
        2 | 3 => 0,
        4 => program.registers as i32,
        5 => 92,
        6 => 990,
        8 => function.dynamic_limit.load(Ordering::Relaxed) as i32,
        _ => return Err(Failure::InvalidValue),
    })
}

driver! {
    cuModuleLoadData(found: Out<usize>, image: *const u8) {
        load_module(&found, image, None)
    }

    cuModuleLoadDataEx(found: Out<usize>, image: *const u8, count: u32, options: In<u32>, values: In<usize>) {
        load_module(&found, image, error_log(count, &options, &values)?)
    }

    cuModuleUnload(module: usize) {
        current()?;
        MODULES.remove(module)?;
        for (number, _) in FUNCTIONS.select(|f| f.module == module) {
            let _ = FUNCTIONS.remove(number);
        }
        Ok(())
    }

    cuModuleGetFunction(found: Out<usize>, module: usize, name: Text) {
        let device = current()?;
        let program = MODULES.get(module)?.get(&name.get()?).cloned().ok_or(Failure::NotFound)?;
        let free = (SHARED_BYTES as u32).saturating_sub(program.shared_bytes as u32);
        let function = Function { module, device, program, dynamic_limit: AtomicU32::new(free) };
        found.put(FUNCTIONS.insert(fresh_number(), Arc::new(function)))
    }

    cuModuleGetGlobal_v2(_address: Out<u64>, _bytes: Out<usize>, module: usize, _name: Text) {
        // Modules with variables are refused.
        MODULES.get(module)?;
        Err(Failure::NotFound)
    }

    cuModuleGetLoadingMode(mode: Out<u32>) {
        // Eager: a module is decoded completely when it is loaded.
        mode.put(1)
    }

    cuFuncGetAttribute(value: Out<i32>, number: u32, function: usize) {
        value.put(attribute(&*FUNCTIONS.get(function)?, number)?)
    }

    cuFuncSetAttribute(function: usize, number: u32, value: i32) {
        current()?;
        let function = FUNCTIONS.get(function)?;
        match (number, u32::try_from(value)) {
            (8, Ok(bytes)) if bytes + function.program.shared_bytes as u32 <= SHARED_OPTIN_BYTES as u32 => {
                function.dynamic_limit.store(bytes, Ordering::Relaxed);
                Ok(())
            }
            // The preferred shared memory carveout has no effect.
            (9, _) => Ok(()),
            _ => Err(Failure::InvalidValue),
        }
    }

    cuFuncSetCacheConfig(function: usize, _config: u32) {
        FUNCTIONS.get(function)?;
        Ok(())
    }

    cuFuncLoad(function: usize) {
        FUNCTIONS.get(function)?;
        Ok(())
    }

    cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: Out<i32>, function: usize, threads: i32, dynamic: usize) {
        let function = FUNCTIONS.get(function)?;
        let threads = u32::try_from(threads).ok().filter(|&n| n > 0 && n <= 1024).ok_or(Failure::InvalidValue)?;
        let shared = function.program.shared_bytes + dynamic + 1024;
        let by_shared = (228 << 10) / shared;
        blocks.put((2048 / threads.next_multiple_of(32)).min(16).min(by_shared as u32) as i32)
    }

    cuLaunchKernel(
        function: usize,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        dynamic: u32,
        on: usize,
        values: In<*const u8>,
        extra: usize,
    ) {
        let on = stream(on)?;
        current()?;
        let function = FUNCTIONS.get(function)?;
        if extra != 0 {
            return Err(Failure::NotSupported);
        }
        if function.device.ordinal != on.device.ordinal {
            return Err(Failure::InvalidHandle);
        }
        let grid = [grid_x, grid_y, grid_z];
        let block = [block_x, block_y, block_z];
        function.check(grid, block, dynamic)?;
        let program = function.program.clone();
        let params = arguments(&program, &values)?;
        let shape = LaunchShape { grid, block, dynamic_bytes: dynamic as usize, params };
        let run = if settings().dry { run_sample } else { run_grid };
        on.submit(Op::Kernel(Arc::new(move |registry| {
            counts::add("kernel", &program.name, run(&program, &shape, registry)?);
            Ok(())
        })))
    }
}
