//! The kernel of AMX. Rust's intrinsics for it are not stable, so it is assembly.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

use super::Tile;

/// Whether this CPU has the instructions, and Linux lets this process use their registers: it must
/// be requested once, before the first use.
pub(super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_instructions() && request_registers())
}

fn has_instructions() -> bool {
    const BF16: u32 = 1 << 22;
    const TILE: u32 = 1 << 24;
    let features = __cpuid_count(7, 0).edx;
    features & (BF16 | TILE) == BF16 | TILE
}

/// Requests permission for the state of tiles (Linux, Documentation/arch/x86/xstate.rst).
#[cfg(target_os = "linux")]
fn request_registers() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: the call changes nothing but which instructions may be used.
    let result = unsafe {
        libc::syscall(
            libc::SYS_arch_prctl,
            ARCH_REQ_XCOMP_PERM,
            XFEATURE_XTILEDATA,
        )
    };
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn request_registers() -> bool {
    false
}

/// `LDTILECFG`'s operand.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_of_row: [u16; 16],
    rows: [u8; 16],
}

/// The configured tiles of a thread: eight of 16 rows of 64 bytes.
pub(super) struct Tiles {
    /// Of this thread.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Tiles {
    /// Configures the tiles of the calling thread.
    ///
    /// # Safety
    /// [`is_available`] was true.
    pub(super) unsafe fn new() -> Self {
        let mut config = Config {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            bytes_of_row: [0; 16],
            rows: [0; 16],
        };
        config.bytes_of_row[..8].fill(64);
        config.rows[..8].fill(16);
        // SAFETY: the CPU has the instruction; it reads 64 bytes, and palette 1 has such tiles.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) };
        Self {
            _not_send: std::marker::PhantomData,
        }
    }

    /// Computes, or adds to, a block `[32, 32]` with rows `stride` elements apart: its four tiles
    /// stay in registers, and each step multiplies two tiles by two.
    ///
    /// # Safety
    /// The block is writable, and nothing else accesses it.
    pub(super) unsafe fn multiply(
        &self,
        block: *mut f32,
        stride: usize,
        accumulate: bool,
        left: &[Tile],
        right: &[Tile],
    ) {
        let steps = (left.len() / 2).min(right.len() / 2);
        let below = block.wrapping_add(16 * stride);
        // SAFETY: the tiles are configured. The loop reads `steps` times two tiles of each operand,
        // which the slices have; the rest accesses 16 rows of 64 bytes four times, the block.
        unsafe {
            asm!(
                "test {accumulate:l}, {accumulate:l}",
                "jz 2f",
                "tileloadd tmm0, [{block} + {stride}]",
                "tileloadd tmm1, [{block} + {stride} + 64]",
                "tileloadd tmm2, [{below} + {stride}]",
                "tileloadd tmm3, [{below} + {stride} + 64]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "3:",
                "test {steps}, {steps}",
                "jz 5f",
                "4:",
                "tileloadd tmm4, [{left} + {row}]",
                "tileloadd tmm6, [{right} + {row}]",
                "tileloadd tmm7, [{right} + {row} + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{left} + {row} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {left}, 2048",
                "add {right}, 2048",
                "dec {steps}",
                "jnz 4b",
                "5:",
                "tilestored [{block} + {stride}], tmm0",
                "tilestored [{block} + {stride} + 64], tmm1",
                "tilestored [{below} + {stride}], tmm2",
                "tilestored [{below} + {stride} + 64], tmm3",
                block = in(reg) block,
                below = in(reg) below,
                stride = in(reg) stride * size_of::<f32>(),
                accumulate = in(reg) u32::from(accumulate),
                left = inout(reg) left.as_ptr() => _,
                right = inout(reg) right.as_ptr() => _,
                steps = inout(reg) steps => _,
                row = in(reg) 64usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

impl Drop for Tiles {
    /// Releases the tiles, so that the system need not save them.
    fn drop(&mut self) {
        // SAFETY: the CPU has the instruction.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
