//! NVRTC, loaded at run time. All calls into the library are in this file.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use zero_alloc::cuda::CudaDevice;
use zero_alloc::library::{Library, MissingFunction, Search};

use super::{Arch, Compile, CudaError, KernelSource, Target};

/// Options of every compilation, besides the architecture. Without `--fmad=false` the compiler
/// would fuse operations that the host versions do not.
const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=false"];

/// NVIDIA's run-time compiler, as a loaded library.
pub struct Nvrtc {
    path: String,
    version: (i32, i32),
    supported: Vec<u32>,
    calls: Calls,
}

impl std::fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Nvrtc({}, version {})", self.path, self.version_text())
    }
}

/// The output of a compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compiled {
    /// The image for the driver: machine code, or PTX that ends in a zero byte.
    pub image: Vec<u8>,
    /// The compiler's log: warnings and, if requested, the registers of each kernel.
    pub log: String,
}

type Program = *mut c_void;

/// NVRTC's functions, with the signatures of its header.
struct Calls {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    count_archs: unsafe extern "C" fn(*mut c_int) -> c_int,
    list_archs: unsafe extern "C" fn(*mut c_int) -> c_int,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ptx_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    ptx: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
}

impl Calls {
    #[allow(
        clippy::multiple_unsafe_ops_per_block,
        reason = "the same proof for each"
    )]
    fn load(library: &Library) -> Result<Self, MissingFunction> {
        // SAFETY: each field has the function's signature in NVRTC's header.
        unsafe {
            Ok(Self {
                version: library.function("nvrtcVersion")?,
                error_string: library.function("nvrtcGetErrorString")?,
                count_archs: library.function("nvrtcGetNumSupportedArchs")?,
                list_archs: library.function("nvrtcGetSupportedArchs")?,
                create: library.function("nvrtcCreateProgram")?,
                destroy: library.function("nvrtcDestroyProgram")?,
                compile: library.function("nvrtcCompileProgram")?,
                log_size: library.function("nvrtcGetProgramLogSize")?,
                log: library.function("nvrtcGetProgramLog")?,
                cubin_size: library.function("nvrtcGetCUBINSize")?,
                cubin: library.function("nvrtcGetCUBIN")?,
                ptx_size: library.function("nvrtcGetPTXSize")?,
                ptx: library.function("nvrtcGetPTX")?,
            })
        }
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            Ok(())
        } else {
            Err(CudaError::Call {
                call,
                message: self.message(code),
            })
        }
    }

    fn message(&self, code: c_int) -> String {
        // SAFETY: accepts any code, returns a static string or null.
        let text = unsafe { (self.error_string)(code) };
        if text.is_null() {
            return format!("error {code}");
        }
        // SAFETY: a string of the library, which is loaded.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    }
}

/// Loads `libnvrtc-builtins.so` from NVRTC's folder. NVRTC opens it by name when it compiles, and
/// not every build searches NVRTC's folder (13.0.88 from pip does not); an already loaded library
/// is found. If loading fails here, NVRTC reports the error when it compiles.
fn load_builtins(nvrtc: &str) {
    let folder = Path::new(nvrtc)
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    for entry in folder
        .and_then(|folder| folder.read_dir().ok())
        .into_iter()
        .flatten()
        .flatten()
    {
        if entry
            .file_name()
            .to_string_lossy()
            .starts_with("libnvrtc-builtins.so")
        {
            // SAFETY: a part of NVRTC, which NVRTC would load itself.
            let _loaded = unsafe { Library::open(&[entry.path().to_string_lossy()]) };
        }
    }
}

const SEARCH: Search = Search {
    variable: "ZERO_NVRTC",
    names: if cfg!(windows) {
        &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"]
    } else {
        &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    },
    in_toolkit: true,
};

impl Nvrtc {
    /// Loads the library at the path in `ZERO_NVRTC`, or by its usual names. Names of a newer major
    /// version than the driver's come last: such a driver may refuse what they compile.
    ///
    /// # Errors
    /// There is no such library, or it is not NVRTC.
    pub fn find() -> Result<Self, CudaError> {
        let driver = CudaDevice::driver_version().ok().map(|(major, _)| major);
        Self::find_among(&SEARCH.paths_for_driver(driver))
    }

    /// Loads the first of `paths` that can be loaded.
    fn find_among(paths: &[impl AsRef<str>]) -> Result<Self, CudaError> {
        // SAFETY: the names are NVRTC's, or the user's choice.
        let library =
            unsafe { Library::open(paths) }.map_err(|tried| CudaError::NoNvrtc { tried })?;
        load_builtins(library.path());
        let calls = Calls::load(&library)?;
        let mut major = 0;
        let mut minor = 0;
        let mut count = 0;
        // SAFETY: writes two numbers.
        calls.check("nvrtcVersion", unsafe {
            (calls.version)(&raw mut major, &raw mut minor)
        })?;
        // SAFETY: writes one number.
        calls.check("nvrtcGetNumSupportedArchs", unsafe {
            (calls.count_archs)(&raw mut count)
        })?;
        let mut archs: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: writes `count` numbers, the length of `archs`.
        calls.check("nvrtcGetSupportedArchs", unsafe {
            (calls.list_archs)(archs.as_mut_ptr())
        })?;
        let supported = archs
            .into_iter()
            .filter_map(|a| u32::try_from(a).ok())
            .collect();

        Ok(Self {
            path: library.path().to_owned(),
            version: (major, minor),
            supported,
            calls,
        })
    }

