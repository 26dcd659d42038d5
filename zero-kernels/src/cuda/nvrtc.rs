//! NVRTC, found at run time. All calls into the library are in this file.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;

use libloading::Library;

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
    /// Keeps `calls` valid.
    _library: Library,
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
    fn load(library: &Library, path: &str) -> Result<Self, CudaError> {
        macro_rules! get {
            ($symbol:literal) => {{
                // SAFETY: NVRTC's header gives the function this signature; the library outlives the pointer,
                // since `Nvrtc` holds both.
                let found = unsafe { library.get(concat!($symbol, "\0").as_bytes()) };
                *found.map_err(|e| CudaError::MissingSymbol {
                    library: path.to_owned(),
                    symbol: $symbol,
                    message: said(&e),
                })?
            }};
        }
        Ok(Self {
            version: get!("nvrtcVersion"),
            error_string: get!("nvrtcGetErrorString"),
            count_archs: get!("nvrtcGetNumSupportedArchs"),
            list_archs: get!("nvrtcGetSupportedArchs"),
            create: get!("nvrtcCreateProgram"),
            destroy: get!("nvrtcDestroyProgram"),
            compile: get!("nvrtcCompileProgram"),
            log_size: get!("nvrtcGetProgramLogSize"),
            log: get!("nvrtcGetProgramLog"),
            cubin_size: get!("nvrtcGetCUBINSize"),
            cubin: get!("nvrtcGetCUBIN"),
            ptx_size: get!("nvrtcGetPTXSize"),
            ptx: get!("nvrtcGetPTX"),
        })
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

/// The library's names, best first: `ZERO_NVRTC` alone if it is set, else the usual ones by the loader's own search,
/// in the toolkit that `CUDA_HOME` or `CUDA_PATH` names, and where toolkits are installed.
fn candidates(variable: impl Fn(&str) -> Option<String>) -> Vec<String> {
    if let Some(path) = variable("ZERO_NVRTC") {
        return vec![path];
    }
    let names: &[&str] = if cfg!(windows) {
        &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"]
    } else {
        &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    };
    let mut all: Vec<String> = names.iter().map(|&n| n.to_owned()).collect();
    let folder = if cfg!(windows) { "bin" } else { "lib64" };
    let installed = if cfg!(windows) { None } else { Some("/usr/local/cuda".to_owned()) };
    for home in ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|v| variable(v)).chain(installed) {
        all.extend(names.iter().map(|n| format!("{home}/{folder}/{n}")));
    }
    all
}

/// What the loader said, with its reasons.
fn said(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut reason = error.source();
    while let Some(error) = reason {
        text = format!("{text}: {error}");
        reason = error.source();
    }
    text
}

impl Nvrtc {
    /// Looks for the library: at `ZERO_NVRTC`, or by its usual names.
    ///
    /// # Errors
    /// [`CudaError::NoNvrtc`] names what was tried; or the library is not NVRTC.
    pub fn find() -> Result<Self, CudaError> {
        Self::find_among(&candidates(|name| std::env::var(name).ok().filter(|v| !v.is_empty())))
    }

    /// Loads the first library of `paths` that loads.
    ///
    /// # Errors
    /// As for [`Self::find`].
    pub fn find_among(paths: &[String]) -> Result<Self, CudaError> {
        let mut tried = Vec::new();
        for path in paths {
            // SAFETY: loading runs the library's initialisers; the names are NVRTC's, or the user's choice.
            match unsafe { Library::new(path) } {
                Ok(library) => return Self::new(library, path),
                Err(error) => tried.push(format!("{path}: {}", said(&error))),
            }
        }
        Err(CudaError::NoNvrtc { tried })
    }

    fn new(library: Library, path: &str) -> Result<Self, CudaError> {
        let calls = Calls::load(&library, path)?;
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: writes two numbers.
        calls.check("nvrtcVersion", unsafe { (calls.version)(&raw mut major, &raw mut minor) })?;
        // SAFETY: writes one number.
        calls.check("nvrtcGetNumSupportedArchs", unsafe { (calls.count_archs)(&raw mut count) })?;
        let mut archs: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: writes `count` numbers, which is how long `archs` is.
        calls.check("nvrtcGetSupportedArchs", unsafe { (calls.list_archs)(archs.as_mut_ptr()) })?;
        let supported = archs.into_iter().filter_map(|a| u32::try_from(a).ok()).collect();
        Ok(Self { path: path.to_owned(), version: (major, minor), supported, calls, _library: library })
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
    fn the_users_choice_is_the_only_one_tried() {
        let chosen = |name: &str| (name == "ZERO_NVRTC").then(|| "/opt/mine.so".to_owned());
        assert_eq!(candidates(chosen), ["/opt/mine.so"]);
        let usual = candidates(|name| (name == "CUDA_HOME").then(|| "/cuda".to_owned()));
        assert!(usual.len() >= 4 && usual.iter().any(|c| c.starts_with("/cuda/")), "{usual:?}");
        assert!(cfg!(windows) || usual.last().is_some_and(|c| c.starts_with("/usr/local/cuda/")), "{usual:?}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn a_missing_library_is_an_error_that_names_what_was_tried() {
        let error = Nvrtc::find_among(&["libno-such-nvrtc.so.1".into(), "libnor-this.so".into()]).unwrap_err();
        let CudaError::NoNvrtc { tried } = &error else { panic!("{error}") };
        assert_eq!(tried.len(), 2);
        let text = error.to_string();
        assert!(text.contains("libno-such-nvrtc.so.1") && text.contains("libnor-this.so"), "{text}");
        assert!(matches!(Nvrtc::find_among(&[]), Err(CudaError::NoNvrtc { .. })));
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn another_library_in_its_place_is_an_error_that_names_the_function() {
        let error = Nvrtc::find_among(&["libc.so.6".into()]).unwrap_err();
        assert!(matches!(error, CudaError::MissingSymbol { symbol: "nvrtcVersion", .. }), "{error}");
    }
}
