//! NVRTC, found at run time. All calls into the library are in this file.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use zero_alloc::library::{Library, MissingFunction, Search};

use super::{Arch, Compile, CudaError, Source, Target};

/// Options of every compilation, beside the architecture. Without `--fmad=false` the compiler would fuse where the
/// host twins do not.
const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=false"];

/// The compiler's library.
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

/// What came out of a compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// What a driver loads: machine code, or PTX that ends in a zero byte.
    pub image: Vec<u8>,
    /// What the compiler said: warnings, and the registers of each kernel where they were asked for.
    pub log: String,
}

type Program = *mut c_void;

/// The functions that are used, with NVRTC's signatures.
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
    #[allow(clippy::multiple_unsafe_ops_per_block, reason = "one proof for all of one kind")]
    fn load(library: &Library) -> Result<Self, MissingFunction> {
        // SAFETY: each field has the signature that NVRTC's header gives the function.
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
        if code == 0 { Ok(()) } else { Err(CudaError::Call { call, message: self.message(code) }) }
    }

    fn message(&self, code: c_int) -> String {
        // SAFETY: takes any code, returns a static string or null.
        let text = unsafe { (self.error_string)(code) };
        if text.is_null() {
            return format!("error {code}");
        }
        // SAFETY: a string of the library, which is loaded.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// NVRTC opens the library of its built-in functions by name alone, and not every build knows that it lies beside it
/// (13.0.88 of pip does not). One that is loaded already is found. What fails here NVRTC reports when it compiles.
fn load_builtins(nvrtc: &str) {
    let folder = Path::new(nvrtc).parent().filter(|folder| !folder.as_os_str().is_empty());
    for entry in folder.and_then(|folder| folder.read_dir().ok()).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so") {
            // SAFETY: NVRTC's own part, which it would load itself.
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
    /// Looks for the library: at `ZERO_NVRTC`, or by its usual names.
    ///
    /// # Errors
    /// [`CudaError::NoNvrtc`] names what was tried; or the library is not NVRTC.
    pub fn find() -> Result<Self, CudaError> {
        Self::find_among(&SEARCH.paths())
    }

    /// Loads the first library of `paths` that loads.
    ///
    /// # Errors
    /// As for [`Self::find`].
    pub fn find_among(paths: &[impl AsRef<str>]) -> Result<Self, CudaError> {
        // SAFETY: the names are NVRTC's, or the user's choice.
        let library = unsafe { Library::open(paths) }.map_err(|tried| CudaError::NoNvrtc { tried })?;
        load_builtins(library.path());
        let calls = Calls::load(&library)?;
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: writes two numbers.
        calls.check("nvrtcVersion", unsafe { (calls.version)(&raw mut major, &raw mut minor) })?;
        // SAFETY: writes one number.
        calls.check("nvrtcGetNumSupportedArchs", unsafe { (calls.count_archs)(&raw mut count) })?;
        let mut archs: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: writes `count` numbers, which is how long `archs` is.
        calls.check("nvrtcGetSupportedArchs", unsafe { (calls.list_archs)(archs.as_mut_ptr()) })?;
        let supported = archs.into_iter().filter_map(|a| u32::try_from(a).ok()).collect();
        Ok(Self { path: library.path().to_owned(), version: (major, minor), supported, calls })
    }

    /// The version, as `13.2`.
    pub fn version_text(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// The architectures that it compiles for.
    pub fn supported_archs(&self) -> &[u32] {
        &self.supported
    }

    /// Compiles `source` to `target`. With `report_registers` the log says, for every kernel, how many registers its
    /// machine code uses and how many bytes it spills.
    ///
    /// # Errors
    /// The target is not supported, or the source does not compile.
    pub fn compile(&self, source: &Source, target: Target, report_registers: bool) -> Result<Compiled, CudaError> {
        let (Target::Cubin(arch) | Target::Ptx(arch)) = target;
        if !self.supported.contains(&arch.0) {
            let (version, supported) = (self.version_text(), self.supported.clone());
            return Err(CudaError::UnsupportedArch { version, arch, supported });
        }
        let c_string = |text: String| {
            CString::new(text)
                .map_err(|_| CudaError::Call { call: "source", message: "it contains a zero byte".into() })
        };
        let (text, name) = (c_string(source.text())?, c_string(source.name.to_owned())?);
        let mut options = vec![c_string(format!("--gpu-architecture={target}"))?];
        for option in OPTIONS.into_iter().chain(report_registers.then_some("--ptxas-options=-v")) {
            options.push(c_string(option.to_owned())?);
        }
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();

        let mut raw: Program = ptr::null_mut();
        // SAFETY: two strings that end in zero and no headers; a program is written to `raw`.
        let code =
            unsafe { (self.calls.create)(&raw mut raw, text.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null()) };
        self.calls.check("nvrtcCreateProgram", code)?;
        let program = OwnedProgram { calls: &self.calls, raw };
        // SAFETY: a program that was made, and as many options as are counted.
        let code = unsafe { (self.calls.compile)(program.raw, pointers.len() as c_int, pointers.as_ptr()) };
        let log = program.bytes("nvrtcGetProgramLog", self.calls.log_size, self.calls.log)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned();
        if code != 0 {
            let log = if log.is_empty() { self.calls.message(code) } else { log };
            return Err(CudaError::Compilation { source_name: source.name.to_owned(), target, log });
        }
        let mut image = match target {
            Target::Cubin(_) => program.bytes("nvrtcGetCUBIN", self.calls.cubin_size, self.calls.cubin)?,
            Target::Ptx(_) => program.bytes("nvrtcGetPTX", self.calls.ptx_size, self.calls.ptx)?,
        };
        if matches!(target, Target::Ptx(_)) && image.last() != Some(&0) {
            image.push(0);
        }
        Ok(Compiled { image, log })
    }
}

impl Compile for Nvrtc {
    fn identity(&self) -> String {
        format!("NVRTC {} {}", self.version_text(), OPTIONS.join(" "))
    }

    fn target(&self, arch: Arch) -> Result<Target, CudaError> {
        Target::choose(arch, &self.supported, &self.version_text())
    }

    fn compile(&self, source: &Source, target: Target) -> Result<Vec<u8>, CudaError> {
        Ok(Self::compile(self, source, target, false)?.image)
    }
}

/// A program that is destroyed when it goes.
struct OwnedProgram<'a> {
    calls: &'a Calls,
    raw: Program,
}

impl OwnedProgram<'_> {
    /// A result whose size is asked for first.
    fn bytes(
        &self,
        call: &'static str,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, CudaError> {
        let mut len = 0usize;
        // SAFETY: a live program; one number is written.
        self.calls.check(call, unsafe { size(self.raw, &raw mut len) })?;
        let mut bytes = vec![0u8; len];
        // SAFETY: a live program; `len` bytes are written, which is how long `bytes` is.
        self.calls.check(call, unsafe { get(self.raw, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for OwnedProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `create`, destroyed once.
        unsafe { (self.calls.destroy)(&raw mut self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn a_missing_library_is_an_error_that_names_what_was_tried() {
        let error = Nvrtc::find_among(&["libno-such-nvrtc.so.1", "libnor-this.so"]).unwrap_err();
        let CudaError::NoNvrtc { tried } = &error else { panic!("{error}") };
        assert_eq!(tried.len(), 2);
        let text = error.to_string();
        assert!(text.contains("libno-such-nvrtc.so.1") && text.contains("libnor-this.so"), "{text}");
        assert!(matches!(Nvrtc::find_among(&[] as &[&str]), Err(CudaError::NoNvrtc { .. })));
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn another_library_in_its_place_is_an_error_that_names_the_function() {
        let error = Nvrtc::find_among(&["libc.so.6"]).unwrap_err();
        assert!(
            matches!(&error, CudaError::MissingFunction(MissingFunction { function: "nvrtcVersion", .. })),
            "{error}"
        );
    }
}