    /// The version, for example `13.2`.
    fn version_text(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// The architectures that this NVRTC compiles for.
    pub fn supported_archs(&self) -> &[u32] {
        &self.supported
    }

    /// Compiles `source` for `target`. With `report_registers` the log lists the registers and
    /// spilled bytes of every kernel.
    ///
    /// # Errors
    /// The target is not supported, or the source does not compile.
    pub fn compile(
        &self,
        source: &KernelSource,
        target: Target,
        report_registers: bool,
    ) -> Result<Compiled, CudaError> {
        let (Target::Cubin(arch) | Target::Ptx(arch)) = target;
        if !self.supported.contains(&arch.0) {
            let version = self.version_text();
            let supported = self.supported.clone();
            return Err(CudaError::UnsupportedArch {
                version,
                arch,
                supported,
            });
        }

        let mut options = vec![c_string(format!("--gpu-architecture={target}"))?];
        for option in OPTIONS
            .into_iter()
            .chain(report_registers.then_some("--ptxas-options=-v"))
        {
            options.push(c_string(option.to_owned())?);
        }
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();

        let program = OwnedProgram::new(&self.calls, source)?;
        // SAFETY: a live program, and `pointers` with its length.
        let code = unsafe {
            (self.calls.compile)(program.raw, pointers.len() as c_int, pointers.as_ptr())
        };

        let log = program.bytes("nvrtcGetProgramLog", self.calls.log_size, self.calls.log)?;
        let log = String::from_utf8_lossy(&log)
            .trim_end_matches(['\0', '\n'])
            .to_owned();

        if code != 0 {
            let log = if log.is_empty() {
                self.calls.message(code)
            } else {
                log
            };
            return Err(CudaError::Compilation {
                source_name: source.name.to_owned(),
                target,
                log,
            });
        }

        let mut image = match target {
            Target::Cubin(_) => {
                program.bytes("nvrtcGetCUBIN", self.calls.cubin_size, self.calls.cubin)?
            }
            Target::Ptx(_) => program.bytes("nvrtcGetPTX", self.calls.ptx_size, self.calls.ptx)?,
        };

        if matches!(target, Target::Ptx(_)) && image.last() != Some(&0) {
            image.push(0);
        }
        Ok(Compiled { image, log })
    }
}

// SAFETY: it returns NVRTC's output whole.
unsafe impl Compile for Nvrtc {
    fn identity(&self) -> String {
        format!("NVRTC {} {}", self.version_text(), OPTIONS.join(" "))
    }

    fn target(&self, arch: Arch) -> Result<Target, CudaError> {
        Target::choose(arch, &self.supported, &self.version_text())
    }

    fn compile(&self, source: &KernelSource, target: Target) -> Result<Vec<u8>, CudaError> {
        Ok(Self::compile(self, source, target, false)?.image)
    }
}

fn c_string(text: String) -> Result<CString, CudaError> {
    CString::new(text).map_err(|_| CudaError::Call {
        call: "source",
        message: "it contains a zero byte".into(),
    })
}

/// A program, destroyed on drop.
struct OwnedProgram<'a> {
    calls: &'a Calls,
    raw: Program,
}

impl<'a> OwnedProgram<'a> {
    /// Creates the program of a source file.
    fn new(calls: &'a Calls, source: &KernelSource) -> Result<Self, CudaError> {
        let text = c_string(source.text())?;
        let name = c_string(source.name.to_owned())?;
        let mut raw: Program = ptr::null_mut();
        // SAFETY: two zero-terminated strings and no headers; a program is written to `raw`.
        let code = unsafe {
            (calls.create)(
                &raw mut raw,
                text.as_ptr(),
                name.as_ptr(),
                0,
                ptr::null(),
                ptr::null(),
            )
        };
        calls.check("nvrtcCreateProgram", code)?;
        Ok(Self { calls, raw })
    }

    /// Reads a result: its size, then its bytes.
    fn bytes(
        &self,
        call: &'static str,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, CudaError> {
        let mut len = 0usize;
        // SAFETY: a live program; one number is written.
        let status = unsafe { size(self.raw, &raw mut len) };
        self.calls.check(call, status)?;

        let mut bytes = vec![0u8; len];
        // SAFETY: a live program; `len` bytes are written, the length of `bytes`.
        let status = unsafe { get(self.raw, bytes.as_mut_ptr().cast()) };
        self.calls.check(call, status)?;
        Ok(bytes)
    }
}

impl Drop for OwnedProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `create`, destroyed once.
        unsafe { (self.calls.destroy)(&raw mut self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn missing_library_error_lists_names_tried() {
        let error = Nvrtc::find_among(&["libno-such-nvrtc.so.1", "libnor-this.so"]).unwrap_err();
        let CudaError::NoNvrtc { tried } = &error else {
            panic!("{error}")
        };
        assert_eq!(tried.len(), 2);
        let text = error.to_string();
        assert!(
            text.contains("libno-such-nvrtc.so.1") && text.contains("libnor-this.so"),
            "{text}"
        );
        assert!(matches!(
            Nvrtc::find_among(&[] as &[&str]),
            Err(CudaError::NoNvrtc { .. })
        ));
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn wrong_library_error_names_the_function() {
        let error = Nvrtc::find_among(&["libc.so.6"]).unwrap_err();
        assert!(
            matches!(
                &error,
                CudaError::MissingFunction(MissingFunction {
                    function: "nvrtcVersion",
                    ..
                })
            ),
            "{error}"
        );
    }
}
