//! What the tests of several crates share: the PyTorch results in tests/data, and norms to compare
//! with them.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;

/// A file of tests/data/gpt2-tiny (see tests/data/README.md): that of the build or, on a machine
/// without the sources, below the current folder.
pub fn data(name: &str) -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = if built.exists() {
        built
    } else {
        Path::new("integration-tests")
    };
    let file = root.join("tests/data/gpt2-tiny").join(name);
    std::path::absolute(file).unwrap()
}

/// All fp32 tensors of a safetensors file.
pub fn tensors(name: &str) -> Vec<(String, Vec<f32>)> {
    let bytes = std::fs::read(data(name)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |data: &[u8]| {
        data.chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect()
    };
    file.iter()
        .map(|(name, view)| (name.to_owned(), floats(view.data())))
        .collect()
}

/// ‖a - b‖ / ‖b‖ in fp64.
pub fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |it: &mut dyn Iterator<Item = f64>| it.map(|x| x * x).sum::<f64>().sqrt();
    let diff = norm(
        &mut got
            .iter()
            .zip(want)
            .map(|(a, b)| f64::from(*a) - f64::from(*b)),
    );
    diff / norm(&mut want.iter().map(|x| f64::from(*x))).max(1e-30)
}

/// Little-endian u16 tokens of the oracle.
pub fn tokens() -> Vec<u32> {
    let bytes = std::fs::read(data("tokens.u16.bin")).unwrap();
    bytes
        .chunks_exact(2)
        .map(|b| u32::from(u16::from_le_bytes(b.try_into().unwrap())))
        .collect()
}
